"""The picture of the README: ``python -m tests.tools.readme_plots [--write]``.

It shows the speedup of the oracle's choices over stock vLLM's default by number of tokens, a panel a format and a line
a GPU, from the shipped times beside stock's layer (tests.tools.comparisons). A GPU appears when its file does.
``--write`` makes ``examples/plots/speedup-light.svg`` and ``-dark.svg``; without it the exit status is 1 where they are
stale.

matplotlib's releases draw alike, not byte for byte. Each file therefore holds its figures in words, in ``<desc>``, and
is stale where these differ.
"""

from __future__ import annotations

import argparse
import html
import io
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_moe_oracle.report import page_data, plots
from vllm_moe_oracle.settings import load

FOLDER = Path(__file__).parents[2] / "examples" / "plots"
THEMES = {"light": 0, "dark": 1}
"""Index in the pairs of colors, by the end of the file's name."""

FORMATS = {"int4": "int4", "int8": "int8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
"""Titles by the beginning of a layer's name."""

Gains = dict[str, dict[str, dict[int, list[float]]]]
"""Ratios of layers by format, GPU with release of vLLM, and number of tokens."""


def gains() -> Gains:
    """The speedups of all layers that were timed beside stock's."""
    content = page_data.from_shipped_profiles(load({}, assignments={"cache": str(FOLDER / "no cache")}))
    found: Gains = {name: {} for name in FORMATS}
    for panel in content.panels:
        name = next(name for name in FORMATS if panel.name.startswith(name))
        for count in panel.counts:
            if (ratio := panel.speedup(count)) is not None:
                found[name].setdefault(panel.environment, {}).setdefault(count, []).append(ratio)
    return found


def description(found: Gains) -> str:
    """The figures in words: for a reader who does not see the picture, and for the check."""
    parts = []
    for name, machines in found.items():
        for machine, counts in machines.items():
            figures = ", ".join(f"{count}: {_mean(each):.2f}" for count, each in sorted(counts.items()))
            parts.append(
                f"{FORMATS[name]} on {machine}, geometric mean of up to {_layers(counts)} layers by tokens: {figures}."
            )
    return " ".join(parts)


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios)


def _layers(counts: Mapping[int, Sequence[float]]) -> int:
    return max(map(len, counts.values()))


def draw(found: Gains, theme: str) -> str:
    """The picture as SVG.

    Args:
        found: of `gains`.
        theme: a key of `THEMES`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    index = THEMES[theme]
    ink, faint = plots.INK_COLORS[index], plots.FAINT_COLORS[index]
    settings = {
        "svg.fonttype": "none", "svg.hashsalt": "vllm-moe-oracle", "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"], "font.size": 11, "text.color": ink, "axes.edgecolor": faint,
        "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "grid.color": faint,
    }  # fmt: skip
    names = list(dict.fromkeys(machine for machines in found.values() for machine in machines))
    highest = max(
        each for machines in found.values() for counts in machines.values() for row in counts.values() for each in row
    )
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(2, 2, figsize=(5.2, 5.4), sharex=True, sharey=True, layout="constrained")
        for axis, (name, machines) in zip(axes.flat, found.items(), strict=True):
            for machine, counts in machines.items():
                _draw_line(axis, counts, plots.SERIES_COLORS[names.index(machine)][index], machine)
            axis.axhline(1, color=ink, linewidth=1, linestyle=(0, (4, 3)))
            axis.set_title(f"{FORMATS[name]}: {max(map(_layers, machines.values()), default=0)} layers", fontsize=11)
            axis.grid(True, alpha=0.5)
        axes[0, 0].annotate("stock vLLM's default", (1, 1), (0, -12), textcoords="offset points", fontsize=10)
        ticks = [1, 16, 256, 4096]  # few: a telephone shows the picture 400 pixels wide
        axes[0, 0].set_xscale("log", base=2)
        axes[0, 0].set_xticks(ticks, [str(each) for each in ticks])
        axes[0, 0].minorticks_off()
        axes[0, 0].set_ylim(0.75, highest * 1.04)
        figure.supxlabel("tokens in a step", fontsize=11)
        figure.supylabel("MoE layer: times as fast as stock", fontsize=11)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", frameon=False)
        return _svg(figure, description(found))


def _draw_line(axis: Any, counts: Mapping[int, Sequence[float]], color: str, label: str) -> None:
    tokens = sorted(counts)
    low, high = [min(counts[each]) for each in tokens], [max(counts[each]) for each in tokens]
    axis.fill_between(tokens, low, high, color=color, alpha=0.18, linewidth=0)
    axis.plot(tokens, [_mean(counts[each]) for each in tokens], color=color, marker="o", markersize=3.5, label=label)


def _svg(figure: Any, words: str) -> str:
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
    head, start, rest = text.partition("<svg")
    attributes, end, body = rest.partition(">")
    title = "<title>Speedup of the oracle's choices over stock vLLM by number of tokens</title>"
    return f'{head}{start}{attributes} role="img"{end}\n{title}\n<desc>{html.escape(words)}</desc>{body}'


def words_in(svg: str) -> str:
    """The description that a file holds; "" if it has none."""
    found = re.search(r"<desc>(.*?)</desc>", svg, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def stale() -> list[Path]:
    """Files whose figures are not those of the data."""
    wanted = description(gains())
    paths = [FOLDER / f"speedup-{theme}.svg" for theme in THEMES]
    return [path for path in paths if not path.exists() or words_in(path.read_text(encoding="utf-8")) != wanted]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        FOLDER.mkdir(exist_ok=True)
        found = gains()
        for theme in THEMES:
            (FOLDER / f"speedup-{theme}.svg").write_text(draw(found, theme), encoding="utf-8")
    elif old := stale():
        sys.exit(f"stale: {', '.join(path.name for path in old)}")


if __name__ == "__main__":
    main()
