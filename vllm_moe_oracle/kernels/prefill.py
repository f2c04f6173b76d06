"""The two products of a fused MoE layer for many tokens: persistent, warp-specialised kernels in Gluon.

The same stored weights and the same arithmetic as `gemm.py`, arranged for a matrix unit that is the bottleneck. A
program stays on its multiprocessor and takes tiles of 256 weight rows and up to 128 tokens in turn. Four warps fetch
(rows of x by index, codes and scales, `STAGES` steps of 64 columns ahead, across tiles), two groups of four warps
multiply 128 weight rows each: they decode one step into registers while the matrix unit works on the step before, and
need not stay in step with each other, so one group's epilogue overlaps the other's products.

`h` is kept in the order of `sorted` (slots by expert), so the second product reads contiguous rows; its result goes
back to the order of slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import (
    decode_codes,
    decode_group_values,
    decode_mx_scales,
    fused_multiply_add,
    times_minus_2_pow_minus_130,
)
from .gemm import activate

# Newer Gluon renamed the copy.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Weight rows of one group of warps, groups, columns of a step.
ROWS = gl.constexpr(128)
GROUPS_OF_WARPS = gl.constexpr(2)
BK = gl.constexpr(64)


@gluon.constexpr_function
def chunks_of(FORMAT):
    """Chunks of columns in a step."""
    return 1 if FORMAT in ("int4", "mxfp4") else 2


@gluon.constexpr_function
def scales_of(FORMAT, GROUP):
    """(scales of a row in a step, int32 words of 16 rows and one scale): (0, 0) without scales."""
    if FORMAT in ("mxfp4", "mxfp8"):
        return 1, 16
    return (max(1, 64 // GROUP), 8) if GROUP else (0, 0)


@gluon.constexpr_function
def codes_layout(chunks):
    """Bytes [2, chunks, 4, 512] of codes: a lane holds its 16 bytes of every chunk."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]]
    if chunks == 2:
        registers.append([0, 1, 0, 0])
    registers.append([1, 0, 0, 0])
    lanes = [[0, 0, 0, 16 << i] for i in range(5)]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 1, 0], [0, 0, 2, 0]], [], [2, chunks, 4, 512])


