"""`fp8_gemm.product` for pairs of multiprocessors: weights are copied once for both, by multicast. An experiment.

A cluster of two programs computes a tile of up to 256 tokens and 256 weight rows, each program 64 of the tokens of each
group of warps. Program 0 copies the weights to the shared memory of both, each program copies its own tokens. The rest
is as in `fp8_gemm.py`: a ring of stages, four producer warps, two consumer groups. Needs Triton 3.8's layouts of
clusters.

Barriers of a stage: `full`, one in each program, counts the bytes that arrive in that program's shared memory.
`empty_own`, one in each program, counts its own two groups. `empty_pair`, in program 0, counts the groups of both: only
program 0 writes to the other's shared memory, and only it waits there, at last after its last tile, so that it does not
end before the other has arrived for the last time. Program 1 does not end before it has read all that is copied to it.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vllm_moe_oracle.kernels.epilogue import activate, activate_ungated
from vllm_moe_oracle.kernels.persistent import advance, begin_tiles, take_tile

# Tokens of one group of warps of both programs, weight rows of a copy, columns of a step.
PAIR_TOKENS = gl.constexpr(128)
COPY_ROWS = gl.constexpr(128)
BK = gl.constexpr(128)
X_LAYOUT = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[1, 0]])
W_LAYOUT = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[0, 0]])
_X_LAYOUT = gl.constexpr(X_LAYOUT)
_W_LAYOUT = gl.constexpr(W_LAYOUT)


@gluon.constexpr_function
def accumulator_layout(N):
    """Accumulator of 64 tokens in each program and N weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32], cga_layout=[[1, 0]])


