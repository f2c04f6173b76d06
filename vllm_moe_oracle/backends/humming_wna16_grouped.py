"""Humming's grouped kernels for integer weights, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import WNA16, HummingBackend


class HummingWna16Grouped(HummingBackend, weights=WNA16, kernels="grouped"):
    """vLLM's `HummingGroupedExperts` on integer weights."""

    name = "humming_wna16_grouped"
    static_priority = 61.0
    preferred_priority = 26.0


BACKEND = HummingWna16Grouped()
