"""Humming's grouped kernels for MXFP8, weight-only: stock's choice on sm_90 under expert parallelism, since 0.30."""

from __future__ import annotations

from ._humming import RULES, UNGATED, Humming, kind_rule


class HummingMxfp8Grouped(Humming):
    """vLLM's `HummingGroupedExperts` on MXFP8 weights."""

    name = "humming_mxfp8_grouped"
    kind = "grouped"
    stock_class = "HummingGroupedExperts"
    rules = (*RULES, UNGATED, kind_rule("grouped"))


BACKEND = HummingMxfp8Grouped()
