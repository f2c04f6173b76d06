"""The page that `report` writes: figures at its top, a table and plots of each layer."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable
from pathlib import Path

from .. import __version__
from .reporting import NEAR, Content, Panel

SPANS = {"1": (1, 1), "2 to 4": (2, 4), "8 to 64": (8, 64), "128 to 512": (128, 512), "1024 and more": (1024, 1 << 40)}
"""Numbers of tokens that are summed up together."""

TEMPLATE = Path(__file__).parent / "report.html"


def tiles(panels: Iterable[Panel]) -> list[tuple[str, str]]:
    """The figures at the top of the page: what is said, and the figure."""
    panels = list(panels)
    found = [("layers measured", str(len(panels)))]
    behind = [each for panel in panels for count in panel.counts if (each := panel.behind(count)) is not None]
    if behind:
        near = sum(each <= NEAR for each in behind)
        found.append((f"choices within {NEAR:.0%} of the fastest backend", f"{near / len(behind):.1%}"))
        found.append(("furthest behind the fastest", f"{max(behind):.1%}"))
    for span, (low, high) in SPANS.items():
        ratios = [
            each
            for panel in panels
            for count in panel.counts
            if low <= count <= high and (each := panel.speedup(count)) is not None
        ]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            found.append((f"stock's default over our choice, {span} token{'s' * (span != '1')}", f"{mean:.2f}×"))
    return found


def table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """A panel's figures: column names and rows."""
    backends = sorted(panel.times, key=lambda name: (name in panel.stock, name))
    heads = ["tokens", "floor", *backends, "chosen", "behind", "over stock's default"]
    rows = []
    for count in panel.counts:
        floor, behind, ratio = panel.floors.get(count), panel.behind(count), panel.speedup(count)
        cells = [panel.times[name].get(count) for name in backends]
        rows.append(
            [
                str(count),
                "" if floor is None else _us(floor),
                *("" if cell is None else _us(cell.us) for cell in cells),
                panel.chosen.get(count, ""),
                "" if behind is None else f"{behind:.1%}",
                "" if ratio is None else f"{ratio:.2f}×",
            ]
        )
    return heads, rows


def skewed_table(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """A panel's figures under skewed routing: column names and rows; no rows where there are none."""
    backends = sorted(panel.skewed)
    counts = sorted({count for points in panel.skewed.values() for count in points})
    rows = []
    for count in counts:
        cells = [panel.skewed[name].get(count) for name in backends]
        rows.append([str(count), *("" if cell is None else _us(cell.us) for cell in cells)])
    return ["tokens", *backends], rows


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def page(content: Content, command: str) -> tuple[str, dict[str, str]]:
    """The page, and its plots by file name, each of which can be looked at by itself.

    Args:
        content: what to show.
        command: what repeats it.

    Raises:
        ImportError: matplotlib or Jinja are not installed.
    """
    import jinja2
    import markupsafe

    from . import plots

    palette = plots.palette(content.panels)
    drawn: dict[str, str] = {}
    if any(panel.speedup(count) is not None for panel in content.panels for count in panel.counts):
        drawn["speed-up"] = plots.speedups(content.panels)
    if any(panel.chosen for panel in content.panels):
        drawn["choices"] = plots.choices(content.panels, palette)
    shown = []
    for number, panel in enumerate(content.panels):
        name = f"times-{number + 1:02d}"
        drawn[name] = plots.times(panel, palette)
        heads, rows = table(panel)
        skewed_heads, skewed_rows = skewed_table(panel)
        shown.append(
            {
                "panel": panel, "plot": name, "heads": heads, "rows": rows, "skewed_heads": skewed_heads,
                "skewed_rows": skewed_rows,
            }
        )  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        content=content,
        tiles=tiles(content.panels),
        shown=shown,
        # Drawn here from numbers and escaped names; everything else on the page is escaped.
        plots={name: markupsafe.Markup(plots.inline(svg, name)) for name, svg in drawn.items()},
        style=markupsafe.Markup(plots.STYLE),
        near=f"{NEAR:.0%}",
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
    )
    return html, {f"{name}.svg": plots.alone(svg) for name, svg in drawn.items()}
