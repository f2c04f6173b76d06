"""The generated parts of the README: the gain, whole models, and what helps where. `tests.tools.generate` puts them in.

All of it is made of shipped and committed measurements; a GPU appears when a file for it does.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lib.readme_sections import markdown_table, paragraph
from tests.tools import recipes
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.problem import Activation, Device, Problem
from vllm_moe_oracle.devices.catalog import known_device, known_device_names
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.measurements import lookup, model_shapes
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.report import html_report, plots
from vllm_moe_oracle.report.page_data import LayerPanel
from vllm_moe_oracle.settings import load

GOLDEN = Path(__file__).parents[1] / "golden"


def gain() -> str:
    """The gain over stock, one line for each GPU."""
    machines = [each for each in html_report.machines(recipes.panels()) if each.spans]
    spans = dict.fromkeys(span for machine in machines for span, _ in machine.spans)
    heads = ("MoE layers on", "all", *spans, "range", "times")
    rows = []
    for machine in sorted(machines, key=lambda each: -sum(len(rows) for _, rows in each.families)):
        compared = plots.compared_with_stock([each for _, rows in machine.families for each in rows])
        ratios = _ratios(compared)
        cells = (
            machine.name,
            f"**{statistics.geometric_mean(ratios):.2f}**",
            *(dict(machine.spans).get(span, "")[:-1] for span in spans),  # without the sign of times
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{len(ratios)} in {len(compared)} layers",
        )
        rows.append(cells)
    only = ["No other GPU has been measured."] if len(rows) == 1 else []
    words = paragraph(
        "Stock vLLM's default time over the plugin's, geometric means over layers, by tokens in a",
        "step. Bands are the slowest and the fastest layer.",
        *only,
        "[How it was measured](vllm_moe_oracle/measuring/README.md).",
    )
    return f"{markdown_table(heads, rows)}\n\n{words}"


def _ratios(panels: Iterable[LayerPanel]) -> list[float]:
    """Every measured speedup over stock."""
    return [each for panel in panels for count in panel.counts if (each := panel.speedup(count)) is not None]


def end_to_end() -> str:
    """Whole models without and with the plugin, of the committed runs of ``vllm-moe-oracle ab``."""
    return served_models(sorted(GOLDEN.glob("*/ab-*.json")))


def served_models(paths: Sequence[Path]) -> str:
    """Tokens a second, latencies and starts by vLLM's serving benchmark.

    Args:
        paths: what ``vllm-moe-oracle ab --json`` printed, in folders named after the GPU.
    """
    heads: list[str] = []
    rows = []
    conditions: dict[str, None] = {}
    starts = []
    for path in paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        gpu = known_device(f"nvidia-{path.parent.name}").name
        model = data["model"].rpartition("/")[2]
        start = next(each for each in data["metrics"] if each["concurrency"] is None)
        starts.append(f"{model} {_served_cell(start)}")
        for given in data["loads"]:
            metrics = [each for each in data["metrics"] if each["concurrency"] == given["concurrency"]]
            heads = heads or ["stock → plugin", *(f"{each['name']}, {each['unit']}" for each in metrics)]
            where = f"{gpu}, vLLM {data['packages']['vllm']}, medians of {data['turns_measured']} turns"
            weights = "random weights" if "dummy" in data["options"] else "the checkpoint's weights"
            conditions[f"{where}; {weights}; {given['input_len']} tokens in, {given['output_len']} out."] = None
            rows.append([f"{model}, {given['concurrency']} at a time", *map(_served_cell, metrics)])
    words = paragraph(
        "By `vllm-moe-oracle ab`, with `vllm bench serve`:", *conditions, "Percentages are means of the turns' ratios;",
        f"≈: within the noise between turns. Starts with warm caches, seconds: {', '.join(starts)}.",
    )  # fmt: skip
    return f"{markdown_table(heads, rows)}\n\n{words}"


def _served_cell(metric: Mapping[str, Any]) -> str:
    stock, own = (statistics.median(metric[name]) for name in ("stock", "plugin"))
    change = "≈" if metric["verdict"] == "no difference shown" else f"{metric['ratio'] - 1:+.0%}"
    return f"{_figure(stock)} → {_figure(own)} ({change})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def help_table() -> str:
    """What decides, by kind of GPU and format. GPUs before Ampere, which run few kernels, have no row."""
    devices = {name: known_device(name) for name in known_device_names()}
    devices = {name: device for name, device in devices.items() if (device.capability or _AMPERE) >= _AMPERE}
    rows: dict[tuple[str, ...], list[str]] = {}
    for device in devices.values():
        rows.setdefault(tuple(_help_cell(device, name) for name in HELP_FORMATS), []).append(device.name)
    lines: list[list[str]] = []
    # What decides first, and the machine that decides nothing by times last.
    order = ("measured", "predicted", "static")
    first = {cells: next(n for n, word in enumerate(order) if word in cells[0]) for cells in rows}
    for cells, names in sorted(rows.items(), key=lambda row: (first[row[0]], "CPU" in row[1])):
        lines.append([_short_names(names), *cells])
    lines.append(["ROCm, XPU", *["stands down"] * len(HELP_FORMATS)])
    words = paragraph(
        "*Measured*: layers of the recipes are chosen by times on this GPU, and the figure is their mean gain over",
        "stock; most other shards, expert parallelism and zero points are predicted. *Predicted*: chosen by a latency",
        "model that is fitted to an H200 and an H100; other cards were not compared. *Static*: vLLM's own kernels in",
        "vLLM's order, checked, without a gain until a server's first start measures; with FlashInfer on Hopper, MXFP4",
        "by Quark or `--quantization mxfp4` (W4A4), too. On a CPU experts run",
        "[0.8 to 1.2 times as fast as in 16 bits](vllm_moe_oracle/ACCURACY.md#speed), in the same memory.",
        "*Stands down*: the plugin does nothing. *Not*: such layers are stock vLLM's, or nothing runs them.",
    )
    return f"{markdown_table(['on', *HELP_FORMATS.values()], lines)}\n\n{words}"


_AMPERE = 80
HELP_FORMATS = {"int4": "int4", "int8": "int8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
"""Columns of `help_table`, by the beginning of a layer's name."""


