"""Humming's indexed kernels for MXFP4, weight-only."""

from __future__ import annotations

from ._humming import kind_rule
from ._humming_mxfp4 import RULES_MXFP4, HummingMxfp4


class HummingMxfp4Indexed(HummingMxfp4):
    """vLLM's `HummingIndexedExperts` on MXFP4 weights."""

    name = "humming_mxfp4"
    kind = "indexed"
    stock_class = "HummingIndexedExperts"
    rules = (*RULES_MXFP4, kind_rule("indexed"))


BACKEND = HummingMxfp4Indexed()
