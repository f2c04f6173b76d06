"""Launches of a fused MoE layer for many tokens: five to seven kernels."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import gemm, prefill, prefill_route
from .prefill_config import MAX_BLOCK_TOKENS, PrefillConfig, resolve_stages
from .weights import PackedMatrix, PackedWeights

_CODES_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
_ROWS_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Registers of a thread of `prefill.down` (384 threads): few enough for a multiprocessor to also run a program of
# `gemm.sum_topk_strips` (128 threads of 56 registers).
_DOWN_MAXNREG = 152
_SORT_CHUNK = 128  # slots that one program of the sorting kernels counts
_MIN_OVERLAPPED_BYTES = (
    100_000_000  # bytes of the second GEMM's results from which their first half is summed beside the second
)
_MAX_INLINE_COUNTS = (
    64 * 128
)  # counts that every program of `place_slots` adds up itself, without a launch of `scan_chunks`


def padded_experts(experts: int) -> int:
    """The number of experts rounded up to a power of two, at least 16."""
    return max(16, 1 << (experts - 1).bit_length())


def max_blocks(slots: int, experts: int) -> int:
    """The most blocks that any routing of `slots` slots can give."""
    active = min(slots, experts)
    return active + (slots - active) // MAX_BLOCK_TOKENS


def _num_sort_chunks(slots: int) -> int:
    return -(-slots // _SORT_CHUNK)


def sort_buffer_sizes(slots: int, experts: int) -> dict[str, int]:
    """Bytes of each buffer of `sort_slots`: routers float32, the others int32."""
    return {
        "counts": (_num_sort_chunks(slots) + 1) * padded_experts(experts) * 4,
        "sorted": slots * 4,
        "blocks": (1 + 2 * max_blocks(slots, experts)) * 16,
        "routers": slots * 4,
    }


def buffer_sizes(weights: PackedWeights, tokens: int, top_k: int) -> dict[str, int]:
    """Bytes of each buffer of a call, by the names that `launch` uses."""
    slots = tokens * top_k
    wide = {"h": slots * weights.intermediate * 2, "partial": slots * weights.hidden * 2}
    return wide | sort_buffer_sizes(slots, weights.experts)


@functools.cache
def num_sms(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _constexprs(matrix: PackedMatrix) -> dict[str, object]:
    return {
        "HAS_ZERO": matrix.zeros is not None,
        "HAS_ROW_SCALE": matrix.row_scale is not None,
        "HAS_BIAS": matrix.bias is not None,
    }


def needs_scan_kernel(slots: int, experts: int) -> bool:
    """Whether `scan_chunks` is launched; `place_slots` is compiled differently then."""
    return _num_sort_chunks(slots) * padded_experts(experts) > _MAX_INLINE_COUNTS


def launch_options(pdl: bool) -> dict[str, object]:
    """Launch options of every kernel for many tokens."""
    return {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": True}


def sort_slots(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    buffers: dict[str, torch.Tensor],
    *,
    add: bool,
    pdl: bool,
    block_tokens: int = MAX_BLOCK_TOKENS,
) -> None:
    """Launches the kernels of `prefill_route.py`, which fill the buffers of `sort_buffer_sizes` (see `place_slots`).

    add: `scan_chunks` adds the counts up (`needs_scan_kernel`), and leaves every expert's number of positions at the
    beginning of `counts`.
    """
    slots = topk_ids.numel()
    ids_map = topk_ids if expert_map is None else expert_map
    chunks, blocks, padded = _num_sort_chunks(slots), max_blocks(slots, experts), padded_experts(experts)
    counts, totals = buffers["counts"][padded:], buffers["counts"]
    lists = {"EP": padded, **launch_options(pdl)}
    chunked = {"HAS_MAP": expert_map is not None, "CHUNK": _SORT_CHUNK, "num_warps": 1, **lists}
    prefill_route.count_slots[(chunks,)](topk_ids, ids_map, counts, slots, **chunked)
    if add:
        prefill_route.scan_chunks[(padded,)](counts, totals, chunks, BLOCK=512, num_warps=4, **lists)
    prefill_route.place_slots[(max(chunks, experts),)](
        topk_ids, ids_map, topk_weights, counts, totals, buffers["sorted"], buffers["routers"], buffers["blocks"],
        slots, chunks, experts, blocks, INLINE_SCAN=not add, BM=block_tokens, **chunked,
    )  # fmt: skip


def sum_topk(
    partial: torch.Tensor,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *,
    ready: int = 0,
    pdl: bool,
) -> None:
    """Launches `gemm.sum_topk_strips`: out, 16-bit `[tokens, hidden]`, from partial, `[slots, hidden]`.

    ready: how many strips of 256 columns were complete before the previous kernel began.
    """
    tokens, top_k = topk_ids.shape
    hidden = out.shape[1]
    gemm.sum_topk_strips[(-(-tokens // 4) * -(-hidden // 256),)](
        partial, out, topk_ids, topk_ids if expert_map is None else expert_map, tokens, hidden, out.stride(0), ready,
        TOP_K=top_k, HAS_MAP=expert_map is not None, num_warps=4, maxnreg=56, **launch_options(pdl),
    )  # fmt: skip


def launch(
    x: torch.Tensor,
    weights: PackedWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    buffers: dict[str, torch.Tensor],
    out: torch.Tensor,
    config: PrefillConfig,
    *,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_input: bool,
    pdl: bool,
    addend: torch.Tensor | None = None,
    slot_h: torch.Tensor | None = None,
) -> None:
    """Runs the layer; arguments as `fused_moe` has checked them.

    buffers: of `buffer_sizes` bytes, h and partial in x's dtype, routers float32, the others int32; any content. Rows
    of x that are not aligned to the 16 bytes of a copy into shared memory, or not a multiple of 16 elements apart (what
    Triton can be told of them), are copied to memory allocated here. addend, slot_h: as `fused_moe` takes them.
    """
    if x.data_ptr() % 16 or x.stride(0) % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tokens, top_k = topk_ids.shape
    slots, experts = tokens * top_k, weights.experts
    h, partial, ordered, table, routers = (buffers[name] for name in ("h", "partial", "sorted", "blocks", "routers"))
    blocks, options = max_blocks(slots, experts), launch_options(pdl)
    add = needs_scan_kernel(slots, experts)
    sort_slots(topk_weights, topk_ids, expert_map, experts, buffers, add=add, pdl=pdl)
    shared = {
        "TOP_K": top_k, "FORMAT": weights.format, "GROUP": weights.group, "WEIGHT_INPUT": weight_input,
        "num_warps": 4, **options,
    }  # fmt: skip
    w13, w2 = weights.w13, weights.w2
    grid = (num_sms(x.device),)

    def codes(matrix: PackedMatrix) -> TensorDescriptor:
        """All experts' codes as lines of 128 bytes, [chunks of rows, lines, 128], copied by the step of 256 rows."""
        lines = matrix.codes.view(-1, matrix.codes.shape[2] * 16, 128)
        chunks = 1 if weights.format in ("int4", "mxfp4") else 2
        return TensorDescriptor.from_tensor(lines, [4, chunks * 16, 128], _CODES_LAYOUT)

    def operands(matrix: PackedMatrix) -> tuple[torch.Tensor, ...]:
        tensors = (matrix.scales, matrix.zeros, matrix.row_scale, matrix.bias)
        return tuple(table if tensor is None else tensor for tensor in tensors)

    def stride(matrix: PackedMatrix) -> int:
        return 0 if matrix.scales is None else matrix.scales.stride(0)

    prefill.gate_up[grid](
        x, codes(w13), *operands(w13), h, ordered, routers, table, blocks, -(-w13.rows // 256), x.stride(0),
        weights.hidden, weights.intermediate, w13.codes.shape[1], stride(w13), alpha, beta, limit or 0.0, 16,
        GATED=weights.gated, ACTIVATION=activation, HAS_LIMIT=limit is not None,
        STAGES=resolve_stages(weights, config, weights.gated), ROTATE=w13.rows % 256 > 0, **_constexprs(w13), **shared,
        addend_ptr=addend, slot_h_ptr=slot_h,
    )  # fmt: skip
    # Two launches where it pays to sum the first one's columns while the second one runs. `sum_topk_strips` begins when
    # all programs of the second launch run, and these have waited for the end of the first launch.
    tiles = -(-w2.rows // 256)
    ready = tiles // 2 if partial.numel() * 2 >= _MIN_OVERLAPPED_BYTES else 0
    for begin, end in ((0, ready), (ready, tiles)) if ready else ((0, tiles),):
        prefill.down[grid](
            TensorDescriptor.from_tensor(h.view(slots, -1), [32, 64], _ROWS_LAYOUT), codes(w2),
            *operands(w2), partial, ordered, routers, table, blocks, end - begin, begin, weights.intermediate,
            weights.hidden, w2.codes.shape[1], stride(w2), 16, STAGES=resolve_stages(weights, config, False),
            ROTATE=w2.rows % 256 > 0, maxnreg=_DOWN_MAXNREG, **_constexprs(w2), **shared,
        )  # fmt: skip
    sum_topk(partial, out, topk_ids, expert_map, ready=ready, pdl=pdl)
