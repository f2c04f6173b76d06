"""This project's kernels for MXFP8 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

import dataclasses

from ..oracle.decision import Numerics
from ..oracle.problem import MX_BLOCK, Problem
from ._own import LIMITS, OwnBackend


class OwnMxfp8(OwnBackend):
    """Weights stay as they are in memory and become bfloat16 in registers; activations are left alone."""

    name = "own_mxfp8"
    schemes = ("mxfp8",)
    limits = dataclasses.replace(LIMITS, bits=(8,), groups=(MX_BLOCK,))

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights up to a row's spread of scales that bfloat16 can hold."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")


BACKEND = OwnMxfp8()
