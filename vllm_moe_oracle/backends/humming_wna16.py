"""Humming's indexed kernels for integer weights, weight-only."""

from __future__ import annotations

from ._humming import WNA16, HummingBackend


class HummingWna16(HummingBackend, weights=WNA16, kernels="indexed"):
    """vLLM's `HummingIndexedExperts` on integer weights."""

    name = "humming_wna16"
    static_priority = 62.0
    preferred_priority = 27.0


BACKEND = HummingWna16()
