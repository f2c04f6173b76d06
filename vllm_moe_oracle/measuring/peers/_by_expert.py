"""Sorts slots by expert in one kernel, for packages whose own sort is part of their router.

A slot is one (token, choice) pair, numbered ``token * top_k + choice``, as in `kernels.route`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.route import local_ids

_MOST_AT_ONCE = 4096
"""Slots that a program reads at once."""


@dataclass(frozen=True)
class SortedSlots:
    """The slots of a call in order of their experts. Slots without an expert are left out.

    Attributes:
        tokens: int32 `[M * top_k]`, the token of each row; rows beyond the last expert's are undefined.
        offsets: int32 `[experts + 1]`, the first row of each expert, and the number of rows.
        rows: int32 `[top_k, M]`, the row of each slot; -1 for a slot without an expert.
        weights: float32 `[top_k, M]`, the router's weight of each slot; undefined for a slot without an expert.
    """

    tokens: Tensor
    offsets: Tensor
    rows: Tensor
    weights: Tensor


@triton.jit(do_not_specialize=["count", "experts"])  # type: ignore[untyped-decorator]
def _sort(  # type: ignore[no-untyped-def]
    ids_ptr, map_ptr, weights_ptr, tokens_ptr, offsets_ptr, rows_ptr, sorted_weights_ptr, count, experts,
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per expert, grid `(experts,)`, on `count` tokens. Each counts the slots of lower experts itself."""
    expert = tl.program_id(0)
    slots = count * TOP_K
    p = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for at in range(0, slots, CHUNK):
        ids = local_ids(ids_ptr, map_ptr, at + p, at + p < slots, HAS_MAP)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
    row = tl.sum(lower, axis=0)
    total = tl.sum(equal, axis=0)
    tl.store(offsets_ptr + expert, row)
    if expert == experts - 1:
        tl.store(offsets_ptr + experts, row + total)
    # The first program also marks the slots without an expert.
    if (total > 0) | (expert == 0):
        for at in range(0, slots, CHUNK):
            slot = at + p
            ids = local_ids(ids_ptr, map_ptr, slot, slot < slots, HAS_MAP)
            mine = ids == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
            token = slot // TOP_K
            place = (slot % TOP_K) * count + token
            tl.store(tokens_ptr + row + rank, token, mask=mine)
            tl.store(rows_ptr + place, row + rank, mask=mine)
            tl.store(sorted_weights_ptr + place, tl.load(weights_ptr + slot, mask=mine, other=0.0), mask=mine)
            if expert == 0:
                tl.store(rows_ptr + place, tl.full([CHUNK], -1, tl.int32), mask=(slot < slots) & (ids < 0))
            row += tl.sum(mine.to(tl.int32), axis=0)


def sort_slots(topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, experts: int) -> SortedSlots:
    """Sorts the slots of a call.

    Args:
        topk_ids: contiguous integers `[M, top_k]`, global experts; -1 for none. M is 1 at least.
        topk_weights: contiguous float32 `[M, top_k]`.
        expert_map: int32 `[num_experts]`, the local expert of each, or -1; None if all are local.
        experts: number of local experts.
    """
    count, top_k = topk_ids.shape
    integers = functools.partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    found = SortedSlots(
        integers(count * top_k),
        integers(experts + 1),
        integers(top_k, count),
        torch.empty(top_k, count, dtype=torch.float32, device=topk_ids.device),
    )
    chunk = min(max(128, 1 << (count * top_k - 1).bit_length()), _MOST_AT_ONCE)
    _sort[(experts,)](
        topk_ids, topk_ids if expert_map is None else expert_map, topk_weights,
        found.tokens, found.offsets, found.rows, found.weights, count, experts,
        TOP_K=top_k, HAS_MAP=expert_map is not None, CHUNK=chunk, num_warps=max(chunk // 256, 4),
    )  # fmt: skip
    return found
