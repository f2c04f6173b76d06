"""Times tile configurations of the fused MoE kernels and writes the best per shape and number of tokens.

    python tests/gpu/tune_kernels.py --cell mxfp8:qwen3_30b --tokens 1,16,256 --json sweep.json

A cell is scheme:shape (mxfp8, mxfp4, int<bits>_<group>; the shapes below). One process per CPU core compiles first,
then one process times: whole layer in a CUDA graph, L2 flushed before each replay, median of the replays, in
microseconds. Per number of tokens the second product's tile is searched with the first's fixed, then the first's, then
the options.
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
import triton

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


def tiles(scheme: str, rows: float, tokens: int) -> list[Tile]:
    """Candidate tiles for about this many rows per active expert."""
    integers = scheme.startswith("int")
    found = []
    if rows <= 24:
        for bn, bk, stages, registers in NARROW:
            if bk < 256 or bn < 128 or not scheme.startswith(("int8", "mxfp8")):
                found.append(Tile(16, bn, bk, stages=stages, registers=registers))
        found += [Tile(16, 128, 128, stages=3, registers=128, split=s) for s in (2, 3)]
        found.append(Tile(16, 64, 128, split=2))
        if integers:
            found += [replace(t, promote=False) for t in found if t.bk <= 128 and t.bn == 128]
    if 6 < rows <= 80:
        found += [Tile(32, 128, 128, stages=s) for s in (3, 4)] + [Tile(32, 64, 128, stages=4)]
        found += [Tile(32, 128, 64, stages=4), Tile(32, 256, 64, warps=8, stages=4)]
        found += [Tile(32, 128, 128, stages=3, registers=128), Tile(32, 128, 64, stages=4, registers=128)]
        if integers:
            found += [replace(t, promote=False) for t in found if t.bm == 32]
    if rows > 16:
        found += [Tile(64, 128, 128, stages=3), Tile(64, 128, 64, stages=4), Tile(64, 64, 128, stages=3)]
        found += [Tile(64, 128, 128, warps=8, stages=3), Tile(64, 256, 64, warps=8, stages=3)]
        found += [Tile(64, 128, 64, stages=3), Tile(64, 64, 64, stages=4)]
        found += [Tile(32, 256, 128, warps=8, stages=3), Tile(64, 256, 128, warps=8, stages=2)]
    if rows > 40:
        found += [Tile(128, 128, 64, warps=8, stages=s) for s in (3, 4)]
        found += [Tile(128, 128, 128, warps=8, stages=3), Tile(128, 64, 64, stages=3), Tile(128, 256, 64, warps=8)]
    if rows > 90:
        found += [Tile(256, 128, 64, warps=8, stages=s) for s in (3, 4)]
    if rows <= 3:
        found += [Tile(8, 64, 128, stages=4, fold=2), Tile(8, 64, 64, stages=4, fold=2)]
        found.append(Tile(4, 64, 128, stages=3, fold=4, warps=8))
        found += [Tile(8, 32, 128, stages=s, fold=2) for s in (3, 5)] + [Tile(4, 32, 128, stages=3, fold=4)]
    return found


# bn, bk, stages, cap on registers (0: none) of the 16-token tiles
NARROW = ((64, 128, 4, 0), (64, 128, 6, 0), (64, 256, 3, 0), (64, 256, 4, 0), (128, 128, 3, 0), (128, 128, 3, 96),
          (128, 128, 3, 128), (128, 128, 4, 128), (128, 256, 3, 0), (64, 64, 6, 0))  # fmt: skip


def candidates(scheme: str, weights: OwnWeights, shape: str, tokens: int) -> list[Tile]:
    """Tiles to try for a cell and a number of tokens."""
    top_k = SHAPES[shape][1]
    return tiles(scheme, tokens * top_k / configs.active_experts(weights.experts, top_k, tokens), tokens)


def options_of(tokens: int) -> list[dict[str, bool]]:
    """Settings other than tiles to try in the end."""
    return [{"prefetch": True}, {"prefetch": False}, {"fuse_sum": True}] if tokens <= 2 else [{}]


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


def base(tokens: int, tile: Tile) -> Config:
    """Both products with one tile."""
    return Config(tile, tile, per_slot=tokens <= PER_SLOT_TOKENS and tile.bm <= 16)


PER_SLOT_TOKENS = 4


class Timer:
    """Times configurations of one cell and number of tokens, each once."""

    def __init__(self, weights: OwnWeights, scheme: str, shape: str, tokens: int, flush: torch.Tensor) -> None:
        self.weights, self.scheme, self.shape, self.tokens, self.flush = weights, scheme, shape, tokens, flush
        self.times: dict[Config, float] = {}

    def __call__(self, config: Config) -> float:
        if config not in self.times:
            try:
                self.times[config] = time_us(prepare(self.weights, self.shape, self.tokens, config), self.flush)
            except (RuntimeError, triton.TritonError) as error:
                torch.cuda.synchronize()  # an error that broke the device ends the run here
                name = f"{self.scheme} {self.shape} {self.tokens} {config}"
                print(f"{name}: {type(error).__name__} {error}"[:300], flush=True)
                self.times[config] = float("inf")
        return self.times[config]

    def search(self, found: list[Tile]) -> Config:
        """Both tiles together, then each alone among tiles of the same bm, then the options."""
        best = min((base(self.tokens, tile) for tile in found), key=self)
        if best.per_slot:
            for _ in range(2):
                best = min((replace(best, down=tile) for tile in found if tile.bm <= 16), key=self)
                best = min((replace(best, gate_up=tile) for tile in found if tile.bm <= 16), key=self)
            best = min((replace(best, **option) for option in options_of(self.tokens)), key=self)
            if self.tokens > 1 and best.gate_up.bm == best.down.bm:
                best = min(best, replace(best, per_slot=False, prefetch=False), key=self)
            return best
        # Tiles of another bm get a chance of their own: the best pair need not contain the best common tile.
        starts = {tile.bm: base(self.tokens, tile) for tile in sorted(found, key=lambda t: -self(base(self.tokens, t)))}
        for start in starts.values():
            if self(start) > 1.15 * self(best):
                continue
            for _ in range(2):
                same = [tile for tile in found if tile.bm == start.gate_up.bm]
                start = min((replace(start, down=tile) for tile in same), key=self)
                start = min((replace(start, gate_up=tile) for tile in same), key=self)
            best = min(best, start, key=self)
        return best


def describe(config: Config) -> str:
    """A configuration in a few characters."""
    parts = [
        f"{t.bm}x{t.bn}x{t.bk}w{t.warps}s{t.stages}" + (f"/{t.split}" if t.split > 1 else "")
        + (f"*{t.fold}" if t.fold > 1 else "")
        + (f"r{t.registers}" if t.registers else "") + ("" if t.promote else "-")
        for t in (config.gate_up, config.down)
    ]  # fmt: skip
    flags = "".join(name[0] for name in ("per_slot", "fuse_sum", "prefetch") if getattr(config, name))
    return f"{parts[0]:22s} {parts[1]:22s} {flags}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", required=True)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--json", required=True)
    parser.add_argument("--refine", action="append", type=lambda text: Tile(*map(int, text.split(","))), default=[],
                        help="bm,bn,bk,warps,stages: only try these tiles in place of the ones in use")  # fmt: skip
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
            current = configs.choose(weights, SHAPES[shape][1], tokens)
            found = args.refine or candidates(scheme, weights, shape, tokens)
            for config in [base(tokens, tile) for tile in found] + [current] * bool(args.refine):
                if config not in seen:
                    seen.add(config)
                    jobs.append((scheme, shape, tokens, config))
    print(f"{len(jobs)} configurations to compile", flush=True)
    precompile(jobs, args.processes)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    rows = []
    for scheme, shape in cells:
        weights = stored(scheme, shape)
        for tokens in counts:
            if time.time() - start > args.seconds:
                break
            timer = Timer(weights, scheme, shape, tokens, flush)
            if args.refine:
                best = configs.choose(weights, SHAPES[shape][1], tokens)
                for name in ("down", "gate_up"):
                    near = [best, *(replace(best, **{name: t}) for t in args.refine if t.bm == getattr(best, name).bm)]
                    best = min(near, key=timer)
            else:
                best = timer.search(candidates(scheme, weights, shape, tokens))
            ranked = sorted(timer.times.items(), key=lambda item: item[1])
            rows.append({"scheme": scheme, "shape": shape, "tokens": tokens, "us": timer(best),
                         "config": best.to_json(),
                         "others": [[round(us, 1), describe(config)] for config, us in ranked[:25]]})  # fmt: skip
            print(
                f"{scheme:9s} {shape:14s} {tokens:5d} {timer(best):7.1f} us  {describe(best)} of {len(ranked)}",
                flush=True,
            )
            Path(args.json).write_text(json.dumps(rows))
        timer = None
        del weights
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
