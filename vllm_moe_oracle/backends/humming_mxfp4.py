"""Humming's indexed kernels for MXFP4, weight-only."""

from __future__ import annotations

from ..releases import min_versions
from ._humming import MXFP4_CAPABILITIES, MXFP4_DEPARTURES, MXFP4_RULES, HummingBackend, kernel_kind_rule
from ._stock import EXPERTS, Departure


class HummingMxfp4(HummingBackend):
    """vLLM's `HummingIndexedExperts` on MXFP4 weights."""

    name = "humming_mxfp4"
    schemes = ("mxfp4",)
    stock_class = f"{EXPERTS}.fused_humming_moe:HummingIndexedExperts"
    static_priority = 72.0
    preferred_priority = 52.0
    capabilities = MXFP4_CAPABILITIES
    departures = (
        *MXFP4_DEPARTURES,
        Departure((), "brings a humming-kernels that nobody here has looked at", before=min_versions.HUMMING),
    )
    rules = (*MXFP4_RULES, kernel_kind_rule("indexed"))


BACKEND = HummingMxfp4()
