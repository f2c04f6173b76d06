"""Humming's grouped kernels for MXFP4, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import (
    GROUPED_DEPARTURE,
    MXFP4_CAPABILITIES,
    MXFP4_DEPARTURES,
    MXFP4_RULES,
    HummingBackend,
    kernel_kind_rule,
)
from ._stock import EXPERTS


class HummingMxfp4Grouped(HummingBackend):
    """vLLM's `HummingGroupedExperts` on MXFP4 weights."""

    name = "humming_mxfp4_grouped"
    schemes = ("mxfp4",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingGroupedExperts"
    static_priority = 71.0
    preferred_priority = 51.0
    capabilities = MXFP4_CAPABILITIES
    departures = (*MXFP4_DEPARTURES, GROUPED_DEPARTURE)
    rules = (*MXFP4_RULES, kernel_kind_rule("grouped"))


BACKEND = HummingMxfp4Grouped()
