"""`tune`: measures every accepted backend for a model's layers on this machine, and keeps what it finds."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...measure.cells import Cell, Sample
    from ...measure.tuning import Outcome, Plan
    from ...oracle.problem import Device
    from ...settings import Settings


ROUTINGS, REPLAYS, TILES = "uniform,skewed", 20, 2
"""Defaults of the options of these names."""


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="A checkpoint's folder, a config.json, SCHEME:SHAPE[@tpN], or a SHAPE in all its formats.",
            metavar="MODEL",
        ),
    ] = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="The layers of the public models that this package knows.")
    ] = False,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", metavar="N")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="The ranks hold different experts instead of parts of each.")] = (
        False
    ),
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, ten at least; else powers of two up to 8192.", metavar="N,...")
    ] = "",
    routing: Annotated[str, typer.Option(help="uniform, skewed, or both.", metavar="KIND,...")] = ROUTINGS,
    replays: Annotated[int, typer.Option(help="Timed replays of each, at most.", metavar="N")] = REPLAYS,
    budget: Annotated[float | None, typer.Option(help="Seconds for everything.", metavar="SECONDS")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that compile kernels beforehand.", metavar="N")] = 0,
    tiles: Annotated[
        int,
        typer.Option(
            help="Tile configurations of our kernels to time beside their own choice; each is compiled once.",
            metavar="N",
        ),
    ] = TILES,
    gpus: Annotated[
        str, typer.Option(help="Measure on several GPUs: all, or numbers like 0,1.", metavar="all|N,...")
    ] = "",
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write what is known of these layers here, as a profile.", metavar="FILE")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="A profile whose measurements need not be repeated; only read.", metavar="FILE"),
    ] = None,
    imported: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", help="Take the measurements of bench --jsonl, into --export or the cache.", metavar="FILE"
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the plugin, e.g. cache=DIR. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every accepted backend for a model's MoE layers on this machine, and keep it for serving.

    Measured is what is missing: a run that was ended goes on where it stopped. Measurements are kept in the user's
    cache (the setting cache) and used from the next start of a server on.

    \b
    Examples:
      vllm-moe-oracle tune ~/models/gpt-oss-20b
      vllm-moe-oracle tune mxfp4:gpt-oss-120b@tp2 --budget 60
      vllm-moe-oracle tune --shapes --jobs 60 --gpus all --export nvidia_h200.json
      vllm-moe-oracle tune --import bench.jsonl --export nvidia_h200.json

    \b
    Exit status:
      0  everything is measured
      2  the input, the cache or this machine cannot be used; one line on standard error says what
      3  no backend can run one of the layers
      4  the budget was spent, or a backend could not be measured; what was measured is kept
    """
    from ...errors import MeasurementError
    from ...measure import profile as profiles
    from ...measure import shapes as known_shapes
    from ...measure import tuning
    from ...measure.store import Store
    from ...settings import cache_folder
    from .. import NO_BACKEND, UNFINISHED, measuring, output
    from ..arguments import read_settings

    chosen = read_settings(assignments)
    if export is not None:
        profiles.check_target(export)
    if imported:
        unused = {
            "MODEL": models, "--shapes": shapes, "--tp": tp != 1, "--ep": ep, "--tokens": tokens,
            "--routing": routing != ROUTINGS, "--replays": replays != REPLAYS, "--budget": budget is not None,
            "--jobs": jobs, "--tiles": tiles != TILES, "--gpus": gpus, "--again": again, "--profile": profile,
        }  # fmt: skip
        if given := [name for name, value in unused.items() if value]:
            rule = f"{', '.join(given)} would change nothing: with --import nothing is measured"
            raise MeasurementError(rule, "Leave it out, or measure without --import")
        _import(imported, export, chosen, as_json)
        return
    if not models and not shapes:
        raise MeasurementError("no model is named", "Name one, or --shapes")
    if not models and (tp != 1 or ep):
        rule = "the layers of --shapes have numbers of ranks of their own"
        raise MeasurementError(rule, "Leave it out, or name a model", "--ep" if ep else "--tp")
    if tiles < 0:
        raise MeasurementError(f"{tiles} tile configurations are not possible", "Give 0 or more", "--tiles")
    problems = measuring.problems(models, tp, ep) if models else []
    problems += known_shapes.served() if shapes else []
    plan = _plan(tokens, routing, replays, budget, jobs, again)
    tuning.check_buckets(plan.buckets)
    read = [profiles.read(each) for each in profile or []]
    device = measuring.machine()
    plan = dataclasses.replace(plan, tiles=tiles, gpus=measuring.gpus(gpus))
    for path, each in zip(profile or [], read, strict=True):
        if said := tuning.unlike(each, device):
            output.remark("note", f"nothing of the profile {path} is used: {said}")
    store = Store(cache_folder(chosen))
    if said := store.prepare():
        output.remark("note", said)
    with measuring.progress(quiet=as_json and not sys.stderr.isatty()) as tell:
        asked = [measuring.as_asked(each, chosen) for each in problems]
        outcomes = tuning.tune(asked, device, chosen, store, plan, read, tell)
    if export is not None:
        from ...measure import environment

        samples = {cell: outcome.samples for cell, outcome in outcomes.items() if outcome.samples}
        command = "vllm-moe-oracle " + " ".join(sys.argv[1:])
        profiles.write(profiles.make(environment.of(device), samples, _conditions(plan, command)), export)
    results = _results(outcomes, device, chosen)
    if as_json:
        output.print_json({"device": device, "cache": str(store.path), "groups": results})
    else:
        _print(results, str(store.path))
    for outcome in outcomes.values():
        if outcome.unfinished:
            output.remark("warning", f"{outcome.problem.layer}: {outcome.unfinished}")
    if any(outcome.unfinished and not outcome.samples and not outcome.seconds for outcome in outcomes.values()):
        raise typer.Exit(NO_BACKEND)
    if any(outcome.unfinished or any(each.failure for each in outcome.samples) for outcome in outcomes.values()):
        raise typer.Exit(UNFINISHED)


