"""Texts for vLLM's collection of recipes, one for each family of models: ``examples/recipes/FAMILY.md``.

They are made of ``profiles/shapes.json``, of the shipped times beside stock's layer and of the committed runs of whole
models, by ``python -m tests.tools.generate --write``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.lib import golden_files
from tests.lib.readme_sections import markdown_table
from tests.tools import serving_tables
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES
from vllm_moe_oracle.report import html_report, page_data
from vllm_moe_oracle.report.page_data import LayerPanel
from vllm_moe_oracle.settings import load

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"

PUBLISHED = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "kimi-k2": "int4_g32", "deepseek-v4-flash": "mxfp4"}
"""Formats of the experts in the models' own repositories, by shape."""

IN_16_BITS = {
    "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b", "nemotron-3-nano", "glm-4.5",
    "glm-4.5-air", "mixtral-8x7b",
}  # fmt: skip
"""Shapes whose own repository holds 16-bit weights, which vLLM can quantize to MXFP8 while it loads."""

WHOLE_MODELS = {"gpt-oss": ("gpt-oss",), "Qwen3": ("qwen3-mxfp8", "qwen3-gptq")}
"""Models of the committed runs by family."""


@cache
def panels() -> tuple[LayerPanel, ...]:
    """The shipped measurements, with the choices of the oracle."""
    return page_data.from_shipped_profiles(load({}, assignments={"cache": str(FOLDER / "no cache")})).panels


def paths() -> list[Path]:
    """The files of all recipes."""
    return [FOLDER / f"{_slug(family)}.md" for family in model_shapes.families()]


@cache
def files() -> dict[Path, str]:
    """Every recipe with its text."""
    return dict(zip(paths(), map(recipe, model_shapes.families()), strict=True))


def _slug(family: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", family.lower()).strip("-")


def recipe(family: str) -> str:
    """The text for a family of models."""
    rows = sorted((each for each in panels() if each.family == family), key=lambda each: each.label)
    lines = [
        f"# {family} with vllm-moe-oracle",
        "",
        "A plugin that chooses, checks and explains the kernels of quantized mixture-of-experts layers, and brings its",
        "own for Hopper GPUs. Stock vLLM keeps everything else.",
        "",
        "```",
        f"pip install vllm-moe-oracle     # beside vLLM {RELEASES[0]} to {NEWEST}; replaces neither vLLM nor torch",
        *_serve_lines(rows),
        "```",
        "",
        "The server's log says `moe_oracle: N of N MoE layers run through the oracle`. Before anything is rented,",
        "`vllm-moe-oracle explain CHECKPOINT --device nvidia-h200` says what would run and why. `MOE_ORACLE_ENABLED=0`",
        "goes back to stock vLLM.",
        "",
        "## Expected gain",
        "",
        *_gain_table(rows),
        "",
        "Stock's default time over that of the plugin's choice, MoE layers alone: geometric mean over the numbers of",
        "tokens in a step: running sequences in decode, a chunk of prompts in prefill. A row with TP is one rank's",
        "shard on one GPU, without communication. A whole model gains less: attention and the rest stay as they are.",
        "GPUs that the table does not name were not measured.",
        *_whole_models(family),
    ]
    return "\n".join(lines) + "\n"


def _serve_lines(rows: Sequence[LayerPanel]) -> list[str]:
    """How the models are served with the smallest measured number of ranks: those whose repository can be, by name.

    Shards that nobody serves are timed, too: a model over so few ranks may have no room on them.
    """
    found: dict[str, int] = {}
    served = {each.layer for each in model_shapes.served_problems()}
    for panel in (each for each in rows if each.name in served):
        shape = model_shapes.find(panel.name)
        assert shape is not None, panel.name
        scheme, ranks = panel.name.partition(":")[0], int(panel.name.partition("@tp")[2] or 1)
        model = shape.model.partition(" ")[0]
        if PUBLISHED.get(shape.name) == scheme:
            line = f"vllm serve {model}"
        elif scheme == "mxfp8" and shape.name in IN_16_BITS:
            line = f"vllm serve {model} --quantization mxfp8"
        else:
            continue
        found[line] = min(found.get(line, ranks), ranks)
    lines = [line + (f" --tensor-parallel-size {ranks}" if ranks > 1 else "") for line, ranks in found.items()]
    return [*lines, "vllm serve CHECKPOINT           # of these models, in a format of the table below"]


def _gain_table(rows: Sequence[LayerPanel]) -> list[str]:
    spans = html_report.TOKEN_RANGES
    heads = ["layers of", "GPU", *(f"{name} token{'s' * (name != '1')}" for name in spans), "runs on"]
    lines = []
    compared = set()
    for panel in rows:
        cells = [_span_mean(panel, *limits) for limits in spans.values()]
        if not any(cells):
            continue
        compared.add(panel.label)
        chosen = ", ".join(f"`{name}`" for name in dict.fromkeys(panel.chosen.values()))
        lines.append([panel.label, panel.environment, *cells, chosen])
    without = [label for label in dict.fromkeys(panel.label for panel in rows) if label not in compared]
    return [markdown_table(heads, lines), *(["", f"Not compared with stock: {'; '.join(without)}."] if without else [])]


def _span_mean(panel: LayerPanel, low: int, high: int) -> str:
    found = [each for count in panel.counts if low <= count <= high and (each := panel.speedup(count)) is not None]
    return f"{statistics.geometric_mean(found):.2f}" if found else ""


def _whole_models(family: str) -> list[str]:
    """Decode steps of the committed runs, where the family has one."""
    data: Mapping[str, Any] = json.loads(golden_files.newest("serve").read_text())
    lines = []
    for name in WHOLE_MODELS.get(family, ()):
        modes = data["models"][name]["modes"]
        figures = (f"batch {batch}: {serving_tables.step_words(*modes, batch)}" for batch in ("1", "8", "64"))
        lines.append(f"* {name}: {'; '.join(figures)}")
    if not lines:
        return []
    conditions = data["conditions"]
    head = [
        f"A decode step of {conditions['layers']} layers of this shape with random weights, {conditions['device']}, "
        f"vLLM {conditions['vllm']},",
        "without and with the plugin, one run each:",
    ]
    return ["", *head, "", *lines]
