"""Benchmarks: every accepted backend of some layers, and stock vLLM's own layer, in one run; one record a cell.

Nothing is kept but what is returned: figures to look at and to compare with, not to decide by.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeasurementError, NoBackendError
from ..oracle.decision import Decision
from ..oracle.measured import Evidence
from ..oracle.oracle import decide
from ..oracle.problem import Device, Problem
from ..oracle.registry import default_registry
from ..settings import Settings
from . import crew, engine, environment, lookup, shapes, timing
from .cells import Cell, RoutingKind, Sample, cell_of
from .environment import Environment
from .floors import floor_us
from .profile import contents
from .tuning import COMPILING, accepted, add_stock, compile_beforehand, no_verdict, same_kind
from .tuning import STOCK as STOCK

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        counts: numbers of tokens.
        routing: how tokens choose experts.
        replays: how often each is timed, at most.
        seconds: for how long that may go on at one number of tokens.
        stock: vLLM's ``--moe-backend`` of each stock layer.
        only: backends; all accepted ones when empty.
        jobs: processes that compile beforehand; 0 for none beside this one.
        budget: seconds after which no further layer is begun; None for no end.
        gpus: the GPUs to measure on, as `crew.gpus` names them; this process's own when empty.
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


def conditions(device: Device, plan: Plan, command: str) -> Record:
    """What the figures hold for, and how to repeat them."""
    here = environment.of(device)
    return {
        "command": command,
        "environment": here,
        "gpu": here.gpu,
        "driver": here.driver,
        "packages": here.packages,
        "kernels": here.kernels,
        "routing": plan.routing,
        "method": (
            f"CUDA graphs; {timing.FLUSH_BYTES >> 20} MiB written before each replay; layers under "
            f"{engine.ROTATED_BYTES >> 20} MiB in several copies by turns; backends in changing order; medians and "
            f"quartiles in microseconds of up to {plan.replays} replays; {engine.CHECKED} tokens of each call "
            "compared with a float32 reference before"
        ),
    }


def choice_at(decision: Decision, tokens: int) -> str:
    """The backend that a decision runs at a number of tokens."""
    return decision.at(tokens)


def bench(
    problems: Sequence[Problem],
    device: Device,
    settings: Settings,
    plan: Plan,
    progress: Callable[[str, int, int], None] = lambda words, done, total: None,
) -> Iterator[Record]:
    """Measures, with the tile configurations that serving would use; one record for each layer and number of tokens, as
    it is ready: of several GPUs in any order.

    Args:
        problems: layers.
        device: this machine.
        settings: for the oracle's choice, which is in the records.
        plan: what to run.
        progress: is told how it goes on.

    Raises:
        MeasurementError: nothing can be measured here.
    """
    total = len(problems) * len(plan.counts)
    begin = time.monotonic()
    registry = default_registry()
    chosen = [
        [name for name in accepted(problem, device, settings) if not plan.only or name in plan.only]
        for problem in problems
    ]
    if plan.jobs:
        stock = [f"{STOCK}{name}" for name in plan.stock]
        work = [(problem, [*names, *stock]) for problem, names in zip(problems, chosen, strict=True)]
        seconds = None if plan.budget is None else plan.budget * COMPILING
        compile_beforehand(work, device, plan.counts, plan.jobs, progress, plan.gpus, seconds=seconds)
    if plan.gpus:
        until = None if plan.budget is None else time.time() + plan.budget - (time.monotonic() - begin)
        yield from _spread([_Task(problem, device, settings, plan, until) for problem in problems], progress)
        return
    with engine.ready(device, max(plan.counts)) as ready:
        for number, (problem, names) in enumerate(zip(problems, chosen, strict=True)):
            if plan.budget is not None and time.monotonic() - begin > plan.budget:
                return
            progress(f"{problem.layer}: converting", number * len(plan.counts), total)
            run = ready.bench(problem, [registry[name] for name in names])
            classes = add_stock(run, device, plan.stock, max(plan.counts))
            evidence = lookup.evidence(problem, device, settings)
            decision = _decision(problem, device, settings, evidence)
            tiles = {} if evidence is None else evidence.tiles
            for index, count in enumerate(sorted(plan.counts)):
                progress(f"{problem.layer}: {count} tokens", number * len(plan.counts) + index, total)
                fixed = {name: tile for name, rows in tiles.items() if (tile := tile_at(rows, count))}
                yield _record(run, problem, device, plan, count, classes, decision, fixed)
            run.close()
    progress("done", total, total)


@dataclass(frozen=True)
class _Task:
    """A layer for one GPU of several; `until` is when no further one is begun, in seconds of the system's clock."""

    problem: Problem
    device: Device
    settings: Settings
    plan: Plan
    until: float | None


