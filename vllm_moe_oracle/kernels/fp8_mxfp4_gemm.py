"""The GEMMs of a fused MoE layer with MXFP4 weights on fp8 tensor cores: persistent, warp-specialized kernels in Gluon.

They read the stored weights of `gemm.py`, four bits each. One program runs on each multiprocessor and computes one tile
after the other: 128 weight rows and up to 256 tokens, in steps of 128 columns. Four producer warps ask for steps,
`STAGES` ahead and across tiles. Two consumer groups of four warps multiply 64 weight rows each. They decode weights to
e4m3 in registers (`fp8_dequantize.e2m1_e4m3`), half a step at a time: the second half while the first is multiplied.
Decoding costs a third of the time in tiles of 128 tokens (EXPERIMENTS.md), so a tile has as many tokens as the
accumulator can hold.

x is e4m3 with one scale per token, in the order of `sorted`. A stored scale of weights says by how many binades it is
below the largest of its row. Codes of up to `wgmma_fragments.MAX_E4M3_SPREAD` binades are normal numbers of e4m3, so
nothing is lost. The stored order gives a lane four codes of a row in an order of its own, so 16 neighboring columns of
x are stored in that order, too (`fp8_quantize.in_fragment_order`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .fp8_dequantize import EXCESS, HIGH_BINADE, HIGH_TABLE, LOW_BINADE, LOW_TABLE, e2m1_e4m3
from .fp8_gemm import TILE_LAYOUT
from .persistent import advance, begin_tiles, load_padded, skip_tile, take_tile, tma_copy
from .prefill import mma_widths, store_tile

# Weight rows of one group of warps (of two), columns of a step, most tokens of a tile.
GROUP_ROWS = gl.constexpr(64)
BK = gl.constexpr(128)
TILE_ROWS = 128
BLOCK_TOKENS = 256
NUM_STAGES = 4
CODES_LAYOUT = gl.NVMMASharedLayout(128, 8, 3)
SCALES_LAYOUT = gl.NVMMASharedLayout(0, 32, 3)
"""How a step of codes and its scales are laid out in shared memory."""
_X_LAYOUT = gl.constexpr(TILE_LAYOUT)
_CODES_LAYOUT = gl.constexpr(CODES_LAYOUT)
_SCALES_LAYOUT = gl.constexpr(SCALES_LAYOUT)


@gluon.constexpr_function
def accumulator_layout(BM):
    """Accumulator of 64 weight rows and BM tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])


@gluon.constexpr_function
def operand_layout(BM):
    """The weights in registers, as the first operand of the product with `accumulator_layout(BM)`."""
    return gl.DotOperandLayout(0, accumulator_layout(BM), 4)


