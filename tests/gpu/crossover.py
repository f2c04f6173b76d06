"""Times the small tiles beside the persistent kernels around the number of rows per expert where they change over.

    python tests/gpu/crossover.py --json crossover.json [--rows 12,16,20,24,28,32,40] [--seconds 120]

One Hopper card, torch and Triton, no vLLM. The heuristics of `kernels.config` and `kernels.prefill_config` for shapes
without measurements are judged by the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu import tune_kernels
from vllm_moe_oracle.kernels.config import LaunchConfig, TileConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.measuring.timing import CudaClock, time_interleaved

SCHEMES = ("mxfp8", "mxfp4", "int4_128")


def candidates(scheme: str) -> dict[str, LaunchConfig | PrefillConfig]:
    """The heuristic's two middle tiles of the format, and the persistent kernels."""
    four = scheme != "mxfp8"
    small = TileConfig(32, 128, 128, num_stages=3) if four else TileConfig(32, 128, 64)
    middle = TileConfig(64, 128, 64) if four else TileConfig(64, 128, 128, num_warps=8, num_stages=3)
    return {"32": LaunchConfig(small, small), "64": LaunchConfig(middle, middle), "persistent": PrefillConfig()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rows", default="12,16,20,24,28,32,40")
    parser.add_argument("--shapes", default="qwen3-next,deepseek-v2-lite,deepseek-v3-tp8,glm-4.5-tp4,phi-3.5-moe-tp2")
    parser.add_argument("--seconds", type=float, default=120, help="stop timing after this long")
    options = parser.parse_args()
    start = time.time()
    wanted = [float(word) for word in options.rows.split(",")]
    cells = [(scheme, shape) for shape in options.shapes.split(",") for scheme in SCHEMES]
    jobs = [
        (scheme, shape, tune_kernels.tokens_for(shape, 28), config)
        for scheme, shape in cells
        for config in candidates(scheme).values()
    ]
    tune_kernels.precompile(jobs, os.cpu_count() or 1)  # type: ignore[arg-type]
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    clock, found = CudaClock(), []
    for scheme, shape in cells:
        weights = tune_kernels.stored(scheme, shape)
        for rows in wanted:
            if time.time() - start > options.seconds:
                break
            tokens = tune_kernels.tokens_for(shape, rows)
            graphs = {
                name: clock.prepare(tune_kernels.prepare(weights, shape, tokens, config))
                for name, config in candidates(scheme).items()
            }
            timed = time_interleaved(clock, {name: [run] for name, (run, _) in graphs.items()}, 9, 1.0)
            us = {name: round(each.us, 1) for name, each in timed.items()}
            graphs.clear()
            found.append({"scheme": scheme, "shape": shape, "rows": rows, "tokens": tokens, "us": us})
            print(f"{scheme:9s} {shape:17s} {rows:4.0f} rows {tokens:5d} tokens {us}", flush=True)
        del weights
        torch.cuda.empty_cache()
        conditions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
        options.json.write_text(json.dumps({"conditions": conditions, "rows": found}, indent=0))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
