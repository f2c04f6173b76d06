"""`bench`: times backends beside stock vLLM's own layers, in one run on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...checkpoint.ranks import Ranks
from ...core.problem import Device, Problem
from ...errors import MeasurementError, did_you_mean
from ...measurements import bench_records, model_shapes
from ...measurements.bench_records import BenchRecord
from ...measurements.environment import Environment
from ...measurements.kernel_shape import KernelShape
from ...oracle.registry import default_registry
from ...report import page_data, plots
from ...settings import AUTO, Settings, set_batch_invariant
from ...whole_files import append_whole, replacing, writing
from .. import EXIT_INCOMPLETE, completion, layer_arguments, output
from ..arguments import (
    AdditionalConfig,
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
    counts_option,
    file_option,
    name_option,
    names_option,
    output_option,
    seconds_option,
)
from ..writable import PICTURE, RECORDS, check_output, holds_data, is_standard_output

if TYPE_CHECKING:
    from ...measuring.benchmarks import BenchOptions


DEFAULT_SCHEMES = "mxfp8,mxfp4,int4_g128,int4_g32,int8_g128"
"""Formats of `--shape` where `--scheme` names none."""
_ELSEWHERE = "Run it on the machine with the GPU: report, and tune --import, read its --jsonl FILE on any"


_Schemes = Annotated[
    str | None,
    names_option(
        f"Formats, for every SHAPE of --shape. [default: {DEFAULT_SCHEMES}]", lambda: model_shapes.SCHEME_NAMES
    ),
]
_Shapes = Annotated[
    str,
    names_option("Names of model shapes, each optionally with @tpN. An unknown name lists all.", model_shapes.names),
]
_Stock = Annotated[
    str,
    names_option(
        "Stock vLLM's layers beside the plugin's: values of --moe-backend, or none.",
        lambda: [*completion.vllm_backends(), "none"],
    ),
]
_Plot = Annotated[
    Path | None,
    file_option(
        "Draw times, and the speed-up over stock, into this file (.svg, .png), in place of an earlier picture; needs "
        "the extra plot."
    ),
]


NEEDS_WORKING_DIRECTORY = True

HELP = """\
Time every accepted backend beside stock vLLM's own layer, on this machine, in one run.

The first line of the records holds the conditions and the command that repeats
them. A file of earlier records is appended to; one of another environment is
refused before anything is timed.

\b
Examples:
  vllm-moe-oracle bench ~/models/gpt-oss-20b
  vllm-moe-oracle bench mxfp8:qwen3-30b-a3b --tokens 1,256 --stock auto,marlin
  vllm-moe-oracle bench ~/models/Mixtral-8x7B --quantization mxfp8 --dp 4 --ep
  vllm-moe-oracle bench --scheme mxfp8,int4_g128 --shape minimax-m2@tp4
  vllm-moe-oracle bench mxfp4:gpt-oss-20b --peers-folder ~/peers

\b
Exit status:
  0  everything was timed
  1  a backend ended the process; the records before are written
  2  the input or this machine cannot be used; one line on standard error says
     what
  3  vLLM refuses the options for the model
  4  a backend, a stock layer or a kernel of another project could not be timed,
     or failed its check; the records say why
