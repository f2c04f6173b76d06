"""Times tile configurations of the fused MoE kernels and writes the best per shape and number of tokens.

    python tests/gpu/tune_kernels.py --cell mxfp8:qwen3_30b --tokens 1,16,256 --json sweep.json

A cell is scheme:shape (mxfp8, mxfp4, int<bits>_<group>; the shapes below). One process per CPU core compiles first, then
one process times: whole layer in a CUDA graph, L2 flushed before each replay, median of the replays, in microseconds.
Per number of tokens the second product's tile is searched with the first's fixed, then the first's, then the options.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels.config import Config, Tile
from vllm_moe_oracle.kernels.fused_moe import fused_moe, plan_workspace
from vllm_moe_oracle.kernels.weights import OwnWeights, allocate

# experts, top-k, hidden, intermediate on this rank, activation, biases
SHAPES = {
    "gptoss20b": (32, 4, 2880, 2880, "swigluoai", True),
    "gptoss120b": (128, 4, 2880, 2880, "swigluoai", True),
    "qwen3_30b": (128, 8, 2048, 768, "silu", False),
    "kimi_k2_tp8": (384, 8, 7168, 256, "silu", False),
    "minimax_m2_tp4": (256, 8, 3072, 384, "silu", False),
    "nemotron3_nano": (128, 6, 2688, 1856, "relu2", False),
    "tiny": (8, 2, 256, 256, "silu", False),
}


def stored(scheme: str, shape: str, device: str = "cuda") -> OwnWeights:
    """A layer with random stored bytes: right in size and range, meaningless in value."""
    experts, _, hidden, inner, activation, bias = SHAPES[shape]
    format, _, group = scheme.partition("_")
    weights = allocate(format, experts, hidden, inner, gated=activation != "relu2", group=int(group or 32), bias=bias,
                       device=device)  # fmt: skip
    mx = format.startswith("mx")
    for matrix in (weights.w13, weights.w2):
        matrix.codes.random_(0, 120 if format == "mxfp8" else 256)
        if matrix.scales is not None and mx:
            matrix.scales.view(torch.uint8).random_(248, 255)
        elif matrix.scales is not None:
            matrix.scales.view(weights.dtype).uniform_(0.001, 0.01)
        if matrix.row_scale is not None:
            matrix.row_scale.uniform_(2.0**-16, 2.0**-15)
    return weights


def routed(tokens: int, shape: str, device: str = "cuda"):
    experts, top_k, hidden, *_ = SHAPES[shape]
    generator = torch.Generator(device=device).manual_seed(tokens)
    options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(tokens, hidden, **options) * 0.5
    logits = torch.randn(tokens, experts, **options)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), top_k, dim=-1)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def prepare(weights: OwnWeights, shape: str, tokens: int, config: Config, pdl: bool = True):
    """A function that runs the layer once, with everything it needs allocated."""
    x, router, ids = routed(tokens, shape)
    plan = plan_workspace(weights, tokens, SHAPES[shape][1], config)
    workspace = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    counters = torch.zeros(max(1, plan.counters), dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    activation = SHAPES[shape][4]
    limit = 7.0 if activation == "swigluoai" else None
    return lambda: fused_moe(x, weights, router, ids, activation=activation, limit=limit, workspace=workspace,
                             counters=counters, out=out, config=config, pdl=pdl)  # fmt: skip


def time_us(run, flush: torch.Tensor, replays: int = 12) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays + 2):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def tiles(scheme: str, rows: float) -> list[Tile]:
    """Candidate tiles for about this many rows per active expert."""
    four = scheme.startswith(("int4", "mxfp4"))
    found = []
    if rows <= 24:
        for bn, bk, stages in ((64, 128, 4), (64, 128, 6), (64, 256, 3), (64, 256, 4), (128, 128, 3), (128, 128, 4),
                               (128, 128, 5), (128, 256, 3), (64, 64, 6)):  # fmt: skip
            if four or bk < 256 or bn < 128:
                found.append(Tile(16, bn, bk, stages=stages))
        found.append(Tile(16, 128, 128, warps=8, stages=4))
    if 6 < rows <= 80:
        found += [Tile(32, 128, 128, stages=s) for s in (3, 4)] + [Tile(32, 64, 128, stages=4)]
        found += [Tile(32, 128, 64, stages=4), Tile(32, 256, 64, warps=8, stages=4)]
    if rows > 16:
        found += [Tile(64, 128, 128, stages=3), Tile(64, 128, 64, stages=4), Tile(64, 64, 128, stages=3)]
        found += [Tile(64, 128, 128, warps=8, stages=3), Tile(64, 256, 64, warps=8, stages=3)]
    if rows > 40:
        found += [Tile(128, 128, 64, warps=8, stages=s) for s in (3, 4)]
        found += [Tile(128, 128, 128, warps=8, stages=3), Tile(128, 64, 64, stages=3), Tile(128, 256, 64, warps=8)]
    if rows > 90:
        found += [Tile(256, 128, 64, warps=8, stages=s) for s in (3, 4)]
    return found


def candidates(scheme: str, weights: OwnWeights, shape: str, tokens: int) -> list[Tile]:
    top_k = SHAPES[shape][1]
    active = configs.active_experts(weights.experts, top_k, tokens)
    rows = tokens * top_k / active
    found = tiles(scheme, rows)
    if active * -(-weights.w13.rows // 64) < 264:
        found += [replace(t, split=s) for t in found[:4] for s in (2, 4)]
    return found


def options_of(tokens: int, top_k: int) -> list[dict[str, bool]]:
    if tokens * top_k > 256:
        return [{}]
    grid = [{"inline": i, "fuse_sum": f, "prefetch": p} for i in (True, False) for f in (True, False)
            for p in (True, False)]  # fmt: skip
    return [o for o in grid if not (o["inline"] and tokens * top_k > 128)]


def compile_some(jobs: list[tuple[str, str, int, Config]]) -> None:
    layers: dict[tuple[str, str], OwnWeights] = {}
    for scheme, shape, tokens, config in jobs:
        if (scheme, shape) not in layers:
            layers.clear()
            layers[scheme, shape] = stored(scheme, shape)
        try:
            prepare(layers[scheme, shape], shape, tokens, config)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{scheme} {shape} {tokens} {config}: {type(error).__name__} {error}"[:300], flush=True)


def precompile(jobs: list[tuple[str, str, int, Config]], processes: int) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(jobs[i::processes],)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def base(tokens: int, top_k: int, tile: Tile) -> Config:
    few = tokens * top_k <= configs.INLINE_SLOTS
    return Config(tile, tile, inline=few, fuse_sum=few, prefetch=few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", required=True)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--json", required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=480, help="stop timing after this long")
    args = parser.parse_args()
    start = time.time()
    counts = [int(t) for t in args.tokens.split(",")]
    cells = [tuple(cell.split(":")) for cell in args.cell]
    jobs = []
    for scheme, shape in cells:
        weights = stored(scheme, shape, "meta")
        seen = set()
        for tokens in counts:
            top_k = SHAPES[shape][1]
            for tile in candidates(scheme, weights, shape, tokens):
                config = base(tokens, top_k, tile)
                slots = 1 << max(4, (tokens * top_k - 1).bit_length()) if config.inline else 0
                if (config, slots) not in seen:
                    seen.add((config, slots))
                    jobs.append((scheme, shape, tokens, config))
    print(f"{len(jobs)} configurations to compile", flush=True)
    precompile(jobs, args.processes)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    rows = []
    for scheme, shape in cells:
        weights = stored(scheme, shape)
        top_k = SHAPES[shape][1]
        for tokens in counts:
            if time.time() - start > args.seconds:
                break
            times: dict[Config, float] = {}

            def measure(config: Config) -> float:
                if config not in times:
                    try:
                        times[config] = time_us(prepare(weights, shape, tokens, config), flush)
                    except Exception as error:
                        print(f"{scheme} {shape} {tokens} {config}: {type(error).__name__} {error}"[:200], flush=True)
                        times[config] = float("inf")
                return times[config]

            found = candidates(scheme, weights, shape, tokens)
            best = min((base(tokens, top_k, tile) for tile in found), key=measure)
            for _ in range(2):
                best = min((replace(best, down=tile) for tile in found), key=measure)
                best = min((replace(best, gate_up=tile) for tile in found), key=measure)
            best = min((replace(best, **option) for option in options_of(tokens, top_k)), key=measure)
            no_pdl = time_us(prepare(weights, shape, tokens, best, pdl=False), flush)
            ranked = sorted(times.items(), key=lambda item: item[1])
            rows.append({"scheme": scheme, "shape": shape, "tokens": tokens, "us": times[best], "no_pdl": no_pdl,
                         "config": best.to_json(),
                         "others": [[round(us, 1), config.to_json()] for config, us in ranked[:60]]})  # fmt: skip
            tile = [f"{t.bm}x{t.bn}x{t.bk}w{t.warps}s{t.stages}/{t.split}" for t in (best.gate_up, best.down)]
            flags = "".join(name[0] for name in ("inline", "fuse_sum", "prefetch") if getattr(best, name))
            print(f"{scheme:9s} {shape:14s} {tokens:5d} {times[best]:7.1f} us, no pdl {no_pdl:7.1f}  {tile[0]:18s} "
                  f"{tile[1]:18s} {flags:3s} of {len(times)}", flush=True)  # fmt: skip
            Path(args.json).write_text(json.dumps(rows))
        del weights
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
