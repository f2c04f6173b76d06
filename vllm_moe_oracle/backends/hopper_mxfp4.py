"""This project's kernels for MXFP4 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

from ..core.decision import Numerics
from ..core.problem import Problem
from ._hopper import BATCHED_SLOWER, CAPABILITIES, HopperBackend


class HopperMxfp4(HopperBackend):
    """Weights stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "hopper_mxfp4"
    schemes = ("mxfp4",)
    capabilities = CAPABILITIES
    # Exact while the dtype holds a row's spread of scales, which `HopperBackend.numerics` says for float16.
    arithmetic = Numerics("converted exactly to {dtype} and scaled in {dtype}", "left in {dtype}")

    def why_not_batched(self, problem: Problem) -> str:
        """Slower than Marlin on batched tokens, as measured in bfloat16."""
        return BATCHED_SLOWER if problem.dtype == "bfloat16" else super().why_not_batched(problem)


BACKEND = HopperMxfp4()
