"""Times tile configurations of the fused MoE kernels and writes the best per shape and number of tokens.

    python tests/gpu/tune_kernels.py --cell mxfp8:qwen3_30b --tokens 1,16,256 --json sweep.json

A cell is scheme:shape (mxfp8, mxfp4, int<bits>_<group>, with zero points int<bits>_<group>z; the shapes below, or one
of N expert-parallel ranks of them as shape@epN), or scheme:shape:1,16 with numbers of tokens of its own. One process
per CPU core compiles first, then one process times: whole layers in CUDA graphs, by turns in changing order, L2 flushed
before each replay, so that neither weights nor machine code are in a cache that a model's other layers would have
filled; medians in microseconds, their mean over several draws of experts: with few tokens these differ in number, and
programs that just fit the card at once in one draw do not in the next.
Per number of tokens the second product's tile is searched with the first's fixed, then the first's, then the options.

``--pairs`` times every pair of tiles of one height, for a few experts with up to 128 rows each: all of them with
medians of 5 and means of two draws of experts, then the six fastest and the one in use with medians of 15 and means of
six.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import heuristic
from vllm_moe_oracle.kernels.fused_moe import fused_moe, workspace_layout
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig, config_errors
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights, code_bits, has_rebased_scales
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.measuring.timing import CudaClock, time_interleaved

# experts, top-k, hidden, intermediate on this rank, activation, biases
SHAPES = {
    "gptoss20b": (32, 4, 2880, 2880, "swigluoai", True),
    "gptoss120b": (128, 4, 2880, 2880, "swigluoai", True),
    "qwen3_30b": (128, 8, 2048, 768, "silu", False),
    "kimi_k2_tp8": (384, 8, 7168, 256, "silu", False),
    "minimax_m2_tp4": (256, 8, 3072, 384, "silu", False),
    "nemotron3_nano": (128, 6, 2688, 1856, "relu2", False),
    "tiny": (8, 2, 256, 256, "silu", False),
    # Without a table of their own.
    "qwen3-next": (512, 10, 2048, 512, "silu", False),
    "deepseek-v3-tp8": (256, 8, 7168, 256, "silu", False),
    "glm-4.5-tp4": (160, 8, 5120, 384, "silu", False),
    "deepseek-v2-lite": (64, 6, 2048, 1408, "silu", False),
    "phi-3.5-moe-tp2": (16, 2, 4096, 3200, "silu", False),
    "ernie-4.5-21b": (64, 6, 2560, 1536, "silu", False),
    "olmoe": (64, 8, 2048, 1024, "silu", False),
    "granite-3b-moe": (40, 8, 1536, 512, "silu", False),
    "hunyuan-a13b-tp2": (64, 8, 4096, 1536, "silu", False),
    "dbrx-tp4": (16, 4, 6144, 2688, "silu", False),
    "llama-4-scout-tp4": (16, 1, 5120, 2048, "silu", False),
    "glm-4.5-air-tp2": (128, 8, 4096, 704, "silu", False),
    "qwen3-235b-tp4": (128, 8, 4096, 384, "silu", False),
    "qwen1.5-moe": (60, 4, 2048, 1408, "silu", False),
    "jamba-mini-tp2": (16, 2, 4096, 7168, "silu", False),
    "ling-mini": (256, 8, 2048, 512, "silu", False),
    "qwen3-235b": (128, 8, 4096, 1536, "silu", False),
    "glm-4.5": (160, 8, 5120, 1536, "silu", False),
    "kimi-k2": (384, 8, 7168, 2048, "silu", False),
    "phi-3.5-moe": (16, 2, 4096, 6400, "silu", False),
    "dbrx": (16, 4, 6144, 10752, "silu", False),
    "llama-4-scout": (16, 1, 5120, 8192, "silu", False),
    "jamba-mini": (16, 2, 4096, 14336, "silu", False),
    "arctic": (128, 2, 7168, 4864, "silu", False),
    "mixtral-8x22b": (8, 2, 6144, 16384, "silu", False),
    "grok-1": (8, 2, 6144, 32768, "silu", False),
}
# The layers that `tune` knows by name, too, as mixtral-8x7b@tp2; tiles depend on neither formats nor limits.
SHAPES |= {
    layer.layer.partition(":")[2]: (
        layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size, layer.activation.name,
        layer.has_bias,
    )
    for layer in model_shapes.served_problems()
}  # fmt: skip


def sizes_of(shape: str) -> tuple[tuple[int, int, int, int, str, bool], int]:
    """The sizes of a whole layer, and its number of expert-parallel ranks."""
    layer, _, ranks = shape.partition("@ep")
    return SHAPES[layer], int(ranks or 1)


def stored(scheme: str, shape: str, device: str = "cuda") -> PackedWeights:
    """One rank's layer with random stored bytes: right in size and range, meaningless in value."""
    (experts, _, hidden, inner, activation, bias), ranks = sizes_of(shape)
    format, _, group = scheme.removesuffix("z").partition("_")
    weights = allocate_weights(format, experts // ranks, hidden, inner, gated=activation != "relu2",
                               group=int(group or 32), zero_points=scheme.endswith("z"), bias=bias,
                               num_experts=experts, device=device)  # fmt: skip
    mx = format.startswith("mx")
    high = has_rebased_scales(format, weights.group, weights.dtype)
    factor = 2.0 ** (1 - code_bits(format)) if high else 2.0**-16
    for matrix in (weights.w13, weights.w2):
        matrix.codes.random_(0, 256)
        if matrix.scales is not None and mx:
            matrix.scales.view(torch.uint8).random_(248, 255)
        elif matrix.scales is not None:
            # Products must not vanish: a card draws less power on zeros and runs faster.
            matrix.scales.view(weights.dtype).uniform_(*((0.5, 0.99) if high else (0.001, 0.01)))
            matrix.scales.view(weights.dtype).mul_(2.0**127 if high else 1.0)
        if matrix.zeros is not None:
            matrix.zeros.view(weights.dtype).uniform_(-0.01, 0.01)
        if matrix.row_scale is not None:
            matrix.row_scale.uniform_(factor / 2, factor)
    return weights


