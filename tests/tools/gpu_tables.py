"""Tables of what `tests.gpu.batched_layers`, `ranks` and `tune_kernels` found on Hopper cards: of the batched format
and of searched tiles in vllm_moe_oracle/kernels/RESULTS.md, of several GPUs in vllm_moe_oracle/OPERATIONS.md.

`python -m tests.tools.generate --write` puts them into the pages.
"""

from __future__ import annotations

import statistics
from typing import Any

from tests.lib import golden_files
from tests.lib.golden_files import FOLDER
from tests.lib.readme_sections import markdown_table

BATCHED = golden_files.newest("batched")
BATCHED_TOKENS = (1, 8, 32, 64, 128, 256)
"""Numbers of tokens an expert that have a column."""


def batched() -> str:
    """Microseconds by tokens an expert; with Marlin's, where it runs the layer."""
    lines = []
    times = {(row["layer"], row["routing"], row["tokens"]): row["us"] for row in golden_files.rows(BATCHED)}
    for layer, routing in dict.fromkeys(key[:2] for key in times):
        cells = []
        for tokens in BATCHED_TOKENS:
            us = times[layer, routing, tokens]
            cells.append(f"{us['own']:.0f}" + (f" / {us['marlin']:.0f}" if "marlin" in us else ""))
        lines.append([layer, routing, *cells])
    return markdown_table(["layer", "routing", *(f"{each} tokens" for each in BATCHED_TOKENS)], lines)


# --- Several GPUs -----------------------------------------------------------------------------------------------------

RANKS = tuple(golden_files.newest("ranks", gpu) for gpu in ("h100", "h200"))
CASES = {
    "tensor parallel 2": ("tp2", "prefix caching", "chunked prefill", "async scheduling"),
    "tensor parallel 2, with expert parallelism": ("tp2 ep", "reload, ep", "eplb"),
    "data parallel 2, experts sharded over the ranks": ("dp2",),
    "data parallel 2, with expert parallelism": ("dp2 ep",),
    "pipeline parallel 2": ("pipeline",),
    "vLLM's own kernels, eager, tensor parallel 2": ("tp2, static",),
    "vLLM's own kernels, eager, tensor parallel 2 with expert parallelism": ("tp2 ep, static",),
    "reload of another checkpoint and back (tensor parallel, also with expert parallelism)": ("reload", "reload, ep"),
    "sleep mode, levels 1 and 2": ("sleep",),
    "EPLB (expert load balancing), synchronous and asynchronous": ("eplb", "eplb, async"),
    "LoRA on the attention, with and without it in one batch": ("lora",),
    "LoRA on the experts, tensor parallel": ("expert lora",),
    "LoRA on the experts, expert parallel": ("expert lora, ep",),
    "speculative decoding by n-grams": ("ngram drafts",),
    "speculative decoding by the model's MTP layer, quantized or in 16 bits": ("mtp",),
    "prefix caching": ("prefix caching",),
    "chunked prefill": ("chunked prefill",),
    "async scheduling": ("async scheduling",),
    "batch invariance: the same bits alone and among 63 others": ("batch invariance",),
    "batch invariance of `vllm serve`, tensor parallel 2": ("batch invariance, http",),
    "`vllm serve`, 64 requests at once, tensor parallel 2": ("tp2, http",),
    "`vllm serve --data-parallel-size 2`, with expert parallelism": ("dp2 ep, http",),
    "stock vLLM without the plugin, tensor parallel 2": ("tp2, stock, graphs",),
    "stock vLLM without the plugin, tensor parallel 2 with expert parallelism": ("tp2 ep, stock, graphs",),
}
"""What a reader calls it, and the cases in the file: a way of cutting the model, or what is switched on."""


def ranks_rows() -> list[dict[str, Any]]:
    """Every engine that was served."""
    return [row for path in RANKS for run in golden_files.read(path)["runs"] for row in run["rows"]]


