"""Times the tiles that two versions of the kernels' rule choose, where they differ.

    python -m tests.gpu.compare_tiles --dump before.json                      # in the other version; needs no GPU
    python -m tests.gpu.compare_tiles before.json --json compared.json
    python -m tests.gpu.compare_tiles --table --json table.json               # the shipped table beside the rule alone

One Hopper card, torch and Triton, no vLLM. Layers of public models that the shipped tables do not hold, with expert
parallelism, too; or all kernel shapes of the shipped profiles with ``--measured``. Both choices run by turns, as CUDA
graphs with a cold L2 cache, medians in microseconds, their mean over draws of experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu import tune_kernels
from vllm_moe_oracle.kernels.config import choose_config
from vllm_moe_oracle.kernels.heuristic import heuristic_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import PackedWeights, storage_errors
from vllm_moe_oracle.measurements import model_shapes

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LAYERS = (
    "qwen3-next", "deepseek-v3-tp8", "glm-4.5-tp4", "deepseek-v2-lite", "phi-3.5-moe-tp2", "ernie-4.5-21b", "olmoe",
    "granite-3b-moe", "hunyuan-a13b-tp2", "dbrx-tp4", "llama-4-scout-tp4", "glm-4.5-air-tp2", "qwen3-235b-tp4",
    "qwen1.5-moe", "jamba-mini-tp2", "ling-mini", "qwen3-235b@ep8", "glm-4.5@ep4", "kimi-k2@ep8", "gptoss120b@ep4",
    "qwen3_30b@ep2", "mixtral-8x7b@ep8", "mixtral-8x7b@ep4", "mixtral-8x22b@ep8", "jamba-mini@ep8", "dbrx@ep8",
    "llama-4-scout@ep8", "phi-3.5-moe@ep8", "phi-3.5-moe@ep4", "arctic@ep64", "grok-1@ep8",
)  # fmt: skip
SCHEMES = ("mxfp8", "mxfp4", "int4_128", "int4_128z", "int4_32")


def cells(measured: bool) -> list[tuple[str, str]]:
    """(scheme, shape) pairs whose weights the kernels can hold."""
    if measured:
        named = [each.layer.partition(":") for each in model_shapes.served_problems()]
        return [(scheme.replace("_g", "_"), shape) for scheme, _, shape in named]
    found = []
    for shape in LAYERS:
        _, _, hidden, inner, *_ = tune_kernels.sizes_of(shape)[0]
        for scheme in SCHEMES:
            format, _, group = scheme.partition("_")
            if scheme == "int4_32" and inner % 128 == 0:
                continue  # for layers that cannot have groups of 128
            if not storage_errors(format, hidden, inner, int(group.rstrip("z") or 32), torch.bfloat16):
                found.append((scheme, shape))
    return found


def encode(config: LaunchConfig | PrefillConfig) -> dict[str, Any]:
    """The configuration as JSON values."""
    return config.to_json() if isinstance(config, LaunchConfig) else {"persistent": dataclasses.asdict(config)}


def decode(value: dict[str, Any]) -> LaunchConfig | PrefillConfig:
    """Inverse of `encode`."""
    return PrefillConfig(**value["persistent"]) if "persistent" in value else LaunchConfig.from_json(value)


def chosen(
    weights: PackedWeights, shape: str, tokens: int, rule: bool = False, quantize: bool = False
) -> LaunchConfig | PrefillConfig:
    """This version's choice; with `rule`, without the shipped table, with `quantize`, for MXFP8 activations."""
    top_k = tune_kernels.sizes_of(shape)[0][1]
    config = choose_config(weights, top_k, tokens, quantize=quantize)
    return heuristic_config(weights, top_k, tokens) if rule and isinstance(config, LaunchConfig) else config


