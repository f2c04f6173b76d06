"""Launch configurations of the kernels in `gemm.py`, and the choice among them.

A configuration may change with the number of tokens; the stored weights do not depend on it. `choose_config` takes, in
this order: a configuration that was measured on this machine (`tuned`), the shipped table (`tiles.json`), a heuristic.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .prefill_config import LONG_K, MAX_BLOCK_TOKENS, PrefillConfig, choose_prefill_config
from .weights import PackedWeights, code_bits


@dataclass(frozen=True)
class TileConfig:
    """The tile that one program of one GEMM computes, and how it is compiled.

    Attributes:
        bm: tokens. A power of two or, in an ordinary K loop, the sum of two powers of two of at least 16 (48 = 32 +
            16), which share the dequantized weights.
        bn: weight rows (output columns).
        bk: columns of K that one step multiplies.
        num_warps: Triton's.
        num_stages: Triton's, of the K loop.
        split_k: programs that share one tile's columns; the last to arrive adds their sums up.
        maxnreg: cap on registers per thread; 0 leaves it to the compiler.
        scale_accumulators: group scales of integer weights multiply float32 sums instead of weights, where a group is a
            whole number of steps and bm is at most 32.
        k_parts: parts of K that one program multiplies side by side (`mainloop.mainloop`). bm * k_parts is at least 16,
            bn * k_parts a multiple of 64.
        no_k_loop: all weights of the tile are loaded into registers at once, for few columns or many parts. The second
            GEMM then loads its weights before the first has ended.
        n_tiles: tiles along N that one program of the second GEMM computes with the same h; K is a multiple of bk.
        fused_topk: one program of the second GEMM computes all choices of a token and adds them up, so no kernel for
            the sum over top-k is launched. Needs no_k_loop and `LaunchConfig.per_slot`.
    """

    bm: int
    bn: int
    bk: int
    num_warps: int = 4
    num_stages: int = 4
    split_k: int = 1
    maxnreg: int = 0
    scale_accumulators: bool = True
    k_parts: int = 1
    no_k_loop: bool = False
    n_tiles: int = 1
    fused_topk: bool = False

    def __post_init__(self) -> None:
        if self.fused_topk:
            if (
                self.bn % 16
                or self.bk % 32
                or not self.no_k_loop
                or self.split_k > 1
                or self.n_tiles > 1
                or self.bm != 1
            ):
                raise ValueError(
                    f"{self}: fused_topk needs bm 1, bn a multiple of 16, bk of 32, no_k_loop, no split_k or n_tiles"
                )
            return
        if self.bm_rest and (self.bm_rest < 16 or self.bm_rest & (self.bm_rest - 1)):
            raise ValueError(f"{self}: bm must be a power of two, or the sum of two of at least 16")
        if self.bm_rest and (self.k_parts > 1 or self.split_k > 1 or self.no_k_loop or self.n_tiles > 1):
            raise ValueError(f"{self}: bm of two powers of two excludes k_parts, split_k, no_k_loop and n_tiles")
        if self.bm * self.k_parts < 16 or self.bn % 16 or self.bn * self.k_parts % 64 or self.bk % 32:
            raise ValueError(f"{self}: needs bm * k_parts >= 16, bn * k_parts a multiple of 64, bk a multiple of 32")
        if self.no_k_loop and self.split_k > 1:
            raise ValueError(f"{self}: no_k_loop excludes split_k")
        if self.n_tiles > 1 and (self.split_k > 1 or self.k_parts > 1 or self.no_k_loop):
            raise ValueError(f"{self}: n_tiles excludes split_k, k_parts and no_k_loop")

    @property
    def bm_rest(self) -> int:
        """Tokens of the second power of two in bm; 0 when bm is one power of two."""
        return self.bm - (1 << max(self.bm.bit_length(), 1) - 1)


@dataclass(frozen=True)
class LaunchConfig:
    """How `fused_moe` runs for one number of tokens.

    Attributes:
        gate_up: tile of the first GEMM.
        down: tile of the second GEMM. Same bm as `gate_up` unless `per_slot`, because both read one list of blocks.
        per_slot: every slot is a block of its own and no list of blocks is made; for few tokens.
        fuse_sum: the second GEMM also sums over top-k; otherwise a third kernel does.
        prefetch: the first GEMM prefetches the second GEMM's weights into the L2 cache.
    """

    gate_up: TileConfig
    down: TileConfig
    per_slot: bool = False
    fuse_sum: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.gate_up.bm != self.down.bm and not self.per_slot:
            raise ValueError(
                f"gate_up has bm {self.gate_up.bm} and down {self.down.bm}; without per_slot they must be equal"
            )
        if self.fuse_sum and (self.down.no_k_loop or self.down.n_tiles > 1 or self.down.bm_rest):
            raise ValueError("fuse_sum needs a down tile with an ordinary K loop and one power of two for bm")
        if self.gate_up.n_tiles > 1 or self.gate_up.fused_topk or (self.down.fused_topk and not self.per_slot):
            raise ValueError("only down can have n_tiles or fused_topk, and fused_topk needs per_slot")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> LaunchConfig:
        """Inverse of `to_json`."""
        return LaunchConfig(**{**value, "gate_up": TileConfig(**value["gate_up"]), "down": TileConfig(**value["down"])})


BATCH_INVARIANT_CONFIG = LaunchConfig(
    gate_up=TileConfig(32, 128, 128, num_stages=3), down=TileConfig(32, 128, 128, num_stages=3)
)
"""One configuration for every number of tokens: a token's sums always run over the same columns in the same order."""

