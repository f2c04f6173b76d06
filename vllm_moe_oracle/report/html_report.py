"""The page that `report` writes: for each machine the gain and heat maps, then its models by family, a card a layer."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..measurements import model_shapes
from ..measurements.bench_records import STOCK_DEFAULT
from .page_data import EQUAL_MARGIN, OTHER_FAMILY, LayerPanel, ReportContent

TOKEN_RANGES = {
    "1": (1, 1),
    "2 to 4": (2, 4),
    "8 to 64": (8, 64),
    "128 to 512": (128, 512),
    "1024 and more": (1024, 1 << 40),
}
"""Ranges of numbers of tokens over which speedups are averaged."""

TEMPLATE = Path(__file__).parent / "report.html"

LEVELS = (
    (-math.inf, "s3"),
    (0.8, "s2"),
    (0.9, "s1"),
    (0.97, "even"),
    (1.03, "f1"),
    (1.15, "f2"),
    (1.4, "f3"),
    (1.8, "f4"),
)
"""Classes of a heat map's cells, each with the ratio from which on it applies."""

WORST_SHOWN = 5
"""How many of the worst cells are named under a heat map."""

FLOOR_TOKENS = (1, 64, 4096)
"""Numbers of tokens for which a card says how near the choice comes to the roofline."""

