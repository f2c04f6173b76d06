"""FlashInfer's CUTLASS kernels for MXFP4 with MXFP8 activations on sm_100 and newer, in block-scaled tensor cores."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ._contract import Tensors
from ._flashinfer_cutlass import CAPABILITIES, CutlassMxfp4Backend, pad_and_swap_halves

if TYPE_CHECKING:
    from torch import Tensor


class CutlassMxfp4Mxfp8(CutlassMxfp4Backend):
    """vLLM's `FlashInferExperts` on MXFP8 activations."""

    name = "cutlass_mxfp4_a8"
    stock_kernel = "FLASHINFER_CUTLASS_MXFP4_MXFP8"
    static_priority = 41.0
    activation_precision = "mxfp8"
    arithmetic = Numerics("MXFP4, in block-scaled tensor cores", "quantized to MXFP8 per token, in both products")
    quantize_inputs = "mxfp8"
    swizzle_input_scales = True
    capabilities = dataclasses.replace(CAPABILITIES, compute_capabilities=((100, 110), (120, 130)))

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, puts up before gate, tiles scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales uint8 `[2 I, H/32]` and `[H, I/32]`, biases
            bfloat16 `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        from ..layouts.scales import swizzle_scales

        converted = pad_and_swap_halves(expert, problem, plan)
        for name in ("w13_scale", "w2_scale"):
            converted[name] = swizzle_scales(converted[name])
        return converted


BACKEND = CutlassMxfp4Mxfp8()
