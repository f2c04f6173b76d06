"""Choosing by measurement: of the candidates that compute the same numbers, the one that takes the least time.

Pure: the times come in as a `MeasurementSet`. Times are compared as ratios (a geometric mean over token counts), so
that one long prefill does not outweigh every decode step. The static choice stays unless another candidate saves more
of its time than the setting `min_time_saving`. A saving is ``1 - time / time of the slower one``. Predicted times have
an error: a candidate must then save so much that its advantage also exceeds the error of the two times' ratio. A time
that was filled in at one number of tokens has an error as far as the objective weighs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.decision import FilledTimes, TimeComparison, TokenRange, backend_in
from ..core.measurement_set import Latencies, MeasurementSet
from ..core.objectives import Objective
from ..settings import env_var

MAX_TOKEN_RATIO = 4.0
"""The largest ratio of neighboring token counts over which a time is interpolated, and the largest ratio over which the
last one is extrapolated: kernels change their tiles at every factor of two to four."""

_UNWEIGHTED_SHARE = 0.01
"""Weight of all measured token counts together, beside the objective's, when two backends share a layer."""

_CONTENDER_ERRORS = 2.0
"""A candidate with filled-in times counts as possibly fastest if its time less this many standard deviations is at most
the winner's."""

CanShare = Callable[[str, str], bool]
"""Whether two backends may share one layer, each for a range of token counts."""


