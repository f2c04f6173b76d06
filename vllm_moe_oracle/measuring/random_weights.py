"""Random weights and tokens with the sizes and magnitudes of a real layer.

Never zeros: kernels run faster on zeros, and zeros hide errors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import schemes
from ..backends import Backend, Tensors
from ..core.decision import ShardPlan
from ..core.problem import Problem
from ..layouts.byte_views import stack_bytes
from ..measurements.kernel_shape import RoutingKind

DISTINCT_EXPERTS = 4
"""Number of different experts. The others are copies of them in memory of their own. Conversion handles experts one by
one, so converted experts can be copied the same way."""

_ZIPF_EXPONENT = 1.0
"""Exponent of Zipf's law for skewed routing: the n-th expert is 1/n as likely as the first."""


def random_experts(problem: Problem, device: str, count: int = DISTINCT_EXPERTS) -> dict[str, Tensor]:
    """Canonical tensors of some experts, `[count, ...]` each. Inputs of magnitude 1 give outputs of magnitude 1."""
    generator = torch.Generator(device=device).manual_seed(0)
    few = dataclasses.replace(problem, num_experts=max(count, problem.top_k), local_experts=count)
    shapes = schemes.module(problem.scheme.name).shapes(few)
    columns = {"w13": problem.hidden_size, "w2": problem.intermediate_size}
    made: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        size = columns[name] ** -0.5
        if problem.scheme.name == "wna16":
            made |= _random_wna16(name, shapes, problem, size, device, generator)
        else:
            values = torch.randn(count, shapes[name][1], columns[name], device=device, generator=generator) * size
            codes, scales = zip(*(schemes.module(problem.scheme.name).quantize(each) for each in values), strict=True)
            made |= {name: stack_bytes(codes), f"{name}_scale": stack_bytes(scales)}
        if f"{name}_bias" in shapes:
            bias = torch.randn(shapes[f"{name}_bias"], device=device, generator=generator) * 0.5
            made[f"{name}_bias"] = bias.to(getattr(torch, problem.dtype))
    return made


def _random_wna16(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    problem: Problem,
    size: float,
    device: str,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Uniform codes, scales that give weights of a standard deviation around `size`, and zero points and orders."""
    bits = problem.scheme.bits

    def whole(shape: tuple[int, ...], most: int) -> Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, device=device, generator=generator)

    # Uniform codes have a standard deviation of their number over sqrt(12).
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


def convert_experts(backend: Backend, experts: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
    """A backend's kernel tensors of canonical experts, `[count, ...]` each."""
    converted = [
        backend.convert({name: each[index] for name, each in experts.items()}, problem, plan)
        for index in range(len(next(iter(experts.values()))))
    ]
    return {name: stack_bytes([each[name] for each in converted]) for name in converted[0]}


def repeat_experts(few: Tensor, count: int) -> Tensor:
    """`[count, ...]` from `[few, ...]`: expert n is a copy of expert n mod few."""
    index = torch.arange(count, device=few.device) % few.shape[0]
    flat = few.contiguous().view(few.shape[0], -1).view(torch.uint8)
    return flat.index_select(0, index).view(few.dtype).view(count, *few.shape[1:])


@dataclass(frozen=True)
class TokenBatch:
    """Inputs of one call.

    Attributes:
        x: `[M, hidden]` in the model's dtype.
        logits: `[M, num_experts]` in the model's dtype; the largest select the experts.
        weights: `[M, top_k]` float32 routing weights.
        ids: `[M, top_k]` int32 expert indices.
    """

    x: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor


def random_tokens(problem: Problem, count: int, routing: RoutingKind, device: str) -> TokenBatch:
    """Random tokens and their routing.

    The experts of an expert-parallel rank get as many slots as is expected under uniform routing, and one at least. In
    one free draw of few tokens they may get none, or four times as many, and times would be of that.

    Args:
        problem: the layer.
        count: number of tokens M.
        routing: ``uniform`` or ``skewed`` by Zipf's law.
        device: torch device.
    """
    generator = torch.Generator(device=device).manual_seed(count)
    dtype = getattr(torch, problem.dtype)
    x = torch.randn(count, problem.hidden_size, device=device, generator=generator).to(dtype)
    # Top-k of logits plus Gumbel noise samples experts without replacement, in proportion to exp(logits).
    uniform = torch.rand(count, problem.num_experts, device=device, generator=generator).clamp(1e-9, 1 - 1e-7)
    logits = -(-uniform.log()).log()
    if routing == "skewed":
        rank = torch.randperm(problem.num_experts, device=device, generator=generator) + 1
        logits = logits - _ZIPF_EXPONENT * rank.log()
    logits = logits.to(dtype)
    if routing == "uniform" and problem.local_experts < problem.num_experts:
        logits = logits.roll(-_typical_start(problem, logits), -1)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), problem.top_k, dim=-1)
    if problem.routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return TokenBatch(x, logits, weights, ids.to(torch.int32))


def _typical_start(problem: Problem, logits: Tensor) -> int:
    """The expert from which on as many experts as a rank has, in a circle, get nearest to the expected slots."""
    count, experts, local = logits.shape[0], problem.num_experts, problem.local_experts
    expected = max(1.0, count * problem.top_k * local / experts)
    slots = torch.bincount(torch.topk(logits.float(), problem.top_k, dim=-1).indices.flatten(), minlength=experts)
    before = torch.cat((slots, slots)).cumsum(0) - torch.cat((slots, slots))
    windows = before[local : local + experts] - before[:experts]
    return int((windows - expected).abs().argmin())
