"""The GEMMs of a fused MoE layer with MXFP4 weights on fp8 tensor cores: persistent, warp-specialized kernels in Gluon.

They read the stored weights of `gemm.py`, four bits each. One program runs on each multiprocessor and computes one tile
after the other: 128 weight rows and up to 256 tokens, in steps of 128 columns. Four producer warps ask for steps,
`STAGES` ahead and across tiles. Two consumer groups of four warps multiply 64 weight rows each. They decode weights to
e4m3 in registers (`dequantize.e2m1_e4m3`), half a step at a time: the second half while the matrix unit has the first.
Decoding is what limits these kernels, so a tile has as many tokens as the accumulator can hold.

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

from .dequantize import e2m1_e4m3
from .epilogue import activate, activate_ungated
from .fp8_gemm import TILE_LAYOUT
from .persistent import advance, begin_tiles, load_padded, skip_tile, take_tile, tma_copy

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

# e4m3 of the magnitudes of e2m1 codes 0 to 3 and 4 to 7 under the largest scale, stored as 254, and what one binade
# changes: the exponents of all but zero. As signed words, less the change of 254 binades.
_BINADE = (0x08080800, 0x08080808)
_TABLE = (0x6C686000, 0x7C787470)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


_LOW_TABLE = gl.constexpr(_signed(_TABLE[0] - 254 * _BINADE[0]))
_HIGH_TABLE = gl.constexpr(_signed(_TABLE[1] - 254 * _BINADE[1]))
_LOW_BINADE = gl.constexpr(_BINADE[0])
_HIGH_BINADE = gl.constexpr(_BINADE[1])
# What decoded weights exceed those of `PackedMatrix.row_scale` by: there 254 stands for 2, here for 64.
_EXCESS = gl.constexpr(2.0**-5)


@gluon.constexpr_function
def accumulator_layout(BM):
    """Accumulator of 64 weight rows and BM tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])


@gluon.constexpr_function
def operand_layout(BM):
    """The weights in registers, as the first operand of the product with `accumulator_layout(BM)`."""
    return gl.DotOperandLayout(0, accumulator_layout(BM), 4)


@gluon.constexpr_function
def mma_widths(BM):
    """The widths, powers of two, of the one or two products that a block of BM tokens takes; 0 for no second one."""
    return (128, 64) if BM == 192 else (BM, 0)


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
    low, _ = gl.broadcast(spread(scale * _LOW_BINADE + _LOW_TABLE), packed)
    high, _ = gl.broadcast(spread(scale * _HIGH_BINADE + _HIGH_TABLE), packed)
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
def store_tile(acc, scales, results, values, slots, out_ptr, width, first, start, rows, OFFSET: gl.constexpr, alpha,
               beta, limit, AT: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr,
               GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr):  # fmt: skip
    """Epilogue of acc, float32 [64, BM]: the weight rows from `first` on, the block's tokens from OFFSET on.

    ROUTER_WEIGHT: router weights multiply, after the bias if DOWN, else before it. DOWN: rows of out are slots, else
    positions. In shared memory: values, float32 [6, 256], has the rows' scales and biases and the block's router
    weights from row AT on; scales, float32 [256], the tokens' scales; slots, int32 [256], their slots; results, 16-bit
    [128, OUT], transposes the tile between the lanes, so that a lane stores neighboring columns of one token.
    """
    BM: gl.constexpr = acc.shape[1]
    MMA: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    OUT: gl.constexpr = GROUP_ROWS // 2 if GATED else GROUP_ROWS
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUT, OUT // 8], [4, 1], [1, 0])
    acc = acc * _EXCESS * scales.slice(OFFSET, BM).load(gl.SliceLayout(0, MMA)).expand_dims(0)
    acc = acc * values.index(AT).slice(0, GROUP_ROWS).load(gl.SliceLayout(1, MMA)).expand_dims(1)
    if ROUTER_WEIGHT:
        router = values.index(AT + 2).slice(OFFSET, BM).load(gl.SliceLayout(0, MMA)).expand_dims(0)
    if ROUTER_WEIGHT and not DOWN:
        acc = acc * router
    if HAS_BIAS:
        acc = acc + values.index(AT + 1).slice(0, GROUP_ROWS).load(gl.SliceLayout(1, MMA)).expand_dims(1)
    if ROUTER_WEIGHT and DOWN:
        acc = acc * router
    if GATED:
        gate, up = gl.split(acc.reshape(GROUP_ROWS // 16, 2, 8, BM).permute(0, 2, 3, 1))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(DTYPE).reshape(OUT, BM)
        first = first // 2
    elif not DOWN:
        value = activate_ungated(acc, ACTIVATION).to(DTYPE)
    else:
        value = acc.to(DTYPE)
    staged = results.slice(0, BM)
    staged.store(value.permute((1, 0)))
    value = staged.load(STORE)
    i = OFFSET + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
    row = slots.slice(OFFSET, BM).load(gl.SliceLayout(1, STORE)) if DOWN else start + i
    column = first + gl.arange(0, OUT, layout=gl.SliceLayout(0, STORE)).expand_dims(0)
    ptrs = out_ptr + row.to(gl.int64).expand_dims(1) * width + column
    gl.store(ptrs, value, mask=(i < rows).expand_dims(1) & (column < width))


@gluon.jit
def store_parts(acc, scales, results, values, slots, out_ptr, width, first, start, rows, OFFSET: gl.constexpr, alpha,
                beta, limit, AT: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr,
                GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr):  # fmt: skip
    """`store_tile` for at most 128 tokens at a time, without moving anything between lanes."""
    if acc.shape[1] > 128:
        left, right = gl.split(acc.reshape(GROUP_ROWS, 2, 128).permute(0, 2, 1))
        store_tile(left, scales, results, values, slots, out_ptr, width, first, start, rows, OFFSET, alpha, beta,
                   limit, AT, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
        store_tile(right, scales, results, values, slots, out_ptr, width, first, start, rows, OFFSET + 128, alpha,
                   beta, limit, AT, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    else:
        store_tile(acc, scales, results, values, slots, out_ptr, width, first, start, rows, OFFSET, alpha, beta, limit,
                   AT, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip


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
    results, values, slots = memory[5].index(WARPGROUP), memory[6], memory[7].index(WARPGROUP)
    scales = memory[8].index(WARPGROUP)
    AT: gl.constexpr = WARPGROUP * 3
    values.index(AT).slice(0, GROUP_ROWS).store(factor)
    scales.store(scale)
    if HAS_BIAS:
        values.index(AT + 1).slice(0, GROUP_ROWS).store(bias)
    if ROUTER_WEIGHT:
        values.index(AT + 2).store(router)
    if DOWN:
        slots.store(slot)
    store_parts(acc, scales, results, values, slots, out_ptr, width, first, start, rows, 0, alpha, beta, limit, AT,
                HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
    if SECOND > 0:
        store_parts(acc_rest, scales, results, values, slots, out_ptr, width, first, start, rows, FIRST, alpha, beta,
                    limit, AT, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT)  # fmt: skip
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
    tile, what `store_tile` reads: results, values, slots and the tokens' scales; and `sixteen`. OUT: columns of one
    group's result.
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
    values = gl.allocate_shared_memory(gl.float32, [6, 256], LINE)
    slots = gl.allocate_shared_memory(gl.int32, [2, 256], LINE)
    scales = gl.allocate_shared_memory(gl.float32, [2, 256], LINE)
    return x_smem, w_smem, s_smem, full, empty, results, values, slots, scales, sixteen


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
