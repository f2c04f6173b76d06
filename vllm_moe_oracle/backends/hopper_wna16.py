"""This project's kernels for integer weights, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import Device, Problem
from ._hopper import BATCHED_SLOWER, CAPABILITIES, HopperBackend


class HopperWna16(HopperBackend):
    """Codes stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "hopper_wna16"
    schemes = ("wna16",)
    capabilities = dataclasses.replace(
        CAPABILITIES, bits=(4, 8), groups=(-1, 32, 64, 128), zero_points=True, act_orders=("none", "static")
    )

    def only_by_name(self, problem: Problem, device: Device) -> str:
        """Measured behind a batched all-to-all: symmetric 4-bit integers in groups, in bfloat16."""
        scheme = problem.scheme
        measured = scheme.bits == 4 and scheme.group_size > 0 and not scheme.zero_points and scheme.act_order == "none"
        if problem.parallel.is_batched and not problem.lora and measured and problem.dtype == "bfloat16":
            return BATCHED_SLOWER
        return super().only_by_name(problem, device)

    def numerics(self, problem: Problem) -> Numerics:
        """Group scales multiply float32 sums where tiles allow it, else weights, which are then rounded once."""
        scaled = "scales applied to the float32 sums"
        if problem.scheme.group_size != -1:
            scaled += f", or to the weights, which rounds each once to {problem.dtype}"
        return Numerics(f"integer codes converted exactly to {problem.dtype}; {scaled}", f"left in {problem.dtype}")


BACKEND = HopperWna16()
