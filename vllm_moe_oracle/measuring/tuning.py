"""What `tune` does: times every accepted backend of some layers at serving's numbers of tokens, and stores the times.

Only missing times are measured, so an interrupted run continues where it stopped. Each GPU has a worker process that
takes the next layer and writes to the same store; all backends of a layer are timed on the same GPU. A backend that
ends or breaks a worker is stored as failing, and the layer goes on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..core.problem import Device, Problem
from ..devices.detect import detect
from ..errors import MeasurementError, mentions_out_of_memory
from ..measurements import environment, latency_model
from ..measurements.bench_records import needs_longer, silence
from ..measurements.environment import Environment
from ..measurements.kernel_shape import KernelShape, RoutingKind, Sample, kernel_shape_of
from ..measurements.profile import Profile
from ..measurements.store import Store
from ..methods.measure_hook import Progress
from ..oracle.measured_choice import MAX_TOKEN_RATIO
from ..oracle.registry import REFERENCE_BACKEND, default_registry
from ..oracle.selection import evaluate_candidates
from ..settings import Settings
from . import engine, worker_pool
from .broken_context import BrokenContextError
from .precompile import COMPILE_BUDGET_SHARE, Precompiled, offset_progress, precompile, within

TOKEN_COUNTS = latency_model.TOKENS
"""Numbers of tokens that are measured unless others are asked for: those for which times are predicted."""

MIN_TOKEN_COUNTS = 10
"""Fewest numbers of tokens that `tune` measures: its times are kept for every objective. The choice for one objective
needs fewer."""
_REQUIRED_TOKEN_COUNTS = (1, 2, 4, 8, 16)

_MAX_ATTEMPTS = 3
"""Workers that a layer may take down. After each, the backend that did it is left out, if it is known."""

_Step = tuple[RoutingKind, int]
"""A routing and a number of tokens."""


def check_token_counts(token_counts: Sequence[int]) -> None:
    """Checks that a choice can be made for every objective from times at these numbers of tokens.

    Raises:
        MeasurementError: small numbers are missing, neighbors are too far apart, or there are too few.
    """
    missing = [count for count in _REQUIRED_TOKEN_COUNTS if count not in token_counts]
    gaps = [f"{low} and {high}" for low, high in pairwise(sorted(token_counts)) if high > MAX_TOKEN_RATIO * low]
    if missing or gaps or len(token_counts) < MIN_TOKEN_COUNTS:
        found = [f"{', '.join(map(str, missing))} missing"] * bool(missing)
        found += [f"nothing between {gap}" for gap in gaps]
        if len(token_counts) < MIN_TOKEN_COUNTS:
            found.append(f"{len(token_counts)} numbers of tokens, fewer than {MIN_TOKEN_COUNTS}")
        remedy = f"Measure at least {', '.join(map(str, TOKEN_COUNTS[:MIN_TOKEN_COUNTS]))} and the largest batch"
        rule = f"not every objective can be decided from these numbers of tokens: {'; '.join(found)}"
        raise MeasurementError(rule, remedy)


@dataclass(frozen=True)
class TuneOptions:
    """How much to measure.

    Attributes:
        token_counts: numbers of tokens.
        routings: how tokens are routed to experts.
        replays: timed replays of each backend at one number of tokens, at most.
        seconds: time limit of the replays at one number of tokens, once each backend was timed three times.
        budget: seconds for everything; None for no limit.
        jobs: worker processes that compile first; 0 to compile in this process.
        compile_share: share of the budget that they may take, which is also where their start counts.
        remeasure: whether to measure again what is stored.
        tiles: tile configurations timed beside each backend's own choice under uniform routing. Under skewed routing
            the fastest of them runs.
        gpus: GPUs to measure on, as `devices.detect.select_gpus` names them, each in a process of its own; None for
            one that sees what this process sees; empty to measure in this process, as a worker does. What ends this
            process is not stored then.
        backends: names of the backends that are measured; empty for all that can run a layer.
        without: names of backends that are left out: they took a process down in this run.
        silence: with `gpus`, seconds after which a process that does not come back from a backend is killed; None for
            no limit. With it the budget holds in the middle of a call, too; backends that were killed after less are
            measured again; and what does not come back from `jobs` for as long is not measured.
    """

    token_counts: tuple[int, ...] = TOKEN_COUNTS
    routings: tuple[RoutingKind, ...] = ("uniform", "skewed")
    replays: int = 20
    seconds: float = 1.0
    budget: float | None = None
    jobs: int = 0
    compile_share: float = COMPILE_BUDGET_SHARE
    remeasure: bool = False
    tiles: int = 0
    gpus: tuple[str | None, ...] = ()
    backends: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    silence: float | None = None


@dataclass
class TuneOutcome:
    """What is known about a kernel shape after tuning.

    Attributes:
        problem: a layer of the shape.
        samples: all samples.
        measured: number of new samples; of a layer whose process ended on the way, of the last process.
        unfinished: why samples are missing; "" if none are.
        no_backend: no backend but the reference can run the layer.
        seconds: duration.
        phase_seconds: seconds by phase, see `engine.LayerBench.phase_seconds` and `precompile`.
    """

    problem: Problem
    samples: list[Sample] = field(default_factory=list)
    measured: int = 0
    unfinished: str = ""
    no_backend: bool = False
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, samples: Sequence[Sample], new: bool = True) -> None:
        """Adds samples, which replace those with the same key."""
        self.samples = [*{each.key: each for each in (*self.samples, *samples)}.values()]
        self.measured += len(samples) * new


def group_by_kernel_shape(problems: Iterable[Problem]) -> dict[KernelShape, Problem]:
    """The first problem of each kernel shape, in order."""
    found: dict[KernelShape, Problem] = {}
    for problem in problems:
        found.setdefault(kernel_shape_of(problem), problem)
    return found


def accepted_backends(problem: Problem, device: Device, settings: Settings) -> tuple[str, ...]:
    """Names of the backends that can run a layer, in static order, without the reference."""
    candidates = evaluate_candidates(problem, device, settings)
    return tuple(each.backend for each in candidates if each.accepted and each.backend != REFERENCE_BACKEND)


@dataclass(frozen=True)
class _TuneTask:
    """A layer to measure, here or in a worker; see `tune`. The budget is spent when `time.monotonic`, which all
    processes of a machine share, is at `until`."""

    problem: Problem
    device: Device
    settings: Settings
    store: Store | None
    options: TuneOptions
    known: tuple[Profile, ...] = ()
    until: float | None = None

    @property
    def shape(self) -> KernelShape:
        """What samples of the layer belong to."""
        return kernel_shape_of(self.problem)

    def backends(self, outcome: TuneOutcome | None = None) -> tuple[str, ...]:
        """Names of the backends to measure, in static order; without those that failed in an outcome: one that broke
        its process would do so again."""
        names, options = accepted_backends(self.problem, self.device, self.settings), self.options
        failed = {each.backend for each in outcome.samples if each.failure} if outcome is not None else set()
        left_out = {*options.without, *failed}
        return tuple(name for name in names if name in (options.backends or names) and name not in left_out)

    def known_samples(self) -> list[Sample]:
        """The samples in exactly this environment; those of the store replace those of profiles."""
        shape, here = self.shape, Environment.of(self.device)
        found = [profile.samples(shape) for profile in self.known if profile.environment == here]
        if self.store is not None:
            found += [samples for there, samples in self.store.samples(shape) if there == here]
        return [*{each.key: each for samples in found for each in samples}.values()]

    def final_samples(self) -> list[Sample]:
        """Those of them that are not measured again: without backends that had clearly less time to come back."""
        limit = math.inf if self.options.silence is None else self.options.silence
        return [each for each in self.known_samples() if not needs_longer(each.silent_seconds, limit)]

    def missing_steps(self, outcome: TuneOutcome) -> list[_Step]:
        """The steps at which a backend was not measured. Sets the known samples, or why there are no steps."""
        options = self.options
        if not self.backends():
            outcome.no_backend = not options.without
            outcome.unfinished = "no backend but the reference can run it"
            if options.without:
                outcome.unfinished = f"nothing is left to measure without {', '.join(options.without)}"
            return []
        if not options.remeasure:
            outcome.samples = self.final_samples()
        measured = {each.key for each in outcome.samples}
        names = self.backends(outcome)
        return [
            (routing, count)
            for routing in options.routings
            for count in options.token_counts
            if any((name, routing, count) not in measured for name in names)
        ]

    def store_failure(self, backend: str, failure: str, steps: Sequence[_Step], silent: float = 0.0) -> None:
        """Stores why a backend took its process down, so that the next one leaves it out; not a lack of memory.
        `silent`: `Sample.silent_seconds`.

        Raises:
            MeasurementError: it cannot be stored.
        """
        if self.store is None or backend not in default_registry() or mentions_out_of_memory(failure):
            return
        precision = default_registry()[backend].activations(self.problem)
        samples = [
            Sample(backend, precision, count, routing, failure=failure, silent_seconds=silent)
            for routing, count in steps
        ]
        self.store.add(Environment.of(self.device), self.shape, samples)


def tune(
    problems: Iterable[Problem],
    device: Device,
    settings: Settings,
    store: Store | None,
    options: TuneOptions,
    known: Sequence[Profile] = (),
    progress: Progress = lambda words, done, total: None,
    on_backend: engine.OnBackend = lambda name: None,
) -> dict[KernelShape, TuneOutcome]:
    """Measures what is missing, and stores it.

    Args:
        problems: layers.
        device: this machine.
        settings: the user's settings; disabled backends are not measured.
        store: where samples are stored; None to store nothing.
        options: how much to measure.
        known: profiles whose samples are not measured again. They are only read.
        progress: receives a line, the steps done and the number of steps.
        on_backend: is told which backend this process runs.

    Raises:
        MeasurementError: samples cannot be stored, or, without `options.gpus`, a kernel broke this process's CUDA
            context. Samples stored before are kept.
    """
    begin = time.monotonic()
    until = None if options.budget is None else begin + options.budget
    tasks = {
        shape: _TuneTask(problem, device, settings, store, options, tuple(known), until)
        for shape, problem in group_by_kernel_shape(problems).items()
    }
    outcomes = {shape: TuneOutcome(task.problem) for shape, task in tasks.items()}
    steps = {shape: task.missing_steps(outcomes[shape]) for shape, task in tasks.items()}
    total = sum(map(len, steps.values()))
    if not total:
        return outcomes
    work = {shape: tasks[shape] for shape, todo in steps.items() if todo}
    compiled = Precompiled()

    def compile_first() -> Precompiled:
        nonlocal compiled
        if options.jobs:
            chosen = [(task.problem, task.backends(outcomes[shape])) for shape, task in work.items()]
            seconds = None if options.budget is None else options.budget * options.compile_share
            compiled = precompile(
                chosen, device, options.token_counts, options.jobs, within(progress, 0, total), options.gpus,
                options.tiles, seconds,
            )  # fmt: skip
        return compiled

    if options.gpus:
        sizes = [len(steps[shape]) for shape in work]
        found = _tune_on_gpus([*work.values()], sizes, options.gpus, progress, compile_first)
        outcomes |= zip(work, found, strict=True)
    else:
        compile_first()
        done = 0
        with engine.open_context(device, max(options.token_counts), on_backend) as context:
            for shape, task in work.items():
                started = time.monotonic()
                # One layer after the other instead of a share for each: half of a layer's samples decide nothing.
                left = None if until is None else until - started
                layer = _LayerTuning(context, task, outcomes[shape])
                layer.measure(steps[shape], left, offset_progress(progress, done, total))
                outcomes[shape].seconds = time.monotonic() - started
                done += len(steps[shape])
    for shape, task in work.items():
        outcomes[shape].phase_seconds |= compiled.phase_seconds.get(task.problem.layer, {})
    if not any(each.unfinished for each in outcomes.values()):
        progress("done", total, total)
    return outcomes


def is_incomplete(problem: Problem, device: Device, settings: Settings, store: Store, options: TuneOptions) -> bool:
    """Whether `tune` would measure anything of a layer."""
    return bool(_TuneTask(problem, device, settings, store, options).missing_steps(TuneOutcome(problem)))


@dataclass(frozen=True)
class _Progress:
    """What a worker says of its layer: a line and the steps done, or the backend that it is about to run."""

    words: str = ""
    done: int = 0
    backend: str | None = None


_LIMIT_GRACE = 2.0
"""Seconds after the end of a budget in which a worker may say itself what is missing."""


def _tune_on_gpus(
    tasks: Sequence[_TuneTask],
    sizes: Sequence[int],
    gpus: Sequence[str | None],
    progress: Progress,
    compile_first: Callable[[], Precompiled],
) -> list[TuneOutcome]:
    """Tunes layers in worker processes, which start while others compile. The outcome of a lost layer has the samples
    that were stored."""
    outcomes: dict[int, TuneOutcome] = {}
    tasks = list(tasks)  # a worker gets its task when it begins
    done = [0] * len(tasks)
    current: dict[int, str] = {}

    def leave_out(index: int, name: str, why: str, silent: float) -> None:
        """Stores why a backend took its process down, or did not come back, and measures the layer without it."""
        task = tasks[index]
        if why:
            task.store_failure(name, why, task.missing_steps(TuneOutcome(task.problem)), silent)
        left_out = dataclasses.replace(task.options, without=(*task.options.without, name))
        tasks[index] = dataclasses.replace(task, options=left_out)

    def record_crash(index: int, why: str, silent: float) -> None:
        if name := current.pop(index, ""):
            leave_out(index, name, why, silent)

    def prepare() -> None:
        """Compiles. Where time is short, what took its processes down, or did not come back, is not run again."""
        compiled = compile_first()
        if options.silence is None:
            return
        places = {task.problem.layer: index for index, task in enumerate(tasks)}
        for (layer, name), why in compiled.lost.items():
            leave_out(places[layer], name, why, 0.0)
        for (layer, name), seconds in compiled.waited.items():
            if seconds >= options.silence:  # what had less time may come back where it is measured
                leave_out(places[layer], name, silence(seconds), options.silence)

    options, until = tasks[0].options, tasks[0].until
    limits = worker_pool.Limits()
    if options.silence is not None:
        left = None if until is None else until + _LIMIT_GRACE
        limits = worker_pool.Limits(options.silence, left)
    progress(f"starting {len(gpus)} process{'es' * (len(gpus) > 1)}", 0, sum(sizes))
    quiet = len(gpus) > 1 or options.silence is not None  # a start's log has warnings of its own
    events = worker_pool.run_tasks(
        _tune_one, tasks, gpus, _MAX_ATTEMPTS, quiet, limits, record_crash, prepare, _become_worker
    )
    with contextlib.closing(events):
        for event in events:
            task = tasks[event.task]
            if event.kind == "progress":
                if event.value.backend is not None:
                    current[event.task] = event.value.backend
                    continue
                done[event.task] = event.value.done
                if event.value.done < sizes[event.task]:  # "done" is said once, of all layers
                    progress(event.value.words, min(sum(done), sum(sizes)), sum(sizes))
                continue
            done[event.task] = sizes[event.task]
            if event.kind == "done":
                outcomes[event.task] = event.value
            else:
                outcomes[event.task] = TuneOutcome(task.problem, task.final_samples(), unfinished=event.value)
            left_out = [each for each in task.known_samples() if each.backend in task.options.without]
            outcomes[event.task].add(left_out, new=False)
    return [outcomes[index] for index in range(len(tasks))]


def _become_worker() -> None:
    """Imports vLLM and makes its groups in this process, which takes seconds and lasts for all its tasks."""
    with engine.open_context(detect(), 1):
        pass


def _tune_one(task: _TuneTask, send: worker_pool.SendProgress) -> TuneOutcome:
    """Tunes a layer in a worker that sees one GPU."""
    check_same_gpu(task.device)
    budget = None if task.until is None else max(task.until - time.monotonic(), 1e-9)
    options = dataclasses.replace(task.options, gpus=(), jobs=0, budget=budget)
    found = tune(
        [task.problem], task.device, task.settings, task.store, options, task.known,
        lambda words, done, total: send(_Progress(words, done)),
        lambda name: send(_Progress(backend=name)),
    )  # fmt: skip
    (outcome,) = found.values()
    return outcome


def check_same_gpu(device: Device) -> None:
    """Checks that this process sees a GPU of a kind.

    Raises:
        MeasurementError: it sees another kind.
    """
    here = detect()
    if here.kind == "cuda" and (here.name, here.sm_count) != (device.name, device.sm_count):
        rule = f"one GPU is {here.name} ({here.sm_count} SMs), another {device.name} ({device.sm_count} SMs)"
        raise MeasurementError(rule, "Name GPUs of one kind: what is measured on one must hold for all", "--gpus")


def why_not_reusable(profile: Profile, device: Device) -> str:
    """How a profile's environment differs from this machine's, so that its layers are measured again; "" if equal."""
    here = Environment.of(device)
    if profile.environment == here:
        return ""
    found = environment.differences(profile.environment, here)
    said = ", ".join((*found.hard, *found.soft)) or "a property of one of the two is unknown"
    return f"it is of another environment: {said}"


@dataclass
class _LayerTuning:
    """The tuning of one layer in this process."""

    context: engine.BenchContext
    task: _TuneTask
    outcome: TuneOutcome

    def measure(self, steps: Sequence[_Step], seconds: float | None, progress: Callable[[str, int], None]) -> None:
        """Takes the samples of some steps.

        Args:
            steps: what to measure.
            seconds: time limit; None for no limit.
            progress: receives a line and the steps done.

        Raises:
            BrokenContextError: a kernel broke the CUDA context. The failure is stored.
            MeasurementError: samples cannot be stored.
        """
        begin = time.monotonic()
        outcome, layer = self.outcome, self.task.problem.layer
        if seconds is not None and seconds <= 0:
            outcome.unfinished = f"the budget was spent before it; {len(steps)} steps are missing"
            return
        progress(f"{layer}: converting", 0)
        backends = [default_registry()[name] for name in self.task.backends(outcome)]
        try:
            bench = self.context.bench(self.task.problem, backends)
            try:
                for index, (routing, count) in enumerate(steps):
                    if seconds is not None and time.monotonic() - begin > seconds:
                        missing = f"{len(steps) - index} of {len(steps)} steps missing"
                        outcome.unfinished = f"its {seconds:.0f} s were spent; {missing}"
                        break
                    progress(f"{layer}: {count} tokens, {routing}", index)
                    self._step(bench, routing, count)
            finally:
                outcome.phase_seconds |= bench.phase_seconds
                bench.close()
        except BrokenContextError as error:
            failure = f"broke the GPU's context: {error.failure}"
            self.task.store_failure(error.backend, failure, steps)
            raise

    def _step(self, bench: engine.LayerBench, routing: RoutingKind, count: int) -> None:
        """Measures at one routing and number of tokens. Failures for lack of memory are not stored."""
        fixed_tiles = {
            each.backend: each.tile
            for each in self.outcome.samples
            if (each.tokens, each.routing) == (count, "uniform") and each.tile and routing != "uniform"
        }
        task, options = self.task, self.task.options
        tiles = options.tiles if routing == "uniform" else 0
        found = bench.measure(count, routing, options.replays, options.seconds, tiles, fixed_tiles)
        sampled = {sample.backend for sample in found}
        found += [each for each in bench.failed_samples(count, routing) if each.backend not in sampled]
        found = [each for each in found if not mentions_out_of_memory(each.failure)]
        if task.store is not None:
            task.store.add(Environment.of(task.device), task.shape, found)
        self.outcome.add(found)
