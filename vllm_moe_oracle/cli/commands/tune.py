"""`tune`: measures every accepted backend for a model's layers on this machine, and keeps what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ...checkpoint.layer_names import compact_layer_names
from ...checkpoint.ranks import Ranks
from ...core.problem import Device, Problem
from ...devices import detect
from ...errors import MeasurementError, NoBackendError
from ...measurements import bench_records, lookup, model_shapes
from ...measurements import profile as profiles
from ...measurements.environment import Environment
from ...measurements.kernel_shape import KernelShape, RoutingKind, Sample, kernel_shape_of
from ...measurements.store import Store
from ...oracle.registry import default_registry
from ...oracle.selection import decide
from ...oracle.stock_choice import asks_stock, choose_stock, left_to_stock
from ...settings import AUTO, Settings, cache_dir, env_var, set_batch_invariant
from .. import EXIT_INCOMPLETE, EXIT_NO_BACKEND, layer_arguments, output
from ..arguments import (
    AdditionalConfig,
    AsJson,
    Assignments,
    BatchInvariant,
    CompileJobs,
    DataParallel,
    Dtype,
    ExpertParallel,
    Gpus,
    ModelNames,
    Quantization,
    Replays,
    TensorParallel,
    command_settings,
    count_option,
    counts_option,
    file_option,
    names_option,
    output_option,
    seconds_option,
)
from ..writable import check_output, is_standard_output

if TYPE_CHECKING:
    from ...measuring.tuning import TuneOptions, TuneOutcome


_ELSEWHERE = f"Measure on the machine that serves: tune --export FILE there, then {env_var('profile')}=FILE here"

_Tokens = Annotated[
    str,
    counts_option(
        "Numbers of tokens, at least ten, with 1, 2, 4, 8 and 16. [default: powers of two from 1 to 8192]",
    ),
]
_Routing = Annotated[str, names_option("uniform, skewed, or both.", lambda: get_args(RoutingKind), "KIND,...")]
_Tiles = Annotated[
    int, count_option("Tile configurations to time beside the choice of this project's kernels; each is compiled.")
]
_Export = Annotated[Path | None, output_option("Write all measurements of these layers to a profile.")]
_Profiles = Annotated[list[Path] | None, file_option("A profile whose measurements are not repeated; never written.")]
_Imported = Annotated[
    list[Path] | None,
    file_option("Take the measurements of bench --jsonl, into --export or the cache.", "--import"),
]


NEEDS_WORKING_DIRECTORY = True

HELP = f"""\
Measure every accepted backend for a model's MoE layers on this machine, and keep the times for serving.

Only what is missing is measured: an interrupted run continues where it stopped. Measurements are kept in the user's
cache ({env_var("cache")}); servers use them from their next start.

\b
Examples:
  vllm-moe-oracle tune ~/models/gpt-oss-20b
  vllm-moe-oracle tune ~/models/Qwen3-30B-A3B --quantization mxfp8 --dp 4 --ep
  vllm-moe-oracle tune mxfp4:gpt-oss-120b@tp2 --budget 60
  vllm-moe-oracle tune --shapes --jobs 60 --gpus all --export nvidia_h200.json
  vllm-moe-oracle tune --import bench.jsonl --export nvidia_h200.json

\b
Exit status:
  0  everything is measured, but for layers that are left to stock vLLM
  1  a backend ended the process other than by a kernel; what was measured
     before is kept
  2  the input, the cache or this machine cannot be used; one line on standard
     error says what
  3  no backend can run one of the layers, or vLLM refuses the options for the
     model
  4  the budget was spent, or a backend could not be measured or ended the
     process that measures it; what was measured is kept
