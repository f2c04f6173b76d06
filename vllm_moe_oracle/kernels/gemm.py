"""The Triton kernels of a fused MoE layer on packed weights: first and second GEMM, sum over top-k, MXFP8 round trip.

`gate_up` computes `h = activation(x @ w13.T + b13)` for the slots of each expert. `down` computes `h @ w2.T + b2`
times the router weights; `down_loop_n` does so for few columns, `down_fused_topk` for few tokens. `sum_topk` sums over
top-k, and so does `sum_topk_strips` for many tokens.

The GEMMs take a one-dimensional grid of `blocks * tiles along N * SPLIT_K` programs; the index of SPLIT_K changes
fastest. `counters` must be zero when a kernel starts and is zero again when it ends. With PDL a kernel starts while its
predecessor still runs, and waits (`griddepcontrol.wait`) before it reads what the predecessor wrote. `down` may read
routing ids and weights before it waits: every program of `gate_up` has waited for them before it lets `down` start.
"""

# Triton's language has no starred tuples.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .epilogue import load_epilogue_operands, mxfp8_round_trip, store_activated, store_partial
from .mainloop import dequantize_mma_step, load_scales, mainloop, sum_split_k
from .route import find_block, load_block_slots, local_ids


@triton.jit
def prefetch_l2(pointer, size):
    """One thread prefetches `size` bytes (a multiple of 16) at `pointer` (16-byte aligned) into the L2 cache."""
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
def prefetch_l2_slice(pointer, units, unit_bytes: tl.constexpr, part, parts):
    """Prefetches part number `part` of `parts` equal parts of the `units * unit_bytes` bytes at a byte pointer."""
    each = (units + parts - 1) // parts
    first = part * each
    if first < units:
        prefetch_l2(pointer + first.to(tl.int64) * unit_bytes, tl.minimum(each, units - first) * unit_bytes)


