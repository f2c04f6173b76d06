"""`bench`: times backends beside stock vLLM's own layers, in one run on this machine."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...measure.benching import Record


SCHEMES = "mxfp8,mxfp4,int4_g128,int4_g32,int8_g128"
"""Formats of `--shape` where `--scheme` names none."""


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="A checkpoint's folder, a config.json, SCHEME:SHAPE[@tpN], or a SHAPE in all its formats.",
            metavar="MODEL",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="Formats, for every SHAPE of --shape.", metavar="NAME,...", show_default=SCHEMES),
    ] = None,
    shape: Annotated[str, typer.Option(help="Names of shapes, @tpN at will.", metavar="NAME,...")] = "",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", metavar="N")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="The ranks hold different experts instead of parts of each.")] = (
        False
    ),
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.", metavar="N,...")] = "1,2,4,8,16,32,64,128,256,512",
    routing: Annotated[str, typer.Option(help="uniform or skewed.", metavar="KIND")] = "uniform",
    stock: Annotated[
        str, typer.Option(help="Stock layers beside ours: values of --moe-backend, or none.", metavar="NAME,...")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Only these backends.", metavar="NAME,...")] = "",
    replays: Annotated[int, typer.Option(help="Timed replays of each, at most.", metavar="N")] = 30,
    jobs: Annotated[int, typer.Option(help="Processes that compile kernels beforehand.", metavar="N")] = 0,
    gpus: Annotated[
        str, typer.Option(help="Measure on several GPUs: all, or numbers like 0,1.", metavar="all|N,...")
    ] = "",
    budget: Annotated[
        float | None, typer.Option(help="Begin no further layer after so many seconds.", metavar="SECONDS")
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", help="Write records here, one JSON object a line.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the times into this file (.svg, .png); needs the extra plot.", metavar="FILE"),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the plugin. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records, one JSON object a line.")] = False,
) -> None:
    """Time every accepted backend beside stock vLLM's own layer, on this machine, in one run.

    The first record holds the conditions and the command that repeats them.

    \b
    Examples:
      vllm-moe-oracle bench ~/models/gpt-oss-20b
      vllm-moe-oracle bench mxfp8:qwen3-30b-a3b --tokens 1,16,256 --stock auto,marlin
      vllm-moe-oracle bench --scheme mxfp8,int4_g128 --shape qwen3-30b-a3b,minimax-m2@tp4 --jsonl out.jsonl

    \b
    Exit status:
      0  everything was timed
      2  the input or this machine cannot be used; one line on standard error says what
      4  a backend or a stock layer could not be timed, or failed its check; the records say why
    """
    import msgspec

    from ...errors import MeasurementError, meant
    from ...measure import benching
    from ...oracle.registry import default_registry
    from .. import UNFINISHED, measuring, output
    from ..arguments import read_settings

    chosen = read_settings(assignments)
    wanted = list(models or [])
    if scheme is not None and not shape:
        raise MeasurementError("there is no --shape that these formats are for", "Name shapes with --shape", "--scheme")
    for each in filter(None, shape.split(",")):
        wanted += [f"{name}:{each}" for name in filter(None, (SCHEMES if scheme is None else scheme).split(","))]
    if not wanted:
        raise MeasurementError("nothing is named to be timed", "Name a model, or --shape with --scheme")
    if routing not in ("uniform", "skewed"):
        raise MeasurementError(f"{routing!r} is no routing", "Write uniform or skewed", "--routing")
    measuring.check_numbers(replays, jobs, budget)
    if plot is not None:
        _check_plot(plot)
    from ...measure import tuning

    known = [each.name for each in default_registry()]
    if unknown := [name for name in backend.split(",") if name and name not in known]:
        rule = f"there is no backend {', '.join(map(repr, unknown))}"
        remedy = f"{meant(unknown[0], known)}Valid are {', '.join(sorted(known))}"
        raise MeasurementError(rule, remedy, "--backend")
    problems = tuning.groups(measuring.as_asked(each, chosen) for each in measuring.problems(wanted, tp, ep))
    plan = benching.Plan(
        measuring.counts(tokens),
        "skewed" if routing == "skewed" else "uniform",
        replays,
        stock=tuple(name for name in stock.split(",") if name and name != "none"),
        only=tuple(filter(None, backend.split(","))),
        jobs=jobs,
        budget=budget,
    )
    device = measuring.machine()
    plan = dataclasses.replace(plan, gpus=measuring.gpus(gpus))
    line = "vllm-moe-oracle " + shlex.join(sys.argv[1:])
    head = {"conditions": benching.conditions(device, plan, line)}
    records: list[Record] = []
    # Line by line: what was measured before an interruption is not lost.
    _write(msgspec.json.encode(head), jsonl, as_json, "wb")
    with measuring.progress(quiet=as_json and not sys.stderr.isatty()) as tell:
        for record in benching.bench([*problems.values()], device, chosen, plan, tell):
            records.append(record)
            _write(msgspec.json.encode(record), jsonl, as_json, "ab")
    if not as_json:
        _print(records, device.name)
    if plot is not None and records:
        _plot(records, plot)
    failures = {
        f"{record['layer']['name']}: {name}": why for record in records for name, why in record["failures"].items()
    }
    for name, why in failures.items():
        output.remark("warning", f"{name}: {why}")
    missing = len(problems) - len({record["layer"]["name"] for record in records})
    if missing:
        output.remark("warning", f"{missing} layers were not begun within {budget:g} s")
    if failures or missing:
        raise typer.Exit(UNFINISHED)


def _write(line: bytes, path: Path | None, printed: bool, mode: str) -> None:
    """Writes a record to standard output, and to a file."""
    from ...errors import MeasurementError

    if printed:
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
    if path is None:
        return
    try:
        with path.open(mode) as file:
            file.write(line + b"\n")
    except OSError as error:
        raise MeasurementError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _check_plot(path: Path) -> None:
    """Whether a plot can be drawn there, before minutes of measuring."""
    from importlib.util import find_spec

    from ...errors import MeasurementError

    if find_spec("matplotlib") is None:
        raise MeasurementError("matplotlib is not installed", "pip install 'vllm-moe-oracle[plot]'", "--plot")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise MeasurementError(f"{path} has no kind of a drawing", f"Valid are .{', .'.join(kinds)}", "--plot")
    if not path.parent.is_dir():
        raise MeasurementError(f"there is no folder {path.parent}", "Make it, or name another file", "--plot")


def _plot(records: list[Record], path: Path) -> None:
    from ...errors import MeasurementError
    from ...measure import benching

    try:
        benching.plot(records, str(path))
    except OSError as error:
        raise MeasurementError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _print(records: list[Record], gpu: str) -> None:
    from .. import output

    layers: dict[str, list[Record]] = {}
    for record in records:
        layers.setdefault(record["layer"]["name"], []).append(record)
    for name, found in layers.items():
        backends = list(dict.fromkeys(each for record in found for each in record["us"]))
        rows = [_row(record, backends) for record in found]
        included = ", choosing experts included" if found[0]["router_included"] else ""
        classes = "".join(f"; {key} is {value}" for key, value in found[0]["stock"].items())
        output.show(f"\n{name} on {gpu}: microseconds{included} (part of the floor){classes}")
        output.show("", output.table(("tokens", "floor", *backends, "choice"), rows, indent=2))


def _row(record: Record, backends: list[str]) -> list[str]:
    def cell(name: str) -> str:
        us = record["us"].get(name)
        if us is None:
            return "-"
        part = record["of_floor"]
        return f"{us:.1f}" + (f" ({part[name]:.0%})" if part else "")

    choice: dict[str, Any] = record.get("choice", {})
    behind = choice.get("behind_best")
    words = choice.get("backend", "-") + (f" (+{behind:.1%})" if behind else "")
    floor = record["floor_us"]
    return [str(record["tokens"]), "-" if floor is None else f"{floor:.1f}", *map(cell, backends), words]
