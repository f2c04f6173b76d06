"""The plots of reports and of ``bench --plot``, with matplotlib.

Plots of a report are SVG whose colors follow the light or dark theme. matplotlib writes colors as numbers, so a
placeholder is drawn for each color and replaced by a CSS variable afterwards.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..core.problem import SchemeName

if TYPE_CHECKING:
    from .page_data import LayerPanel

SERIES_COLORS = (
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
"""Colors of backends on a light and on a dark page, each with a contrast of at least 4."""

INK_COLORS, FAINT_COLORS = ("#1c2128", "#e6e8eb"), ("#c4cad1", "#454c55")
FASTER_COLORS, SLOWER_COLORS = ("#2f81f7", "#2f81f7"), ("#f0781e", "#f0781e")
_CSS_COLORS = {"--ink": INK_COLORS, "--faint": FAINT_COLORS, "--faster": FASTER_COLORS, "--slower": SLOWER_COLORS}
_CSS_COLORS |= {f"--series-{number}": pair for number, pair in enumerate(SERIES_COLORS)}
_PLACEHOLDERS = {name: f"#0102{number + 16:02x}" for number, name in enumerate(_CSS_COLORS)}


def _variables(index: int) -> str:
    return " ".join(f"{name}: {pair[index]};" for name, pair in _CSS_COLORS.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(0)} }} "
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}"
)
"""CSS with the variables of both themes."""


def assign_colors(panels: Sequence[LayerPanel]) -> dict[str, int]:
    """The index of each backend's color in `SERIES_COLORS`. It is the same in every plot and for a kernel in all
    formats; our kernels come first."""
    names = {name for panel in panels for name in (*panel.times, *panel.chosen.values())}
    families = sorted({_kernel_family(name) for name in names}, key=lambda family: (family != "hopper", family))
    return {name: families.index(_kernel_family(name)) % len(SERIES_COLORS) for name in names}


def _kernel_family(backend: str) -> str:
    """A backend's name without its format: ``humming`` for ``humming_mxfp8``."""
    return "_".join(part for part in backend.split("_") if part not in get_args(SchemeName))


ColorFunction = Callable[[str], str]
"""The color that is drawn for a name of `_CSS_COLORS`."""


def _placeholder(name: str) -> str:
    return _PLACEHOLDERS[name]


def _light(name: str) -> str:
    return _CSS_COLORS[name][0]


def _empty_figure(width: float, height: float, color: ColorFunction, layout: str | None = "constrained") -> Any:
    """A figure without axes.

    Args:
        width: width of the figure in inches.
        height: height of the figure in inches.
        color: colors of letters and lines.
        layout: matplotlib's layout engine; None for margins that are set by hand.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "vllm-moe-oracle",  # equal plots get equal ids
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 10,
            "text.color": color("--ink"),
            "axes.edgecolor": color("--faint"),
            "axes.labelcolor": color("--ink"),
            "xtick.color": color("--ink"),
            "ytick.color": color("--ink"),
            "grid.color": color("--faint"),
            "text.parse_math": False,  # a layer's name is not a formula
        }
    )
    return pyplot.figure(figsize=(width, height), layout=layout)


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var({name})")
    return text


def standalone_svg(svg: str) -> str:
    """A plot as a file of its own, which defines its colors."""
    head, _, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>\n<style>{STYLE}</style>{rest}'


def embedded_svg(svg: str, name: str, classes: dict[str, str]) -> str:
    """A plot for a page with several plots: its ids get a prefix, and what does not show is left out.

    Args:
        svg: the plot.
        name: the prefix, of letters, digits and hyphens.
        classes: CSS classes of the page by the declarations that they stand for; gets those that the plot needs.
    """
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    known = {each: f"{name}-{number}" for number, each in enumerate(used)}
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{known[found[1]]}"' if found[1] in known else "", svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', lambda found: found[1] + known[found[2]], svg)
    # The page scales the plot; width and height in points would fix its size.
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(?:width|height)="[^"]+"', "", head)

    def with_classes(tag: re.Match[str]) -> str:
        return re.sub(
            r' style="([^"]+)"', lambda css: f' class="{classes.setdefault(css[1], f"p{len(classes)}")}"', tag[0]
        )

    # In tags alone: a label may contain anything, and matplotlib escapes its angle brackets.
    return re.sub(r"<[^>]+>", with_classes, _compact(f"{head}>{rest}"))


def _compact(svg: str) -> str:
    """A plot without metadata, comments and indentation, and with coordinates to a tenth of a point."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:d|x|y|points|transform)="[^"]*"', lambda found: _rounded(found[0]), svg)
    svg = re.sub(r'(?<=\sd=")[^"]*', lambda found: _without_repeated_commands(found[0]), svg)
    svg = re.sub(r' transform="rotate\(-?0(?:\.0)? [^"]*"', "", svg)
    # In a page neither ``href`` nor the plot needs a name space (SVG 2, section 16.1), and one rule for all plots is in
    # the page's style sheet.
    svg = re.sub(r' xmlns(?::xlink)?="[^"]*"| version="1\.1"', "", svg.replace(" xlink:href=", " href="))
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL).replace("<g/>", "")
    return _without_plain_groups(re.sub(r">\s+<", "><", re.sub(r"[ \t]*\n\s*", " ", svg)))


