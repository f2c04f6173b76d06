"""The GEMMs of a fused MoE layer on fp8 tensor cores: a persistent, warp-specialized kernel in Gluon.

The copy engine brings both operands to shared memory, where they are e4m3. One program runs on each multiprocessor and
computes one tile after the other, of up to 128 tokens and 256 weight rows. Four producer warps ask for steps of 128
columns, `STAGES` ahead and across tiles. Two consumer groups of four warps multiply 64 tokens each. The groups are not
synchronized: one stores its tile while the matrix unit works for the other. `prefill.py` describes blocks and the order
of tiles.

The sum over columns is multiplied by the row's scale and by the token's scale. The matrix unit sums blocks of 32
columns in registers with fewer bits than float32; RESULTS.md has the resulting errors.

Weight rows are stored in an order that gives each lane eight neighboring columns of the result
(`layouts/e4m3_folding.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .epilogue import activate, activate_ungated
from .persistent import advance, begin_tiles, load_padded, skip_tile, take_tile, tma_copy

# Tokens of one group of warps (of two), weight rows of a copy, columns of a step.
GROUP_TOKENS = gl.constexpr(64)
COPY_ROWS = gl.constexpr(128)
BK = gl.constexpr(128)
TILE_ROWS = 256
BLOCK_TOKENS = 128
NUM_STAGES = 4
TILE_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
"""How copies are laid out in shared memory: 128 bytes a row, in the matrix unit's swizzle."""
_TILE_LAYOUT = gl.constexpr(TILE_LAYOUT)


@gluon.constexpr_function
def accumulator_layout(N):
    """Accumulator of 64 tokens and N weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])


@gluon.constexpr_function
def store_layout(columns):
    """Results of 64 tokens and 32 or 64 columns: eight neighboring columns are in consecutive registers of a lane."""
    more = [[0, 32]] if columns == 64 else []
    registers = [[0, 1], [0, 2], [0, 4], *more, [8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def producer(x_desc, w_desc, memory, blocks_ptr, max_blocks, tiles, columns, rows_of_expert, STAGES: gl.constexpr,
             ROTATE: gl.constexpr):  # fmt: skip
    """The producer warps: copy tiles to shared memory."""
    x_smem, w_smem, full, empty = memory[0], memory[1], memory[2], memory[3]
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = tile_n * (2 * COPY_ROWS)
        both = rows > GROUP_TOKENS
        wide = rows_of_expert - first > COPY_ROWS
        row = expert * rows_of_expert + first
        for k in range(0, columns, BK):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * GROUP_TOKENS + 2 * COPY_ROWS) * BK, pred=both & wide)
            mbarrier.expect(bar, (GROUP_TOKENS + 2 * COPY_ROWS) * BK, pred=(both ^ True) & wide)
            mbarrier.expect(bar, (2 * GROUP_TOKENS + COPY_ROWS) * BK, pred=both & (wide ^ True))
            mbarrier.expect(bar, (GROUP_TOKENS + COPY_ROWS) * BK, pred=(both | wide) ^ True)
            x = x_smem.index(stage)
            w = w_smem.index(stage)
            tma_copy(w_desc, [row, k], bar, w.slice(0, COPY_ROWS))
            tma_copy(x_desc, [start, k], bar, x.slice(0, GROUP_TOKENS))
            tma_copy(w_desc, [row + COPY_ROWS, k], bar, w.slice(COPY_ROWS, COPY_ROWS), pred=wide)
            tma_copy(x_desc, [start + GROUP_TOKENS, k], bar, x.slice(GROUP_TOKENS, GROUP_TOKENS), pred=both)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def previous_stage(stage, STAGES: gl.constexpr):
    """The stage before this one.

    A loop-carried variable would not do: Triton 3.6 takes it for a constant, its value before the loop.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def multiply_tile(memory, stage, phase, columns, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
                  N: gl.constexpr):  # fmt: skip
    """float32 [64, N]: this group's tokens times the tile's first N weight rows."""
    x_smem, w_smem, full, empty = memory[0], memory[1], memory[2], memory[3]
    acc = gl.zeros((GROUP_TOKENS, N), gl.float32, accumulator_layout(N))
    for k in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        x = x_smem.index(stage).slice(GROUP_TOKENS * WARPGROUP, GROUP_TOKENS)
        w = w_smem.index(stage).slice(0, N).permute((1, 0))
        acc = hopper.warpgroup_mma(x, w, acc, is_async=True)
        # With at most one MMA in flight, that of the previous step has ended.
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1, pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1)
    return acc, stage, phase


