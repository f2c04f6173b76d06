"""Tile configurations: what may vary with the number of tokens while the weights stay as they are stored."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .prefill_config import Prefill, choose_prefill
from .weights import OwnWeights, bits_of


@dataclass(frozen=True)
class Tile:
    """Tile of one product: bm tokens, bn weight rows, bk columns a step; `split` programs share a tile's columns.

    bm is a power of two or, in ordinary loops, the sum of two of at least 16 (48: 32 and 16 tokens, multiplied by the
    same decoded weights).

    `fold` parts of the columns are multiplied side by side in one program (product.accumulate): bm * fold must be at
    least 16 and bn * fold a multiple of 64. `stages` is Triton's num_stages. `registers` caps registers per thread, 0
    leaves it to the compiler. `promote`: group scales of integer weights multiply float32 sums (where a group is whole
    steps and bm <= 32), not the weights. `straight`: no loop, all weights of a tile wait in registers (few columns or
    many parts); the second product then asks for its weights before the first has ended. `sweep` (second product,
    columns a multiple of bk, not many): tiles along the rows that one program goes through with the same h. `merge`
    (second product, straight, per_slot): a program multiplies all choices of a token, `fold` parts of the columns each,
    and adds them up, so no third kernel does.
    """

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 4
    split: int = 1
    registers: int = 0
    promote: bool = True
    fold: int = 1
    straight: bool = False
    sweep: int = 1
    merge: bool = False

    def __post_init__(self) -> None:
        if self.merge:
            if self.bn % 16 or self.bk % 32 or not self.straight or self.split > 1 or self.sweep > 1 or self.bm != 1:
                raise ValueError(
                    f"{self}: merge needs bm 1, bn a multiple of 16, bk of 32, straight, no split or sweep"
                )
            return
        if self.more and (self.more < 16 or self.more & (self.more - 1)):
            raise ValueError(f"{self}: bm is a power of two, or the sum of two, 16 at least")
        if self.more and (self.fold > 1 or self.split > 1 or self.straight or self.sweep > 1):
            raise ValueError(f"{self}: bm of two powers of two goes with neither fold nor split, straight or sweep")
        if self.bm * self.fold < 16 or self.bn % 16 or self.bn * self.fold % 64 or self.bk % 32:
            raise ValueError(f"{self}: needs bm * fold >= 16, bn * fold a multiple of 64, bk a multiple of 32")
        if self.straight and self.split > 1:
            raise ValueError(f"{self}: a tile without a loop cannot be split")
        if self.sweep > 1 and (self.split > 1 or self.fold > 1 or self.straight):
            raise ValueError(f"{self}: sweep goes with neither split nor fold nor straight")

    @property
    def more(self) -> int:
        """What bm is above a power of two: tokens of the tile's second part."""
        return self.bm - (1 << max(self.bm.bit_length(), 1) - 1)


@dataclass(frozen=True)
class Config:
    """How one call runs.

    per_slot: every slot is a tile of its own and no list of slots is made (few tokens). fuse_sum: the second product
    also sums over top-k, else a third kernel does. prefetch: the first product asks for the second's weights to be
    brought into the L2. Unless per_slot, both tiles must have the same bm, because they share one list.
    """

    gate_up: Tile
    down: Tile
    per_slot: bool = False
    fuse_sum: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.gate_up.bm != self.down.bm and not self.per_slot:
            raise ValueError(f"the two products' tiles have {self.gate_up.bm} and {self.down.bm} tokens; must be equal")
        if self.fuse_sum and (self.down.straight or self.down.sweep > 1 or self.down.more):
            raise ValueError("fuse_sum is for second products with an ordinary loop and tokens of a power of two")
        if self.gate_up.sweep > 1 or self.gate_up.merge or (self.down.merge and not self.per_slot):
            raise ValueError("only the second product can sweep or merge, and merge only with per_slot")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Config:
        """Inverse of `to_json`."""
        return Config(**{**value, "gate_up": Tile(**value["gate_up"]), "down": Tile(**value["down"])})


# One configuration for every number of tokens: a token's sums then run over the same columns in the same order.
INVARIANT = Config(gate_up=Tile(32, 128, 128, stages=3), down=Tile(32, 128, 128, stages=3))


