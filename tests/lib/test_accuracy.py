"""The gate's statistics: the quantile is Student's, and error rates are those that it states."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.lib import accuracy, smollm2
from tests.lib.accuracy import Figures

RIGHT = Figures(80, 20480, 12.0, 12.0, 5e-6, 1e-5, 5e-6, 5e-6, 0.0, 1e-4, 0.999, 0.5, 0.5)


@pytest.mark.parametrize(("degrees", "value"), [(7, 4.785), (9, 4.297), (19, 3.579), (79, 3.195), (10**6, 3.0902)])
def test_the_quantile_is_students(degrees: int, value: float) -> None:
    """Tables of Student's t for 0.001."""
    assert accuracy.t_quantile(degrees) == pytest.approx(value, rel=2e-3)


def test_what_passes_and_what_is_shown_to_be_beyond() -> None:
    assert RIGHT.passes and not RIGHT.shown_beyond
    wide = dataclasses.replace(RIGHT, kl=9e-5, kl_limit=1.2e-4)
    assert not wide.passes and not wide.shown_beyond, "too few windows to say either"
    far = dataclasses.replace(RIGHT, kl=1e-2, kl_limit=1.2e-2, excess=1e-2, excess_half_width=2e-3)
    assert not far.passes and far.shown_beyond
    beside = dataclasses.replace(RIGHT, kl=1.5e-4, kl_limit=1.6e-4, excess=-2e-5, excess_half_width=1e-5)
    assert beside.passes and not beside.shown_beyond, "nearer than the baseline, which rounds too"
    worse = dataclasses.replace(beside, excess=2e-5)
    assert not worse.passes and worse.shown_beyond
    for change in (0.003, -0.003):
        worse = dataclasses.replace(RIGHT, nll=change)
        assert not worse.passes and worse.shown_beyond
    assert dataclasses.replace(RIGHT, accuracy=0.43).points_lost == pytest.approx(7.0)


def pass_rate(mean: float, spread: float, runs: int = 4000, windows: int = 80) -> float:
    """How often the gate passes a backend whose windows' mean differences are drawn from a normal distribution."""
    rng = np.random.default_rng(0)
    passed = 0
    for _ in range(runs):
        nll, width = accuracy.limits(rng.normal(mean, spread, windows).tolist())
        passed += dataclasses.replace(RIGHT, nll=nll, nll_half_width=width).passes
    return passed / runs


def test_the_stated_error_rates() -> None:
    """At the limit at most `ALPHA` pass, give or take the simulation; two half-widths inside, nearly all."""
    spread = 0.002
    limit, half_width = math.log1p(accuracy.MAX_PERPLEXITY), accuracy.t_quantile(79) * spread / math.sqrt(80)
    assert pass_rate(limit, spread) <= accuracy.ALPHA + 4 * math.sqrt(accuracy.ALPHA / 4000)
    assert pass_rate(limit - 2 * half_width, spread) >= 1 - accuracy.ALPHA - 4 * math.sqrt(accuracy.ALPHA / 4000)


def test_the_divergence_is_of_distributions() -> None:
    first = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0]]), -1)
    second = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.5]]), -1)
    p, q = first.exp().double(), second.exp().double()
    assert float(accuracy._divergence(first, second)) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)
    assert float(accuracy._divergence(first, first)) == 0


@pytest.mark.full
@pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing() or "everything is there")
def test_there_is_enough_text_and_it_is_named() -> None:
    tokens, pieces = accuracy.windows()
    assert tokens.shape == (80, accuracy.CONTEXT + accuracy.WINDOW + 1) and 80 * accuracy.WINDOW >= 20_000
    assert len({tuple(each) for each in tokens.tolist()}) == 80
    assert len({piece.sha256 for piece in pieces}) == len(pieces) > 10
    few, _ = accuracy.windows(4)
    assert torch.equal(few, tokens[:4])