Ratio = Callable[[LayerPanel, int], float | None]


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map: the ratio in words, "" where it was not measured, and its class."""

    words: str
    level: str


@dataclass(frozen=True)
class HeatRow:
    """A layer in a heat map. `remark` says why it has no cells."""

    label: str
    cells: tuple[Cell, ...]
    remark: str = ""


@dataclass(frozen=True)
class HeatMap:
    """Ratios by layer and number of tokens.

    Attributes:
        title: what is compared.
        mean: geometric mean of the cells, in words.
        measured: how many cells and layers that is, in words.
        counts: numbers of tokens, the columns.
        groups: rows by family.
        worst: the smallest cells, in words, smallest first.
    """

    title: str
    mean: str
    measured: str
    counts: tuple[int, ...]
    groups: tuple[tuple[str, tuple[HeatRow, ...]], ...]
    worst: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """The measured layers of one environment.

    Attributes:
        name: the environment, in words.
        tiles: label and value of each figure at the top.
        spans: speedup over stock by range of numbers of tokens; empty if it was not measured.
        maps: speedup over stock, and over the best other backend, as far as they were measured.
        families: panels by family of models.
    """

    name: str
    tiles: tuple[tuple[str, str], ...]
    spans: tuple[tuple[str, str], ...]
    maps: tuple[HeatMap, ...]
    families: tuple[tuple[str, tuple[LayerPanel, ...]], ...]


def machines(panels: Iterable[LayerPanel]) -> list[Machine]:
    """The machines of the panels, in order of appearance."""
    by_name: dict[str, list[LayerPanel]] = {}
    for panel in panels:
        by_name.setdefault(panel.environment, []).append(panel)
    found = []
    for name, here in by_name.items():
        families = _by_family(here)
        maps = [
            heat_map("Speed-up over stock vLLM's default", families, LayerPanel.speedup),
            heat_map("Speed-up over the best other backend", families, LayerPanel.lead),
        ]
        shown = tuple(each for each in maps if each is not None)
        found.append(Machine(name, tuple(headline_figures(here)), tuple(speedups_by_span(here)), shown, families))
    return found


def _by_family(panels: Sequence[LayerPanel]) -> tuple[tuple[str, tuple[LayerPanel, ...]], ...]:
    """Panels by family: known families in their order, and in each by model, format and ranks."""
    order = [*model_shapes.families(), OTHER_FAMILY]
    found = {name: [panel for panel in panels if panel.family == name] for name in order}
    return tuple((name, tuple(sorted(rows, key=lambda each: each.label))) for name, rows in found.items() if rows)


def heat_map(title: str, families: Sequence[tuple[str, Sequence[LayerPanel]]], ratio: Ratio) -> HeatMap | None:
    """The heat map of a ratio; None if no layer has it.

    Args:
        title: what is compared.
        families: panels by family.
        ratio: the ratio of a panel at a number of tokens, None if it was not measured.
    """
    rows = [
        (family, panel, {count: each for count in panel.counts if (each := ratio(panel, count)) is not None})
        for family, panels in families
        for panel in panels
    ]
    counts = tuple(sorted({count for _, _, found in rows for count in found}))
    if not counts:
        return None
    every = sorted((each, panel.label, count) for _, panel, found in rows for count, each in found.items())
    groups: dict[str, list[HeatRow]] = {}
    for family, panel, found in rows:
        cells = tuple(_cell(found.get(count)) for count in counts)
        row = HeatRow(panel.label, cells) if found else HeatRow(panel.label, (), _why_no_ratio(panel, ratio))
        groups.setdefault(family, []).append(row)
    layers = sum(bool(found) for _, _, found in rows)
    return HeatMap(
        title=title,
        mean=_times(statistics.geometric_mean(each for each, _, _ in every)),
        measured=f"{len(every)} measured cells of {layers} layer{'s' * (layers != 1)}",
        counts=counts,
        groups=tuple((family, tuple(found)) for family, found in groups.items()),
        worst=tuple(f"{_times(each)} {label}, {_tokens(count)}" for each, label, count in every[:WORST_SHOWN]),
    )


def _cell(ratio: float | None) -> Cell:
    if ratio is None:
        return Cell("", "none")
    return Cell(f"{ratio:.2f}", next(name for low, name in reversed(LEVELS) if ratio >= low))


def _why_no_ratio(panel: LayerPanel, ratio: Ratio) -> str:
    if ratio == LayerPanel.speedup and STOCK_DEFAULT in panel.failures:
        return "no time of stock: its layer failed"
    return "not measured beside stock" if ratio == LayerPanel.speedup else "no other backend was measured"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def headline_figures(panels: Iterable[LayerPanel]) -> list[tuple[str, str]]:
    """The figures at the top of a machine: label and value. The first is the gain over stock, if that was measured."""
    panels = list(panels)
    ratios = {
        (number, count): each
        for number, panel in enumerate(panels)
        for count in panel.counts
        if (each := panel.speedup(count)) is not None
    }
    found = []
    if ratios:
        mean = statistics.geometric_mean(ratios.values())
        found.append(("speedup over stock's default, geometric mean", _times(mean)))
        slower = sum(each < 1 - EQUAL_MARGIN for each in ratios.values())
        found.append((f"cells slower than stock by more than {EQUAL_MARGIN:.0%}", f"{slower} of {len(ratios)}"))
    behind = [
        each
        for panel in panels
        for count in panel.counts
        if count not in panel.circular and (each := panel.slowdown(count)) is not None
    ]
    if behind:
        near = sum(each <= EQUAL_MARGIN for each in behind)
        found.append((f"choices within {EQUAL_MARGIN:.0%} of the fastest backend", f"{near / len(behind):.1%}"))
        found.append(("cells that judge choices, of runs that did not make them", str(len(behind))))
        found.append(("largest slowdown against the fastest", f"{max(behind):.1%}"))
    found.append(("layers measured", str(len(panels))))
    return found


def speedups_by_span(panels: Iterable[LayerPanel]) -> list[tuple[str, str]]:
    """The geometric mean of the speedup over stock by range of numbers of tokens, where it was measured."""
    panels = list(panels)
    found = []
    for span, (low, high) in TOKEN_RANGES.items():
        counts = [(panel, count) for panel in panels for count in panel.counts if low <= count <= high]
        if here := [each for panel, count in counts if (each := panel.speedup(count)) is not None]:
            label = f"{span} token{'s' * (span != '1')}"
            found.append((label, _times(statistics.geometric_mean(here))))
    return found


def card_facts(panel: LayerPanel) -> list[tuple[str, str]]:
    """What a card says above its table: label and value."""
    found = []
    if panel.chosen:
        found.append(("decision", _decision(panel)))
    elif panel.explanation:
        found.append(("not served", panel.explanation))
    if ratios := [each for count in panel.counts if (each := panel.speedup(count)) is not None]:
        mean = _times(statistics.geometric_mean(ratios))
        said = f"{mean} ({_times(min(ratios))} to {_times(max(ratios))})" if len(ratios) > 1 else mean
        found.append(
            ("over stock", said + (f"; stock runs {stock}" if (stock := panel.stock.get(STOCK_DEFAULT)) else ""))
        )
    elif STOCK_DEFAULT in panel.failures:
        found.append(("over stock", f"stock's layer was not timed: {panel.failures[STOCK_DEFAULT]}"))
    shares = {count: each for count in FLOOR_TOKENS if (each := panel.floor_share(count)) is not None}
    if shares:
        said = ", ".join(f"{each:.0%} of it at {_tokens(count)}" for count, each in shares.items())
        found.append(("floor", f"the choice reaches {said}"))
    return found


def _decision(panel: LayerPanel) -> str:
    names = list(dict.fromkeys(panel.chosen[count] for count in sorted(panel.chosen)))
    parts = names
    if len(names) > 1:
        counts = {name: [count for count in sorted(panel.chosen) if panel.chosen[count] == name] for name in names}
        spans = {
            name: f"{found[0]} to {_tokens(found[-1])}" if len(found) > 1 else _tokens(found[0])
            for name, found in counts.items()
        }
        parts = [f"{name} ({span})" for name, span in spans.items()]
    why = ": ".join(filter(None, (panel.why, panel.explanation)))
    return " and ".join(parts) + (f", {why}" if why else "")


def times_table(panel: LayerPanel) -> tuple[list[str], list[list[str]]]:
    """The times of a panel: column names and rows."""
    backends = sorted(panel.times, key=lambda name: (name in panel.stock, name))
    heads = ["tokens", "floor", *backends, "chosen", "slowdown", "speedup over stock's default"]
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
                "" if ratio is None else _times(ratio),
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


def page_title(content: ReportContent) -> str:
    """What the page is about: the machines that were measured, else those of the servers."""
    names = [each.environment for each in content.panels] or [each.device.name for each in content.servers]
    return f"MoE kernels on {' and '.join(dict.fromkeys(names))}: {'measured' if content.panels else 'chosen'}"


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
    files: dict[str, str] = {}
    classes: dict[str, str] = {}
    if plots.compared_with_stock(content.panels):
        files["speed-up.svg"] = plots.plot_speedups(content.panels)
    shown: list[dict[str, Any]] = []
    number = 0
    for machine in machines(content.panels):
        families = []
        for family, panels in machine.families:
            cards = []
            for panel in panels:
                number += 1
                name = f"times-{number:02d}"
                svg = plots.plot_times(panel, palette)
                files[f"{name}.svg"] = svg
                # matplotlib escapes names in the SVG; Jinja escapes everything else on the page.
                embedded = plots.embedded_svg(svg, f"t{number}", classes)
                cards.append(_card(panel, name, markupsafe.Markup(embedded)))
            families.append((family, cards))
        shown.append({"machine": machine, "families": families})
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=page_title(content),
        content=content,
        shown=shown,
        style=markupsafe.Markup(plots.STYLE + "".join(f".{name} {{ {css} }}\n" for css, name in classes.items())),
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
    )
    return html, {name: plots.standalone_svg(svg) for name, svg in files.items()}


def _card(panel: LayerPanel, name: str, plot: Any) -> dict[str, Any]:
    heads, rows = times_table(panel)
    skewed_heads, skewed_rows = skewed_times_table(panel)
    return {
        "panel": panel, "name": name, "plot": plot, "facts": card_facts(panel), "heads": heads, "rows": rows,
        "skewed_heads": skewed_heads, "skewed_rows": skewed_rows,
    }  # fmt: skip
