"""Random weights and tokens to measure with: of the sizes and ranges of a real layer's, and never zeros, on which
kernels run faster and faults do not show."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import schemes
from ..oracle.problem import Problem
from .cells import RoutingKind

DISTINCT = 4
"""Experts that differ; the others repeat them, in memory of their own. Conversion takes experts one by one and knows
none of the others, so converted experts repeat the same way."""

_SKEW = 1.0
"""Exponent of the popularity of experts under skewed routing: the n-th has 1/n of the first's chance (Zipf's law)."""


def canonical_experts(problem: Problem, device: str, count: int = DISTINCT) -> dict[str, Tensor]:
    """Canonical tensors of a few experts, `[count, ...]` each. Inputs around 1 give products, and outputs, around 1.

    Args:
        problem: the layer.
        device: where.
        count: experts.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    few = dataclasses.replace(problem, num_experts=max(count, problem.top_k), local_experts=count)
    shapes = schemes.module(problem.scheme.name).shapes(few)
    columns = {"w13": problem.hidden_size, "w2": problem.intermediate_size}
    made: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        size = columns[name] ** -0.5
        if problem.scheme.name == "wna16":
            made |= _integers(name, shapes, problem, size, device, generator)
        else:
            values = torch.randn(count, shapes[name][1], columns[name], device=device, generator=generator) * size
            codes, scales = zip(*(schemes.module(problem.scheme.name).quantise(each) for each in values), strict=True)
            made |= {name: stacked(codes), f"{name}_scale": stacked(scales)}
        if f"{name}_bias" in shapes:
            bias = torch.randn(shapes[f"{name}_bias"], device=device, generator=generator) * 0.5
            made[f"{name}_bias"] = bias.to(getattr(torch, problem.dtype))
    return made


def _integers(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    problem: Problem,
    size: float,
    device: str,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Codes of every value, scales that make weights of the size out of them, and what goes with them."""
    bits = problem.scheme.bits

    def whole(shape: tuple[int, ...], most: int) -> Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, device=device, generator=generator)

    # The standard deviation of evenly distributed codes is their number over the root of 12.
    step = size * 12**0.5 / (1 << bits)
    scales = (torch.rand(shapes[f"{name}_scale"], device=device, generator=generator) + 0.5) * step
    made = {name: whole(shapes[name], 256), f"{name}_scale": scales.to(getattr(torch, problem.dtype))}
    if f"{name}_zero_point" in shapes:
        middle = 1 << bits - 1
        made[f"{name}_zero_point"] = whole(shapes[f"{name}_zero_point"], 3) + (middle - 1)
    if f"{name}_order" in shapes:
        rows, columns = shapes[f"{name}_order"]
        orders = [torch.randperm(columns, device=device, generator=generator) for _ in range(rows)]
        made[f"{name}_order"] = torch.stack(orders).to(torch.int32)
    if f"{name}_group_index" in shapes:
        groups = shapes[f"{name}_scale"][-1]
        index = torch.randint(0, groups, shapes[f"{name}_group_index"], device=device, generator=generator)
        made[f"{name}_group_index"] = index.sort(-1).values.to(torch.int32)
    return made


def stacked(tensors: tuple[Tensor, ...]) -> Tensor:
    """As bytes: not every type of 8 bits can be stacked."""
    return torch.stack([each.view(torch.uint8) for each in tensors]).view(tensors[0].dtype)


def repeated(few: Tensor, count: int) -> Tensor:
    """`[count, ...]` from `[some, ...]`: expert n is a copy of expert n mod some."""
    index = torch.arange(count, device=few.device) % few.shape[0]
    flat = few.contiguous().view(few.shape[0], -1).view(torch.uint8)
    return flat.index_select(0, index).view(few.dtype).view(count, *few.shape[1:])


@dataclass(frozen=True)
class Tokens:
    """Inputs of one call.

    Attributes:
        x: `[M, hidden]` in the model's dtype.
        logits: `[M, num_experts]` in the model's dtype, of which the largest are the experts.
        weights: `[M, top_k]` float32.
        ids: `[M, top_k]` int32.
    """

    x: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor


def tokens(problem: Problem, count: int, routing: RoutingKind, device: str) -> Tokens:
    """Random tokens and their experts.

    Args:
        problem: the layer.
        count: M.
        routing: ``uniform``: every expert has the same chance; ``skewed``: by Zipf's law.
        device: where.
    """
    generator = torch.Generator(device=device).manual_seed(count)
    dtype = getattr(torch, problem.dtype)
    x = torch.randn(count, problem.hidden_size, device=device, generator=generator).to(dtype)
    # The largest of logits with Gumbel noise are drawn without replacement, with chances as the exponentials.
    uniform = torch.rand(count, problem.num_experts, device=device, generator=generator).clamp(1e-9, 1 - 1e-7)
    logits = -(-uniform.log()).log()
    if routing == "skewed":
        rank = torch.randperm(problem.num_experts, device=device, generator=generator) + 1
        logits = logits - _SKEW * rank.log()
    logits = logits.to(dtype)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), problem.top_k, dim=-1)
    if problem.routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Tokens(x, logits, weights, ids.to(torch.int32))
