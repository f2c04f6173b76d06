"""Choosing by measurement: among candidates that compute the same, the one that takes the least time where it counts.

Pure: times come in as `Evidence`, whoever took them. Times are compared as ratios (a geometric mean over numbers of
tokens), so that a long prefill does not outweigh every decode step. The static choice stays unless another candidate
is faster by more than a margin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .decision import Measured, Step
from .objectives import Objective

WIDEST_GAP = 4.0
"""Largest ratio of neighbouring numbers of tokens between which a time is interpolated, and beyond the largest of which
it is not continued: kernels change their tiles every factor of two to four."""

Times = Mapping[str, Mapping[int, float]]
"""Microseconds by routing (``uniform``, ``skewed``) and number of tokens."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of one layer group in one place.

    Attributes:
        times: microseconds by backend, routing and number of tokens.
        source: where it comes from, in words.
        failures: why a backend could not be measured, by name.
        remarks: how the place differs from here, and what else was found and not used.
        tiles: by backend, see `Plan.tiles`.
    """

    times: Mapping[str, Times] = field(default_factory=dict)
    source: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    tiles: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome.

    Attributes:
        backend: the winner; the static choice where measurements do not decide.
        because: why, in a sentence.
        measured: what it was decided by; None when measurements decided nothing.
        steps: which backend runs up to which number of tokens, where more than one does; else empty.
    """

    backend: str
    because: str
    measured: Measured | None = None
    steps: tuple[Step, ...] = ()


def choose(
    evidence: Evidence,
    accepted: Sequence[str],
    objective: Objective,
    margin: float,
    together: Callable[[str, str], bool] = lambda one, other: False,
) -> Choice:
    """Chooses among accepted candidates that compute the same.

    Args:
        evidence: what was measured.
        accepted: names of the candidates, in static order; not empty.
        objective: which numbers of tokens count.
        margin: by what part another candidate must be faster than the static choice, e.g. 0.03.
        together: whether two backends may share one layer, by number of tokens: they read the same weights, or the
            user allows a second copy.
    """
    static = accepted[0]
    if not evidence.times and not evidence.failures:
        return Choice(static, "; ".join(("", *evidence.remarks)).removeprefix("; "))
    curves: dict[str, _Curve] = {}
    missing: dict[str, str] = {name: why for name, why in evidence.failures.items() if name in accepted}
    for name in accepted:
        if name in missing or name not in evidence.times:
            continue
        found = _Curve.read(evidence.times[name])
        gap = found.gap(objective)
        if gap:
            missing[name] = gap
        else:
            curves[name] = found
    unknown = [name for name in accepted if name not in curves and name not in missing]
    said = [f"{name} was not measured" for name in unknown] + [f"{name}: {why}" for name, why in missing.items()]
    remarks = (*evidence.remarks, *said)
    if static in unknown or (static in missing and static not in evidence.failures) or not curves:
        # Nothing to compare with: what was measured may all be slower.
        return Choice(static, f"measurements of {evidence.source} decide nothing: {'; '.join(remarks)}")
    first = next(name for name in accepted if name in curves)
    if len(curves) == 1 and first == static:
        said_too = "; ".join(("nothing else was measured beside it", *remarks))
        return Choice(static, f"measurements of {evidence.source} decide nothing: {said_too}")
    # Skewed routing counts where it is known of all as uniform routing is: half of it would be continued to the rest.
    complete = all(not curve.gap(objective, "skewed") for curve in curves.values())
    routings = ["uniform", "skewed"] if complete else ["uniform"]
    scores = {name: curve.score(objective, routings) for name, curve in curves.items()}
    fastest = min(scores, key=lambda name: scores[name])  # the first of equals: the static order
    gain = 1.0 - math.exp(scores[fastest] - scores[first])
    winner = fastest if gain > margin else first
    counts = sorted(set.intersection(*(set(curve.points["uniform"]) for curve in curves.values())))
    best = {count: min(curves, key=lambda name: curves[name].points["uniform"][count]) for count in counts}
    loses = tuple(
        (count, best[count], curves[winner].points["uniform"][count] / curves[best[count]].points["uniform"][count] - 1)
        for count in counts
    )
    loses = tuple(each for each in loses if each[2] > margin)
    measured = Measured(
        objective=str(objective),
        source=evidence.source,
        against=first,
        gain=gain if winner == fastest else 0.0,
        best=tuple(best.items()),
        loses=loses,
        times=tuple((name, tuple(sorted(curve.points["uniform"].items()))) for name, curve in curves.items()),
        remarks=remarks,
    )
    because = _because(winner, first, static, fastest, gain, margin, measured)
    steps = _steps(winner, curves, counts, objective, margin, together)
    if steps:
        words = ", ".join(f"{step.backend} {f'up to {step.most} tokens' if step.most else 'beyond'}" for step in steps)
        because = f"{because}; by number of tokens: {words}"
    return Choice(winner, because, measured, steps)