def _without_plain_groups(svg: str) -> str:
    """The same plot without groups that have no attributes."""
    kept: list[bool] = []

    def part(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            kept.append(tag[0] != "<g>")
            return tag[0] if kept[-1] else ""
        return tag[0] if kept.pop() else ""

    return re.sub(r"<g(?:\s[^>]*)?>|</g>", part, svg)


def _rounded(coordinates: str) -> str:
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), coordinates)


def _without_repeated_commands(path: str) -> str:
    """The same path: a letter is left out where it repeats, and ``L`` after ``M`` (SVG 1.1, section 8.3)."""
    words, current = [], ""
    for word in path.split():
        if not word.isalpha():
            words.append(word)
        else:
            if word == "M" or (word != current and (word, current) != ("L", "M")):
                words.append(word)
            current = word
    return " ".join(words)


def plot_times(panel: LayerPanel, colors: Mapping[str, int]) -> str:
    """Times of all backends by number of tokens, as SVG. Rings mark the oracle's choice."""
    width, height = 4.4, 4.2
    # Margins by hand: a layout engine draws every plot twice, and a page has dozens of them.
    figure = _empty_figure(width, height, _placeholder, layout=None)
    axis = figure.add_subplot()
    _draw_times(axis, panel, colors, _placeholder)
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="lower center", fontsize=9.5, frameon=False, ncols=2)
    bottom = 0.55 + 0.2 * -(-len(handles) // 2)
    figure.subplots_adjust(left=0.65 / width, right=1 - 0.08 / width, top=1 - 0.08 / height, bottom=bottom / height)
    return _svg(figure)


def save_picture(panels: Sequence[LayerPanel], path: str) -> None:
    """Draws what the page shows of several layers into one file, in light colors: the speedup over stock where it was
    timed, and the times. The suffix of the path selects the format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib import pyplot

    colors = assign_colors(panels)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    compared = compared_with_stock(panels)
    map_height = 1.2 + 0.3 * len(compared) if compared else 0.0
    figure = _empty_figure(max(6.0 * columns, 9.0), map_height + 4.2 * rows, _light)
    parts = figure.subfigures(
        1 + bool(compared), 1, squeeze=False, height_ratios=[map_height, 4.2 * rows][not compared :]
    )
    if compared:
        axis = parts[0, 0].subplots()
        ratios = [each for panel in compared for count in panel.counts if (each := panel.speedup(count)) is not None]
        mean = statistics.geometric_mean(ratios)
        axis.set_title(f"time of stock's default over that of the choice: {mean:.2f} (geometric mean)")
        _draw_speedups(axis, compared, _light)
    axes = parts[-1, 0].subplots(rows, columns, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel.name)
        _draw_times(axis, panel, colors, _light)
        if panel.times or panel.rooflines_us:
            axis.legend(fontsize=9, framealpha=0, ncols=2 if len(panel.times) > 5 else 1)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


_SEEN_BAND = 1.03
"""Of the quartiles' ratio: a band of less is thinner than its line of 1.5 points, on an axis of 107 points a decade."""


def _draw_times(axis: Any, panel: LayerPanel, colors: Mapping[str, int], color_of: ColorFunction) -> None:
    for name in sorted(panel.times, key=lambda name: (name in panel.stock, name)):
        points = sorted(panel.times[name].items())
        color = color_of(f"--series-{colors[name]}")
        counts = [count for count, _ in points]
        style = {"linestyle": "--"} if name in panel.stock else {"marker": "o", "markersize": 3}
        axis.plot(counts, [each.us for _, each in points], color=color, label=name, **style)
        if any(each.high > _SEEN_BAND * each.low for _, each in points):
            low, high = [each.low for _, each in points], [each.high for _, each in points]
            axis.fill_between(counts, low, high, color=color, alpha=0.18)
        chosen = [(count, each.us) for count, each in points if panel.chosen.get(count) == name]
        if chosen:
            ring = {"linestyle": "none", "marker": "o", "markersize": 8, "markerfacecolor": "none"}
            axis.plot(*zip(*chosen, strict=True), color=color, **ring)
    if panel.rooflines_us:
        counts = sorted(panel.rooflines_us)
        axis.plot(counts, [panel.rooflines_us[count] for count in counts], ":", color=color_of("--ink"), label="floor")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds")
    shown = panel.counts[:: 2 if len(panel.counts) > 8 else 1]
    axis.set_xticks(shown, [str(count) for count in shown], fontsize=9.5)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    ticks = [each for power in range(-1, 9) for part in (1, 2, 5) if low <= (each := part * 10.0**power) <= high]
    axis.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axis.tick_params(length=0)  # the grid marks them
    axis.grid(True, alpha=0.5, clip_on=False)  # it ends where the axes do


def compared_with_stock(panels: Sequence[LayerPanel]) -> list[LayerPanel]:
    """The layers with a time of stock vLLM's default and of the choice at one number of tokens at least."""
    return [panel for panel in panels if any(panel.speedup(count) is not None for count in panel.counts)]


def plot_speedups(panels: Sequence[LayerPanel]) -> str:
    """A heat map of the speedup of the choice over stock vLLM's default, by layer and number of tokens, as SVG."""
    rows = compared_with_stock(panels)
    counts = {count for panel in rows for count in panel.counts}
    figure = _empty_figure(3.2 + 0.62 * len(counts), 0.8 + 0.3 * len(rows), _placeholder)
    _draw_speedups(figure.subplots(), rows, _placeholder)
    return _svg(figure)


def _draw_speedups(axis: Any, rows: Sequence[LayerPanel], color_of: ColorFunction) -> None:
    from matplotlib.patches import Rectangle

    counts = sorted({count for panel in rows for count in panel.counts})
    axis.set_xlim(0, len(counts))
    axis.set_ylim(len(rows), 0)
    axis.set_xticks([x + 0.5 for x in range(len(counts))], [str(count) for count in counts])
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [panel.label for panel in rows])
    axis.set_xlabel("tokens")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    for y, panel in enumerate(rows):
        for x, count in enumerate(counts):
            ratio = panel.speedup(count)
            if ratio is None:
                continue
            color = color_of("--faster" if ratio >= 1 else "--slower")
            strength = min(abs(math.log2(ratio)), 1.0) * 0.6
            axis.add_patch(Rectangle((x + 0.02, y + 0.04), 0.96, 0.92, facecolor=color, alpha=strength, linewidth=0))
            weight = "normal" if ratio >= 1 else "bold"
            axis.text(x + 0.5, y + 0.5, f"{ratio:.2f}", ha="center", va="center", fontsize=9, fontweight=weight)
