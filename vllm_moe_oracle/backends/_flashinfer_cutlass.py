"""What the two FlashInfer CUTLASS backends for MXFP4 share.

vLLM's class is `FlashInferExperts`. Its kernel reads up rows, then gate rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.capabilities import Capabilities, Rule
from ..core.decision import ShardPlan
from ..core.problem import E8M0_BIAS, Device, Problem
from ..releases import min_versions
from ._contract import Tensors
from ._flashinfer_trtllm import EVEN_SPLIT_RULE, LINEAR_PLACEMENT_RULE, NO_EXPERT_MAP
from ._padding import pad_expert
from ._stock import EXPERTS, StockBackend, StockDifference
from ._stock_priority import gpt_oss_priority
from ._stock_rules import GPT_OSS_ACTIVATION

if TYPE_CHECKING:
    from torch import Tensor

SIZE_MULTIPLE = 128

CAPABILITIES = Capabilities(
    packages={"flashinfer-python": "0.6.11", "vllm": min_versions.OLDEST_RELEASE},
    dtypes=("bfloat16",),
    gated=("silu", "swigluoai"),
    activation_params=True,
    bias=True,
    hidden_multiple=SIZE_MULTIPLE,
    intermediate_multiple=SIZE_MULTIPLE,
    apply_router_weight_on_input=True,
)
"""Layers that both kernels support; a backend adds its compute capabilities."""


def _differs_from_built_in(problem: Problem) -> bool:
    built_in, activation = GPT_OSS_ACTIVATION, problem.activation
    return (activation.alpha, activation.beta) != (built_in.alpha, built_in.beta) or activation.limit is None


RULES = (
    Rule(
        "activation.parameters.vllm_version",
        lambda problem, device: (
            not min_versions.vllm_at_least_on(device, min_versions.CUTLASS_ACTIVATION_PARAMS)
            and _differs_from_built_in(problem)
        ),
        lambda problem, device: (
            f"computes with alpha {GPT_OSS_ACTIVATION.alpha:g} and beta {GPT_OSS_ACTIVATION.beta:g}, and with a limit, "
            f"for every MXFP4 layer before vLLM {min_versions.CUTLASS_ACTIVATION_PARAMS}; the layer has "
            f"{problem.activation}"
        ),
        f"vLLM {min_versions.CUTLASS_ACTIVATION_PARAMS} or newer",
    ),
    Rule(
        "activation.rows.vllm_version",
        lambda problem, device: (
            not min_versions.vllm_at_least_on(device, min_versions.CUTLASS_ACTIVATION_PARAMS)
            and problem.activation.name == "swigluoai"
            and not problem.activation.interleaved
        ),
        lambda problem, device: (
            f"vLLM's class takes swigluoai over two halves of rows since {min_versions.CUTLASS_ACTIVATION_PARAMS}"
        ),
        f"vLLM {min_versions.CUTLASS_ACTIVATION_PARAMS} or newer",
    ),
    EVEN_SPLIT_RULE,
    LINEAR_PLACEMENT_RULE,
)
"""Rules of both. Before that release the class has gpt-oss's constants built in; a limit that the model sets replaces
the built-in one."""


class CutlassMxfp4Backend(StockBackend):
    """A backend over vLLM's `FlashInferExperts` on MXFP4 weights."""

    schemes = ("mxfp4",)
    vllm_names = ("flashinfer_cutlass",)
    stock_class = f"{EXPERTS}.flashinfer_cutlass_moe:FlashInferExperts"
    padding = (SIZE_MULTIPLE, SIZE_MULTIPLE)
    padded_layer = True
    rules = RULES
    stock_differences = (
        NO_EXPERT_MAP,
        StockDifference(("gelu_tanh",), "no checkpoint in MXFP4 has it, and the class was never run with it"),
        StockDifference(("relu2_no_mul",), "vLLM's conversion takes the rows for two halves"),
        StockDifference(("silu",), "computed with gpt-oss's constants", before=min_versions.CUTLASS_ACTIVATION_PARAMS),
    )

    def priority(self, problem: Problem, device: Device) -> float:
        """The position in vLLM's list for gpt-oss; see `gpt_oss_priority`."""
        return gpt_oss_priority(self.static_priority, problem, device, only=True, quantizes=bool(self.quantize_inputs))


def pad_and_swap_halves(expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
    """Canonical tensors of one expert, padded to the plan's sizes, up rows before gate rows, biases in bfloat16.

    Args:
        expert: canonical tensors of one expert. Not modified.
        problem: the layer.
        plan: the padded sizes.
    """
    import torch

    from ..layouts.gate_up import swap_gate_up

    converted = {}
    for name, tensor in pad_expert(expert, problem, plan, scale=E8M0_BIAS).items():
        swapped = swap_gate_up(tensor) if name.startswith("w13") else tensor
        converted[name] = swapped.to(torch.bfloat16) if name.endswith("_bias") else swapped
    return converted