def active_experts(experts: int, top_k: int, tokens: int) -> float:
    """Expected number of experts that get a token under uniform routing."""
    return experts * (1.0 - (1.0 - min(top_k, experts) / experts) ** tokens)


def shape_key(weights: OwnWeights, top_k: int) -> str:
    """The name of a layer's shape in the table of measured configurations."""
    kind = "gated" if weights.gated else "plain"
    return f"{weights.experts}x{top_k} {weights.hidden}x{weights.intermediate} {kind}"


@functools.cache
def measured_table() -> dict[str, Any]:
    """Measured configurations: format and group -> shape -> list of {"tokens": most tokens, "config": ...}."""
    path = Path(__file__).with_name("tiles.json")
    return json.loads(path.read_text()) if path.exists() else {}


_PROGRAMS = 330  # the rule: programs that a product should at least have, two and a half a multiprocessor
_LONG = 4096  # the rule: columns from which a program's steps are many


def _width(parts: float, rows: int, widths: tuple[int, ...]) -> int:
    """Weight rows of a tile, the first of widths that makes enough programs of so many parts of `rows` rows each.

    Too few programs leave memory idle, more than needed read activations more often: where tiles were measured (tiles
    of 6 shapes in 7 formats), the widest of at least 330 programs is the fastest or within a few percent of it.
    """
    return next((width for width in widths if parts * -(-rows // width) >= _PROGRAMS), widths[-1])


def _alone(weights: OwnWeights, slots: int, rows: int, columns: int) -> Tile:
    """The rule's tile where every slot is a tile of its own."""
    width = _width(slots, rows, (128, 64, 32, 16))
    if width == 128:
        return _wide(weights)
    fold = {64: 2, 32: 4, 16: 4}[width]
    if columns < 128 * fold:
        return Tile(8, 64, 128, fold=2)
    return Tile(16 // fold, width, 128, fold=fold, stages=6 if width == 16 and columns >= _LONG else 4)


def _two_products(weights: OwnWeights) -> bool:
    """Whether a step is two products, which take more registers: float16 activations and MX weights."""
    return weights.dtype == torch.float16 and weights.format.startswith("mx")


def _wide(weights: OwnWeights) -> Tile:
    # Under a cap of 128 registers, promoted sums spill in Triton 3.9, and so do two products.
    free = weights.format == "int8" or _two_products(weights)
    return Tile(16, 128, 128, stages=3, registers=0 if free else 128, promote=False)


def _few_rows(weights: OwnWeights, active: float, rows: int, columns: int, wide: bool) -> Tile:
    """The rule's tile for up to a dozen rows an expert; wide: 128 weight rows where there are programs enough.

    Long rows of few programs, and of narrow tiles in 8 bits, go by steps of 256 columns: 10 to 20 % of a layer of
    Mixtral-8x7B in int4 from 4 to 32 tokens, 15 % of GLM-4.5 over eight ranks in MXFP8 at 32.
    """
    programs = active * -(-rows // 128)
    if wide and programs >= _PROGRAMS:
        return _wide(weights)
    if columns >= _LONG:
        # Two products of 128 rows and 256 columns spill.
        enough = wide and programs >= 0.6 * _PROGRAMS and not _two_products(weights)
        return Tile(16, 128 if enough else 64, 256, stages=3)
    return Tile(16, 64, 128)


def heuristic(weights: OwnWeights, top_k: int, tokens: int) -> Config:
    """A configuration for a shape that was not measured, from the expected rows per active expert."""
    active = max(1.0, active_experts(weights.experts, top_k, tokens))
    slots = tokens * top_k
    rows = slots / active
    four = bits_of(weights.format) == 4
    # Beyond a quarter more slots than experts, those of one expert are better multiplied together.
    if tokens <= 4 and rows <= 1.25:
        up = _alone(weights, slots, weights.w13.rows, weights.hidden)
        down = _alone(weights, slots, weights.hidden, weights.intermediate)
        choices = 1 << (top_k - 1).bit_length()
        # 256 threads hold the weights of 16 rows of all choices in at most 96 registers each.
        fits = choices * 16 * weights.intermediate * bits_of(weights.format) <= 96 * 32 * 256
        if tokens <= 2 and fits and weights.intermediate % 128 == 0 and 8 <= choices <= 16:
            down = Tile(1, 16, 128, warps=8, promote=False, straight=True, merge=True)
        return Config(up, down, per_slot=True)
    if rows <= 12:
        up = _few_rows(weights, active, weights.w13.rows, weights.hidden, four)
        down = _few_rows(weights, active, weights.hidden, weights.intermediate, True)
        if tokens > 4 and weights.intermediate in (128, 256, 384, 512):
            down = Tile(16, 64, 128, stages=3, promote=False, sweep=8)
        return Config(up, down)
    if rows <= 28:
        tile = Tile(32, 128, 128, stages=3) if four else Tile(32, 128, 64)
    elif rows <= 60:
        tile = Tile(64, 128, 64) if four else Tile(64, 128, 128, warps=8, stages=3)
    elif rows <= 160:
        tile = Tile(128, 128, 64, warps=8, stages=3)
    else:
        tile = Tile(256, 128, 64, warps=8, stages=3)
    return Config(tile, tile)


def choose(weights: OwnWeights, top_k: int, tokens: int, *, quantise: bool = False) -> Config | Prefill:
    """The measured configuration for this shape and number of tokens, else the rule's.

    quantise: for MXFP8-dynamic activations, whose groups of 32 columns of h must lie within a tile.
    """
    rows = tokens * top_k / max(1.0, active_experts(weights.experts, top_k, tokens))
    prefill = choose_prefill(weights, format_key(weights), shape_key(weights, top_k), tokens, rows)
    return choose_tiles(weights, top_k, tokens, quantise=quantise) if quantise or prefill is None else prefill


# --- Configurations measured where the kernels run --------------------------------------------------------------------

Rows = tuple[tuple[int, Config | None], ...]
"""Most tokens and the configuration, ascending; for None, and beyond the last, the table's and the rule's hold."""

_given: dict[tuple[str, str], Rows] = {}


def give(weights: OwnWeights, top_k: int, rows: Rows) -> Rows:
    """Puts configurations that were measured elsewhere before the table's, for all layers of such a format and shape.

    Returns:
        Those that were given before.
    """
    key = (format_key(weights), shape_key(weights, top_k))
    before = _given.pop(key, ())
    if rows:
        _given[key] = rows
    return before


@contextlib.contextmanager
def given(weights: OwnWeights, top_k: int, config: Config) -> Iterator[None]:
    """One configuration for every number of tokens, for as long as the context lasts: to be timed."""
    before = give(weights, top_k, ((1 << 30, config),))
    try:
        yield
    finally:
        give(weights, top_k, before)


def candidates(weights: OwnWeights, top_k: int, tokens: int, most: int, *, quantise: bool = False) -> list[Config]:
    """Configurations to time beside the chosen one: what was the fastest for other shapes with as many rows an expert,
    the shapes that are most alike first, and where the rule chose narrower and wider tiles than it did; none where the
    persistent kernels run.

    most: how many, at most.
    """
    chosen = choose(weights, top_k, tokens, quantise=quantise)
    if not isinstance(chosen, Config):
        return []
    rows = tokens * top_k / max(1.0, active_experts(weights.experts, top_k, tokens))
    found: list[tuple[float, Config]] = []
    for name, shapes in measured_table().items():
        if not _alike(name, weights):
            continue
        for shape, table in shapes.items():
            found += _likely(shape, table, weights, tokens, rows, 0.0 if name == format_key(weights) else 0.5)
    configs = [config for _, config in sorted(found, key=lambda pair: pair[0])]
    if shape_key(weights, top_k) not in measured_table().get(format_key(weights), {}):
        # The rule's own doubts: they come by turns with what other shapes had.
        configs = [each for pair in itertools.zip_longest(_neighbours(chosen), configs) for each in pair if each]
    fit = [each for each in dict.fromkeys(configs) if each != chosen and fits(weights, top_k, each, quantise)]
    return fit[:most]


_NARROWER = {(16, 128): Tile(16, 64, 128), (16, 64): Tile(8, 64, 128, fold=2), (8, 64): Tile(4, 32, 128, fold=4),
             (4, 32): Tile(4, 16, 128, fold=4)}  # fmt: skip
_WIDER = {(4, 16): Tile(4, 32, 128, fold=4), (4, 32): Tile(8, 64, 128, fold=2), (8, 64): Tile(16, 64, 128),
          (16, 64): Tile(16, 128, 128, stages=3, promote=False)}  # fmt: skip


def _neighbours(config: Config) -> Iterator[Config]:
    """Configurations with one tile narrower or wider, the second product's first: it has the fewer programs."""
    for name in ("down", "gate_up"):
        tile = getattr(config, name)
        for table in (_NARROWER, _WIDER):
            other = table.get((tile.bm, tile.bn))
            if other and not (tile.straight or tile.sweep > 1) and (config.per_slot or other.bm == tile.bm):
                yield replace(config, **{name: other})


def _alike(name: str, weights: OwnWeights) -> bool:
    """Whether tiles of a format in the table suit a layer: codes of the same width, integers or floating point."""
    kind = name.split()[0]
    return kind == weights.format or (
        kind.startswith("int") == weights.format.startswith("int") and kind[-1] == weights.format[-1]
    )


def _likely(
    shape: str, table: list[dict[str, Any]], weights: OwnWeights, tokens: int, rows: float, penalty: float
) -> Iterator[tuple[float, Config]]:
    """A shape's configurations near a number of rows an expert, with how far they are from it."""
    experts, top_k, hidden, inner = (
        int(word) for word in shape.split(" ")[0].split("x") + shape.split(" ")[1].split("x")
    )
    sizes = abs(math.log(weights.hidden / hidden)) + abs(math.log(weights.intermediate / inner))
    plain = shape.endswith("plain") == weights.gated
    for row in table:
        count = min(row["tokens"], 1 << 14)
        config = _from_table(json.dumps(row["config"], sort_keys=True))
        theirs = count * top_k / max(1.0, active_experts(experts, top_k, count))
        apart = abs(math.log(theirs / rows))
        if config.per_slot:  # every choice is a tile: what counts is how many there are
            apart = abs(math.log(count / tokens))
        if apart <= math.log(2.1):
            yield apart + 0.3 * sizes + 0.5 * plain + 1.0 * (config.per_slot != (tokens <= 4)) + penalty, config


SHARED_BYTES = 227 * 1024
"""Shared memory of a program, at most (compute capability 9.0)."""


def misfits(weights: OwnWeights, top_k: int, config: Config) -> tuple[str, ...]:
    """Every reason why no kernel runs this configuration on such a layer; none when one does."""
    more = weights.w13.zeros is not None, weights.dtype == torch.float16
    return _misfits(config, weights.format, weights.group, weights.hidden, weights.intermediate, top_k, *more)


@functools.lru_cache(maxsize=1024)
def _misfits(
    config: Config, format: str, group: int, hidden: int, inner: int, top_k: int, zero_points: bool, half: bool
) -> tuple[str, ...]:
    reasons = []
    chunk = 64 if bits_of(format) == 4 else 32
    for name, tile, columns in (("gate_up", config.gate_up, hidden), ("down", config.down, inner)):
        if tile.bk % chunk:
            reasons.append(f"{name}: {format} codes are stored by {chunk} columns, bk {tile.bk} must be a multiple")
        if tile.sweep > 1 and columns % tile.bk:
            reasons.append(f"{name}: a sweep needs whole steps; {columns} columns are not a multiple of bk {tile.bk}")
        if tile.merge:
            choices = 1 << (top_k - 1).bit_length()
            parts = choices * tile.fold
            if parts > 16 or parts * tile.bn % 64:
                reasons.append(
                    f"{name}: merge multiplies {choices} (top_k {top_k}) x {tile.fold} (fold) parts of {tile.bn} rows "
                    f"(bn) in one program: at most 16 parts, together whole 64 rows"
                )
        needed = shared_bytes(tile, format, group, columns, zero_points=zero_points, half=half)
        if needed > SHARED_BYTES:
            reasons.append(
                f"{name}: {tile.stages} stages of {tile.bm} x {tile.bk} activations and {tile.bn} x {tile.bk} weights "
                f"need {needed} bytes of shared memory, {SHARED_BYTES} are there; take fewer stages or a smaller tile"
            )
    return tuple(reasons)


def shared_bytes(
    tile: Tile, format: str, group: int, columns: int, *, zero_points: bool = False, half: bool = False
) -> int:
    """Shared memory that a tile's products take, as Triton lays it out: activations `stages` times, because the last
    are still being read, and once more where there are two products, of MX weights in float16 (half); codes and scales
    once less, and zero points as scales; without a loop activations alone; in a sweep all of h once and at most 2048
    bytes and 8 a row to hand it over (Triton 3.6; 3.9 takes up to 30 % less).
    """
    if tile.straight:
        return 2 * (16 * columns // tile.fold if tile.merge else tile.bm * columns)
    rows, tokens = tile.bn * tile.fold, tile.bm * tile.fold
    width = columns if tile.sweep > 1 else tile.bk
    codes = rows * width * bits_of(format) // 8
    if format.startswith("mx"):
        words = rows * -(-width // 128)
    elif group:
        words = rows // 2 * -(-width // group) * (1 + zero_points)
    else:
        words = 0
    held = tile.stages + (half and format.startswith("mx"))
    activations = 2 * tokens * width + 2048 + 8 * tile.bn if tile.sweep > 1 else 2 * tokens * width * held
    return activations + (codes + 4 * words) * (tile.stages - 1)


def fits(weights: OwnWeights, top_k: int, config: Config, quantise: bool) -> bool:
    """Whether a configuration of another shape can run this one, without more registers than it needs there."""
    if misfits(weights, top_k, config):
        return False
    for tile, columns in ((config.gate_up, weights.hidden), (config.down, weights.intermediate)):
        if (tile.straight or tile.sweep > 1) and columns % (tile.bk * tile.fold):
            return False
        if tile.straight and columns > 4096:
            return False
    if config.down.merge:
        choices = 1 << (top_k - 1).bit_length()
        if choices * 16 * weights.intermediate * bits_of(weights.format) > 96 * 32 * 256 or not 8 <= choices <= 16:
            return False
    return not quantise or quantisable(weights, config)


def checked(text: str) -> Config:
    """A configuration from JSON that somebody wrote.

    Raises:
        ValueError: it is none, or one that no kernel is compiled for.
    """
    try:
        config = Config.from_json(json.loads(text))
        for tile in (config.gate_up, config.down):
            sizes = (tile.bm - tile.more, tile.bn, tile.bk, tile.warps, tile.fold)
            whole = all(type(each) is int and each > 0 and each & (each - 1) == 0 for each in sizes)
            counts = all(type(each) is int for each in (tile.stages, tile.split, tile.registers, tile.sweep))
            if not (
                whole and counts and max(tile.bm, tile.bn, tile.bk) <= 256 and tile.warps <= 16 and tile.fold <= 16
            ):
                raise ValueError(f"{tile} is no tile")
            if not (
                1 <= tile.stages <= 8 and 1 <= tile.split <= 16 and 0 <= tile.registers <= 255 and 1 <= tile.sweep <= 64
            ):
                raise ValueError(f"{tile} is no tile")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no configuration: {error}") from error
    return config


def format_key(weights: OwnWeights) -> str:
    """The name of a layer's format in the tables of measured configurations."""
    return weights.format if weights.format.startswith("mx") else f"{weights.format} g{weights.group}"


def choose_tiles(weights: OwnWeights, top_k: int, tokens: int, *, quantise: bool = False) -> Config:
    """`choose` among the kernels of `gemm.py` only."""
    name, shape = format_key(weights), shape_key(weights, top_k)
    config = heuristic(weights, top_k, tokens)
    for row in measured_table().get(name, {}).get(shape, ()):
        if tokens <= row["tokens"]:
            config = _from_table(json.dumps(row["config"], sort_keys=True))
            break
    config = next((each for most, each in _given.get((name, shape), ()) if tokens <= most), None) or config
    if quantise and not quantisable(weights, config):
        # A tile's parts of the columns would otherwise make it several times as large.
        small = Tile(8, 64, 128, fold=2) if config.per_slot else replace(config.gate_up, bn=64)
        config = replace(config, gate_up=small)
    return config


def quantisable(weights: OwnWeights, config: Config) -> bool:
    """Whether a tile of the first product holds whole groups of 32 columns of h."""
    return config.gate_up.bn // (2 if weights.gated else 1) % 32 == 0


@functools.cache
def _from_table(text: str) -> Config:
    return Config.from_json(json.loads(text))