"""


def command(
    context: typer.Context,
    models: ModelNames = None,
    scheme: _Schemes = None,
    shape: _Shapes = "",
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    ep: ExpertParallel = False,
    quantization: Quantization = "",
    dtype: Dtype = AUTO,
    batch_invariant: BatchInvariant = None,
    tokens: Annotated[str, counts_option("Numbers of tokens.")] = "1,2,4,8,16,32,64,128,256,512",
    routing: Annotated[str, name_option("uniform or skewed.", lambda: ["uniform", "skewed"], "KIND")] = "uniform",
    stock: _Stock = "auto",
    backend: Annotated[str, names_option("Only these backends.", completion.backends)] = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="Time kernels of other projects, too, which the oracle never chooses.")
    ] = False,
    peers_folder: Annotated[
        Path | None,
        file_option("Where their packages lie, instead of the environment; implies --peers.", metavar="FOLDER"),
    ] = None,
    replays: Replays = 30,
    jobs: CompileJobs = 0,
    gpus: Gpus = "",
    budget: Annotated[float | None, seconds_option("Start no further layer after this many seconds.")] = None,
    jsonl: Annotated[Path | None, output_option("Append records to this file, one JSON object a line.")] = None,
    plot: _Plot = None,
    additional_config: AdditionalConfig = "",
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records, one JSON object a line.")] = False,
) -> None:
    """What `HELP` says."""
    chosen = command_settings(assignments, additional_config)
    set_batch_invariant(batch_invariant)
    problems = _kernel_shapes(models, scheme, shape, Ranks(tp, dp, ep), quantization, dtype, chosen)
    options = _bench_options(tokens, routing, replays, stock, backend, jobs, budget)
    if plot is not None:
        _check_plot_path(plot)
        check_output(context, plot, "--plot", PICTURE, [*(models or []), jsonl])
    if jsonl is not None:
        check_output(context, jsonl, "--jsonl", RECORDS, [*(models or []), plot])
    device = layer_arguments.require_gpu(_ELSEWHERE)
    if jsonl is not None and holds_data(jsonl):
        bench_records.check_joins(jsonl, Environment.of(device))
    options = dataclasses.replace(
        options,
        gpus=layer_arguments.parse_gpus(gpus),
        peers=peers or peers_folder is not None,
        peers_folder=None if peers_folder is None else peers_folder.expanduser().resolve(),
    )
    records, failure = _measure([*problems.values()], device, chosen, options, jsonl, as_json)
    if not as_json and not is_standard_output(jsonl):
        _print(records, device.name)
    if plot is not None and records:
        _plot(records, plot, device.name)
    _exit_if_incomplete(records, len(problems), budget, failure)


def _measure(
    problems: list[Problem],
    device: Device,
    settings: Settings,
    options: BenchOptions,
    jsonl: Path | None,
    as_json: bool,
) -> tuple[list[BenchRecord], str]:
    """Times layers, and writes the conditions and each record at once: an interruption loses nothing.

    Returns:
        The records, and what ended the run early; "" where nothing did.

    Raises:
        MeasurementError: it ended before the first record, a line cannot be written, or the folder of peers is missing.
    """
    from ...measuring import benchmarks

    found = benchmarks.find_peers(device, options) if options.peers else None
    if found is not None:
        for name, reason in found.skipped.items():
            output.print_message("note", f"{name} is skipped: {reason}")
    head = {"conditions": benchmarks.conditions(device, options, output.command_line(), found)}
    records: list[BenchRecord] = []
    try:
        with layer_arguments.progress_bar(as_json) as report:
            for record in benchmarks.bench(problems, device, settings, options, report):
                if not records:  # a run without any leaves the file as it was
                    _write_record(msgspec.json.encode(head), jsonl, as_json)
                records.append(record)
                _write_record(msgspec.json.encode(record), jsonl, as_json)
    except MeasurementError as error:
        if not records:
            raise
        return records, str(error)
    return records, ""


def _kernel_shapes(
    models: list[str] | None,
    scheme: str | None,
    shape: str,
    ranks: Ranks,
    quantization: str,
    dtype: str,
    settings: Settings,
) -> dict[KernelShape, Problem]:
    """One layer of each kernel shape that the arguments name.

    Raises:
        OracleError: nothing is named, or a name is unknown.
    """
    from ...measuring import tuning

    words = list(models or [])
    if scheme is not None and not shape:
        raise MeasurementError("it is for --shape, which is not given", "Name shapes with --shape", "--scheme")
    schemes = [name for name in (DEFAULT_SCHEMES if scheme is None else scheme).split(",") if name]
    words += [f"{name}:{each}" for each in shape.split(",") if each for name in schemes]
    if not words:
        rule, remedy = "nothing is named to be timed", "Name a model, such as mxfp8:qwen3-30b-a3b, or give --shape"
        raise MeasurementError(rule, remedy)
    problems = layer_arguments.resolve_problems(words, ranks, quantization, dtype, settings.ragged_shards)
    found = tuning.group_by_kernel_shape(layer_arguments.apply_settings(each, settings) for each in problems)
    # Layers of several models may have one name; records are shown by it.
    names = Counter(each.layer for each in found.values())
    return {
        key: each if names[each.layer] == 1 else dataclasses.replace(each, layer=f"{each.layer}: {key}")
        for key, each in found.items()
    }


def _bench_options(
    tokens: str, routing: str, replays: int, stock: str, backend: str, jobs: int, budget: float | None
) -> BenchOptions:
    """The options of these names.

    Raises:
        MeasurementError: one has an invalid value.
    """
    from ...measuring.benchmarks import BenchOptions

    if routing not in ("uniform", "skewed"):
        raise MeasurementError(f"{routing!r} is not a kind of routing", "Write uniform or skewed", "--routing")
    layer_arguments.check_options(replays, jobs, budget)
    known = [each.name for each in default_registry()]
    if unknown := [name for name in backend.split(",") if name and name not in known]:
        rule = f"there is no backend {', '.join(map(repr, unknown))}"
        remedy = f"{did_you_mean(unknown[0], known)}Valid are {', '.join(sorted(known))}"
        raise MeasurementError(rule, remedy, "--backend")
    return BenchOptions(
        layer_arguments.parse_token_counts(tokens),
        "skewed" if routing == "skewed" else "uniform",
        replays,
        stock=tuple(name for name in stock.split(",") if name and name != "none"),
        only=tuple(filter(None, backend.split(","))),
        jobs=jobs,
        budget=budget,
    )


def _exit_if_incomplete(records: list[BenchRecord], layers: int, budget: float | None, failure: str) -> None:
    """Warns of backends that were not timed, and exits with the status for an incomplete run.

    Args:
        records: what was timed.
        layers: number of layers that were to be timed.
        budget: seconds after which no layer is started; None for no limit.
        failure: what ended the run; "" where nothing did.
    """
    failures = {f"{record.name}: {name}": why for record in records for name, why in record.failures.items()}
    for name, why in failures.items():
        output.print_message("warning", f"{name}: {why}")
    missing = layers - len({record.name for record in records})
    if missing:
        words = "timed" if budget is None or failure else f"started within {budget:g} s"
        output.print_message("warning", f"{missing} layers were not {words}")
    if failure:
        output.print_message("error", failure)
    if failures or missing or failure:
        raise typer.Exit(EXIT_INCOMPLETE)


def _write_record(line: bytes, path: Path | None, printed: bool) -> None:
    """Writes a record to standard output, and to a file, in which no line of a run that was killed is continued."""
    if printed:
        output.write(line.decode() + "\n")
        sys.stdout.flush()
    if path is not None:
        with writing(path):
            append_whole(path, (b"\n" if _ends_within_line(path) else b"") + line + b"\n")


def _ends_within_line(path: Path) -> bool:
    if not holds_data(path):
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _check_plot_path(path: Path) -> None:
    """Whether a plot can be drawn there, before minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MeasurementError("matplotlib is not installed", "pip install 'vllm-moe-oracle[plot]'", "--plot")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise MeasurementError(f"{path}: unknown image format", f"Valid are .{', .'.join(kinds)}", "--plot")


