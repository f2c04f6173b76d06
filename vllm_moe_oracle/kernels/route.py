"""Decides which rows of which expert a program computes.

A *slot* is one (token, choice) pair, numbered `token * top_k + choice`; `topk_ids` in memory is the experts of all
slots. A *block* is up to BM slots of one expert. Slots with an id that is negative, or that `expert_map` sends to a
negative local id, belong to no block. With few tokens every slot is a block of its own, and no list is needed;
otherwise `sort_slots` lists slots by expert and blocks, so that a product's program finds its work with one load.
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
    """(expert or -1, first index, rows or 0) of block number `block`; `block_slots` turns them into slots.

    PER_SLOT: block number = slot number. Otherwise blocks is int32 [blocks, 4] as `sort_slots` writes it.
    """
    if PER_SLOT:
        return local_ids(ids_ptr, map_ptr, block, block >= 0, HAS_MAP), block, 1
    else:
        # Entries without an expert have nothing else either.
        entry = blocks_ptr + block * 4
        expert = tl.load(entry)
        return expert, tl.load(entry + 1), tl.where(expert >= 0, tl.load(entry + 2), 0)


@triton.jit
def block_slots(sorted_ptr, start, rows, PER_SLOT: tl.constexpr, BM: tl.constexpr, FOLD: tl.constexpr):
    """Slots int32 [FOLD * BM] of a block, FOLD times over, and which of them exist."""
    m = tl.arange(0, FOLD * BM) % BM
    found = m < rows
    if PER_SLOT:
        return tl.where(found, start, 0), found
    else:
        return tl.load(sorted_ptr + start + m, mask=found, other=0), found


@triton.jit
def write_blocks(blocks_ptr, expert, experts, start, count, before, total, most, BM: tl.constexpr):
    """Writes the table's entries (expert, start, rows, -) of one expert; the last expert marks the rest as empty."""
    for i in range(0, (count + BM - 1) // BM):
        entry = blocks_ptr + (before + i) * 4
        tl.store(entry, expert)
        tl.store(entry + 1, start + i * BM)
        tl.store(entry + 2, tl.minimum(BM, count - i * BM))
    if expert == experts - 1:
        p = tl.arange(0, 256)
        for at in range(total, most, 256):
            tl.store(blocks_ptr + (at + p) * 4, tl.full([256], -1, tl.int32), mask=at + p < most)


@triton.jit(do_not_specialize=["slots", "experts", "most"])
def sort_slots(ids_ptr, map_ptr, counts_ptr, sorted_ptr, blocks_ptr, slots, experts, most, HAS_MAP: tl.constexpr,
               CHUNK: tl.constexpr, EP: tl.constexpr, TABLE: tl.constexpr, BM: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Lists the slots by local expert, stably: one program per expert, grid `(experts,)`.

    ids [slots]; sorted int32 [slots] (its first sum(counts) entries are written). Each program counts the slots of
    lower experts itself, so no program waits for another. TABLE: also writes blocks, int32 [most, 4]; otherwise counts,
    int32 [experts], for `list_blocks`. EP >= experts.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    p = tl.arange(0, CHUNK)
    e = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    lower = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for at in range(0, slots, CHUNK):
        ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
        if TABLE:
            counts += tl.histogram(tl.maximum(ids, 0), EP, mask=ids >= 0)
        else:
            lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
            equal += (ids == expert).to(tl.int32)
    if TABLE:
        start = tl.sum(tl.where(e < expert, counts, 0), axis=0)
        count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
        each = (counts + BM - 1) // BM
        before = tl.sum(tl.where(e < expert, each, 0), axis=0)
        write_blocks(blocks_ptr, expert, experts, start, count, before, tl.sum(each, axis=0), most, BM)
    else:
        start = tl.sum(lower, axis=0)
        count = tl.sum(equal, axis=0)
        tl.store(counts_ptr + expert, count)
    if count > 0:
        for at in range(0, slots, CHUNK):
            ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
            mine = (ids == expert).to(tl.int32)
            rank = tl.cumsum(mine, axis=0) - mine
            tl.store(sorted_ptr + start + rank, at + p, mask=mine > 0)
            start += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=["experts", "most"])
def list_blocks(counts_ptr, blocks_ptr, experts, most, EP: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):
    """blocks, int32 [most, 4], from counts, int32 [experts]; grid `(experts,)`, EP >= experts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    e = tl.arange(0, EP)
    counts = tl.load(counts_ptr + e, mask=e < experts, other=0)
    each = (counts + BM - 1) // BM
    start = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    before = tl.sum(tl.where(e < expert, each, 0), axis=0)
    write_blocks(blocks_ptr, expert, experts, start, count, before, tl.sum(each, axis=0), most, BM)
