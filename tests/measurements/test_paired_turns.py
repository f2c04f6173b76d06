"""Two variants measured by turns."""

from __future__ import annotations

import math
import random

import pytest

from vllm_moe_oracle.measurements.paired_turns import _T_QUANTILES, compare


def test_a_ratio_and_its_inverse_count_alike() -> None:
    there, back = compare((1, 2, 4), (2, 3, 5)), compare((2, 3, 5), (1, 2, 4))
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high) and there.high == pytest.approx(1 / back.low)


def test_one_turn_has_no_interval() -> None:
    alone = compare((10,), (20,))
    assert (alone.ratio, alone.low, alone.high, alone.differs) == (2, None, None, False)


def test_drift_that_both_share_is_no_noise() -> None:
    drifting = compare((100, 50, 25), (110, 55, 27.5))
    assert drifting.differs and drifting.low == pytest.approx(1.1) and drifting.high == pytest.approx(1.1)


def test_equal_variants_seldom_differ() -> None:
    """At 95 % one in twenty comparisons of the same thing is wrong: within 5 standard deviations of that."""
    draw, count, turns = random.Random(0), 4000, 4
    wrong = sum(
        compare(
            [math.exp(draw.gauss(0, 0.05)) for _ in range(turns)], [math.exp(draw.gauss(0, 0.05)) for _ in range(turns)]
        ).differs
        for _ in range(count)
    )
    assert abs(wrong / count - 0.05) < 5 * math.sqrt(0.05 * 0.95 / count)


def test_quantiles_are_students() -> None:
    """By integration of the density: 2.5 % lie above each."""
    for freedom, quantile in enumerate(_T_QUANTILES, 1):
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

        def density(t: float, freedom: int = freedom, scale: float = scale) -> float:
            return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

        steps = 20000
        width = quantile / steps
        inside = width * sum(density((index + 0.5) * width) for index in range(steps))
        # The table is rounded to three decimals.
        assert abs(inside - 0.475) <= 0.0005 * density(quantile) + 1e-7, freedom


@pytest.mark.parametrize(
    ("base", "other"), [((), ()), ((1,), (1, 2)), ((0,), (1,)), ((1,), (math.inf,)), ((-1,), (1,))]
)
def test_what_cannot_be_compared_is_refused(base: tuple[float, ...], other: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        compare(base, other)
