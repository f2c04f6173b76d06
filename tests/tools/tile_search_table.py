"""The tiles that the kernels' rule chooses beside the best of a search, for layers without a table of their own:
a part of vllm_moe_oracle/kernels/RESULTS.md, from what `tests.gpu.tune_kernels` found on both Hopper cards.

`python -m tests.tools.generate --write` puts it into the page.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from tests.lib.golden_files import FOLDER
from tests.lib.readme_sections import markdown_table

GPUS = {"H100": "h100", "H200": "h200"}
TOKENS = (8, 32, 128, 512)
FEW_TOKENS = (1, 2, 4)


def rows(gpu: str) -> list[dict[str, Any]]:
    """Times of a layer at a number of tokens, with the rule's configuration and the best one, on a key of `GPUS`."""
    found: list[dict[str, Any]] = json.loads((FOLDER / GPUS[gpu] / "tile-search.json").read_text())["rows"]
    return found


def lost(row: dict[str, Any]) -> float:
    """The rule's time over that of the best configuration."""
    return float(row["rule_us"] / row["best_us"])


def table() -> str:
    """The rule's time over the best one's by layer and tokens, both cards, and the mean over each card's cells."""
    heads = [f"{gpu}, {tokens}" for gpu in GPUS for tokens in TOKENS]
    ratios = {(f"{row['scheme']}:{row['shape']}", gpu, row["tokens"]): lost(row) for gpu in GPUS for row in rows(gpu)}
    lines = []
    for layer in dict.fromkeys(key[0] for key in ratios):
        cells = [ratios.get((layer, gpu, tokens)) for gpu in GPUS for tokens in TOKENS]
        lines.append([layer, *("-" if each is None else f"{each:.2f}" for each in cells)])
    summaries = [f"{gpu}: {_summary([lost(row) for row in rows(gpu)])}." for gpu in GPUS]
    return "\n\n".join([markdown_table(["layer", *heads], lines), *summaries])


def few_ratios() -> dict[tuple[str, int], float]:
    """The rule's time over the best configuration's by layer and number of tokens, 1 where they are the same; H200."""
    found = json.loads((FOLDER / GPUS["H200"] / "tile-search-few.json").read_text())
    timed = {(f"{row['scheme']}:{row['shape']}", row["tokens"]): row["after"] / row["before"] for row in found["rows"]}
    cells = [each.rpartition(":") for each in found["searched"]]
    return {(layer, int(tokens)): timed.get((layer, int(tokens)), 1.0) for layer, _, tokens in cells}


def few_table() -> str:
    """`few_ratios` as a table, and their mean."""
    ratios = few_ratios()
    layers = dict.fromkeys(layer for layer, _ in ratios)
    lines = ([layer, *(f"{ratios[layer, tokens]:.2f}" for tokens in FEW_TOKENS)] for layer in layers)
    return f"{markdown_table(['layer', *FEW_TOKENS], lines)}\n\nH200: {_summary([*ratios.values()])}."


def _summary(ratios: list[float]) -> str:
    mean = statistics.geometric_mean(ratios)
    within = sum(each <= 1.05 for each in ratios)
    return f"{mean:.3f} in the geometric mean, {within} of {len(ratios)} within 5 %, {max(ratios):.2f} at most"
