"""Device functions of the persistent kernels (`prefill.py`, `fp8_gemm.py`): the ring of stages, and the order of tiles.

A producer fills the stages of a ring in shared memory, consumers empty them. Every stage has two barriers, `full` and
`empty`, whose phase changes each time round the ring. Producer and consumers go through the program's tiles in the same
order, which each of them derives from the lists of blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Gluon's copy has another name in newer releases.
tma_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the phase of its barriers."""
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def skip_tile(full, empty, stage, phase, columns, BK: gl.constexpr, STAGES: gl.constexpr):
    """Consumes a tile's stages, BK columns each, without computing; returns the next stage and phase."""
    for _ in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load_padded(pointer, count, SIZE: gl.constexpr):
    """SIZE values, 0 from `count` on."""
    i = gl.arange(0, SIZE, layout=gl.BlockedLayout([max(1, SIZE // 128)], [32], [4], [0]))
    return gl.load(pointer + i, mask=i < count, other=0)


@gluon.jit
def partition_tiles(blocks_ptr, tiles, ROTATE: gl.constexpr):
    """This program's share: (tiles of large blocks, tiles of small blocks, offset among the large, among the small).

    Each list is dealt out in rounds of one tile per program. The programs that get a tile of the large blocks in the
    last, incomplete round are the last to get one of the small blocks. ROTATE: the offset moves on by one in every
    round. Without it, where the number of programs is a multiple of a block's tiles, a program would have the same tile
    along N in every round; a block's last tile is narrower, so its programs would have less work.
    """
    both = gl.load(blocks_ptr.to(gl.pointer_type(gl.int64)))  # one load for both numbers
    large = both.to(gl.int32) * tiles
    small = (both >> 32).to(gl.int32) * tiles
    programs = gl.num_programs(0)
    last = gl.program_id(0)  # this program's offset in the last round, which is not full
    if ROTATE:
        last = (last + large // programs) % programs
    mirrored = programs - 1 - last
    num_large = large // programs + (last < large % programs).to(gl.int32)
    num_small = small // programs + (mirrored < small % programs).to(gl.int32)
    if ROTATE:
        return num_large, num_small, gl.program_id(0), mirrored + programs - small // programs % programs
    else:
        return num_large, num_small, last, mirrored


@gluon.jit
def peek_tiles(blocks_ptr, max_blocks, tiles, large_index, small_index, large_offset, small_offset,
               ROTATE: gl.constexpr):  # fmt: skip
    """(expert, first position, rows, tile along N) of this program's next tile of a large block, and of a small one.

    large_index, small_index: how many tiles of each list the program has taken. Beyond a list's end the values mean
    nothing. blocks: `prefill_route.place_slots`; the tiles of a block are neighbors.
    """
    programs = gl.num_programs(0)
    if ROTATE:
        first = large_index * programs + (large_offset + large_index) % programs
        second = small_index * programs + (small_offset + small_index) % programs
    else:
        first = large_index * programs + large_offset
        second = small_index * programs + small_offset
    entry = blocks_ptr + 4 + gl.minimum(first // tiles, max_blocks - 1) * 4
    large_tile = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), first % tiles
    entry = blocks_ptr + 4 + (max_blocks + gl.minimum(second // tiles, max_blocks - 1)) * 4
    return large_tile, (gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), second % tiles)


@gluon.jit
def begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE: gl.constexpr):
    """This program's share of the tiles (`partition_tiles`), and the cursor before the first of them (`take_tile`)."""
    share = partition_tiles(blocks_ptr, tiles, ROTATE)
    large_tile, small_tile = peek_tiles(blocks_ptr, max_blocks, tiles, 0, 0, share[2], share[3], ROTATE)
    return share, (gl.to_tensor(0), gl.to_tensor(0), large_tile, small_tile)


@gluon.jit
def take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE: gl.constexpr):
    """The next tile in the order of experts: (expert, first position, rows, tile along N, cursor after it).

    share: `partition_tiles`. cursor: how many tiles of each list the program has taken, and the next one of each.
    """
    num_large, num_small, large_offset, small_offset = share
    large_index, small_index, large_tile, small_tile = cursor
    is_large = (large_index < num_large) & ((small_index >= num_small) | (large_tile[0] <= small_tile[0]))
    expert = gl.where(is_large, large_tile[0], small_tile[0])
    start = gl.where(is_large, large_tile[1], small_tile[1])
    rows = gl.where(is_large, large_tile[2], small_tile[2])
    tile_n = gl.where(is_large, large_tile[3], small_tile[3])
    step = is_large.to(gl.int32)
    large_index = large_index + step
    small_index = small_index + 1 - step
    # The loads arrive while this tile is computed.
    large_tile, small_tile = peek_tiles(
        blocks_ptr, max_blocks, tiles, large_index, small_index, large_offset, small_offset, ROTATE)  # fmt: skip
    return expert, start, rows, tile_n, (large_index, small_index, large_tile, small_tile)