def choices(
    measured: bool,
    rule: bool = False,
    quantize: bool = False,
    rows: Sequence[float] = (),
    before: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """This version's choices by cell and number of tokens.

    Args:
        measured: for the layers of shapes.json.
        rule: without the shipped table.
        quantize: for MXFP8 activations, which have no persistent kernels; cells of MXFP8 weights.
        rows: at these numbers of rows per active expert; empty: at `TOKENS`.
        before: at the numbers of tokens of these choices, in their cells.
    """
    found = {}
    for scheme, shape in cells(measured):
        cell = f"{scheme}:{shape}"
        if quantize and scheme != "mxfp8":
            continue
        weights = tune_kernels.stored(scheme, shape, "meta")
        counts = sorted({tune_kernels.tokens_for(shape, each) for each in rows}) or TOKENS
        if before is not None:
            counts = [*map(int, before.get(cell, ()))]
        found[cell] = {str(tokens): encode(chosen(weights, shape, tokens, rule, quantize)) for tokens in counts}
    return found


def summarize(rows: list[dict[str, Any]]) -> None:
    """Prints the ratio of times, before over after, by rows per expert, and the cells that lost most."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        least = next(each for each in (160, 90, 40, 28, 14, 6, 2, 0) if row["rows"] >= each)
        groups[f"{row['scheme'].partition('_')[0]:6s} {least:4d}+ rows"].append(row["before"] / row["after"])
        groups[f"{row['scheme'].partition('_')[0]:6s} all"].append(row["before"] / row["after"])
    for name, ratios in sorted(groups.items()):
        mean = statistics.geometric_mean(ratios)
        print(f"{name:20s} {len(ratios):4d} cells, {mean:.3f} times as fast, {min(ratios):.2f} to {max(ratios):.2f}")
    for row in sorted(rows, key=lambda row: row["before"] / row["after"])[:25]:
        print(f"{row['before'] / row['after']:.2f} {row['scheme']}:{row['shape']} {row['tokens']} tokens, "
              f"{row['rows']} rows: {row['configs'][0]} -> {row['configs'][1]}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="choices of the other version")
    parser.add_argument("--dump", type=Path, help="write this version's choices, and end")
    parser.add_argument("--rows", type=lambda text: [*map(float, text.split(","))], default=[],
                        help="with --dump: at these numbers of rows per active expert")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="the shipped table's choices as the other version's")
    parser.add_argument("--measured", action="store_true", help="layers of shapes.json; implied by --table")
    parser.add_argument("--quantize", action="store_true",
                        help="tiles for MXFP8 activations, timed with 16-bit ones: MXFP8 weights only")  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240, help="stop timing after this long")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--draws", type=int, default=3, help="of experts, up to 64 tokens or of four experts")
    args = parser.parse_args()
    if args.dump:
        args.dump.write_text(json.dumps(choices(args.measured, quantize=args.quantize, rows=args.rows)))
        return 0
    if bool(args.before) == args.table or not args.json:
        parser.error("give either the other version's choices or --table, and --json; or --dump")
    start = time.monotonic()
    before = choices(True, quantize=args.quantize) if args.table else json.loads(args.before.read_text())
    after = choices(args.measured or args.table, args.table, args.quantize, before=before)
    differing = {
        cell: [count for count in found if before[cell][count] != found[count]] for cell, found in after.items()
    }
    jobs, seen = [], set()
    for cell, counts in differing.items():
        scheme, shape = cell.split(":")
        for count in counts:
            for value in (before[cell][count], after[cell][count]):
                key = cell, json.dumps(value)
                if key not in seen:
                    seen.add(key)
                    jobs.append((scheme, shape, int(count), decode(value)))
    # The persistent kernels compile longest.
    jobs.sort(key=lambda job: isinstance(job[3], LaunchConfig))
    print(f"{sum(map(len, differing.values()))} choices differ, {len(jobs)} configurations to compile", flush=True)
    tune_kernels.precompile(jobs, args.processes)  # type: ignore[arg-type]
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for cell, counts in differing.items():
        scheme, shape = cell.split(":")
        if not counts or time.monotonic() - start > args.seconds:
            continue
        weights = tune_kernels.stored(scheme, shape)
        for count in counts:
            if time.monotonic() - start > args.seconds:
                break
            configs = [decode(each[cell][count]) for each in (before, after)]
            timer = tune_kernels.Timer(weights, scheme, shape, int(count), 11, [], args.draws)
            timer.best(configs)
            if len(timer.times) == 2:
                rows.append({
                    "scheme": scheme, "shape": shape, "tokens": int(count),
                    "rows": round(tune_kernels.rows_per_expert(shape, int(count)), 1),
                    "before": round(timer.times[configs[0]], 2), "after": round(timer.times[configs[1]], 2),
                    "configs": [tune_kernels.describe(each).replace("  ", "") for each in configs],
                })  # fmt: skip
            del timer
        del weights
        torch.cuda.empty_cache()
        conditions = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": tune_kernels.triton.__version__,
            "command": "python -m tests.gpu.compare_tiles " + " ".join(sys.argv[1:]),
        }  # fmt: skip
        args.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=0))
    summarize(rows)
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
