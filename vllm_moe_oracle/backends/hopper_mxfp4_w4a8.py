"""This project's kernels for MXFP4 weights on fp8 tensor cores, with activations in e4m3, on Hopper."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..core.decision import Numerics, ShardPlan, TokenRange
from ..core.problem import Problem
from . import hopper_mxfp4
from ._contract import Tensors
from ._hopper_fp8 import ACCUMULATION, ACTIVATION_NUMERICS, FP8_CAPABILITIES, HopperFp8Backend

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.weights import PackedWeights

MIN_ROWS = 120
"""Tokens of an expert from which these kernels are faster than `hopper_mxfp4`: of two layers on an H200 1.18 and 1.04
times at 128, 0.93 and 0.88 times at 64 (kernels/RESULTS.md)."""


class HopperMxfp4W4A8(HopperFp8Backend):
    """Weights stay as `hopper_mxfp4` stores them and become e4m3 in registers, exactly or not at all; activations lose
    what e4m3 does not hold.

    Both backends have one layout, so a layer can run this one for many tokens, and `hopper_mxfp4` for few, on the same
    tensors.
    """

    name = "hopper_mxfp4_w4a8"
    schemes = ("mxfp4",)
    # The codes' bits are stored for bfloat16: float16 has an order of its own.
    capabilities = dataclasses.replace(FP8_CAPABILITIES, dtypes=("bfloat16",), ungated=())
    arithmetic = Numerics("converted exactly to e4m3 with a power of two per row", ACTIVATION_NUMERICS, ACCUMULATION)

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """That of `hopper_mxfp4`."""
        return hopper_mxfp4.BACKEND.layout(problem, plan)

    def few_tokens(self, problem: Problem) -> TokenRange | None:
        """`hopper_mxfp4`, up to `MIN_ROWS` tokens an expert, unless one kernel must run all numbers of tokens."""
        most = MIN_ROWS * problem.num_experts // problem.top_k
        return None if problem.batch_invariant else TokenRange(hopper_mxfp4.BACKEND.name, most)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """As `hopper_mxfp4`."""
        return hopper_mxfp4.BACKEND.convert(expert, problem, plan)

    def validate_weights(self, expert: Tensors, problem: Problem) -> str:
        """The first row with scales further apart than e4m3 has normal numbers for."""
        import torch

        from ..layouts.wgmma_fragments import MAX_E4M3_SPREAD, scale_spread

        found = {name: scale_spread(expert[name], expert[f"{name}_scale"]) for name in ("w13", "w2")}
        # Both matrices in one call: each call makes the host wait for the GPU.
        if not (torch.cat([*found.values()]) > MAX_E4M3_SPREAD).any():
            return ""
        name = next(name for name, spread in found.items() if (spread > MAX_E4M3_SPREAD).any())
        spread = found[name]
        row = int((spread > MAX_E4M3_SPREAD).nonzero()[0])
        return (
            f"row {row} of {name} has blocks whose scales are {int(spread[row])} binades below the row's largest, and "
            f"e4m3 holds weights of up to {MAX_E4M3_SPREAD}; {int((spread > MAX_E4M3_SPREAD).sum())} of "
            f"{len(spread)} rows of this matrix exceed that. hopper_mxfp4 takes such weights, with activations left in "
            f"{problem.dtype}"
        )

    def _stored(self, tensors: Tensors, problem: Problem) -> PackedWeights:
        return hopper_mxfp4.BACKEND.stored(tensors, problem)


BACKEND = HopperMxfp4W4A8()
