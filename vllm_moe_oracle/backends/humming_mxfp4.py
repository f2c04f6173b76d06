"""Humming's indexed kernels for MXFP4, weight-only."""

from __future__ import annotations

from ..releases import min_versions
from ._humming import MXFP4, HummingBackend
from ._stock import StockDifference


class HummingMxfp4(HummingBackend, weights=MXFP4, kernels="indexed"):
    """vLLM's `HummingIndexedExperts` on MXFP4 weights."""

    name = "humming_mxfp4"
    static_priority = 72.0
    preferred_priority = 52.0
    more_differences = (
        StockDifference((), "brings a humming-kernels that nobody here has looked at", before=min_versions.HUMMING),
    )


BACKEND = HummingMxfp4()
