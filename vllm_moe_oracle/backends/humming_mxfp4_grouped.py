"""Humming's grouped kernels for MXFP4, weight-only: the kernels for experts that are spread over ranks."""

from __future__ import annotations

from ._humming import MXFP4, HummingBackend


class HummingMxfp4Grouped(HummingBackend, weights=MXFP4, kernels="grouped"):
    """vLLM's `HummingGroupedExperts` on MXFP4 weights."""

    name = "humming_mxfp4_grouped"
    static_priority = 71.0
    preferred_priority = 51.0


BACKEND = HummingMxfp4Grouped()
