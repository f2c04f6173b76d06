"""Compiles kernels in worker processes before layers are measured. Compilers keep their results in caches on disk.

A worker builds a layer with one backend and calls it once at each number of tokens that has something to compile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.problem import Device, Problem
from ..measurements.bench_records import STOCK_PREFIX
from ..methods.measure_hook import Progress
from ..oracle.registry import default_registry
from . import engine, worker_pool
from .stock_layers import add_stock_layers

logger = logging.getLogger("vllm.moe_oracle")

COMPILE_BUDGET_SHARE = 0.5
"""Share of a budget that may be spent on compiling."""

CALLS_PER_JOB = 6
"""Most calls of a job whose kernels are known: half a minute of compiling."""

WarmupCall = tuple[int, str]
"""A number of tokens and a tile configuration; "" for the backend's own choice."""


def within(progress: Progress, done: int, total: int) -> Progress:
    """A callback that counts its own steps in words, and stays at `done` of `total`."""
    return lambda words, jobs, all_jobs: progress(f"{words}, {jobs} of {all_jobs}", done, total)


def offset_progress(progress: Progress, done: int, total: int) -> Callable[[str, int], None]:
    """A callback for one part of the steps.

    Args:
        progress: the callback for all steps.
        done: steps done before the part.
        total: number of all steps.
    """

    def report(words: str, extra: int) -> None:
        progress(words, done + extra, total)

    return report


@dataclass(frozen=True)
class _CompileJob:
    """Calls of a layer built by one backend.

    Attributes:
        problem: the layer.
        backend: name of the backend or stock layer.
        calls: what to call.
        device: this machine.
        max_tokens: largest number of tokens of any job.
        repeated: whether these are all calls of the layer, after jobs that compiled the kernels. They take little time
            and find what the backend did not list.
    """

    problem: Problem
    backend: str
    calls: tuple[WarmupCall, ...]
    device: Device
    max_tokens: int
    repeated: bool = False

    @property
    def of(self) -> tuple[str, str]:
        """The layer and the backend."""
        return self.problem.layer, self.backend


@dataclass(frozen=True)
class _CompileResult:
    """Seconds spent on building the layer and on its calls, and why calls failed."""

    building: float
    calling: float
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Precompiled:
    """What compiling found, by the names of a layer and a backend.

    Attributes:
        phase_seconds: seconds of the workers by layer and phase: ``building NAME beforehand``; ``compiling NAME
            beforehand`` for calls with kernels that no earlier layer compiled; ``again NAME beforehand`` for all calls
            after that.
        lost: why a backend's process ended in the last attempt at a job, unless others ended it.
        waited: of a backend that had not come back from its first call when the time was spent, the seconds since it
            was given a job: with the layer's conversion.
    """

    phase_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    lost: dict[tuple[str, str], str] = field(default_factory=dict)
    waited: dict[tuple[str, str], float] = field(default_factory=dict)


def _query_backend(backend: Any, method: str, problem: Problem, *arguments: Any) -> Any:
    """The answer of a backend's method; None, with a warning, if it fails."""
    try:
        return getattr(backend, method)(problem, *arguments)
    except Exception:  # a defect of one backend must not end the measuring of others
        logger.warning("moe_oracle: %s: %s fails for %s", backend.name, method, problem.layer, exc_info=True)
        return None


def _compile_jobs(
    work: Sequence[tuple[Problem, Sequence[str]]], device: Device, counts: Sequence[int], tiles: int
) -> Iterator[_CompileJob]:
    """Jobs that compile each kernel once, as far as backends name their kernels; then all calls of these backends."""
    registry = default_registry()
    repeated: list[_CompileJob] = []
    compiled: set[Hashable] = set()
    for problem, names in work:
        # Our kernels compile the longest. They come first, so that the last jobs are short; and each backend's first
        # job comes before anyone's second.
        jobs: list[list[_CompileJob]] = []
        for name in sorted(names, key=lambda name: not name.startswith("hopper")):
            untiled = [(count, "") for count in counts]
            if name.startswith(STOCK_PREFIX):  # one job: building a stock layer converts all its experts
                jobs.append([_CompileJob(problem, name, tuple(untiled), device, max(counts))])
                continue
            backend = registry[name]
            if _query_backend(backend, "compile_keys", problem, max(counts)) is None:
                # Unknown kernels, perhaps one per number of tokens: two jobs.
                parts = [untiled[first::2] for first in range(2)]
            else:
                calls = untiled + [
                    (count, tile)
                    for count in counts
                    for tile in (_query_backend(backend, "tiles", problem, count, tiles) or () if tiles else ())
                ]
                keys = {call: _query_backend(backend, "compile_keys", problem, *call) or frozenset() for call in calls}
                # A library without machine code for this GPU is compiled by the driver at its first call. Marlin's took
                # 20 to 40 s on an H200: vLLM builds it for 8.0, for 12.0, and as PTX.
                is_library = not any(keys.values())
                if is_library:
                    keys[calls[0]] = frozenset({(name, problem.scheme, problem.dtype)})
                missing = []
                for call in calls:
                    if not keys[call] <= compiled:
                        missing.append(call)
                        compiled |= keys[call]
                parts = [missing[first : first + CALLS_PER_JOB] for first in range(0, len(missing), CALLS_PER_JOB)]
                if not is_library:
                    repeated.append(_CompileJob(problem, name, tuple(calls), device, max(counts), repeated=True))
            jobs.append([_CompileJob(problem, name, tuple(part), device, max(counts)) for part in parts if part])
        for turn in itertools.zip_longest(*jobs):
            yield from filter(None, turn)
    yield from repeated