"""


def command(
    context: typer.Context,
    models: ModelNames = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="The layers of the public models that this package knows.")
    ] = False,
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    ep: ExpertParallel = False,
    quantization: Quantization = "",
    dtype: Dtype = AUTO,
    batch_invariant: BatchInvariant = None,
    tokens: _Tokens = "",
    routing: _Routing = "uniform,skewed",
    replays: Replays = 20,
    budget: Annotated[float | None, seconds_option("Seconds for everything; the next call measures the rest.")] = None,
    jobs: CompileJobs = 0,
    tiles: _Tiles = 2,
    gpus: Gpus = "",
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again what is already stored.")] = False,
    export: _Export = None,
    profile: _Profiles = None,
    imported: _Imported = None,
    additional_config: AdditionalConfig = "",
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """What `HELP` says."""
    chosen = command_settings(assignments, additional_config)
    if imported:
        _check_import_options(context)
        if export is not None:
            check_output(context, export, "--export", None, imported)
        _import_measurements(imported, export, chosen, as_json)
        return
    from ...measuring import tuning  # needs torch

    set_batch_invariant(batch_invariant)
    named = _named_problems(models, shapes, Ranks(tp, dp, ep), quantization, dtype, tiles, chosen)
    problems = [layer_arguments.apply_settings(each, chosen) for each in named]
    options = _tune_options(tokens, routing, replays, budget, jobs, remeasure)
    tuning.check_token_counts(options.token_counts)
    if export is not None:
        check_output(context, export, "--export", None, [*(models or []), *(profile or [])])
        profiles.check_writable(export, detect.detect().name, {kernel_shape_of(each) for each in problems})
    known = [profiles.read(each) for each in profile or []]
    device = layer_arguments.require_gpu(_ELSEWHERE)
    # Always in processes of their own: a backend that ends one is stored as failing.
    options = dataclasses.replace(options, tiles=tiles, gpus=layer_arguments.parse_gpus(gpus) or (None,))
    _note_unused_profiles(profile or [], known, device)
    store = _open_store(chosen)
    problems = _without_stocks(named, device, chosen)
    with layer_arguments.progress_bar(as_json) as report:
        outcomes = tuning.tune(problems, device, chosen, store, options, known, report)
    if export is not None:
        _export(export, outcomes, device, options)
    results = _decision_results(outcomes, device, chosen)
    if is_standard_output(export):
        _print_note(f"the times of {len(results)} layers are kept in {store.path}, too")
    else:
        _print_results(results, device, str(store.path), as_json)
    _exit_if_unfinished(outcomes)


def _check_import_options(context: typer.Context) -> None:
    """Refuses options that have no effect on an import.

    Raises:
        MeasurementError: some are given.
    """
    used = ("imported", "export", "additional_config", "assignments", "as_json")
    given = [each for each in context.command.params if each.name not in used and _is_given(context, each.name)]
    if given:
        names = ", ".join(each.opts[0] if each.opts[0].startswith("-") else "MODEL" for each in given)
        rule = f"{names} would change nothing: with --import nothing is measured"
        raise MeasurementError(rule, "Leave it out, or measure without --import")


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _note_unused_profiles(paths: list[Path], known: list[profiles.Profile], device: Device) -> None:
    """Says which profiles are from another environment."""
    from ...measuring import tuning

    for path, profile in zip(paths, known, strict=True):
        if reason := tuning.why_not_reusable(profile, device):
            output.print_message("note", f"nothing of the profile {path} is used: {reason}")


def _named_problems(
    models: list[str] | None,
    shapes: bool,
    ranks: Ranks,
    quantization: str,
    dtype: str,
    tiles: int,
    settings: Settings,
) -> dict[Problem, set[str]]:
    """The layers to measure, as `layer_arguments.resolve_problems` gives them.

    Raises:
        OracleError: no layer is named, a name is unknown, or options contradict each other.
    """
    if not models and not shapes:
        raise MeasurementError("no model is named", "Name one, such as mxfp8:qwen3-30b-a3b, or give --shapes")
    if not models:
        given = {"--ep": ranks.ep, "--tp": ranks.tp != 1, "--dp": ranks.dp != 1, "--quantization": bool(quantization)}
        given["--dtype"] = dtype != AUTO
        if useless := [option for option, is_given in given.items() if is_given]:
            rule = "the layers of --shapes have numbers of ranks, formats and dtypes of their own"
            raise MeasurementError(rule, "Leave it out, or name a model", useless[0])
    if tiles < 0:
        raise MeasurementError(f"{tiles} tile configurations are not possible", "Give 0 or more", "--tiles")
    found: dict[Problem, set[str]] = {}
    if models:  # measured first: a budget may end before the shapes
        found = layer_arguments.resolve_problems(models, ranks, quantization, dtype, settings.ragged_shards)
    for each in model_shapes.served_problems() if shapes else ():
        found.setdefault(each, set()).add("")
    return found


def _without_stocks(named: Mapping[Problem, set[str]], device: Device, settings: Settings) -> list[Problem]:
    """The layers as they are served, without those that a server of each checkpoint leaves to stock vLLM, for which
    times decide nothing; a note says why."""
    measured: list[Problem] = []
    left: dict[str, list[str]] = {}
    registry = default_registry()
    for read, methods in named.items():
        problem = layer_arguments.apply_settings(read, settings)
        reasons: list[str] = []
        if asks_stock(problem, device, settings, registry):
            try:
                decide(problem, device, settings)
            except NoBackendError:
                declared = problem.with_activations(read.scheme.activations)
                stocks = [choose_stock(declared, device, registry, method=each) for each in sorted(methods)]
                reasons = [left_to_stock(problem, stock) for stock in stocks]
        if not reasons or "" in reasons:
            measured.append(problem)
        for reason in filter(None, dict.fromkeys(reasons)):
            left.setdefault(reason, []).append(problem.layer)
    for to_stock, names in left.items():
        _print_note(f"{compact_layer_names(names)}: not measured, {to_stock}")
    return measured


def _open_store(settings: Settings) -> Store:
    """The cache of measurements; a note says when it was replaced or cannot be used."""
    store = Store(cache_dir(settings), _print_note)
    if note := store.prepare():
        output.print_message("note", note)
    return store


def _print_note(words: str) -> None:
    output.print_message("note", words)


def _export(path: Path, outcomes: dict[KernelShape, TuneOutcome], device: Device, options: TuneOptions) -> None:
    """Writes what was measured as a profile."""
    samples = {shape: outcome.samples for shape, outcome in outcomes.items() if outcome.samples}
    made = profiles.make(Environment.of(device), samples, _conditions(options))
    profiles.check_replaces(made, path)
    profiles.write(made, path)


def _exit_if_unfinished(outcomes: dict[KernelShape, TuneOutcome]) -> None:
    """Warns of backends that could not be measured, and exits with the status for an incomplete run."""
    for outcome in outcomes.values():
        if outcome.unfinished:
            output.print_message("warning", f"{outcome.problem.layer}: {outcome.unfinished}")
    if any(outcome.no_backend for outcome in outcomes.values()):
        raise typer.Exit(EXIT_NO_BACKEND)
    if any(outcome.unfinished or any(each.failure for each in outcome.samples) for outcome in outcomes.values()):
        raise typer.Exit(EXIT_INCOMPLETE)


def _import_measurements(files: list[Path], export: Path | None, settings: Settings, as_json: bool) -> None:
    """Puts measurements of benchmarks into a profile, or into the cache."""
    read = [bench_records.read_samples(path, _print_note) for path in files]
    place, conditions, _ = read[0]
    if other := [str(path) for path, each in zip(files, read, strict=True) if each[0] != place]:
        raise MeasurementError("is from another environment than the first file", where=", ".join(other))
    samples = _merge_samples([found for _, _, found in read])
    if export is not None:
        made = profiles.make(place, samples, conditions)
        profiles.check_replaces(made, export)
        profiles.write(made, export)
        where = str(export)
    else:
        store = _open_store(settings)
        for shape, some in samples.items():
            store.add(place, shape, some)
        where = str(store.path)
    count = sum(map(len, samples.values()))
    words = f"{count} measurements of {len(samples)} layers, {place}: kept in {where}"
    if is_standard_output(export):
        _print_note(words)
    elif as_json:
        output.print_json({"measurements": count, "layers": len(samples), "environment": place, "kept": where})
    else:
        output.show(words)


def _merge_samples(read: list[dict[KernelShape, list[Sample]]]) -> dict[KernelShape, list[Sample]]:
    """The samples of several files. A later one replaces an earlier one of the same key, as in the cache; a note says
    how many differ."""
    merged: dict[KernelShape, dict[Any, Sample]] = {}
    differing: list[str] = []
    for found in read:
        for shape, some in found.items():
            kept = merged.setdefault(shape, {})
            for each in some:
                before = kept.get(each.key)
                if before is not None and before != each:
                    place = f"{each.backend} at {each.tokens} tokens, {each.routing} routing"
                    differing.append(f"{place}: {_outcome(each)} replaces {_outcome(before)}")
                kept[each.key] = each
    if differing:
        _print_note(f"{len(differing)} measurements replace earlier ones that differ, the first {differing[0]}")
    return {shape: list(kept.values()) for shape, kept in merged.items()}


def _outcome(sample: Sample) -> str:
    """A sample's time or failure, and the precision of its activations, in words."""
    if sample.failure:
        return f"a failure ({sample.failure})"
    return f"{sample.us:.2f} us ({sample.activations} activations{', ' if sample.tile else ''}{sample.tile})"


