"""Humming's indexed kernels for integer weights: stock's first choice on sm_90 without expert parallelism."""

from __future__ import annotations

from ._humming import RULES, kind_rule
from ._humming_wna16 import HummingWna16


class Humming(HummingWna16):
    """vLLM's `HummingIndexedExperts` on integer weights."""

    name = "humming_wna16"
    kind = "indexed"
    stock_class = "HummingIndexedExperts"
    rules = (*RULES, kind_rule("indexed"))


BACKEND = Humming()
