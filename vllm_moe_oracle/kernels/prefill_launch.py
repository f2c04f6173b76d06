"""The launcher's other half: a fused MoE layer for many tokens, in six kernels and no allocation."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import gemm, prefill, prefill_route
from .weights import Matrix, OwnWeights, bits_of

BLOCK = 128  # most tokens of a block
_CHUNK = 512  # slots that one program of the sorting kernels counts
_SHARED = 220 * 1024  # bytes of shared memory for the stages; the epilogue and the barriers need the rest of 227 KB


@dataclass(frozen=True)
class Prefill:
    """How the persistent kernels run: steps of 64 columns held in shared memory, 0 for as many as fit."""

    stages: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def reasons_against(weights: OwnWeights) -> list[str]:
    """Every reason why the persistent kernels cannot run this layer; an empty list when they can."""
    reasons = []
    for name, size in (("hidden size", weights.hidden), ("intermediate size", weights.intermediate)):
        if size % 64:
            reasons.append(f"{name} {size} is not a multiple of 64, the columns of a step")
    if weights.format.startswith("mx") and weights.dtype == torch.float16:
        reasons.append("float16 activations of MX weights are two products, which only the small tiles do")
    return reasons


def stage_bytes(weights: OwnWeights) -> int:
    """Shared memory of one stage: 128 rows of x, 256 rows of codes, scales and zero points, 64 columns each."""
    codes = 256 * 64 * bits_of(weights.format) // 8
    words = 0
    if weights.format.startswith("mx"):
        words = 256
    elif weights.group:
        words = 128 * max(1, 64 // weights.group)
    zeros = weights.w13.zeros is not None
    return BLOCK * 64 * 2 + codes + words * 4 * (1 + zeros) + 16


def stages_of(weights: OwnWeights, config: Prefill) -> int:
    """Stages that the kernels of this layer use."""
    return config.stages or min(8, _SHARED // stage_bytes(weights))


def _experts_padded(experts: int) -> int:
    return max(16, 1 << (experts - 1).bit_length())


def _blocks(slots: int, experts: int) -> int:
    active = min(slots, experts)
    return active + (slots - active) // BLOCK


def _chunks(slots: int) -> int:
    return -(-slots // _CHUNK)


def sizes(weights: OwnWeights, tokens: int, top_k: int) -> list[int]:
    """Bytes of h, partial, sorted, routers, blocks, counts and totals, in this order."""
    slots = tokens * top_k
    padded = _experts_padded(weights.experts)
    return [
        slots * weights.intermediate * 2, slots * weights.hidden * 2, slots * 4, slots * 4,
        _blocks(slots, weights.experts) * 16, _chunks(slots) * padded * 4, padded * 4,
    ]  # fmt: skip


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _common(matrix: Matrix) -> dict[str, object]:
    return {
        "HAS_ZERO": matrix.zeros is not None,
        "HAS_ROW_SCALE": matrix.row_scale is not None,
        "HAS_BIAS": matrix.bias is not None,
    }


def launch(
    x: torch.Tensor,
    weights: OwnWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    buffers: list[torch.Tensor],
    out: torch.Tensor,
    config: Prefill,
    *,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_input: bool,
    pdl: bool,
) -> None:
    """Runs the layer; arguments as `fused_moe` has checked them, buffers as `sizes` has them."""
    h, partial, ordered, routers, table, counts, totals = buffers
    tokens, top_k = topk_ids.shape
    slots, experts = tokens * top_k, weights.experts
    ids_map = topk_ids if expert_map is None else expert_map
    chunks, blocks = _chunks(slots), _blocks(slots, experts)
    options = {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": True}
    lists = {"EP": _experts_padded(experts), "num_warps": 4, **options}
    has_map = expert_map is not None
    prefill_route.count_slots[(chunks,)](topk_ids, ids_map, counts, slots, HAS_MAP=has_map, CHUNK=_CHUNK, **lists)
    prefill_route.add_chunks[(lists["EP"],)](counts, totals, chunks, BLOCK=256, **lists)
    prefill_route.place_slots[(max(chunks, experts),)](
        topk_ids, ids_map, topk_weights, counts, totals, ordered, routers, table, slots, chunks, experts, blocks,
        HAS_MAP=has_map, CHUNK=_CHUNK, BM=BLOCK, **lists,
    )  # fmt: skip
    shared = {
        "TOP_K": top_k, "FORMAT": weights.format, "GROUP": weights.group, "WEIGHT_INPUT": weight_input,
        "STAGES": stages_of(weights, config), "num_warps": 4, **options,
    }  # fmt: skip
    w13, w2 = weights.w13, weights.w2
    grid = (_processors(x.device),)

    def operands(matrix: Matrix) -> tuple[torch.Tensor, ...]:
        tensors = (matrix.codes, matrix.scales, matrix.zeros, matrix.row_scale, matrix.bias)
        return tuple(table if tensor is None else tensor for tensor in tensors)

    def stride(matrix: Matrix) -> int:
        words = matrix.scales if matrix.scales is not None else matrix.zeros
        return 0 if words is None else words.stride(0)

    tiles = -(-w13.rows // 256)
    prefill.gate_up[grid](
        x, *operands(w13), h, ordered, routers, table, blocks * tiles, tiles, x.stride(0), weights.hidden,
        weights.intermediate, w13.codes.shape[1], w13.codes.shape[2], stride(w13), alpha, beta, limit or 0.0,
        GATED=weights.gated, ACTIVATION=activation, HAS_LIMIT=limit is not None, **_common(w13), **shared,
    )  # fmt: skip
    tiles = -(-w2.rows // 256)
    prefill.down[grid](
        h, *operands(w2), partial, ordered, routers, table, blocks * tiles, tiles, weights.intermediate,
        weights.hidden, w2.codes.shape[1], w2.codes.shape[2], stride(w2), **_common(w2), **shared,
    )  # fmt: skip
    gemm.sum_slots[(tokens, -(-weights.hidden // 1024))](
        partial, out, topk_ids, ids_map, weights.hidden, out.stride(0), TOP_K=top_k, HAS_MAP=has_map, BLOCK=1024,
        num_warps=4, **options,
    )  # fmt: skip