def routed(tokens: int, shape: str, device: str = "cuda", draw: int = 0):
    (experts, top_k, hidden, *_), _ = sizes_of(shape)
    generator = torch.Generator(device=device).manual_seed(tokens + 100_003 * draw)
    options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(tokens, hidden, **options) * 0.5
    logits = torch.randn(tokens, experts, **options)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), top_k, dim=-1)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def prepare(
    weights: PackedWeights,
    shape: str,
    tokens: int,
    config: LaunchConfig | PrefillConfig,
    pdl: bool = True,
    draw: int = 0,
):
    """A function that runs the layer once, with everything it needs allocated."""
    x, router, ids = routed(tokens, shape, draw=draw)
    (experts, top_k, _, _, activation, _), ranks = sizes_of(shape)
    plan = workspace_layout(weights, tokens, top_k, config)
    workspace = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    counters = torch.zeros(max(1, plan.counters), dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    limit = 7.0 if activation == "swigluoai" else None
    local = torch.arange(experts, dtype=torch.int32, device="cuda")
    expert_map = torch.where(local < weights.experts, local, -1) if ranks > 1 else None
    return lambda: fused_moe(x, weights, router, ids, activation=activation, limit=limit, expert_map=expert_map,
                             workspace=workspace, counters=counters, out=out, config=config, pdl=pdl)  # fmt: skip


def rows_per_expert(shape: str, tokens: int) -> float:
    """Slots per active expert."""
    (experts, top_k, *_), ranks = sizes_of(shape)
    return heuristic.expected_load(experts // ranks, experts, top_k, tokens).rows


def tokens_for(shape: str, rows: float) -> int:
    """The largest number of tokens with at most so many slots per active expert."""
    (experts, top_k, *_), _ = sizes_of(shape)
    tokens = max(1, round(rows * experts / top_k))
    while tokens > 1 and rows_per_expert(shape, tokens) > rows:
        tokens -= 1
    return tokens


def candidates(
    scheme: str, weights: PackedWeights, shape: str, tokens: int
) -> tuple[list[TileConfig], list[TileConfig]]:
    """Tiles of the first and of the second product to try for a cell and a number of tokens, beside those in use."""
    top_k = sizes_of(shape)[0][1]
    if tokens <= PER_SLOT_TOKENS:
        ups = straight(scheme, weights.hidden) + NARROW
        downs = straight(scheme, weights.intermediate) + NARROW
        return ups, downs + merged(scheme, weights.intermediate, top_k)
    load = heuristic.expected_load(weights.experts, weights.num_experts, top_k, tokens)
    rows = load.rows
    if heuristic.prefers_small_tiles(weights, load):
        ups = [*TWO_PARTS, *WIDE]
        shared = [replace(tile, split_k=parts) for tile in ups for parts in (2, 4, 8) if not tile.bm_rest]
        return ups, ups + shared
    if rows <= 24:
        found = list(FOUR_BIT if scheme.startswith(("int4", "mxfp4")) else EIGHT_BIT)
        wider = MIDDLE if rows > 6 else []
        if rows > 12:
            wider = wider + [tile for tile in TWO_PARTS if tile.bm == 48]
        parts = [replace(tile, split_k=2) for tile in found[:3]] if weights.hidden >= 4096 else []
        return found + wider + parts, found + wider + sweeping(scheme, weights.intermediate)
    found = [*MIDDLE, *TWO_PARTS, *(tile for tile in WIDE if tile.bm <= 64)] if rows <= 80 else list(WIDE)
    return found, found


def straight(scheme: str, columns: int) -> list[TileConfig]:
    """Tiles without a loop whose parts of the columns are even and whose weights fit registers."""
    found = []
    for bn, fold, warps in ((16, 4, 4), (16, 8, 8), (32, 4, 8), (32, 2, 4), (64, 1, 4), (64, 2, 4)):
        if columns % (128 * fold) == 0 and raw_registers(scheme, bn * columns, warps) <= 116:
            found.append(
                TileConfig(16 // fold, bn, 128, num_warps=warps, k_parts=fold, scale_accumulators=False, no_k_loop=True)
            )
    return found


def merged(scheme: str, columns: int, top_k: int) -> list[TileConfig]:
    """Second products that add up a token's choices themselves."""
    choices = 1 << (top_k - 1).bit_length()
    found = []
    for bn, fold, warps in ((16, 1, 4), (16, 1, 8), (16, 2, 8), (32, 1, 4), (32, 1, 8)):
        fits = choices * fold <= 16 and choices * fold * bn >= 16 * warps
        if fits and columns % (128 * fold) == 0 and raw_registers(scheme, choices * bn * columns, warps) <= 116:
            found.append(
                TileConfig(
                    1, bn, 128, num_warps=warps, k_parts=fold, scale_accumulators=False, no_k_loop=True, fused_topk=True
                )
            )
    return found


def sweeping(scheme: str, columns: int) -> list[TileConfig]:
    """Second products whose programs keep h and go through several tiles."""
    if columns % 128 or columns > 768:
        return []
    found = []
    for bn, stages in ((64, 3), (64, 2), (128, 3), (128, 2)):
        if raw_registers(scheme, bn * columns * (stages - 1), 4) * 512 + 32 * columns < 110_000:
            # Under a cap of 128 registers tiles of 128 rows spill in Triton 3.9.
            tile = TileConfig(16, bn, 128, num_stages=stages, scale_accumulators=False)
            found += [replace(tile, n_tiles=sweep) for sweep in (4, 8)]
    return found


def raw_registers(scheme: str, weights: int, warps: int) -> float:
    """32-bit registers per thread that so many stored weights of a program take."""
    return weights * (4 if scheme.startswith(("int4", "mxfp4")) else 8) / 32 / (32 * warps)


# For up to PER_SLOT_TOKENS tokens.
NARROW = [
    TileConfig(8, 32, 128, num_stages=5, k_parts=2),
    TileConfig(8, 32, 128, num_stages=3, k_parts=2),
    TileConfig(4, 32, 128, num_stages=3, k_parts=4),
    TileConfig(8, 64, 128, k_parts=2),
    TileConfig(8, 64, 64, k_parts=2),
    TileConfig(16, 64, 128),
    TileConfig(16, 64, 128, num_stages=6),
    TileConfig(4, 16, 128, num_stages=4, k_parts=4),
    TileConfig(4, 16, 128, num_stages=6, k_parts=4),
    TileConfig(4, 32, 128, k_parts=4),
    TileConfig(2, 16, 128, num_warps=8, num_stages=3, k_parts=8),
    TileConfig(8, 32, 256, num_stages=3, k_parts=2),
    TileConfig(16, 128, 128, num_stages=3, maxnreg=128),
    TileConfig(2, 16, 128, num_warps=8, num_stages=5, k_parts=8),
    TileConfig(8, 32, 128, num_stages=7, k_parts=2),
    TileConfig(4, 32, 128, num_stages=6, k_parts=4),
    TileConfig(16, 64, 256, num_stages=3),
    TileConfig(8, 64, 128, num_warps=8, k_parts=2),
    TileConfig(4, 32, 128, num_warps=8, k_parts=4),
    TileConfig(4, 64, 128, num_warps=8, num_stages=3, k_parts=4),
    TileConfig(8, 64, 64, num_stages=6, k_parts=2),
    TileConfig(16, 128, 128, num_warps=8, num_stages=3),
]
# For up to about 24 rows per active expert.
FOUR_BIT = [
    TileConfig(16, 256, 64, scale_accumulators=False),
    TileConfig(16, 256, 128, num_stages=3, scale_accumulators=False),
    TileConfig(16, 256, 64),
    TileConfig(16, 128, 128, maxnreg=128),
    TileConfig(16, 128, 128, num_stages=3, maxnreg=128),
    TileConfig(16, 128, 128, num_stages=3),
    TileConfig(16, 128, 128, num_stages=3, maxnreg=128, scale_accumulators=False),
    TileConfig(16, 128, 256, num_stages=3),
    TileConfig(16, 64, 128),
    TileConfig(16, 256, 64, num_warps=8, scale_accumulators=False),
    TileConfig(16, 256, 128, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(16, 256, 64, num_stages=6, scale_accumulators=False),
]
EIGHT_BIT = [
    TileConfig(16, 64, 128),
    TileConfig(16, 64, 128, num_stages=6),
    TileConfig(16, 128, 128, num_stages=3, maxnreg=128),
    TileConfig(16, 128, 128, num_stages=3),
    TileConfig(16, 128, 128, maxnreg=128),
    TileConfig(16, 64, 256, num_stages=3),
    TileConfig(16, 128, 128, num_warps=8, num_stages=3),
]
# For 6 to 80 rows, too.
MIDDLE = [
    TileConfig(32, 128, 128, num_stages=3),
    TileConfig(32, 128, 128, num_stages=3, maxnreg=128, scale_accumulators=False),
    TileConfig(32, 128, 64, scale_accumulators=False),
    TileConfig(32, 128, 64, maxnreg=128, scale_accumulators=False),
    TileConfig(32, 256, 64, num_warps=8, scale_accumulators=False),
    TileConfig(32, 256, 64, scale_accumulators=False),
    TileConfig(32, 128, 64, num_stages=6, scale_accumulators=False),
]
# For 12 to 80 rows, too.
TWO_PARTS = [
    TileConfig(48, 128, 64),
    TileConfig(48, 128, 64, num_stages=3),
    TileConfig(48, 128, 128, num_stages=3),
    TileConfig(48, 256, 64, num_warps=8, num_stages=3),
    TileConfig(80, 128, 64),
    TileConfig(80, 128, 64, num_stages=3),
    TileConfig(80, 128, 128, num_warps=8, num_stages=3),
    TileConfig(96, 128, 64, num_stages=3),
    TileConfig(48, 256, 64, num_stages=3, scale_accumulators=False),
]
# For more.
WIDE = [
    TileConfig(32, 128, 64),
    TileConfig(32, 256, 128, num_warps=8, num_stages=3),
    TileConfig(64, 128, 64),
    TileConfig(64, 128, 128, num_warps=8, num_stages=3),
    TileConfig(64, 256, 64, num_warps=8, num_stages=3),
    TileConfig(128, 128, 64, num_warps=8, num_stages=3),
    TileConfig(128, 256, 64, num_warps=8),
    TileConfig(256, 128, 64, num_warps=8, num_stages=3),
]

# For `every_pair`.
PAIRED = [
    TileConfig(64, 128, 64),
    TileConfig(64, 128, 64, scale_accumulators=False),
    TileConfig(64, 128, 64, num_stages=3, scale_accumulators=False),
    TileConfig(64, 256, 64, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(64, 256, 64, num_warps=8, scale_accumulators=False),
    TileConfig(64, 256, 64, num_warps=8, num_stages=3),
    TileConfig(128, 128, 64, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(128, 128, 64, num_warps=8, scale_accumulators=False),
    TileConfig(128, 128, 64, num_warps=8),
    TileConfig(128, 256, 64, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(128, 256, 64, num_warps=8, num_stages=3),
    TileConfig(96, 128, 64, num_stages=3, scale_accumulators=False),
    TileConfig(96, 256, 64, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(80, 128, 64, num_stages=3, scale_accumulators=False),
    TileConfig(80, 256, 64, num_warps=8, num_stages=3, scale_accumulators=False),
    TileConfig(48, 256, 64, num_stages=3, scale_accumulators=False),
    TileConfig(32, 256, 64, scale_accumulators=False),
]


def compile_some(jobs: list[tuple[str, str, int, LaunchConfig]]) -> None:
    layers: dict[tuple[str, str], PackedWeights] = {}
    for scheme, shape, tokens, config in jobs:
        if (scheme, shape) not in layers:
            layers.clear()
            layers[scheme, shape] = stored(scheme, shape)
        try:
            prepare(layers[scheme, shape], shape, tokens, config)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{scheme} {shape} {tokens} {config}: {type(error).__name__} {error}"[:300], flush=True)


def precompile(jobs: list[tuple[str, str, int, LaunchConfig]], processes: int) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(jobs[i::processes],)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def pairs(current: LaunchConfig, ups: list[TileConfig], downs: list[TileConfig]) -> list[LaunchConfig]:
    """Configurations that hold every candidate once, beside the one in use: what must be compiled."""
    found = [current]
    if NARROW[0] in ups:
        current = replace(current, per_slot=True)
        found.append(current)
    for tile in ups:
        if current.per_slot or tile.bm == current.down.bm:
            found.append(replace(current, gate_up=tile))
    for tile in downs:
        if current.per_slot or tile.bm == current.gate_up.bm:
            found.append(replace(current, down=tile, fuse_sum=False))
    for tile in ups + downs:
        if not current.per_slot and tile.bm != current.gate_up.bm:
            up = replace(tile, n_tiles=1, split_k=1)
            found.append(replace(current, gate_up=up, down=tile, fuse_sum=False))
    return list(dict.fromkeys(found))


def every_pair(weights: PackedWeights, top_k: int, current: LaunchConfig) -> list[LaunchConfig]:
    """The configuration in use, and every pair of `PAIRED` of one height; the second product with 1, 2 and the number
    in use of programs for its columns, where the kernels add up their sums."""
    found = [current]
    for up, down in itertools.product(PAIRED, PAIRED):
        parts = (1,) if down.bm_rest else sorted({1, 2, current.down.split_k})
        same = [LaunchConfig(up, replace(down, split_k=each)) for each in parts if down.bm == up.bm]
        found += [config for config in same if not config_errors(weights, top_k, config)]
    return list(dict.fromkeys(found))


def covering(found: list[LaunchConfig]) -> list[LaunchConfig]:
    """Those of some configurations that hold every tile of both products: what must be compiled."""
    firsts = {config.gate_up: config for config in reversed(found)}
    seconds = {config.down: config for config in reversed(found)}
    return list(dict.fromkeys([*firsts.values(), *seconds.values()]))


def options(config: LaunchConfig) -> list[LaunchConfig]:
    """A configuration with the options that its tiles leave open turned over."""
    return [replace(config, prefetch=not config.prefetch)] if config.per_slot else []


PER_SLOT_TOKENS = 4
CLOCK = CudaClock()


class Timer:
    """Times configurations of one cell and number of tokens."""

    def __init__(self, weights: PackedWeights, scheme: str, shape: str, tokens: int, replays: int,
                 others: list[PrefillConfig], draws: int) -> None:  # fmt: skip
        self.weights, self.scheme, self.shape, self.tokens, self.replays = weights, scheme, shape, tokens, replays
        self.others = others
        # Of a few experts, how many have more rows than a tile is decided by the draw.
        self.draws = draws if tokens <= 64 or weights.experts <= 4 else 1
        self.times: dict[LaunchConfig | PrefillConfig, float] = {}

    def best(self, found: Iterable[LaunchConfig | PrefillConfig]) -> LaunchConfig | PrefillConfig:
        """The fastest of some configurations, timed by turns; one alone, or one that cannot run, is never timed."""
        distinct = list(dict.fromkeys(found))
        runs: dict[LaunchConfig | PrefillConfig, list[list]] = {}
        kept = []  # what a graph works on: it does not keep it itself
        for config in distinct if len(distinct) > 1 else ():
            try:
                graphs = []
                for draw in range(self.draws):
                    run = prepare(self.weights, self.shape, self.tokens, config, draw=draw)
                    kept.append(run)
                    graphs.append([CLOCK.prepare(run)[0]])
                runs[config] = graphs
            except (RuntimeError, ValueError, triton.TritonError) as error:
                torch.cuda.synchronize()  # an error that broke the device ends the run here
                name = f"{self.scheme} {self.shape} {self.tokens} {config}"
                print(f"{name}: {type(error).__name__} {error}"[:300], flush=True)
        totals = dict.fromkeys(runs, 0.0)
        for draw in range(self.draws if runs else 0):
            timed = {str(index): runs[config][draw] for index, config in enumerate(runs)}
            times = time_interleaved(CLOCK, timed, self.replays, 10.0)
            for index, config in enumerate(runs):
                totals[config] += times[str(index)].us / self.draws
        self.times |= totals
        return min(runs, key=self.times.__getitem__) if runs else distinct[0]

    def search(self, current: LaunchConfig, ups: list[TileConfig], downs: list[TileConfig]) -> LaunchConfig:
        """The second product's tile with the first's in use, then the first's; for each height of tiles in turn; at
        last the best of each height, as it is and with the options, and what is in use, once more together."""
        starts: dict[int, LaunchConfig] = {}
        for config in pairs(current, ups, downs):
            starts.setdefault(0 if config.per_slot else config.gate_up.bm, config)
        found = [current]
        for start in starts.values():
            same = [tile for tile in downs if start.per_slot or tile.bm == start.gate_up.bm]
            start = self.best([start, *(replace(start, down=tile, fuse_sum=False) for tile in same)])
            same = [tile for tile in ups if start.per_slot or tile.bm == start.down.bm]
            start = self.best([start, *(replace(start, gate_up=tile) for tile in same)])
            found += [start, *options(start)]
        found += [
            config for config in sorted(self.times, key=self.times.__getitem__)[:3] if isinstance(config, LaunchConfig)
        ]
        return self.best([*found, *self.others])


def tried(scheme: str, weights: PackedWeights, shape: str, tokens: int, by_pairs: bool) -> list[LaunchConfig]:
    """The pairs of tiles whose kernels a search needs."""
    current = configs.choose_launch_config(weights, sizes_of(shape)[0][1], tokens)
    if by_pairs:
        return covering(every_pair(weights, sizes_of(shape)[0][1], current))
    return pairs(current, *candidates(scheme, weights, shape, tokens))


def best_of_pairs(
    scheme: str, weights: PackedWeights, shape: str, tokens: int
) -> tuple[Timer, LaunchConfig | PrefillConfig]:
    """The fastest of every pair and what is in use, and the times of the last few."""
    top_k = sizes_of(shape)[0][1]
    current, used = (choose(weights, top_k, tokens) for choose in (configs.choose_launch_config, configs.choose_config))
    trial = Timer(weights, scheme, shape, tokens, 5, [], 2)
    trial.best([used, *every_pair(weights, top_k, current)])
    timer = Timer(weights, scheme, shape, tokens, 15, [], 6)
    return timer, timer.best([used, *sorted(trial.times, key=trial.times.__getitem__)[:6]])


def describe(config: LaunchConfig | PrefillConfig) -> str:
    """A configuration in a few characters."""
    if isinstance(config, PrefillConfig):
        return str(config)
    parts = [
        f"{t.bm}x{t.bn}x{t.bk}w{t.num_warps}s{t.num_stages}" + (f"/{t.split_k}" if t.split_k > 1 else "")
        + (f"*{t.k_parts}" if t.k_parts > 1 else "")
        + (f"r{t.maxnreg}" if t.maxnreg else "") + ("" if t.scale_accumulators else "-") + ("S" if t.no_k_loop else "")
        + ("M" if t.fused_topk else "") + (f"~{t.n_tiles}" if t.n_tiles > 1 else "")
        for t in (config.gate_up, config.down)
    ]  # fmt: skip
    flags = "".join(name[0] for name in ("per_slot", "fuse_sum", "prefetch") if getattr(config, name))
    return f"{parts[0]:22s} {parts[1]:22s} {flags}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", required=True)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--pairs", action="store_true", help="every pair of a list of tiles, for few experts")
    parser.add_argument("--json", required=True)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="0: compiled before, or as needed")
    parser.add_argument("--replays", type=int, default=11)
    parser.add_argument("--draws", type=int, default=3, help="of experts, up to 64 tokens or of four experts")
    parser.add_argument(
        "--prefill", type=int, default=1 << 30, help="from so many tokens on, and where it is in use, beside prefill.py"
    )
    parser.add_argument("--seconds", type=float, default=480, help="stop timing after this long")
    args = parser.parse_args()
    start = time.time()

    def persistent_of(weights: PackedWeights, shape: str, tokens: int) -> list[PrefillConfig]:
        used = configs.choose_config(weights, sizes_of(shape)[0][1], tokens)
        named = [PrefillConfig()] if tokens >= args.prefill else []
        return list(dict.fromkeys([*named, *([used] if isinstance(used, PrefillConfig) else [])]))

    counts = [int(t) for t in args.tokens.split(",")]
    cells: list[tuple[str, str, list[int]]] = []
    for cell in args.cell:
        scheme, shape, *tokens = cell.split(":")
        own = [int(t) for t in tokens[0].split(",")] if tokens else counts
        cells.append((scheme, shape, own))
    jobs, first = [], []
    for scheme, shape, counts in cells:
        weights = stored(scheme, shape, "meta")
        seen = set()
        persistent = {(tokens, config) for tokens in counts for config in persistent_of(weights, shape, tokens)}
        first += [(scheme, shape, tokens, config) for tokens, config in sorted(persistent, key=str)[-1:]]  # the longest
        for tokens in counts:
            for pair in tried(scheme, weights, shape, tokens, args.pairs):
                for config in (pair, *options(pair)):
                    if config not in seen:
                        seen.add(config)
                        jobs.append((scheme, shape, tokens, config))
    jobs = first + jobs
    print(f"{len(jobs)} configurations to compile", flush=True)
    if args.processes:
        precompile(jobs, args.processes)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    rows = []
    for scheme, shape, counts in cells:
        weights = stored(scheme, shape)
        for tokens in counts:
            if time.time() - start > args.seconds:
                break
            used = configs.choose_config(weights, sizes_of(shape)[0][1], tokens)
            if args.pairs:
                timer, best = best_of_pairs(scheme, weights, shape, tokens)
            else:
                current = configs.choose_launch_config(weights, sizes_of(shape)[0][1], tokens)
                others = persistent_of(weights, shape, tokens)
                timer = Timer(weights, scheme, shape, tokens, args.replays, others, args.draws)
                best = timer.search(current, *candidates(scheme, weights, shape, tokens))
            ranked = sorted(timer.times.items(), key=lambda item: item[1])
            rows.append({"scheme": scheme, "shape": shape, "sizes": sizes_of(shape), "tokens": tokens,
                         "us": timer.times[best],
                         "in_use": [timer.times[used], describe(used)], "config": best.to_json(),
                         "others": [[round(us, 2), config.to_json()] for config, us in ranked[:60]]})  # fmt: skip
            print(
                f"{scheme:9s} {shape:14s} {tokens:5d} {timer.times[used]:7.1f} -> {timer.times[best]:7.1f} us  "
                f"{describe(used)} -> {describe(best)} of {len(ranked)}",
                flush=True,
            )
            Path(args.json).write_text(json.dumps(rows))
        timer = None
        del weights
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