@gluon.constexpr_function
def scales_layout(groups, words, held):
    """int32 words [2, groups, 4, words]: as the lanes that multiply need them (held), or each word once (copied)."""
    shape = [2, groups, 4, words]
    warps = [[0, 0, 1, 0], [0, 0, 2, 0]]
    more = [[0, 1, 0, 0]] if groups == 2 else []
    if held:
        registers = ([[0, 0, 0, 1]] if words == 16 else []) + more + [[1, 0, 0, 0]]
        first = 2 if words == 16 else 1
        lanes = [[0, 0, 0, 0], [0, 0, 0, 0], *([0, 0, 0, first << i] for i in range(3))]
    else:
        registers = []
        lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]] + ([[0, 0, 0, 8]] if words == 16 else []) + [[1, 0, 0, 0]]
        lanes = lanes + more
        lanes = lanes + [[0, 0, 0, 0]] * (5 - len(lanes))
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the phase of its barriers."""
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def find_tile(blocks_ptr, tile, tiles):
    """(expert or -1, first position, rows, tile along N) of tile number `tile`: the tiles of a block are neighbours."""
    entry = blocks_ptr + tile // tiles * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), tile % tiles


@gluon.jit
def fetch_tile(x_ptr, rows_ptr, w_ptr, s_ptr, z_ptr, x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, start,
               rows, first_chunk, x_stride, columns, n_chunks, k_chunks,
               GATHER: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr,
               HAS_ZERO: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    """Copies all steps of one tile into the ring; w, s and z point to the expert's tensors."""
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    KC: gl.constexpr = chunks_of(FORMAT)
    W: gl.constexpr = codes_layout(KC)
    COUNT: gl.constexpr = scales_of(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_of(FORMAT, GROUP)[1]
    i = gl.arange(0, BM, layout=gl.SliceLayout(1, X))
    position = start + gl.minimum(i, rows - 1)  # rows that do not exist repeat the last one
    if GATHER:
        row = gl.load(rows_ptr + position) // TOP_K
    else:
        row = position
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, X))
    x_ptrs = x_ptr + row.to(gl.int64).expand_dims(1) * x_stride + column.expand_dims(0)
    chunk = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, W))))
    chunk = chunk.expand_dims(1).expand_dims(2).expand_dims(3)
    kc = gl.arange(0, KC, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, W))))
    kc = kc.expand_dims(0).expand_dims(2).expand_dims(3)
    warp = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, W))))
    warp = warp.expand_dims(0).expand_dims(1).expand_dims(3)
    byte = gl.arange(0, 512, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, W))))
    byte = byte.expand_dims(0).expand_dims(1).expand_dims(2)
    within = kc * 2048 + warp * 512 + byte
    first = gl.minimum(first_chunk + chunk, n_chunks - 1) * (k_chunks * 2048)
    second = gl.minimum(first_chunk + 2 + chunk, n_chunks - 1) * (k_chunks * 2048)
    w_ptrs0 = w_ptr + (first + within)
    w_ptrs1 = w_ptr + (second + within)
    if COUNT > 0:
        S: gl.constexpr = scales_layout(COUNT, WORDS, False)
        s_chunk = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, S))))
        s_chunk = s_chunk.expand_dims(1).expand_dims(2).expand_dims(3)
        s_group = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, S))))
        s_group = s_group.expand_dims(0).expand_dims(2).expand_dims(3)
        s_warp = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, S))))
        s_warp = s_warp.expand_dims(0).expand_dims(1).expand_dims(3)
        s_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, S))))
        s_word = s_word.expand_dims(0).expand_dims(1).expand_dims(2)
        PER: gl.constexpr = 128 if WORDS == 16 else GROUP  # columns of one word
        per_row = (columns + PER - 1) // PER * (4 * WORDS)
        s_within = s_group * (4 * WORDS) + s_warp * WORDS + s_word
        s_first = gl.minimum(first_chunk + s_chunk, n_chunks - 1) * per_row + s_within
        s_second = gl.minimum(first_chunk + 2 + s_chunk, n_chunks - 1) * per_row + s_within
    for k in range(0, columns, BK):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        copy_to_shared(x_smem.index(stage).slice(0, BM), x_ptrs)
        copy_to_shared(w_smem.index(stage * 2), w_ptrs0)
        copy_to_shared(w_smem.index(stage * 2 + 1), w_ptrs1)
        if COUNT > 0:
            at = k // PER * (4 * WORDS)
            copy_to_shared(s_smem.index(stage * 2), s_ptr + (s_first + at))
            copy_to_shared(s_smem.index(stage * 2 + 1), s_ptr + (s_second + at))
            if HAS_ZERO:
                copy_to_shared(z_smem.index(stage * 2), z_ptr + (s_first + at))
                copy_to_shared(z_smem.index(stage * 2 + 1), z_ptr + (s_second + at))
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        x_ptrs += BK
        w_ptrs0 += KC * 2048
        w_ptrs1 += KC * 2048
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def fetch(x_ptr, rows_ptr, blocks_ptr, w_ptr, s_ptr, z_ptr, x_smem, w_smem, s_smem, z_smem, full, empty, total, tiles,
          x_stride, columns, n_chunks, k_chunks, s_stride,
          GATHER: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The warps that copy."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, rows, tile_n = find_tile(blocks_ptr, tile, tiles)
        if expert >= 0:
            e64 = expert.to(gl.int64)
            codes = w_ptr + e64 * n_chunks * k_chunks * 2048
            scales = s_ptr + e64 * s_stride
            zeros = z_ptr + e64 * s_stride
            first = tile_n * (ROWS * GROUPS_OF_WARPS // 64)
            if rows > 64:
                stage, phase = fetch_tile(
                    x_ptr, rows_ptr, codes, scales, zeros, x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase,
                    start, rows, first, x_stride, columns, n_chunks, k_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO,
                    STAGES, 128)  # fmt: skip
            elif rows > 32:
                stage, phase = fetch_tile(
                    x_ptr, rows_ptr, codes, scales, zeros, x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase,
                    start, rows, first, x_stride, columns, n_chunks, k_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO,
                    STAGES, 64)  # fmt: skip
            else:
                stage, phase = fetch_tile(
                    x_ptr, rows_ptr, codes, scales, zeros, x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase,
                    start, rows, first, x_stride, columns, n_chunks, k_chunks, GATHER, TOP_K, FORMAT, GROUP, HAS_ZERO,
                    STAGES, 32)  # fmt: skip


@gluon.jit
def decode_step(w_smem, s_smem, z_smem, index, k, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
                FP16: gl.constexpr, DOT: gl.constexpr):  # fmt: skip
    """One group's weights of one step, 16-bit [128, 64] in the matrix instruction's register layout."""
    KC: gl.constexpr = chunks_of(FORMAT)
    COUNT: gl.constexpr = scales_of(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_of(FORMAT, GROUP)[1]
    MX: gl.constexpr = FORMAT == "mxfp4" or FORMAT == "mxfp8"
    REBASED: gl.constexpr = FORMAT == "int4" and GROUP > 0 and not HAS_ZERO and not FP16
    packed = w_smem.index(index).load(codes_layout(KC))
    w = gl.convert_layout(decode_codes(packed, FORMAT, FP16, HAS_ZERO, REBASED, 2, KC), DOT, assert_trivial=True)
    if COUNT > 0:
        words = s_smem.index(index).load(scales_layout(COUNT, WORDS, True))
        if MX:
            N_SCALES: gl.constexpr = 2
            words = words >> (k % 128 // 4)
            scale = decode_mx_scales(words, 2, 1, 2)
        else:
            N_SCALES: gl.constexpr = COUNT
            scale = decode_group_values(words, FP16, 2, COUNT)
        w3 = w.reshape(ROWS, N_SCALES, BK // N_SCALES)
        L3: gl.constexpr = w3.type.layout
        ROW: gl.constexpr = gl.SliceLayout(2, L3)
        scale = gl.convert_layout(scale, ROW, assert_trivial=True).expand_dims(2)
        if REBASED:
            offset = decode_group_values(times_minus_2_pow_minus_130(words), FP16, 2, COUNT)
            offset = gl.convert_layout(offset, ROW, assert_trivial=True).expand_dims(2)
            w3, scale = gl.broadcast(w3, scale)
            w3, offset = gl.broadcast(w3, offset)
            w3 = fused_multiply_add(w3, scale, offset)
        else:
            if HAS_ZERO:
                zero = decode_group_values(z_smem.index(index).load(scales_layout(COUNT, WORDS, True)), FP16, 2, COUNT)
                w3 = w3 - gl.convert_layout(zero, ROW, assert_trivial=True).expand_dims(2)
            w3 = w3 * scale
        w = gl.convert_layout(w3.reshape(ROWS, BK), DOT, assert_trivial=True)
    return w


@gluon.jit
def multiply_tile(x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, columns, GROUP_OF_WARPS: gl.constexpr,
                  FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, STAGES: gl.constexpr,
                  BM: gl.constexpr):  # fmt: skip
    """float32 [128, BM]: this group's weight rows times the tile's tokens, over all columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    FP16: gl.constexpr = x_smem.dtype == gl.float16
    acc = gl.zeros((ROWS, BM), gl.float32, MMA)
    for k in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        w = decode_step(w_smem, s_smem, z_smem, stage * 2 + GROUP_OF_WARPS, k, FORMAT, GROUP, HAS_ZERO, FP16, DOT)
        acc = hopper.warpgroup_mma(w, x_smem.index(stage).slice(0, BM).permute((1, 0)), acc, is_async=True)
        # A product in flight at the end of an iteration would make ptxas wait for every single instruction.
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def skip_tile(full, empty, stage, phase, columns, STAGES: gl.constexpr):
    """Lets a tile's steps pass unused."""
    for _ in range(0, columns, BK):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def gate_up_tile(x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale_ptr, bias_ptr, h_ptr,
                 routers_ptr, columns, inner, padded, first, start, rows, alpha, beta, limit,
                 GROUP_OF_WARPS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
                 HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
                 HAS_LIMIT: gl.constexpr, WEIGHT_INPUT: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if HAS_ROW_SCALE:
        factor = gl.load(row_scale_ptr + n, mask=n < padded, other=0.0)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n, mask=n < padded, other=0.0)
    acc, stage, phase = multiply_tile(x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, columns,
                                      GROUP_OF_WARPS, FORMAT, GROUP, HAS_ZERO, STAGES, BM)  # fmt: skip
    if HAS_ROW_SCALE:
        acc = acc * factor.expand_dims(1)
    if WEIGHT_INPUT:
        i = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
        acc = acc * gl.load(routers_ptr + start + i, mask=i < rows, other=0.0).expand_dims(0)
    if HAS_BIAS:
        acc = acc + bias.expand_dims(1)
    if GATED:
        OUT: gl.constexpr = ROWS // 2
        gate, up = gl.split(acc.reshape(ROWS // 16, 2, 8, BM).permute(0, 2, 3, 1))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).to(h_ptr.dtype.element_ty)
        value = value.reshape(OUT, BM)
        column = first // 2
    else:
        OUT: gl.constexpr = ROWS
        positive = gl.maximum(acc, 0.0)
        value = (positive * positive).to(h_ptr.dtype.element_ty)
        column = first
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 4], [0, 1])
    value = gl.convert_layout(value, STORE)
    column = column + gl.arange(0, OUT, layout=gl.SliceLayout(1, STORE)).expand_dims(1)
    i = gl.arange(0, BM, layout=gl.SliceLayout(0, STORE)).expand_dims(0)
    h_ptrs = h_ptr + (start + i).to(gl.int64) * inner + column
    gl.store(h_ptrs, value, mask=(i < rows) & (column < inner))
    return stage, phase


@gluon.jit
def gate_up_tiles(blocks_ptr, row_scale_ptr, bias_ptr, h_ptr, routers_ptr, x_smem, w_smem, s_smem, z_smem, full, empty,
                  total, tiles, columns, inner, n_chunks, alpha, beta, limit,
                  GROUP_OF_WARPS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
                  HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
                  HAS_LIMIT: gl.constexpr, WEIGHT_INPUT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of warps that multiplies, for the first product."""
    stage = 0
    phase = 0
    padded = n_chunks * 64
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, rows, tile_n = find_tile(blocks_ptr, tile, tiles)
        if expert >= 0:
            first = (tile_n * GROUPS_OF_WARPS + GROUP_OF_WARPS) * ROWS
            offset = expert.to(gl.int64) * padded
            row_scale = row_scale_ptr + offset
            bias = bias_ptr + offset
            if first >= padded:
                stage, phase = skip_tile(full, empty, stage, phase, columns, STAGES)
            elif rows > 64:
                stage, phase = gate_up_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, h_ptr, routers_ptr,
                    columns, inner, padded, first, start, rows, alpha, beta, limit, GROUP_OF_WARPS, FORMAT, GROUP,
                    HAS_ZERO, HAS_ROW_SCALE, HAS_BIAS, GATED, ACTIVATION, HAS_LIMIT, WEIGHT_INPUT, STAGES,
                    128)  # fmt: skip
            elif rows > 32:
                stage, phase = gate_up_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, h_ptr, routers_ptr,
                    columns, inner, padded, first, start, rows, alpha, beta, limit, GROUP_OF_WARPS, FORMAT, GROUP,
                    HAS_ZERO, HAS_ROW_SCALE, HAS_BIAS, GATED, ACTIVATION, HAS_LIMIT, WEIGHT_INPUT, STAGES,
                    64)  # fmt: skip
            else:
                stage, phase = gate_up_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, h_ptr, routers_ptr,
                    columns, inner, padded, first, start, rows, alpha, beta, limit, GROUP_OF_WARPS, FORMAT, GROUP,
                    HAS_ZERO, HAS_ROW_SCALE, HAS_BIAS, GATED, ACTIVATION, HAS_LIMIT, WEIGHT_INPUT, STAGES,
                    32)  # fmt: skip


@gluon.jit
def down_tile(x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale_ptr, bias_ptr, partial_ptr,
              sorted_ptr, routers_ptr, columns, hidden, padded, first, start, rows,
              GROUP_OF_WARPS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
              HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHT_INPUT: gl.constexpr, STAGES: gl.constexpr,
              BM: gl.constexpr):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if HAS_ROW_SCALE:
        factor = gl.load(row_scale_ptr + n, mask=n < padded, other=0.0)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n, mask=n < padded, other=0.0)
    acc, stage, phase = multiply_tile(x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, columns,
                                      GROUP_OF_WARPS, FORMAT, GROUP, HAS_ZERO, STAGES, BM)  # fmt: skip
    if HAS_ROW_SCALE:
        acc = acc * factor.expand_dims(1)
    if HAS_BIAS:
        acc = acc + bias.expand_dims(1)
    if not WEIGHT_INPUT:
        i = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
        acc = acc * gl.load(routers_ptr + start + i, mask=i < rows, other=0.0).expand_dims(0)
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    value = gl.convert_layout(acc.to(partial_ptr.dtype.element_ty), STORE)
    column = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE)).expand_dims(1)
    i = gl.arange(0, BM, layout=gl.SliceLayout(0, STORE))
    slot = gl.load(sorted_ptr + start + i, mask=i < rows, other=0)
    ptrs = partial_ptr + slot.to(gl.int64).expand_dims(0) * hidden + column
    gl.store(ptrs, value, mask=(i < rows).expand_dims(0) & (column < hidden))
    return stage, phase


@gluon.jit
def down_tiles(blocks_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, x_smem, w_smem, s_smem,
               z_smem, full, empty, total, tiles, columns, hidden, n_chunks,
               GROUP_OF_WARPS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
               HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHT_INPUT: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """A group of warps that multiplies, for the second product."""
    stage = 0
    phase = 0
    padded = n_chunks * 64
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, rows, tile_n = find_tile(blocks_ptr, tile, tiles)
        if expert >= 0:
            first = (tile_n * GROUPS_OF_WARPS + GROUP_OF_WARPS) * ROWS
            offset = expert.to(gl.int64) * padded
            row_scale = row_scale_ptr + offset
            bias = bias_ptr + offset
            if first >= padded:
                stage, phase = skip_tile(full, empty, stage, phase, columns, STAGES)
            elif rows > 64:
                stage, phase = down_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, partial_ptr, sorted_ptr,
                    routers_ptr, columns, hidden, padded, first, start, rows, GROUP_OF_WARPS, FORMAT, GROUP, HAS_ZERO,
                    HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, STAGES, 128)  # fmt: skip
            elif rows > 32:
                stage, phase = down_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, partial_ptr, sorted_ptr,
                    routers_ptr, columns, hidden, padded, first, start, rows, GROUP_OF_WARPS, FORMAT, GROUP, HAS_ZERO,
                    HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, STAGES, 64)  # fmt: skip
            else:
                stage, phase = down_tile(
                    x_smem, w_smem, s_smem, z_smem, full, empty, stage, phase, row_scale, bias, partial_ptr, sorted_ptr,
                    routers_ptr, columns, hidden, padded, first, start, rows, GROUP_OF_WARPS, FORMAT, GROUP, HAS_ZERO,
                    HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, STAGES, 32)  # fmt: skip


@gluon.jit
def ring(x_ptr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of the stages and their barriers."""
    KC: gl.constexpr = chunks_of(FORMAT)
    COUNT: gl.constexpr = scales_of(FORMAT, GROUP)[0]
    WORDS: gl.constexpr = scales_of(FORMAT, GROUP)[1]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, 128, BK], SWIZZLED)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 2, KC, 4, 512], PLAIN)
    if COUNT > 0:
        s_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 2, COUNT, 4, WORDS], PLAIN)
    else:
        s_smem = w_smem
    if HAS_ZERO and COUNT > 0:
        z_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 2, COUNT, 4, WORDS], PLAIN)
    else:
        z_smem = s_smem
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=GROUPS_OF_WARPS)
    return x_smem, w_smem, s_smem, z_smem, full, empty