ConfigTable = tuple[tuple[int, LaunchConfig | None], ...]
"""(largest number of tokens, configuration), ascending. None, and more tokens than the last row's, mean the shipped
table and the heuristic."""


@dataclass(frozen=True)
class Load:
    """What uniform routing brings to the experts of one rank.

    Attributes:
        active: expected number of experts that get a token, at least 1.
        slots: expected number of slots of these experts.
    """

    active: float
    slots: float

    @property
    def rows(self) -> float:
        """Slots per active expert."""
        return self.slots / self.active


def expected_load(experts: int, num_experts: int, top_k: int, tokens: int) -> Load:
    """The load of a rank that holds `experts` of `num_experts` experts."""
    share = min(top_k, num_experts) / num_experts
    return Load(max(1.0, experts * (1.0 - (1.0 - share) ** tokens)), tokens * top_k * experts / num_experts)


def shape_key(weights: PackedWeights, top_k: int) -> str:
    """The key of a layer's shape in `measured_table`: experts, of how many on all ranks, top-k, columns of both
    products, kind."""
    kind = "gated" if weights.gated else "plain"
    of = f"/{weights.num_experts}" if weights.num_experts != weights.experts else ""
    return f"{weights.experts}{of}x{top_k} {weights.hidden}x{weights.intermediate} {kind}"


def _parse_shape_key(key: str) -> tuple[int, int, int, int, int, bool]:
    """Experts, experts of all ranks, top-k, hidden, intermediate, gated."""
    routing, sizes, kind = key.split(" ")
    held, _, top_k = routing.partition("x")
    experts, _, total = held.partition("/")
    hidden, _, inner = sizes.partition("x")
    return int(experts), int(total or experts), int(top_k), int(hidden), int(inner), kind == "gated"


@functools.cache
def measured_table() -> dict[str, Any]:
    """The shipped table: `format_key` -> `shape_key` -> rows of {"tokens": largest, "config": ...}, ascending."""
    path = Path(__file__).with_name("tiles.json")
    return json.loads(path.read_text()) if path.exists() else {}


_MIN_PROGRAMS = 330
"""Programs that the heuristic wants for one GEMM: 2.5 for each SM."""
_SMS = 132
"""Of an H100 SXM and an H200. Cards with fewer get the same tiles, which were not timed there."""


