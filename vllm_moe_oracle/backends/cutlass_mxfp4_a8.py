"""FlashInfer's CUTLASS kernels for MXFP4 with MXFP8 activations on sm_100 and newer, in block-scaled tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..oracle.decision import Numerics, Plan
from ..oracle.problem import ActivationPrecision, Problem
from ._contract import Builder, Tensors
from ._cutlass import RULES, CutlassMxfp4, limits, ordered

if TYPE_CHECKING:
    from torch import Tensor


class CutlassMxfp4Mxfp8(CutlassMxfp4):
    """vLLM's `FlashInferExperts` on MXFP8 activations."""

    name = "cutlass_mxfp4_a8"
    place = "cutlass_mxfp8"
    limits = limits(((100, 110), (120, 130)))
    rules = RULES

    def activations(self, problem: Problem) -> ActivationPrecision:
        """MXFP8 in both products."""
        return "mxfp8"

    def numerics(self, problem: Problem) -> Numerics:
        """Block-scaled tensor cores."""
        return Numerics("MXFP4, in block-scaled tensor cores", "quantised to MXFP8 per token, in both products")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, puts up before gate, tiles scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales uint8 `[2 I, H/32]` and `[H, I/32]`, biases
            bfloat16 `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        from ..layouts.scales import tile_scales

        converted = ordered(expert, problem, plan)
        for name in ("w13_scale", "w2_scale"):
            converted[name] = tile_scales(converted[name])
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class; vLLM's prepare step quantises what goes in, its scales in tiles too."""
        return builder.stock(self.stock_class, inputs="mxfp8", swizzled=True, plan=plan)


BACKEND = CutlassMxfp4Mxfp8()
