"""What the FlashInfer TRTLLM-gen backends share: limits and padding of those for MXFP8, and one layout for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp8_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._stock import activation_rule

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_MULTIPLE = 256
INTERMEDIATE_MULTIPLE = 128
ONE = 127
"""The e8m0 code of 1.0, which padded scales get."""

# FlashInfer 0.7.2, trtllm_fused_moe_kernel_launcher.cu, `check_routing` of the block-scale launcher: it is run for
# routed ids too, as if they came from renormalised top-k.
EXPERTS_MULTIPLE = 4
MAX_TOP_K = 32


def limits(ungated: tuple[str, ...], max_experts: int, routing_methods: tuple[str, ...] | None) -> Limits:
    """The limits of both, with what is different between them.

    Args:
        ungated: activations of non-gated experts.
        max_experts: most experts over all ranks.
        routing_methods: what the kernel routes by itself; None when it is given routed ids.
    """
    return Limits(
        capabilities=((100, 110),),
        packages={"flashinfer-python": "", "vllm": since.TRTLLM_MXFP8},
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        ungated=ungated,
        parameters=True,
        # The kernel has biases; vLLM's classes do not pass them.
        bias=False,
        bits=(8,),
        groups=(MX_BLOCK,),
        hidden_multiple=HIDDEN_MULTIPLE,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        experts_multiple=EXPERTS_MULTIPLE,
        max_experts=max_experts,
        max_top_k=MAX_TOP_K,
        routing_methods=routing_methods,
    )


def _even_split(problem: Problem) -> bool:
    return problem.num_experts % problem.parallel.ep == 0


EVEN_SPLIT = Rule(
    "expert_parallel.uneven",
    lambda problem, device: not _even_split(problem),
    lambda problem, device: (
        f"takes a rank's first expert for its rank times its number of experts, which is wrong where "
        f"{problem.num_experts} experts are spread unevenly over {problem.parallel.ep} ranks "
        f"({problem.num_experts} mod {problem.parallel.ep} = {problem.num_experts % problem.parallel.ep})"
    ),
)
"""vLLM's classes over FlashInfer give the kernel no map of experts."""

IN_ORDER = Rule(
    "expert_parallel.placement",
    lambda problem, device: problem.parallel.placement != "linear",
    lambda problem, device: (
        "takes a rank's first expert for its rank times its number of experts, which is wrong where experts are dealt "
        "out to ranks by turns (--expert-placement-strategy round_robin)"
    ),
    "--expert-placement-strategy linear",
)
"""The same, where a rank's experts are not neighbours. vLLM's classes do not ask."""

MORE_EXPERTS_THAN_TOP_K = Rule(
    "experts.more_than_top_k",
    lambda problem, device: problem.top_k >= problem.num_experts,
    lambda problem, device: (
        f"needs more experts than a token chooses, the layer has {problem.num_experts} and top-{problem.top_k}"
    ),
)

RULES = (
    activation_rule(swigluoai_since=since.TRTLLM_MXFP8_PARAMETERS),
    Rule(
        "activation.parameters.since",
        lambda problem, device: problem.activation.limit is not None and not _passes_limits(device),
        lambda problem, device: (
            f"passes the limit {problem.activation.limit:g} to its kernel since vLLM {since.TRTLLM_MXFP8_PARAMETERS}"
        ),
    ),
    MORE_EXPERTS_THAN_TOP_K,
    EVEN_SPLIT,
    IN_ORDER,
)
"""Rules of both."""


def _passes_limits(device: Device) -> bool:
    return since.reached(since.TRTLLM_MXFP8_PARAMETERS, device)


class Trtllm(Backend):
    """MXFP8 weights and activations through one of vLLM's classes over FlashInfer's TRTLLM-gen kernels."""

    schemes = ("mxfp8",)
    vllm_names = ("flashinfer_trtllm",)

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded: hidden to 256, intermediate to 128, as stock does."""
        return padded(problem, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's first, the monolithic class before the modular one."""
        return mxfp8_place("trtllm_monolithic" if self.monolithic else "trtllm", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """MXFP8 in both products."""
        return "mxfp8"

    def numerics(self, problem: Problem) -> Numerics:
        """Block-scaled tensor cores."""
        return Numerics("MXFP8, in block-scaled tensor cores", "quantised to MXFP8 per token, in both products")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, swaps and alternates gate and up (gated experts only), shuffles rows, tiles scales.

        Returns:
            ``w13`` float8_e4m3fn `[R, H]`, ``w2`` `[H, I]`, their scales uint8 `[R, H/32]` and `[H, I/32]`, with the
            plan's padded sizes.
        """
        return arranged(expert, problem, plan)

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class; vLLM's prepare step quantises what goes in."""
        return builder.stock(self.stock_class, inputs="mxfp8", plan=plan)


def arranged(expert: Tensors, problem: Problem, plan: Plan, per_byte: int = 1) -> dict[str, Tensor]:
    """One expert's tensors as TRTLLM-gen reads them: padded, gate and up swapped and alternating (gated experts only),
    rows shuffled, scales in tiles.

    Args:
        expert: canonical tensors of one expert.
        problem: the layer.
        plan: the sizes that they are zero-padded to.
        per_byte: weights in a byte: 1 for MXFP8, 2 for MXFP4.

    Returns:
        The tensors by the same names, shapes with the plan's sizes, biases in float32.
    """
    import torch

    from ..layouts.pad import pad_columns, pad_rows
    from ..layouts.rows import alternate_halves, shuffle_rows, swap_halves
    from ..layouts.scales import tile_scales

    gated = problem.activation.gated
    hidden, inner, halves = plan.hidden_size, plan.intermediate_size, 2 if gated else 1
    full = {
        "w13": pad_rows(pad_columns(expert["w13"], hidden // per_byte), inner, halves),
        "w13_scale": pad_rows(pad_columns(expert["w13_scale"], hidden // MX_BLOCK, ONE), inner, halves, ONE),
        "w2": pad_rows(pad_columns(expert["w2"], inner // per_byte), hidden),
        "w2_scale": pad_rows(pad_columns(expert["w2_scale"], inner // MX_BLOCK, ONE), hidden, value=ONE),
    }
    if "w13_bias" in expert:
        full["w13_bias"] = pad_rows(expert["w13_bias"].to(torch.float32), inner, halves)
        full["w2_bias"] = pad_rows(expert["w2_bias"].to(torch.float32), hidden)
    converted = {}
    for name, tensor in full.items():
        values = tensor if name.endswith("_bias") else tensor.view(torch.uint8)
        if gated and name.startswith("w13"):
            # The kernel's first half is up, its second gate; a non-gated first product has no halves.
            values = alternate_halves(swap_halves(values))
        values = shuffle_rows(values)
        converted[name] = tile_scales(values) if name.endswith("_scale") else values.view(tensor.dtype)
    return converted
