"""The page that `report` writes: headline figures, then a plot and a table of each layer."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable
from pathlib import Path

from .. import __version__
from .page_data import EQUAL_MARGIN, LayerPanel, ReportContent

TOKEN_RANGES = {
    "1": (1, 1),
    "2 to 4": (2, 4),
    "8 to 64": (8, 64),
    "128 to 512": (128, 512),
    "1024 and more": (1024, 1 << 40),
}
"""Ranges of numbers of tokens over which speedups are averaged."""

TEMPLATE = Path(__file__).parent / "report.html"


def headline_figures(panels: Iterable[LayerPanel]) -> list[tuple[str, str]]:
    """The figures at the top of the page: label and value."""
    panels = list(panels)
    found = [("layers measured", str(len(panels)))]
    behind = [each for panel in panels for count in panel.counts if (each := panel.slowdown(count)) is not None]
    if behind:
        near = sum(each <= EQUAL_MARGIN for each in behind)
        found.append((f"choices within {EQUAL_MARGIN:.0%} of the fastest backend", f"{near / len(behind):.1%}"))
        found.append(("largest slowdown against the fastest", f"{max(behind):.1%}"))
    for span, (low, high) in TOKEN_RANGES.items():
        ratios = [
            each
            for panel in panels
            for count in panel.counts
            if low <= count <= high and (each := panel.speedup(count)) is not None
        ]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            found.append((f"speedup over stock's default, {span} token{'s' * (span != '1')}", f"{mean:.2f}×"))
    return found


def times_table(panel: LayerPanel) -> tuple[list[str], list[list[str]]]:
    """The times of a panel: column names and rows."""
    backends = sorted(panel.times, key=lambda name: (name in panel.stock, name))
    heads = ["tokens", "roofline", *backends, "chosen", "slowdown", "speedup over stock's default"]
    rows = []
    for count in panel.counts:
        bound, behind, ratio = panel.rooflines_us.get(count), panel.slowdown(count), panel.speedup(count)
        cells = [panel.times[name].get(count) for name in backends]
        rows.append(
            [
                str(count),
                "" if bound is None else _format_us(bound),
                *("" if cell is None else _format_us(cell.us) for cell in cells),
                panel.chosen.get(count, ""),
                "" if behind is None else f"{behind:.1%}",
                "" if ratio is None else f"{ratio:.2f}×",
            ]
        )
    return heads, rows


def skewed_times_table(panel: LayerPanel) -> tuple[list[str], list[list[str]]]:
    """The times of a panel under skewed routing: column names and rows, which may be empty."""
    backends = sorted(panel.skewed)
    counts = sorted({count for points in panel.skewed.values() for count in points})
    rows = []
    for count in counts:
        cells = [panel.skewed[name].get(count) for name in backends]
        rows.append([str(count), *("" if cell is None else _format_us(cell.us) for cell in cells)])
    return ["tokens", *backends], rows


def _format_us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def render(content: ReportContent, command: str) -> tuple[str, dict[str, str]]:
    """The page, and its plots as standalone SVG by file name.

    Args:
        content: what to show.
        command: the command that repeats it.

    Raises:
        ImportError: matplotlib or Jinja are not installed.
    """
    import jinja2
    import markupsafe

    from . import plots

    palette = plots.assign_colors(content.panels)
    drawn: dict[str, str] = {}
    if any(panel.speedup(count) is not None for panel in content.panels for count in panel.counts):
        drawn["speed-up"] = plots.plot_speedups(content.panels)
    if any(panel.chosen for panel in content.panels):
        drawn["choices"] = plots.plot_choices(content.panels, palette)
    shown = []
    for number, panel in enumerate(content.panels):
        name = f"times-{number + 1:02d}"
        drawn[name] = plots.plot_times(panel, palette)
        heads, rows = times_table(panel)
        skewed_heads, skewed_rows = skewed_times_table(panel)
        shown.append(
            {
                "panel": panel, "plot": name, "heads": heads, "rows": rows, "skewed_heads": skewed_heads,
                "skewed_rows": skewed_rows,
            }
        )  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        content=content,
        tiles=headline_figures(content.panels),
        shown=shown,
        # matplotlib escapes names in the SVG; Jinja escapes everything else on the page.
        plots={name: markupsafe.Markup(plots.embedded_svg(svg, name)) for name, svg in drawn.items()},
        style=markupsafe.Markup(plots.STYLE),
        near=f"{EQUAL_MARGIN:.0%}",
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
    )
    return html, {f"{name}.svg": plots.standalone_svg(svg) for name, svg in drawn.items()}
