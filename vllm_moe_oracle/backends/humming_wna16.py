"""Humming's indexed kernels for integer weights, weight-only."""

from __future__ import annotations

from ._humming import WNA16_CAPABILITIES, WNA16_DEPARTURES, WNA16_RULES, HummingBackend, kernel_kind_rule
from ._stock import EXPERTS


class HummingWna16(HummingBackend):
    """vLLM's `HummingIndexedExperts` on integer weights."""

    name = "humming_wna16"
    schemes = ("wna16",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingIndexedExperts"
    static_priority = 62.0
    preferred_priority = 27.0
    capabilities = WNA16_CAPABILITIES
    departures = WNA16_DEPARTURES
    rules = (*WNA16_RULES, kernel_kind_rule("indexed"))


BACKEND = HummingWna16()
