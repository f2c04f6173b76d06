"""What `bench` does: times every accepted backend of some layers beside stock vLLM's own layer, in one run, and with
``--peers`` beside kernels of other projects.

Records are returned, not stored: they are for comparison, and no choice depends on them unless ``tune --import`` stores
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.decision import Decision
from ..core.problem import Device, Problem
from ..errors import MeasurementError, NoBackendError
from ..measurements import lookup, model_shapes
from ..measurements.bench_records import PEER_PREFIX, STOCK_PREFIX, BenchChoice, BenchRecord
from ..measurements.environment import Environment
from ..measurements.kernel_shape import RoutingKind, kernel_shape_of
from ..measurements.roofline import roofline_us
from ..methods.measure_hook import Progress
from ..oracle.registry import Registry, default_registry
from ..oracle.selection import decide
from ..settings import Settings
from . import engine, peers, worker_pool
from .precompile import COMPILE_BUDGET_SHARE, offset_progress, precompile, within
from .stock_layers import add_stock_layers
from .tuning import accepted_backends, check_same_gpu


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        counts: numbers of tokens.
        routing: how tokens are routed to experts.
        replays: timed replays of each backend, at most.
        seconds: time limit of the replays at one number of tokens, once each backend was timed three times.
        stock: values of vLLM's ``--moe-backend``, one stock layer each.
        only: names of backends; empty for all accepted ones.
        jobs: worker processes that compile first; 0 to compile in this process.
        budget: seconds after which no further layer is started; None for no limit.
        gpus: GPUs to measure on, as `devices.detect.select_gpus` names them; empty for this process's own.
        tiles: tile configurations timed beside what serving would use. The fastest is the backend's time.
        peers: whether kernels of other projects are timed, too; see `measuring.peers`.
        peers_folder: where their packages lie; None for the environment's.
    """

    counts: tuple[int, ...]
    routing: RoutingKind = "uniform"
    replays: int = 30
    seconds: float = 2.0
    stock: tuple[str, ...] = ("auto",)
    only: tuple[str, ...] = ()
    jobs: int = 0
    budget: float | None = None
    gpus: tuple[str, ...] = ()
    tiles: int = 0
    peers: bool = False
    peers_folder: Path | None = None


def find_peers(device: Device, options: BenchOptions) -> peers.FoundPeers:
    """The peers of this machine; none where the options do not ask for them.

    Raises:
        MeasurementError: their folder does not exist.
    """
    return peers.discover(device, options.peers_folder) if options.peers else peers.FoundPeers()


def conditions(
    device: Device, options: BenchOptions, command: str, found: peers.FoundPeers | None = None
) -> dict[str, Any]:
    """The first line of the records: environment, method, and the command that repeats the benchmark.

    Args:
        device: this machine.
        options: what is measured.
        command: the command.
        found: the peers of this machine, if the options ask for them: timed ones with versions, others with reasons.
    """
    here = Environment.of(device)
    return {
        "command": command,
        "environment": here,
        "gpu": here.gpu,
        "driver": here.driver,
        "packages": here.packages,
        "kernels": here.kernels,
        "routing": options.routing,
        "method": engine.describe_method(options.replays),
        **({} if found is None else {"peers": found.to_json()}),
    }


@dataclass(frozen=True)
class _BenchTask:
    """A layer to time, here or in a worker. There it is not started once `time.monotonic`, which all processes of a
    machine share, is past `until`."""

    problem: Problem
    device: Device
    settings: Settings
    options: BenchOptions
    until: float | None

    def backends(self) -> list[str]:
        """Names of the backends to time, in static order."""
        names = accepted_backends(self.problem, self.device, self.settings)
        return [name for name in names if not self.options.only or name in self.options.only]


def bench(
    problems: Sequence[Problem],
    device: Device,
    settings: Settings,
    options: BenchOptions,
    progress: Progress = lambda words, done, total: None,
) -> Iterator[BenchRecord]:
    """Times layers with the tile configurations that serving would use.

    Args:
        problems: layers.
        device: this machine.
        settings: settings of the oracle, whose choice is part of the records.
        options: what to measure.
        progress: receives a line, the steps done and the number of steps.

    Yields:
        One record per layer and number of tokens, as soon as it exists; with several GPUs in any order.

    Raises:
        MeasurementError: nothing can be measured here.
    """
    until = None if options.budget is None else time.monotonic() + options.budget
    tasks = [_BenchTask(problem, device, settings, options, until) for problem in problems]
    if options.jobs:
        stock = [f"{STOCK_PREFIX}{name}" for name in options.stock]
        work = [(task.problem, [*task.backends(), *stock]) for task in tasks]
        seconds = None if options.budget is None else options.budget * COMPILE_BUDGET_SHARE
        compiling = within(progress, 0, len(problems) * len(options.counts))
        precompile(work, device, options.counts, options.jobs, compiling, options.gpus, options.tiles, seconds)
    if options.gpus:
        yield from _bench_on_gpus(tasks, progress)
        return
    steps, total = len(options.counts), len(problems) * len(options.counts)
    others = find_peers(device, options).registry
    with engine.open_context(device, max(options.counts)) as context:
        for number, task in enumerate(tasks):
            if until is not None and time.monotonic() > until:
                return
            yield from _bench_layer(context, task, others, offset_progress(progress, number * steps, total))
    progress("done", total, total)


