"""The rule for shapes and numbers of tokens without measurements: a tile for each GEMM, from the expected load."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .launch_config import LaunchConfig, TileConfig
from .prefill_config import LONG_K, MAX_BLOCK_TOKENS
from .weights import PackedWeights, code_bits


@dataclass(frozen=True)
class ExpertLoad:
    """What uniform routing brings to the experts of one rank.

    Attributes:
        active: expected number of experts that get a token, at least 1.
        slots: expected number of slots of these experts.
        draws: three numbers of active experts as different draws of them have it, each with its share of the draws:
            the expected number and 1.7 standard deviations less and more.
    """

    active: float
    slots: float
    draws: tuple[tuple[float, float], ...]

    @property
    def rows(self) -> float:
        """Slots per active expert."""
        return self.slots / self.active


def expected_load(experts: int, num_experts: int, top_k: int, tokens: int) -> ExpertLoad:
    """The load of a rank that holds `experts` of `num_experts` experts."""
    share = min(top_k, num_experts) / num_experts
    idle = (1.0 - share) ** tokens
    active = max(1.0, experts * (1.0 - idle))
    # Two experts are both idle if each token chooses among the others.
    both_idle = ((1.0 - share) * max(0.0, 1.0 - min(top_k, num_experts) / max(1, num_experts - 1))) ** tokens
    variance = experts * idle * (1.0 - idle) + experts * (experts - 1) * (both_idle - idle * idle)
    spread = math.sqrt(3.0 * max(0.0, variance))
    # Gauss-Hermite quadrature of three points: exact for the mean and the variance.
    draws = ((active, 2 / 3), (max(1.0, active - spread), 1 / 6), (min(float(experts), active + spread), 1 / 6))
    return ExpertLoad(active, tokens * top_k * experts / num_experts, draws)


_MIN_PROGRAMS = 330
"""Programs that the heuristic wants for one GEMM: 2.5 for each SM."""
_SMS = 132
"""Of an H100 SXM and an H200. Cards with fewer get the same tiles, which were not timed there."""


_HALVES = TileConfig(8, 64, 128, k_parts=2)
_MANY_COLUMNS = 2880
"""Columns from which tiles of 32 rows are the fastest up to 130 rows for an SM, not 110."""
_PER_SLOT_4_BITS = (
    (80, TileConfig(4, 16, 128, k_parts=4)),
    (110, TileConfig(4, 32, 128, k_parts=4)),
    (130, _HALVES),  # up to two programs for each SM; beyond, a third would leave most SMs waiting for a few
    (160, TileConfig(8, 32, 128, k_parts=2, num_stages=3)),  # up to five
    (256, _HALVES),  # up to four
)
_PER_SLOT_4_BITS_MANY_COLUMNS = (
    (80, TileConfig(4, 16, 128, k_parts=4)),
    (130, TileConfig(4, 32, 128, k_parts=4)),
    (256, _HALVES),
)
_PER_SLOT_8_BITS = (
    (55, TileConfig(4, 16, 128, k_parts=4)),
    (95, TileConfig(4, 32, 128, k_parts=4, num_stages=3)),
    (160, TileConfig(8, 32, 128, k_parts=2, num_stages=3)),
    (320, TileConfig(8, 64, 64, k_parts=2)),
)
"""Tiles with `per_slot`, each with the most weight rows for an SM that it is for."""


def _per_slot_tile(weights: PackedWeights, slots: float, rows: int, columns: int, down: bool) -> TileConfig:
    """The heuristic's tile with `per_slot`, by the weight rows that one SM reads.

    Few rows take narrow tiles, whose columns are shared among warps, so that every SM has enough loads in flight; many
    take wide ones. The numbers of rows are from times of 45 to 69 configurations of 25 layers at 1, 2 and 4 tokens
    (`tests/golden/h200/tile-search-few.json`).
    """
    rows_per_sm = slots * rows / _SMS
    if tile := _loopless_tile(weights, rows_per_sm, columns, down):
        return tile
    four, many = code_bits(weights.format) == 4, columns >= _MANY_COLUMNS
    table = _PER_SLOT_8_BITS if not four else _PER_SLOT_4_BITS_MANY_COLUMNS if many else _PER_SLOT_4_BITS
    tile = next((tile for most, tile in table if rows_per_sm <= most), None)
    if tile is None and four and not down and rows_per_sm <= 320:
        tile = TileConfig(16, 64, 128)  # five programs for each SM, in one wave
    if tile is None:
        draws = ((slots, 1.0),)
        halves = four and _wave_cost(draws, rows, 64, 4) < _wave_cost(draws, rows, 128, 4)
        tile = _HALVES if halves else _wide_tile(weights)
    if columns >= LONG_K and ((down and rows_per_sm <= 80) or (four and rows_per_sm <= 50)):
        tile = replace(tile, num_stages=6)
    return tile if columns >= tile.bk * tile.k_parts else _HALVES


def _without_loop(width: int, k_parts: int, num_warps: int = 4) -> TileConfig:
    return TileConfig(
        16 // k_parts, width, 128, num_warps=num_warps, k_parts=k_parts, scale_accumulators=False, no_k_loop=True
    )


def _loopless_tile(weights: PackedWeights, rows_per_sm: float, columns: int, down: bool) -> TileConfig | None:
    """A tile that loads all its weights at once, where these fit registers and it is faster than a loop.

    Args:
        weights: the layer.
        rows_per_sm: weight rows for each SM.
        columns: of the matrix.
        down: the second GEMM.
    """
    four = code_bits(weights.format) == 4
    if not down:
        # Zero points take registers, too; 7168 columns were the most that were timed.
        narrow = four and rows_per_sm <= 40 and columns % 1024 == 0 and columns <= 7168 and weights.w13.zeros is None
        return _without_loop(16, 8, num_warps=8) if narrow else None
    if columns % 128:  # parts that are not whole steps cost more than is saved
        return None
    if columns <= 512:
        if columns == 512:
            return _without_loop(64, 2) if rows_per_sm <= 200 or not four else _without_loop(64, 1)
        return _without_loop(64, 1) if four or columns <= 384 else None
    if not four:
        return _without_loop(32, 2) if columns in (768, 1024) and rows_per_sm <= 200 else None
    # Fewer than 90 rows are not enough programs of 64.
    if columns in (1024, 1536, 2048) and rows_per_sm <= (160 if columns > 1024 else 90):
        return _without_loop(16, 4)
    return _without_loop(64, 1) if columns <= 1408 and 90 < rows_per_sm <= (256 if columns <= 1024 else 200) else None


def _top_k_tile(weights: PackedWeights, top_k: int, tokens: int) -> TileConfig | None:
    """The second GEMM's tile that adds up a token's choices, where that is faster than one launch more.

    Its threads hold the weights of 16 rows of all choices, which limits the columns.
    """
    columns, choices = weights.intermediate, 1 << (top_k - 1).bit_length()
    if columns % 128 or choices not in (8, 16):
        return None
    tile = TileConfig(1, 16, 128, num_warps=8, scale_accumulators=False, no_k_loop=True, fused_topk=True)
    if code_bits(weights.format) == 8:
        return tile if tokens == 1 and choices * columns <= 8 * 768 else None
    if tokens == 2:
        return tile if choices == 8 and 512 < columns <= 1024 else None
    if tokens > 2 or choices * columns > (8 * 1408 if choices == 8 else 4096):
        return None
    if choices * columns <= 8 * 384:
        return replace(tile, num_warps=4)
    return replace(tile, k_parts=2) if choices == 8 and columns % 256 == 0 and columns <= 1024 else tile


def _wide_tile(weights: PackedWeights) -> TileConfig:
    # With at most 128 registers, scaled accumulators spill in Triton 3.9.
    maxnreg = 0 if weights.format == "int8" else 128
    return TileConfig(16, 128, 128, num_stages=3, maxnreg=maxnreg, scale_accumulators=False)


def _wave_cost(draws: tuple[tuple[float, float], ...], rows: int, width: int, resident: int) -> float:
    """Relative time of tiles `width` weight rows wide, of which `resident` run on one SM at once.

    Programs run in waves, and half of the time of a last, unfilled wave is lost. Rows that fill up the last tile cost
    as much as others. The time is the mean over `draws` of `ExpertLoad`: programs that just fill the card in
    one are a wave more in the next.
    """
    tiles = -(-rows // width)
    lost = 0.0
    for parts, share in draws:
        waves = parts * tiles / (resident * _SMS)
        lost += share * math.ceil(waves) / waves
    return (0.5 + 0.5 * lost) * tiles * width / rows


def _few_rows_tile(weights: PackedWeights, load: ExpertLoad, rows: int, columns: int, down: bool) -> TileConfig:
    """The heuristic's tile for few rows per expert: the one whose programs fill the SMs best.

    A long K takes steps of 256 columns, with narrow tiles of more than one wave, or in 4 bits with few programs. Beside
    a rule without waves this one is 5 to 9 % faster at 2 to 14 rows in 4 bits, up to 3 % in 8 bits
    (`tests/golden/h100/tile-rule.json`).
    """
    four = code_bits(weights.format) == 4
    # Four bits without zero points gain nothing by other draws than the mean: 17 calls were 0.99 times as fast.
    draws = ((load.active, 1.0),) if four and weights.w13.zeros is None else load.draws
    integers = weights.format.startswith("int")
    long = columns >= LONG_K
    programs = load.active * -(-rows // 128)
    programs_per_sm = load.active * -(-rows // 64) / _SMS  # programs of narrow tiles for each SM
    # Long steps load more at once, and short ones leave room for more programs: with 3 to 4 in 8 bits, long steps need
    # a second wave (15 calls are 1.07 times as fast with short ones, 0.98 to 1.16;
    # `tests/golden/h200/tile-rule-6.json`).
    short_steps = programs_per_sm <= 5 and (down or programs_per_sm > 2.3) if four else 3 < programs_per_sm <= 4
    narrow = TileConfig(16, 64, 256, num_stages=3) if long and not short_steps else TileConfig(16, 64, 128)
    narrow_cost = 1.0 if four and integers else 1.06 if four else 1.03 if down else 0.97
    # Programs of a tile that one SM holds at once by their shared memory and registers, and what a tile costs beside
    # others in full waves, from times of an H200.
    costs = {
        _wide_tile(weights): _wave_cost(draws, rows, 128, 4),
        narrow: narrow_cost * _wave_cost(draws, rows, 64, 5),
    }
    if long and (four or down) and 0.6 <= programs / _MIN_PROGRAMS < 1.0:
        costs[TileConfig(16, 128, 256, num_stages=3)] = 1.05 * _wave_cost(draws, rows, 128, 2)
    if four or (down and weights.format == "mxfp8"):  # in MXFP8's first GEMM narrow tiles are faster
        # Zero points take fewer instructions so.
        widest = TileConfig(16, 256, 64, scale_accumulators=weights.w13.zeros is not None)
        costs[widest] = (0.97 if integers else 1.03) * _wave_cost(draws, rows, 256, 3)
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


def _middle_tile(weights: PackedWeights, load: ExpertLoad, rows: int, down: bool) -> TileConfig:
    """The heuristic's tile for 14 to 90 rows per expert.

    Heights are those that fit a Poisson-distributed number of rows: 32 rows rarely exceed a tile of 48, 44 rows one of
    64, 70 rows two of 48. Few programs of 32 rows take steps of 128 columns, which have more in flight.
    """
    four = code_bits(weights.format) == 4
    long_steps = weights.format == "mxfp4" and not down
    if load.rows <= 28:
        if weights.w13.zeros is not None and load.active * -(-rows // 256) >= _MIN_PROGRAMS:
            # 91 calls with zero points are 1.07 times as fast, 0.95 to 1.17 (`tests/golden/h200/tile-rule-7.json`).
            return TileConfig(32, 256, 64, scale_accumulators=False)
        if weights.format == "mxfp8" and not down:
            # Three programs with long steps run on one SM, four with short ones.
            long_steps = _wave_cost(load.draws, rows, 128, 3) < _wave_cost(load.draws, rows, 128, 4)
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
"""One height for both GEMMs, for one to four experts with many rows and a long second one, and for 4-bit integers."""


def _shared_columns(weights: PackedWeights, load: ExpertLoad, tile: TileConfig, tiles_per_sm: int = 3) -> TileConfig:
    """The second GEMM's tile, its columns shared among up to eight programs while these leave SMs without work.

    One or two experts of 14336 columns are 32 to 128 programs. Each shares at least 1024 columns, and all together are
    at most `tiles_per_sm` tiles of 128 rows for each SM, half as many in steps of 256 columns. With three, 125 calls of
    one to four experts with 4864 to 32768 columns are 1.44 times as fast as without, 0.98 to 2.12
    (`tests/golden/h100/tile-rule-3.json`).
    """
    if weights.intermediate < LONG_K or load.slots < 1 or tile.bm_rest or tile.n_tiles > 1 or tile.no_k_loop:
        return tile
    blocks = load.active * max(1.0, load.rows / tile.bm + 0.5)
    # Steps of 256 columns have twice as many bytes in flight.
    rows = blocks * -(-weights.hidden // tile.bn) * tile.bn * max(1.0, tile.bk / 128)
    # Memory is for the slots of all ranks: they may all come to this one.
    sums = load.slots * weights.num_experts / weights.experts * weights.hidden * 4
    most = min(weights.intermediate / 1024, tiles_per_sm * 128 * _SMS / rows, _MAX_PARTIAL_SUMS / sums)
    return replace(tile, split_k=max(each for each in (1, 2, 4, 8) if each <= max(1, most)))


def prefers_small_tiles(weights: PackedWeights, load: ExpertLoad) -> bool:
    """Whether a call of many rows runs small tiles with shared columns: of the persistent kernels' tiles, its second
    GEMM would have fewer than half of the SMs."""
    tiles = load.active * -(-weights.hidden // 256) * max(1.0, load.rows / MAX_BLOCK_TOKENS + 0.5)
    return tiles < _SMS / 2 and load.rows > 28 and _shared_columns(weights, load, _TALL_TILE).split_k > 1


def _few_experts_config(weights: PackedWeights, load: ExpertLoad) -> LaunchConfig:
    """The heuristic's tiles where `prefers_small_tiles`: more than 28 rows for each of one to four experts.

    MX weights take steps of 128 columns in the first GEMM, with eight warps, which halves the programs that one SM
    holds; MXFP8 only as long as few experts need two tiles. Beside tiles of 64 rows in the second GEMM, which share
    columns, those of 80 rows have no second tile for an expert that exceeds 64 rows, if they have programs enough.
    27 calls are 1.09 times as fast as with tiles of 64 rows in steps of 64 columns, 0.99 to 1.23
    (`tests/golden/h100/tile-rule-4.json`).
    """
    programs = load.active * -(-weights.hidden // 128)
    # 80 programs are slower so, 0.77 and 0.90; 96 and 128 as fast and 1.06 to 1.23 times as fast.
    if code_bits(weights.format) == 4 and 58 < load.rows <= 72 and programs >= 90:
        down = TileConfig(80, 128, 128, num_warps=8, num_stages=3)
        return LaunchConfig(TileConfig(80, 128, 64, num_stages=3) if weights.format == "int4" else down, down)
    up = _TALL_TILE
    if weights.format == "mxfp4" or (weights.format == "mxfp8" and load.rows <= 58):
        waves = load.active * -(-weights.w13.rows // 128) / (2 * _SMS)
        if not 1.0 < waves < 1.4:
            up = TileConfig(64, 128, 128, num_warps=8, num_stages=3)
    # On an H200, 24 calls of one and two experts at 128 rows are 1.03 times as fast with six, 0.99 to 1.09, and four
    # calls at 256 rows 0.96 times (`tests/golden/h200/tile-rule-5.json`). 91 to 127 rows take as many tiles as 128.
    return LaunchConfig(up, _shared_columns(weights, load, _TALL_TILE, 6 if 90 < load.rows <= 128 else 3))


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
        slots = max(1.0, load.slots)
        up = _per_slot_tile(weights, slots, weights.w13.rows, weights.hidden, False)
        down = _top_k_tile(weights, top_k, tokens) or _per_slot_tile(
            weights, slots, weights.hidden, weights.intermediate, True
        )
        return LaunchConfig(up, down, per_slot=True)
    # Programs that keep h pay for a second block of 16 rows with little.
    swept = _swept_tiles(weights, load.active) if tokens > 4 else 1
    sweeping = TileConfig(16, 64, 128, num_stages=3, scale_accumulators=False, n_tiles=swept)
    if load.rows <= 14:
        up = _few_rows_tile(weights, load, weights.w13.rows, weights.hidden, False)
        if swept > 1:
            return LaunchConfig(up, sweeping)
        down = _few_rows_tile(weights, load, weights.hidden, weights.intermediate, True)
        return LaunchConfig(up, _shared_columns(weights, load, down))
    if prefers_small_tiles(weights, load):
        return _few_experts_config(weights, load)
    if load.rows > 90:
        tile = TileConfig(256 if load.rows > 160 else 128, 128, 64, num_warps=8, num_stages=3)
        if weights.format == "int4" and load.rows <= 128:
            tile = _TALL_TILE  # at 102 and 128 rows, two layers, an H100 and an H200: 1.15 to 1.23 times as fast
        return LaunchConfig(tile, tile)
    up = _middle_tile(weights, load, weights.w13.rows, False)
    # Eight bits were not timed so.
    if swept > 1 and load.rows <= 28 and code_bits(weights.format) == 4:
        return LaunchConfig(up, replace(sweeping, bm=up.bm))
    down = _middle_tile(weights, load, weights.hidden, True)
    return LaunchConfig(up, _shared_columns(weights, load, down))
