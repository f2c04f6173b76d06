"""Humming's grouped kernels for MXFP8, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import MXFP8, HummingBackend


class HummingMxfp8Grouped(HummingBackend, weights=MXFP8, kernels="grouped"):
    """vLLM's `HummingGroupedExperts` on MXFP8 weights."""

    name = "humming_mxfp8_grouped"
    static_priority = 61.0
    preferred_priority = 26.0


BACKEND = HummingMxfp8Grouped()
