"""The tables of golden decisions, one for each scheme."""

from __future__ import annotations

from tests.lib import stock_choice_mxfp4, stock_choice_mxfp8, stock_choice_wna16

TABLES = (stock_choice_mxfp8.GOLDEN, stock_choice_mxfp4.GOLDEN, stock_choice_wna16.GOLDEN)
