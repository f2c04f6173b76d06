"""Humming's grouped kernels for integer weights, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import (
    GROUPED_DEPARTURE,
    WNA16_CAPABILITIES,
    WNA16_DEPARTURES,
    WNA16_RULES,
    HummingBackend,
    kernel_kind_rule,
)
from ._stock import EXPERTS


class HummingWna16Grouped(HummingBackend):
    """vLLM's `HummingGroupedExperts` on integer weights."""

    name = "humming_wna16_grouped"
    schemes = ("wna16",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingGroupedExperts"
    static_priority = 61.0
    preferred_priority = 26.0
    capabilities = WNA16_CAPABILITIES
    departures = (*WNA16_DEPARTURES, GROUPED_DEPARTURE)
    rules = (*WNA16_RULES, kernel_kind_rule("grouped"))


BACKEND = HummingWna16Grouped()
