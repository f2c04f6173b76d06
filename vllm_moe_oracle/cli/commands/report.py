"""`report`: one HTML page from measurements and decisions."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...devices import detect
from ...errors import MeasurementError
from ...measurements.environment import Environment
from ...measurements.store import Store
from ...report import html_report, page_data
from ...report.page_data import ReportContent
from ...settings import Settings, cache_dir, env_var
from ...whole_files import write_whole, writing
from .. import output, writable
from ..arguments import Assignments, command_settings, file_option, output_option

NEEDS_WORKING_DIRECTORY = True

HELP = """\
Make one page of what was measured and decided: times, speed-up over stock vLLM, choices and their reasons.

The page needs no network and follows the browser's light or dark theme. Needs the extra plot.

\b
Examples:
  vllm-moe-oracle report
  vllm-moe-oracle report bench.jsonl decisions.jsonl -o page.html --svg plots/

\b
Exit status:
  0  the page was written
  2  a file cannot be used, or nothing was measured; one line on standard
     error says what
"""


def command(
    context: typer.Context,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Files of bench --jsonl, of tune --export, or the one that {env_var('report')} names; without any, "
            "this machine's cache, or the shipped profile where that has nothing.",
            metavar="FILE",
        ),
    ] = None,
    to: Annotated[
        Path, output_option("The page; an earlier page is replaced, and no other file.", "--output", "-o")
    ] = Path("moe-oracle-report.html"),
    svg: Annotated[
        Path | None,
        file_option("Also write each plot as a file into this folder; earlier plots are replaced.", metavar="DIR"),
    ] = None,
    assignments: Assignments = None,
) -> None:
    """What `HELP` says."""
    _require_modules("matplotlib", "jinja2")
    writable.check_output(context, to, "--output", writable.PAGE, files or ())
    if svg is not None and (reason := writable.why_unwritable_folder(svg)):
        raise MeasurementError(f"{svg} cannot be made or written in: {reason}", "Name another folder", "--svg")
    chosen = command_settings(assignments)
    content = page_data.deduplicate(_content_of(files, chosen) if files else _local_content(chosen))
    if not content.panels and not content.servers:
        raise MeasurementError("there is nothing to report", f"{_MEASURE}; or name a file")
    with output.status_spinner(f"drawing plots of {len(content.panels)} layers"):
        page, plots = html_report.render(content, output.command_line())
    written = {to: page}
    if svg is not None:
        for name in plots:
            writable.check_kind(svg / name, writable.PICTURE, "--svg")
        writable.make_folder(svg)
        written |= {svg / name: text for name, text in plots.items()}
    for path, text in written.items():
        with writing(path):
            write_whole(path, text.encode(errors="backslashreplace"))  # names in files may hold surrogates
    if not writable.is_standard_output(to):
        _print_figures(content)
    for note in filter(None, (content.about, *content.notes)):
        output.print_message("note", note)
    if not writable.is_standard_output(to):
        output.show(f"written: {to}" + (f", and {len(plots)} plots in {svg}" if svg is not None else ""))


_MEASURE = "Measure: vllm-moe-oracle tune MODEL, or bench MODEL --jsonl FILE"


def _content_of(files: Sequence[Path], settings: Settings) -> ReportContent:
    """What files hold; a note names those that hold nothing.

    Raises:
        MeasurementError: a file cannot be read, or none holds a measurement.
    """
    content, empty = ReportContent(), []
    for path in files:
        found = page_data.read(path, settings)
        if not found.panels and not found.servers:
            empty.append(str(path))
        content += found
    if len(empty) == len(files):
        raise MeasurementError("holds no measurement", _MEASURE, ", ".join(empty))
    notes = tuple(f"{path} holds no measurement" for path in empty)
    return dataclasses.replace(content, notes=content.notes + notes)


def _print_figures(content: ReportContent) -> None:
    """The figures of each machine that stand at the top of the page."""
    for machine in html_report.machines(content.panels):
        output.show(machine.name)
        spans = [(f"speedup over stock's default, {words}", figure) for words, figure in machine.spans]
        for words, figure in [*machine.tiles, *spans]:
            output.show(f"{figure:>10}  {words}")


def _local_content(settings: Settings) -> ReportContent:
    """What this machine measured; the shipped profiles where that is nothing."""
    here = Environment.of(detect.detect())
    found = Store(cache_dir(settings)).samples_by_kernel_shape(here)
    if found:
        return page_data.from_cache(found, here, settings)
    shipped = page_data.from_shipped_profiles(settings)
    about = f"nothing was measured on this machine ({here.gpu}): these are the times that this package ships"
    return dataclasses.replace(shipped, about=about)


def _require_modules(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        rule = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise MeasurementError(rule, "pip install 'vllm-moe-oracle[plot]'")