@triton.jit(do_not_specialize=["tiles", "alpha", "beta", "limit"])
def gate_up(x_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, h_ptr, ids_ptr, map_ptr, topk_weights_ptr, sorted_ptr,
            blocks_ptr, scratch_ptr, counter_ptr, w2_ptr, s2_ptr, tiles, x_stride, columns, inner, n_chunks, k_chunks,
            s_stride, w2_chunks, s2_stride, alpha, beta, limit,
            TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
            HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, GATED: tl.constexpr,
            ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, WEIGHT_INPUT: tl.constexpr, QUANTIZE: tl.constexpr,
            EVEN_K: tl.constexpr, SCALE_ACC: tl.constexpr, PER_SLOT: tl.constexpr, PREFETCH: tl.constexpr,
            PDL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT_K: tl.constexpr, K_PARTS: tl.constexpr,
            BM_REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, addend_ptr=None):  # fmt: skip
    """h[slot] = activation(x[slot // TOP_K] @ w13[expert].T + b13[expert]) for every slot with a local expert.

    x [tokens, columns] 16-bit, row stride x_stride; h [slots, inner], x's dtype. w, s, z, row_scale, bias: the tensors
    of `PackedMatrix`, s_stride the int32 words per expert of s and z; n_chunks, k_chunks: chunks along N and K.
    PER_SLOT, sorted, blocks: `find_block`. QUANTIZE: h goes through MXFP8. WEIGHT_INPUT: router weights multiply the
    input. tiles: programs along N. PREFETCH: the programs of a block prefetch the expert's w2 (w2_chunks chunks and
    s2_stride words per expert) into the L2 cache once they have streamed w13. addend: `store_activated`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    split = pid % SPLIT_K
    tile_n = pid // SPLIT_K % tiles
    block = pid // (SPLIT_K * tiles)
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    if expert < 0:
        return
    e64 = expert.to(tl.int64)
    w_ptr += e64 * n_chunks * k_chunks * 2048
    slot, slot_mask = load_block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
    x_slot, x_mask = load_block_slots(sorted_ptr, start, rows, PER_SLOT, BM, K_PARTS)
    x_rows = x_ptr + (x_slot // TOP_K).to(tl.int64) * x_stride
    rest_rows, rest_mask = x_rows, x_mask
    if BM_REST > 0:
        rest_slot, rest_mask = load_block_slots(sorted_ptr, start + BM, rows - BM, PER_SLOT, BM_REST, 1)
        rest_rows = x_ptr + (rest_slot // TOP_K).to(tl.int64) * x_stride
    n = tile_n * BN + tl.arange(0, BN)
    padded = n_chunks * 64
    if BM * K_PARTS <= 16:
        row_scale, bias, router = load_epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n,
                                                         slot, slot_mask, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                         WEIGHT_INPUT)  # fmt: skip
    acc, acc_rest = mainloop(x_rows, x_mask, rest_rows, rest_mask, w_ptr, s_ptr + e64 * s_stride,
                             z_ptr + e64 * s_stride, tile_n, n_chunks, k_chunks, columns, split, FORMAT, GROUP,
                             HAS_ZERO, EVEN_K, SCALE_ACC, False, STEPS, STAGES, SPLIT_K, K_PARTS, BM_REST, BM, BN,
                             BK)  # fmt: skip
    if PREFETCH:
        part = tile_n * SPLIT_K + split
        prefetch_l2_slice(w2_ptr + e64 * w2_chunks * 2048, w2_chunks, 2048, part, tiles * SPLIT_K)
        if s2_stride > 0:
            s2_bytes = (s2_ptr + e64 * s2_stride).to(tl.pointer_type(tl.uint8))
            prefetch_l2_slice(s2_bytes, s2_stride // 32, 128, part, tiles * SPLIT_K)
    if SPLIT_K > 1:
        acc, last = sum_split_k(acc, scratch_ptr, counter_ptr, pid // SPLIT_K, split, BM, BN, SPLIT_K)
        if not last:
            return
    if BM * K_PARTS > 16:
        row_scale, bias, router = load_epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n,
                                                         slot, slot_mask, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                         WEIGHT_INPUT)  # fmt: skip
    store_activated(acc, row_scale, bias, router, h_ptr, slot, slot_mask, tile_n, inner, alpha, beta, limit,
                    HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, GATED, ACTIVATION, HAS_LIMIT, QUANTIZE, BM, BN,
                    addend_ptr)  # fmt: skip
    if BM_REST > 0:
        if WEIGHT_INPUT:
            router = tl.load(topk_weights_ptr + rest_slot, mask=rest_mask, other=0.0).to(tl.float32)
        store_activated(acc_rest, row_scale, bias, router, h_ptr, rest_slot, rest_mask, tile_n, inner, alpha, beta,
                        limit, HAS_ROW_SCALE, HAS_BIAS, WEIGHT_INPUT, GATED, ACTIVATION, HAS_LIMIT, QUANTIZE, BM_REST,
                        BN, addend_ptr)  # fmt: skip


@triton.jit
def count_local_choices(ids_ptr, map_ptr, token, mask, HAS_MAP: tl.constexpr, TOP_K: tl.constexpr):
    """Number of choices of each token with a local expert, int32, token's shape."""
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
         EVEN_K: tl.constexpr, SCALE_ACC: tl.constexpr, PER_SLOT: tl.constexpr, FUSE_SUM: tl.constexpr,
         PDL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SPLIT_K: tl.constexpr, K_PARTS: tl.constexpr,
         BM_REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """partial[slot] = (h[slot] @ w2[expert].T + b2[expert]) * router weight; with FUSE_SUM also out[token] = their sum.

    h [slots, columns]; partial [slots, hidden] and out [tokens, hidden] of h's dtype. FUSE_SUM: for each token and tile
    the program that arrives last adds the token's partial rows in the order of its choices, so the result does not
    depend on which program is last; tokens without a local expert get zeros. WEIGHT_INPUT: router weights were applied
    to the input.
    """
    pid = tl.program_id(0)
    split = pid % SPLIT_K
    tile_n = pid // SPLIT_K % tiles
    block = pid // (SPLIT_K * tiles)
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    slot, slot_mask = load_block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
    x_slot, x_mask = load_block_slots(sorted_ptr, start, rows, PER_SLOT, BM, K_PARTS)
    # Weights that are held in registers are loaded before the predecessor has ended.
    LOAD_BEFORE_WAIT: tl.constexpr = PDL and STEPS > 0
    if PDL and not LOAD_BEFORE_WAIT:
        gdc_wait()
        gdc_launch_dependents()
    n = tile_n * BN + tl.arange(0, BN)
    token = slot // TOP_K
    if FUSE_SUM and pid < SPLIT_K * tiles and split == 0:
        for first in range(0, tokens, BM):
            empty = first + tl.arange(0, BM)
            inside = empty < tokens
            empty_mask = inside & (count_local_choices(ids_ptr, map_ptr, empty, inside, HAS_MAP, TOP_K) == 0)
            zero_ptrs = out_ptr + empty.to(tl.int64)[None, :] * out_stride + n[:, None]
            zeros = tl.zeros((BN, BM), out_ptr.dtype.element_ty)
            tl.store(zero_ptrs, zeros, mask=empty_mask[None, :] & (n < hidden)[:, None])
    if expert < 0:
        if LOAD_BEFORE_WAIT:
            gdc_wait()
        return
    e64 = expert.to(tl.int64)
    w_ptr += e64 * n_chunks * k_chunks * 2048
    padded = n_chunks * 64
    if BM * K_PARTS <= 16:
        row_scale, bias, router = load_epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n,
                                                         slot, slot_mask, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                         not WEIGHT_INPUT)  # fmt: skip
    h_rows = h_ptr + x_slot.to(tl.int64) * columns
    rest_rows, rest_mask = h_rows, x_mask
    if BM_REST > 0:
        rest_slot, rest_mask = load_block_slots(sorted_ptr, start + BM, rows - BM, PER_SLOT, BM_REST, 1)
        rest_rows = h_ptr + rest_slot.to(tl.int64) * columns
    acc, acc_rest = mainloop(h_rows, x_mask, rest_rows, rest_mask, w_ptr, s_ptr + e64 * s_stride,
                             z_ptr + e64 * s_stride, tile_n, n_chunks, k_chunks, columns, split, FORMAT, GROUP,
                             HAS_ZERO, EVEN_K, SCALE_ACC, LOAD_BEFORE_WAIT, STEPS, STAGES, SPLIT_K, K_PARTS, BM_REST,
                             BM, BN, BK)  # fmt: skip
    if SPLIT_K > 1:
        acc, last = sum_split_k(acc, scratch_ptr, counter_ptr, pid // SPLIT_K, split, BM, BN, SPLIT_K)
        if not last:
            return
    if BM * K_PARTS > 16:
        row_scale, bias, router = load_epilogue_operands(row_scale_ptr, bias_ptr, topk_weights_ptr, e64 * padded, n,
                                                         slot, slot_mask, padded, HAS_ROW_SCALE, HAS_BIAS,
                                                         not WEIGHT_INPUT)  # fmt: skip
    store_partial(acc, row_scale, bias, router, partial_ptr, slot, slot_mask, n, hidden, HAS_ROW_SCALE, HAS_BIAS,
                  WEIGHT_INPUT)  # fmt: skip
    if BM_REST > 0:
        if not WEIGHT_INPUT:
            router = tl.load(topk_weights_ptr + rest_slot, mask=rest_mask, other=0.0).to(tl.float32)
        store_partial(acc_rest, row_scale, bias, router, partial_ptr, rest_slot, rest_mask, n, hidden, HAS_ROW_SCALE,
                      HAS_BIAS, WEIGHT_INPUT)  # fmt: skip
    if FUSE_SUM:
        wanted = count_local_choices(ids_ptr, map_ptr, token, slot_mask, HAS_MAP, TOP_K)
        counter_ptrs = token_counter_ptr + token * tiles + tile_n
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptrs, 1, mask=slot_mask, sem="acq_rel", scope="gpu")
        finish = slot_mask & (arrived == wanted - 1)
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
def down_loop_n(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, out_ptr, ids_ptr, map_ptr,
                topk_weights_ptr, sorted_ptr, blocks_ptr, scratch_ptr, counter_ptr, token_counter_ptr, tokens, tiles,
                columns, hidden, out_stride, n_chunks, k_chunks, s_stride,
                TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
                HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
                SCALE_ACC: tl.constexpr, PER_SLOT: tl.constexpr, PDL: tl.constexpr, STEPS: tl.constexpr,
                STAGES: tl.constexpr, N_TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """`down` for few columns (STEPS * BK of them): a program keeps its h and computes N_TILES tiles along N.

    Loads for the next tile overlap with the current one. Grid blocks * ceil(tiles / N_TILES).
    """
    RC: tl.constexpr = BN // 64
    CK: tl.constexpr = 64 if FORMAT == "int4" or FORMAT == "mxfp4" else 32
    KC: tl.constexpr = BK // CK
    pid = tl.program_id(0)
    sweeps = (tiles + N_TILES - 1) // N_TILES
    block = pid // sweeps
    first = pid % sweeps * N_TILES
    expert, start, rows = find_block(ids_ptr, map_ptr, blocks_ptr, block, HAS_MAP, PER_SLOT)
    slot, slot_mask = load_block_slots(sorted_ptr, start, rows, PER_SLOT, BM, 1)
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
        router = tl.load(topk_weights_ptr + slot, mask=slot_mask, other=0.0).to(tl.float32)
    x_ptrs = (h_ptr + slot.to(tl.int64) * columns)[:, None] + tl.arange(0, BK)[None, :]
    x = ()
    for step in tl.static_range(STEPS):
        x = x + (tl.load(x_ptrs + step * BK, mask=slot_mask[:, None], other=0.0),)
    part = tl.arange(0, KC * RC * 4)
    part_warp = part % (RC * 4)
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    for tile_n in tl.range(first, tl.minimum(first + N_TILES, tiles), num_stages=STAGES):
        part_row = tl.minimum(tile_n * (BN // 16) + part_warp, n_chunks * 4 - 1)
        row = tl.minimum(tile_n * (BN // 16) + warp, n_chunks * 4 - 1)
        w_ptrs = w_ptr + (part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part // (RC * 4) * 2048)[:, None]
        w_ptrs = w_ptrs + tl.arange(0, 512)[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
        for step in tl.static_range(STEPS):
            packed = tl.load(w_ptrs + step * (KC * 2048)).reshape(KC, RC, 4, 512).trans(1, 0, 2, 3)
            words, zeros = load_scales(s_ptr, z_ptr, row, step, columns, FORMAT, GROUP, HAS_ZERO, True, 1, BK)
            acc = dequantize_mma_step(acc, x[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, BK)
        n = tile_n * BN + tl.arange(0, BN)
        if HAS_ROW_SCALE:
            acc *= tl.load(row_scale_ptr + e64 * padded + n, mask=n < padded, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + e64 * padded + n, mask=n < padded, other=0.0)[:, None]
        if not WEIGHT_INPUT:
            acc *= router[None, :]
        offsets = slot.to(tl.int64)[None, :] * hidden + n[:, None]
        mask = slot_mask[None, :] & (n < hidden)[:, None]
        tl.store(partial_ptr + offsets, acc.to(partial_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def down_fused_topk(h_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, bias_ptr, partial_ptr, out_ptr, ids_ptr, map_ptr,
                    topk_weights_ptr, sorted_ptr, blocks_ptr, scratch_ptr, counter_ptr, token_counter_ptr, tokens,
                    tiles, columns, hidden, out_stride, n_chunks, k_chunks, s_stride,
                    TOP_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
                    HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr,
                    WEIGHT_INPUT: tl.constexpr, EVEN_K: tl.constexpr, SCALE_ACC: tl.constexpr, PDL: tl.constexpr,
                    STEPS: tl.constexpr, CHOICES: tl.constexpr, K_PARTS: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr):  # fmt: skip
    """out[token] = sum over choices of (h[slot] @ w2[expert].T + b2[expert]) * router weight, in one program.

    For few tokens: a program multiplies BN rows of all experts of a token with K_PARTS parts of the columns side by
    side, as `mainloop` does with parts; CHOICES is TOP_K rounded up to a power of two, CHOICES * K_PARTS at most 16. No
    loop: weights wait in registers and are asked for before the predecessor has ended. Grid tokens * tiles.
    """
    PARTS: tl.constexpr = CHOICES * K_PARTS
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
    part_choice = part_warp // (K_PARTS * BN // 16)
    part_expert = local_ids(ids_ptr, map_ptr, part_choice, part_choice < TOP_K, HAS_MAP)
    part_row = tl.minimum(tile_n * (BN // 16) + part_warp % (BN // 16), n_chunks * 4 - 1)
    part_chunk = part_warp // (BN // 16) % K_PARTS * (STEPS * KC) + part // (RC * 4)
    w_offsets = part_expert.to(tl.int64) * n_chunks * k_chunks * 2048
    w_offsets += part_row // 4 * (k_chunks * 2048) + part_row % 4 * 512 + part_chunk * 2048
    w_ptrs = w_ptr + w_offsets[:, None] + tl.arange(0, 512)[None, :]
    warp = (tl.arange(0, RC)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
    choice = warp // (K_PARTS * BN // 16)
    expert = local_ids(ids_ptr, map_ptr, choice, choice < TOP_K, HAS_MAP)
    row = tl.minimum(tile_n * (BN // 16) + warp % (BN // 16), n_chunks * 4 - 1)
    first_step = warp // (BN // 16) % K_PARTS * STEPS
    s_offset = tl.maximum(expert, 0).to(tl.int64) * s_stride
    tiles_of_weights = ()
    for step in tl.static_range(STEPS):
        inside = (part_expert >= 0) & (part_chunk + step * KC < k_chunks)
        packed = tl.load(w_ptrs + step * (KC * 2048), mask=inside[:, None], other=0)
        words, zeros = load_scales(s_ptr + s_offset, z_ptr + s_offset, row, first_step + step, columns, FORMAT, GROUP,
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
    k = (column % K_PARTS * (STEPS * BK))[:, None] + tl.arange(0, BK)[None, :]
    mine = (column < K_PARTS * TOP_K)[:, None]
    x_ptrs = h_ptr + (token * TOP_K + column // K_PARTS).to(tl.int64)[:, None] * columns + k
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = ()
    for step in tl.static_range(STEPS):
        mask = mine & (local_ids(ids_ptr, map_ptr, column // K_PARTS, column < K_PARTS * TOP_K, HAS_MAP) >= 0)[:, None]
        if not EVEN_K:
            mask = mask & (k + step * BK < columns)
        x = x + (tl.load(x_ptrs + step * BK, mask=mask, other=0.0),)
    acc = tl.zeros((VN, 16), tl.float32)
    for step in tl.static_range(STEPS):
        packed, words, zeros = tiles_of_weights[step]
        acc = dequantize_mma_step(acc, x[step], packed, words, zeros, FORMAT, GROUP, HAS_ZERO, SCALE_ACC, BK)
    diagonal = tl.arange(0, PARTS)[:, None, None] == column[None, None, :]
    value = tl.sum(tl.where(diagonal, acc.reshape(PARTS, BN, 16), 0.0), axis=2)
    value = tl.sum(value.reshape(CHOICES, K_PARTS, BN), axis=1)
    if HAS_ROW_SCALE:
        value *= row_scale
    if HAS_BIAS:
        value += bias
    value = tl.sum(tl.where(present[:, None], value * router[:, None], 0.0), axis=0)
    tl.store(out_ptr + token.to(tl.int64) * out_stride + n, value.to(out_ptr.dtype.element_ty), mask=n < hidden)


@triton.jit
def sum_topk(partial_ptr, out_ptr, ids_ptr, map_ptr, hidden, out_stride, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr,
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


@triton.jit(do_not_specialize=["tokens", "ready"])
def sum_topk_strips(partial_ptr, out_ptr, ids_ptr, map_ptr, tokens, hidden, out_stride, ready, TOP_K: tl.constexpr,
                    HAS_MAP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """`sum_topk` in strips of 256 columns; the first `ready` of them are complete when this kernel begins.

    ready: fewer than all, as kernels after this one rely on its waiting for the one before. These strips are read
    without a wait of this kernel's: every multiprocessor runs a program of the kernel before, which has waited.
    Grid `(ceil(tokens / 4) * ceil(hidden / 256),)`: one strip of four tokens each, the first strips' programs first.
    """
    groups = (tokens + 3) // 4
    strip = tl.program_id(0) // groups
    token = (tl.program_id(0) % groups) * 4 + tl.arange(0, 4)[:, None]
    column = strip * 256 + tl.arange(0, 256)[None, :]
    valid = ()
    for j in tl.static_range(TOP_K):
        ids = local_ids(ids_ptr, map_ptr, token * TOP_K + j, token < tokens, HAS_MAP)
        valid = valid + ((ids >= 0) & (column < hidden),)
    # Two conditions: PDL is a constant of the compilation, the other is known when the kernel runs.
    if PDL:
        if strip >= ready:
            gdc_wait()
    total = tl.zeros([4, 256], tl.float32)
    partial_ptrs = partial_ptr + token.to(tl.int64) * (TOP_K * hidden) + column
    for j in tl.static_range(TOP_K):
        total += tl.load(partial_ptrs + j * hidden, mask=valid[j], other=0.0).to(tl.float32)
    out = out_ptr + token.to(tl.int64) * out_stride + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(token < tokens) & (column < hidden))


@triton.jit
def mxfp8_round_trip_rows(x_ptr, out_ptr, columns, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = x through MXFP8 and back (`mxfp8_round_trip` per 32 columns); grid (rows, ceil(columns / BLOCK))."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < columns, other=0.0)
    value = mxfp8_round_trip(x.to(tl.float32).reshape(BLOCK // 32, 32), 1).reshape(BLOCK)
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=column < columns)
