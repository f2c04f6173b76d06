"""Reference routing in float32, for kernels that route tokens themselves.

The formulas come from the papers and the models' modeling code; nothing is shared with vLLM's routers or with the
kernels under test. A `RoutingReference` says how logits become scores, how scores select experts, and how the selected
scores become weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem, Routing

ScoreFunction = Callable[[Tensor], Tensor]

RouterInputs = tuple[Tensor, Tensor | None, float]
"""Router logits `[M, E]`, correction bias float32 `[E]` or None, and scaling factor."""


@dataclass(frozen=True, slots=True)
class RoutingReference:
    """One routing method.

    Attributes:
        scores: from logits to scores, `[M, E]` both.
        renormalize: the selected scores are divided by their sum.
        uses_bias: a correction bias is added to the scores for the selection; weights use the scores without it.
        grouped: only experts of the best groups can be selected.
        scaled: the routing multiplies weights by the layer's scaling factor.
    """

    scores: ScoreFunction
    renormalize: bool = False
    uses_bias: bool = False
    grouped: bool = False
    scaled: bool = False


def _softmax(logits: Tensor) -> Tensor:
    shifted = (logits - logits.max(-1, keepdim=True).values).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def _sigmoid(logits: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-logits).exp())


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    # Not log1p(exp), which is infinite from 89 on.
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


ROUTING_REFERENCES = {
    "default": RoutingReference(_softmax),
    # Softmax over the selected logits equals softmax over all logits, divided by the sum of the selected scores.
    "renormalize": RoutingReference(_softmax, renormalize=True),
    "renormalizenaive": RoutingReference(_softmax, renormalize=True),
    "topk": RoutingReference(lambda logits: logits),
    "sigmoid": RoutingReference(_sigmoid),
    "sigmoidrenorm": RoutingReference(_sigmoid, renormalize=True),
    "deepseekv3": RoutingReference(_sigmoid, renormalize=True, uses_bias=True, grouped=True, scaled=True),
    "minimax2": RoutingReference(_sigmoid, renormalize=True, uses_bias=True, scaled=True),
    "deepseekv4": RoutingReference(_sqrtsoftplus, renormalize=True, uses_bias=True, scaled=True),
}
"""References by `Routing.method`. There is none for ``llama4`` (its weight multiplies the input), ``custom`` and
``simulated``."""

SCALING_FACTOR = 2.5
"""DeepSeek-V3's scaling factor, for every method that has one: not 1, so that a kernel that ignores it fails."""

_SHIFTS = (0.0, -100.0, 0.0, 100.0)
"""What is added to all logits of a token, in turn, where scores are a softmax, which it leaves as they are: without
subtracting the largest logit first, float32 exponentials overflow, or sum to 0."""

_MIN_MARGIN = 2.0**-5
"""Smallest difference between the scores of a selected expert, or group, and of one that is not: several times the
rounding error of a kernel that computes scores and biases in bfloat16 (2**-8 of values around 1)."""


def routing_reference(routing: Routing) -> RoutingReference | None:
    """The reference for a layer's routing; None where there is none."""
    if routing.hash_routing or routing.apply_router_weight_on_input:
        return None
    found = ROUTING_REFERENCES.get(routing.method)
    grouped = bool(routing.num_groups and routing.num_groups > 1)
    # A method's name and the layer's own fields must agree; otherwise it is unknown which of them the model means.
    if found is None or (grouped and not found.grouped) or (routing.correction_bias and not found.uses_bias):
        return None
    return found


