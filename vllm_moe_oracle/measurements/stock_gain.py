"""How much faster a decided layer is than stock vLLM's own: by the shipped times beside stock's layer, or than stock's
kernel, by the times of the decision.

Nothing is chosen by these figures. Where neither is known, nothing is said: another layer's gain is not this one's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.decision import Decision, TimeComparison
from ..core.objectives import Objective, parse_objective
from ..core.problem import Device, Problem
from ..oracle.measured_choice import LatencyCurve
from ..oracle.stock_choice import StockChoice
from . import latency_model, profile
from .bench_records import STOCK_DEFAULT
from .environment import Environment
from .kernel_shape import KernelShape, kernel_shape_of


@dataclass(frozen=True, slots=True)
class StockGain:
    """A gain over stock vLLM.

    Attributes:
        kind: how it is known.
        speedup: stock's time over the decision's, as a geometric mean over the objective.
        objective: the token counts of that mean.
        stock: vLLM's layer, or the backend that wraps its kernel.
        source: where the figures come from.
        error: standard deviation of the logarithm of a predicted speedup; None where it was measured.
        slowest: the smallest measured speedup, after its number of tokens.
        fastest: the largest, likewise.
    """

    kind: Literal["measured", "predicted"]
    speedup: float
    objective: str
    stock: str
    source: str
    error: float | None = None
    slowest: tuple[int, float] | None = None
    fastest: tuple[int, float] | None = None

    def __str__(self) -> str:
        times = f"{self.kind}: {self.speedup:.2f}"
        if self.error is not None:
            times += f" ±{self.speedup * math.expm1(self.error):.2f}"
        words = f"{times} times as fast as {self.stock} for the objective {self.objective}"
        if self.slowest is not None and self.fastest is not None and self.slowest != self.fastest:
            ends = [f"{speedup:.2f} at {count}" for count, speedup in (self.slowest, self.fastest)]
            words += f" ({' to '.join(ends)} tokens)"
        return f"{words}, by {self.source}"


def stock_gain(
    decision: Decision, device: Device, stock: StockChoice, objective: str, is_assumed: bool = False
) -> StockGain | None:
    """The gain of a decided layer over stock vLLM; None where neither shipped nor predicted times tell it.

    Args:
        decision: the layer's.
        device: the machine.
        stock: what stock vLLM does with the layer there.
        objective: the setting of that name.
        is_assumed: that is not known, but assumed.
    """
    found = _gain(decision, device, stock, objective)
    if found is None or not is_assumed:
        return found
    return dataclasses.replace(found, stock=f"{stock.backend}, which stock vLLM is taken to run,")


def _gain(decision: Decision, device: Device, stock: StockChoice, objective: str) -> StockGain | None:
    problem = decision.problem
    if not_timed(problem) or stock.refusal:
        return None
    here, shape = Environment.of(device), kernel_shape_of(problem)
    counts = parse_objective(objective)
    for found in profile.comparisons_for(here):
        # Stock vLLM runs another kernel for another packing of the same shape.
        timed = found.stock_classes(shape).get(STOCK_DEFAULT, "")
        if (not stock.stock_class or timed in ("", stock.stock_class)) and (
            gain := _measured(found, shape, decision, counts)
        ):
            return gain
    return _over_stock_kernel(decision, stock.backend, counts)


def not_timed(problem: Problem) -> str:
    """What a layer has that no shipped times beside stock vLLM have; "" where they tell its gain."""
    if problem.lora:
        return "LoRA adapters"
    if problem.eplb:
        return "EPLB"
    return "a batched all-to-all" if problem.parallel.is_batched else ""


def _measured(found: profile.Profile, shape: KernelShape, decision: Decision, objective: Objective) -> StockGain | None:
    times: dict[str, dict[int, float]] = {}
    for sample in found.samples(shape):
        if not sample.failure and sample.routing == "uniform":
            times.setdefault(sample.backend, {})[sample.tokens] = sample.us
    stock = times.get(STOCK_DEFAULT, {})
    own = _own_times(decision, times, stock)
    speedup = _mean_speedup(stock, own, objective)
    if speedup is None:
        return None
    weighted = [count for count in own if objective.weights[0][0] <= count <= objective.largest]
    ratios = sorted((stock[count] / own[count], count) for count in weighted)
    return StockGain(
        "measured",
        speedup,
        str(objective),
        f"stock vLLM's {found.stock_classes(shape).get(STOCK_DEFAULT) or 'own layer'}",
        f"shipped times of one run of both ({found.environment})",
        slowest=ratios[0][::-1] if ratios else None,
        fastest=ratios[-1][::-1] if ratios else None,
    )


def _own_times(decision: Decision, times: Mapping[str, Mapping[int, float]], counts: Iterable[int]) -> dict[int, float]:
    """The decision's times at those of some numbers of tokens at which its backend was timed."""
    runs = {count: times.get(decision.backend_for(count), {}).get(count) for count in counts}
    return {count: us for count, us in runs.items() if us is not None}


def _mean_speedup(stock: Mapping[int, float], own: Mapping[int, float], objective: Objective) -> float | None:
    """Geometric mean of stock's time over the decision's; None where the times that both have do not cover the
    objective.

    Args:
        stock: stock's times, at the numbers of tokens of `own` at least.
        own: the decision's.
        objective: the token counts of the mean.
    """
    curves = [LatencyCurve({"uniform": {count: times[count] for count in own}}) for times in (stock, own)]
    if any(curve.coverage_gap(objective) for curve in curves):
        return None
    slower, faster = (curve.score(objective, ["uniform"]) for curve in curves)
    return math.exp(slower - faster)


def _over_stock_kernel(decision: Decision, stock: str, objective: Objective) -> StockGain | None:
    """The gain over stock's kernel by the times of the decision, where it is another one and was compared.

    The error of a predicted gain over another kernel than the comparison's base is that of two independent times.
    """
    outcome = decision.comparison
    if decision.why not in ("measured", "predicted") or outcome is None:
        return None
    kind: Literal["measured", "predicted"] = "measured" if decision.why == "measured" else "predicted"
    words = f"{stock}, stock vLLM's kernel,"
    if stock == outcome.comparison_base:
        if not outcome.time_saved:
            return None
        error = outcome.ratio_error if kind == "predicted" else None
        return StockGain(kind, 1 / (1 - outcome.time_saved), outcome.objective, words, outcome.source, error)
    times = {name: dict(points) for name, points in outcome.times}
    if stock not in times or decision.backend == stock:
        return None
    speedup = _mean_speedup(times[stock], _own_times(decision, times, times[stock]), objective)
    if speedup is None:
        return None
    errors = dict(outcome.errors)
    both = math.hypot(errors.get(stock, 0.0), errors.get(decision.backend, 0.0))
    error = both if kind == "predicted" else None
    return StockGain(kind, speedup, outcome.objective, words, outcome.source, error)


def time_errors(outcome: TimeComparison) -> dict[str, float]:
    """Standard deviation of the logarithm of a single time, by backend; without those that were measured.

    The errors of an outcome are those of a layer's mean, by which it is decided. A predicted time at one number of
    tokens is less certain.
    """
    model = latency_model.shipped()
    single = {name: each.cell_error / each.error for name, each in model.backends.items()}
    if outcome.source != model.source:
        single = {}  # measured, with other releases: the same error at every number of tokens
    return {name: error * single.get(name, 1.0) for name, error in outcome.errors}
