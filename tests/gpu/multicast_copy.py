"""Copies of tiles to shared memory without any product: what sharing one operand between two multiprocessors can save.

A program goes through tiles as the persistent kernels do, and copies x and weights of every step, `STAGES` ahead. With
clusters of two, x (or the weights) of a step is the same for both programs, which copy it each, or once by multicast.
Needs Triton 3.8's layouts of clusters.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit(do_not_specialize=["total", "tiles", "per_expert", "steps"])
def copy_tiles(x_desc, w_desc, total, tiles, per_expert, steps, STAGES: gl.constexpr, PAIR: gl.constexpr,
               X_MULTICAST: gl.constexpr, W_MULTICAST: gl.constexpr):  # fmt: skip
    """Copies `total` tiles: tile t has the block t // tiles of x, and rows t % tiles of the block's expert.

    x, w: descriptors of uint8 matrices of at least 128 * steps columns; their boxes, 128 bytes wide, are what all
    programs of a cluster copy in a step. per_expert: blocks of an expert. PAIR: num_ctas is 2, else 1. Barriers as in
    `multicast_gemm.py`, where each program's only group is the one that also copies.
    """
    x_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, x_desc.block_shape[0], 128], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, w_desc.block_shape[0], 128], w_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty_own = mbarrier.allocate_mbarrier(batch=STAGES)
    empty_pair = empty_own
    if PAIR:
        empty_pair = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty_own.index(i), count=1)
        if PAIR:
            mbarrier.init(empty_pair.index(i), count=1)  # of each program
    programs = gl.num_programs(0)
    count = (total - gl.program_id(0) + programs - 1) // programs * steps
    for j in range(0, count + STAGES - 1):
        # Ask for step j.
        stage = j % STAGES
        phase = j // STAGES & 1
        tile = gl.program_id(0) + j // steps * programs
        block = tile // tiles
        x_row = block * x_desc.block_shape[0]
        w_row = (block // per_expert * tiles + tile % tiles) * w_desc.block_shape[0]
        column = j % steps * 128
        there = j < count
        mbarrier.wait(empty_own.index(stage), phase ^ 1, pred=there)
        if PAIR:
            mbarrier.wait(empty_pair.index(stage), phase ^ 1, pred=there)
        bar = full.index(stage)
        mbarrier.expect(bar, x_desc.nbytes_per_cta + w_desc.nbytes_per_cta, pred=there)
        tma.async_load(w_desc, [w_row, column], bar, w_smem.index(stage), pred=there, multicast=W_MULTICAST)
        tma.async_load(x_desc, [x_row, column], bar, x_smem.index(stage), pred=there, multicast=X_MULTICAST)
        # Wait for the step that was asked for STAGES - 1 steps ago.
        done = j - (STAGES - 1)
        ready = done >= 0
        stage = (done + STAGES) % STAGES
        mbarrier.wait(full.index(stage), done // STAGES & 1, pred=ready)
        mbarrier.arrive(empty_own.index(stage), count=1, pred=ready)
        if PAIR:
            mbarrier.arrive(empty_pair.index(stage), count=1, pred=ready)
    if PAIR:
        # Program 0 stays until program 1 has arrived for the last time.
        for j in range(count, count + STAGES):
            mbarrier.wait(empty_pair.index(j % STAGES), (j // STAGES & 1) ^ 1)