def _because(winner: str, first: str, static: str, fastest: str, gain: float, margin: float, measured: Measured) -> str:
    if winner != first:
        words = f"{gain:.1%} faster than {first}, which comes first, for the objective {measured.objective}"
    elif fastest == first:
        words = f"fastest of {len(measured.times)} for the objective {measured.objective}, and first"
        if len(measured.times) == 1:
            words = f"the first that could be measured, and nothing beside it, for the objective {measured.objective}"
    else:
        words = f"first, and {fastest} is faster by only {gain:.1%} (margin {margin:.0%})"
        words += f" for the objective {measured.objective}"
    if static != first:
        words += f"; {static}, which comes before, could not be measured"
    words += f", by {measured.source}"
    if measured.loses:
        shown = [f"{count} (to {name} by {loss:.0%})" for count, name, loss in measured.loses[:4]]
        more = f" and {len(measured.loses) - 4} more" if len(measured.loses) > 4 else ""
        words += f"; it loses at {', '.join(shown)}{more} tokens"
    return "; ".join((words, *measured.remarks))


class _Curve:
    """The times of one backend."""

    def __init__(self, points: dict[str, dict[int, float]]) -> None:
        self.points = points

    @classmethod
    def read(cls, times: Times) -> _Curve:
        return cls({routing: dict(counts) for routing, counts in times.items() if counts})

    def gap(self, objective: Objective, routing: str = "uniform") -> str:
        """Why the numbers of tokens measured under a routing are no basis for the objective; empty when they are."""
        counts = sorted(self.points.get(routing, {}))
        if not counts:
            return "measured at no number of tokens"
        if counts[0] > objective.weights[0][0]:
            return f"measured from {counts[0]} tokens on, the objective begins at {objective.weights[0][0]}"
        if objective.largest > counts[-1] * WIDEST_GAP:
            return f"measured up to {counts[-1]} tokens, the objective goes to {objective.largest}"
        for low, high in itertools.pairwise(counts):
            inside = any(low < count < high for count, _ in objective.weights)
            if inside and high > low * WIDEST_GAP:
                return f"measured at {low} and next at {high} tokens, which leaves too much between"
        return ""

    def at(self, routing: str, tokens: int) -> float:
        """Microseconds at a number of tokens: on the line between neighbours in logarithms, proportional beyond."""
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
        """Mean logarithm of the time over what counts, every routing alike."""
        return math.fsum(
            weight * math.log(self.at(routing, tokens)) / len(routings)
            for routing in routings
            for tokens, weight in objective.weights
        )


def _steps(
    winner: str,
    curves: Mapping[str, _Curve],
    counts: Sequence[int],
    objective: Objective,
    margin: float,
    together: Callable[[str, str], bool],
) -> tuple[Step, ...]:
    """Two backends, one for few tokens and one for many, where that beats the winner alone by more than the margin at
    the numbers of tokens where they differ; empty otherwise.

    Every measured number of tokens counts a little, also where the objective gives it no weight: what the branch costs
    is paid in any case. Empty, too, where no number of tokens was measured of all.
    """
    if not counts:
        return ()
    weights = dict.fromkeys(counts, 0.01 / len(counts))
    for tokens, weight in objective.weights:
        nearest = min(counts, key=lambda count: abs(math.log(count / tokens)))
        weights[nearest] += weight

    def time(name: str, count: int) -> float:
        return math.log(curves[name].points["uniform"][count])

    found: tuple[float, tuple[Step, ...]] = (0.0, ())
    for other in curves:
        if other == winner or not together(winner, other):
            continue
        for few, many in ((winner, other), (other, winner)):
            for index, last in enumerate(counts[:-1]):
                changed = counts[: index + 1] if few == other else counts[index + 1 :]
                saved = math.fsum(weights[count] * (time(winner, count) - time(other, count)) for count in changed)
                share = saved / math.fsum(weights[count] for count in changed)
                if share > -math.log1p(-margin) and saved > found[0]:
                    # Between the two measured numbers, in the middle of their logarithms.
                    most = int(math.sqrt(last * counts[index + 1]))
                    found = (saved, (Step(few, most), Step(many, None)))
    return found[1]
