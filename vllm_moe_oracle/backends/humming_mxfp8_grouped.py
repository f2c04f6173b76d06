"""Humming's grouped kernels for MXFP8, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import (
    GROUPED_DEPARTURE,
    MXFP8_CAPABILITIES,
    MXFP8_DEPARTURES,
    MXFP8_RULES,
    HummingBackend,
    kernel_kind_rule,
)
from ._stock import EXPERTS


class HummingMxfp8Grouped(HummingBackend):
    """vLLM's `HummingGroupedExperts` on MXFP8 weights."""

    name = "humming_mxfp8_grouped"
    schemes = ("mxfp8",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingGroupedExperts"
    static_priority = 61.0
    preferred_priority = 26.0
    capabilities = MXFP8_CAPABILITIES
    departures = (*MXFP8_DEPARTURES, GROUPED_DEPARTURE)
    rules = (*MXFP8_RULES, kernel_kind_rule("grouped"))


BACKEND = HummingMxfp8Grouped()
