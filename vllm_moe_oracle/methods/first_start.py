"""Measuring at a server's first start, before weights are loaded (the setting `measure_at_start`).

Each kind of layer comes here once, after its settings were compared and before its backend is chosen. Where the choice
would be static, and could be measured, the first rank of each host measures it in another process; the ranks wait for
it as for everything they agree on. Then each rank reads the cache and decides, and `backend_selection` makes it one
decision. No failure to measure is an error: the server starts with the choice that it would have made.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.decision import Decision
from ..core.problem import Problem
from ..errors import NoBackendError, OracleError, sanitize
from ..measurements.kernel_shape import KernelShape, kernel_shape_of
from ..oracle.registry import REFERENCE_BACKEND
from ..oracle.selection import equivalent_backends
from ..settings import Settings, env_var
from . import backend_selection, measure_hook, rank_sync
from .load_caches import per_load

logger = logging.getLogger("vllm.moe_oracle")


@dataclass(frozen=True, slots=True)
class _MeasuredLayer:
    """A layer that was measured in this process, with the static choice and the outcome."""

    problem: Problem
    static: str
    outcome: measure_hook.Measured
    seconds: float


class _Start:
    """What this process has measured. One start has one budget, whatever number of models it loads.

    Attributes:
        spent: seconds so far.
        tried: kernel shapes that were measured, with or without success.
        layers: measured layers that the log has not summarized yet.
        said: reasons that the log has.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.tried: set[KernelShape] = set()
        self.layers: list[_MeasuredLayer] = []
        self.said: set[str] = set()


_start = _Start()
_asked: set[Problem] = per_load(set())
"""Kinds of layers of the load whose ranks have come here."""


def forget_start() -> None:
    """Forgets what was measured and spent, for tests that start several servers in one process."""
    global _start
    _start = _Start()
    _asked.clear()


def measure_if_undecided(
    group: rank_sync.RankGroup, problem: Problem, settings: Settings, decide: Callable[[], Decision]
) -> None:
    """Measures a layer, once per kind, where its choice would be static and measurements can replace it.

    Args:
        group: the ranks of the layer. All of them come here.
        problem: the layer on this rank.
        settings: the settings in force.
        decide: makes this rank's decision without new measurements.

    Raises:
        RankSyncError: another rank died, did not answer in time, or could not decide.
    """
    measure = measure_hook.current_measure()
    if not settings.measure_at_start or measure is None or problem.key() in _asked:
        return
    _asked.add(problem.key())
    layer = problem.layer
    host = socket.gethostname()
    names: tuple[str, ...] = ()

    def ask() -> tuple[str, bool]:
        nonlocal names
        names, reason = _candidates(problem, settings, decide, group.size > 1)
        if reason:
            _say_once(f"{env_var('measure_at_start')} measures nothing of {layer}: {reason}", reason)
        return host, bool(names)

    ranks = rank_sync.all_gather(group, f"whether {layer} is to be measured", ask)
    # The first rank of a host speaks for it: the others do not know what it has spent, and must not go on in its place.
    first = {place: rank for rank, (place, _) in reversed([*enumerate(ranks)])}
    if not any(ranks[rank][1] for rank in first.values()):
        return

    def measure_here() -> str:
        if first[host] == group.rank and names:
            _measure(measure, problem, names, settings, decide())
        return ""

    rank_sync.all_gather(group, f"measuring {layer}", measure_here)
    backend_selection.read_again(problem)


def _candidates(
    problem: Problem, settings: Settings, decide: Callable[[], Decision], several_ranks: bool
) -> tuple[tuple[str, ...], str]:
    """The backends to measure, and why there are none; "" where the layer needs no measurement."""
    if not settings.use_measurements:
        return (), f"measurements are switched off by {settings.source('use_measurements')}"
    try:
        decision = decide()
    except NoBackendError:  # `select_backend` finds it again, and says it
        return (), ""
    if decision.is_explicit:
        return (), f"its backend is chosen by {decision.explanation}"
    decided = decision.why != "static" and not decision.tunable
    if decision.backend == REFERENCE_BACKEND or (decided and not _may_be_slow(problem, settings)):
        return (), ""
    if problem.batch_invariant:
        return (), "batch-invariant layers keep the static choice, with the one configuration that it has"
    if problem.parallel.is_batched:
        return (), "nothing measures tokens that an all-to-all sorts by expert"
    names = equivalent_backends(decision.candidate(decision.backend), decision.candidates)
    if len(names) < 2:
        return (), f"{names[0]} is the only backend that computes these numbers"
    if kernel_shape_of(problem) in _start.tried:
        return (), ""
    if several_ranks and (reason := settings.why_ranks_do_not_measure):
        return (), reason
    if _start.spent >= settings.measure_at_start:
        return (), f"the {settings.measure_at_start:g} s are spent; the next start continues"
    return names, ""


