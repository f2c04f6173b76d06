"""Tuning: every accepted backend of some layers, at every number of tokens that serving has, into the store.

Measured is what is missing: a run that was ended goes on where it stopped. What must be compiled is compiled first, in
several processes where that is asked for, so that no compilation is on the clock. Of several GPUs each has a process
that takes the next layer and writes to the same store; all backends of a layer are timed on the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..device import detect
from ..errors import MeasurementError
from ..oracle.measured import WIDEST_GAP
from ..oracle.oracle import REFERENCE, candidates
from ..oracle.problem import Device, Problem
from ..oracle.registry import default_registry
from ..settings import Settings
from . import crew, engine, environment
from .cells import Cell, RoutingKind, Sample, cell_of
from .environment import Environment
from .profile import Profile
from .store import Store

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens: every decode batch's power of two, and prefill chunks up to vLLM's default limits."""

STOCK = "stock:"
"""Before vLLM's ``--moe-backend`` in the name of a stock layer: ``stock:auto`` is stock's default."""

COMPILING = 0.5
"""Part of the budget that may be spent before anything is measured."""

LEAST_BUCKETS = 10
_MUST = (1, 2, 4, 8, 16)
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")


def check_buckets(buckets: Sequence[int]) -> None:
    """Whether a choice can be made from measurements at these numbers of tokens.

    Raises:
        MeasurementError: small batches are missing, or neighbours are too far apart.
    """
    missing = [count for count in _MUST if count not in buckets]
    gaps = [f"{low} and {high}" for low, high in pairwise(sorted(buckets)) if high > WIDEST_GAP * low]
    if missing or gaps or len(buckets) < LEAST_BUCKETS:
        found = [f"{', '.join(map(str, missing))} missing"] * bool(missing)
        found += [f"nothing between {gap}" for gap in gaps]
        found += [f"{len(buckets)} numbers of tokens, fewer than {LEAST_BUCKETS}"] * (len(buckets) < LEAST_BUCKETS)
        remedy = f"Measure at least {', '.join(map(str, BUCKETS[:LEAST_BUCKETS]))} and the largest batch"
        raise MeasurementError(f"no choice can be made from these numbers of tokens: {'; '.join(found)}", remedy)


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        buckets: numbers of tokens.
        routings: how tokens choose experts.
        replays: how often each backend is timed at one number of tokens, at most.
        seconds: for how long that may go on at one number of tokens, once each was timed three times.
        budget: seconds for everything; None for no end.
        jobs: processes that compile beforehand; 0 for none beside this one.
        again: measure also what was measured.
        tiles: tile configurations of a backend that are timed beside its own choice, under uniform routing; under
            skewed routing it runs with the fastest of these.
        gpus: the GPUs to measure on, as `crew.gpus` names them; this process's own when empty.
    """

    buckets: tuple[int, ...] = BUCKETS
    routings: tuple[RoutingKind, ...] = ("uniform", "skewed")
    replays: int = 20
    seconds: float = 1.0
    budget: float | None = None
    jobs: int = 0
    again: bool = False
    tiles: int = 0
    gpus: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What became of one cell.

    Attributes:
        problem: a layer of it.
        samples: what is known now.
        measured: how many of these are new.
        unfinished: why something is missing; "" when nothing is.
        seconds: what it took.
        spent: seconds by what they went into: `engine.Bench.spent`, and of processes that compiled beforehand.
    """

    problem: Problem
    samples: list[Sample] = field(default_factory=list)
    measured: int = 0
    unfinished: str = ""
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)


Progress = Callable[[str, int, int], None]
"""Told what is being done, how many steps are done, and how many there are."""


def groups(problems: Iterable[Problem]) -> dict[Cell, Problem]:
    """One problem for each cell, in the order of the first of it."""
    found: dict[Cell, Problem] = {}
    for problem in problems:
        found.setdefault(cell_of(problem), problem)
    return found


def accepted(problem: Problem, device: Device, settings: Settings) -> tuple[str, ...]:
    """Names of the backends that can run a layer, in static order, without the reference."""
    return tuple(
        each.backend for each in candidates(problem, device, settings) if each.accepted and each.backend != REFERENCE
    )