def _case(row: dict[str, Any]) -> str | None:
    """The name of an engine's case in `CASES`: "mtp" for models that draft, whatever their parallelism; None for an
    engine of stock's that did not serve, or whose model drafts."""
    stock, drafts = "stock" in row["case"], " mtp" in row["format"]
    if stock and (drafts or not row["ok"]):
        return None
    return "mtp" if drafts else row["case"]


def ranks() -> str:
    """One line for each way of cutting a model and each feature: by this project's kernels with CUDA graphs, unless the
    line says vLLM's own, which are those of the static choice, or stock vLLM, of which only what it serves is there."""
    formats = {row["format"] for row in ranks_rows() if " mtp" not in row["format"]}
    lines = []
    for name, cases in CASES.items():
        named = {*cases, *(f"{case}, own, graphs" for case in cases)}
        found = [row for row in ranks_rows() if _case(row) in named]
        served = sorted({row["format"] for row in found})
        shown = ", ".join(served) if len(served) < 5 else f"{len(served)} of {len(formats)}"
        lines.append([name, shown, f"{max(row['logprob_difference'] for row in found):.3f}"])
    heads = ["over two GPUs", "formats", "largest difference of a logprob from float32 transformers"]
    return markdown_table(heads, lines)


# --- Tiles that the kernels' rule chooses for layers without a table, beside the best of a search --------------------

GPUS = {"H100": "h100", "H200": "h200"}
TILE_TOKENS = (8, 32, 128, 512)
FEW_TOKENS = (1, 2, 4)


def tile_rows(gpu: str) -> list[dict[str, Any]]:
    """Times of a layer at a number of tokens, with the rule's configuration and the best one, on a key of `GPUS`."""
    return golden_files.rows(FOLDER / GPUS[gpu] / "tile-search.json")


def lost(row: dict[str, Any]) -> float:
    """The rule's time over that of the best configuration."""
    return float(row["rule_us"] / row["best_us"])


def tile_search() -> str:
    """The rule's time over the best one's by layer and tokens, both cards, and the mean over each card's cells."""
    heads = [f"{gpu}, {tokens}" for gpu in GPUS for tokens in TILE_TOKENS]
    ratios = {
        (f"{row['scheme']}:{row['shape']}", gpu, row["tokens"]): lost(row) for gpu in GPUS for row in tile_rows(gpu)
    }
    lines = []
    for layer in dict.fromkeys(key[0] for key in ratios):
        cells = [ratios.get((layer, gpu, tokens)) for gpu in GPUS for tokens in TILE_TOKENS]
        lines.append([layer, *("-" if each is None else f"{each:.2f}" for each in cells)])
    summaries = [f"{gpu}: {_summary([lost(row) for row in tile_rows(gpu)])}." for gpu in GPUS]
    return "\n\n".join([markdown_table(["layer", *heads], lines), *summaries])


def few_ratios() -> dict[tuple[str, int], float]:
    """The rule's time over the best configuration's by layer and number of tokens, 1 where they are the same; H200."""
    found = golden_files.read(FOLDER / GPUS["H200"] / "tile-search-few.json")
    timed = {(f"{row['scheme']}:{row['shape']}", row["tokens"]): row["after"] / row["before"] for row in found["rows"]}
    cells = [each.rpartition(":") for each in found["searched"]]
    return {(layer, int(tokens)): timed.get((layer, int(tokens)), 1.0) for layer, _, tokens in cells}


def few_tile_search() -> str:
    """`few_ratios` as a table, and their mean."""
    ratios = few_ratios()
    layers = dict.fromkeys(layer for layer, _ in ratios)
    lines = ([layer, *(f"{ratios[layer, tokens]:.2f}" for tokens in FEW_TOKENS)] for layer in layers)
    return f"{markdown_table(['layer', *FEW_TOKENS], lines)}\n\nH200: {_summary([*ratios.values()])}."


def _summary(ratios: list[float]) -> str:
    mean = statistics.geometric_mean(ratios)
    within = sum(each <= 1.05 for each in ratios)
    return f"{mean:.3f} in the geometric mean, {within} of {len(ratios)} within 5 %, {max(ratios):.2f} at most"
