"""This project's kernels for MXFP8 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

from ..core.decision import Numerics
from ..core.problem import Problem
from ._hopper import CAPABILITIES, HopperBackend


class HopperMxfp8(HopperBackend):
    """Weights stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "hopper_mxfp8"
    schemes = ("mxfp8",)
    capabilities = CAPABILITIES
    # Exact up to a row's spread of scales that the dtype can hold; `HopperBackend.numerics` says float16's.
    arithmetic = Numerics("converted exactly to {dtype} and scaled in {dtype}", "left in {dtype}")

    def why_not_batched(self, problem: Problem) -> str:
        """vLLM has no kernels for MXFP8 in this format on Hopper."""
        return ""


BACKEND = HopperMxfp8()
