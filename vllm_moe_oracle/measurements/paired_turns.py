"""Statistics of two variants that were measured by turns.

Each turn measures both variants one after the other, so what drifts slowly (temperature, other users of a machine)
falls on both. The ratio within a turn is one observation; its logarithm is averaged, because a ratio and its inverse
should count alike. Student's t gives the interval of the mean from the spread between turns alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

CONFIDENCE = 0.95

_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on. The last one, slightly too wide, counts for
more."""


class PairedComparison(msgspec.Struct, frozen=True):
    """One figure of both variants.

    Attributes:
        base: the first variant's figures, by turn.
        other: the second one's.
        ratio: geometric mean of other over base.
        low: lower end of the ratio's interval; None for a single turn, which says nothing about noise.
        high: its upper end.
    """

    base: tuple[float, ...]
    other: tuple[float, ...]
    ratio: float
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether the interval excludes that both are equal."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def compare(base: Sequence[float], other: Sequence[float]) -> PairedComparison:
    """Compares the figures of two variants, turn by turn.

    Args:
        base: positive figures of the first variant, by turn.
        other: those of the second one, as many.
    """
    if len(base) != len(other) or not base:
        raise ValueError(f"{len(base)} and {len(other)} turns cannot be compared")
    if any(not (0 < each < math.inf) for each in (*base, *other)):
        raise ValueError("figures must be positive and finite")
    logs = [math.log(after / before) for before, after in zip(base, other, strict=True)]
    mean = statistics.fmean(logs)
    low = high = None
    if len(logs) > 1:
        quantile = _T_QUANTILES[min(len(logs) - 1, len(_T_QUANTILES)) - 1]
        half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - half), math.exp(mean + half)
    return PairedComparison(tuple(base), tuple(other), math.exp(mean), low, high)
