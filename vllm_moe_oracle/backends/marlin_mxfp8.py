"""Marlin for MXFP8: weight-only, on every CUDA device with bfloat16.

The hidden size must be a multiple of 128. The intermediate size is zero-padded to a multiple of 64, as stock vLLM does.
"""

from __future__ import annotations

from ..core.decision import Numerics
from ..releases import min_versions
from ._marlin import INTERMEDIATE_MULTIPLE, MarlinMxBackend
from ._stock import EXPERTS
from ._stock_rules import activation_rule, lora_rule


class MarlinMxfp8(MarlinMxBackend):
    """vLLM's `MarlinExperts` on MXFP8 weights. Scales of 2**-127 count as zero."""

    name = "marlin_mxfp8"
    schemes = ("mxfp8",)
    stock_class = f"{EXPERTS}.marlin_moe:MarlinExperts"
    stock_weights = "fp8"  # how the class chooses the operator's weight type
    static_priority = 30.0
    padding = (1, INTERMEDIATE_MULTIPLE)
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    rules = (activation_rule(swigluoai_since=min_versions.MARLIN_UNINTERLEAVED), lora_rule(padding))


BACKEND = MarlinMxfp8()