def _tune_options(
    tokens: str, routing: str, replays: int, budget: float | None, jobs: int, remeasure: bool
) -> TuneOptions:
    from ...measuring.tuning import TOKEN_COUNTS, TuneOptions

    kinds = tuple(dict.fromkeys(word.strip() for word in routing.split(",")))
    if not set(kinds) <= set(get_args(RoutingKind)) or "uniform" not in kinds:
        raise MeasurementError(f"{routing!r} is not a kind of routing", "Write uniform, or uniform,skewed", "--routing")
    layer_arguments.check_options(replays, jobs, budget)
    counts = layer_arguments.parse_token_counts(tokens) if tokens else TOKEN_COUNTS
    return TuneOptions(counts, kinds, replays, 1.0, budget, jobs, remeasure)  # type: ignore[arg-type]  # checked kinds


def _conditions(plan: TuneOptions) -> dict[str, str]:
    from ...measuring.engine import describe_method

    tiles = f"in place of our kernels' own choice, the fastest of up to {plan.tiles} tile configurations where faster"
    return {"command": output.command_line(), "method": f"{describe_method(plan.replays)}; {tiles}"}


def _decision_results(
    outcomes: dict[KernelShape, TuneOutcome], device: Device, settings: Settings
) -> list[dict[str, Any]]:
    """What the oracle makes of the measurements, one for each kernel shape."""
    found = []
    for shape, outcome in outcomes.items():
        problem = outcome.problem
        decision = None
        try:
            decision = decide(
                problem, device, settings, measurements=lookup.find_measurements(problem, device, settings)
            )
        except NoBackendError as error:
            outcome.unfinished = outcome.unfinished or error.rule
        found.append(
            {
                "layer": problem.layer,
                "kernel_shape": str(shape),
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
                if decision is None or decision.comparison is None
                else _times_by_tokens(decision.comparison.times),
            }
        )
    return found


