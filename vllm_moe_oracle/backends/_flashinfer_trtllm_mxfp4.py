"""What the four FlashInfer TRTLLM-gen backends for MXFP4 share.

They take 16-bit or MXFP8 activations, each with and without routing inside the kernel, and have one layout. vLLM's
classes are `TrtLlmMxfp4ExpertsModular` and `TrtLlmMxfp4ExpertsMonolithic`. They pass biases, alpha, beta and limit to
the kernel and crop the output to the unpadded hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from ..core.capabilities import Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import ActivationPrecision, Device, Problem
from ..core.sharding import padded_plan
from ..releases import min_versions
from ._contract import Tensors
from ._flashinfer_trtllm import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE, MX_CAPABILITIES, MX_RULES, to_trtllm_layout
from ._stock import StockBackend, StockDifference
from ._stock_priority import gpt_oss_priority
from ._stock_rules import HASHED_ROUTING_RULE

if TYPE_CHECKING:
    from torch import Tensor

MXFP8_ARITHMETIC = Numerics("MXFP4, in block-scaled tensor cores", "quantized to MXFP8 per token, in both products")
"""Numerics of the kernels that take MXFP8 activations."""

CAPABILITIES = dataclasses.replace(MX_CAPABILITIES, bias=True)
"""Layers that all four support on routed ids."""

ROUTING_CAPABILITIES = dataclasses.replace(
    CAPABILITIES, routing_methods=("renormalize", "renormalizenaive", "deepseekv3"), apply_router_weight_on_input=False
)
"""Layers that the two which route inside their kernel support."""

RULES = (
    Rule(
        "activation.rows",
        lambda problem, device: problem.activation.name == "swigluoai" and not problem.activation.interleaved,
        lambda problem, device: (
            "vLLM's class takes swigluoai only from layers whose rows alternate gate and up; here they are two halves"
        ),
    ),
    *MX_RULES,
)
"""Rules of all four."""

ROUTING_RULES = (
    *RULES,
    Rule(
        "routing.vllm_version",
        lambda problem, device: (
            problem.routing.method == "deepseekv3"
            and not min_versions.vllm_at_least_on(device, min_versions.TRTLLM_MXFP4_GROUPED_TOPK)
        ),
        lambda problem, device: (
            f"passes groups and correction bias to its kernel since vLLM {min_versions.TRTLLM_MXFP4_GROUPED_TOPK}"
        ),
    ),
    HASHED_ROUTING_RULE,
    Rule(
        "data_parallel",
        lambda problem, device: problem.parallel.dp > 1,
        lambda problem, device: (
            f"routes tokens of its own rank only, the layer's come from {problem.parallel.dp} data-parallel ranks"
        ),
    ),
)
"""Rules of the two that route inside their kernel."""


class TrtllmMxfp4Backend(StockBackend):
    """A backend over one of vLLM's classes over TRTLLM-gen on MXFP4 weights and 16-bit activations."""

    schemes = ("mxfp4",)
    vllm_names = ("flashinfer_trtllm",)
    activation_precision: ClassVar[ActivationPrecision] = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    padded_layer = True
    capabilities = CAPABILITIES
    rules: ClassVar[tuple[Rule, ...]] = RULES
    stock_differences: ClassVar[tuple[StockDifference, ...]] = (
        StockDifference(("situ",), "needs a kernel that FlashInfer does not give to everybody"),
    )

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """Both sizes, zero-padded: hidden to 256, intermediate to 128 (on older releases to 256), as stock does."""
        new = min_versions.vllm_at_least_on(device, min_versions.TRTLLM_MXFP4_ODD_MULTIPLES)
        return padded_plan(problem, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE if new else 2 * INTERMEDIATE_MULTIPLE)

    def priority(self, problem: Problem, device: Device) -> float:
        """The position in vLLM's lists, both of which have the kernels that quantize; see `gpt_oss_priority`."""
        quantizes = bool(self.quantize_inputs)
        return gpt_oss_priority(self.static_priority, problem, device, only=not quantizes, quantizes=quantizes)

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """The same for all four."""
        return f"trtllm_mxfp4 {plan.hidden_size}x{plan.intermediate_size}"

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, swaps and alternates gate and up, shuffles rows, tiles scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales viewed as float8_e4m3fn, which FlashInfer
            expects, `[2 I, H/32]` and `[H, I/32]`, biases float32 `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        import torch

        converted = to_trtllm_layout(expert, problem, plan)
        for name in ("w13_scale", "w2_scale"):
            converted[name] = converted[name].view(torch.float8_e4m3fn)
        return converted