def precompile(
    work: Sequence[tuple[Problem, Sequence[str]]],
    device: Device,
    counts: Sequence[int],
    processes: int,
    progress: Progress,
    gpus: Sequence[str | None] = (),
    tiles: int = 0,
    seconds: float | None = None,
) -> Precompiled:
    """Calls backends once at every number of tokens, in worker processes. What is not compiled when they end compiles
    where it is measured, if the caller measures it then.

    Args:
        work: layers and the names of their backends and stock layers.
        device: this machine.
        counts: numbers of tokens.
        processes: number of workers.
        progress: receives a line, the jobs done and the number of jobs.
        gpus: GPUs that workers use in turn; empty for this process's own.
        tiles: tile configurations compiled beside each backend's own choice.
        seconds: time limit, at which the workers are killed; None for no limit.
    """
    begin = time.monotonic()
    jobs = list(_compile_jobs(work, device, counts, tiles))
    workers = min(processes, sum(not job.repeated for job in jobs))
    worker_gpus = list(itertools.islice(itertools.cycle(gpus or (None,)), workers))
    found = Precompiled()
    begun: dict[tuple[str, str], float] = {}
    returned: set[tuple[str, str]] = set()
    done = 0
    limits = worker_pool.Limits(until=None if seconds is None else begin + seconds)
    ended_by_others: set[tuple[str, str]] = set()
    said = f"compiling in {workers} process{'es' * (workers > 1)}"
    progress(said, done, len(jobs))
    events = worker_pool.run_tasks(_run_compile_job, jobs, worker_gpus, 2, quiet=True, limits=limits)
    with contextlib.closing(events):
        for event in events:
            job = jobs[event.task]
            if event.kind == "progress":
                begun.setdefault(job.of, time.monotonic())
                if event.value:
                    returned.add(job.of)
                continue
            if event.value == worker_pool.TIME_SPENT:
                continue
            done += 1
            progress(said, done, len(jobs))
            if event.kind == "lost":
                if event.by_others:
                    ended_by_others.add(job.of)
                else:
                    found.lost[job.of] = event.value
                words = f"{job.problem.layer}: {job.backend} is not compiled beforehand: {event.value}"
                progress(words, done, len(jobs))
            else:
                returned.add(job.of)
                for why in event.value.failures:
                    progress(f"{job.problem.layer}: {job.backend} with {why}", done, len(jobs))
                _add_phases(found.phase_seconds.setdefault(job.problem.layer, {}), job, event.value)
    end = time.monotonic()
    known = returned | ended_by_others | {*found.lost}
    found.waited.update((each, end - since) for each, since in begun.items() if each not in known)
    progress(f"compiled for {end - begin:.0f} s", done, len(jobs))
    return found


def _add_phases(phases: dict[str, float], job: _CompileJob, result: _CompileResult) -> None:
    calling = "again" if job.repeated else "compiling"
    for phase, seconds in (("building", result.building), (calling, result.calling)):
        key = f"{phase} {job.backend} beforehand"
        phases[key] = phases.get(key, 0.0) + seconds


_worker_context: list[Any] = []
"""In a worker: the context manager and the `BenchContext` that it keeps until the process ends."""


def _run_compile_job(job: _CompileJob, send: worker_pool.SendProgress) -> _CompileResult:
    """Sends False as it begins, and True after each call."""
    send(False)
    if not _worker_context:
        manager = engine.open_context(job.device, job.max_tokens)
        _worker_context.extend((manager, manager.__enter__()))
    context = _worker_context[1]
    begin = time.monotonic()
    # What breaks the context ends this process, too; the caller learns of it.
    is_stock = job.backend.startswith(STOCK_PREFIX)
    layers = context.bench(job.problem, [] if is_stock else [default_registry()[job.backend]], copies=1)
    if is_stock:
        add_stock_layers(layers, job.device, [job.backend.removeprefix(STOCK_PREFIX)], job.max_tokens)
    built = time.monotonic()
    failures = [*layers.failures.values()]
    for count, tile in sorted(job.calls, reverse=True):
        if layers.names and (why := layers.compile(count, tile)):
            failures.append(f"{count} tokens: {why}")
        send(True)
    layers.close()
    return _CompileResult(built - begin, time.monotonic() - built, tuple(failures))
