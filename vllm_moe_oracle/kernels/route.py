"""Which rows of which expert a program computes.

A *slot* is one (token, choice) pair, numbered `token * top_k + choice`; `topk_ids` in memory is the experts of all
slots. A *block* is up to BM slots of one expert. Slots with a negative id, or one that `expert_map` maps to a negative
local id, belong to no block. With few tokens every slot is a block of its own, and no list is needed. Otherwise
`sort_slots` (`sort_slots_by_comparison` for many slots) lists the slots by expert and the blocks, so that a program of
a GEMM finds its work with one load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def local_ids(ids_ptr, map_ptr, offsets, mask, HAS_MAP: tl.constexpr):
    """Local expert of each slot, int32; -1 where there is none."""
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1).to(tl.int32)
    if HAS_MAP:
        ids = tl.load(map_ptr + ids, mask=mask & (ids >= 0), other=-1).to(tl.int32)
    return ids


@triton.jit
def find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP: tl.constexpr, PER_SLOT: tl.constexpr):
    """(expert or -1, first index, rows or 0) of block number `block`; `load_block_slots` turns them into slots.

    PER_SLOT: block number = slot number. Otherwise blocks is int32 [blocks, 4] as the sorting kernels write it.
    """
    if PER_SLOT:
        return local_ids(ids_ptr, map_ptr, block, block >= 0, HAS_MAP), block, 1
    else:
        # The other fields of an entry without an expert are undefined.
        entry = blocks_ptr + block * 4
        expert = tl.load(entry)
        return expert, tl.load(entry + 1), tl.where(expert >= 0, tl.load(entry + 2), 0)


@triton.jit
def load_block_slots(sorted_ptr, start, rows, PER_SLOT: tl.constexpr, BM: tl.constexpr, REPEATS: tl.constexpr):
    """Slots int32 [REPEATS * BM] of a block, REPEATS times over, and which of them exist."""
    m = tl.arange(0, REPEATS * BM) % BM
    slot_mask = m < rows
    if PER_SLOT:
        return tl.where(slot_mask, start, 0), slot_mask
    else:
        return tl.load(sorted_ptr + start + m, mask=slot_mask, other=0), slot_mask


@triton.jit
def write_expert_blocks(blocks_ptr, expert, experts, start, count, before, total, max_blocks, BM: tl.constexpr):
    """Writes the table's entries (expert, start, rows, -) of one expert; the last expert marks the rest as empty."""
    for i in range(0, (count + BM - 1) // BM):
        entry = blocks_ptr + (before + i) * 4
        tl.store(entry, expert)
        tl.store(entry + 1, start + i * BM)
        tl.store(entry + 2, tl.minimum(BM, count - i * BM))
    if expert == experts - 1:
        p = tl.arange(0, 256)
        for at in range(total, max_blocks, 256):
            tl.store(blocks_ptr + (at + p) * 4, tl.full([256], -1, tl.int32), mask=at + p < max_blocks)


@triton.jit(do_not_specialize=["slots", "experts", "max_blocks"])
def sort_slots(ids_ptr, map_ptr, sorted_ptr, blocks_ptr, slots, experts, max_blocks, HAS_MAP: tl.constexpr,
               CHUNK: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Lists the slots by local expert, stably, and the blocks: one program per expert, grid `(experts,)`.

    ids [slots]; sorted int32 [slots] (as many entries as there are slots with a local expert are written); blocks int32
    [max_blocks, 4], the experts' blocks one after the other, then empty entries. Each program counts the slots of all
    experts itself, so no program waits for another. EP >= experts.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    p = tl.arange(0, CHUNK)
    e = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for at in range(0, slots, CHUNK):
        ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
        counts += tl.histogram(tl.maximum(ids, 0), EP, mask=ids >= 0)
    start = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    each = (counts + BM - 1) // BM
    before = tl.sum(tl.where(e < expert, each, 0), axis=0)
    write_expert_blocks(blocks_ptr, expert, experts, start, count, before, tl.sum(each, axis=0), max_blocks, BM)
    if count > 0:
        write_expert_slots(ids_ptr, map_ptr, sorted_ptr, expert, start, slots, HAS_MAP, CHUNK)


@triton.jit
def write_expert_slots(ids_ptr, map_ptr, sorted_ptr, expert, start, slots, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr):
    """Writes an expert's slots into the list from `start` on, in their order."""
    p = tl.arange(0, CHUNK)
    for at in range(0, slots, CHUNK):
        ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
        mine = (ids == expert).to(tl.int32)
        rank = tl.cumsum(mine, axis=0) - mine
        tl.store(sorted_ptr + start + rank, at + p, mask=mine > 0)
        start += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=["slots", "experts", "max_blocks"])
def sort_slots_by_comparison(ids_ptr, map_ptr, sorted_ptr, blocks_ptr, slots, experts, max_blocks,
                             HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, SINGLE_CHUNK: tl.constexpr, BM: tl.constexpr,
                             PDL: tl.constexpr):  # fmt: skip
    """As `sort_slots`, by comparing only, with empty entries among the blocks: grid `(experts,)`.

    An expert's blocks begin at entry `start // BM + expert`, where start is the number of slots of lower experts: they
    have room before the next expert's, and no program needs the lower experts' numbers of blocks. blocks: int32
    [max_blocks, 4], max_blocks >= slots // BM + experts. SINGLE_CHUNK: CHUNK >= slots, ids are read once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    p = tl.arange(0, CHUNK)
    if SINGLE_CHUNK:
        ids = local_ids(ids_ptr, map_ptr, p, p < slots, HAS_MAP)
        mine = (ids == expert).to(tl.int32)
        # Both numbers in one sum: CHUNK is less than 2**15.
        both = tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32) + mine * 65536, axis=0)
        start = both & 65535
        count = both >> 16
        if count > 0:
            rank = tl.cumsum(mine, axis=0) - mine
            tl.store(sorted_ptr + start + rank, p, mask=mine > 0)
    else:
        lower = tl.zeros([CHUNK], tl.int32)
        equal = tl.zeros([CHUNK], tl.int32)
        for at in range(0, slots, CHUNK):
            ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
            lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
            equal += (ids == expert).to(tl.int32)
        start = tl.sum(lower, axis=0)
        count = tl.sum(equal, axis=0)
        if count > 0:
            write_expert_slots(ids_ptr, map_ptr, sorted_ptr, expert, start, slots, HAS_MAP, CHUNK)
    first = start // BM + expert
    end = tl.where(expert == experts - 1, max_blocks, (start + count) // BM + expert + 1)
    i = tl.arange(0, 64)
    for at in range(first, end, 64):
        row = (at - first + i) * BM
        entry = blocks_ptr + (at + i) * 4
        inside = at + i < end
        tl.store(entry, tl.where(row < count, expert, -1), mask=inside)
        tl.store(entry + 1, start + row, mask=inside)
        tl.store(entry + 2, tl.minimum(BM, count - row), mask=inside)