@gluon.jit
def split_columns(acc):
    """The left and the right half of the columns, without moving anything between lanes."""
    HALF: gl.constexpr = acc.shape[1] // 2
    return gl.split(acc.reshape(GROUP_TOKENS, 2, HALF).permute(0, 2, 1))


@gluon.jit
def store_tile(acc, by_row, by_token, slots, out_ptr, width, first, start, rows, alpha, beta, limit,
               OFFSET: gl.constexpr, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr,
               DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr):  # fmt: skip
    """Epilogue of acc, float32 [64, 64]: tokens from `start` on, of which `rows` exist; weight rows from OFFSET on.

    first: the tile's first weight row. In shared memory: by_row, float32 [4, 256], has scales and biases of the tile's
    weight rows from row 2 * WARPGROUP on; by_token, float32 [4, 64], has the tokens' scales and router weights there;
    slots, int32 [2, 64], has the tokens' slots at WARPGROUP. ROUTER_WEIGHT: router weights multiply, after the bias if
    DOWN, else before it. DOWN: rows of out are slots, else positions. GATED: a column of out comes from a pair of
    weight rows, else from one.
    """
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
    # Undoes the order of layouts/e4m3_folding.py: values move between registers, not between lanes.
    first += OFFSET
    if not GATED:
        if not DOWN:
            acc = activate_ungated(acc, ACTIVATION)
        value = acc.to(DTYPE).reshape(GROUP_TOKENS, 2, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(GROUP_TOKENS, 64)
    else:
        gate, up = gl.split(acc.reshape(GROUP_TOKENS, 32, 2))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(DTYPE)
        value = value.reshape(GROUP_TOKENS, 8, 4).permute(0, 2, 1).reshape(GROUP_TOKENS, 32)
        first = first // 2
    V: gl.constexpr = store_layout(value.shape[1])
    value = gl.convert_layout(value, V, assert_trivial=True)
    i = gl.arange(0, GROUP_TOKENS, layout=gl.SliceLayout(1, V))
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
    by_row, by_token, slots = memory[4], memory[5], memory[6]
    # The epilogue's operands are loaded before the K loop, a few values per thread, and shared after it.
    factor = load_padded(scales + first, rows_of_expert - first, N)
    if HAS_BIAS:
        bias = load_padded(biases + first, rows_of_expert - first, N)
    scale = load_padded(scale_ptr + start, rows, GROUP_TOKENS)
    if ROUTER_WEIGHT:
        router = load_padded(routers_ptr + start, rows, GROUP_TOKENS)
    if DOWN:
        slot = load_padded(sorted_ptr + start, rows, GROUP_TOKENS)
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
        start += GROUP_TOKENS * WARPGROUP
        rows -= GROUP_TOKENS * WARPGROUP
        if rows <= 0:
            stage, phase = skip_tile(memory[2], memory[3], stage, phase, columns, BK, STAGES)
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
    """Shared memory: x and weights of the stages, their barriers (`full` counts the warps that copy, `empty` the
    groups); then, for the end of each group's tile, what `store_tile` reads.
    """
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * GROUP_TOKENS, BK], _TILE_LAYOUT)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * COPY_ROWS, BK], _TILE_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_row = gl.allocate_shared_memory(gl.float32, [4, 2 * COPY_ROWS], LINE)
    by_token = gl.allocate_shared_memory(gl.float32, [4, GROUP_TOKENS], LINE)
    slots = gl.allocate_shared_memory(gl.int32, [2, GROUP_TOKENS], LINE)
    return x_smem, w_smem, full, empty, by_row, by_token, slots


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "alpha", "beta", "limit"])
def product(x_desc, w_desc, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, blocks_ptr,
            max_blocks, tiles, columns, rows_of_expert, width, alpha, beta, limit,
            HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
            ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
            ROTATE: gl.constexpr):  # fmt: skip
    """One product of a layer; x [slots, columns] e4m3 in the order of sorted, scale float32 [slots] its rows' scales.

    DOWN: out[sorted[position]] = (x[position] @ w[expert].T + bias[expert]) * router weight, out 16-bit [slots, width];
    else out[position] = activation(x[position] @ w[expert].T + bias[expert]), [slots, width] too: of pairs of columns
    if GATED, else of each, max(., 0) ** 2.
    w [experts * rows_of_expert, columns] e4m3, row_scale and bias float32 [experts, rows_of_expert], a multiple of 32.
    x and w: descriptors, boxes [64, 128] and [128, 128]. sorted, routers, blocks, max_blocks:
    `prefill_route.place_slots`. tiles: 256 rows of an expert each. ROUTER_WEIGHT: router weights multiply in this
    product. ROTATE: `persistent.partition_tiles`. A one-dimensional grid of any size, of 4 warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
                        ROTATE)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
