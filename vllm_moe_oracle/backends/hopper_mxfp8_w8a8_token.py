"""This project's kernels for MXFP8 weights on fp8 tensor cores, with activations in e4m3, on Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ._contract import Tensors
from ._hopper_fp8 import ACCUMULATION, ACTIVATION_NUMERICS, FP8_CAPABILITIES, HopperFp8Backend

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.fp8_weights import Fp8Weights

MAX_BLOCK_ERROR = 2.0**-9
"""Largest relative L2 error of a block of 32 weights: what rounding them to bfloat16 may change."""


class HopperMxfp8W8A8Token(HopperFp8Backend):
    """Weights stay e4m3, with one power of two a row instead of one per 32; activations lose what e4m3 does not hold.

    Hopper's tensor cores know no scales per 32 columns, and summing up blocks of 32 outside of them takes as long as
    products in bfloat16 do. Numbers of a block with a smaller scale than the row's largest become smaller codes, of
    which only subnormal ones lose bits. Of normal numbers under scales eight binades apart a block loses 2**-13.
    """

    name = "hopper_mxfp8_w8a8_token"
    schemes = ("mxfp8",)
    capabilities = FP8_CAPABILITIES
    arithmetic = Numerics(
        "rescaled to e4m3 with a power of two per row, blocks of 32 exact to 2**-9, as bfloat16 is",
        ACTIVATION_NUMERICS,
        ACCUMULATION,
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The kernels' storage order.

        Returns:
            ``w13`` e4m3 `[R, H]`, ``w2`` `[H, I]`, their scales float32 `[R]` and `[H]`, biases the same; R: 2 I, or I
            of a layer that is not gated. A row that does not fit (`validate_weights`) may have NaN for a scale.
        """
        from ..kernels.fp8_weights import pack_fp8_expert

        converted: dict[str, Tensor] = {}
        for name in ("w13", "w2"):
            codes, scale, bias = pack_fp8_expert(
                name, expert[name], expert[f"{name}_scale"], expert.get(f"{name}_bias"), problem.activation.gated
            )
            converted |= {name: codes, f"{name}_scale": scale}
            if bias is not None:
                converted[f"{name}_bias"] = bias
        return converted

    def _stored(self, tensors: Tensors, problem: Problem) -> Fp8Weights:
        import torch

        from ..kernels.fp8_weights import Fp8Matrix, Fp8Weights

        w13, w2 = (
            Fp8Matrix(tensors[name], tensors[f"{name}_scale"], tensors.get(f"{name}_bias")) for name in ("w13", "w2")
        )
        return Fp8Weights(w13, w2, getattr(torch, problem.dtype), problem.activation.gated)

    def validate_weights(self, expert: Tensors, problem: Problem) -> str:
        """The row with the block that would lose most, where that is more than `MAX_BLOCK_ERROR`."""
        import torch

        from ..layouts import e4m3_folding

        for name in ("w13", "w2"):
            errors = e4m3_folding.fold_mxfp8(expert[name], expert[f"{name}_scale"].view(torch.uint8))[2]
            if errors.max() > MAX_BLOCK_ERROR:
                row = int(errors.argmax())
                scales = expert[f"{name}_scale"].view(torch.uint8)[row]
                return (
                    f"row {row} of {name}, whose scales go from 2**{int(scales.min()) - 127} to "
                    f"2**{int(scales.max()) - 127}, would be off by {float(errors[row]):.1e} of a block of 32 "
                    f"with one scale, and {MAX_BLOCK_ERROR:.1e} is allowed; "
                    f"{int((errors > MAX_BLOCK_ERROR).sum())} of {len(errors)} rows of this "
                    f"matrix exceed that. hopper_mxfp8 takes such weights, with activations left in {problem.dtype}"
                )
        return ""


BACKEND = HopperMxfp8W8A8Token()
