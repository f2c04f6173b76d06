"""The report's plots as SVG whose colours follow the reader's light or dark theme. Needs matplotlib.

matplotlib writes colours into the file as numbers. Here each is a stand-in, replaced afterwards by a CSS variable, so
that one drawing serves both themes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..oracle.problem import SchemeName

if TYPE_CHECKING:
    from .reporting import Panel

SERIES = (
    ("#0b63c5", "#6db1ff"),
    ("#c2410c", "#ff9a5c"),
    ("#0f7b53", "#4fd39b"),
    ("#8b2fc9", "#cf9bff"),
    ("#a16207", "#e8b931"),
    ("#b91c5c", "#ff86b3"),
    ("#0e7490", "#56d0e6"),
    ("#5b6470", "#aab4c0"),
    ("#4d7c0f", "#a8d84e"),
    ("#7c3f2b", "#d9a08c"),
)
"""Colours of backends on a light and on a dark page: each has a contrast of 4 and more to its page."""

INK, FAINT = ("#1c2128", "#e6e8eb"), ("#c4cad1", "#454c55")
FASTER, SLOWER = ("#2f81f7", "#2f81f7"), ("#f0781e", "#f0781e")
_NAMED = {"--ink": INK, "--faint": FAINT, "--faster": FASTER, "--slower": SLOWER}
_NAMED |= {f"--series-{number}": pair for number, pair in enumerate(SERIES)}
_STAND_INS = {name: f"#0102{number + 16:02x}" for number, name in enumerate(_NAMED)}


def _variables(index: int) -> str:
    return " ".join(f"{name}: {pair[index]};" for name, pair in _NAMED.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(0)} }} "
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}"
)
"""CSS with the variables of both themes."""


def palette(panels: Sequence[Panel]) -> dict[str, int]:
    """The number of each backend's colour, the same in every plot, and for one kernel in every format; this project's
    own kernels come first."""
    names = {name for panel in panels for name in (*panel.times, *panel.chosen.values())}
    kernels = sorted({_kernel(name) for name in names}, key=lambda kernel: (kernel != "own", kernel))
    return {name: kernels.index(_kernel(name)) % len(SERIES) for name in names}


def _kernel(backend: str) -> str:
    """A backend's name without its format: ``humming`` of ``humming_mxfp8``."""
    return "_".join(part for part in backend.split("_") if part not in get_args(SchemeName))


def _colour(name: str) -> str:
    return _STAND_INS[name]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "vllm-moe-oracle",  # the same plot has the same ids
            "font.family": "sans-serif",
            "font.size": 9,
            "text.color": _colour("--ink"),
            "axes.edgecolor": _colour("--faint"),
            "axes.labelcolor": _colour("--ink"),
            "xtick.color": _colour("--ink"),
            "ytick.color": _colour("--ink"),
            "grid.color": _colour("--faint"),
            "text.parse_math": False,  # a layer's name is no formula
        }
    )
    figure, axis = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, axis


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var({name})")
    return text


def alone(svg: str) -> str:
    """A plot as a file of its own, with its colours."""
    head, _, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>\n<style>{STYLE}</style>{rest}'


def inline(svg: str, name: str) -> str:
    """A plot for a page that holds several: its ids are its own.

    Args:
        svg: the plot.
        name: its name on the page, of letters, digits and hyphens.
    """
    ids = re.findall(r'\bid="([^"]+)"', svg)
    known = {each: f"{name}-{each}" for each in ids}
    svg = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{known[found[1]]}"', svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', lambda found: found[1] + known.get(found[2], found[2]), svg)
    # The page scales it: the drawing's size in points would be a fixed one.
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(?:width|height)="[^"]+"', "", head)
    return f"{head}>{rest}"


