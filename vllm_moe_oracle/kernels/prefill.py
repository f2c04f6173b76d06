"""The GEMMs of a fused MoE layer for many tokens: persistent, warp-specialized kernels in Gluon.

They read the stored weights of `gemm.py` and do the same arithmetic, but are built for layers whose bottleneck is the
matrix unit. One program runs on each multiprocessor and computes one tile after the other: 256 weight rows and up to 128
tokens, in steps of 32. Four producer warps copy rows of x, codes and scales to shared memory, `STAGES` steps of 64
columns ahead and across tiles. Two consumer groups of four warps multiply 128 weight rows each. The groups are not
synchronized: one dequantizes or stores its tile while the matrix unit works for the other. The copy engine copies codes
and h, which costs the producer warps few instructions.

Blocks of more than 64 tokens and smaller blocks are two lists, each ordered by expert. Every program gets a share of
both and merges them in the order of experts. So programs end together, and an expert's weights are read once.

`h` is kept in the order of `sorted` (slots by expert), so the second GEMM reads contiguous rows. It writes its result
in the order of slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dequantize import (
    decode_codes,
    decode_group_values,
    decode_mx_scales,
    e2m1_bf16_imul,
    e2m1_fp16_imul,
    e4m3_bf16_imul,
    e4m3_fp16_imul,
    fma_bf16x2,
    scale_and_add_zero,
    scaled_midpoints,
    to_fragments_4bit,
    to_fragments_8bit,
)
from .epilogue import activate, activate_ungated
from .persistent import advance, begin_tiles, load_padded, skip_tile, take_tile, tma_copy

# Gluon's copy has another name in newer releases.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Weight rows of one group of warps (of two), columns of a step.
GROUP_ROWS = gl.constexpr(128)
BK = gl.constexpr(64)


@gluon.constexpr_function
def chunks_per_step(FORMAT):
    """Chunks of columns in a step."""
    return 1 if FORMAT in ("int4", "mxfp4") else 2


@gluon.constexpr_function
def scales_per_step(FORMAT, GROUP):
    """(scales of a row in a step, int32 words of 16 rows and one scale): (0, 0) without scales."""
    if FORMAT in ("mxfp4", "mxfp8"):
        return 1, 16
    return (max(1, 64 // GROUP), 8) if GROUP else (0, 0)


@gluon.constexpr_function
def codes_layout(chunks):
    """Bytes [2, chunks * 16, 128] of codes, two chunks of rows: a lane holds its 16 bytes of every chunk."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    if chunks == 2:
        registers = [*registers, [0, 16, 0]]
    registers = [*registers, [1, 0, 0]]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 4, 0], [0, 8, 0]], [], [2, chunks * 16, 128])


@gluon.constexpr_function
def scales_layout(groups, words):
    """int32 words [2, groups, 4, words] of 128 rows, as the lanes that multiply need them."""
    registers = ([[0, 0, 0, 1]] if words == 16 else []) + ([[0, 1, 0, 0]] if groups == 2 else []) + [[1, 0, 0, 0]]
    first = 2 if words == 16 else 1
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], *([0, 0, 0, first << i] for i in range(3))]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 1, 0], [0, 0, 2, 0]], [], [2, groups, 4, words])


@gluon.constexpr_function
def scales_copy_layout(groups, words):
    """int32 words [4, groups, 4, words] of 256 rows, 16 bytes a lane, once each."""
    dimensions = [[0, 0, 0, 4 << i] for i in range(2 if words == 16 else 1)]
    dimensions += [[0, 0, 1, 0], [0, 0, 2, 0]]
    dimensions += [[0, 1, 0, 0]] if groups == 2 else []
    dimensions += [[1, 0, 0, 0], [2, 0, 0, 0]]
    dimensions += [[0, 0, 0, 0]] * (7 - len(dimensions))
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]]
    return gl.DistributedLinearLayout(registers, dimensions[:5], dimensions[5:], [], [4, groups, 4, words])


@gluon.constexpr_function
def mma_widths(BM):
    """The widths, powers of two, of the one or two products that a block of BM tokens takes; 0 for no second one."""
    first = 1 << (BM.bit_length() - 1)
    return first, BM - first