@gluon.constexpr_function
def store_layout(columns):
    """`fp8_gemm.store_layout` of 64 tokens in each program."""
    more = [[0, 32]] if columns == 64 else []
    registers = [[0, 1], [0, 2], [0, 4], *more, [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [[64, 0]], [128, columns])


@gluon.jit
def load_padded(pointer, count, SIZE: gl.constexpr, SPLIT: gl.constexpr):
    """SIZE values, 0 from `count` on. SPLIT: half of them in each program, else all of them in both."""
    CGA: gl.constexpr = [[1]] if SPLIT else [[0]]
    OWN: gl.constexpr = SIZE // 2 if SPLIT else SIZE
    i = gl.arange(0, SIZE, layout=gl.BlockedLayout([max(1, OWN // 128)], [32], [4], [0], CGA))
    return gl.load(pointer + i, mask=i < count, other=0)


@gluon.jit
def producer(x_desc, w_desc, memory, blocks_ptr, max_blocks, tiles, columns, rows_of_expert, STAGES: gl.constexpr,
             ROTATE: gl.constexpr, MULTICAST: gl.constexpr):  # fmt: skip
    """The producer warps: copy tiles to shared memory."""
    x0_smem, x1_smem, w_smem, full, empty_pair, empty_own = memory[:6]
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = tile_n * (2 * COPY_ROWS)
        both = rows > PAIR_TOKENS
        wide = rows_of_expert - first > COPY_ROWS
        row = expert * rows_of_expert + first
        for k in range(0, columns, BK):
            mbarrier.wait(empty_pair.index(stage), phase ^ 1)
            mbarrier.wait(empty_own.index(stage), phase ^ 1)
            bar = full.index(stage)
            # Bytes that arrive in one program: 64 tokens of each copy of x, all rows of each copy of weights.
            mbarrier.expect(bar, (PAIR_TOKENS + 2 * COPY_ROWS) * BK, pred=both & wide)
            mbarrier.expect(bar, (PAIR_TOKENS // 2 + 2 * COPY_ROWS) * BK, pred=(both ^ True) & wide)
            mbarrier.expect(bar, (PAIR_TOKENS + COPY_ROWS) * BK, pred=both & (wide ^ True))
            mbarrier.expect(bar, (PAIR_TOKENS // 2 + COPY_ROWS) * BK, pred=(both | wide) ^ True)
            w = w_smem.index(stage)
            tma.async_load(w_desc, [row, k], bar, w.slice(0, COPY_ROWS), multicast=MULTICAST)
            tma.async_load(x_desc, [start, k], bar, x0_smem.index(stage))
            rest = w.slice(COPY_ROWS, COPY_ROWS)
            tma.async_load(w_desc, [row + COPY_ROWS, k], bar, rest, pred=wide, multicast=MULTICAST)
            tma.async_load(x_desc, [start + PAIR_TOKENS, k], bar, x1_smem.index(stage), pred=both)
            stage, phase = advance(stage, phase, STAGES)
    drain(empty_pair, stage, phase, STAGES)


@gluon.jit
def drain(empty_pair, stage, phase, STAGES: gl.constexpr):
    """Program 0 stays until program 1 has released every stage: its barriers must exist for that long."""
    for _ in range(0, STAGES):
        mbarrier.wait(empty_pair.index(stage), phase ^ 1)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def release(memory, stage, pred=True):
    """This group no longer reads the stage."""
    mbarrier.arrive(memory[4].index(stage), count=1, pred=pred)
    mbarrier.arrive(memory[5].index(stage), count=1, pred=pred)


@gluon.jit
def skip_tile(memory, stage, phase, columns, STAGES: gl.constexpr):
    """`persistent.skip_tile`."""
    for _ in range(0, columns, BK):
        mbarrier.wait(memory[3].index(stage), phase)
        release(memory, stage)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def previous_stage(stage, STAGES: gl.constexpr):
    """The stage before this one."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def multiply_tile(memory, stage, phase, columns, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
                  N: gl.constexpr):  # fmt: skip
    """float32 [128, N], 64 rows in each program: this group's tokens times the tile's first N weight rows."""
    x_smem, w_smem, full = memory[WARPGROUP], memory[2], memory[3]
    acc = gl.zeros((PAIR_TOKENS, N), gl.float32, accumulator_layout(N))
    for k in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        w = w_smem.index(stage).slice(0, N).permute((1, 0))
        acc = hopper.warpgroup_mma(x_smem.index(stage), w, acc, is_async=True)
        # With at most one MMA in flight, that of the previous step has ended.
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        release(memory, previous_stage(stage, STAGES), pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    release(memory, previous_stage(stage, STAGES))
    return acc, stage, phase


@gluon.jit
def split_columns(acc):
    """The left and the right half of the columns, without moving anything between lanes."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return gl.split(acc.reshape(PAIR_TOKENS, 2, HALF).permute(0, 2, 1))


@gluon.jit
def store_tile(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
               OFFSET: gl.constexpr, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr,
               DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`fp8_gemm.store_tile` of acc, float32 [128, 64]."""
    L: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    ROW: gl.constexpr = gl.SliceLayout(0, L)
    TOKEN: gl.constexpr = gl.SliceLayout(1, L)
    acc = acc * by_token.index(2 * WARPGROUP).load(TOKEN).expand_dims(1)
    acc = acc * by_row.index(2 * WARPGROUP).slice(OFFSET, 64).load(ROW).expand_dims(0)
    if ROUTER_WEIGHT:
        router = by_token.index(2 * WARPGROUP + 1).load(TOKEN).expand_dims(1)
    if ROUTER_WEIGHT and not DOWN:
        acc = acc * router
    if HAS_BIAS:
        acc = acc + by_row.index(2 * WARPGROUP + 1).slice(OFFSET, 64).load(ROW).expand_dims(0)
    if ROUTER_WEIGHT and DOWN:
        acc = acc * router
    first += OFFSET
    if not GATED:
        if not DOWN:
            acc = activate_ungated(acc, ACTIVATION)
        value = acc.to(DTYPE).reshape(PAIR_TOKENS, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(PAIR_TOKENS, 64)
    else:
        gate, up = gl.split(acc.reshape(PAIR_TOKENS, 32, 2))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(DTYPE)
        value = value.reshape(PAIR_TOKENS, 8, 4).permute(0, 2, 1).reshape(PAIR_TOKENS, 32)
        first = first // 2
    V: gl.constexpr = store_layout(value.shape[1])
    value = gl.convert_layout(value, V, assert_trivial=True)
    i = gl.arange(0, PAIR_TOKENS, layout=gl.SliceLayout(1, V))
    row = slots.index(WARPGROUP).load(gl.SliceLayout(1, V)) if DOWN else start + i
    column = first + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, V)).expand_dims(0)
    ptrs = out_ptr + row.to(gl.int64).expand_dims(1) * width + column
    gl.store(ptrs, value, mask=(i < rows).expand_dims(1) & (column < width))


@gluon.jit
def store_tile_parts(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
                     OFFSET: gl.constexpr, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr,
                     DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
                     HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`store_tile` for 64 columns at a time: scales and biases of all columns would take registers that acc needs."""
    N: gl.constexpr = acc.shape[1]
    if N > 64:
        left, right = split_columns(acc)
        store_tile_parts(left, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, OFFSET,
                         WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
        store_tile_parts(right, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
                         OFFSET + N // 2, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION,
                         HAS_LIMIT)  # fmt: skip
    else:
        store_tile(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, OFFSET,
                   WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip


@gluon.jit
def compute_tile(memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                 rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP: gl.constexpr,
                 HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
                 ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr,
                 N: gl.constexpr):  # fmt: skip
    """One tile of N weight rows, from its first step to its rows of out."""
    by_row, by_token, slots = memory[6:]
    factor = load_padded(scales + first, rows_of_expert - first, N, False)
    if HAS_BIAS:
        bias = load_padded(biases + first, rows_of_expert - first, N, False)
    scale = load_padded(scale_ptr + start, rows, PAIR_TOKENS, True)
    if ROUTER_WEIGHT:
        router = load_padded(routers_ptr + start, rows, PAIR_TOKENS, True)
    if DOWN:
        slot = load_padded(sorted_ptr + start, rows, PAIR_TOKENS, True)
    acc, stage, phase = multiply_tile(memory, stage, phase, columns, WARPGROUP, STAGES, N)
    by_row.index(2 * WARPGROUP).slice(0, N).store(factor)
    if HAS_BIAS:
        by_row.index(2 * WARPGROUP + 1).slice(0, N).store(bias)
    by_token.index(2 * WARPGROUP).store(scale)
    if ROUTER_WEIGHT:
        by_token.index(2 * WARPGROUP + 1).store(router)
    if DOWN:
        slots.index(WARPGROUP).store(slot)
    store_tile_parts(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, 0, WARPGROUP,
                     HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    return stage, phase


@gluon.jit
def consumer(memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, max_blocks,
             tiles, columns, rows_of_expert, width, alpha, beta, limit, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
             ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
             HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr):  # fmt: skip
    """One of the two consumer warpgroups."""
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = tile_n * (2 * COPY_ROWS)
        scales = row_scale_ptr + expert.to(gl.int64) * rows_of_expert
        biases = bias_ptr + expert.to(gl.int64) * rows_of_expert
        start += PAIR_TOKENS * WARPGROUP
        rows -= PAIR_TOKENS * WARPGROUP
        if rows <= 0:
            stage, phase = skip_tile(memory, stage, phase, columns, STAGES)
        elif rows_of_expert - first > COPY_ROWS:
            stage, phase = compute_tile(
                memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT,
                DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 256)  # fmt: skip
        else:
            stage, phase = compute_tile(
                memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT,
                DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 128)  # fmt: skip


@gluon.jit
def allocate_ring(STAGES: gl.constexpr):
    """Shared memory: x of each group and weights of the stages, their barriers; then what `store_tile` reads."""
    x0_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PAIR_TOKENS, BK], _X_LAYOUT)
    x1_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, PAIR_TOKENS, BK], _X_LAYOUT)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * COPY_ROWS, BK], _W_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty_pair = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    empty_own = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty_pair.index(i), count=2)  # of each program
        mbarrier.init(empty_own.index(i), count=2)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]])
    TOKENS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])
    by_row = gl.allocate_shared_memory(gl.float32, [4, 2 * COPY_ROWS], ROWS)
    by_token = gl.allocate_shared_memory(gl.float32, [4, PAIR_TOKENS], TOKENS)
    slots = gl.allocate_shared_memory(gl.int32, [2, PAIR_TOKENS], TOKENS)
    return x0_smem, x1_smem, w_smem, full, empty_pair, empty_own, by_row, by_token, slots


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "alpha", "beta", "limit"])
def product(x_desc, w_desc, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, blocks_ptr,
            max_blocks, tiles, columns, rows_of_expert, width, alpha, beta, limit,
            HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
            ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr,
            MULTICAST: gl.constexpr = True):  # fmt: skip
    """`fp8_gemm.product`, with blocks of up to 256 positions instead of 128, without programmatic dependent launch.

    x and w: descriptors, boxes [128, 128] of X_LAYOUT and of W_LAYOUT. The grid counts
    clusters: num_ctas is 2. MULTICAST: without it each program copies all that it reads.
    """
    memory = allocate_ring(STAGES)
    gl.warp_specialize(
        [
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr,
                        max_blocks, tiles, columns, rows_of_expert, width, alpha, beta, limit, 0, HAS_BIAS,
                        ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE)),
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr,
                        max_blocks, tiles, columns, rows_of_expert, width, alpha, beta, limit, 1, HAS_BIAS,
                        ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE)),
            (producer, (x_desc, w_desc, memory, blocks_ptr, max_blocks, tiles, columns, rows_of_expert, STAGES,
                        ROTATE, MULTICAST)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
