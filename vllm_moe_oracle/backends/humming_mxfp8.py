"""Humming's indexed kernels for MXFP8, weight-only."""

from __future__ import annotations

from ._humming import MXFP8, HummingBackend


class HummingMxfp8(HummingBackend, weights=MXFP8, kernels="indexed"):
    """vLLM's `HummingIndexedExperts` on MXFP8 weights."""

    name = "humming_mxfp8"
    static_priority = 62.0
    preferred_priority = 27.0


BACKEND = HummingMxfp8()
