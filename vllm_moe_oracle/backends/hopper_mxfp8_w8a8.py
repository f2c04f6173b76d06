"""This project's kernels for MXFP8 weights and activations in MXFP8, exactly as such checkpoints declare, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import Problem
from ._hopper import HopperBackend
from .hopper_mxfp8 import HopperMxfp8


class HopperMxfp8W8A8(HopperBackend):
    """The same products as `hopper_mxfp8` on activations that were rounded to MXFP8 and back.

    Hopper's tensor cores know no scales per 32 columns, and exact promotion of each block's sum costs more than
    bfloat16 products do: rounding to MXFP8 and multiplying in bfloat16 gives the same numbers sooner.
    """

    name = "hopper_mxfp8_w8a8"
    schemes = HopperMxfp8.schemes
    # What adapters get of h would be rounded to MXFP8, too.
    capabilities = dataclasses.replace(HopperMxfp8.capabilities, lora=False)
    static_priority = 910.0
    # Rounded from each token as it comes, and from the activation's float32 values.
    activation_precision = "mxfp8"
    arithmetic = Numerics("converted exactly to {dtype} and scaled in {dtype}", "quantized to MXFP8 per token")

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """None: it is taken for its numbers, by name, and then with its own choice."""
        return ()


BACKEND = HopperMxfp8W8A8()
