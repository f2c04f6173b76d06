"""`weights @ x.T` over packed weights: the K loop that both GEMMs of a layer share.

The weights are the first operand of every product. They are decoded in registers, from which `wgmma` reads its first
operand; a tile may then have as few as 16 tokens.
"""

# Triton's language has no starred tuples.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dequantize import (
    decode_codes,
    decode_group_values,
    decode_mx_scales,
    fma_bf16x2,
    scale_and_add_zero,
    scaled_midpoints,
)


@triton.jit
def load_scales(s_ptr, z_ptr, row, step, columns, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr, K_PARTS: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Words of scales and of zero points for one step of `mainloop`; 0 for what the format does not have.

    row: number of each group of 16 rows, [chunks, 1, 4, 1]; step: the step of each, a scalar or of that shape.
    """
    words = 0
    zeros = 0
    if FORMAT == "mxfp4" or FORMAT == "mxfp8":
        lane = row % 4 * 16 + tl.arange(0, 16)[None, None, None, :]
        KB: tl.constexpr = (BK + 127) // 128
        k_blocks = (columns + 127) // 128
        block = step * BK // 128 + tl.arange(0, KB)[None, :, None, None]
        s_ptrs = s_ptr + (row // 4 * k_blocks + block) * 64 + lane
        if (KB > 1 or K_PARTS > 1) and not EVEN_K:
            words = tl.load(s_ptrs, mask=block < k_blocks, other=0)
        else:
            words = tl.load(s_ptrs)
        if BK < 128:
            words = words >> (step * BK % 128 // 4)
    elif GROUP > 0:
        lane = row % 4 * 8 + tl.arange(0, 8)[None, None, None, :]
        groups = columns // GROUP
        group = step * BK // GROUP + tl.arange(0, (BK + GROUP - 1) // GROUP)[None, :, None, None]
        offsets = (row // 4 * groups + group) * 32 + lane
        words = tl.load(s_ptr + offsets) if EVEN_K else tl.load(s_ptr + offsets, mask=group < groups, other=0)
        if HAS_ZERO:
            zeros = tl.load(z_ptr + offsets, mask=group < groups, other=0)
    elif HAS_ZERO:
        zeros = tl.load(z_ptr + row // 4 * 32 + row % 4 * 8 + tl.arange(0, 8)[None, None, None, :])
    return words, zeros


@triton.jit
def dequantize_step(packed, words, zero_words, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
                    SCALE_ACC: tl.constexpr, FP16: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """(the weights of one step, decoded, and scaled unless SCALE_ACC; with SCALE_ACC the factors of the rows' sums,
    else a zero).

    packed: bytes [chunks of rows, chunks of columns, 4, 512]; words: `load_scales`. FP16: activations are float16.
    """
    RC: tl.constexpr = packed.shape[0]
    KC: tl.constexpr = packed.shape[1]
    VN: tl.constexpr = RC * 64
    MX: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "mxfp8"
    INTEGER: tl.constexpr = FORMAT == "int4" or FORMAT == "int8"
    # Stored scales are the scales times a row's power of two, up to 2**127 (`weights.has_rebased_scales`).
    REBASED: tl.constexpr = INTEGER and GROUP > 0 and not HAS_ZERO and not FP16
    w = decode_codes(packed, FORMAT, FP16, HAS_ZERO, REBASED and not SCALE_ACC, RC, KC)
    factor = 0.0
    if MX:
        scale = decode_mx_scales(words, FP16, RC, (BK + 127) // 128, 4 if BK >= 128 else BK // 32)
        w = w * scale.expand_dims(2).broadcast_to(VN, BK // 32, 32).reshape(VN, BK)
    else:
        GROUPS: tl.constexpr = (BK + GROUP - 1) // GROUP if GROUP > 0 else 1
        WIDTH: tl.constexpr = BK // GROUPS
        if HAS_ZERO:
            zero = decode_group_values(zero_words, FP16, RC, GROUPS)
            zero = zero.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK)
            w = w - zero if FP16 else scale_and_add_zero(w, zero)
        if GROUP > 0:
            scale = decode_group_values(words, FP16, RC, GROUPS)
            if SCALE_ACC:
                factor = scale.reshape(VN).to(tl.float32)
                if REBASED:
                    factor *= 5.877471754111438e-39  # 2**-127
            elif REBASED:
                # (code - 8 or 128) * scale, rounded once: the subtracted product is exact.
                offset = decode_group_values(scaled_midpoints(words, FORMAT), FP16, RC, GROUPS)
                w = fma_bf16x2(
                    w,
                    scale.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK),
                    offset.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK),
                )
            else:
                w = w * scale.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK)
    return w, factor


@triton.jit
def await_mma(acc):
    """Returns acc once every MMA that adds to it has ended. Emits no instruction, only a use that waits for the MMAs.

    Otherwise Triton lets the last MMAs of a step run while the next step is dequantized into registers that they may
    still read (github.com/triton-lang/triton/issues/9433). Results would then vary from run to run.
    """
    return tl.inline_asm_elementwise("", constraints="=f,0", args=[acc], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def mma_step(acc, w, factor, x, SCALE_ACC: tl.constexpr):
    """acc [rows, tokens] + w @ x.T; w and factor: `dequantize_step`; x [tokens, columns of the step]."""
    if SCALE_ACC:
        acc += tl.dot(w, x.T) * factor[:, None]
    else:
        acc = tl.dot(w, x.T, acc)
    return acc


@triton.jit
def dequantize_mma_step(acc, x, packed, words, zero_words, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                        HAS_ZERO: tl.constexpr, SCALE_ACC: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc [rows, tokens] + the weights of one step, decoded and scaled, times x.T; arguments of `dequantize_step`."""
    w, factor = dequantize_step(
        packed, words, zero_words, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, x.dtype == tl.float16, BK
    )
    return mma_step(acc, w, factor, x, SCALE_ACC)


@triton.jit
def mainloop(x_rows, x_mask, rest_rows, rest_mask, w_ptr, s_ptr, z_ptr, tile_n, n_chunks, k_chunks, columns,
             split, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
             SCALE_ACC: tl.constexpr, LOAD_BEFORE_WAIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
             SPLIT_K: tl.constexpr, K_PARTS: tl.constexpr, BM_REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr):  # fmt: skip
    """`w @ x.T` over part number `split` of SPLIT_K of the columns: float32 [BN, BM], and [BN, BM_REST] of more rows.

    x_rows: pointers [K_PARTS * BM] to rows of `columns` 16-bit floats; x_mask: which of them exist. w_ptr: one expert's
    codes; s_ptr, z_ptr: its scale and zero-point words. GROUP: columns per scale, 0 for one scale per row (which the
    caller applies). SCALE_ACC: scales multiply float32 group sums instead of the weights.

    BM_REST > 0 (needs a loop and K_PARTS of 1): the weights, decoded once, are also multiplied by rest_rows [BM_REST],
    of which rest_mask exist. So a tile may have 48 tokens, although the size of a Triton tensor is a power of two.

    K_PARTS > 1 puts K_PARTS parts of the columns side by side: one product of K_PARTS * BN rows of weights and
    K_PARTS * BM rows of x, of which only the blocks on the diagonal are used. With few tokens the matrix unit has time
    for the others, and BN rows get K_PARTS times as many warps and loads in flight without a second program.

    STEPS > 0 (their number; SPLIT_K is 1): there is no loop, all weights are loaded at once and held in registers.
    LOAD_BEFORE_WAIT: the weights are loaded before `griddepcontrol.wait`, x after it.
    """
    RC: tl.constexpr = BN * K_PARTS // 64
    CK: tl.constexpr = 64 if FORMAT == "int4" or FORMAT == "mxfp4" else 32
    KC: tl.constexpr = BK // CK
    VN: tl.constexpr = BN * K_PARTS
    VM: tl.constexpr = BM * K_PARTS
    k = tl.arange(0, BK)
    steps_per_part = ((columns + BK - 1) // BK + K_PARTS - 1) // K_PARTS
    steps_per_split = (steps_per_part + SPLIT_K - 1) // SPLIT_K
    begin = split * steps_per_split
    end = tl.minimum(steps_per_part, begin + steps_per_split)
    x_first_step = tl.arange(0, VM) // BM * steps_per_part
    x_ptrs = x_rows[:, None] + ((x_first_step + begin) * BK)[:, None] + k[None, :]
    # A warp holds 16 rows; tiles of fewer than 64 rows consist of parts of chunks. An incomplete last tile repeats its
    # last rows; the caller masks what it stores. Dimensions: chunk of rows, chunk or group of columns, warp, byte or
    # word.
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    first_step = warp // (BN // 16) * steps_per_part
    row = tl.minimum(tile_n * (BN // 16) + warp % (BN // 16), n_chunks * 4 - 1)
    acc = tl.zeros((VN, VM), tl.float32)
    acc_rest = acc
    if STEPS > 0:
        # Codes are loaded as rows of 512 bytes in this order (chunk of columns, chunk of rows, warp): Triton then loads
        # each row into the registers of the warp that multiplies it, not through shared memory.
        part = tl.arange(0, KC * RC * 4)
        part_warp = part % (RC * 4)
        part_row = tl.minimum(tile_n * (BN // 16) + part_warp % (BN // 16), n_chunks * 4 - 1)
        part_chunk = part_warp // (BN // 16) * (steps_per_part * KC) + part // (RC * 4)
        w_ptrs = w_ptr + (part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part_chunk * 2048)[:, None]
        w_ptrs = w_ptrs + tl.arange(0, 512)[None, :]
        tiles = ()
        for step in tl.static_range(STEPS):
            if EVEN_K:
                packed = tl.load(w_ptrs + step * (KC * 2048))
            else:
                inside = (part_chunk + step * KC < k_chunks)[:, None]
                packed = tl.load(w_ptrs + step * (KC * 2048), mask=inside, other=0)
            words, zeros = load_scales(s_ptr, z_ptr, row, first_step + step, columns, FORMAT, GROUP, HAS_ZERO, EVEN_K,
                                       K_PARTS, BK)  # fmt: skip
            tiles = tiles + ((packed.reshape(KC, RC, 4, 512).trans(1, 0, 2, 3), words, zeros),)
        if LOAD_BEFORE_WAIT:
            gdc_wait()
            gdc_launch_dependents()
        rows = ()
        for step in tl.static_range(STEPS):
            mask = x_mask[:, None]
            if not EVEN_K:
                mask = mask & ((x_first_step + step)[:, None] * BK + k[None, :] < columns)
            rows = rows + (tl.load(x_ptrs + step * BK, mask=mask, other=0.0),)
        for step in tl.static_range(STEPS):
            packed, words, zeros = tiles[step]
            acc = dequantize_mma_step(acc, rows[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, BK)
    else:
        chunk = tl.arange(0, KC)[None, :, None, None]
        w_ptrs = w_ptr + row // 4 * (k_chunks * 2048) + row % 4 * 512 + (first_step + begin) * (KC * 2048)
        w_ptrs = w_ptrs + chunk * 2048 + tl.arange(0, 512)[None, None, None, :]
        if BM_REST > 0:
            acc_rest = tl.zeros((VN, BM_REST), tl.float32)
            rest_ptrs = rest_rows[:, None] + begin * BK + k[None, :]
        # num_stages on the loop makes Triton also load scales ahead that multiply sums and are no operand of an MMA.
        for step in tl.range(begin, end, num_stages=STAGES):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=x_mask[:, None], other=0.0)
                packed = tl.load(w_ptrs)
            else:
                x = tl.load(
                    x_ptrs,
                    mask=x_mask[:, None] & ((x_first_step + step)[:, None] * BK + k[None, :] < columns),
                    other=0.0,
                )
                packed = tl.load(w_ptrs, mask=(first_step + step) * KC + chunk < k_chunks, other=0)
            words, zeros = load_scales(s_ptr, z_ptr, row, first_step + step, columns, FORMAT, GROUP, HAS_ZERO, EVEN_K,
                                       K_PARTS, BK)  # fmt: skip
            if BM_REST > 0:
                FP16: tl.constexpr = x.dtype == tl.float16
                mask = rest_mask[:, None]
                if not EVEN_K:
                    mask = mask & (step * BK + k[None, :] < columns)
                x_rest = tl.load(rest_ptrs, mask=mask, other=0.0)
                w, factor = dequantize_step(packed, words, zeros, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, FP16, BK)
                acc = mma_step(acc, w, factor, x, SCALE_ACC)
                acc_rest = await_mma(mma_step(acc_rest, w, factor, x_rest, SCALE_ACC))
                acc = await_mma(acc)
                rest_ptrs += BK
            else:
                acc = await_mma(
                    dequantize_mma_step(acc, x, packed, words, zeros, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, BK)
                )
            x_ptrs += BK
            w_ptrs += KC * 2048
    if K_PARTS > 1:
        i = tl.arange(0, K_PARTS)
        diagonal = i[:, None, None, None] == i[None, None, :, None]
        acc = tl.where(diagonal, acc.reshape(K_PARTS, BN, K_PARTS, BM), 0.0)
        acc = tl.sum(tl.sum(acc, axis=2), axis=0)
    return acc, acc_rest


@triton.jit
def sum_split_k(acc, scratch_ptr, counter_ptr, tile, split, BM: tl.constexpr, BN: tl.constexpr, SPLIT_K: tl.constexpr):
    """Adds the SPLIT_K partial tiles of a tile in a fixed order, in the program that arrives last.

    Returns (sum, whether this program is that one). scratch: float32 [tiles, SPLIT_K, BN, BM].
    """
    offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    base = scratch_ptr + tile.to(tl.int64) * (SPLIT_K * BN * BM)
    tl.store(base + split * (BN * BM) + offsets, acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLIT_K - 1
    if last:
        acc = tl.zeros((BN, BM), tl.float32)
        for other in tl.static_range(SPLIT_K):
            acc += tl.load(base + other * (BN * BM) + offsets, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return acc, last
