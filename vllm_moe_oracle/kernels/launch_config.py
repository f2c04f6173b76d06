"""Launch configurations of the kernels in `gemm.py`: what they are, and whether a layer can run them."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any

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

MAX_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on compute capability 9.0."""


def config_errors(weights: PackedWeights, top_k: int, config: LaunchConfig) -> tuple[str, ...]:
    """Every reason why the kernels cannot run this configuration on such a layer; empty when they can."""
    shape = weights.format, weights.group, weights.hidden, weights.intermediate, top_k
    return _config_errors(config, *shape, weights.w13.zeros is not None)


@functools.lru_cache(maxsize=1024)
def _config_errors(
    config: LaunchConfig, format: str, group: int, hidden: int, inner: int, top_k: int, zero_points: bool
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
        needed = shared_memory_bytes(tile, format, group, columns, zero_points=zero_points)
        if needed > MAX_SHARED_MEMORY:
            reasons.append(
                f"{name}: {tile.num_stages} stages of {tile.bm} x {tile.bk} activations and {tile.bn} x {tile.bk} "
                f"weights need {needed} bytes of shared memory of {MAX_SHARED_MEMORY}; take fewer stages or a "
                f"smaller tile"
            )
    return tuple(reasons)


def shared_memory_bytes(tile: TileConfig, format: str, group: int, columns: int, *, zero_points: bool = False) -> int:
    """Bytes of shared memory that Triton 3.6 allocates for a tile. 3.9 takes less with n_tiles: of h one step.

    Activations count `num_stages` times, because the last are still being read. Codes, scales and zero points count
    once less. Without a K loop there are activations alone. With n_tiles, h counts once, plus at most 2048 bytes and 8
    per row for the layout conversion.
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
    activations = 2 * tokens * width * tile.num_stages
    if tile.n_tiles > 1:
        activations = 2 * tokens * width + 2048 + 8 * tile.bn
    return activations + (codes + 4 * words) * (tile.num_stages - 1)


_MAX_REGISTERS = {"h": 64, "weights": 128}
"""Registers per thread that a tile may hold: h with n_tiles, weights with no_k_loop."""


def fits_registers(weights: PackedWeights, config: LaunchConfig) -> bool:
    """Whether registers can hold what the configuration keeps there. A tile that spills takes minutes to compile."""
    bits = code_bits(weights.format)
    for tile, columns in ((config.gate_up, weights.hidden), (config.down, weights.intermediate)):
        thread_bytes = 4 * 32 * tile.num_warps
        if tile.n_tiles > 1 and tile.bm * columns * 2 > _MAX_REGISTERS["h"] * thread_bytes:
            return False
        held = tile.no_k_loop and not tile.fused_topk
        if held and tile.bn * columns * bits // 8 > _MAX_REGISTERS["weights"] * thread_bytes:
            return False
    return True


def keeps_mx_groups(weights: PackedWeights, config: LaunchConfig) -> bool:
    """Whether a tile of the first GEMM holds whole groups of 32 columns of h."""
    return config.gate_up.bn // (2 if weights.gated else 1) % 32 == 0


def parse_config(text: str) -> LaunchConfig:
    """A configuration from JSON of any origin.

    Raises:
        ValueError: the text is not a configuration, or the kernels cannot be compiled for it.
    """
    try:
        config = LaunchConfig.from_json(json.loads(text))
        flags = [config.per_slot, config.fuse_sum, config.prefetch]
        for tile in (config.gate_up, config.down):
            flags += [tile.scale_accumulators, tile.no_k_loop, tile.fused_topk]
        if not all(type(each) is bool for each in flags):
            raise ValueError(f"{config} has a flag that is neither true nor false")
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
