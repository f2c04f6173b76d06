"""Device functions and one kernel that decide which rows of which expert a program computes.

A *slot* is one (token, choice) pair, numbered `token * top_k + choice`; `topk_ids` in memory is the experts of all slots.
A *block* is up to BLOCK_M slots of one expert; blocks are numbered by expert. Slots with an id that is negative, or that
`expert_map` sends to a negative local id, belong to no block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def local_ids(ids_ptr, map_ptr, offsets, mask, HAS_MAP: tl.constexpr):
    """Local expert of each slot, int32; -1 where there is none."""
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1).to(tl.int32)
    if HAS_MAP:
        ids = tl.load(map_ptr + ids, mask=mask & (ids >= 0), other=-1).to(tl.int32)
    return ids


@triton.jit
def block_from_ids(ids_ptr, map_ptr, slots, block, HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr):
    """Finds block number `block` by comparing all pairs of `slots` <= P slots, without any prepared list.

    Returns (expert, slot int32 [BM], valid [BM], number of blocks). The order of blocks is that of first appearance.
    """
    p = tl.arange(0, P)
    ids = local_ids(ids_ptr, map_ptr, p, p < slots, HAS_MAP)
    same = (ids[:, None] == ids[None, :]) & (p[None, :] < p[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    valid = ids >= 0
    lead = valid & (rank % BM == 0)
    number = tl.cumsum(lead.to(tl.int32), axis=0) - 1
    mine = lead & (number == block)
    expert = tl.sum(tl.where(mine, ids, 0), axis=0)
    first = tl.sum(tl.where(mine, rank, 0), axis=0)
    row = tl.where(valid & (ids == expert), rank - first, -1)
    m = tl.arange(0, BM)
    hit = row[None, :] == m[:, None]
    slot = tl.sum(tl.where(hit, p[None, :], 0), axis=1)
    found = tl.sum(hit.to(tl.int32), axis=1) > 0
    return expert, slot, found, tl.sum(lead.to(tl.int32), axis=0)


@triton.jit
def block_from_lists(sorted_ptr, counts_ptr, experts, block, EP: tl.constexpr, BM: tl.constexpr):
    """Finds block number `block` from `sort_slots`' lists. Returns the same as `block_from_ids`; EP >= experts."""
    e = tl.arange(0, EP)
    counts = tl.load(counts_ptr + e, mask=e < experts, other=0)
    blocks = (counts + BM - 1) // BM
    ends = tl.cumsum(blocks, axis=0)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)
    first = tl.sum(tl.where(e < expert, blocks, 0), axis=0)
    start = tl.sum(tl.where(e < expert, counts, 0), axis=0)
    rows = tl.sum(tl.where(e == expert, counts, 0), axis=0)
    row = (block - first) * BM + tl.arange(0, BM)
    found = row < rows
    slot = tl.load(sorted_ptr + start + row, mask=found, other=0)
    return expert, slot, found, tl.sum(blocks, axis=0)


@triton.jit(do_not_specialize=["slots"])
def sort_slots(ids_ptr, map_ptr, counts_ptr, sorted_ptr, slots, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Lists the slots by local expert, stably: one program per expert, grid `(experts,)`.

    ids [slots]; counts int32 [experts] (written); sorted int32 [slots] (its first sum(counts) entries are written).
    Each program counts the slots of lower experts itself, so no program waits for another.
    """
    if PDL:
        gdc_wait()
    expert = tl.program_id(0)
    p = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for at in range(0, slots, CHUNK):
        ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
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