def times(panel: Panel, colours: Mapping[str, int]) -> str:
    """Microseconds by number of tokens, of every backend, with the floor; the choice is drawn thick."""
    figure, axis = _figure(6.4, 4.2)
    for name in sorted(panel.times, key=lambda name: (name in panel.stock, name)):
        points = sorted(panel.times[name].items())
        colour = _colour(f"--series-{colours[name]}")
        counts = [count for count, _ in points]
        style = "--" if name in panel.stock else "-"
        label = f"{name} ({panel.stock[name]})" if panel.stock.get(name) else name
        axis.plot(counts, [each.us for _, each in points], style, color=colour, marker="o", markersize=3, label=label)
        axis.fill_between(
            counts, [each.low for _, each in points], [each.high for _, each in points], color=colour, alpha=0.18
        )
        mine = [(count, each.us) for count, each in points if panel.chosen.get(count) == name]
        if mine:
            where, what = zip(*mine, strict=True)
            axis.plot(where, what, linestyle="none", marker="o", markersize=8, markerfacecolor="none", color=colour)
    if panel.floors:
        counts = sorted(panel.floors)
        axis.plot(counts, [panel.floors[count] for count in counts], ":", color=_colour("--ink"), label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds")
    axis.set_xticks(panel.counts, [str(count) for count in panel.counts], rotation=45, fontsize=8)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    ticks = [each for power in range(-1, 9) for part in (1, 2, 5) if low <= (each := part * 10.0**power) <= high]
    axis.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axis.grid(True, alpha=0.5)
    if panel.times or panel.floors:
        axis.legend(fontsize=7.5, framealpha=0, ncols=2 if len(panel.times) > 5 else 1)
    return _svg(figure)


def speedups(panels: Sequence[Panel]) -> str:
    """A heat map: the time of stock vLLM's default over that of the choice, by layer and number of tokens."""
    rows = [panel for panel in panels if any(panel.speedup(count) is not None for count in panel.counts)]
    counts = sorted({count for panel in rows for count in panel.counts})
    figure, axis = _grid(rows, counts)
    for y, panel in enumerate(rows):
        for x, count in enumerate(counts):
            ratio = panel.speedup(count)
            if ratio is None:
                continue
            colour = _colour("--faster" if ratio >= 1 else "--slower")
            strength = min(abs(math.log2(ratio)), 1.0) * 0.6
            axis.add_patch(_box(x, y, 1, colour, strength))
            axis.text(x + 0.5, y + 0.5, f"{ratio:.2f}", ha="center", va="center", fontsize=8)
    return _svg(figure)


def choices(panels: Sequence[Panel], colours: Mapping[str, int]) -> str:
    """A map: the backend that is chosen, by layer and number of tokens."""
    rows = [panel for panel in panels if panel.chosen]
    counts = sorted({count for panel in rows for count in panel.counts})
    figure, axis = _grid(rows, counts)
    for y, panel in enumerate(rows):
        here = [panel.runs(count) for count in counts]
        start = 0
        for x in range(1, len(counts) + 1):
            if x < len(counts) and here[x] == here[start]:
                continue
            name = here[start]
            if name is not None:
                colour = _colour(f"--series-{colours[name]}")
                axis.add_patch(_box(start, y, x - start, colour, 0.3))
                axis.text((start + x) / 2, y + 0.5, name, ha="center", va="center", fontsize=8, clip_on=True)
            start = x
    return _svg(figure)


def _box(x: float, y: float, width: float, colour: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.02, y + 0.04), width - 0.04, 0.92, facecolor=colour, alpha=alpha, linewidth=0)


def _grid(rows: Sequence[Panel], counts: Sequence[int]) -> tuple[Any, Any]:
    figure, axis = _figure(3.2 + 0.62 * len(counts), 0.8 + 0.3 * len(rows))
    axis.set_xlim(0, len(counts))
    axis.set_ylim(len(rows), 0)
    axis.set_xticks([x + 0.5 for x in range(len(counts))], [str(count) for count in counts])
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [panel.name for panel in rows])
    axis.set_xlabel("tokens")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure, axis