def _spread(tasks: Sequence[_Task], progress: Callable[[str, int, int], None]) -> Iterator[Record]:
    """Records of several GPUs.

    Raises:
        MeasurementError: after all others were measured, where a layer took its process down.
    """
    lost: list[str] = []
    each, done = len(tasks[0].plan.counts), 0
    for news in crew.run(_bench_one, tasks, tasks[0].plan.gpus, quiet=True):
        if news.kind == "said":
            done += 1
            progress(f"{news.value['layer']['name']}: {news.value['tokens']} tokens", done, each * len(tasks))
            yield news.value
        elif news.kind == "lost":
            lost.append(f"{tasks[news.task].problem.layer}: {news.value}")
    if lost:
        raise MeasurementError("; ".join(lost), "Time them alone, with --backend")
    progress("done", done, done)


def _bench_one(task: _Task, tell: crew.Tell) -> None:
    """A layer, in a process that sees one GPU; its records are told."""
    if task.until is not None and time.time() > task.until:
        return
    plan = dataclasses.replace(task.plan, gpus=(), jobs=0, budget=None)
    same_kind(task.device)
    for record in bench([task.problem], task.device, task.settings, plan):
        tell(record)


def tile_at(rows: Sequence[tuple[int, str]], tokens: int) -> str:
    """The tile configuration of `Plan.tiles` at a number of tokens; "" for the backend's own choice."""
    return next((tile for most, tile in rows if tokens <= most), "")


def _decision(problem: Problem, device: Device, settings: Settings, evidence: Evidence | None) -> Decision | None:
    try:
        return decide(problem, device, settings, evidence=evidence)
    except NoBackendError:
        return None


def _record(
    run: engine.Bench,
    problem: Problem,
    device: Device,
    plan: Plan,
    count: int,
    stock: Mapping[str, str],
    decision: Decision | None,
    tiles: Mapping[str, str],
) -> Record:
    found = run.measure(count, plan.routing, plan.replays, plan.seconds, fixed=tiles)
    samples = {each.backend: each for each in found}
    timed = {name: each for name, each in samples.items() if not each.failure}
    floor = floor_us(problem, count, device.name)
    record: Record = {
        "layer": shapes.to_json(problem),
        "cell": cell_of(problem),
        "tokens": count,
        "us": {name: round(each.us, 2) for name, each in timed.items()},
        "quartiles": {name: [round(each.low, 2), round(each.high, 2)] for name, each in timed.items()},
        "replays": {name: each.replays for name, each in timed.items()},
        "activations": {name: each.activations for name, each in samples.items() if name not in stock},
        "errors": {name: float(f"{each.error:.3g}") for name, each in timed.items() if name not in stock},
        "failures": dict(run.failures),
        "stock": dict(stock),
        "tiles": {name: tile for name, tile in tiles.items() if name in timed},
        "router_included": run.routed,
        "floor_us": None if floor is None else round(floor, 2),
        "of_floor": None if floor is None else {name: round(floor / each.us, 3) for name, each in timed.items()},
    }
    if decision is not None:
        name = choice_at(decision, count)
        record["choice"] = {"backend": name, "why": decision.why}
        ours = {each: us for each, us in record["us"].items() if each not in stock}
        if name in ours:
            best = min(ours.values())
            record["choice"]["behind_best"] = round(ours[name] / best - 1, 4)
            for each in stock:
                if each in record["us"]:
                    record["choice"][f"faster_than_{each}"] = round(record["us"][each] / ours[name], 3)
    return record


