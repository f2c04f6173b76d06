"""What backends over vLLM's operators for CPUs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import OracleError

if TYPE_CHECKING:
    from torch import Tensor


def require_operator(name: str, layer: str) -> Any:
    """One of vLLM's operators, with its overloads.

    Args:
        name: the operator's name in ``torch.ops._C``.
        layer: the layer's name, for the message.

    Raises:
        OracleError: this build of vLLM does not have it.
    """
    import torch

    operator = getattr(torch.ops._C, name, None)
    if operator is None:
        raise OracleError(f"vLLM's library for this CPU has no operator {name}", "Choose another backend", layer)
    return operator


def fill_empty_slots(topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Routing for operators that know no empty slots: these go to an expert that is there, times zero.

    Args:
        topk_weights: `[M, top_k]`.
        topk_ids: `[M, top_k]`, global ids; -1 for an empty slot.
        expert_map: see `Forward`.

    Returns:
        Weights float32 and local ids int32, `[M, top_k]` each, contiguous; the arguments themselves where nothing is
        to change.
    """
    import torch

    # As vLLM's router for CPUs delivers them. One search takes a fifth of the time of the operations below.
    ready = (
        expert_map is None
        and topk_ids.dtype is torch.int32
        and topk_weights.dtype is torch.float32
        and topk_ids.is_contiguous()
        and topk_weights.is_contiguous()
    )
    if ready and (not topk_ids.numel() or topk_ids.min().item() >= 0):
        return topk_weights, topk_ids
    ids = topk_ids.to(torch.int32)
    if expert_map is not None:
        ids = expert_map.to(torch.int32)[ids.clamp(min=0).long()].masked_fill(ids < 0, -1)
    weights = topk_weights.to(torch.float32).masked_fill(ids < 0, 0.0)
    return weights.contiguous(), ids.clamp(min=0).contiguous()


def write_contiguous(out: Tensor, write: Callable[[Tensor], object]) -> None:
    """Fills an output through an operator that asks for a contiguous one.

    Args:
        out: the output; contiguous or not.
        write: calls the operator with a contiguous tensor of the same shape and dtype, which it fills.
    """
    import torch

    if out.is_contiguous():
        write(out)
        return
    target = torch.empty_like(out, memory_format=torch.contiguous_format)
    write(target)
    out.copy_(target)
