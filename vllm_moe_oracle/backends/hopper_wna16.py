"""This project's kernels for integer weights, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import Problem
from ._hopper import BATCHED_SLOWER, CAPABILITIES, HopperBackend


class HopperWna16(HopperBackend):
    """Codes stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "hopper_wna16"
    schemes = ("wna16",)
    capabilities = dataclasses.replace(
        CAPABILITIES, bits=(4, 8), groups=(-1, 32, 64, 128), zero_points=True, act_orders=("none", "static")
    )

    def why_not_batched(self, problem: Problem) -> str:
        """Measured for symmetric 4-bit integers in groups, in bfloat16."""
        scheme = problem.scheme
        plain = scheme.group_size > 0 and not scheme.zero_points and scheme.act_order == "none"
        measured = scheme.bits == 4 and plain and problem.dtype == "bfloat16"
        return BATCHED_SLOWER if measured else super().why_not_batched(problem)

    def numerics(self, problem: Problem) -> Numerics:
        """Group scales multiply float32 sums where tiles allow it, else weights, which are then rounded once."""
        scaled = "scales applied to the float32 sums"
        if problem.scheme.group_size != -1:
            scaled += f", or to the weights, which rounds each once to {problem.dtype}"
        return Numerics(f"integer codes converted exactly to {problem.dtype}; {scaled}", f"left in {problem.dtype}")


BACKEND = HopperWna16()