def _import(files: list[Path], export: Path | None, settings: Settings, as_json: bool) -> None:
    """Puts measurements of benchmarks into a profile, or into the cache."""
    from ...errors import MeasurementError
    from ...measure import benching
    from ...measure import profile as profiles
    from ...measure.store import Store
    from ...settings import cache_folder
    from .. import output

    read = [benching.read(path) for path in files]
    place, conditions, _ = read[0]
    if other := [str(path) for path, each in zip(files, read, strict=True) if each[0] != place]:
        raise MeasurementError("is from another environment than the first file", where=", ".join(other))
    samples: dict[Cell, list[Sample]] = {}
    for _, _, found in read:
        for cell, some in found.items():
            samples.setdefault(cell, []).extend(some)
    if export is not None:
        profiles.write(profiles.make(place, samples, conditions), export)
        where = str(export)
    else:
        store = Store(cache_folder(settings))
        if said := store.prepare():
            output.remark("note", said)
        for cell, some in samples.items():
            store.add(place, cell, some)
        where = str(store.path)
    count = sum(map(len, samples.values()))
    if as_json:
        output.print_json({"measurements": count, "layers": len(samples), "environment": place, "kept": where})
    else:
        output.show(f"{count} measurements of {len(samples)} layers, {place}: kept in {where}")


def _plan(tokens: str, routing: str, replays: int, budget: float | None, jobs: int, again: bool) -> Plan:
    from typing import get_args

    from ...errors import MeasurementError
    from ...measure.cells import RoutingKind
    from ...measure.tuning import BUCKETS, Plan
    from .. import measuring

    kinds = tuple(dict.fromkeys(word.strip() for word in routing.split(",")))
    if not set(kinds) <= set(get_args(RoutingKind)) or "uniform" not in kinds:
        raise MeasurementError(f"{routing!r} is no routing", "Write uniform, or uniform,skewed", "--routing")
    measuring.check_numbers(replays, jobs, budget)
    counts = measuring.counts(tokens) if tokens else BUCKETS
    return Plan(counts, kinds, replays, 1.0, budget, jobs, again)  # type: ignore[arg-type]


def _conditions(plan: Plan, command: str) -> dict[str, str]:
    from ...measure import engine, timing

    return {
        "command": command,
        "method": (
            f"CUDA graphs, {timing.FLUSH_BYTES >> 20} MiB written before each replay, backends in changing order, "
            f"median and quartiles in microseconds of up to {plan.replays} replays; {engine.CHECKED} tokens of each "
            "call compared with a float32 reference before; beside the own choice of our kernels, and in its place "
            f"where faster, up to {plan.tiles} tile configurations"
        ),
    }


def _results(outcomes: dict[Cell, Outcome], device: Device, settings: Settings) -> list[dict[str, Any]]:
    """What the oracle makes of the measurements, one for each cell."""
    from ...errors import NoBackendError
    from ...measure import lookup
    from ...oracle.oracle import decide

    found = []
    for cell, outcome in outcomes.items():
        problem = outcome.problem
        decision = None
        try:
            decision = decide(problem, device, settings, evidence=lookup.evidence(problem, device, settings))
        except NoBackendError as error:
            outcome.unfinished = outcome.unfinished or error.rule.split("\n")[0]
        found.append(
            {
                "layer": problem.layer,
                "cell": str(cell),
                "measured": outcome.measured,
                "seconds": round(outcome.seconds, 1),
                "spent": {words: round(seconds, 2) for words, seconds in sorted(outcome.spent.items())},
                "unfinished": outcome.unfinished,
                "failures": {each.backend: each.failure for each in outcome.samples if each.failure},
                "backend": None if decision is None else decision.backend,
                "why": None if decision is None else decision.why,
                "because": None if decision is None else decision.because,
                "steps": [] if decision is None else decision.steps,
                "times": {} if decision is None or decision.measured is None else _times(decision.measured.times),
            }
        )
    return found


def _times(times: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]) -> dict[str, dict[str, float]]:
    return {name: {str(count): round(us, 2) for count, us in points} for name, points in times}


def _print(results: list[dict[str, Any]], cache: str) -> None:
    from .. import output

    for result in results:
        facts = [("layer", result["cell"]), ("measured", f"{result['measured']} times in {result['seconds']} s")]
        if result["spent"]:
            facts.append(("seconds", ", ".join(f"{words} {took:.1f}" for words, took in result["spent"].items())))
        facts += [("failed", f"{name}: {why}") for name, why in result["failures"].items()]
        facts += [("backend", result["backend"] or "none"), ("why", f"{result['why']}: {result['because']}")]
        output.show(f"\n{result['layer']}", output.facts(facts))
        if result["times"]:
            counts = list(next(iter(result["times"].values())))
            rows = [[name, *(f"{us[count]:.0f}" for count in counts)] for name, us in result["times"].items()]
            output.show("", output.table(("us by tokens", *counts), rows, indent=2))
    output.show(f"\nkept in {cache}")
