"""Humming's grouped kernels for MXFP4, weight-only: what vLLM runs under expert parallelism, since 0.30."""

from __future__ import annotations

from ._humming import kind_rule
from ._humming_mxfp4 import RULES_MXFP4, HummingMxfp4


class HummingMxfp4Grouped(HummingMxfp4):
    """vLLM's `HummingGroupedExperts` on MXFP4 weights."""

    name = "humming_mxfp4_grouped"
    kind = "grouped"
    stock_class = "HummingGroupedExperts"
    rules = (*RULES_MXFP4, kind_rule("grouped"))


BACKEND = HummingMxfp4Grouped()
