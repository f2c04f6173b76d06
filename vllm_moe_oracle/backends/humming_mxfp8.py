"""Humming's indexed kernels for MXFP8, weight-only: stock's first choice on sm_90 without expert parallelism."""

from __future__ import annotations

from ._humming import RULES, UNGATED, Humming, kind_rule


class HummingMxfp8(Humming):
    """vLLM's `HummingIndexedExperts` on MXFP8 weights."""

    name = "humming_mxfp8"
    kind = "indexed"
    stock_class = "HummingIndexedExperts"
    rules = (*RULES, UNGATED, kind_rule("indexed"))


BACKEND = HummingMxfp8()
