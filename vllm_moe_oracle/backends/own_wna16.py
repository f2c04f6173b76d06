"""This project's kernels for integer weights, on Hopper."""

from __future__ import annotations

import dataclasses

from ..oracle.decision import Numerics
from ..oracle.problem import Problem
from ._own import LIMITS, OwnBackend


class OwnWna16(OwnBackend):
    """Codes stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "own_wna16"
    schemes = ("wna16",)
    limits = dataclasses.replace(
        LIMITS, bits=(4, 8), groups=(-1, 32, 64, 128), zero_points=True, act_orders=("none", "static")
    )

    def numerics(self, problem: Problem) -> Numerics:
        """Group scales multiply float32 sums where tiles allow it, else weights, which are then rounded once."""
        scaled = "the sums scaled in float32, or the weights, rounded once" if problem.scheme.group_size != -1 else (
            "the sums scaled in float32"
        )  # fmt: skip
        return Numerics(f"codes converted exactly to {problem.dtype}, {scaled}", f"left in {problem.dtype}")


BACKEND = OwnWna16()