def read(path: Path) -> tuple[Environment, dict[str, str], dict[Cell, list[Sample]]]:
    """A benchmark's records as measurements: where, under which conditions, and what by cell; without stock's layers.

    Args:
        path: the records, one JSON object a line, conditions first; a last line that was cut off is left out.

    Raises:
        MeasurementError: the file cannot be read, or is no benchmark.
    """
    where = str(path)
    data = contents(path)
    try:
        head, *lines = data.splitlines()
        conditions = msgspec.json.decode(head)["conditions"]
        place = msgspec.convert(conditions["environment"], Environment)
        how = {name: str(conditions[name]) for name in ("command", "method")}
        found: dict[Cell, list[Sample]] = {}
        for number, line in enumerate(lines):
            try:
                record = msgspec.json.decode(line)
            except msgspec.DecodeError:
                if number + 1 == len(lines):
                    break
                raise
            samples = found.setdefault(msgspec.convert(record["cell"], Cell), [])
            samples += _samples(record, conditions["routing"])
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        rule = f"is no benchmark's records: {type(error).__name__}: {error}"
        raise MeasurementError(rule, "Make them with: vllm-moe-oracle bench --jsonl FILE", where) from error
    if not place.sound:
        raise MeasurementError("was measured in an impossible place", where=where)
    if not all(cell.sound for cell in found):
        raise MeasurementError("has an impossible layer", where=where)
    if unsound := [each for samples in found.values() for each in samples if not each.sound]:
        raise MeasurementError(f"has an impossible measurement: {unsound[0]}", where=where)
    return place, how, found


def _samples(record: Record, routing: str) -> Iterator[Sample]:
    for name, precision in record["activations"].items():
        fields: Record = {"backend": name, "activations": precision, "tokens": record["tokens"], "routing": routing}
        if name in record["us"]:
            low, high = record["quartiles"][name]
            fields |= {"us": record["us"][name], "low": low, "high": high, "replays": record["replays"][name]}
            fields |= {"error": record["errors"][name], "router": record["router_included"]}
            fields["tile"] = record.get("tiles", {}).get(name, "")
        elif no_verdict(failure := record["failures"][name]):
            continue
        else:
            fields["failure"] = failure
        yield msgspec.convert(fields, Sample)


def speedup(records: Sequence[Record], ours: Callable[[Record], float | None], theirs: str) -> float | None:
    """Geometric mean of a stock layer's time over ours, over the records that have both; None where none has.

    Args:
        records: of `bench`.
        ours: the time of a record that counts as ours.
        theirs: name of the stock layer.
    """
    ratios = []
    for record in records:
        own, other = ours(record), record["us"].get(theirs)
        if own and other:
            ratios.append(math.log(other / own))
    return math.exp(math.fsum(ratios) / len(ratios)) if ratios else None


def plot(records: Sequence[Record], path: str) -> None:
    """Draws times over the number of tokens, one panel a layer, into a file of the kind that its name says.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers: dict[str, list[Record]] = {}
    for record in records:
        layers.setdefault(record["layer"]["name"], []).append(record)
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, (name, found) in zip(axes.flat, layers.items(), strict=False):
        for backend in sorted({each for record in found for each in record["us"]}):
            points = [(record["tokens"], record["us"][backend]) for record in found if backend in record["us"]]
            style = "--" if backend.startswith(STOCK) else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=backend)
        floors = [(record["tokens"], record["floor_us"]) for record in found if record["floor_us"]]
        if floors:
            axis.plot(*zip(*floors, strict=True), ":", color="gray", label="floor")
        axis.set(title=name, xlabel="tokens", ylabel="microseconds", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.2)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(layers) :]:
        axis.set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)