def _times_by_tokens(times: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]) -> dict[str, dict[str, float]]:
    return {name: {str(count): round(us, 2) for count, us in points} for name, points in times}


def _time_rows(times: dict[str, dict[str, float]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Heads and rows of a table of microseconds; a cell is empty where a backend has no time and another has one."""
    counts = sorted({count for us in times.values() for count in us}, key=int)
    rows = [[name, *(f"{us[count]:.0f}" if count in us else "" for count in counts)] for name, us in times.items()]
    return ("us by tokens", *counts), rows


def _print_results(results: list[dict[str, Any]], device: Device, cache: str, as_json: bool) -> None:
    """Prints what the oracle decides by the measurements."""
    if as_json:
        output.print_json({"device": device, "cache": cache, "groups": results})
        return
    for result in results:
        facts = [
            ("layer", result["kernel_shape"]),
            ("measured", f"{result['measured']} times in {result['seconds']} s"),
        ]
        if result["spent"]:
            facts.append(("seconds", ", ".join(f"{words} {took:.1f}" for words, took in result["spent"].items())))
        facts += [("failed", f"{name}: {why}") for name, why in result["failures"].items()]
        facts += [("backend", result["backend"] or "none"), ("why", f"{result['why']}: {result['explanation']}")]
        output.show(f"\n{result['layer']}", output.key_value_table(facts))
        if result["times"]:
            heads, rows = _time_rows(result["times"])
            output.show_table(heads, rows, indent=2)
    output.show(f"\nkept in {cache}")
