"""Times every pair of a list of tiles for a few experts with zero points, beside the kernels' choice.

    python -m tests.gpu.tile_pairs --json pairs.json [--seconds 190] [--plan]

One Hopper card with torch and Triton, without vLLM; 47 s on an H200 with 32 cores. Both tiles of a pair have one
height; the second one runs with 1, 2 and the chosen number of programs for its columns. First all pairs are timed, with
medians of 5 and means of two draws of experts; then the six fastest and the choice, with medians of 15 and means of
six. ``--plan`` prints how many configurations a layer has, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from tests.gpu import compare_tiles, tune_kernels
from vllm_moe_oracle.kernels.config import choose_launch_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig, config_errors
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig


def tile(bm: int, bn: int, stages: int, *, warps: int = 4, accumulators: bool = False) -> TileConfig:
    return TileConfig(bm, bn, 64, num_warps=warps, num_stages=stages, scale_accumulators=accumulators)


TILES = (
    tile(64, 128, 4, accumulators=True), tile(64, 128, 4), tile(64, 128, 3), tile(64, 256, 3, warps=8),
    tile(64, 256, 4, warps=8), tile(64, 256, 3, warps=8, accumulators=True), tile(128, 128, 3, warps=8),
    tile(128, 128, 4, warps=8), tile(128, 128, 4, warps=8, accumulators=True), tile(128, 256, 3, warps=8),
    tile(128, 256, 3, warps=8, accumulators=True), tile(96, 128, 3), tile(96, 256, 3, warps=8), tile(80, 128, 3),
    tile(80, 256, 3, warps=8), tile(48, 256, 3), tile(32, 256, 4),
)  # fmt: skip
WITHOUT_PARTS = (48, 80, 96)
"""Heights of tiles whose sums of several programs the kernels do not add up."""
LAYERS = (
    ("jamba-mini@ep8", 1024), ("mixtral-8x7b@ep4", 512), ("jamba-mini@ep8", 512), ("dbrx@ep8", 512),
    ("phi-3.5-moe@ep4", 512),
)  # fmt: skip
SCHEME = "int4_128z"


class Plan(NamedTuple):
    """What is timed for one layer and number of tokens.

    Attributes:
        shape: the layer, by its name in `tune_kernels`.
        tokens: rows of x.
        chosen: the kernels' choice.
        found: launch configurations beside it.
    """

    shape: str
    tokens: int
    chosen: LaunchConfig | PrefillConfig
    found: list[LaunchConfig]

    @property
    def compiled(self) -> list[LaunchConfig | PrefillConfig]:
        """Configurations that hold every tile of both GEMMs, and the choice."""
        first, second, found = set(), set(), []
        for config in self.found:
            if config.gate_up not in first or config.down not in second:
                first.add(config.gate_up)
                second.add(config.down)
                found.append(config)
        return [*found, self.chosen] if isinstance(self.chosen, PrefillConfig) else found


def plan(shape: str, tokens: int) -> Plan:
    """The configurations of one layer."""
    weights, top_k = tune_kernels.stored(SCHEME, shape, "meta"), tune_kernels.sizes_of(shape)[0][1]
    chosen = compare_tiles.chosen(weights, shape, tokens)
    base = chosen if isinstance(chosen, LaunchConfig) else choose_launch_config(weights, top_k, tokens)
    found = [base]
    for up in TILES:
        for down in (each for each in TILES if each.bm == up.bm):
            for parts in (1,) if down.bm in WITHOUT_PARTS else sorted({1, 2, base.down.split_k}):
                config = LaunchConfig(up, replace(down, split_k=parts))
                if not config_errors(weights, top_k, config):
                    found.append(config)
    return Plan(shape, tokens, chosen, list(dict.fromkeys(found)))


def measured(plan: Plan) -> dict[str, Any]:
    """The row of one layer: the choice's time and those of the fastest, in microseconds."""
    weights = tune_kernels.stored(SCHEME, plan.shape)
    timer = tune_kernels.Timer(weights, SCHEME, plan.shape, plan.tokens, 5, [], 2)
    timer.best([plan.chosen, *plan.found])
    top = sorted(timer.times, key=timer.times.__getitem__)[:6]
    last = tune_kernels.Timer(weights, SCHEME, plan.shape, plan.tokens, 15, [], 6)
    last.best([plan.chosen, *top])
    order = sorted(last.times, key=last.times.__getitem__)
    return {
        "scheme": SCHEME, "shape": plan.shape, "tokens": plan.tokens, "us": last.times[plan.chosen],
        "in_use": compare_tiles.encode(plan.chosen),
        "others": [[round(last.times[each], 2), compare_tiles.encode(each)] for each in order],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file that is written")
    parser.add_argument("--seconds", type=float, default=190.0, help="start no further layer after these seconds")
    parser.add_argument("--plan", action="store_true", help="print what would be timed")
    options = parser.parse_args()
    begin, plans = time.monotonic(), [plan(*layer) for layer in LAYERS]
    print({f"{each.shape} {each.tokens}": len(each.found) for each in plans}, flush=True)
    if options.plan:
        return 0
    if options.json is None:
        parser.error("--json FILE is missing")
    jobs = [(SCHEME, each.shape, each.tokens, config) for each in plans for config in each.compiled]
    tune_kernels.precompile(jobs, min(14, os.cpu_count() or 1))  # type: ignore[arg-type]
    conditions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    conditions |= {"command": f"python -m tests.gpu.tile_pairs --json {options.json.name}"}
    rows: list[dict[str, Any]] = []
    for each in plans:
        if time.monotonic() - begin > options.seconds:
            break
        rows.append(measured(each))
        print(each.shape, each.tokens, rows[-1]["us"], rows[-1]["others"][0], flush=True)
        options.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
