"""Sorts many slots by expert, in two or three short launches.

Terms as in `route.py`. The slots are divided into chunks. `count_slots` counts each chunk's slots per expert,
`scan_chunks` turns these counts into the positions where each chunk's slots begin, and `place_slots` writes the list of
slots and the lists of blocks. With few counts `place_slots` adds them up itself, and `scan_chunks` is not launched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .route import local_ids


@triton.jit(do_not_specialize=["slots"])
def count_slots(ids_ptr, map_ptr, counts_ptr, slots, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, EP: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """counts[chunk, expert], int32 [chunks, EP]: the chunk's slots of each local expert; grid `(chunks,)`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = local_ids(ids_ptr, map_ptr, p, p < slots, HAS_MAP)
    counts = tl.histogram(tl.maximum(ids, 0), EP, mask=ids >= 0)
    tl.store(counts_ptr + chunk * EP + tl.arange(0, EP), counts)


@triton.jit(do_not_specialize=["chunks"])
def scan_chunks(counts_ptr, totals_ptr, chunks, BLOCK: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr):
    """Replaces counts[:, expert] by the sums of the chunks before; totals[expert] = the whole sum; grid `(EP,)`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    total = 0
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        ptrs = counts_ptr + chunk * EP + expert
        counts = tl.load(ptrs, mask=chunk < chunks, other=0)
        tl.store(ptrs, total + tl.cumsum(counts, axis=0) - counts, mask=chunk < chunks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def count_large_blocks(count, BM: tl.constexpr):
    """How many blocks of more than BM / 2 positions an expert with `count` positions has."""
    return count // BM + (count % BM > BM // 2).to(tl.int32)


@triton.jit(do_not_specialize=["slots", "chunks", "experts", "max_blocks"])
def place_slots(ids_ptr, map_ptr, topk_weights_ptr, counts_ptr, totals_ptr, sorted_ptr, routers_ptr, blocks_ptr, slots,
                chunks, experts, max_blocks, INLINE_SCAN: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
                EP: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """sorted, int32 [slots]: slots by expert, stably; routers, float32 [slots]: their router weights; the blocks.

    INLINE_SCAN: counts are as `count_slots` left them, and every program adds them up; otherwise `scan_chunks` has.

    blocks: int32 [1 + 2 * max_blocks, 4]. The first entry holds the numbers of blocks of more than BM / 2 positions and
    of smaller ones; then come `max_blocks` entries of the former and `max_blocks` of the latter, of which that many are
    written: (expert, first position, positions, -) in the order of experts. Grid `(max(chunks, experts),)`.
    """
    program = tl.program_id(0)
    p = program * CHUNK + tl.arange(0, CHUNK)
    # Before the wait: the previous kernel has begun, so the results that it waited for are complete.
    ids = local_ids(ids_ptr, map_ptr, p, p < slots, HAS_MAP)
    slot_mask = ids >= 0
    expert = tl.maximum(ids, 0)
    router = tl.load(topk_weights_ptr + p, mask=slot_mask, other=0.0).to(tl.float32)
    # The rank among the chunk's slots of the same expert, by comparing all pairs: with one warp, the sum over the
    # first axis stays within a lane.
    rank = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, 32):
        q = program * CHUNK + first + tl.arange(0, 32)
        others = local_ids(ids_ptr, map_ptr, q, q < slots, HAS_MAP)
        before = (others[:, None] == ids[None, :]) & (q[:, None] < p[None, :])
        rank += tl.sum(before.to(tl.int32), axis=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if INLINE_SCAN:
        STEP: tl.constexpr = 4096 // EP if EP < 1024 else 4
        totals = tl.zeros([EP], tl.int32)
        starts = tl.zeros([EP], tl.int32)
        for first in range(0, chunks, STEP):
            chunk = first + tl.arange(0, STEP)[:, None]
            counts = tl.load(counts_ptr + chunk * EP + tl.arange(0, EP)[None, :], mask=chunk < chunks, other=0)
            totals += tl.sum(counts, axis=0)
            starts += tl.sum(tl.where(chunk < program, counts, 0), axis=0)
        starts += tl.cumsum(totals, axis=0) - totals  # of this chunk
    else:
        totals = tl.load(totals_ptr + tl.arange(0, EP))
        starts = tl.cumsum(totals, axis=0) - totals
    if program < chunks:
        position = tl.gather(starts, expert, 0)
        if not INLINE_SCAN:
            position += tl.load(counts_ptr + program * EP + expert, mask=slot_mask, other=0)
        position += rank
        tl.store(sorted_ptr + position, p, mask=slot_mask)
        tl.store(routers_ptr + position, router, mask=slot_mask)
    if program < experts:
        e = tl.arange(0, EP)
        large = count_large_blocks(totals, BM)
        small = (totals + BM - 1) // BM - large
        if program == 0:
            tl.store(blocks_ptr, tl.sum(large, axis=0))
            tl.store(blocks_ptr + 1, tl.sum(small, axis=0))
        start = tl.sum(tl.where(e < program, totals, 0), axis=0)
        count = tl.sum(tl.where(e == program, totals, 0), axis=0)
        before = tl.sum(tl.where(e < program, large, 0), axis=0)
        mine = count_large_blocks(count, BM)
        for first in range(0, mine, 32):
            block = first + tl.arange(0, 32)
            entry = blocks_ptr + 4 + (before + block) * 4
            tl.store(entry, program + block * 0, mask=block < mine)
            tl.store(entry + 1, start + block * BM, mask=block < mine)
            tl.store(entry + 2, tl.minimum(BM, count - block * BM), mask=block < mine)
        if count > mine * BM:
            entry = blocks_ptr + 4 + (max_blocks + tl.sum(tl.where(e < program, small, 0), axis=0)) * 4
            tl.store(entry, program)
            tl.store(entry + 1, start + mine * BM)
            tl.store(entry + 2, count - mine * BM)