def _never(one: str, other: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """The outcome.

    Attributes:
        backend: the winner; the static choice when measurements do not decide.
        explanation: why, in a sentence.
        comparison: the figures; None when neither measured nor predicted times decide.
        token_ranges: which backend runs which numbers of tokens, when two share the layer; else empty.
    """

    backend: str
    explanation: str
    comparison: TimeComparison | None = None
    token_ranges: tuple[TokenRange, ...] = ()


class LatencyCurve:
    """The times of one backend, in microseconds by routing and number of tokens.

    Args:
        times: measured, and filled in.
        filled: those that were filled in.
    """

    def __init__(self, times: Latencies, filled: Latencies | None = None) -> None:
        self.points = {routing: dict(counts) for routing, counts in times.items() if counts}
        self.filled = filled or {}

    @property
    def measured(self) -> dict[int, float]:
        """The measured times under uniform routing."""
        filled = self.filled.get("uniform", {})
        return {count: us for count, us in self.points["uniform"].items() if count not in filled}

    def coverage_gap(self, objective: Objective, routing: str = "uniform") -> str:
        """Why the measured token counts do not cover the objective's; empty when they do."""
        counts = sorted(self.points.get(routing, {}))
        if not counts:
            return "measured at no number of tokens"
        if counts[0] > objective.weights[0][0]:
            return f"measured from {counts[0]} tokens on; the objective begins at {objective.weights[0][0]}"
        if objective.largest > counts[-1] * MAX_TOKEN_RATIO:
            return f"measured up to {counts[-1]} tokens; the objective goes to {objective.largest}"
        for low, high in itertools.pairwise(counts):
            inside = any(low < count < high for count, _ in objective.weights)
            if inside and high > low * MAX_TOKEN_RATIO:
                return f"measured at {low} and next at {high} tokens, which is too wide a gap"
        return ""

    def time_at(self, routing: str, tokens: int) -> float:
        """Microseconds at a number of tokens: log-linear between neighbors, proportional beyond the largest."""
        points = self.points[routing]
        if tokens in points:
            return points[tokens]
        counts = sorted(points)
        below = [count for count in counts if count < tokens]
        above = [count for count in counts if count > tokens]
        if not above:
            return points[below[-1]] * tokens / below[-1]
        if not below:
            return points[above[0]]
        low, high = below[-1], above[0]
        part = math.log(tokens / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(points[low]) + part * math.log(points[high]))

    def score(self, objective: Objective, routings: Sequence[str]) -> float:
        """Mean logarithm of the time over the objective, with every routing weighted alike."""
        return math.fsum(
            weight * math.log(self.time_at(routing, tokens)) / len(routings)
            for routing in routings
            for tokens, weight in objective.weights
        )

    def filled_weight(self, objective: Objective, routings: Sequence[str]) -> float:
        """By how much the score grows if the logarithms of all times that were filled in grow by one."""
        points = {
            routing: {
                count: us * (math.e if count in self.filled.get(routing, {}) else 1.0) for count, us in counts.items()
            }
            for routing, counts in self.points.items()
        }
        return LatencyCurve(points).score(objective, routings) - self.score(objective, routings)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The candidates that can be compared, and why the others cannot.

    Attributes:
        curves: by backend, in static order.
        missing: why a backend has no usable times, by name.
        unknown: backends that were never measured.
        remarks: the same for people, after the remarks of the measurements.
    """

    curves: dict[str, LatencyCurve]
    missing: dict[str, str]
    unknown: list[str]
    remarks: tuple[str, ...]


def choose_fastest(
    measurements: MeasurementSet,
    accepted: Sequence[str],
    objective: Objective,
    min_time_saving: float,
    can_share: CanShare = _never,
) -> MeasuredChoice:
    """Chooses among accepted candidates that compute the same numbers.

    Args:
        measurements: what was measured.
        accepted: names of the candidates, in static order; not empty.
        objective: the token counts that matter, with their weights.
        min_time_saving: fraction of the static choice's time that another candidate must save to replace it, e.g. 0.03.
        can_share: whether two backends may share the layer: they read the same weights, or a second layout is allowed.
    """
    static = accepted[0]
    if not measurements.times and not measurements.failures:
        return MeasuredChoice(static, "; ".join(measurements.remarks))
    found = _comparable(measurements, accepted, objective)
    undecided = _undecided_choice(measurements, accepted, found)
    if undecided is not None:
        return undecided
    base = next(iter(found.curves))
    routings = _compared_routings(found.curves, objective)
    scores = {name: curve.score(objective, routings) for name, curve in found.curves.items()}
    filled = _filled_errors(measurements, found.curves, objective, routings)
    errors = {
        name: math.hypot(measurements.ratio_error(base, name), filled.get(base, 0.0), filled.get(name, 0.0))
        for name in scores
        if name != base
    }
    # The fastest that saves enough, else the fastest; ties go to the first in static order.
    by_time = sorted(scores, key=lambda name: scores[name])
    savings = {name: 1.0 - math.exp(scores[name] - scores[base]) for name in by_time}
    limits = {name: required_saving(min_time_saving, errors.get(name, 0.0)) for name in by_time}
    better = [name for name in by_time if name != base and savings[name] > limits[name]]
    fastest = (better or by_time)[0]
    winner = fastest if better else base
    saving, needed = savings[fastest], limits[fastest]
    counts = sorted(set.intersection(*(set(curve.measured) for curve in found.curves.values())))
    outcome = _outcome(found, objective, measurements, base, winner, counts, min_time_saving)
    outcome = dataclasses.replace(
        outcome,
        time_saved=saving if winner == fastest else 0.0,
        filled=_contenders(measurements, filled, scores, base, winner),
        ratio_error=errors.get(fastest, 0.0),
    )
    explanation = _explain(winner, static, fastest, saving, needed, outcome)
    # Two backends share a layer for a few percent at some numbers of tokens, which predictions do not resolve.
    can_share = _never if outcome.is_predicted else can_share
    token_ranges = _split_by_tokens(winner, found.curves, counts, objective, min_time_saving, can_share)
    if token_ranges:
        both = _score_together(token_ranges, found.curves, objective, routings)
        more = -math.expm1(both - scores[winner])
        explanation = f"{explanation}; by number of tokens: {', '.join(map(str, token_ranges))}"
        explanation += f", which takes {more:.1%} less time than {winner} alone"
        outcome = _outcome(found, objective, measurements, base, winner, counts, min_time_saving, token_ranges)
        outcome = dataclasses.replace(outcome, time_saved=-math.expm1(both - scores[base]))
    return MeasuredChoice(winner, explanation, outcome, token_ranges)


def _undecided_choice(
    measurements: MeasurementSet, accepted: Sequence[str], found: _Comparison
) -> MeasuredChoice | None:
    """What is chosen where the times do not suffice for a comparison; None where they do.

    Without the static choice's times nothing can be compared: the measured backends may all be slower. One that failed
    when it was measured is passed over all the same, unless all did, or it may only compile slowly.
    """
    static = accepted[0]
    undecided = f"measurements of {measurements.source} are not sufficient"
    has_failed = static in measurements.failures and static not in measurements.slow
    static_is_unmeasured = static in found.missing and not has_failed
    if static in found.unknown or static_is_unmeasured or not found.curves:
        others = (name for name in accepted if name not in measurements.failures)
        first = next(others, static) if has_failed else static
        return MeasuredChoice(first, f"{undecided}: {'; '.join(found.remarks)}")
    if [*found.curves] == [static]:
        remarks = ("no other backend was measured", *found.remarks)
        return MeasuredChoice(static, f"{undecided}: {'; '.join(remarks)}")
    return None


def _score_together(
    token_ranges: tuple[TokenRange, ...],
    curves: Mapping[str, LatencyCurve],
    objective: Objective,
    routings: Sequence[str],
) -> float:
    """`LatencyCurve.score` of backends that share a layer."""
    return math.fsum(
        weight * math.log(curves[backend_in(token_ranges, tokens)].time_at(routing, tokens)) / len(routings)
        for routing in routings
        for tokens, weight in objective.weights
    )


def _contenders(
    measurements: MeasurementSet, filled: Mapping[str, float], scores: Mapping[str, float], base: str, winner: str
) -> tuple[FilledTimes, ...]:
    """The candidates with times that were filled in on which the choice may depend: the base, and those that may be
    faster than the winner."""
    return tuple(
        FilledTimes(name, tuple(sorted(measurements.filled[name].get("uniform", {}).items())), error)
        for name, error in filled.items()
        if name == base or scores[name] - _CONTENDER_ERRORS * error <= scores[winner]
    )


def required_saving(min_time_saving: float, ratio_error: float) -> float:
    """The fraction of one candidate's time that another must save to replace it.

    Args:
        min_time_saving: the setting of that name.
        ratio_error: standard deviation of the logarithm of the ratio of their times; 0 where both were measured.
    """
    return 1.0 - (1.0 - min_time_saving) * math.exp(-ratio_error)


def _comparable(measurements: MeasurementSet, accepted: Sequence[str], objective: Objective) -> _Comparison:
    curves: dict[str, LatencyCurve] = {}
    slowly = {name: ", and it may only compile slowly" for name in measurements.slow}
    missing = {
        name: f"{reason}{slowly.get(name, '')}" for name, reason in measurements.failures.items() if name in accepted
    }
    for name in accepted:
        if name in missing or name not in measurements.times:
            continue
        curve = LatencyCurve(measurements.known_times(name), measurements.filled.get(name))
        gap = curve.coverage_gap(objective)
        if gap:
            missing[name] = gap
        else:
            curves[name] = curve
    unknown = [name for name in accepted if name not in curves and name not in missing]
    notes = [f"{name} was not measured" for name in unknown] + [f"{name}: {gap}" for name, gap in missing.items()]
    return _Comparison(curves, missing, unknown, (*measurements.remarks, *notes))


def _compared_routings(curves: Mapping[str, LatencyCurve], objective: Objective) -> list[str]:
    # Skewed routing counts only when every curve covers the objective with it, as uniform routing does: a partial one
    # would be extrapolated to the rest.
    complete = all(not curve.coverage_gap(objective, "skewed") for curve in curves.values())
    return ["uniform", "skewed"] if complete else ["uniform"]


def _filled_errors(
    measurements: MeasurementSet, curves: Mapping[str, LatencyCurve], objective: Objective, routings: Sequence[str]
) -> dict[str, float]:
    """Errors of the scores of backends with times that were filled in; without those that the objective ignores."""
    weights = {name: curve.filled_weight(objective, routings) for name, curve in curves.items() if curve.filled}
    return {name: weight * measurements.cell_errors[name] for name, weight in weights.items() if weight > 1e-9}


def _outcome(
    found: _Comparison,
    objective: Objective,
    measurements: MeasurementSet,
    comparison_base: str,
    winner: str,
    counts: Sequence[int],
    min_time_saving: float,
    token_ranges: tuple[TokenRange, ...] = (),
) -> TimeComparison:
    times = {name: curve.measured for name, curve in found.curves.items()}
    fastest = {count: min(times, key=lambda name: times[name][count]) for count in counts}
    runs = {count: backend_in(token_ranges, count) if token_ranges else winner for count in counts}
    losses = [(count, name, 1 - times[name][count] / times[runs[count]][count]) for count, name in fastest.items()]
    return TimeComparison(
        objective=str(objective),
        source=measurements.source,
        comparison_base=comparison_base,
        time_saved=0.0,
        fastest=tuple(fastest.items()),
        slower_at=tuple(each for each in losses if each[2] > min_time_saving),
        times=tuple((name, tuple(sorted(points.items()))) for name, points in times.items()),
        remarks=found.remarks,
        errors=tuple((name, error) for name, error in measurements.errors.items() if name in found.curves),
    )


def _explain(winner: str, static: str, fastest: str, saving: float, needed: float, outcome: TimeComparison) -> str:
    base = outcome.comparison_base
    objective = f"for the objective {outcome.objective}"
    share = f"about {saving:.0%}" if outcome.is_predicted else f"{saving:.1%}"
    if winner != base:
        # The base is the static choice, or the first in static order that could be measured.
        described = f"{base}, the static choice," if base == static else base
        text = f"takes {share} less time than {described} {objective}"
    elif fastest != base:
        limit = env_var("min_time_saving") + (" with the prediction's error" if outcome.is_predicted else "")
        text = f"first in the static order; {fastest} takes only {share} less time {objective}"
        text += f", and {limit} asks for {needed:.0%}"
    elif len(outcome.times) == 1:
        text = f"the only one that could be measured, {objective}"
    else:
        text = f"the fastest of {len(outcome.times)} {objective}, and first in the static order"
    if static != base:
        text += f"; {static}, the static choice, could not be measured"
    text += f", by {outcome.source}"
    if outcome.slower_at:
        shown = [f"{count} ({name}, {saved:.0%} less time)" for count, name, saved in outcome.slower_at[:4]]
        more = f" and {len(outcome.slower_at) - 4} more" if len(outcome.slower_at) > 4 else ""
        text += f"; others are faster at these numbers of tokens: {', '.join(shown)}{more}"
    return "; ".join((text, *outcome.remarks))


def _split_by_tokens(
    winner: str,
    curves: Mapping[str, LatencyCurve],
    counts: Sequence[int],
    objective: Objective,
    min_time_saving: float,
    can_share: CanShare,
) -> tuple[TokenRange, ...]:
    """Two backends, one for few tokens and one for many, if that beats the winner alone; otherwise empty.

    The time saved at the token counts where the two differ must exceed `min_time_saving`. Every measured token count
    has a little weight, also where the objective gives it none, because the branch costs time at every call.
    """
    if not counts:
        return ()
    weights = dict.fromkeys(counts, _UNWEIGHTED_SHARE / len(counts))
    for tokens, weight in objective.weights:
        nearest = min(counts, key=lambda count: abs(math.log(count / tokens)))
        weights[nearest] += weight

    def log_time(name: str, count: int) -> float:
        return math.log(curves[name].points["uniform"][count])

    best: tuple[float, tuple[TokenRange, ...]] = (0.0, ())
    for other in curves:
        if other == winner or not can_share(winner, other):
            continue
        for few, many in ((winner, other), (other, winner)):
            for index, last in enumerate(counts[:-1]):
                changed = counts[: index + 1] if few == other else counts[index + 1 :]
                saved = math.fsum(
                    weights[count] * (log_time(winner, count) - log_time(other, count)) for count in changed
                )
                mean = saved / math.fsum(weights[count] for count in changed)
                if mean > -math.log1p(-min_time_saving) and saved > best[0]:
                    # The switch is at the geometric mean of the two neighboring measured counts.
                    switch = int(math.sqrt(last * counts[index + 1]))
                    best = (saved, (TokenRange(few, switch), TokenRange(many, None)))
    return best[1]