def _plot(records: list[BenchRecord], path: Path, gpu: str) -> None:
    """Draws the speedups and times of all layers into a file."""
    panels = [page_data.panel_of_records(found, gpu) for found in _by_layer(records).values()]
    with writing(path), replacing(path) as partial:
        plots.save_picture(panels, str(partial))


def _by_layer(records: list[BenchRecord]) -> dict[str, list[BenchRecord]]:
    layers: dict[str, list[BenchRecord]] = {}
    for record in records:
        layers.setdefault(record.name, []).append(record)
    return layers


def _print(records: list[BenchRecord], gpu: str) -> None:
    for name, found in _by_layer(records).items():
        backends = list(dict.fromkeys(each for record in found for each in record.us))
        rows = [_row(record, backends) for record in found]
        included = ", top-k included" if found[0].router_included else ""
        classes = "".join(f"; {key} is {value}" for key, value in found[0].stock.items())
        output.show(f"\n{name} on {gpu}: microseconds{included} (fraction of the roofline){classes}")
        output.show_table(("tokens", "roofline", *backends, "choice"), rows, indent=2)


def _row(record: BenchRecord, backends: list[str]) -> list[str]:
    def cell(name: str) -> str:
        us = record.us.get(name)
        if us is None:
            return "-"
        share = record.fraction_of_roofline
        return f"{us:.1f}" + (f"{output.GLUE}({share[name]:.0%})" if share else "")

    choice, roofline = record.choice, record.roofline_us
    words = "-" if choice is None else choice.backend
    if choice is not None and choice.behind_best:
        words += f"{output.GLUE}(+{choice.behind_best:.1%})"
    return [str(record.tokens), "-" if roofline is None else f"{roofline:.1f}", *map(cell, backends), words]
