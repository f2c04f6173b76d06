"""`tune`: measures every accepted backend for a model's layers on this machine, and keeps what it finds."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...core.problem import Device, Problem
    from ...measurements.kernel_shape import KernelShape, Sample
    from ...measurements.store import Store
    from ...measuring.tuning import TuneOptions, TuneOutcome
    from ...settings import Settings


DEFAULT_ROUTINGS, DEFAULT_REPLAYS, DEFAULT_TILES = "uniform,skewed", 20, 2
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
    ep: Annotated[
        bool, typer.Option("--ep", help="Expert parallelism over the --tp ranks (vLLM's --enable-expert-parallel).")
    ] = (False),
    tokens: Annotated[
        str,
        typer.Option(
            help="Numbers of tokens, at least ten, with 1, 2, 4, 8 and 16. Default: powers of two from 1 to 8192.",
            metavar="N,...",
        ),
    ] = "",
    routing: Annotated[str, typer.Option(help="uniform, skewed, or both.", metavar="KIND,...")] = DEFAULT_ROUTINGS,
    replays: Annotated[
        int, typer.Option(help="Timed replays of each backend and number of tokens, at most.", metavar="N")
    ] = DEFAULT_REPLAYS,
    budget: Annotated[float | None, typer.Option(help="Seconds for everything.", metavar="SECONDS")] = None,
    jobs: Annotated[
        int, typer.Option(help="Processes that compile kernels before the measurements; 0 for none.", metavar="N")
    ] = 0,
    tiles: Annotated[
        int,
        typer.Option(
            help="Tile configurations of our kernels to time beside their own choice; each is compiled once.",
            metavar="N",
        ),
    ] = DEFAULT_TILES,
    gpus: Annotated[
        str, typer.Option(help="Measure on several GPUs: all, or numbers like 0,1.", metavar="all|N,...")
    ] = "",
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again what is already stored.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write all measurements of these layers to a profile.", metavar="FILE")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Read-only profile; its measurements are not repeated.", metavar="FILE"),
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

    Only what is missing is measured: an interrupted run continues where it stopped. Measurements are kept in the user's
    cache (the setting cache); servers use them from their next start.

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
    from ...measurements import profile as profiles
    from ...measuring import tuning
    from .. import layer_arguments, output
    from ..arguments import command_settings

    chosen = command_settings(assignments)
    if export is not None:
        profiles.check_writable(export)
    if imported:
        unused = {
            "MODEL": models, "--shapes": shapes, "--tp": tp != 1, "--ep": ep, "--tokens": tokens,
            "--routing": routing != DEFAULT_ROUTINGS, "--replays": replays != DEFAULT_REPLAYS,
            "--budget": budget is not None, "--jobs": jobs, "--tiles": tiles != DEFAULT_TILES, "--gpus": gpus,
            "--remeasure": remeasure, "--profile": profile,
        }  # fmt: skip
        if given := [name for name, value in unused.items() if value]:
            rule = f"{', '.join(given)} would change nothing: with --import nothing is measured"
            raise MeasurementError(rule, "Leave it out, or measure without --import")
        _import_measurements(imported, export, chosen, as_json)
        return
    problems = _named_problems(models, shapes, tp, ep, tiles)
    options = _tune_options(tokens, routing, replays, budget, jobs, remeasure)
    tuning.check_buckets(options.buckets)
    known = [profiles.read(each) for each in profile or []]
    device = layer_arguments.require_gpu()
    options = dataclasses.replace(options, tiles=tiles, gpus=layer_arguments.parse_gpus(gpus))
    for path, each in zip(profile or [], known, strict=True):
        if reason := tuning.why_not_reusable(each, device):
            output.print_message("note", f"nothing of the profile {path} is used: {reason}")
    store = _open_store(chosen)
    with layer_arguments.progress_bar(quiet=as_json and not sys.stderr.isatty()) as report:
        problems = [layer_arguments.apply_settings(each, chosen) for each in problems]
        outcomes = tuning.tune(problems, device, chosen, store, options, known, report)
    if export is not None:
        _export(export, outcomes, device, options)
    results = _decision_results(outcomes, device, chosen)
    if as_json:
        output.print_json({"device": device, "cache": str(store.path), "groups": results})
    else:
        _print(results, str(store.path))
    _exit_if_unfinished(outcomes)


def _named_problems(models: list[str] | None, shapes: bool, tp: int, ep: bool, tiles: int) -> list[Problem]:
    """The layers to measure.

    Raises:
        OracleError: no layer is named, a name is unknown, or options contradict each other.
    """
    from ...errors import MeasurementError
    from ...measurements import model_shapes
    from .. import layer_arguments

    if not models and not shapes:
        raise MeasurementError("no model is named", "Name one, or --shapes")
    if not models and (tp != 1 or ep):
        rule = "the layers of --shapes have numbers of ranks of their own"
        raise MeasurementError(rule, "Leave it out, or name a model", "--ep" if ep else "--tp")
    if tiles < 0:
        raise MeasurementError(f"{tiles} tile configurations are not possible", "Give 0 or more", "--tiles")
    problems = layer_arguments.resolve_problems(models, tp, ep) if models else []
    return problems + (model_shapes.served_problems() if shapes else [])


def _open_store(settings: Settings) -> Store:
    """The cache of measurements; a note says when it was replaced or cannot be used."""
    from ...measurements.store import Store
    from ...settings import cache_dir
    from .. import output

    store = Store(cache_dir(settings))
    if note := store.prepare():
        output.print_message("note", note)
    return store


def _export(path: Path, outcomes: dict[KernelShape, TuneOutcome], device: Device, options: TuneOptions) -> None:
    """Writes what was measured as a profile."""
    from ...measurements import environment
    from ...measurements import profile as profiles

    samples = {shape: outcome.samples for shape, outcome in outcomes.items() if outcome.samples}
    command = "vllm-moe-oracle " + " ".join(sys.argv[1:])
    profiles.write(profiles.make(environment.of(device), samples, _conditions(options, command)), path)


def _exit_if_unfinished(outcomes: dict[KernelShape, TuneOutcome]) -> None:
    """Warns of backends that could not be measured, and exits with the status for an incomplete run."""
    from .. import EXIT_INCOMPLETE, EXIT_NO_BACKEND, output

    for outcome in outcomes.values():
        if outcome.unfinished:
            output.print_message("warning", f"{outcome.problem.layer}: {outcome.unfinished}")
    if any(outcome.unfinished and not outcome.samples and not outcome.seconds for outcome in outcomes.values()):
        raise typer.Exit(EXIT_NO_BACKEND)
    if any(outcome.unfinished or any(each.failure for each in outcome.samples) for outcome in outcomes.values()):
        raise typer.Exit(EXIT_INCOMPLETE)


def _import_measurements(files: list[Path], export: Path | None, settings: Settings, as_json: bool) -> None:
    """Puts measurements of benchmarks into a profile, or into the cache."""
    from ...errors import MeasurementError
    from ...measurements import bench_records
    from ...measurements import profile as profiles
    from .. import output

    read = [bench_records.read_samples(path) for path in files]
    place, conditions, _ = read[0]
    if other := [str(path) for path, each in zip(files, read, strict=True) if each[0] != place]:
        raise MeasurementError("is from another environment than the first file", where=", ".join(other))
    samples: dict[KernelShape, list[Sample]] = {}
    for _, _, found in read:
        for cell, some in found.items():
            samples.setdefault(cell, []).extend(some)
    if export is not None:
        profiles.write(profiles.make(place, samples, conditions), export)
        where = str(export)
    else:
        store = _open_store(settings)
        for cell, some in samples.items():
            store.add(place, cell, some)
        where = str(store.path)
    count = sum(map(len, samples.values()))
    if as_json:
        output.print_json({"measurements": count, "layers": len(samples), "environment": place, "kept": where})
    else:
        output.show(f"{count} measurements of {len(samples)} layers, {place}: kept in {where}")


def _tune_options(
    tokens: str, routing: str, replays: int, budget: float | None, jobs: int, remeasure: bool
) -> TuneOptions:
    from typing import get_args

    from ...errors import MeasurementError
    from ...measurements.kernel_shape import RoutingKind
    from ...measuring.tuning import BUCKETS, TuneOptions
    from .. import layer_arguments

    kinds = tuple(dict.fromkeys(word.strip() for word in routing.split(",")))
    if not set(kinds) <= set(get_args(RoutingKind)) or "uniform" not in kinds:
        raise MeasurementError(f"{routing!r} is not a routing", "Write uniform, or uniform,skewed", "--routing")
    layer_arguments.check_options(replays, jobs, budget)
    counts = layer_arguments.parse_token_counts(tokens) if tokens else BUCKETS
    return TuneOptions(counts, kinds, replays, 1.0, budget, jobs, remeasure)  # type: ignore[arg-type]


def _conditions(plan: TuneOptions, command: str) -> dict[str, str]:
    from ...measuring import engine, timing

    return {
        "command": command,
        "method": (
            f"CUDA graphs, {timing.FLUSH_BYTES >> 20} MiB written before each replay, backends in changing order, "
            f"median and quartiles in microseconds of up to {plan.replays} replays; {engine.CHECKED_TOKENS} tokens "
            "of each call compared with a float32 reference before; beside the own choice of our kernels, and in its "
            f"place where faster, up to {plan.tiles} tile configurations"
        ),
    }


def _decision_results(
    outcomes: dict[KernelShape, TuneOutcome], device: Device, settings: Settings
) -> list[dict[str, Any]]:
    """What the oracle makes of the measurements, one for each cell."""
    from ...errors import NoBackendError
    from ...measurements import lookup
    from ...oracle.selection import decide

    found = []
    for cell, outcome in outcomes.items():
        problem = outcome.problem
        decision = None
        try:
            decision = decide(
                problem, device, settings, measurements=lookup.find_measurements(problem, device, settings)
            )
        except NoBackendError as error:
            outcome.unfinished = outcome.unfinished or error.rule.split("\n")[0]
        found.append(
            {
                "layer": problem.layer,
                "cell": str(cell),
                "measured": outcome.measured,
                "seconds": round(outcome.seconds, 1),
                "spent": {words: round(seconds, 2) for words, seconds in sorted(outcome.phase_seconds.items())},
                "unfinished": outcome.unfinished,
                "failures": {each.backend: each.failure for each in outcome.samples if each.failure},
                "backend": None if decision is None else decision.backend,
                "why": None if decision is None else decision.why,
                "explanation": None if decision is None else decision.explanation,
                "token_ranges": [] if decision is None else decision.token_ranges,
                "times": {}
                if decision is None or decision.measured is None
                else _times_by_tokens(decision.measured.times),
            }
        )
    return found


def _times_by_tokens(times: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]) -> dict[str, dict[str, float]]:
    return {name: {str(count): round(us, 2) for count, us in points} for name, points in times}


def _print(results: list[dict[str, Any]], cache: str) -> None:
    from .. import output

    for result in results:
        facts = [("layer", result["cell"]), ("measured", f"{result['measured']} times in {result['seconds']} s")]
        if result["spent"]:
            facts.append(("seconds", ", ".join(f"{words} {took:.1f}" for words, took in result["spent"].items())))
        facts += [("failed", f"{name}: {why}") for name, why in result["failures"].items()]
        facts += [("backend", result["backend"] or "none"), ("why", f"{result['why']}: {result['explanation']}")]
        output.show(f"\n{result['layer']}", output.key_value_table(facts))
        if result["times"]:
            counts = list(next(iter(result["times"].values())))
            rows = [[name, *(f"{us[count]:.0f}" for count in counts)] for name, us in result["times"].items()]
            output.show("", output.table(("us by tokens", *counts), rows, indent=2))
    output.show(f"\nkept in {cache}")