def tune(
    problems: Iterable[Problem],
    device: Device,
    settings: Settings,
    store: Store | None,
    plan: Plan,
    known: Sequence[Profile] = (),
    progress: Progress = lambda words, done, total: None,
) -> dict[Cell, Outcome]:
    """Measures what is missing, and keeps it.

    Args:
        problems: layers.
        device: this machine.
        settings: what the user asked for: disabled backends are not measured.
        store: where measurements are kept; None keeps none.
        plan: how much to measure.
        known: profiles whose measurements need not be repeated; never written.
        progress: is told how it goes on.

    Raises:
        MeasurementError: measurements cannot be kept, or a kernel broke this process; one that breaks a process of
            several GPUs is left out there. What was kept before is kept.
    """
    check_buckets(plan.buckets)
    begin = time.monotonic()
    here = environment.of(device)
    cells = groups(problems)
    outcomes = {cell: Outcome(problem) for cell, problem in cells.items()}
    steps: dict[Cell, list[tuple[RoutingKind, int]]] = {}
    for cell, problem in cells.items():
        names = accepted(problem, device, settings)
        if not names:
            outcomes[cell].unfinished = "no backend but the reference can run it"
            continue
        outcomes[cell].samples = _known(cell, here, store, known)
        if plan.again:
            outcomes[cell].samples = []
        have = {(each.backend, each.routing, each.tokens) for each in outcomes[cell].samples}
        names = _hopeful(names, outcomes[cell])
        steps[cell] = [
            (routing, count)
            for routing in plan.routings
            for count in plan.buckets
            if any((name, routing, count) not in have for name in names)
        ]
    total = sum(map(len, steps.values()))
    if not total:
        return outcomes
    most = max(plan.buckets)
    work = {cell: cells[cell] for cell, todo in steps.items() if todo}
    compiling: dict[str, dict[str, float]] = {}
    if plan.jobs:
        chosen = [
            (problem, _hopeful(accepted(problem, device, settings), outcomes[cell])) for cell, problem in work.items()
        ]
        seconds = None if plan.budget is None else plan.budget * COMPILING
        compiling = compile_beforehand(
            chosen, device, plan.buckets, plan.jobs, progress, plan.gpus, plan.tiles, seconds
        )
    if plan.gpus:
        left = None if plan.budget is None else time.time() + plan.budget - (time.monotonic() - begin)
        tasks = [_Task(cells[cell], device, settings, store, plan, tuple(known), left) for cell in work]
        sizes = [len(steps[cell]) for cell in work]
        for cell, found in zip(work, _spread(tasks, sizes, plan.gpus, progress), strict=True):
            outcomes[cell] = found
            found.spent |= compiling.get(found.problem.layer, {})
        progress("done", total, total)
        return outcomes
    done = 0
    with engine.ready(device, most) as ready:
        for cell, problem in work.items():
            started = time.monotonic()
            # One cell after the other, not a share for each: half of a cell's measurements decide nothing.
            left = None if plan.budget is None else plan.budget - (started - begin)
            before = done

            def tell(words: str, extra: int, before: int = before) -> None:
                progress(words, before + extra, total)

            _measure(ready, cell, problem, steps[cell], left, here, settings, store, plan, outcomes[cell], tell)
            outcomes[cell].seconds = time.monotonic() - started
            outcomes[cell].spent |= compiling.get(problem.layer, {})
            done += len(steps[cell])
    progress("done", total, total)
    return outcomes


@dataclass(frozen=True)
class _Task:
    """A layer for one GPU of several; `until` is when the budget is spent, in seconds of the system's clock."""

    problem: Problem
    device: Device
    settings: Settings
    store: Store | None
    plan: Plan
    known: tuple[Profile, ...]
    until: float | None


_ATTEMPTS = 3
"""Processes that a layer may take down: each time the backend that did it is left out, if it could still be named."""


