"""The launcher of a fused MoE layer on fp8 tensor cores: eight kernels, no allocation, any number of tokens.

All launches go to the current CUDA stream, depend only on shapes, and are safe to capture in a CUDA graph.
"""

from __future__ import annotations

import itertools

import torch

from . import fp8_products, fp8_quantise, gemm, prefill_launch, prefill_route
from .fp8_weights import Fp8Matrix, Fp8Weights
from .fused_moe import _GATED, ACTIVATIONS

STAGES = 4  # of `fp8_products.product`
_BLOCK = 128  # most tokens of a block
_CHUNK = 128  # slots that one program of the sorting kernels counts
_ALIGN = 256


def sizes(weights: Fp8Weights, tokens: int, top_k: int) -> dict[str, int]:
    """Bytes of each part of a call's workspace.

    `wide` holds h, then the second product's results; `codes` holds x, then h, in e4m3.
    """
    slots, widest = tokens * top_k, max(weights.hidden, weights.intermediate)
    padded = prefill_launch._experts_padded(weights.experts)
    return {
        "wide": slots * widest * 2,
        "codes": slots * widest,
        "scales": slots * 4,
        "counts": (prefill_launch._chunks(slots) + 1) * padded * 4,
        "sorted": slots * 4,
        "routers": slots * 4,
        "blocks": (1 + 2 * prefill_launch._blocks(slots, weights.experts)) * 16,
    }