def min_experts(problem: Problem, multiple: int) -> int:
    """Number of experts with which every step of the layer's routing matters: more than top-k, also within each group.

    Args:
        problem: the layer.
        multiple: the number is a multiple of it.
    """
    routing = problem.routing
    groups = routing.num_groups or 1
    if groups == 1:
        return min(-(-(problem.top_k + 1) // multiple) * multiple, problem.num_experts)
    # A group's score is the sum of two experts' scores, and the selected groups hold all selected experts.
    size = max(2, -(-problem.top_k // (routing.top_k_groups or 1))) + 1
    while (groups * size) % multiple:
        size += 1
    return min(groups * size, problem.num_experts)


def route(
    routing: Routing, top_k: int, logits: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Weights and ids of the experts that tokens are routed to.

    Args:
        routing: the layer's routing; it has a `routing_reference`.
        top_k: experts per token.
        logits: `[M, E]`, as the kernel gets them.
        bias: correction bias `[E]`; None for a method without one.
        scale: the layer's scaling factor; 1 for a method without one.

    Returns:
        Weights float32 `[M, top_k]` and ids int64 `[M, top_k]`, by descending selection score.
    """
    reference = routing_reference(routing)
    assert reference is not None
    scores = reference.scores(logits.float())
    ranked = _selection_scores(reference, routing, scores, bias)
    ids = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.gather(scores, -1, ids)
    if reference.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale if reference.scaled else weights, ids


def _selection_scores(reference: RoutingReference, routing: Routing, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Selection scores `[M, E]`: score plus bias, minus infinity outside the selected groups."""
    ranked = scores if bias is None or not reference.uses_bias else scores + bias.float()
    if not (reference.grouped and routing.num_groups and routing.num_groups > 1):
        return ranked
    groups: Tensor = torch.unflatten(ranked, -1, (routing.num_groups, -1))
    best = _group_scores(groups)
    cut = torch.argsort(best, dim=-1, descending=True, stable=True)[:, : routing.top_k_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, cut, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def _group_scores(groups: Tensor) -> Tensor:
    """A group's score is the sum of its two best (DeepSeek-V3, section 2.1.2, and its modeling code); `[M, G]`."""
    return torch.sort(groups, dim=-1, descending=True).values[..., :2].sum(-1)


def discriminating_logits(
    routing: Routing, top_k: int, tokens: int, experts: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, float]:
    """Random logits that no wrong routing maps to the right output, and whose routing no rounding changes.

    Args:
        routing: the layer's routing; it has a `routing_reference`.
        top_k: experts per token.
        tokens: M.
        experts: E.
        dtype: dtype of the logits that the kernel gets.

    Returns:
        Logits `[M, E]`, correction bias float32 `[E]` (None for a method without one), scaling factor.

    Raises:
        ValueError: there are too many experts to find such logits.
    """
    reference = routing_reference(routing)
    assert reference is not None
    found: list[Tensor] = []
    bias: Tensor | None = None
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    if reference.uses_bias:
        bias = (random(experts) * 0.5).to(torch.bfloat16).float()
    for _ in range(4000):
        shift = _SHIFTS[len(found) % len(_SHIFTS)] if reference.scores is _softmax else 0.0
        logits = (random(1, experts) * 2.0 + shift).to(dtype)
        if _has_margin(reference, routing, top_k, logits, bias):
            found.append(logits)
            if len(found) == tokens:
                return torch.cat(found), bias, SCALING_FACTOR if reference.scaled else 1.0
    raise ValueError(f"no logits over {experts} experts keep a margin of {_MIN_MARGIN} for top-{top_k}")


def _has_margin(reference: RoutingReference, routing: Routing, top_k: int, logits: Tensor, bias: Tensor | None) -> bool:
    """Whether no rounding changes the experts of one token, logits `[1, E]`."""
    scores = reference.scores(logits.float())
    ranked = _selection_scores(reference, routing, scores, bias)
    # Softmax keeps the order, and kernels may sort the logits: their margin counts.
    compared = logits.float() if reference.scores is _softmax else ranked
    in_order = torch.sort(compared, dim=-1, descending=True).values[0]
    if top_k < len(in_order) and in_order[top_k - 1] - in_order[top_k] < _MIN_MARGIN:
        return False
    if reference.grouped and routing.num_groups and routing.num_groups > 1:
        groups = torch.unflatten(scores if bias is None else scores + bias, -1, (routing.num_groups, -1))
        best = torch.sort(_group_scores(groups), dim=-1, descending=True).values[0]
        cut = routing.top_k_groups or 1
        return cut >= len(best) or bool(best[cut - 1] - best[cut] >= _MIN_MARGIN)
    return True