def _spread(tasks: Sequence[_Task], sizes: Sequence[int], gpus: Sequence[str], progress: Progress) -> list[Outcome]:
    """Has layers measured on several GPUs. One whose processes die has what was kept of it."""
    found: dict[int, Outcome] = {}
    done = [0] * len(tasks)
    for news in crew.run(_measure_one, tasks, gpus, _ATTEMPTS, quiet=True):
        task = tasks[news.task]
        if news.kind == "said":
            words, done[news.task] = news.value
            progress(words, min(sum(done), sum(sizes)), sum(sizes))
            continue
        done[news.task] = sizes[news.task]
        if news.kind == "done":
            found[news.task] = news.value
        else:
            cell, here = cell_of(task.problem), environment.of(task.device)
            samples = _known(cell, here, task.store, task.known)
            found[news.task] = Outcome(task.problem, samples, unfinished=news.value)
    return [found[index] for index in range(len(tasks))]


def _measure_one(task: _Task, tell: crew.Tell) -> Outcome:
    """A layer, in a process that sees one GPU."""
    same_kind(task.device)
    budget = None if task.until is None else max(task.until - time.time(), 1e-9)
    plan = dataclasses.replace(task.plan, gpus=(), jobs=0, budget=budget)
    found = tune(
        [task.problem], task.device, task.settings, task.store, plan, task.known,
        lambda words, done, total: tell((words, done)),
    )  # fmt: skip
    (outcome,) = found.values()
    return outcome


def same_kind(device: Device) -> None:
    """Whether the GPU that this process sees is such a device.

    Raises:
        MeasurementError: it is another.
    """
    here = detect()
    if here.kind == "cuda" and (here.name, here.sm_count) != (device.name, device.sm_count):
        rule = f"one GPU is {here.name} ({here.sm_count} multiprocessors), another {device.name} ({device.sm_count})"
        raise MeasurementError(rule, "Name GPUs of one kind: what is measured on one must hold for all", "--gpus")


def _hopeful(names: Sequence[str], outcome: Outcome) -> tuple[str, ...]:
    """The backends that have not failed at some number of tokens before: one that broke its process would again."""
    failed = {each.backend for each in outcome.samples if each.failure}
    return tuple(name for name in names if name not in failed)


def no_verdict(failure: str) -> bool:
    """Whether a failure says nothing of the backend: what else is on the GPU decides whether there is memory."""
    return any(word in failure for word in _OUT_OF_MEMORY)


def unlike(profile: Profile, device: Device) -> str:
    """Why measurements of a profile are repeated on this machine: how its place differs; "" where it does not."""
    here = environment.of(device)
    if profile.environment == here:
        return ""
    found = environment.differences(profile.environment, here)
    said = ", ".join((*found.hard, *found.soft)) or "one of the two places does not know all that the other does"
    return f"it is of another environment: {said}"


def _known(cell: Cell, here: Environment, store: Store | None, profiles: Sequence[Profile]) -> list[Sample]:
    """What was measured of a cell in this environment."""
    found = [samples for profile in profiles if profile.environment == here for samples in [profile.samples(cell)]]
    if store is not None:
        found += [samples for there, samples in store.samples(cell) if there == here]
    newest = {(each.backend, each.routing, each.tokens): each for samples in found for each in samples}
    return [*newest.values()]


def _measure(
    ready: engine.Engine,
    cell: Cell,
    problem: Problem,
    steps: Sequence[tuple[RoutingKind, int]],
    seconds: float | None,
    here: Environment,
    settings: Settings,
    store: Store | None,
    plan: Plan,
    outcome: Outcome,
    progress: Callable[[str, int], None],
) -> None:
    begin = time.monotonic()

    def over() -> bool:
        return seconds is not None and time.monotonic() - begin > seconds

    if seconds is not None and seconds <= 0:
        outcome.unfinished = f"the budget was spent before it; {len(steps)} steps are missing"
        return
    registry = default_registry()
    progress(f"{problem.layer}: converting", 0)
    names = _hopeful(accepted(problem, ready.device, settings), outcome)
    try:
        bench = ready.bench(problem, [registry[name] for name in names])
    except engine.BrokenContext as error:
        _remember(error, here, cell, problem, steps, store)
        raise
    try:
        for index, (routing, count) in enumerate(steps):
            if over():
                outcome.unfinished = (
                    f"its {seconds:.0f} s were spent; {len(steps) - index} of {len(steps)} steps missing"
                )
                break
            progress(f"{problem.layer}: {count} tokens, {routing}", index)
            fixed = {
                each.backend: each.tile
                for each in outcome.samples
                if (each.tokens, each.routing) == (count, "uniform") and each.tile and routing != "uniform"
            }
            tiles = plan.tiles if routing == "uniform" else 0
            found = bench.measure(count, routing, plan.replays, plan.seconds, tiles, fixed)
            gone = {sample.backend for sample in found}
            found += [each for each in bench.failed(count, routing) if each.backend not in gone]
            found = [each for each in found if not no_verdict(each.failure)]
            if store is not None:
                store.add(here, cell, found)
            replaced = {(each.backend, each.routing, each.tokens) for each in found}
            kept = [each for each in outcome.samples if (each.backend, each.routing, each.tokens) not in replaced]
            outcome.samples = kept + found
            outcome.measured += len(found)
    except engine.BrokenContext as error:
        _remember(error, here, cell, problem, steps, store)
        raise
    finally:
        outcome.spent |= bench.spent
        bench.close()


