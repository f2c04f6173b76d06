"""The table of the batched format in vllm_moe_oracle/kernels/RESULTS.md, from what `tests.gpu.batched_layers` wrote.

`python -m tests.tools.generate --write` puts it into the page.
"""

from __future__ import annotations

import json
from typing import Any

from tests.lib import golden_files
from tests.lib.readme_sections import markdown_table

PATH = golden_files.newest("batched")
TOKENS = (1, 8, 32, 64, 128, 256)
"""Numbers of tokens an expert that have a column."""


def rows() -> list[dict[str, Any]]:
    """Times of one layer each, at one number of tokens and one way of routing."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())["rows"]
    return found


def table() -> str:
    """Microseconds by tokens an expert; with Marlin's, where it runs the layer."""
    lines = []
    times = {(row["layer"], row["routing"], row["tokens"]): row["us"] for row in rows()}
    for layer, routing in dict.fromkeys(key[:2] for key in times):
        cells = []
        for tokens in TOKENS:
            us = times[layer, routing, tokens]
            cells.append(f"{us['own']:.0f}" + (f" / {us['marlin']:.0f}" if "marlin" in us else ""))
        lines.append([layer, routing, *cells])
    return markdown_table(["layer", "routing", *(f"{each} tokens" for each in TOKENS)], lines)