def _may_be_slow(problem: Problem, settings: Settings) -> bool:
    """Whether an earlier start killed a backend that another one would give more time."""
    found = backend_selection.measurements_for(problem, settings)
    return found is not None and bool(found.slow)


def _measure(
    measure: measure_hook.Measure, problem: Problem, names: tuple[str, ...], settings: Settings, static: Decision
) -> None:
    """Measures a layer, logs it, and keeps it for the summary."""
    begin, budget, before = time.monotonic(), settings.measure_at_start, _start.spent
    _start.tried.add(kernel_shape_of(problem))
    began = False  # an earlier start may have measured everything, failures only among it

    def report(words: str, done: int, total: int) -> None:
        nonlocal began
        if not began:
            began = True
            text = "moe_oracle: %s is measured for up to %.0f s, before weights are loaded, for later starts too: %s"
            logger.info(text, problem.layer, budget - before, ", ".join(names))
        spent = before + time.monotonic() - begin
        logger.info("moe_oracle: measuring, %d of %d, %.0f of %.0f s: %s", done, total, spent, budget, words)

    try:
        outcome = measure(problem, names, settings, budget - before, report)
    except Exception as error:  # whatever it is, the server starts with the static choice
        words = sanitize(str(error) if isinstance(error, OracleError) else f"{type(error).__name__}: {error}")
        logger.warning("moe_oracle: %s is not measured: %s", problem.layer, words)
        return
    finally:
        _start.spent = before + time.monotonic() - begin
    if not began:
        return
    for name, why in outcome.failures.items():
        logger.warning("moe_oracle: %s: %s could not be measured and is left out: %s", problem.layer, name, why)
    for name, why in outcome.slow.items():
        text = "moe_oracle: %s: %s could not be measured: %s. It may only compile slowly, so the static choice is kept "
        text += "where it is that, and the next start waits longer"
        logger.warning(text, problem.layer, name, why)
    if outcome.unfinished:
        logger.warning(
            "moe_oracle: %s: not measured completely: %s; the times so far are kept, and the next start continues",
            problem.layer, sanitize(outcome.unfinished),
        )  # fmt: skip
    _start.layers.append(_MeasuredLayer(problem, static.backend, outcome, time.monotonic() - begin))


def log_summary(decisions: Mapping[str, Decision], tune_command: Callable[[Decision], str]) -> None:
    """Logs, once a model is loaded, what was measured and what was chosen by it. Nothing on ranks that did not measure.

    Args:
        decisions: the decisions of the model, by layer.
        tune_command: the command that measures the layers of the model; "" where it is unknown.
    """
    done = [each for each in _start.layers if each.problem.layer in decisions]
    _start.layers.clear()
    if not done:
        return
    parts = []
    for each in done:
        decision = decisions[each.problem.layer]
        chosen = f"{decision.backend} ({decision.why}"
        chosen += f", in place of {each.static})" if decision.backend != each.static else ")"
        parts.append(f"{each.problem.layer}: {each.outcome.times} times in {each.seconds:.0f} s, {chosen}")
    command = sanitize(tune_command(decisions[done[0].problem.layer])) or "vllm-moe-oracle tune MODEL"
    logger.info(
        "moe_oracle: measured at this start: %s. Kept in %s; %s --export FILE measures the rest and writes it to a "
        "profile; %s=0 switches this off",
        "; ".join(parts), done[0].outcome.cache, command, env_var("measure_at_start"),
    )  # fmt: skip


def _say_once(words: str, reason: str) -> None:
    if reason not in _start.said:
        _start.said.add(reason)
        logger.info("moe_oracle: %s", words)
