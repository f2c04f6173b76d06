"""The two matrix products of a fused MoE layer, on stored quantised weights: one templated body per role.

`gate_up` computes `h = activation(x @ w13.T + b13)` for the slots of each expert, `down` computes `h @ w2.T + b2`
times the router weights, and sums over top-k. The weights are the first operand of every product (`y.T = w @ x.T`),
decoded in registers: `wgmma` then reads them from there, and token tiles may be as small as 16.

Both kernels take a one-dimensional grid of `blocks * tiles along N * SPLIT` programs, the last fastest. `counters` must
be zero when a kernel starts and is zero again when it ends. With PDL a kernel starts while its predecessor still runs
and waits (`griddepcontrol.wait`) before it reads what the predecessor wrote; routing ids and weights are older than
that, because every program of `gate_up` has itself waited before it lets `down` start.
"""

# Triton's language has no starred tuples.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import (
    decode_codes,
    decode_group_values,
    decode_mx_scales,
    fused_multiply_add,
    times_minus_2_pow_minus_130,
)
from .route import block_slots, find_block, local_ids


@triton.jit
def prefetch_l2(pointer, size):
    """One thread asks for `size` bytes (a multiple of 16) at `pointer` (16-byte aligned) to be brought into the L2."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        constraints="=r,l,r",
        args=[pointer.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def mx_round_trip(x, GROUP_AXIS: tl.constexpr):
    """float32 -> MXFP8 (e4m3, one e8m0 scale per slice along GROUP_AXIS) -> float32.

    The scale's exponent is ceil(log2(amax / 448)), limited to [-127, 127], as vLLM's MXFP8 quantisation has it.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=GROUP_AXIS, keep_dims=True), 1.1754943508222875e-38)
    # 448 = 1.75 * 2**8, so the ceiling steps where amax's mantissa passes 1.75: exact, unlike a quotient's logarithm.
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    # Two factors each way, because 2**-127 and 2**127 times a value need not be normal numbers.
    half = exponent >> 1
    rest = exponent - half
    down = x * ((127 - half) << 23).to(tl.float32, bitcast=True) * ((127 - rest) << 23).to(tl.float32, bitcast=True)
    code = tl.minimum(tl.maximum(down, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
    return code * ((127 + half) << 23).to(tl.float32, bitcast=True) * ((127 + rest) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(s_ptr, z_ptr, row, fold_step, columns, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr, FOLD: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Words of scales and of zero points for one step of `accumulate`; where there are none, the other or a zero.

    row: sixteens of rows [chunks, 1, 4, 1]; fold_step: the step of each, a scalar or alike.
    """
    words = 0
    zeros = 0
    if FORMAT == "mxfp4" or FORMAT == "mxfp8":
        lane = row % 4 * 16 + tl.arange(0, 16)[None, None, None, :]
        KB: tl.constexpr = (BK + 127) // 128
        k_blocks = (columns + 127) // 128
        block = fold_step * BK // 128 + tl.arange(0, KB)[None, :, None, None]
        s_ptrs = s_ptr + (row // 4 * k_blocks + block) * 64 + lane
        if (KB > 1 or FOLD > 1) and not EVEN_K:
            words = tl.load(s_ptrs, mask=block < k_blocks, other=0)
        else:
            words = tl.load(s_ptrs)
        if BK < 128:
            words = words >> (fold_step * BK % 128 // 4)
    elif GROUP > 0:
        lane = row % 4 * 8 + tl.arange(0, 8)[None, None, None, :]
        groups = columns // GROUP
        group = fold_step * BK // GROUP + tl.arange(0, (BK + GROUP - 1) // GROUP)[None, :, None, None]
        offsets = (row // 4 * groups + group) * 32 + lane
        words = tl.load(s_ptr + offsets) if EVEN_K else tl.load(s_ptr + offsets, mask=group < groups, other=0)
        if HAS_ZERO:
            zeros = tl.load(z_ptr + offsets, mask=group < groups, other=0)
    elif HAS_ZERO:
        zeros = tl.load(z_ptr + row // 4 * 32 + row % 4 * 8 + tl.arange(0, 8)[None, None, None, :])
    return words, zeros


@triton.jit
def weights_of(packed, words, zero_words, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
               PROMOTE: tl.constexpr, FP16: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """(the weights of one step, decoded, and scaled unless PROMOTE; with PROMOTE what the rows' sums are to be
    multiplied by, else a zero).

    packed: bytes [chunks of rows, chunks of columns, 4, 512]; words: `load_scales`. FP16: activations are float16.
    """
    RC: tl.constexpr = packed.shape[0]
    KC: tl.constexpr = packed.shape[1]
    VN: tl.constexpr = RC * 64
    MX: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "mxfp8"
    # Stored scales are the scales times a row's power of two (weights.py), up to 2**127.
    REBASED: tl.constexpr = FORMAT == "int4" and GROUP > 0 and not HAS_ZERO and not FP16
    w = decode_codes(packed, FORMAT, FP16 and not MX, HAS_ZERO, REBASED and not PROMOTE, RC, KC)
    factor = 0.0
    if MX:
        scale = decode_mx_scales(words, RC, (BK + 127) // 128, 4 if BK >= 128 else BK // 32)
        w = w * scale.expand_dims(2).broadcast_to(VN, BK // 32, 32).reshape(VN, BK)
    elif GROUP > 0:
        GROUPS: tl.constexpr = (BK + GROUP - 1) // GROUP
        WIDTH: tl.constexpr = BK // GROUPS
        scale = decode_group_values(words, FP16, RC, GROUPS)
        if HAS_ZERO:
            zero = decode_group_values(zero_words, FP16, RC, GROUPS)
            w = w - zero.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK)
        if PROMOTE:
            factor = scale.reshape(VN).to(tl.float32)
            if REBASED:
                factor *= 9.183549615799121e-41  # 2**-133
        elif REBASED:
            # (code - 8) * scale, rounded once: 8 scales is exact, and code * 2**-133 costs no arithmetic.
            offset = decode_group_values(times_minus_2_pow_minus_130(words), FP16, RC, GROUPS)
            w = fused_multiply_add(
                w,
                scale.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK),
                offset.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK),
            )
        else:
            w = w * scale.expand_dims(2).broadcast_to(VN, GROUPS, WIDTH).reshape(VN, BK)
    elif HAS_ZERO:
        w = w - decode_group_values(zero_words, FP16, RC, 1).broadcast_to(VN, BK)
    return w, factor


@triton.jit
def product(acc, w, factor, x, MX: tl.constexpr, PROMOTE: tl.constexpr):
    """acc [rows, tokens] + w @ x.T; w and factor: `weights_of`; x [tokens, columns of the step]."""
    if MX and x.dtype == tl.float16:
        # float16 activations are exactly two bfloat16 terms; e8m0 scales have no room in float16.
        high = x.to(tl.bfloat16)
        low = (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(w, high.T, acc)
        acc = tl.dot(w, low.T, acc)
    elif PROMOTE:
        acc += tl.dot(w, x.T) * factor[:, None]
    else:
        acc = tl.dot(w, x.T, acc)
    return acc


@triton.jit
def multiply(acc, x, packed, words, zero_words, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
             PROMOTE: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc [rows, tokens] + the weights of one step, decoded and scaled, times x.T; arguments of `weights_of`."""
    w, factor = weights_of(packed, words, zero_words, FORMAT, GROUP, HAS_ZERO, PROMOTE, x.dtype == tl.float16, BK)
    return product(acc, w, factor, x, FORMAT == "mxfp4" or FORMAT == "mxfp8", PROMOTE)


@triton.jit
def accumulate(x_rows, x_valid, more_rows, more_valid, w_ptr, s_ptr, z_ptr, tile_n, n_chunks, k_chunks, columns,
               split, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
               PROMOTE: tl.constexpr, WAIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
               SPLIT: tl.constexpr, FOLD: tl.constexpr, MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr):  # fmt: skip
    """`w @ x.T` over part number `split` of SPLIT of the columns: float32 [BN, BM], and [BN, MORE] of more rows.

    x_rows: pointers [FOLD * BM] to rows of `columns` 16-bit floats; x_valid alike; more_rows, more_valid [MORE]: with
    MORE > 0 (then in a loop, without FOLD) the weights, decoded once, are multiplied by these rows too, so a tile may
    have 48 tokens where Triton's tensors have powers of two; else anything. w_ptr: one expert's codes; s_ptr,
    z_ptr: its scale and zero-point words. GROUP: columns per scale, 0 for one scale per row (left to the caller).
    PROMOTE: scales multiply float32 group sums instead of the weights.

    FOLD > 1 puts FOLD parts of the columns side by side: FOLD * BN rows of weights times FOLD * BM rows of x in one
    product, of which the blocks on the diagonal are wanted. The rest is wasted on a matrix unit that idles with few
    tokens, and the warps and loads in flight for BN rows multiply without a second program.

    STEPS > 0 (their number; SPLIT is 1): all weights are asked for at once and wait in registers, there is no loop.
    WAIT: the weights are asked for before `griddepcontrol.wait`, x after it.
    """
    RC: tl.constexpr = BN * FOLD // 64
    CK: tl.constexpr = 64 if FORMAT == "int4" or FORMAT == "mxfp4" else 32
    KC: tl.constexpr = BK // CK
    VN: tl.constexpr = BN * FOLD
    VM: tl.constexpr = BM * FOLD
    k = tl.arange(0, BK)
    fold_steps = ((columns + BK - 1) // BK + FOLD - 1) // FOLD
    part_steps = (fold_steps + SPLIT - 1) // SPLIT
    begin = split * part_steps
    end = tl.minimum(fold_steps, begin + part_steps)
    x_fold = tl.arange(0, VM) // BM * fold_steps
    x_ptrs = x_rows[:, None] + ((x_fold + begin) * BK)[:, None] + k[None, :]
    # A warp holds 16 rows; tiles of fewer than 64 rows are put together from parts of chunks. A last tile that is not
    # full computes its last rows twice; the caller masks what it stores. Dimensions: chunk of rows, chunk or group of
    # columns, warp, byte or word.
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    fold = warp // (BN // 16) * fold_steps
    row = tl.minimum(tile_n * (BN // 16) + warp % (BN // 16), n_chunks * 4 - 1)
    acc = tl.zeros((VN, VM), tl.float32)
    more = acc
    if STEPS > 0:
        # Codes come as rows of 512 bytes in this order (chunk of columns, chunk of rows, warp): Triton then loads each
        # into the registers of the warp that multiplies it, without a way through shared memory.
        part = tl.arange(0, KC * RC * 4)
        part_warp = part % (RC * 4)
        part_row = tl.minimum(tile_n * (BN // 16) + part_warp % (BN // 16), n_chunks * 4 - 1)
        part_chunk = part_warp // (BN // 16) * (fold_steps * KC) + part // (RC * 4)
        w_ptrs = w_ptr + (part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part_chunk * 2048)[:, None]
        w_ptrs = w_ptrs + tl.arange(0, 512)[None, :]
        tiles = ()
        for step in tl.static_range(STEPS):
            if EVEN_K:
                packed = tl.load(w_ptrs + step * (KC * 2048))
            else:
                inside = (part_chunk + step * KC < k_chunks)[:, None]
                packed = tl.load(w_ptrs + step * (KC * 2048), mask=inside, other=0)
            words, zeros = load_scales(s_ptr, z_ptr, row, fold + step, columns, FORMAT, GROUP, HAS_ZERO, EVEN_K, FOLD,
                                       BK)  # fmt: skip
            tiles = tiles + ((packed.reshape(KC, RC, 4, 512).trans(1, 0, 2, 3), words, zeros),)
        if WAIT:
            gdc_wait()
            gdc_launch_dependents()
        rows = ()
        for step in tl.static_range(STEPS):
            mask = x_valid[:, None]
            if not EVEN_K:
                mask = mask & ((x_fold + step)[:, None] * BK + k[None, :] < columns)
            rows = rows + (tl.load(x_ptrs + step * BK, mask=mask, other=0.0),)
        for step in tl.static_range(STEPS):
            packed, words, zeros = tiles[step]
            acc = multiply(acc, rows[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, PROMOTE, BK)
    else:
        chunk = tl.arange(0, KC)[None, :, None, None]
        w_ptrs = w_ptr + row // 4 * (k_chunks * 2048) + row % 4 * 512 + (fold + begin) * (KC * 2048)
        w_ptrs = w_ptrs + chunk * 2048 + tl.arange(0, 512)[None, None, None, :]
        if MORE > 0:
            more = tl.zeros((VN, MORE), tl.float32)
            more_ptrs = more_rows[:, None] + begin * BK + k[None, :]
        # num_stages on the loop makes Triton load the scales of promoted sums ahead too, which feed no product.
        for step in tl.range(begin, end, num_stages=STAGES):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=x_valid[:, None], other=0.0)
                packed = tl.load(w_ptrs)
            else:
                x = tl.load(
                    x_ptrs, mask=x_valid[:, None] & ((x_fold + step)[:, None] * BK + k[None, :] < columns), other=0.0
                )
                packed = tl.load(w_ptrs, mask=(fold + step) * KC + chunk < k_chunks, other=0)
            words, zeros = load_scales(s_ptr, z_ptr, row, fold + step, columns, FORMAT, GROUP, HAS_ZERO, EVEN_K, FOLD,
                                       BK)  # fmt: skip
            if MORE > 0:
                FP16: tl.constexpr = x.dtype == tl.float16
                MX: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "mxfp8"
                mask = more_valid[:, None]
                if not EVEN_K:
                    mask = mask & (step * BK + k[None, :] < columns)
                more_x = tl.load(more_ptrs, mask=mask, other=0.0)
                w, factor = weights_of(packed, words, zeros, FORMAT, GROUP, HAS_ZERO, PROMOTE, FP16, BK)
                acc = product(acc, w, factor, x, MX, PROMOTE)
                more = product(more, w, factor, more_x, MX, PROMOTE)
                more_ptrs += BK
            else:
                acc = multiply(acc, x, packed, words, zeros, FORMAT, GROUP, HAS_ZERO, PROMOTE, BK)
            x_ptrs += BK
            w_ptrs += KC * 2048
    if FOLD > 1:
        i = tl.arange(0, FOLD)
        diagonal = i[:, None, None, None] == i[None, None, :, None]
        acc = tl.where(diagonal, acc.reshape(FOLD, BN, FOLD, BM), 0.0)
        acc = tl.sum(tl.sum(acc, axis=2), axis=0)
    return acc, more


@triton.jit
def sum_splits(acc, scratch_ptr, counter_ptr, tile, split, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Adds the SPLIT partial tiles of a tile in a fixed order, in the program that arrives last.

    Returns (sum, whether this program is that one). scratch: float32 [tiles, SPLIT, BN, BM].
    """
    offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    base = scratch_ptr + tile.to(tl.int64) * (SPLIT * BN * BM)
    tl.store(base + split * (BN * BM) + offsets, acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLIT - 1
    if last:
        acc = tl.zeros((BN, BM), tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(base + other * (BN * BM) + offsets, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return acc, last


@triton.jit
def prefetch_share(pointer, units, unit_bytes: tl.constexpr, part, parts):
    """Asks for part number `part` of `parts` of `units * unit_bytes` bytes at a byte pointer."""
    each = (units + parts - 1) // parts
    first = part * each
    if first < units:
        prefetch_l2(pointer + first.to(tl.int64) * unit_bytes, tl.minimum(each, units - first) * unit_bytes)


@triton.jit
def activate(gate, up, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Gated activations in float32: "swiglu" is gate * sigmoid(alpha * gate) * (up + beta), after limits if any."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == "swiglu":
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    elif ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + libdevice.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * 0.5 * (1.0 + libdevice.tanh(inner)) * up


@triton.jit
def epilogue_operands(row_scale_ptr, bias_ptr, router_ptr, first, n, slot, found, padded, HAS_ROW_SCALE: tl.constexpr,
                      HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr):  # fmt: skip
    """(row scales, biases, router weights) of rows n, an expert's `first` of `padded`; a zero for what is absent.

    With small tiles they are asked for before the loop, so that their way from memory is not a program's last; with
    large ones they would take registers that the loop needs.
    """
    row_scale = 0.0
    bias = 0.0
    router = 0.0
    if HAS_ROW_SCALE:
        row_scale = tl.load(row_scale_ptr + first + n, mask=n < padded, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first + n, mask=n < padded, other=0.0)
    if HAS_ROUTER:
        router = tl.load(router_ptr + slot, mask=found, other=0.0).to(tl.float32)
    return row_scale, bias, router


@triton.jit
def store_activated(acc, row_scale, bias, router, h_ptr, slot, found, tile_n, inner, alpha, beta, limit,
                    HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
                    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, QUANTISE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The first product's epilogue: acc, float32 [BN, BM], becomes rows `slot` (where `found`) of h."""
    if HAS_ROW_SCALE:
        acc *= row_scale[:, None]
    if WEIGHT_INPUT:
        acc *= router[None, :]
    if HAS_BIAS:
        acc += bias[:, None]
    if GATED:
        OUT: tl.constexpr = BN // 2
        gate, up = tl.split(acc.reshape(BN // 16, 2, 8, BM).trans(0, 2, 3, 1))
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).reshape(OUT, BM)
    else:
        OUT: tl.constexpr = BN
        positive = tl.maximum(acc, 0.0)
        value = positive * positive
    if QUANTISE:
        value = mx_round_trip(value.reshape(OUT // 32, 32, BM), 1).reshape(OUT, BM)
    value = value.to(h_ptr.dtype.element_ty)
    column = tile_n * OUT + tl.arange(0, OUT)
    h_ptrs = h_ptr + slot.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(h_ptrs, value, mask=found[None, :] & (column < inner)[:, None])


@triton.jit
def store_partial(acc, row_scale, bias, router, partial_ptr, slot, found, n, hidden, HAS_ROW_SCALE: tl.constexpr,
                  HAS_BIAS: tl.constexpr, WEIGHT_INPUT: tl.constexpr):  # fmt: skip
    """The second product's epilogue: acc, float32 [rows n, tokens], becomes rows `slot` (where `found`) of partial."""
    if HAS_ROW_SCALE:
        acc *= row_scale[:, None]
    if HAS_BIAS:
        acc += bias[:, None]
    if not WEIGHT_INPUT:
        acc *= router[None, :]
    offsets = slot.to(tl.int64)[None, :] * hidden + n[:, None]
    mask = found[None, :] & (n < hidden)[:, None]
    tl.store(partial_ptr + offsets, acc.to(partial_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles", "alpha", "beta", "limit"])
def gate_up(x_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, h_ptr, ids_ptr, map_ptr, topk_weights_ptr, sorted_ptr,
            blocks_ptr, scratch_ptr, counter_ptr, w2_ptr, s2_ptr, tiles, x_stride, columns, inner, n_chunks, k_chunks,
            s_stride, w2_chunks, s2_stride, alpha, beta, limit,
            TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
            HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, GATED: tl.constexpr,
            ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, WEIGHT_INPUT: tl.constexpr, QUANTISE: tl.constexpr,
            EVEN_K: tl.constexpr, PROMOTE: tl.constexpr, PER_SLOT: tl.constexpr, PREFETCH: tl.constexpr,
            PDL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, FOLD: tl.constexpr,
            MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """h[slot] = activation(x[slot // TOP_K] @ w13[expert].T + b13[expert]) for every slot with a local expert.

    x [tokens, columns] 16-bit, row stride x_stride; h [slots, inner], x's dtype. w, s, z, row_scale, bias: the tensors
    of `Matrix` (weights.py), s_stride the int32 words per expert of s and z; n_chunks, k_chunks: chunks along N and K.
    PER_SLOT, sorted, blocks: `find_block`. QUANTISE: h goes through MXFP8. WEIGHT_INPUT: router weights multiply the
    input. tiles: programs along N. PREFETCH: the programs of a block ask for the expert's w2 (w2_chunks chunks and
    s2_stride words an expert) to be brought into the L2 once they have streamed w13.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    split = pid % SPLIT
    tile_n = pid // SPLIT % tiles
    block = pid // (SPLIT * tiles)
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    if expert < 0:
        return
    e64 = expert.to(tl.int64)
    w_ptr += e64 * n_chunks * k_chunks * 2048
    slot, found = block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
    x_slot, x_found = block_slots(sorted_ptr, start, rows, PER_SLOT, BM, FOLD)
    x_rows = x_ptr + (x_slot // TOP_K).to(tl.int64) * x_stride
    more_rows, more_found = x_rows, x_found
    if MORE > 0:
        more_slot, more_found = block_slots(sorted_ptr, start + BM, rows - BM, PER_SLOT, MORE, 1)
        more_rows = x_ptr + (more_slot // TOP_K).to(tl.int64) * x_stride
    n = tile_n * BN + tl.arange(0, BN)
    padded = n_chunks * 64
    if BM * FOLD <= 16:
        row_scale, bias, router = epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n, slot,
                                                    found, padded, HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT)  # fmt: skip
    acc, more = accumulate(x_rows, x_found, more_rows, more_found, w_ptr, s_ptr + e64 * s_stride,
                           z_ptr + e64 * s_stride, tile_n, n_chunks, k_chunks, columns, split, FORMAT, GROUP, HAS_ZERO,
                           EVEN_K, PROMOTE, False, STEPS, STAGES, SPLIT, FOLD, MORE, BM, BN, BK)  # fmt: skip
    if PREFETCH:
        part = tile_n * SPLIT + split
        prefetch_share(w2_ptr + e64 * w2_chunks * 2048, w2_chunks, 2048, part, tiles * SPLIT)
        if s2_stride > 0:
            s2_bytes = (s2_ptr + e64 * s2_stride).to(tl.pointer_type(tl.uint8))
            prefetch_share(s2_bytes, s2_stride // 32, 128, part, tiles * SPLIT)
    if SPLIT > 1:
        acc, last = sum_splits(acc, scratch_ptr, counter_ptr, pid // SPLIT, split, BM, BN, SPLIT)
        if not last:
            return
    if BM * FOLD > 16:
        row_scale, bias, router = epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n, slot,
                                                    found, padded, HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT)  # fmt: skip
    store_activated(acc, row_scale, bias, router, h_ptr, slot, found, tile_n, inner, alpha, beta, limit, HAS_ROW_SCALE,
                    HAS_BIAS, WEIGHT_INPUT, GATED, ACTIVATION, HAS_LIMIT, QUANTISE, BM, BN)  # fmt: skip
    if MORE > 0:
        if WEIGHT_INPUT:
            router = tl.load(topk_weights_ptr + more_slot, mask=more_found, other=0.0).to(tl.float32)
        store_activated(more, row_scale, bias, router, h_ptr, more_slot, more_found, tile_n, inner, alpha, beta, limit,
                        HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, GATED, ACTIVATION, HAS_LIMIT, QUANTISE, MORE,
                        BN)  # fmt: skip


@triton.jit
def needed(ids_ptr, map_ptr, token, mask, HAS_MAP: tl.constexpr, TOP_K: tl.constexpr):
    """How many slots of each token have a local expert, int32, token's shape."""
    count = tl.zeros_like(token)
    for j in tl.static_range(TOP_K):
        count += (local_ids(ids_ptr, map_ptr, token * TOP_K + j, mask, HAS_MAP) >= 0).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["tokens", "tiles"])
def down(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, out_ptr, ids_ptr, map_ptr, topk_weights_ptr,
         sorted_ptr, blocks_ptr, scratch_ptr, counter_ptr, token_counter_ptr, tokens, tiles, columns, hidden,
         out_stride, n_chunks, k_chunks, s_stride,
         TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
         HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
         EVEN_K: tl.constexpr, PROMOTE: tl.constexpr, PER_SLOT: tl.constexpr, FUSE_SUM: tl.constexpr,
         PDL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, FOLD: tl.constexpr,
         MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """partial[slot] = (h[slot] @ w2[expert].T + b2[expert]) * router weight; with FUSE_SUM also out[token] = their sum.

    h [slots, columns]; partial [slots, hidden] and out [tokens, hidden] of h's dtype. FUSE_SUM: for each token and tile
    the program that arrives last adds the token's partial rows in the order of its choices, so the result does not
    depend on who that is; tokens without a local expert get zeros. WEIGHT_INPUT: weights were applied to the input.
    """
    pid = tl.program_id(0)
    split = pid % SPLIT
    tile_n = pid // SPLIT % tiles
    block = pid // (SPLIT * tiles)
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    slot, found = block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
    x_slot, x_found = block_slots(sorted_ptr, start, rows, PER_SLOT, BM, FOLD)
    # Weights that wait in registers are asked for before the predecessor has ended.
    EARLY: tl.constexpr = PDL and STEPS > 0
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    n = tile_n * BN + tl.arange(0, BN)
    token = slot // TOP_K
    if FUSE_SUM and pid < SPLIT * tiles and split == 0:
        for first in range(0, tokens, BM):
            empty = first + tl.arange(0, BM)
            inside = empty < tokens
            empty_mask = inside & (needed(ids_ptr, map_ptr, empty, inside, HAS_MAP, TOP_K) == 0)
            zero_ptrs = out_ptr + empty.to(tl.int64)[None, :] * out_stride + n[:, None]
            zeros = tl.zeros((BN, BM), out_ptr.dtype.element_ty)
            tl.store(zero_ptrs, zeros, mask=empty_mask[None, :] & (n < hidden)[:, None])
    if expert < 0:
        if EARLY:
            gdc_wait()
        return
    e64 = expert.to(tl.int64)
    w_ptr += e64 * n_chunks * k_chunks * 2048
    padded = n_chunks * 64
    if BM * FOLD <= 16:
        row_scale, bias, router = epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n, slot,
                                                    found, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                    not WEIGHT_INPUT)  # fmt: skip
    h_rows = h_ptr + x_slot.to(tl.int64) * columns
    more_rows, more_found = h_rows, x_found
    if MORE > 0:
        more_slot, more_found = block_slots(sorted_ptr, start + BM, rows - BM, PER_SLOT, MORE, 1)
        more_rows = h_ptr + more_slot.to(tl.int64) * columns
    acc, more = accumulate(h_rows, x_found, more_rows, more_found, w_ptr, s_ptr + e64 * s_stride,
                           z_ptr + e64 * s_stride, tile_n, n_chunks, k_chunks, columns, split, FORMAT, GROUP, HAS_ZERO,
                           EVEN_K, PROMOTE, EARLY, STEPS, STAGES, SPLIT, FOLD, MORE, BM, BN, BK)  # fmt: skip
    if SPLIT > 1:
        acc, last = sum_splits(acc, scratch_ptr, counter_ptr, pid // SPLIT, split, BM, BN, SPLIT)
        if not last:
            return
    if BM * FOLD > 16:
        row_scale, bias, router = epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n, slot,
                                                    found, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                    not WEIGHT_INPUT)  # fmt: skip
    store_partial(acc, row_scale, bias, router, partial_ptr, slot, found, n, hidden, HAS_ROW_SCALE, HAS_BIAS,
                  WEIGHT_INPUT)  # fmt: skip
    if MORE > 0:
        if not WEIGHT_INPUT:
            router = tl.load(topk_weights_ptr + more_slot, mask=more_found, other=0.0).to(tl.float32)
        store_partial(more, row_scale, bias, router, partial_ptr, more_slot, more_found, n, hidden, HAS_ROW_SCALE,
                      HAS_BIAS, WEIGHT_INPUT)  # fmt: skip
    if FUSE_SUM:
        wanted = needed(ids_ptr, map_ptr, token, found, HAS_MAP, TOP_K)
        counter_ptrs = token_counter_ptr + token * tiles + tile_n
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptrs, 1, mask=found, sem="acq_rel", scope="gpu")
        finish = found & (arrived == wanted - 1)
        tl.debug_barrier()
        if tl.max(finish.to(tl.int32), axis=0) > 0:
            total = tl.zeros((BN, BM), tl.float32)
            for j in tl.static_range(TOP_K):
                other = token * TOP_K + j
                valid = finish & (local_ids(ids_ptr, map_ptr, other, finish, HAS_MAP) >= 0)
                others = partial_ptr + other.to(tl.int64)[None, :] * hidden + n[:, None]
                part = tl.load(others, mask=valid[None, :] & (n < hidden)[:, None], other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            out_ptrs = out_ptr + token.to(tl.int64)[None, :] * out_stride + n[:, None]
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=finish[None, :] & (n < hidden)[:, None])
            tl.store(counter_ptrs, tl.zeros_like(arrived), mask=finish)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def down_sweep(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, out_ptr, ids_ptr, map_ptr,
               topk_weights_ptr, sorted_ptr, blocks_ptr, scratch_ptr, counter_ptr, token_counter_ptr, tokens, tiles,
               columns, hidden, out_stride, n_chunks, k_chunks, s_stride,
               TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
               HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
               PROMOTE: tl.constexpr, PER_SLOT: tl.constexpr, PDL: tl.constexpr, STEPS: tl.constexpr,
               STAGES: tl.constexpr, SWEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr):  # fmt: skip
    """`down` for few columns (STEPS * BK of them): a program keeps its h and goes through SWEEP tiles along N.

    Its loads run on from tile to tile, where `down` begins anew for each. Grid blocks * ceil(tiles / SWEEP).
    """
    RC: tl.constexpr = BN // 64
    CK: tl.constexpr = 64 if FORMAT == "int4" or FORMAT == "mxfp4" else 32
    KC: tl.constexpr = BK // CK
    pid = tl.program_id(0)
    sweeps = (tiles + SWEEP - 1) // SWEEP
    block = pid // sweeps
    first = pid % sweeps * SWEEP
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    slot, found = block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert < 0:
        return
    e64 = expert.to(tl.int64)
    padded = n_chunks * 64
    w_ptr += e64 * n_chunks * k_chunks * 2048
    s_ptr += e64 * s_stride
    z_ptr += e64 * s_stride
    if not WEIGHT_INPUT:
        router = tl.load(topk_weights_ptr + slot, mask=found, other=0.0).to(tl.float32)
    x_ptrs = (h_ptr + slot.to(tl.int64) * columns)[:, None] + tl.arange(0, BK)[None, :]
    x = ()
    for step in tl.static_range(STEPS):
        x = x + (tl.load(x_ptrs + step * BK, mask=found[:, None], other=0.0),)
    part = tl.arange(0, KC * RC * 4)
    part_warp = part % (RC * 4)
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    for tile_n in tl.range(first, tl.minimum(first + SWEEP, tiles), num_stages=STAGES):
        part_row = tl.minimum(tile_n * (BN // 16) + part_warp, n_chunks * 4 - 1)
        row = tl.minimum(tile_n * (BN // 16) + warp, n_chunks * 4 - 1)
        w_ptrs = w_ptr + (part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part // (RC * 4) * 2048)[:, None]
        w_ptrs = w_ptrs + tl.arange(0, 512)[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
        for step in tl.static_range(STEPS):
            packed = tl.load(w_ptrs + step * (KC * 2048)).reshape(KC, RC, 4, 512).trans(1, 0, 2, 3)
            words, zeros = load_scales(s_ptr, z_ptr, row, step, columns, FORMAT, GROUP, HAS_ZERO, True, 1, BK)
            acc = multiply(acc, x[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, PROMOTE, BK)
        n = tile_n * BN + tl.arange(0, BN)
        if HAS_ROW_SCALE:
            acc *= tl.load(row_scale_ptr + e64 * padded + n, mask=n < padded, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + e64 * padded + n, mask=n < padded, other=0.0)[:, None]
        if not WEIGHT_INPUT:
            acc *= router[None, :]
        offsets = slot.to(tl.int64)[None, :] * hidden + n[:, None]
        mask = found[None, :] & (n < hidden)[:, None]
        tl.store(partial_ptr + offsets, acc.to(partial_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def down_merged(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, out_ptr, ids_ptr, map_ptr,
                topk_weights_ptr, sorted_ptr, blocks_ptr, scratch_ptr, counter_ptr, token_counter_ptr, tokens, tiles,
                columns, hidden, out_stride, n_chunks, k_chunks, s_stride,
                TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
                HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
                EVEN_K: tl.constexpr, PROMOTE: tl.constexpr, PDL: tl.constexpr, STEPS: tl.constexpr,
                CHOICES: tl.constexpr, FOLD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out[token] = sum over choices of (h[slot] @ w2[expert].T + b2[expert]) * router weight, in one program.

    For few tokens: a program multiplies BN rows of all experts of a token with FOLD parts of the columns side by side,
    as `accumulate` does with parts; CHOICES is TOP_K rounded up to a power of two, CHOICES * FOLD at most 16. No loop:
    weights wait in registers and are asked for before the predecessor has ended. Grid tokens * tiles.
    """
    PARTS: tl.constexpr = CHOICES * FOLD
    VN: tl.constexpr = PARTS * BN
    RC: tl.constexpr = VN // 64
    CK: tl.constexpr = 64 if FORMAT == "int4" or FORMAT == "mxfp4" else 32
    KC: tl.constexpr = BK // CK
    pid = tl.program_id(0)
    token = pid // tiles
    tile_n = pid % tiles
    ids_ptr += token * TOP_K
    part = tl.arange(0, KC * RC * 4)
    part_warp = part % (RC * 4)
    part_choice = part_warp // (FOLD * BN // 16)
    part_expert = local_ids(ids_ptr, map_ptr, part_choice, part_choice < TOP_K, HAS_MAP)
    part_row = tl.minimum(tile_n * (BN // 16) + part_warp % (BN // 16), n_chunks * 4 - 1)
    part_chunk = part_warp // (BN // 16) % FOLD * (STEPS * KC) + part // (RC * 4)
    w_offsets = part_expert.to(tl.int64) * n_chunks * k_chunks * 2048
    w_offsets += part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part_chunk * 2048
    w_ptrs = w_ptr + w_offsets[:, None] + tl.arange(0, 512)[None, :]
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    choice = warp // (FOLD * BN // 16)
    expert = local_ids(ids_ptr, map_ptr, choice, choice < TOP_K, HAS_MAP)
    row = tl.minimum(tile_n * (BN // 16) + warp % (BN // 16), n_chunks * 4 - 1)
    fold = warp // (BN // 16) % FOLD * STEPS
    s_offset = tl.maximum(expert, 0).to(tl.int64) * s_stride
    tiles_of_weights = ()
    for step in tl.static_range(STEPS):
        inside = (part_expert >= 0) & (part_chunk + step * KC < k_chunks)
        packed = tl.load(w_ptrs + step * (KC * 2048), mask=inside[:, None], other=0)
        words, zeros = load_scales(s_ptr + s_offset, z_ptr + s_offset, row, fold + step, columns, FORMAT, GROUP,
                                   HAS_ZERO, EVEN_K, 2, BK)  # fmt: skip
        tiles_of_weights = tiles_of_weights + ((packed.reshape(KC, RC, 4, 512).trans(1, 0, 2, 3), words, zeros),)
    j = tl.arange(0, CHOICES)
    local = local_ids(ids_ptr, map_ptr, j, j < TOP_K, HAS_MAP)
    present = local >= 0
    if WEIGHT_INPUT:
        router = present.to(tl.float32)
    else:
        router = tl.load(topk_weights_ptr + token * TOP_K + j, mask=present, other=0.0).to(tl.float32)
    n = tile_n * BN + tl.arange(0, BN)
    padded = n_chunks * 64
    of_rows = tl.maximum(local, 0).to(tl.int64)[:, None] * padded + n[None, :]
    there = present[:, None] & (n < padded)[None, :]
    if HAS_ROW_SCALE:
        row_scale = tl.load(row_scale_ptr + of_rows, mask=there, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + of_rows, mask=there, other=0.0)
    column = tl.arange(0, 16)
    k = (column % FOLD * (STEPS * BK))[:, None] + tl.arange(0, BK)[None, :]
    mine = (column < FOLD * TOP_K)[:, None]
    x_ptrs = h_ptr + (token * TOP_K + column // FOLD).to(tl.int64)[:, None] * columns + k
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = ()
    for step in tl.static_range(STEPS):
        mask = mine & (local_ids(ids_ptr, map_ptr, column // FOLD, column < FOLD * TOP_K, HAS_MAP) >= 0)[:, None]
        if not EVEN_K:
            mask = mask & (k + step * BK < columns)
        x = x + (tl.load(x_ptrs + step * BK, mask=mask, other=0.0),)
    acc = tl.zeros((VN, 16), tl.float32)
    for step in tl.static_range(STEPS):
        packed, words, zeros = tiles_of_weights[step]
        acc = multiply(acc, x[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, PROMOTE, BK)
    diagonal = tl.arange(0, PARTS)[:, None, None] == column[None, None, :]
    value = tl.sum(tl.where(diagonal, acc.reshape(PARTS, BN, 16), 0.0), axis=2)
    value = tl.sum(value.reshape(CHOICES, FOLD, BN), axis=1)
    if HAS_ROW_SCALE:
        value *= row_scale
    if HAS_BIAS:
        value += bias
    value = tl.sum(tl.where(present[:, None], value * router[:, None], 0.0), axis=0)
    tl.store(out_ptr + token.to(tl.int64) * out_stride + n, value.to(out_ptr.dtype.element_ty), mask=n < hidden)


@triton.jit
def sum_slots(partial_ptr, out_ptr, ids_ptr, map_ptr, hidden, out_stride, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
              BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out[token] = sum of the token's partial rows that have a local expert, in the order of its choices, in float32.

    partial [tokens * TOP_K, hidden], out [tokens, hidden]; grid (tokens, ceil(hidden / BLOCK)).
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = ()
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        valid = valid + (local_ids(ids_ptr, map_ptr, slot, slot >= 0, HAS_MAP) >= 0,)
    if PDL:
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        mask = (column < hidden) & valid[j]
        part = tl.load(partial_ptr + (token * TOP_K + j).to(tl.int64) * hidden + column, mask=mask, other=0.0)
        total += part.to(tl.float32)
    out = out_ptr + token.to(tl.int64) * out_stride + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < hidden)


@triton.jit
def round_trip_rows(x_ptr, out_ptr, columns, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = x through MXFP8 and back (`mx_round_trip` per 32 columns); grid (rows, ceil(columns / BLOCK))."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=0.0)
    value = mx_round_trip(x.to(tl.float32).reshape(BLOCK // 32, 32), 1).reshape(BLOCK)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=column < columns)
