"""What the FlashInfer TRTLLM-gen backends share: limits of the kernels, rules, and the layout of MXFP8 and MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.capabilities import Capabilities, Rule
from ..core.decision import ShardPlan
from ..core.problem import E8M0_BIAS, Problem
from ..releases import min_versions
from ._contract import Tensors
from ._padding import pad_expert
from ._stock import StockDifference

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_MULTIPLE = 256
INTERMEDIATE_MULTIPLE = 128

# FlashInfer 0.7.2, trtllm_fused_moe_kernel_launcher.cu, `check_routing` of the block-scale launcher: it is run for
# routed ids too, as if they came from renormalized top-k.
EXPERTS_MULTIPLE = 4
MAX_TOP_K = 32

MX_CAPABILITIES = Capabilities(
    compute_capabilities=((100, 110),),
    packages={"flashinfer-python": "", "vllm": min_versions.OLDEST_RELEASE},
    dtypes=("bfloat16",),
    gated=("silu", "swigluoai"),
    activation_params=True,
    hidden_multiple=HIDDEN_MULTIPLE,
    intermediate_multiple=INTERMEDIATE_MULTIPLE,
    experts_multiple=EXPERTS_MULTIPLE,
    max_top_k=MAX_TOP_K,
    apply_router_weight_on_input=True,
)
"""MXFP8 and MXFP4 layers that the kernels support on routed ids."""


EVEN_SPLIT_RULE = Rule(
    "expert_parallel.uneven",
    lambda problem, device: problem.num_experts % problem.parallel.ep != 0,
    lambda problem, device: (
        f"computes a rank's first expert as its rank times its number of experts, which is wrong if "
        f"{problem.num_experts} experts are spread unevenly over {problem.parallel.ep} ranks "
        f"({problem.num_experts} mod {problem.parallel.ep} = {problem.num_experts % problem.parallel.ep})"
    ),
)
"""vLLM's classes over FlashInfer pass no map of experts to the kernel."""

LINEAR_PLACEMENT_RULE = Rule(
    "expert_parallel.placement",
    lambda problem, device: problem.parallel.placement != "linear",
    lambda problem, device: (
        "computes a rank's first expert as its rank times its number of experts, which is wrong if experts are placed "
        "on ranks round-robin (--expert-placement-strategy round_robin)"
    ),
    "--expert-placement-strategy linear",
)
"""For the same reason a rank's experts must be neighbors. vLLM's classes do not check it."""

NO_EXPERT_MAP = StockDifference(("eplb",), "the class passes the kernel no map of experts, so that none may move")
"""Why backends refuse EPLB although vLLM's classes over FlashInfer claim it."""

TOP_K_BELOW_EXPERTS_RULE = Rule(
    "experts.more_than_top_k",
    lambda problem, device: problem.top_k >= problem.num_experts,
    lambda problem, device: (
        f"needs more experts than a token chooses; the layer has {problem.num_experts} and top-{problem.top_k}"
    ),
)

MX_RULES = (TOP_K_BELOW_EXPERTS_RULE, EVEN_SPLIT_RULE, LINEAR_PLACEMENT_RULE)
"""Rules of the MXFP8 and MXFP4 kernels."""


def to_trtllm_layout(expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
    """One expert's tensors as TRTLLM-gen reads them.

    They are padded; gate and up are swapped and alternate, in gated experts; rows are shuffled; scales are in tiles.

    Args:
        expert: canonical tensors of one expert. Not modified.
        problem: the layer, in MXFP8 or MXFP4.
        plan: the padded sizes.

    Returns:
        The tensors by the same names, with the plan's sizes, biases in float32.
    """
    import torch

    from ..layouts.gate_up import interleave_gate_up, swap_gate_up
    from ..layouts.scales import swizzle_scales
    from ..layouts.trtllm import shuffle_rows

    converted = {}
    for name, padded in pad_expert(expert, problem, plan, scale=E8M0_BIAS).items():
        tensor = padded.to(torch.float32) if name.endswith("_bias") else padded
        values = tensor if name.endswith("_bias") else tensor.view(torch.uint8)
        if problem.activation.gated and name.startswith("w13"):
            # The kernel's first half is up and its second half gate.
            values = interleave_gate_up(swap_gate_up(values))
        values = shuffle_rows(values)
        converted[name] = swizzle_scales(values) if name.endswith("_scale") else values.view(tensor.dtype)
    return converted