def _remember(
    error: engine.BrokenContext,
    here: Environment,
    cell: Cell,
    problem: Problem,
    steps: Sequence[tuple[RoutingKind, int]],
    store: Store | None,
) -> None:
    """Keeps that a backend breaks its process, so that the next run leaves it out."""
    if store is not None and error.backend in default_registry():
        precision = default_registry()[error.backend].activations(problem)
        store.add(
            here,
            cell,
            [
                Sample(error.backend, precision, count, routing, failure=f"broke the GPU's context: {error.failure}")
                for routing, count in steps
            ],
        )


# --- Compiling beforehand ---------------------------------------------------------------------------------------------


Call = tuple[int, str]
"""A number of tokens, and a tile configuration; "" for a backend's own choice."""

CALLS = 6
"""Calls of a process at a time that have something to compile, where it is known what: half a minute at most."""


@dataclass(frozen=True)
class _Job:
    """Calls of a backend of a layer; `most` tokens are the most of any. `again`: all that it has, after what differs
    between layers was compiled."""

    problem: Problem
    backend: str
    calls: tuple[Call, ...]
    device: Device
    most: int
    again: bool = False


@dataclass(frozen=True)
class _Warmed:
    """Seconds of building a layer and of its calls, and why some of these could not be made."""

    building: float
    calling: float
    failures: tuple[str, ...]


def _asked(backend: Any, question: str, problem: Problem, *more: Any) -> Any:
    """What a backend says of its kernels; None where that fails, which is told and does not end others' measuring."""
    try:
        return getattr(backend, question)(problem, *more)
    except Exception:
        engine.logger.warning("%s: %s fails for %s", backend.name, question, problem.layer, exc_info=True)
        return None


def _jobs(
    work: Sequence[tuple[Problem, Sequence[str]]], device: Device, counts: Sequence[int], tiles: int
) -> Iterator[_Job]:
    """What is to be compiled, each kernel once where a backend can tell them apart; then, of such a backend, everything
    that a layer will run, which takes little where it is compiled and finds what is not."""
    registry = default_registry()
    after: list[_Job] = []
    seen: set[Hashable] = set()
    for problem, names in work:
        # This project's kernels compile the longest: what is begun last should be short.
        for name in sorted(names, key=lambda name: not name.startswith("own")):
            plain = [(count, "") for count in counts]
            if name.startswith(STOCK):  # building it converts all its experts, once is enough
                yield _Job(problem, name, tuple(plain), device, max(counts))
                continue
            backend = registry[name]
            if _asked(backend, "compiled", problem, max(counts)) is None:
                # In two parts, because it may compile for each number of tokens.
                parts = [plain[first::2] for first in range(2)]
            else:
                calls = plain + [
                    (count, tile)
                    for count in counts
                    for tile in (_asked(backend, "tiles", problem, count, tiles) or () if tiles else ())
                ]
                missing = []
                for count, tile in calls:
                    kernels = _asked(backend, "compiled", problem, count, tile) or frozenset()
                    if not kernels <= seen:
                        missing.append((count, tile))
                        seen |= kernels
                parts = [missing[first : first + CALLS] for first in range(0, len(missing), CALLS)]
                if any(_asked(backend, "compiled", problem, *call) for call in calls):
                    after.append(_Job(problem, name, tuple(calls), device, max(counts), again=True))
            for part in parts:
                if part:
                    yield _Job(problem, name, tuple(part), device, max(counts))
    yield from after


