"""Numbers that users write: in environment variables, after ``--set``, in options, and inside of words."""

from __future__ import annotations

import math
import re

_DECIMAL, _COUNT = re.compile(r"-?[0-9]+(?:\.[0-9]+)?"), re.compile("[0-9]{1,18}")

WHAT_IS_READ = "Write digits from 0 to 9, with a point where it has a fraction"
"""The remedy for a text that `parse_decimal` does not read."""


def parse_decimal(text: str) -> float:
    """A number from its decimal digits; NaN for every other text.

    Python reads ``1_0``, ``+5``, `` 5 ``, ``1e3``, ``inf`` and digits of other scripts as numbers, too: a slip of
    the hand would become a setting.
    """
    return float(text) if _DECIMAL.fullmatch(text) else math.nan


def parse_count(text: str) -> int:
    """A whole number of at most 18 decimal digits; -1 for every other text."""
    return int(text) if _COUNT.fullmatch(text) else -1
