"""This project's kernels for MXFP4 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import MX_BLOCK, Problem
from ._contract import Tensors
from ._hopper import BATCHED_SLOWER, CAPABILITIES, HopperBackend, float16_refusal


class HopperMxfp4(HopperBackend):
    """Weights stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "hopper_mxfp4"
    schemes = ("mxfp4",)
    capabilities = dataclasses.replace(CAPABILITIES, bits=(4,), groups=(MX_BLOCK,))
    # Exact: float16 weights with too wide scales are refused, bfloat16 holds any spread but the very widest.
    arithmetic = Numerics("converted exactly to {dtype} and scaled in {dtype}", "left in {dtype}")

    def why_not_batched(self, problem: Problem) -> str:
        """Measured in bfloat16."""
        return BATCHED_SLOWER if problem.dtype == "bfloat16" else super().why_not_batched(problem)

    def validate_weights(self, expert: Tensors, problem: Problem) -> str:
        """Where float16 cannot hold the weights."""
        return float16_refusal("mxfp4", expert, problem)


BACKEND = HopperMxfp4()