def workspace_bytes(weights: Fp8Weights, tokens: int, top_k: int) -> int:
    """What `fused_moe_fp8` needs besides its inputs: bytes of any content, 16-byte aligned."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes(weights, tokens, top_k).values())


def _parts(weights: Fp8Weights, tokens: int, top_k: int, workspace: torch.Tensor) -> dict[str, torch.Tensor]:
    needs = sizes(weights, tokens, top_k)
    types = (weights.dtype, torch.float8_e4m3fn, torch.float32, torch.int32, torch.int32, torch.float32, torch.int32)
    starts = itertools.accumulate((-(-size // _ALIGN) * _ALIGN for size in needs.values()), initial=0)
    flat = workspace.view(torch.uint8).view(-1)
    return {
        name: flat[start : start + size].view(dtype)
        for (name, size), start, dtype in zip(needs.items(), starts, types, strict=False)
    }


def _check(x: torch.Tensor, weights: Fp8Weights, topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: str,
           out: torch.Tensor, workspace: torch.Tensor) -> None:  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; the kernels know {', '.join(ACTIVATIONS)}")
    if (activation != "relu2") != weights.gated:
        kind = "gated" if weights.gated else "not gated"
        raise ValueError(f"activation {activation!r} does not fit weights that are {kind}")
    if x.dim() != 2 or x.shape[1] != weights.hidden or x.stride(1) != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [tokens, {weights.hidden}] with contiguous rows")
    if x.dtype != weights.dtype or out.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, out {out.dtype}; the weights were stored for {weights.dtype}")
    if out.shape != x.shape or out.stride(1) != 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {tuple(x.shape)} with contiguous rows")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"[{x.shape[0]}, top_k]"
        )
    if not (topk_ids.is_contiguous() and topk_weights.is_contiguous()):
        raise ValueError("topk_ids and topk_weights must be contiguous")
    tokens, top_k = topk_ids.shape
    available, needed = workspace.numel() * workspace.element_size(), workspace_bytes(weights, tokens, top_k)
    if available < needed:
        raise ValueError(f"workspace of {available} bytes; {tokens} tokens need {needed} (workspace_bytes)")


def fused_moe_fp8(
    x: torch.Tensor,
    weights: Fp8Weights,
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
    """out[t] = sum over j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t]); returns out.

    x and h enter the products as e4m3 with one float32 scale a token (`fp8_quantise.quantise_rows`), h after it was
    rounded to x's dtype. Arguments as those of `fused_moe`; workspace: `workspace_bytes`. Raises ValueError on what
    does not fit.
    """
    _check(x, weights, topk_weights, topk_ids, activation, out, workspace)
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return out
    if pdl is None:
        pdl = torch.cuda.get_device_capability(x.device)[0] >= 9
    name, own_alpha, own_beta = _GATED.get(activation, ("relu2", 1.0, 0.0))
    slots, experts, hidden, inner = tokens * top_k, weights.experts, weights.hidden, weights.intermediate
    ids_map = topk_ids if expert_map is None else expert_map
    has_map = expert_map is not None
    parts = _parts(weights, tokens, top_k, workspace)
    wide, codes, scales, ordered, routers, table = (
        parts[part] for part in ("wide", "codes", "scales", "sorted", "routers", "blocks")
    )
    padded = prefill_launch._experts_padded(experts)
    chunks, blocks = prefill_launch._chunks(slots), prefill_launch._blocks(slots, experts)
    counts, totals = parts["counts"][padded:], parts["counts"]
    options = {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": True}
    lists = {"EP": padded, **options}
    chunked = {"HAS_MAP": has_map, "CHUNK": _CHUNK, "num_warps": 1, **lists}
    prefill_route.count_slots[(chunks,)](topk_ids, ids_map, counts, slots, **chunked)
    # `place_slots` leaves no sums behind, which `quantise_rows` reads.
    prefill_route.add_chunks[(padded,)](counts, totals, chunks, BLOCK=512, num_warps=4, **lists)
    prefill_route.place_slots[(max(chunks, experts),)](
        topk_ids, ids_map, topk_weights, counts, totals, ordered, routers, table, slots, chunks, experts, blocks,
        ADD=False, BM=_BLOCK, **chunked,
    )  # fmt: skip
    grid = (prefill_launch._processors(x.device),)

    def quantise(source: torch.Tensor, stride: int, columns: int, gather: bool) -> None:
        fp8_quantise.quantise_rows[(slots,)](
            source, codes, scales, ordered, totals, columns, stride, TOP_K=top_k, GATHER=gather,
            BLOCK=1 << (columns - 1).bit_length(), num_warps=4, **lists,
        )  # fmt: skip

    def multiply(matrix: Fp8Matrix, width: int, down: bool, act: tuple[float, float, float]) -> None:
        rows, columns = matrix.rows, matrix.columns
        fp8_products.product[grid](
            _box(codes[: slots * columns].view(slots, columns), 64), _box(matrix.codes.view(-1, columns), 128),
            matrix.row_scale, table if matrix.bias is None else matrix.bias, wide, scales, ordered, routers, table,
            blocks, -(-rows // 256), columns, rows, width, *act, HAS_BIAS=matrix.bias is not None,
            WEIGHT=down != apply_router_weight_on_input, DOWN=down, GATED=weights.gated and not down, ACTIVATION=name,
            HAS_LIMIT=limit is not None and not down, STAGES=STAGES, MOVE=rows % 256 > 0, num_warps=4,
            **options,
        )  # fmt: skip

    quantise(x, x.stride(0), hidden, True)
    act = (own_alpha if alpha is None else alpha, own_beta if beta is None else beta, limit or 0.0)
    multiply(weights.w13, inner, False, act)
    quantise(wide, inner, inner, False)
    multiply(weights.w2, hidden, True, (0.0, 0.0, 0.0))
    gemm.sum_slots[(tokens, -(-hidden // 1024))](
        wide, out, topk_ids, ids_map, hidden, out.stride(0), TOP_K=top_k, HAS_MAP=has_map, BLOCK=1024, num_warps=4,
        **options,
    )  # fmt: skip
    return out


def _box(matrix: torch.Tensor, rows: int) -> object:
    """The copy engine's description of a matrix that is read `rows` x 128 at a time."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, 128], fp8_products.BOX)


def warmup(
    weights: Fp8Weights,
    top_k: int,
    *,
    activation: str,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Compiles every kernel of the layer (or reads it from Triton's cache) by running one token of zeros.

    No kernel is specialised on the number of tokens.
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