def _tile_width(parts: float, rows: int, widths: tuple[int, ...]) -> int:
    """The first of `widths` (weight rows of a tile) that gives `parts` matrices of `rows` rows enough programs.

    Too few programs leave memory idle, too many read activations more often. Over 6 shapes in 7 formats, the widest
    tile with at least 330 programs is the fastest or within a few percent of it.
    """
    return next((width for width in widths if parts * -(-rows // width) >= _MIN_PROGRAMS), widths[-1])


def _per_slot_tile(weights: PackedWeights, slots: float, rows: int, columns: int) -> TileConfig:
    """The heuristic's tile with `per_slot`."""
    width = _tile_width(slots, rows, (128, 64, 32, 16))
    if width == 128:
        return _wide_tile(weights)
    k_parts = {64: 2, 32: 4, 16: 4}[width]
    if columns < 128 * k_parts:
        return TileConfig(8, 64, 128, k_parts=2)
    num_stages = 6 if width == 16 and columns >= LONG_K else 4
    return TileConfig(16 // k_parts, width, 128, k_parts=k_parts, num_stages=num_stages)


def _needs_two_mmas(weights: PackedWeights) -> bool:
    """Whether a step is two MMAs, which take more registers: float16 activations of MX weights."""
    return weights.dtype == torch.float16 and weights.format.startswith("mx")


def _wide_tile(weights: PackedWeights) -> TileConfig:
    # With at most 128 registers, scaled accumulators and two MMAs spill in Triton 3.9.
    uncapped = weights.format == "int8" or _needs_two_mmas(weights)
    return TileConfig(16, 128, 128, num_stages=3, maxnreg=0 if uncapped else 128, scale_accumulators=False)


def _wave_cost(parts: float, rows: int, width: int, resident: int) -> float:
    """Relative time of tiles `width` weight rows wide, of which `resident` run on one SM at once.

    Programs run in waves, and half of the time of a last, unfilled wave is lost. Rows that fill up the last tile cost
    as much as others.
    """
    tiles = -(-rows // width)
    waves = parts * tiles / (resident * _SMS)
    return (0.5 + 0.5 * math.ceil(waves) / waves) * tiles * width / rows


def _few_rows_tile(weights: PackedWeights, active: float, rows: int, columns: int, down: bool) -> TileConfig:
    """The heuristic's tile for few rows per expert: the one whose programs fill the SMs best.

    A long K takes steps of 256 columns, with narrow tiles of more than one wave, or in 4 bits with few programs. Beside
    a rule without waves this one is 5 to 9 % faster at 2 to 14 rows in 4 bits, up to 3 % in 8 bits
    (`tests/golden/h100/tile-rule.json`).
    """
    four = code_bits(weights.format) == 4
    integers = weights.format.startswith("int")
    long = columns >= LONG_K
    programs = active * -(-rows // 128)
    one_wave = active * -(-rows // 64) <= 5 * _SMS
    narrow = TileConfig(16, 64, 256, num_stages=3) if long and not (four and one_wave) else TileConfig(16, 64, 128)
    narrow_cost = 1.0 if four and integers else 1.06 if four else 1.03 if down else 0.97
    # Programs of a tile that one SM holds at once by their shared memory and registers, and what a tile costs beside
    # others in full waves, from times of an H200.
    costs = {
        _wide_tile(weights): _wave_cost(active, rows, 128, 4),
        narrow: narrow_cost * _wave_cost(active, rows, 64, 5),
    }
    # Two MMAs of 128 rows and 256 columns, or of 256 rows, spill.
    if not _needs_two_mmas(weights):
        if long and (four or down) and 0.6 <= programs / _MIN_PROGRAMS < 1.0:
            costs[TileConfig(16, 128, 256, num_stages=3)] = 1.05 * _wave_cost(active, rows, 128, 2)
        if weights.format != "int8":
            widest = TileConfig(16, 256, 64, scale_accumulators=False)
            costs[widest] = (0.97 if integers else 1.03) * _wave_cost(active, rows, 256, 3)
    return min(costs, key=costs.__getitem__)


def _swept_tiles(weights: PackedWeights, active: float) -> int:
    """`n_tiles` of the second GEMM for few rows per expert, 1 for an ordinary tile.

    It pays for few columns and many programs.
    """
    four = code_bits(weights.format) == 4
    if weights.intermediate not in ((128, 256, 384, 512) if four else (128, 256)):
        return 1
    programs = active * -(-weights.hidden // 64)
    return 8 if programs >= (4000 if four else 16000) else 4 if programs >= 4 * _MIN_PROGRAMS else 1


def _middle_tile(weights: PackedWeights, load: Load, rows: int, down: bool) -> TileConfig:
    """The heuristic's tile for 14 to 90 rows per expert.

    Heights are those that fit a Poisson-distributed number of rows: 32 rows rarely exceed a tile of 48, 44 rows one of
    64, 70 rows two of 48. Few programs of 32 rows take steps of 128 columns, which have more in flight.
    """
    four = code_bits(weights.format) == 4
    if _needs_two_mmas(weights):
        if load.rows <= 28:
            return TileConfig(32, 128, 128, num_stages=3) if four else TileConfig(32, 128, 64)
        return TileConfig(64, 128, 64) if four else TileConfig(64, 128, 128, num_warps=8, num_stages=3)
    long_steps = weights.format == "mxfp4" and not down
    if load.rows <= 28:
        if long_steps or load.active * -(-rows // 128) < _MIN_PROGRAMS:
            return TileConfig(32, 128, 128, num_stages=3)
        # Scales on the weights: with taller tiles they cost less than those on the accumulators.
        return TileConfig(32, 128, 64, maxnreg=0 if four else 128, scale_accumulators=False)
    if 38 < load.rows <= 58:
        return TileConfig(64, 128, 64)
    if down and load.active * -(-rows // 256) >= 0.6 * _MIN_PROGRAMS:
        return TileConfig(48, 256, 64, num_stages=3, scale_accumulators=False)
    return TileConfig(48, 128, 128, num_stages=3) if long_steps else TileConfig(48, 128, 64)


_MAX_PARTIAL_SUMS = 128 * 2**20
"""Bytes of workspace that the heuristic spends on sums of programs that share columns."""
_TALL_TILE = TileConfig(64, 128, 64)
"""For one to four experts with many rows and a long second product: one height for both GEMMs."""


def _shared_columns(weights: PackedWeights, load: Load, tile: TileConfig) -> TileConfig:
    """The second GEMM's tile, its columns shared among up to eight programs while these leave SMs without work.

    One or two experts of 14336 columns are 32 to 128 programs. Each shares at least 1024 columns, and all together are
    at most three tiles of 128 rows for each SM, half as many in steps of 256 columns. 181 calls of one to four experts
    with 4864 to 32768 columns are 1.38 times as fast as without, 0.98 to 2.12 (`tests/golden/h100/tile-rule-3.json`).
    """
    if weights.intermediate < LONG_K or load.slots < 1 or tile.bm_rest or tile.n_tiles > 1 or tile.no_k_loop:
        return tile
    blocks = load.active * max(1.0, load.rows / tile.bm + 0.5)
    rows = blocks * -(-weights.hidden // tile.bn) * tile.bn * max(1.0, tile.bk / 128)
    # Memory is for the slots of all ranks: they may all come to this one.
    sums = load.slots * weights.num_experts / weights.experts * weights.hidden * 4
    most = min(weights.intermediate / 1024, 3 * 128 * _SMS / rows, _MAX_PARTIAL_SUMS / sums)
    return replace(tile, split_k=max(each for each in (1, 2, 4, 8) if each <= max(1, most)))


def _shares_tall_tiles(weights: PackedWeights, load: Load) -> bool:
    """Whether a call of many rows runs tiles whose columns are shared, since its second GEMM has few tiles."""
    tiles = load.active * -(-weights.hidden // 256) * max(1.0, load.rows / MAX_BLOCK_TOKENS + 0.5)
    few = tiles < _SMS / 2 and not _needs_two_mmas(weights)
    return few and load.rows > 28 and _shared_columns(weights, load, _TALL_TILE).split_k > 1


def heuristic_config(weights: PackedWeights, top_k: int, tokens: int) -> LaunchConfig:
    """A configuration for a shape without measurements, from the expected rows per active expert.

    Args:
        weights: the layer; tensors on the meta device will do.
        top_k: choices per token.
        tokens: rows of x.
    """
    load = expected_load(weights.experts, weights.num_experts, top_k, tokens)
    # With more than 1.25 slots per active expert, it is faster to multiply the slots of one expert together.
    if tokens <= 4 and load.rows <= 1.25:
        up = _per_slot_tile(weights, load.slots, weights.w13.rows, weights.hidden)
        down = _per_slot_tile(weights, load.slots, weights.hidden, weights.intermediate)
        choices = 1 << (top_k - 1).bit_length()
        # 256 threads hold the weights of 16 rows of all choices in at most 96 registers each.
        fits = choices * 16 * weights.intermediate * code_bits(weights.format) <= 96 * 32 * 256
        if tokens <= 2 and fits and weights.intermediate % 128 == 0 and 8 <= choices <= 16:
            down = TileConfig(1, 16, 128, num_warps=8, scale_accumulators=False, no_k_loop=True, fused_topk=True)
        return LaunchConfig(up, down, per_slot=True)
    # Programs that keep h pay for a second block of 16 rows with little.
    swept = _swept_tiles(weights, load.active) if tokens > 4 else 1
    sweeping = TileConfig(16, 64, 128, num_stages=3, scale_accumulators=False, n_tiles=swept)
    if load.rows <= 14:
        up = _few_rows_tile(weights, load.active, weights.w13.rows, weights.hidden, False)
        if swept > 1:
            return LaunchConfig(up, sweeping)
        down = _few_rows_tile(weights, load.active, weights.hidden, weights.intermediate, True)
        return LaunchConfig(up, _shared_columns(weights, load, down))
    if _shares_tall_tiles(weights, load):
        return LaunchConfig(_TALL_TILE, _shared_columns(weights, load, _TALL_TILE))
    if load.rows > 90:
        tile = TileConfig(256 if load.rows > 160 else 128, 128, 64, num_warps=8, num_stages=3)
        return LaunchConfig(tile, tile)
    up = _middle_tile(weights, load, weights.w13.rows, False)
    # Eight bits and float16 activations of MX weights were not timed so.
    if swept > 1 and load.rows <= 28 and code_bits(weights.format) == 4 and not _needs_two_mmas(weights):
        return LaunchConfig(up, replace(sweeping, bm=up.bm))
    down = _middle_tile(weights, load, weights.hidden, True)
    return LaunchConfig(up, _shared_columns(weights, load, down))


def choose_config(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    *,
    tuned: ConfigTable = (),
    quantize: bool = False,
) -> LaunchConfig | PrefillConfig:
    """The configuration that `fused_moe` runs for a number of tokens.

    Args:
        weights: the layer; tensors on the meta device will do.
        top_k: choices per token.
        tokens: rows of x.
        tuned: configurations that were measured for this layer, before the shipped table's. They do not replace the
            persistent kernels.
        quantize: activations pass through MXFP8, so a tile must hold whole groups of 32 columns of h.
    """
    load = expected_load(weights.experts, weights.num_experts, top_k, tokens)
    key = format_key(weights), shape_key(weights, top_k)
    share = _shares_tall_tiles(weights, load)
    prefill = choose_prefill_config(weights, *key, tokens, rows=load.rows, slots=load.slots, small_tiles=share)
    if prefill is not None and not quantize:
        return prefill
    return choose_launch_config(weights, top_k, tokens, tuned=tuned, quantize=quantize)


def candidate_configs(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    most: int,
    *,
    quantize: bool = False,
) -> list[LaunchConfig]:
    """Configurations worth timing beside the chosen one, the likeliest first; none where the persistent kernels run.

    These are the fastest of similar shapes with as many rows per expert. For a shape that is not in the shipped table,
    they alternate with tiles one width narrower or wider than the heuristic's.

    Args:
        weights: the layer; tensors on the meta device will do.
        top_k: choices per token.
        tokens: rows of x.
        most: how many to return at most.
        quantize: as in `choose_config`.
    """
    chosen = choose_config(weights, top_k, tokens, quantize=quantize)
    if not isinstance(chosen, LaunchConfig):
        return []
    rows = expected_load(weights.experts, weights.num_experts, top_k, tokens).rows
    found: list[tuple[float, LaunchConfig]] = []
    for name, shapes in measured_table().items():
        if not _is_similar_format(name, weights):
            continue
        for shape, table in shapes.items():
            found += _nearby_configs(shape, table, weights, tokens, rows, 0.0 if name == format_key(weights) else 0.5)
    configs = [config for _, config in sorted(found, key=lambda pair: pair[0])]
    if shape_key(weights, top_k) not in measured_table().get(format_key(weights), {}):
        configs = [each for pair in itertools.zip_longest(_neighbors(chosen), configs) for each in pair if each]
    fit = [each for each in dict.fromkeys(configs) if each != chosen and is_suitable(weights, top_k, each, quantize)]
    return fit[:most]


_NARROWER = {
    (16, 128): TileConfig(16, 64, 128),
    (16, 64): TileConfig(8, 64, 128, k_parts=2),
    (8, 64): TileConfig(4, 32, 128, k_parts=4),
    (4, 32): TileConfig(4, 16, 128, k_parts=4),
}
_WIDER = {
    (4, 16): TileConfig(4, 32, 128, k_parts=4),
    (4, 32): TileConfig(8, 64, 128, k_parts=2),
    (8, 64): TileConfig(16, 64, 128),
    (16, 64): TileConfig(16, 128, 128, num_stages=3, scale_accumulators=False),
}


def _neighbors(config: LaunchConfig) -> Iterator[LaunchConfig]:
    """Configurations with one tile narrower or wider, `down` first: it has fewer programs."""
    for name in ("down", "gate_up"):
        tile = getattr(config, name)
        for table in (_NARROWER, _WIDER):
            other = table.get((tile.bm, tile.bn))
            if other and not (tile.no_k_loop or tile.n_tiles > 1) and (config.per_slot or other.bm == tile.bm):
                yield replace(config, **{name: other})


def _is_similar_format(name: str, weights: PackedWeights) -> bool:
    """Whether a format of the table resembles the layer's: both integers or both MX, with as many bits."""
    kind = name.split()[0]
    return kind == weights.format or (
        kind.startswith("int") == weights.format.startswith("int") and kind[-1] == weights.format[-1]
    )


def _nearby_configs(
    shape: str, table: list[dict[str, Any]], weights: PackedWeights, tokens: int, rows: float, penalty: float
) -> Iterator[tuple[float, LaunchConfig]]:
    """(distance, configuration) for rows of a shape's table with about as many rows per expert."""
    experts, total, top_k, hidden, inner, gated = _parse_shape_key(shape)
    sizes = abs(math.log(weights.hidden / hidden)) + abs(math.log(weights.intermediate / inner))
    plain = gated != weights.gated
    for row in table:
        count = min(row["tokens"], 1 << 14)
        config = _parse_table_entry(json.dumps(row["config"], sort_keys=True))
        theirs = expected_load(experts, total, top_k, count).rows
        apart = abs(math.log(theirs / rows))
        if config.per_slot:  # every slot is a tile, so the number of tokens counts
            apart = abs(math.log(count / tokens))
        if apart <= math.log(2.1):
            yield apart + 0.3 * sizes + 0.5 * plain + 1.0 * (config.per_slot != (tokens <= 4)) + penalty, config


MAX_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on compute capability 9.0."""


def config_errors(weights: PackedWeights, top_k: int, config: LaunchConfig) -> tuple[str, ...]:
    """Every reason why the kernels cannot run this configuration on such a layer; empty when they can."""
    shape = weights.format, weights.group, weights.hidden, weights.intermediate, top_k
    return _config_errors(config, *shape, weights.w13.zeros is not None, weights.dtype == torch.float16)


@functools.lru_cache(maxsize=1024)
def _config_errors(
    config: LaunchConfig, format: str, group: int, hidden: int, inner: int, top_k: int, zero_points: bool, half: bool
) -> tuple[str, ...]:
    reasons = []
    chunk = 64 if code_bits(format) == 4 else 32
    for name, tile, columns in (("gate_up", config.gate_up, hidden), ("down", config.down, inner)):
        if tile.bk % chunk:
            reasons.append(f"{name}: {format} codes are stored by {chunk} columns, bk {tile.bk} must be a multiple")
        if tile.n_tiles > 1 and columns % tile.bk:
            reasons.append(f"{name}: n_tiles needs whole steps; {columns} columns are not a multiple of bk {tile.bk}")
        if tile.fused_topk:
            choices = 1 << (top_k - 1).bit_length()
            parts = choices * tile.k_parts
            if parts > 16 or parts * tile.bn % 64:
                reasons.append(
                    f"{name}: fused_topk multiplies {choices} (top_k {top_k}) x {tile.k_parts} (k_parts) parts of "
                    f"{tile.bn} rows (bn) in one program: at most 16 parts, together a multiple of 64 rows"
                )
        needed = shared_memory_bytes(tile, format, group, columns, zero_points=zero_points, half=half)
        if needed > MAX_SHARED_MEMORY:
            reasons.append(
                f"{name}: {tile.num_stages} stages of {tile.bm} x {tile.bk} activations and {tile.bn} x {tile.bk} "
                f"weights need {needed} bytes of shared memory of {MAX_SHARED_MEMORY}; take fewer stages or a "
                f"smaller tile"
            )
    return tuple(reasons)


def shared_memory_bytes(
    tile: TileConfig, format: str, group: int, columns: int, *, zero_points: bool = False, half: bool = False
) -> int:
    """Bytes of shared memory that Triton 3.6 allocates for a tile (3.9 takes up to 30 % less).

    Activations count `num_stages` times, because the last are still being read, and once more where a step is two MMAs
    (`half` with MX weights). Codes, scales and zero points count once less. Without a K loop there are activations
    alone. With n_tiles, h counts once, plus at most 2048 bytes and 8 per row for the layout conversion.
    """
    if tile.no_k_loop:
        return 2 * (16 * columns // tile.k_parts if tile.fused_topk else tile.bm * columns)
    rows, tokens = tile.bn * tile.k_parts, tile.bm * tile.k_parts
    width = columns if tile.n_tiles > 1 else tile.bk
    codes = rows * width * code_bits(format) // 8
    if format.startswith("mx"):
        words = rows * -(-width // 128)
    elif group:
        words = rows // 2 * -(-width // group) * (1 + zero_points)
    else:
        words = 0
    held = tile.num_stages + (half and format.startswith("mx"))
    activations = 2 * tokens * width + 2048 + 8 * tile.bn if tile.n_tiles > 1 else 2 * tokens * width * held
    return activations + (codes + 4 * words) * (tile.num_stages - 1)


def is_suitable(weights: PackedWeights, top_k: int, config: LaunchConfig, quantize: bool) -> bool:
    """Whether another shape's configuration can run this layer without more registers than it takes there."""
    if config_errors(weights, top_k, config):
        return False
    for tile, columns in ((config.gate_up, weights.hidden), (config.down, weights.intermediate)):
        if (tile.no_k_loop or tile.n_tiles > 1) and columns % (tile.bk * tile.k_parts):
            return False
        if tile.no_k_loop and columns > 4096:
            return False
    if config.down.fused_topk:
        choices = 1 << (top_k - 1).bit_length()
        if choices * 16 * weights.intermediate * code_bits(weights.format) > 96 * 32 * 256 or not 8 <= choices <= 16:
            return False
    return not quantize or keeps_mx_groups(weights, config)


def parse_config(text: str) -> LaunchConfig:
    """A configuration from JSON of any origin.

    Raises:
        ValueError: the text is not a configuration, or the kernels cannot be compiled for it.
    """
    try:
        config = LaunchConfig.from_json(json.loads(text))
        for tile in (config.gate_up, config.down):
            sizes = (tile.bm - tile.bm_rest, tile.bn, tile.bk, tile.num_warps, tile.k_parts)
            whole = all(type(each) is int and each > 0 and each & (each - 1) == 0 for each in sizes)
            counts = all(type(each) is int for each in (tile.num_stages, tile.split_k, tile.maxnreg, tile.n_tiles))
            if not (
                whole
                and counts
                and max(tile.bm, tile.bn, tile.bk) <= 256
                and tile.num_warps <= 16
                and tile.k_parts <= 16
            ):
                raise ValueError(f"{tile} is out of range")
            if not (
                1 <= tile.num_stages <= 8
                and 1 <= tile.split_k <= 16
                and 0 <= tile.maxnreg <= 255
                and 1 <= tile.n_tiles <= 64
            ):
                raise ValueError(f"{tile} is out of range")
    except ValueError:
        raise
    except Exception as error:  # foreign text: what it raises is not listed
        raise ValueError(f"{text[:80]!r} is not a launch configuration: {error}") from error
    return config


def format_key(weights: PackedWeights) -> str:
    """The key of a layer's format in `measured_table`."""
    return weights.format if weights.format.startswith("mx") else f"{weights.format} g{weights.group}"


def choose_launch_config(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    *,
    tuned: ConfigTable = (),
    quantize: bool = False,
) -> LaunchConfig:
    """`choose_config` among the kernels of `gemm.py` only."""
    name, shape = format_key(weights), shape_key(weights, top_k)
    config = heuristic_config(weights, top_k, tokens)
    for row in measured_table().get(name, {}).get(shape, ()):
        if tokens <= row["tokens"]:
            config = _parse_table_entry(json.dumps(row["config"], sort_keys=True))
            break
    config = next((each for most, each in tuned if tokens <= most), None) or config
    if quantize and not keeps_mx_groups(weights, config):
        # With k_parts, a tile of whole groups would be several times as large.
        small = TileConfig(8, 64, 128, k_parts=2) if config.per_slot else replace(config.gate_up, bn=64)
        config = replace(config, gate_up=small)
    return config


def keeps_mx_groups(weights: PackedWeights, config: LaunchConfig) -> bool:
    """Whether a tile of the first GEMM holds whole groups of 32 columns of h."""
    return config.gate_up.bn // (2 if weights.gated else 1) % 32 == 0


@functools.cache
def _parse_table_entry(text: str) -> LaunchConfig:
    return LaunchConfig.from_json(json.loads(text))
