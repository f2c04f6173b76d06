"""A CPU's speed by format: rounds are compared with themselves, and the interval holds its confidence."""

from __future__ import annotations

import itertools

import pytest

from tests.tools import accuracy_tables, cpu_serving


@pytest.mark.parametrize("count", [6, 9, 12])
def test_the_interval_misses_the_median_as_rarely_as_it_says(count: int) -> None:
    """By every way in which values can lie below and above the true median, zero, all equally likely."""
    missed = narrower = 0
    for signs in itertools.product((-1, 1), repeat=count):
        values = [sign * (1 + place) for place, sign in enumerate(signs)]
        _, low, high = cpu_serving.median_interval(values)
        missed += not low < 0 < high
        inside = sorted(values)
        place = inside.index(low) + 1
        narrower += not inside[place] < 0 < inside[-1 - place]
    assert missed / 2**count <= 0.05 < narrower / 2**count


def test_too_few_rounds_have_no_interval() -> None:
    with pytest.raises(ValueError, match="95% from 5 values"):
        cpu_serving.median_interval([1.0] * 5)


def test_a_ratio_is_one_rounds_own() -> None:
    """Other work slows whole rounds, and medians of different rounds would be compared without pairs."""
    plain = [10.0, 20.0, 40.0, 10.0, 20.0, 40.0]
    steps = {"1": {"bf16": plain, "mxfp8": [each / 2 for each in plain]}}
    found = cpu_serving.figures(steps, {"bf16": [], "mxfp8": ["cpu_dequantized"]})
    assert found["mxfp8"]["times_as_fast"] == {"1": [2.0, 2.0, 2.0]}
    assert found["bf16"]["times_as_fast"] == {"1": [1.0, 1.0, 1.0]} and found["bf16"]["ms_per_step"] == {"1": 20.0}


def test_engines_take_turns_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def seconds(engine: str, batch: int, turn: int) -> float:
        order.append((engine, turn))
        return float(turn)

    monkeypatch.setattr(cpu_serving, "seconds_of", seconds)
    found = cpu_serving.rounds_of({"a": "a", "b": "b"}, 1, 2)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {name: [1e3 / cpu_serving.TOKENS, 2e3 / cpu_serving.TOKENS] for name in "ab"}


def test_the_page_tells_ratios_with_their_intervals() -> None:
    each = {"ms_per_step": {"1": 20.0}, "times_as_fast": {"1": [1.0, 1.0, 1.0]}, "backends": []}
    each["rounds"] = {"1": [19.0, 20.0, 23.4]}
    other = each | {"ms_per_step": {"1": 10.0}, "times_as_fast": {"1": [1.98, 1.9, 2.1]}, "backends": ["a"]}
    device = {"name": "a CPU", "features": ["avx2"]}
    conditions = {"device": device, "cores": 2, "threads": "", "load": [0.1, 1.0]}
    page = accuracy_tables._serving({"conditions": conditions, "formats": {"bf16": each, "mxfp8": other}})
    assert "| bf16 | stock vLLM | 50.0 tokens/s (1.00) |" in page
    assert "| mxfp8 | a | 100.0 tokens/s (1.98, 1.90 to 2.10) |" in page
    assert "bf16's own 3 rounds: 19 to 23 ms a step." in page