@gluon.constexpr_function
def codes_layout():
    """Bytes [1, 16, 128] of the codes of 64 rows and columns: a lane holds 16 neighbors."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 4, 0], [0, 8, 0]], [], [1, 16, 128])


@gluon.constexpr_function
def scales_layout():
    """int32 words [1, 2, 32] of 64 rows, as the lanes that multiply need them: those of rows g and g + 8."""
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    return gl.DistributedLinearLayout([[0, 0, 1]], lanes, [[0, 0, 16], [0, 1, 0]], [], [1, 2, 32])


@gluon.jit
def load_tile(x, codes, scales, memory, stage, phase, start, chunk, columns, STAGES: gl.constexpr,
              BM: gl.constexpr):  # fmt: skip
    """Copies all steps of one tile into the ring: of the tokens from `start` on, of the rows from `chunk` on."""
    x_smem, w_smem, s_smem, full, empty = memory[0], memory[1], memory[2], memory[3], memory[4]
    for k in range(0, columns, BK):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * 32 * 128 + 2 * 64 * 4 + BM * BK)
        tma_copy(codes, [chunk, k // 4, 0], bar, w_smem.index(stage))
        tma_copy(scales, [chunk, k // 64, 0], bar, s_smem.index(stage))
        for part in gl.static_range(BM // 64):
            tma_copy(x, [start + part * 64, k], bar, x_smem.index(stage).slice(part * 64, 64))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def producer(x, codes, scales, blocks_ptr, memory, max_blocks, tiles, columns, n_chunks, STAGES: gl.constexpr,
             ROTATE: gl.constexpr):  # fmt: skip
    """The producer warps: copy tiles to shared memory."""
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        chunk = expert * n_chunks + tile_n * 2
        if rows > 192:
            stage, phase = load_tile(x, codes, scales, memory, stage, phase, start, chunk, columns, STAGES, 256)
        elif rows > 128:
            stage, phase = load_tile(x, codes, scales, memory, stage, phase, start, chunk, columns, STAGES, 192)
        elif rows > 64:
            stage, phase = load_tile(x, codes, scales, memory, stage, phase, start, chunk, columns, STAGES, 128)
        else:
            stage, phase = load_tile(x, codes, scales, memory, stage, phase, start, chunk, columns, STAGES, 64)


@gluon.jit
def spread(table):
    """[4, 8, groups, row] with dimensions of 1 for t, words and parity."""
    return table.expand_dims(2).expand_dims(4).expand_dims(6)


@gluon.jit
def decode_half(memory, stage, HALF: gl.constexpr, WARPGROUP: gl.constexpr, DOT: gl.constexpr):
    """One group's weights of half a step, e4m3 [64, 64] in the matrix instruction's register layout."""
    packed = memory[1].index(stage).slice(WARPGROUP, 1).slice(16 * HALF, 16, dim=1).load(codes_layout())
    # [warps, g, t, groups of 32 columns, words, row g or g + 8, parity]
    packed = packed.reshape(4, 8, 4, 2, 2, 2, 2)
    L: gl.constexpr = packed.type.layout
    ROW: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(6, L)))
    words = memory[2].index(stage).slice(WARPGROUP, 1).load(scales_layout()) >> (16 * HALF)
    scale = gl.join(words & 0xFF, (words >> 8) & 0xFF).reshape(4, 8, 2, 2).permute(0, 1, 3, 2)
    scale = gl.convert_layout(scale, ROW, assert_trivial=True)
    low, _ = gl.broadcast(spread(scale * LOW_BINADE + LOW_TABLE), packed)
    high, _ = gl.broadcast(spread(scale * HIGH_BINADE + HIGH_TABLE), packed)
    a, b = e2m1_e4m3(packed, low, high, memory[9])
    w = gl.join(a, b).permute(0, 7, 1, 3, 4, 2, 5, 6).reshape(GROUP_ROWS, BK // 2)
    return gl.convert_layout(w, DOT, assert_trivial=True)


@gluon.jit
def multiply_tile(memory, stage, phase, columns, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
                  BM: gl.constexpr):  # fmt: skip
    """float32 [64, tokens], this group's weight rows times the tile's tokens: two tensors where `mma_widths` has two.

    Returns (the first, the second or 0, the next stage, its phase).
    """
    x_smem, full, empty = memory[0], memory[3], memory[4]
    FIRST: gl.constexpr = mma_widths(BM)[0]
    SECOND: gl.constexpr = mma_widths(BM)[1]
    acc = gl.zeros((GROUP_ROWS, FIRST), gl.float32, accumulator_layout(FIRST))
    acc_rest = gl.zeros((GROUP_ROWS, SECOND), gl.float32, accumulator_layout(SECOND)) if SECOND > 0 else 0
    for _ in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        for half in gl.static_range(2):
            w = decode_half(memory, stage, half, WARPGROUP, operand_layout(FIRST))
            x = x_smem.index(stage).slice(0, FIRST).slice(64 * half, 64, dim=1).permute((1, 0))
            acc = hopper.warpgroup_mma(w, x, acc, is_async=True)
            if SECOND > 0:
                w = gl.convert_layout(w, operand_layout(SECOND), assert_trivial=True)
                x = x_smem.index(stage).slice(FIRST, SECOND).slice(64 * half, 64, dim=1).permute((1, 0))
                acc_rest = hopper.warpgroup_mma(w, x, acc_rest, is_async=True)
        # With an MMA in flight at the end of an iteration, ptxas would serialize all of them.
        if SECOND > 0:
            acc, acc_rest = hopper.warpgroup_mma_wait(0, deps=(acc, acc_rest))
        else:
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return acc, acc_rest, stage, phase


@gluon.jit
def store_scaled(acc, results, by_row, by_token, slots, out_ptr, width, first, start, rows, OFFSET: gl.constexpr,
                 alpha, beta, limit, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr,
                 DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
                 HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`prefill.store_tile` of acc times the tokens' scales, at most 128 tokens at a time.

    In shared memory: by_row, float32 [4, 64], has the scales and biases of the group's rows from row 2 * WARPGROUP on;
    by_token, float32 [4, 256], the tokens' scales and router weights there.
    """
    if acc.shape[1] > 128:
        # Without moving anything between lanes.
        left, right = gl.split(acc.reshape(GROUP_ROWS, 2, 128).permute(0, 2, 1))
        store_scaled(left, results, by_row, by_token, slots, out_ptr, width, first, start, rows, OFFSET, alpha, beta,
                     limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
        store_scaled(right, results, by_row, by_token, slots, out_ptr, width, first, start, rows, OFFSET + 128, alpha,
                     beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    else:
        AT: gl.constexpr = 2 * WARPGROUP
        scales = by_token.index(AT).slice(OFFSET, acc.shape[1]).load(gl.SliceLayout(0, acc.type.layout))
        acc = acc * EXCESS * scales.expand_dims(0)
        store_tile(acc, results, by_row, by_token, slots, out_ptr, width, first, start, rows, OFFSET, alpha, beta,
                   limit, AT, AT + 1, True, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip


@gluon.jit
def compute_tile(memory, stage, phase, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns,
                 width, padded, first, start, rows, alpha, beta, limit,
                 WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr,
                 GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr,
                 BM: gl.constexpr):  # fmt: skip
    """Computes one tile and stores it."""
    FIRST: gl.constexpr = mma_widths(BM)[0]
    SECOND: gl.constexpr = mma_widths(BM)[1]
    # The epilogue's operands are loaded before the K loop, a few values per thread, and shared after it.
    factor = load_padded(row_scale_ptr + first, padded - first, GROUP_ROWS)
    if HAS_BIAS:
        bias = load_padded(bias_ptr + first, padded - first, GROUP_ROWS)
    scale = load_padded(scale_ptr + start, rows, 256)
    if ROUTER_WEIGHT:
        router = load_padded(routers_ptr + start, rows, 256)
    if DOWN:
        slot = load_padded(sorted_ptr + start, rows, 256)
    acc, acc_rest, stage, phase = multiply_tile(memory, stage, phase, columns, WARPGROUP, STAGES, BM)
    results, by_row, by_token, slots = memory[5].index(WARPGROUP), memory[6], memory[7], memory[8].index(WARPGROUP)
    by_row.index(2 * WARPGROUP).store(factor)
    by_token.index(2 * WARPGROUP).store(scale)
    if HAS_BIAS:
        by_row.index(2 * WARPGROUP + 1).store(bias)
    if ROUTER_WEIGHT:
        by_token.index(2 * WARPGROUP + 1).store(router)
    if DOWN:
        slots.store(slot)
    store_scaled(acc, results, by_row, by_token, slots, out_ptr, width, first, start, rows, 0, alpha, beta, limit,
                 WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    if SECOND > 0:
        store_scaled(acc_rest, results, by_row, by_token, slots, out_ptr, width, first, start, rows, FIRST, alpha, beta,
                     limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    return stage, phase


@gluon.jit
def consumer(memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, max_blocks,
             tiles, columns, width, n_chunks, alpha, beta, limit, WARPGROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
             ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
             HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: decodes and multiplies."""
    padded = n_chunks * 64
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = (tile_n * 2 + WARPGROUP) * GROUP_ROWS
        row_scale = row_scale_ptr + expert.to(gl.int64) * padded
        biases = bias_ptr + expert.to(gl.int64) * padded
        if first >= padded:
            stage, phase = skip_tile(memory[3], memory[4], stage, phase, columns, BK, STAGES)
        elif rows > 192:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns, width,
                padded, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED,
                ACTIVATION, HAS_LIMIT, STAGES, 256)  # fmt: skip
        elif rows > 128:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns, width,
                padded, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED,
                ACTIVATION, HAS_LIMIT, STAGES, 192)  # fmt: skip
        elif rows > 64:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns, width,
                padded, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED,
                ACTIVATION, HAS_LIMIT, STAGES, 128)  # fmt: skip
        else:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, scale_ptr, sorted_ptr, routers_ptr, columns, width,
                padded, first, start, rows, alpha, beta, limit, WARPGROUP, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED,
                ACTIVATION, HAS_LIMIT, STAGES, 64)  # fmt: skip


@gluon.jit
def allocate_ring(sixteen, DTYPE: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory: x, codes and scales of the stages, their barriers (full, empty); then, for the end of each group's
    tile, what `store_scaled` reads: results, by_row, by_token, slots; and `sixteen`. OUT: columns of a group's result.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, BK], _X_LAYOUT)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 2, 32, 128], _CODES_LAYOUT)
    s_smem = gl.allocate_shared_memory(gl.int32, [STAGES, 2, 2, 32], _SCALES_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    results = gl.allocate_shared_memory(DTYPE, [2, 128, OUT], gl.NVMMASharedLayout(OUT * 2, 16, 2))
    by_row = gl.allocate_shared_memory(gl.float32, [4, GROUP_ROWS], LINE)
    by_token = gl.allocate_shared_memory(gl.float32, [4, 256], LINE)
    slots = gl.allocate_shared_memory(gl.int32, [2, 256], LINE)
    return x_smem, w_smem, s_smem, full, empty, results, by_row, by_token, slots, sixteen


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "alpha", "beta", "limit", "sixteen"])
def product(x, codes, scales, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr, blocks_ptr,
            max_blocks, tiles, columns, width, n_chunks, alpha, beta, limit, sixteen,
            HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr,
            ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
            ROTATE: gl.constexpr):  # fmt: skip
    """One product of a layer; x [slots, columns] e4m3 in the order of sorted, scale float32 [slots] its rows' scales.

    DOWN: out[sorted[position]] = (x[position] @ w[expert].T + bias[expert]) * router weight, out 16-bit [slots, width];
    else out[position] = activation(x[position] @ w[expert].T + bias[expert]), [slots, width] too.
    x: descriptor, boxes [64, 128]; codes, scales: descriptors, boxes [2, 32, 128] and [2, 2, 32], of all experts' codes
    and scales (`PackedMatrix`) as lines of 128 bytes; row_scale, bias: its other tensors. sorted, routers, blocks,
    max_blocks: `prefill_route.place_slots` with blocks of 256. tiles: 128 rows of an expert each. ROUTER_WEIGHT: router
    weights multiply in this product. sixteen: `dequantize.e4m3_bf16_imul`. A one-dimensional grid of any size, of 4
    warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    memory = allocate_ring(sixteen, out_ptr.dtype.element_ty, GROUP_ROWS // 2 if GATED else GROUP_ROWS, STAGES)
    gl.warp_specialize(
        [
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr,
                        max_blocks, tiles, columns, width, n_chunks, alpha, beta, limit, 0, HAS_BIAS, ROUTER_WEIGHT,
                        DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE)),
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, scale_ptr, sorted_ptr, routers_ptr,
                        max_blocks, tiles, columns, width, n_chunks, alpha, beta, limit, 1, HAS_BIAS, ROUTER_WEIGHT,
                        DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE)),
            (producer, (x, codes, scales, blocks_ptr, memory, max_blocks, tiles, columns, n_chunks, STAGES, ROTATE)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
