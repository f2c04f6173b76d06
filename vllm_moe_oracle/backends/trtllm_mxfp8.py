"""FlashInfer's TRTLLM-gen kernels for MXFP8 on sm_100 and sm_103, on routed ids.

vLLM's class `TrtLlmFp8ExpertsModular` claims ReLU² but never passes the activation to the kernel, which then computes
SwiGLU. Experts without a gate are rejected here and left to the monolithic class.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from ..core.capabilities import Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ..releases import min_versions
from ._contract import Tensors
from ._flashinfer_trtllm import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE, MX_CAPABILITIES, MX_RULES, to_trtllm_layout
from ._stock import EXPERTS, StockBackend, StockDifference
from ._stock_rules import activation_rule, limit_rule

if TYPE_CHECKING:
    from torch import Tensor

RULES = (
    activation_rule(swigluoai_since=min_versions.TRTLLM_MXFP8_ACTIVATION_PARAMS),
    limit_rule("kernel", min_versions.TRTLLM_MXFP8_ACTIVATION_PARAMS),
    *MX_RULES,
)


class TrtllmMxfp8(StockBackend):
    """vLLM's `TrtLlmFp8ExpertsModular` on MXFP8 weights and activations."""

    name = "trtllm_mxfp8"
    schemes = ("mxfp8",)
    vllm_names = ("flashinfer_trtllm",)
    stock_class = f"{EXPERTS}.trtllm_fp8_moe:TrtLlmFp8ExpertsModular"
    stock_kernel = "FLASHINFER_TRTLLM"
    static_priority = 11.0
    activation_precision = "mxfp8"
    arithmetic = Numerics("MXFP8, in block-scaled tensor cores", "quantized to MXFP8 per token, in both products")
    padding = (HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE)
    quantize_inputs = "mxfp8"
    padded_layer = True
    # The kernel has biases; vLLM's classes do not pass them.
    capabilities = dataclasses.replace(
        MX_CAPABILITIES,
        packages={"flashinfer-python": "", "vllm": min_versions.TRTLLM_MXFP8},
        max_experts=2048,
    )
    rules: ClassVar[tuple[Rule, ...]] = RULES
    stock_differences: ClassVar[tuple[StockDifference, ...]] = (
        StockDifference(("relu2_no_mul",), "the class never passes the activation to the kernel"),
        StockDifference((), "the class takes SiLU alone", before=min_versions.TRTLLM_MXFP8),
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, swaps and alternates gate and up (gated experts only), shuffles rows, tiles scales.

        Returns:
            ``w13`` float8_e4m3fn `[R, H]`, ``w2`` `[H, I]`, their scales uint8 `[R, H/32]` and `[H, I/32]`, with the
            plan's padded sizes.
        """
        return to_trtllm_layout(expert, problem, plan)


BACKEND = TrtllmMxfp8()
