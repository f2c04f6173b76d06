"""The table of several GPUs in vllm_moe_oracle/OPERATIONS.md, from what `tests.gpu.ranks` wrote on pairs of both
Hopper cards.

`python -m tests.tools.generate --write` puts it into the page.
"""

from __future__ import annotations

import json
from typing import Any

from tests.lib import golden_files
from tests.lib.readme_sections import markdown_table

PATHS = tuple(golden_files.newest("ranks", gpu) for gpu in ("h100", "h200"))
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


def rows() -> list[dict[str, Any]]:
    """Every engine that was served."""
    runs = [run for path in PATHS for run in json.loads(path.read_text())["runs"]]
    return [row for run in runs for row in run["rows"]]


def _case(row: dict[str, Any]) -> str | None:
    """The name of an engine's case in `CASES`: "mtp" for models that draft, whatever their parallelism; None for an
    engine of stock's that did not serve, or whose model drafts."""
    stock, drafts = "stock" in row["case"], " mtp" in row["format"]
    if stock and (drafts or not row["ok"]):
        return None
    return "mtp" if drafts else row["case"]


def table() -> str:
    """One line for each way of cutting a model and each feature: by this project's kernels with CUDA graphs, unless the
    line says vLLM's own, which are those of the static choice, or stock vLLM, of which only what it serves is there."""
    formats = {row["format"] for row in rows() if " mtp" not in row["format"]}
    lines = []
    for name, cases in CASES.items():
        named = {*cases, *(f"{case}, own, graphs" for case in cases)}
        found = [row for row in rows() if _case(row) in named]
        served = sorted({row["format"] for row in found})
        shown = ", ".join(served) if len(served) < 5 else f"{len(served)} of {len(formats)}"
        lines.append([name, shown, f"{max(row['logprob_difference'] for row in found):.3f}"])
    heads = ["over two GPUs", "formats", "largest difference of a logprob from float32 transformers"]
    return markdown_table(heads, lines)