def compile_beforehand(
    work: Sequence[tuple[Problem, Sequence[str]]],
    device: Device,
    counts: Sequence[int],
    processes: int,
    progress: Progress,
    gpus: Sequence[str] = (),
    tiles: int = 0,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Runs backends once at every number of tokens, in processes of their own: the caches of what compiles are on disk.
    A process that dies takes nothing with it but its own task, which is then compiled where it is measured.

    Args:
        work: layers, with the names of their backends.
        device: this machine.
        counts: numbers of tokens.
        processes: how many work at a time.
        progress: is told how it goes on.
        gpus: where they run, by turns; this process's own when empty.
        tiles: tile configurations that are compiled beside a backend's own choice.
        seconds: after which what is not compiled is left to where it is measured; None for no end.

    Returns:
        Seconds of processes by layer, and by what they went into: ``building NAME beforehand``, ``compiling NAME
        beforehand`` for what no layer before it had to have compiled too, and ``again NAME beforehand`` for all calls.
    """
    begin = time.monotonic()
    jobs = list(_jobs(work, device, counts, tiles))
    places = list(itertools.islice(itertools.cycle(gpus or (None,)), min(processes, len(jobs))))
    spent: dict[str, dict[str, float]] = {}
    done = 0
    with contextlib.closing(crew.run(_warm, jobs, places, 2, quiet=True)) as found:
        for news in found:
            job = jobs[news.task]
            if news.kind != "said":
                done += 1
                progress(f"compiling in {min(processes, len(jobs))} processes", done, len(jobs))
            if news.kind == "lost":
                progress(
                    f"{job.problem.layer}: {job.backend} is not compiled beforehand: {news.value}", done, len(jobs)
                )
            if news.kind == "done":
                for why in news.value.failures:
                    progress(f"{job.problem.layer}: {job.backend} with {why}", done, len(jobs))
                layer = spent.setdefault(job.problem.layer, {})
                calling = "again" if job.again else "compiling"
                for words, took in (("building", news.value.building), (calling, news.value.calling)):
                    key = f"{words} {job.backend} beforehand"
                    layer[key] = layer.get(key, 0.0) + took
            if seconds is not None and time.monotonic() - begin > seconds:
                break
    progress(f"compiled for {time.monotonic() - begin:.0f} s", done, len(jobs))
    return spent


_held: list[object] = []


def _warm(job: _Job, tell: crew.Tell) -> _Warmed:
    if not _held:  # one engine a process, until the process ends
        context = engine.ready(job.device, job.most)
        _held.extend((context, context.__enter__()))
    ready = _held[1]
    assert isinstance(ready, engine.Engine)
    begin = time.monotonic()
    # What breaks a process here is met again, and kept, where it is measured.
    stock = job.backend.startswith(STOCK)
    bench = ready.bench(job.problem, [] if stock else [default_registry()[job.backend]], copies=1)
    if stock:
        add_stock(bench, job.device, [job.backend.removeprefix(STOCK)], job.most)
    built = time.monotonic()
    failures = [*bench.failures.values()]
    for count, tile in sorted(job.calls, reverse=True):
        if bench.names and (why := bench.compile(count, tile)):
            failures.append(f"{count} tokens: {why}")
    bench.close()
    return _Warmed(built - begin, time.monotonic() - built, tuple(failures))


def add_stock(bench: engine.Bench, device: Device, names: Sequence[str], most: int) -> dict[str, str]:
    """Adds stock vLLM's own layers to a bench; a layer that vLLM cannot build is a failure of its own.

    Args:
        bench: a problem's layers.
        device: this machine.
        names: vLLM's ``--moe-backend`` of each.
        most: most tokens of a call.

    Returns:
        vLLM's class by our name of the layer.
    """
    from ..compat import alone

    classes: dict[str, str] = {}
    for name in names:
        try:
            layer = alone.StockLayer(bench.problem, name, device.kind, most)
        except Exception as error:  # that stock vLLM cannot build the layer is a result
            bench.fail(f"{STOCK}{name}", error)
            continue
        bench.extra[f"{STOCK}{name}"] = layer
        classes[f"{STOCK}{name}"] = layer.name
    return classes
