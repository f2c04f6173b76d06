"""The launcher of a fused MoE layer on fp8 tensor cores: eight kernels, no allocation.

All launches go to the current CUDA stream, depend only on shapes, and are safe to capture in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import fp8_gemm, fp8_mxfp4_gemm, fp8_quantize, prefill_launch
from .fp8_weights import Fp8Matrix, Fp8Weights
from .fused_moe import aligned_offsets, check_arguments, resolve_activation, workspace_view
from .weights import PackedMatrix, PackedWeights


def buffer_sizes(weights: Fp8Weights | PackedWeights, tokens: int, top_k: int) -> dict[str, int]:
    """Bytes of each part of a call's workspace.

    `wide` holds h, then the results of the second GEMM; `codes` holds x, then h, in e4m3; the other parts are the
    buffers of `prefill_launch.sort_buffer_sizes`.
    """
    slots, widest = tokens * top_k, max(weights.hidden, weights.intermediate)
    wide = {"wide": slots * widest * 2, "codes": slots * widest, "scales": slots * 4}
    return wide | prefill_launch.sort_buffer_sizes(slots, weights.experts)


def workspace_bytes(weights: Fp8Weights | PackedWeights, tokens: int, top_k: int) -> int:
    """Bytes of workspace that `fused_moe_fp8` needs, 16-byte aligned, with any content."""
    return aligned_offsets([*buffer_sizes(weights, tokens, top_k).values()])[-1]


def _buffers(
    weights: Fp8Weights | PackedWeights, tokens: int, top_k: int, workspace: torch.Tensor
) -> dict[str, torch.Tensor]:
    needs = buffer_sizes(weights, tokens, top_k)
    types = {"wide": weights.dtype, "codes": torch.float8_e4m3fn, "scales": torch.float32, "routers": torch.float32}
    starts = aligned_offsets([*needs.values()])[:-1]
    dtypes = [types.get(name, torch.int32) for name in needs]
    return {
        name: workspace_view(workspace, start, size // dtype.itemsize, dtype)
        for (name, size), start, dtype in zip(needs.items(), starts, dtypes, strict=True)
    }


def fused_moe_fp8(
    x: torch.Tensor,
    weights: Fp8Weights | PackedWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    workspace: torch.Tensor,
    out: torch.Tensor,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Runs a layer as `fused_moe`, whose arguments it takes, with products in fp8; returns out.

    x and h enter the products as e4m3 with one float32 scale a token (`fp8_quantize.quantize_rows`), h after it was
    rounded to x's dtype. `weights` are e4m3 with a float32 scale per row, or MXFP4 as `fused_moe` reads it in bfloat16,
    whose rows must keep `wgmma_fragments.MAX_E4M3_SPREAD`; `workspace` has `workspace_bytes(...)` bytes. ValueError: a
    shape, dtype or device does not fit, the workspace is too small, or the activation has no kernel.
    """
    check_arguments(x, weights, topk_weights, topk_ids, activation, out)
    packed = isinstance(weights, PackedWeights)
    if packed and (weights.format, weights.dtype) != ("mxfp4", torch.bfloat16):
        raise ValueError(f"weights are {weights.format} for {weights.dtype}; expected mxfp4 for torch.bfloat16")
    gemm: Any = fp8_mxfp4_gemm if packed else fp8_gemm
    tokens, top_k = topk_ids.shape
    available, needed = workspace.numel() * workspace.element_size(), workspace_bytes(weights, tokens, top_k)
    if available < needed:
        raise ValueError(f"workspace of {available} bytes; {tokens} tokens need {needed} (workspace_bytes)")
    if tokens == 0:
        return out
    if pdl is None:
        pdl = torch.cuda.get_device_capability(x.device)[0] >= 9
    name, *act = resolve_activation(activation, weights.gated, alpha, beta)
    slots, experts, hidden, inner = tokens * top_k, weights.experts, weights.hidden, weights.intermediate
    parts = _buffers(weights, tokens, top_k, workspace)
    wide, codes, scales, ordered, routers, table = (
        parts[part] for part in ("wide", "codes", "scales", "sorted", "routers", "blocks")
    )
    # add: `quantize_rows` reads the sums of the counts, which only `scan_chunks` stores.
    prefill_launch.sort_slots(
        topk_weights, topk_ids, expert_map, experts, parts, add=True, pdl=pdl, block_tokens=gemm.BLOCK_TOKENS
    )
    totals, padded = parts["counts"], prefill_launch.padded_experts(experts)
    blocks, options = prefill_launch.max_blocks(slots, experts), prefill_launch.launch_options(pdl)
    grid = (prefill_launch.num_sms(x.device),)

    def quantize(source: torch.Tensor, stride: int, columns: int, gather: bool) -> None:
        block, rows, warps = fp8_quantize.launch_shape(columns)
        fp8_quantize.quantize_rows[(-(-slots // rows),)](
            source, codes, scales, ordered, totals, slots, columns, stride, TOP_K=top_k, GATHER=gather, EP=padded,
            BLOCK=block, ROWS=rows, FRAGMENT_ORDER=packed or None, num_warps=warps, **options,
        )  # fmt: skip

    def multiply(matrix: Fp8Matrix | PackedMatrix, width: int, down: bool, *act: float) -> None:
        rows, columns = matrix.rows, matrix.columns
        source = codes[: slots * columns].view(slots, columns)
        if isinstance(matrix, PackedMatrix):
            operands, sizes = _packed_descriptors(source, matrix), (width, matrix.codes.shape[1], *act, 16)
        else:
            weight_codes = matrix.codes.view(-1, columns)
            operands, sizes = (_descriptor(source, 64), _descriptor(weight_codes, 128)), (rows, width, *act)
        gemm.product[grid](
            *operands, matrix.row_scale, table if matrix.bias is None else matrix.bias, wide, scales, ordered, routers,
            table, blocks, -(-rows // gemm.TILE_ROWS), columns, *sizes, HAS_BIAS=matrix.bias is not None,
            ROUTER_WEIGHT=down != apply_router_weight_on_input, DOWN=down, GATED=weights.gated and not down,
            ACTIVATION="" if down else name, HAS_LIMIT=limit is not None and not down, STAGES=gemm.NUM_STAGES,
            ROTATE=rows % gemm.TILE_ROWS > 0, num_warps=4, **options,
        )  # fmt: skip

    quantize(x, x.stride(0), hidden, True)
    multiply(weights.w13, inner, False, *act, limit or 0.0)
    quantize(wide, inner, inner, False)
    multiply(weights.w2, hidden, True, 0.0, 0.0, 0.0)
    prefill_launch.sum_topk(wide, out, topk_ids, expert_map, pdl=pdl)
    return out


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """The copy engine's description of an e4m3 matrix that is read `rows` x 128 at a time."""
    return TensorDescriptor.from_tensor(matrix, [rows, 128], fp8_gemm.TILE_LAYOUT)


def _packed_descriptors(x: torch.Tensor, matrix: PackedMatrix) -> tuple[TensorDescriptor, ...]:
    """The copy engine's descriptions of x and of all experts' codes and scales, as `fp8_mxfp4_gemm.product` reads them:
    of lines of 128 bytes, a chunk of 64 rows and columns has 16, its scales of 128 columns have two."""
    assert matrix.scales is not None
    chunks = matrix.codes.shape[2], matrix.scales.shape[2]
    codes, scales = matrix.codes.view(-1, chunks[0] * 16, 128), matrix.scales.view(-1, chunks[1] * 2, 32)
    return (
        _descriptor(x, 64),
        TensorDescriptor.from_tensor(codes, [2, 32, 128], fp8_mxfp4_gemm.CODES_LAYOUT),
        TensorDescriptor.from_tensor(scales, [2, 2, 32], fp8_mxfp4_gemm.SCALES_LAYOUT),
    )


def warmup(
    weights: Fp8Weights | PackedWeights,
    top_k: int,
    *,
    activation: str,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Compiles every kernel of the layer (or reads it from Triton's cache) by running one token of zeros.

    No kernel is specialized on the number of tokens.
    """
    device = weights.w13.codes.device
    x = torch.zeros(1, weights.hidden, dtype=weights.dtype, device=device)
    ids = torch.arange(top_k, device=device, dtype=torch.int32).view(1, top_k)
    ids %= weights.experts if expert_map is None else expert_map.numel()
    fused_moe_fp8(
        x,
        weights,
        torch.zeros(1, top_k, device=device),
        ids,
        activation=activation,
        limit=limit,
        workspace=torch.empty(workspace_bytes(weights, 1, top_k), dtype=torch.uint8, device=device),
        out=torch.empty_like(x),
        expert_map=expert_map,
    )