def _bench_layer(
    context: engine.BenchContext, task: _BenchTask, others: Registry, progress: Callable[[str, int], None]
) -> Iterator[BenchRecord]:
    """The records of one layer, in ascending order of tokens. Of `others`, those that can run the layer are timed."""
    problem, device, options = task.problem, task.device, task.options
    progress(f"{problem.layer}: converting", 0)
    registry = default_registry()
    able = [each for each in others.for_scheme(problem.scheme.name) if not each.check(problem, device).reasons]
    layers = context.bench(problem, [*(registry[name] for name in task.backends()), *able])
    stock = add_stock_layers(layers, device, options.stock, max(options.counts))
    measurements = lookup.find_measurements(problem, device, task.settings)
    decision = None
    with contextlib.suppress(NoBackendError):
        decision = decide(problem, device, task.settings, measurements=measurements)
    ranges = {} if measurements is None else measurements.tiles
    for index, count in enumerate(sorted(options.counts)):
        progress(f"{problem.layer}: {count} tokens", index)
        tiles = {name: tile for name, rows in ranges.items() if (tile := tile_at(rows, count))}
        yield _make_record(layers, task, count, stock, decision, tiles)
    layers.close()


def _bench_on_gpus(tasks: Sequence[_BenchTask], progress: Progress) -> Iterator[BenchRecord]:
    """Records of several GPUs.

    Raises:
        MeasurementError: a layer took its process down. Raised after all others are measured.
    """
    lost: list[str] = []
    options = tasks[0].options
    done, total = 0, len(options.counts) * len(tasks)
    for event in worker_pool.run_tasks(_bench_one, tasks, options.gpus, quiet=True):
        if event.kind == "progress":
            done += 1
            progress(f"{event.value.name}: {event.value.tokens} tokens", done, total)
            yield event.value
        elif event.kind == "lost":
            lost.append(f"{tasks[event.task].problem.layer}: {event.value}")
    if lost:
        raise MeasurementError("; ".join(lost), "Measure their backends one by one, with --backend")
    progress("done", done, done)


def _bench_one(task: _BenchTask, send: worker_pool.SendProgress) -> None:
    """Benchmarks a layer in a worker that sees one GPU, and sends its records."""
    if task.until is not None and time.monotonic() > task.until:
        return
    options = dataclasses.replace(task.options, gpus=(), jobs=0, budget=None)
    check_same_gpu(task.device)
    for record in bench([task.problem], task.device, task.settings, options):
        send(record)


def tile_at(ranges: Sequence[tuple[int, str]], tokens: int) -> str:
    """The tile configuration of `ShardPlan.tiles` at a number of tokens; "" for the backend's own choice."""
    return next((tile for most, tile in ranges if tokens <= most), "")


def _make_record(
    layers: engine.LayerBench,
    task: _BenchTask,
    count: int,
    stock: Mapping[str, str],
    decision: Decision | None,
    tiles: Mapping[str, str],
) -> BenchRecord:
    """Measures at one number of tokens."""
    problem, options = task.problem, task.options
    samples = {
        each.backend: each
        for each in layers.measure(count, options.routing, options.replays, options.seconds, options.tiles, tiles)
    }
    timed = {name: each for name, each in samples.items() if not each.failure}
    bound = roofline_us(problem, count, task.device.name)
    us = {name: round(each.us, 2) for name, each in timed.items()}
    return BenchRecord(
        layer=model_shapes.to_json(problem),
        kernel_shape=kernel_shape_of(problem),
        tokens=count,
        us=us,
        quartiles={name: (round(each.low, 2), round(each.high, 2)) for name, each in timed.items()},
        replays={name: each.replays for name, each in timed.items()},
        activations={name: each.activations for name, each in samples.items() if name not in stock},
        errors={name: float(f"{each.error:.3g}") for name, each in timed.items() if name not in stock},
        failures=dict(layers.failures),
        stock=dict(stock),
        tiles={name: each.tile for name, each in timed.items() if each.tile},
        router_included=layers.routed,
        roofline_us=None if bound is None else round(bound, 2),
        fraction_of_roofline=None
        if bound is None
        else {name: round(bound / each.us, 3) for name, each in timed.items()},
        choice=None if decision is None else _choice(decision, count, us, stock),
    )


def _choice(decision: Decision, count: int, us: Mapping[str, float], stock: Mapping[str, str]) -> BenchChoice:
    """The decision's backend at a number of tokens, compared with the others' times."""
    name = decision.backend_for(count)
    ours = {each: time for each, time in us.items() if each not in stock and not each.startswith(PEER_PREFIX)}
    if name not in ours:
        return BenchChoice(name, decision.why)
    return BenchChoice(
        name,
        decision.why,
        behind_best=round(ours[name] / min(ours.values()) - 1, 4),
        speedup={each: round(us[each] / ours[name], 3) for each in stock if each in us},
    )