@gluon.jit(do_not_specialize=["total", "tiles", "alpha", "beta", "limit"])
def gate_up(x_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, h_ptr, sorted_ptr, routers_ptr, blocks_ptr, total,
            tiles, x_stride, columns, inner, n_chunks, k_chunks, s_stride, alpha, beta, limit,
            TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
            HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
            HAS_LIMIT: gl.constexpr, WEIGHT_INPUT: gl.constexpr, PDL: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """h[position] = activation(x[sorted[position] // TOP_K] @ w13[expert].T + b13[expert]).

    x [tokens, columns] 16-bit, row stride x_stride, columns a multiple of 64; h [slots, inner] of x's dtype, in the
    order of sorted. w, s, z, row_scale, bias: the tensors of `Matrix` (weights.py), s_stride the int32 words per expert
    of s and z. routers: float32 router weights in the order of sorted. blocks: int32 [total / tiles, 4] of up to 128
    positions (`prefill_route`). tiles: 256 rows of w13 each. A one-dimensional grid of any size.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_smem, w_smem, s_smem, z_smem, full, empty = ring(x_ptr, FORMAT, GROUP, HAS_ZERO, STAGES)
    gl.warp_specialize(
        [
            (gate_up_tiles, (
                blocks_ptr, row_scale_ptr, bias_ptr, h_ptr, routers_ptr, x_smem, w_smem, s_smem, z_smem, full, empty,
                total, tiles, columns, inner, n_chunks, alpha, beta, limit, 0, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, GATED, ACTIVATION, HAS_LIMIT, WEIGHT_INPUT, STAGES)),
            (gate_up_tiles, (
                blocks_ptr, row_scale_ptr, bias_ptr, h_ptr, routers_ptr, x_smem, w_smem, s_smem, z_smem, full, empty,
                total, tiles, columns, inner, n_chunks, alpha, beta, limit, 1, FORMAT, GROUP, HAS_ZERO, HAS_ROW_SCALE,
                HAS_BIAS, GATED, ACTIVATION, HAS_LIMIT, WEIGHT_INPUT, STAGES)),
            (fetch, (
                x_ptr, sorted_ptr, blocks_ptr, w_ptr, s_ptr, z_ptr, x_smem, w_smem, s_smem, z_smem, full, empty, total,
                tiles, x_stride, columns, n_chunks, k_chunks, s_stride, True, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES)),
        ],
        [4, 4],
        [208, 72],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["total", "tiles"])
def down(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, blocks_ptr, total,
         tiles, columns, hidden, n_chunks, k_chunks, s_stride,
         TOP_K: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
         HAS_ROW_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHT_INPUT: gl.constexpr, PDL: gl.constexpr,
         STAGES: gl.constexpr):  # fmt: skip
    """partial[sorted[position]] = (h[position] @ w2[expert].T + b2[expert]) * router weight.

    h [slots, columns] in the order of sorted; partial [slots, hidden], both 16-bit. WEIGHT_INPUT: router weights were
    applied to the input. The rest as in `gate_up`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_smem, w_smem, s_smem, z_smem, full, empty = ring(h_ptr, FORMAT, GROUP, HAS_ZERO, STAGES)
    gl.warp_specialize(
        [
            (down_tiles, (
                blocks_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, x_smem, w_smem, s_smem,
                z_smem, full, empty, total, tiles, columns, hidden, n_chunks, 0, FORMAT, GROUP, HAS_ZERO,
                HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, STAGES)),
            (down_tiles, (
                blocks_ptr, row_scale_ptr, bias_ptr, partial_ptr, sorted_ptr, routers_ptr, x_smem, w_smem, s_smem,
                z_smem, full, empty, total, tiles, columns, hidden, n_chunks, 1, FORMAT, GROUP, HAS_ZERO,
                HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, STAGES)),
            (fetch, (
                h_ptr, sorted_ptr, blocks_ptr, w_ptr, s_ptr, z_ptr, x_smem, w_smem, s_smem, z_smem, full, empty, total,
                tiles, columns, columns, n_chunks, k_chunks, s_stride, False, TOP_K, FORMAT, GROUP, HAS_ZERO, STAGES)),
        ],
        [4, 4],
        [208, 72],
    )  # fmt: skip