@gluon.jit
def load_tile(x, rows_ptr, codes, s_ptr, z_ptr, memory, stage, phase, start, rows, first_line, first_chunk, x_stride,
              columns, n_chunks, GATHER: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr,
              GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    """Copies all steps of one tile into the ring; s and z point to the expert's tensors."""
    x_smem, w_smem, s_smem, z_smem, full, empty, _, _, _, _ = memory
    FIRST: gl.constexpr = mma_widths(BM)[0]
    SECOND: gl.constexpr = mma_widths(BM)[1]
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    KC: gl.constexpr = chunks_per_step(FORMAT)
    COUNT: gl.constexpr = scales_per_step(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_per_step(FORMAT, GROUP)[1]
    if GATHER:
        x_ptrs = row_pointers(x, rows_ptr, start, rows, x_stride, 0, FIRST, TOP_K, X)
        if SECOND > 0:
            x_more = row_pointers(x, rows_ptr, start, rows, x_stride, FIRST, SECOND, TOP_K, X)
    if COUNT > 0:
        S: gl.constexpr = scales_copy_layout(COUNT, WORDS)
        s_chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, S))))
        s_chunk = gl.minimum(first_chunk + s_chunk, n_chunks - 1).expand_dims(1).expand_dims(2).expand_dims(3)
        s_group = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, S))))
        s_group = s_group.expand_dims(0).expand_dims(2).expand_dims(3)
        s_warp = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, S))))
        s_warp = s_warp.expand_dims(0).expand_dims(1).expand_dims(3)
        s_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, S))))
        s_word = s_word.expand_dims(0).expand_dims(1).expand_dims(2)
        PER: gl.constexpr = 128 if WORDS == 16 else GROUP  # columns of one word
        per_row = (columns + PER - 1) // PER * (4 * WORDS)
        s_offsets = s_chunk * per_row + (s_group * (4 * WORDS) + s_warp * WORDS + s_word)
    for k in range(0, columns, BK):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), 4 * KC * 2048 + (0 if GATHER else BM * BK * 2))
        tma_copy(codes, [first_line, k // BK * (KC * 16), 0], full.index(stage), w_smem.index(stage))
        if GATHER:
            cp_async(x_smem.index(stage).slice(0, FIRST), x_ptrs)
            x_ptrs += BK
            if SECOND > 0:
                cp_async(x_smem.index(stage).slice(FIRST, SECOND), x_more)
                x_more += BK
        else:
            for part in gl.static_range(BM // 32):
                to = x_smem.index(stage).slice(part * 32, 32)
                tma_copy(x, [start + part * 32, k], full.index(stage), to)
        if COUNT > 0:
            at = k // PER * (4 * WORDS)
            cp_async(s_smem.index(stage), s_ptr + (s_offsets + at))
            if HAS_ZERO:
                cp_async(z_smem.index(stage), z_ptr + (s_offsets + at))
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def row_pointers(x_ptr, rows_ptr, start, rows, x_stride, offset, COUNT: gl.constexpr, TOP_K: gl.constexpr,
                 X: gl.constexpr):  # fmt: skip
    """Pointers [COUNT, 64] to the first columns of the rows at positions start + offset and after."""
    i = offset + gl.arange(0, COUNT, layout=gl.SliceLayout(1, X))
    position = start + gl.minimum(i, rows - 1)  # rows that do not exist repeat the last one
    row = gl.load(rows_ptr + position) // TOP_K
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, X))
    return x_ptr + row.to(gl.int64).expand_dims(1) * x_stride + column.expand_dims(0)


@gluon.jit
def producer(x, rows_ptr, blocks_ptr, codes, s_ptr, z_ptr, memory, max_blocks, tiles, begin, x_stride, columns,
             n_chunks, s_stride, GATHER: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
             HAS_ZERO: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr):  # fmt: skip
    """The producer warps: copy tiles to shared memory."""
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        e64 = expert.to(gl.int64)
        scales = s_ptr + e64 * s_stride
        zeros = z_ptr + e64 * s_stride
        first = (begin + tile_n) * (GROUP_ROWS * 2 // 64)
        if rows > 96:
            stage, phase = load_tile(
                x, rows_ptr, codes, scales, zeros, memory, stage, phase, start, rows, expert * n_chunks + first, first,
                x_stride, columns, n_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, 128)  # fmt: skip
        elif rows > 64:
            stage, phase = load_tile(
                x, rows_ptr, codes, scales, zeros, memory, stage, phase, start, rows, expert * n_chunks + first, first,
                x_stride, columns, n_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, 96)  # fmt: skip
        elif rows > 32:
            stage, phase = load_tile(
                x, rows_ptr, codes, scales, zeros, memory, stage, phase, start, rows, expert * n_chunks + first, first,
                x_stride, columns, n_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, 64)  # fmt: skip
        else:
            stage, phase = load_tile(
                x, rows_ptr, codes, scales, zeros, memory, stage, phase, start, rows, expert * n_chunks + first, first,
                x_stride, columns, n_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, 32)  # fmt: skip


@gluon.jit
def dequantize_step(memory, stage, k, WARPGROUP: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
                    HAS_ZERO: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """One group's weights of one step, 16-bit [128, 64] in the matrix instruction's register layout."""
    x_smem, w_smem, s_smem, z_smem = memory[0], memory[1], memory[2], memory[3]
    FP16: gl.constexpr = x_smem.dtype == gl.float16
    KC: gl.constexpr = chunks_per_step(FORMAT)
    COUNT: gl.constexpr = scales_per_step(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_per_step(FORMAT, GROUP)[1]
    MX: gl.constexpr = FORMAT == "mxfp4" or FORMAT == "mxfp8"
    REBASED: gl.constexpr = not MX and GROUP > 0 and not HAS_ZERO and not FP16
    packed = w_smem.index(stage).slice(2 * WARPGROUP, 2).load(codes_layout(KC)).reshape(2, KC, 4, 512)
    if FORMAT == "mxfp8" and FP16:
        w = to_fragments_8bit(e4m3_fp16_imul(packed, memory[9]), 2, KC)
    elif FORMAT == "mxfp8":
        w = to_fragments_8bit(e4m3_bf16_imul(packed, memory[9]), 2, KC)
    elif FORMAT == "mxfp4" and FP16:
        a, b = e2m1_fp16_imul(packed, memory[9])
        w = to_fragments_4bit(a, b, 2, KC)
    elif FORMAT == "mxfp4":
        a, b = e2m1_bf16_imul(packed, memory[9])
        w = to_fragments_4bit(a, b, 2, KC)
    else:
        w = decode_codes(packed, FORMAT, FP16, HAS_ZERO, REBASED, 2, KC)
    w = gl.convert_layout(w, DOT, assert_trivial=True)
    if COUNT > 0:
        words = s_smem.index(stage).slice(2 * WARPGROUP, 2).load(scales_layout(COUNT, WORDS))
        if MX:
            N_SCALES: gl.constexpr = 2
            scale = decode_mx_scales(words >> (k % 128 // 4), FP16, 2, 1, 2)
        else:
            N_SCALES: gl.constexpr = COUNT
            scale = decode_group_values(words, FP16, 2, COUNT)
        w3 = w.reshape(GROUP_ROWS, N_SCALES, BK // N_SCALES)
        L3: gl.constexpr = w3.type.layout
        ROW: gl.constexpr = gl.SliceLayout(2, L3)
        scale = gl.convert_layout(scale, ROW, assert_trivial=True).expand_dims(2)
        if REBASED:
            offset = decode_group_values(scaled_midpoints(words, FORMAT), FP16, 2, COUNT)
            offset = gl.convert_layout(offset, ROW, assert_trivial=True).expand_dims(2)
            w3, scale = gl.broadcast(w3, scale)
            w3, offset = gl.broadcast(w3, offset)
            w3 = fma_bf16x2(w3, scale, offset)
        else:
            if HAS_ZERO:
                zeros = z_smem.index(stage).slice(2 * WARPGROUP, 2).load(scales_layout(COUNT, WORDS))
                zero = decode_group_values(zeros, FP16, 2, COUNT)
                zero = gl.convert_layout(zero, ROW, assert_trivial=True).expand_dims(2)
                w3, zero = gl.broadcast(w3, zero)
                w3 = w3 - zero if FP16 else scale_and_add_zero(w3, zero)
            w3 = w3 * scale
        w = gl.convert_layout(w3.reshape(GROUP_ROWS, BK), DOT, assert_trivial=True)
    return w


@gluon.constexpr_function
def accumulator_layout(BM):
    """Accumulator of 128 weight rows and BM tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])


@gluon.constexpr_function
def operand_layout(BM):
    """The weights in registers, as the first operand of the product with `accumulator_layout(BM)`."""
    return gl.DotOperandLayout(0, accumulator_layout(BM), 2)


@gluon.jit
def multiply_tile(memory, stage, phase, columns, WARPGROUP: gl.constexpr, FORMAT: gl.constexpr,
                  GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    """float32 [128, tokens], this group's weight rows times the tile's tokens: two tensors where `mma_widths` has two.

    Returns (the first, the second or 0, the next stage, its phase).
    """
    x_smem, full, empty = memory[0], memory[4], memory[5]
    FIRST: gl.constexpr = mma_widths(BM)[0]
    SECOND: gl.constexpr = mma_widths(BM)[1]
    acc = gl.zeros((GROUP_ROWS, FIRST), gl.float32, accumulator_layout(FIRST))
    acc_rest = gl.zeros((GROUP_ROWS, SECOND), gl.float32, accumulator_layout(SECOND)) if SECOND > 0 else 0
    for k in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        w = dequantize_step(memory, stage, k, WARPGROUP, FORMAT, GROUP, HAS_ZERO, operand_layout(FIRST))
        x = x_smem.index(stage).slice(0, FIRST).permute((1, 0))
        acc = hopper.warpgroup_mma(w, x, acc, is_async=True)
        # With an MMA in flight at the end of an iteration, ptxas would serialize all of them.
        if SECOND > 0:
            w = gl.convert_layout(w, operand_layout(SECOND), assert_trivial=True)
            x = x_smem.index(stage).slice(FIRST, SECOND).permute((1, 0))
            acc_rest = hopper.warpgroup_mma(w, x, acc_rest, is_async=True)
            acc, acc_rest = hopper.warpgroup_mma_wait(0, deps=(acc, acc_rest))
        else:
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return acc, acc_rest, stage, phase


@gluon.jit
def load_addend(addend_ptr, results, slots, stride, first, width, rows, offset, BM: gl.constexpr, STORE: gl.constexpr,
                TO: gl.constexpr):  # fmt: skip
    """float32 [OUT, BM] in layout TO: the addend's columns from `first` on, of the block's slots from `offset` on.

    It takes the way of the tile's results through shared memory, the other way around (see `store_tile`): a lane loads
    neighboring columns of one slot, in layout STORE, and keeps few pointers.
    """
    i = offset + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
    slot = slots.slice(offset, BM).load(gl.SliceLayout(1, STORE))
    column = first + gl.arange(0, results.shape[1], layout=gl.SliceLayout(0, STORE)).expand_dims(0)
    ptrs = addend_ptr + slot.to(gl.int64).expand_dims(1) * stride + column
    staged = results.slice(0, BM)
    staged.store(gl.load(ptrs, mask=(i < rows).expand_dims(1) & (column < width), other=0.0))
    return staged.permute((1, 0)).load(TO).to(gl.float32)


@gluon.jit
def store_tile(acc, results, by_row, by_token, slots, out_ptr, width, first, start, rows, offset, alpha, beta, limit,
               AT: gl.constexpr, ROUTER_AT: gl.constexpr, HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr,
               ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
               HAS_LIMIT: gl.constexpr, addend_ptr=None, slot_out_ptr=None):  # fmt: skip
    """Epilogue of acc, float32 [R, BM]: the weight rows from `first` on, the block's tokens from `offset` on.

    ROUTER_WEIGHT: router weights multiply, after the bias if DOWN, else before it. DOWN: rows of out are slots, else
    positions. In shared memory: by_row, float32 [., R], has the rows' scales and biases from row AT on; by_token, float32
    [., tokens of a block], the router weights in row ROUTER_AT; slots, int32, the block's slots; results, 16-bit [128,
    OUT], transposes the tile between the lanes, so that a lane stores neighboring columns of one token. addend: as in
    `epilogue.store_activated`; the rows then go to slot_out, too, which has them in the order of slots.
    """
    R: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    MMA: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    OUT: gl.constexpr = R // 2 if GATED else R
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUT, OUT // 8], [4, 1], [1, 0])
    if HAS_ROW_SCALE:
        acc = acc * by_row.index(AT).load(gl.SliceLayout(1, MMA)).expand_dims(1)
    if ROUTER_WEIGHT:
        router = by_token.index(ROUTER_AT).slice(offset, BM).load(gl.SliceLayout(0, MMA)).expand_dims(0)
    if ROUTER_WEIGHT and not DOWN:
        acc = acc * router
    if HAS_BIAS:
        acc = acc + by_row.index(AT + 1).load(gl.SliceLayout(1, MMA)).expand_dims(1)
    if ROUTER_WEIGHT and DOWN:
        acc = acc * router
    if GATED:
        gate, up = gl.split(acc.reshape(R // 16, 2, 8, BM).permute(0, 2, 3, 1))
        if addend_ptr is not None:
            gate, up = gate.reshape(OUT, BM), up.reshape(OUT, BM)
            H: gl.constexpr = gate.type.layout
            at = first // 2
            gate += load_addend(addend_ptr, results, slots, 2 * width, at, width, rows, offset, BM, STORE, H)
            up += load_addend(addend_ptr + width, results, slots, 2 * width, at, width, rows, offset, BM, STORE, H)
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(DTYPE).reshape(OUT, BM)
        first = first // 2
    elif not DOWN:
        if addend_ptr is not None:
            acc += load_addend(addend_ptr, results, slots, width, first, width, rows, offset, BM, STORE, MMA)
        value = activate_ungated(acc, ACTIVATION).to(DTYPE)
    else:
        value = acc.to(DTYPE)
    staged = results.slice(0, BM)
    staged.store(value.permute((1, 0)))
    value = staged.load(STORE)
    i = offset + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
    row = slots.slice(offset, BM).load(gl.SliceLayout(1, STORE)) if DOWN else start + i
    column = first + gl.arange(0, OUT, layout=gl.SliceLayout(0, STORE)).expand_dims(0)
    ptrs = out_ptr + row.to(gl.int64).expand_dims(1) * width + column
    gl.store(ptrs, value, mask=(i < rows).expand_dims(1) & (column < width))
    if addend_ptr is not None:
        slot = slots.slice(offset, BM).load(gl.SliceLayout(1, STORE))
        slot_ptrs = slot_out_ptr + slot.to(gl.int64).expand_dims(1) * width + column
        gl.store(slot_ptrs, value, mask=(i < rows).expand_dims(1) & (column < width))


@gluon.jit
def compute_tile(memory, stage, phase, row_scale_ptr, bias_ptr, out_ptr, sorted_ptr, routers_ptr, columns, width,
                 padded, first, start, rows, alpha, beta, limit,
                 WARPGROUP: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
                 HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr,
                 GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr,
                 BM: gl.constexpr, addend_ptr=None, slot_out_ptr=None):  # fmt: skip
    """Computes one tile and stores it."""
    FIRST: gl.constexpr = mma_widths(BM)[0]
    SECOND: gl.constexpr = mma_widths(BM)[1]
    # The epilogue's operands are loaded before the K loop, one value per thread, and shared after it.
    if HAS_ROW_SCALE:
        factor = load_padded(row_scale_ptr + first, padded - first, 128)
    if HAS_BIAS:
        bias = load_padded(bias_ptr + first, padded - first, 128)
    if ROUTER_WEIGHT:
        router = load_padded(routers_ptr + start, rows, 128)
    if DOWN or addend_ptr is not None:
        slot = load_padded(sorted_ptr + start, rows, 128)
    acc, acc_rest, stage, phase = multiply_tile(memory, stage, phase, columns, WARPGROUP, FORMAT, GROUP, HAS_ZERO,
                                                STAGES, BM)  # fmt: skip
    results = memory[6].index(WARPGROUP)
    values = memory[7]
    AT: gl.constexpr = WARPGROUP * 3
    slots = memory[8].index(WARPGROUP)
    if HAS_ROW_SCALE:
        values.index(AT).store(factor)
    if HAS_BIAS:
        values.index(AT + 1).store(bias)
    if ROUTER_WEIGHT:
        values.index(AT + 2).store(router)
    if DOWN or addend_ptr is not None:
        slots.store(slot)
    store_tile(acc, results, values, values, slots, out_ptr, width, first, start, rows, 0, alpha, beta, limit,
               AT, AT + 2, HAS_ROW_SCALE, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, addend_ptr,
               slot_out_ptr)  # fmt: skip
    if SECOND > 0:
        store_tile(acc_rest, results, values, values, slots, out_ptr, width, first, start, rows, FIRST, alpha, beta, limit,
                   AT, AT + 2, HAS_ROW_SCALE, HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, addend_ptr,
                   slot_out_ptr)  # fmt: skip
    return stage, phase


@gluon.jit
def consumer(memory, blocks_ptr, row_scale_ptr, bias_ptr, out_ptr, sorted_ptr, routers_ptr, max_blocks, tiles, begin,
             columns, width, n_chunks, alpha, beta, limit,
             WARPGROUP: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
             HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, ROUTER_WEIGHT: gl.constexpr, DOWN: gl.constexpr,
             GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr,
             ROTATE: gl.constexpr, addend_ptr=None, slot_out_ptr=None):  # fmt: skip
    """A consumer warpgroup: dequantizes and multiplies."""
    padded = n_chunks * 64
    stage = 0
    phase = 0
    share, cursor = begin_tiles(blocks_ptr, max_blocks, tiles, ROTATE)
    for _ in range(0, share[0] + share[1]):
        expert, start, rows, tile_n, cursor = take_tile(blocks_ptr, max_blocks, tiles, share, cursor, ROTATE)
        first = ((begin + tile_n) * 2 + WARPGROUP) * GROUP_ROWS
        row_scale = row_scale_ptr + expert.to(gl.int64) * padded
        biases = bias_ptr + expert.to(gl.int64) * padded
        if first >= padded:
            stage, phase = skip_tile(memory[4], memory[5], stage, phase, columns, BK, STAGES)
        elif rows > 96:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, sorted_ptr, routers_ptr, columns, width, padded,
                first, start, rows, alpha, beta, limit, WARPGROUP, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 128, addend_ptr,
                slot_out_ptr)  # fmt: skip
        elif rows > 64:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, sorted_ptr, routers_ptr, columns, width, padded,
                first, start, rows, alpha, beta, limit, WARPGROUP, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 96, addend_ptr,
                slot_out_ptr)  # fmt: skip
        elif rows > 32:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, sorted_ptr, routers_ptr, columns, width, padded,
                first, start, rows, alpha, beta, limit, WARPGROUP, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 64, addend_ptr,
                slot_out_ptr)  # fmt: skip
        else:
            stage, phase = compute_tile(
                memory, stage, phase, row_scale, biases, out_ptr, sorted_ptr, routers_ptr, columns, width, padded,
                first, start, rows, alpha, beta, limit, WARPGROUP, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, ROUTER_WEIGHT, DOWN, GATED, ACTIVATION, HAS_LIMIT, STAGES, 32, addend_ptr,
                slot_out_ptr)  # fmt: skip


@gluon.jit
def allocate_ring(sixteen, DTYPE: gl.constexpr, OUT: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
                  HAS_ZERO: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Shared memory: x, codes, scales, zero points of the stages, their barriers (full, empty); then, for the end of
    each group's tile, results, values, slots (`store_tile`); and `sixteen`. OUT: columns of one group's result.
    """
    KC: gl.constexpr = chunks_per_step(FORMAT)
    COUNT: gl.constexpr = scales_per_step(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_per_step(FORMAT, GROUP)[1]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 128, BK], SWIZZLED)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 4, KC * 16, 128], gl.NVMMASharedLayout(128, 8, 3))
    s_smem = x_smem
    if COUNT > 0:
        s_smem = gl.allocate_shared_memory(gl.int32, [STAGES, 4, COUNT, 4, WORDS], PLAIN)
    z_smem = s_smem
    if HAS_ZERO and COUNT > 0:
        z_smem = gl.allocate_shared_memory(gl.int32, [STAGES, 4, COUNT, 4, WORDS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    results = gl.allocate_shared_memory(DTYPE, [2, 128, OUT], SWIZZLED)
    values = gl.allocate_shared_memory(gl.float32, [6, 128], LINE)
    slots = gl.allocate_shared_memory(gl.int32, [2, 128], LINE)
    return x_smem, w_smem, s_smem, z_smem, full, empty, results, values, slots, sixteen


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "alpha", "beta", "limit", "sixteen"])
def gate_up(x_ptr, codes, s_ptr, z_ptr, row_scale_ptr, bias_ptr, h_ptr, sorted_ptr, routers_ptr, blocks_ptr, max_blocks,
            tiles, x_stride, columns, inner, n_chunks, s_stride, alpha, beta, limit, sixteen,
            TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
            HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
            HAS_LIMIT: gl.constexpr, WEIGHT_INPUT: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr,
            ROTATE: gl.constexpr, addend_ptr=None, slot_h_ptr=None):  # fmt: skip
    """h[position] = activation(x[sorted[position] // TOP_K] @ w13[expert].T + b13[expert]).

    x [tokens, columns] 16-bit, rows aligned to 16 bytes, x_stride elements apart, columns a multiple of 64; h [slots,
    inner] of x's dtype, in the order of sorted. codes: descriptor, boxes [4, 16 * chunks of a step, 128], of all
    experts' codes (`PackedMatrix`) as lines of 128 bytes; s, z, row_scale, bias: its other tensors, s_stride the int32
    words per expert of s and z. sorted, routers, blocks, max_blocks: `prefill_route.place_slots`. tiles: 256 rows of
    w13 each. WEIGHT_INPUT: router weights multiply the input. ROTATE: `partition_tiles`. sixteen: `e4m3_bf16_imul`. A
    one-dimensional grid of any size, of 4 warps. addend: `store_tile`; slot_h [slots, inner]: h in the order of slots.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    memory = allocate_ring(
        sixteen, x_ptr.dtype.element_ty, GROUP_ROWS // 2 if GATED else GROUP_ROWS, FORMAT, GROUP, HAS_ZERO, STAGES
    )
    gl.warp_specialize(
        [
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, h_ptr, sorted_ptr, routers_ptr, max_blocks, tiles,
                        0, columns, inner, n_chunks, alpha, beta, limit, 0, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                        HAS_BIAS, WEIGHT_INPUT, False, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE, addend_ptr,
                        slot_h_ptr)),
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, h_ptr, sorted_ptr, routers_ptr, max_blocks, tiles,
                        0, columns, inner, n_chunks, alpha, beta, limit, 1, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                        HAS_BIAS, WEIGHT_INPUT, False, GATED, ACTIVATION, HAS_LIMIT, STAGES, ROTATE, addend_ptr,
                        slot_h_ptr)),
            (producer, (x_ptr, sorted_ptr, blocks_ptr, codes, s_ptr, z_ptr, memory, max_blocks, tiles, 0, x_stride,
                        columns, n_chunks, s_stride, True, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, ROTATE)),
        ],
        [4, 4],
        [208, 80],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["max_blocks", "tiles", "begin", "sixteen"])
def down(h, codes, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, blocks_ptr, max_blocks,
         tiles, begin, columns, hidden, n_chunks, s_stride, sixteen,
         TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
         HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHT_INPUT: gl.constexpr, PDL: gl.constexpr,
         STAGES: gl.constexpr, ROTATE: gl.constexpr):  # fmt: skip
    """partial[sorted[position]] = (h[position] @ w2[expert].T + b2[expert]) * router weight.

    h [slots, columns] in the order of sorted: descriptor, boxes [32, 64]; partial [slots, hidden]; both 16-bit. Columns
    are a multiple of 64, or, where no groups of 32 integers have scales, of 32: what is copied beyond them is 0.
    begin: the first of `tiles`. WEIGHT_INPUT: router weights were applied to the input. The rest as in `gate_up`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    memory = allocate_ring(sixteen, partial_ptr.dtype.element_ty, GROUP_ROWS, FORMAT, GROUP, HAS_ZERO, STAGES)
    gl.warp_specialize(
        [
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, max_blocks,
                        tiles, begin, columns, hidden, n_chunks, 0.0, 0.0, 0.0, 0, FORMAT, GROUP, HAS_ZERO,
                        HAS_ROW_SCALE, HAS_BIAS, not WEIGHT_INPUT, True, False, "", False, STAGES, ROTATE)),
            (consumer, (memory, blocks_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, max_blocks,
                        tiles, begin, columns, hidden, n_chunks, 0.0, 0.0, 0.0, 1, FORMAT, GROUP, HAS_ZERO,
                        HAS_ROW_SCALE, HAS_BIAS, not WEIGHT_INPUT, True, False, "", False, STAGES, ROTATE)),
            (producer, (h, sorted_ptr, blocks_ptr, codes, s_ptr, z_ptr, memory, max_blocks, tiles, begin, columns,
                        columns, n_chunks, s_stride, False, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES, ROTATE)),
        ],
        [4, 4],
        [208, 32],
    )  # fmt: skip
