"""`fp8_gemm.product` for pairs of multiprocessors: x is copied once for both, by multicast. An experiment.

A cluster of two programs computes a tile of up to 128 tokens and 512 weight rows (or, at an expert's end, 256), each
program one half of the rows. Program 0 copies x to the shared memory of both, each program copies its own weights.
Barriers as in `multicast_gemm.py`.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tests.gpu.multicast_gemm import drain, previous_stage, release, skip_tile
from vllm_moe_oracle.kernels.epilogue import activate, activate_ungated
from vllm_moe_oracle.kernels.persistent import advance, begin_tiles, take_tile

# Tokens of one group of warps, weight rows of both programs in a tile, columns of a step.
GROUP_TOKENS = gl.constexpr(64)
WIDE = gl.constexpr(512)
NARROW = gl.constexpr(256)
BK = gl.constexpr(128)
X_LAYOUT = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[0, 0]])
W_LAYOUT = gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[1, 0]])
_X_LAYOUT = gl.constexpr(X_LAYOUT)
_W_LAYOUT = gl.constexpr(W_LAYOUT)


@gluon.constexpr_function
def accumulator_layout(N):
    """Accumulator of 64 tokens and N weight rows, of which each program has one half."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N // 2, 32], cga_layout=[[0, 1]])


@gluon.constexpr_function
def store_layout(columns):
    """`fp8_gemm.store_layout` of 32 or 64 columns in each program."""
    more = [[0, 32]] if columns == 128 else []
    registers = [[0, 1], [0, 2], [0, 4], *more, [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [[0, columns // 2]], [64, columns])


@gluon.jit
def load_padded(pointer, count, SIZE: gl.constexpr, SPLIT: gl.constexpr):
    """SIZE values, 0 from `count` on. SPLIT: half of them in each program, else all of them in both."""
    CGA: gl.constexpr = [[1]] if SPLIT else [[0]]
    OWN: gl.constexpr = SIZE // 2 if SPLIT else SIZE
    i = gl.arange(0, SIZE, layout=gl.BlockedLayout([max(1, OWN // 128)], [32], [4], [0], CGA))
    return gl.load(pointer + i, mask=i < count, other=0)


@gluon.jit
def weights_of(w_smem, stage, N: gl.constexpr):
    """The stage's memory for N weight rows, the first ones of each program's memory."""
    w = w_smem.index(stage)
    if N == WIDE:
        return w
    else:
        return w._reinterpret(gl.float8e4nv, [WIDE // N, N, BK], _W_LAYOUT).index(0)


@gluon.jit
def producer(x_desc, w_desc, narrow_desc, memory, blocks_ptr, max_blocks, tiles, columns, rows_of_expert,
             STAGES: gl.constexpr, ROTATE: gl.constexpr, MULTICAST: gl.constexpr):  # fmt: skip
    """The producer warps: copy tiles to shared memory."""
    x_smem, w_smem, full, empty_pair, empty_own = memory[0], memory[2], memory[3], memory[4], memory[5]
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = tile_n * WIDE
        both = rows > GROUP_TOKENS
        wide = rows_of_expert - first > NARROW
        row = expert * rows_of_expert + first
        for k in range(0, columns, BK):
            mbarrier.wait(empty_pair.index(stage), phase ^ 1)
            mbarrier.wait(empty_own.index(stage), phase ^ 1)
            bar = full.index(stage)
            # Bytes that arrive in one program: all tokens, half of the rows.
            mbarrier.expect(bar, (2 * GROUP_TOKENS + WIDE // 2) * BK, pred=both & wide)
            mbarrier.expect(bar, (GROUP_TOKENS + WIDE // 2) * BK, pred=(both ^ True) & wide)
            mbarrier.expect(bar, (2 * GROUP_TOKENS + NARROW // 2) * BK, pred=both & (wide ^ True))
            mbarrier.expect(bar, (GROUP_TOKENS + NARROW // 2) * BK, pred=(both | wide) ^ True)
            x = x_smem.index(stage)
            tma.async_load(w_desc, [row, k], bar, weights_of(w_smem, stage, WIDE), pred=wide)
            tma.async_load(narrow_desc, [row, k], bar, weights_of(w_smem, stage, NARROW), pred=wide ^ True)
            tma.async_load(x_desc, [start, k], bar, x.slice(0, GROUP_TOKENS), multicast=MULTICAST)
            rest = x.slice(GROUP_TOKENS, GROUP_TOKENS)
            tma.async_load(x_desc, [start + GROUP_TOKENS, k], bar, rest, pred=both, multicast=MULTICAST)
            stage, phase = advance(stage, phase, STAGES)
    drain(empty_pair, stage, phase, STAGES)


@gluon.jit
def multiply_tile(memory, stage, phase, columns, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
                  N: gl.constexpr):  # fmt: skip
    """float32 [64, N], half of the columns in each program: this group's tokens times the tile's N weight rows."""
    x_smem, w_smem, full = memory[0], memory[2], memory[3]
    acc = gl.zeros((GROUP_TOKENS, N), gl.float32, accumulator_layout(N))
    for k in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        x = x_smem.index(stage).slice(GROUP_TOKENS * WARPGROUP, GROUP_TOKENS)
        w = weights_of(w_smem, stage, N).permute((1, 0))
        acc = hopper.warpgroup_mma(x, w, acc, is_async=True)
        # With at most one MMA in flight, that of the previous step has ended.
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        release(memory, previous_stage(stage, STAGES), pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    release(memory, previous_stage(stage, STAGES))
    return acc, stage, phase


@gluon.jit
def split_columns(acc):
    """The left and the right half of each program's columns, without moving anything between lanes."""
    N: gl.constexpr = acc.shape[1]
    left, right = gl.split(acc.reshape(GROUP_TOKENS, 2, 2, N // 4).permute(0, 1, 3, 2))
    return left.reshape(GROUP_TOKENS, N // 2), right.reshape(GROUP_TOKENS, N // 2)


@gluon.jit
def row_values(by_row, at, PART: gl.constexpr):
    """The 64 values of each program for its columns from 64 * PART on."""
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])
    return by_row.index(at)._reinterpret(gl.float32, [4, 128], PARTS).index(PART)


@gluon.jit
def store_tile(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
               OFFSET: gl.constexpr, HALF: gl.constexpr, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
               ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
               HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`fp8_gemm.store_tile` of acc, float32 [64, 128], 64 columns in each program: OFFSET is where they begin among
    the program's HALF.
    """
    L: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    ROW: gl.constexpr = gl.SliceLayout(0, L)
    TOKEN: gl.constexpr = gl.SliceLayout(1, L)
    acc = acc * by_token.index(2 * WARPGROUP).load(TOKEN).expand_dims(1)
    acc = acc * row_values(by_row, 2 * WARPGROUP, OFFSET // 64).load(ROW).expand_dims(0)
    if ROUTER_WEIGHT:
        router = by_token.index(2 * WARPGROUP + 1).load(TOKEN).expand_dims(1)
    if ROUTER_WEIGHT and not DOWN:
        acc = acc * router
    if HAS_BIAS:
        acc = acc + row_values(by_row, 2 * WARPGROUP + 1, OFFSET // 64).load(ROW).expand_dims(0)
    if ROUTER_WEIGHT and DOWN:
        acc = acc * router
    if not GATED:
        if not DOWN:
            acc = activate_ungated(acc, ACTIVATION)
        value = acc.to(DTYPE).reshape(GROUP_TOKENS, 2, 2, 4, 4, 2).permute(0, 1, 2, 4, 3, 5)
        value = value.reshape(GROUP_TOKENS, 128)
    else:
        gate, up = gl.split(acc.reshape(GROUP_TOKENS, 64, 2))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(DTYPE)
        value = value.reshape(GROUP_TOKENS, 2, 8, 4).permute(0, 1, 3, 2).reshape(GROUP_TOKENS, 64)
    OWN: gl.constexpr = value.shape[1] // 2
    ROWS_PER_COLUMN: gl.constexpr = 64 // OWN
    V: gl.constexpr = store_layout(value.shape[1])
    value = gl.convert_layout(value, V, assert_trivial=True)
    i = gl.arange(0, GROUP_TOKENS, layout=gl.SliceLayout(1, V))
    row = slots.index(WARPGROUP).load(gl.SliceLayout(1, V)) if DOWN else start + i
    j = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, V))
    column = ((first + OFFSET) // ROWS_PER_COLUMN + j // OWN * (HALF // ROWS_PER_COLUMN) + j % OWN).expand_dims(0)
    ptrs = out_ptr + row.to(gl.int64).expand_dims(1) * width + column
    gl.store(ptrs, value, mask=(i < rows).expand_dims(1) & (column < width))


@gluon.jit
def store_tile_parts(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
                     OFFSET: gl.constexpr, HALF: gl.constexpr, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
                     ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
                     ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`store_tile` for 64 columns of each program at a time: scales and biases of all columns would take registers
    that acc needs."""
    N: gl.constexpr = acc.shape[1]
    if N > 128:
        left, right = split_columns(acc)
        store_tile_parts(left, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, OFFSET,
                         HALF, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
        store_tile_parts(right, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
                         OFFSET + N // 4, HALF, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION,
                         HAS_LIMIT)  # fmt: skip
    else:
        store_tile(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, OFFSET,
                   HALF, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip


@gluon.jit
def row_memory(by_row, at, N: gl.constexpr):
    """Memory of N rows' values, the first ones of each program's memory."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])
    return by_row.index(at)._reinterpret(gl.float32, [WIDE // N, N], LINE).index(0)


@gluon.jit
def compute_tile(memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                 rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP: gl.constexpr,
                 HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
                 ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr,
                 N: gl.constexpr):  # fmt: skip
    """One tile of N weight rows, from its first step to its rows of out."""
    by_row, by_token, slots = memory[6:]
    factor = load_padded(scales + first, rows_of_expert - first, N, True)
    if HAS_BIAS:
        bias = load_padded(biases + first, rows_of_expert - first, N, True)
    scale = load_padded(scale_ptr + start, rows, GROUP_TOKENS, False)
    if ROUTER_WEIGHT:
        router = load_padded(routers_ptr + start, rows, GROUP_TOKENS, False)
    if DOWN:
        slot = load_padded(sorted_ptr + start, rows, GROUP_TOKENS, False)
    acc, stage, phase = multiply_tile(memory, stage, phase, columns, WARPGROUP, STAGES, N)
    row_memory(by_row, 2 * WARPGROUP, N).store(factor)
    if HAS_BIAS:
        row_memory(by_row, 2 * WARPGROUP + 1, N).store(bias)
    by_token.index(2 * WARPGROUP).store(scale)
    if ROUTER_WEIGHT:
        by_token.index(2 * WARPGROUP + 1).store(router)
    if DOWN:
        slots.index(WARPGROUP).store(slot)
    store_tile_parts(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit, 0, N // 2,
                     WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
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
        first = tile_n * WIDE
        scales = row_scale_ptr + expert.to(gl.int64) * rows_of_expert
        biases = bias_ptr + expert.to(gl.int64) * rows_of_expert
        start += GROUP_TOKENS * WARPGROUP
        rows -= GROUP_TOKENS * WARPGROUP
        if rows <= 0:
            stage, phase = skip_tile(memory, stage, phase, columns, STAGES)
        elif rows_of_expert - first > NARROW:
            stage, phase = compute_tile(
                memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT,
                DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, WIDE)  # fmt: skip
        else:
            stage, phase = compute_tile(
                memory, stage, phase, scales, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                rows_of_expert, width, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT,
                DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, NARROW)  # fmt: skip


@gluon.jit
def allocate_ring(STAGES: gl.constexpr):
    """Shared memory: x (twice in the list, as `multicast_gemm.py` has two) and weights of the stages, their barriers;
    then what `store_tile` reads."""
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * GROUP_TOKENS, BK], _X_LAYOUT)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDE, BK], _W_LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty_pair = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    empty_own = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty_pair.index(i), count=2)  # of each program
        mbarrier.init(empty_own.index(i), count=2)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])
    TOKENS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]])
    by_row = gl.allocate_shared_memory(gl.float32, [4, WIDE], ROWS)
    by_token = gl.allocate_shared_memory(gl.float32, [4, GROUP_TOKENS], TOKENS)
    slots = gl.allocate_shared_memory(gl.int32, [2, GROUP_TOKENS], TOKENS)
    return x_smem, x_smem, w_smem, full, empty_pair, empty_own, by_row, by_token, slots


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "alpha", "beta", "limit"])
def product(x_desc, w_desc, narrow_desc, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr,
            blocks_ptr, max_blocks, tiles, columns, rows_of_expert, width, alpha, beta, limit,
            HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
            ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr,
            MULTICAST: gl.constexpr = True):  # fmt: skip
    """`fp8_gemm.product`, with tiles of 512 rows instead of 256, without programmatic dependent launch.

    x, w, narrow: descriptors, boxes [64, 128] of X_LAYOUT, [512, 128] and [256, 128] of W_LAYOUT. The grid counts
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
            (producer, (x_desc, w_desc, narrow_desc, memory, blocks_ptr, max_blocks, tiles, columns, rows_of_expert,
                        STAGES, ROTATE, MULTICAST)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
