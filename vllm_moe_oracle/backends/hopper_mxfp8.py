"""This project's kernels for MXFP8 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import MX_BLOCK, Problem
from ._hopper import CAPABILITIES, HopperBackend


class HopperMxfp8(HopperBackend):
    """Weights stay as they are in memory and become bfloat16 in registers; activations are left alone."""

    name = "hopper_mxfp8"
    schemes = ("mxfp8",)
    capabilities = dataclasses.replace(CAPABILITIES, bits=(8,), groups=(MX_BLOCK,))
    # Exact up to a row's spread of scales that bfloat16 can hold.
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")

    def why_not_batched(self, problem: Problem) -> str:
        """vLLM has no kernels for MXFP8 in this format on Hopper."""
        return ""


BACKEND = HopperMxfp8()
