"""Humming's indexed kernels for MXFP8, weight-only."""

from __future__ import annotations

from ._humming import MXFP8_CAPABILITIES, MXFP8_DEPARTURES, MXFP8_RULES, HummingBackend, kernel_kind_rule
from ._stock import EXPERTS


class HummingMxfp8(HummingBackend):
    """vLLM's `HummingIndexedExperts` on MXFP8 weights."""

    name = "humming_mxfp8"
    schemes = ("mxfp8",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingIndexedExperts"
    static_priority = 62.0
    preferred_priority = 27.0
    capabilities = MXFP8_CAPABILITIES
    departures = MXFP8_DEPARTURES
    rules = (*MXFP8_RULES, kernel_kind_rule("indexed"))


BACKEND = HummingMxfp8()
