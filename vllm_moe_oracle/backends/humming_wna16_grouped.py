"""Humming's grouped kernels for integer weights: stock's choice on sm_90 under expert parallelism, since 0.30."""

from __future__ import annotations

from ._humming import RULES, kind_rule
from ._humming_wna16 import HummingWna16


class HummingGrouped(HummingWna16):
    """vLLM's `HummingGroupedExperts` on integer weights."""

    name = "humming_wna16_grouped"
    kind = "grouped"
    stock_class = "HummingGroupedExperts"
    rules = (*RULES, kind_rule("grouped"))


BACKEND = HummingGrouped()