def _help_cell(device: Device, start: str) -> str:
    chosen = load({}, assignments={"cache": str(GOLDEN / "no cache")})
    layers = [each for each in model_shapes.served_problems() if each.layer.startswith(start)]
    found: list[Decision] = []
    four_bits = map(_with_four_bits, layers) if start == "mxfp4" else ()
    missing = [] if all(_has_backend(each, device) for each in four_bits) else ["W4A4"]
    for layer in layers:
        try:
            found.append(decide(layer, device, chosen, measurements=lookup.find_measurements(layer, device, chosen)))
        except NoBackendError:
            missing.append(_model_of(layer))
    words = " and ".join(sorted({each.why for each in found}))
    if words == "measured":
        here = [each for each in recipes.panels() if each.name.startswith(start) and device.name in each.environment]
        words = f"**measured: {statistics.geometric_mean(_ratios(here)):.2f}**" if _ratios(here) else words
    served = [name for name in dict.fromkeys(map(_model_of, layers)) if name not in missing]
    if len(set(missing)) > len(served):
        return f"{words} ({', '.join(served)} only)"
    return words + (f" (not {', '.join(dict.fromkeys(missing))})" if missing else "")


def _has_backend(layer: Problem, device: Device) -> bool:
    try:
        decide(layer, device, load({}))
    except NoBackendError:
        return False
    return True


def _with_four_bits(layer: Problem) -> Problem:
    """A gated layer as ``--quantization mxfp4`` makes it."""
    scheme = dataclasses.replace(layer.scheme, packing="online", activations="mxfp4")
    return dataclasses.replace(layer, scheme=scheme, activation=Activation("silu"), has_bias=False)


def _model_of(layer: Problem) -> str:
    """The model in the name of a layer, such as ``mxfp8:qwen3-30b-a3b@tp2``."""
    return layer.layer.partition(":")[2].partition("@")[0]


def _short_names(names: list[str]) -> str:
    """Product names without the maker's, and without sizes and sockets."""
    cut = [re.sub(r"NVIDIA |GeForce |-SXM4.*| SXM6.*| 80GB.*| 480GB.*| 144G .*", "", name) for name in names]
    return ", ".join(sorted({*cut}))
