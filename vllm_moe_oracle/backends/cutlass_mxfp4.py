"""FlashInfer's CUTLASS kernels for MXFP4 with 16-bit activations on sm_90: weights become bfloat16 in registers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..core.capabilities import package_at_least
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Device, Problem
from ._contract import Tensors
from ._flashinfer_cutlass import CAPABILITIES, CutlassMxfp4Backend, pad_and_swap_halves

if TYPE_CHECKING:
    from torch import Tensor

    from ..layouts.cutlass_mixed import LayoutVersion

_FOLDED_LAYOUT_SINCE = "0.6.18"
"""First FlashInfer whose kernel reads the bits of eight codes permuted, and folded scales."""


class CutlassMxfp4Bf16(CutlassMxfp4Backend):
    """vLLM's `FlashInferExperts` on 16-bit activations."""

    name = "cutlass_mxfp4"
    stock_kernel = "FLASHINFER_CUTLASS_MXFP4_BF16"
    static_priority = 40.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    capabilities = dataclasses.replace(CAPABILITIES, compute_capabilities=((90, 91),))

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """Both sizes, zero-padded to multiples of 128, and the layout that the installed FlashInfer reads."""
        installed = device.packages.get("flashinfer-python", _FOLDED_LAYOUT_SINCE)
        folded = package_at_least(installed, _FOLDED_LAYOUT_SINCE)
        return dataclasses.replace(super().plan(problem, device), layout="folded" if folded else "interleaved")

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, puts up before gate, interleaves codes and scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales uint8 `[2 I/64, H/128, 16, 16]` and
            `[H/64, I/128, 16, 16]` (before FlashInfer 0.6.18 `[H/128, 8 I]` and `[I/128, 4 H]`), biases bfloat16
            `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        from ..layouts.cutlass_mixed import interleave_codes, interleave_scales

        converted = pad_and_swap_halves(expert, problem, plan)
        order: LayoutVersion = "interleaved" if plan.layout == "interleaved" else "folded"
        for name in ("w13", "w2"):
            converted[name] = interleave_codes(converted[name], order)
            converted[f"{name}_scale"] = interleave_scales(converted[f"{name}_scale"], order)
        return converted


BACKEND = CutlassMxfp4Bf16()
