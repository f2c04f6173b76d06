"""Marlin for MXFP4: weight-only, on every CUDA device with bfloat16.

Stock vLLM pads the hidden size to a multiple of 256 and the intermediate size to one of 128; this backend pads to 128
and 64, which is what the operator needs.
"""

from __future__ import annotations

from ..core.decision import Numerics
from ..core.problem import Device, Problem
from ..releases import min_versions
from ._marlin import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE, MarlinMxBackend
from ._stock import EXPERTS, StockDifference
from ._stock_priority import marlin_mxfp4_priority
from ._stock_rules import lora_rule, swigluoai_rule


class MarlinMxfp4(MarlinMxBackend):
    """vLLM's `MarlinExperts` on MXFP4 weights. Scales of 2**-127 count as zero."""

    name = "marlin_mxfp4"
    schemes = ("mxfp4",)
    stock_class = f"{EXPERTS}.marlin_moe:MarlinExperts"
    static_priority = 60.0
    padding = (HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE)
    padded_layer = True
    stock_differences = (
        *MarlinMxBackend.stock_differences,
        StockDifference(("sizes",), "the operator needs whole tiles only"),
    )
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    rules = (swigluoai_rule(halves_since=min_versions.MARLIN_UNINTERLEAVED), lora_rule(padding))

    def priority(self, problem: Problem, device: Device) -> float:
        """vLLM constructs Marlin directly for some packings; see `marlin_mxfp4_priority`."""
        return marlin_mxfp4_priority(self.static_priority, problem, device)


BACKEND = MarlinMxfp4()
