"""How tokens choose experts, in float32 and step by step: what a kernel that routes itself is compared with.

Written from the papers' and modelling codes' definitions, not from vLLM's routers or any kernel, which are what it
checks. Every method is a `Recipe`: how logits become scores, what the choice is made by, and what the chosen weights
are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..oracle.problem import Problem, Routing

Scores = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One routing method.

    Attributes:
        scores: from logits to scores, `[M, E]` both.
        renormalise: the chosen scores are divided by their sum.
        biased: a correction bias is added to the scores for choosing; weights are made of the scores without it.
        grouped: only experts of the best groups can be chosen.
        scaled: weights are multiplied by the layer's scaling factor inside the routing.
    """

    scores: Scores
    renormalise: bool = False
    biased: bool = False
    grouped: bool = False
    scaled: bool = False


def _softmax(logits: Tensor) -> Tensor:
    shifted = (logits - logits.max(-1, keepdim=True).values).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def _sigmoid(logits: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-logits).exp())


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return torch.log1p(logits.exp()).sqrt()


RECIPES = {
    "default": Recipe(_softmax),
    # Softmax over the chosen logits is softmax over all of them, divided by the sum of the chosen.
    "renormalize": Recipe(_softmax, renormalise=True),
    "renormalizenaive": Recipe(_softmax, renormalise=True),
    "topk": Recipe(lambda logits: logits),
    "sigmoid": Recipe(_sigmoid),
    "sigmoidrenorm": Recipe(_sigmoid, renormalise=True),
    "deepseekv3": Recipe(_sigmoid, renormalise=True, biased=True, grouped=True, scaled=True),
    "minimax2": Recipe(_sigmoid, renormalise=True, biased=True, scaled=True),
    "deepseekv4": Recipe(_sqrtsoftplus, renormalise=True, biased=True, scaled=True),
}
"""By `Routing.method`. ``llama4`` (the weight multiplies the input), ``custom`` and ``simulated`` have none."""

SCALE = 2.5
"""DeepSeek-V3's scaling factor, used where a method has one: ignored, it shows."""

_MARGIN = 2.0**-5
"""Least difference of scores between an expert, or group, that is chosen and one that is not: several times what a
score or a bias loses when a kernel computes with it in bfloat16 (2**-8 of values around 1)."""


def recipe(routing: Routing) -> Recipe | None:
    """The recipe of a layer's method; None when there is no reference for it."""
    if routing.hashed or routing.weight_on_input:
        return None
    found = RECIPES.get(routing.method)
    grouped = bool(routing.num_groups and routing.num_groups > 1)
    # What a method's name and the layer's own fields say must be the same, or neither is known to be meant.
    if found is None or (grouped and not found.grouped) or (routing.correction_bias and not found.biased):
        return None
    return found


def enough_experts(problem: Problem, multiple: int) -> int:
    """The number of experts that shows every step of the layer's routing: one more than is chosen, in each group too.

    Args:
        problem: the layer.
        multiple: what the number of experts must be a multiple of.
    """
    routing = problem.routing
    groups = routing.num_groups or 1
    if groups == 1:
        return min(-(-(problem.top_k + 1) // multiple) * multiple, problem.num_experts)
    # A group's score is the sum of two, and the chosen groups hold all choices.
    size = max(2, -(-problem.top_k // (routing.top_k_groups or 1))) + 1
    while (groups * size) % multiple:
        size += 1
    return min(groups * size, problem.num_experts)


def route(
    routing: Routing, top_k: int, logits: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Weights and ids of the experts that tokens choose.

    Args:
        routing: the layer's routing, which has a `recipe`.
        top_k: experts per token.
        logits: `[M, E]`, as the kernel gets them.
        bias: correction bias `[E]`; None where the method has none.
        scale: the layer's scaling factor; 1 where the method has none.

    Returns:
        float32 `[M, top_k]` and int64 `[M, top_k]`, largest first by what they were chosen by.
    """
    chosen = recipe(routing)
    assert chosen is not None
    scores = chosen.scores(logits.float())
    ranked = _ranked(chosen, routing, scores, bias)
    ids = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.gather(scores, -1, ids)
    if chosen.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale if chosen.scaled else weights, ids


def _ranked(chosen: Recipe, routing: Routing, scores: Tensor, bias: Tensor | None) -> Tensor:
    """What experts are chosen by, `[M, E]`: scores and bias, minus infinity outside the chosen groups."""
    ranked = scores if bias is None or not chosen.biased else scores + bias.float()
    if not (chosen.grouped and routing.num_groups and routing.num_groups > 1):
        return ranked
    groups: Tensor = torch.unflatten(ranked, -1, (routing.num_groups, -1))
    best = _group_scores(groups)
    cut = torch.argsort(best, dim=-1, descending=True, stable=True)[:, : routing.top_k_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, cut, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def _group_scores(groups: Tensor) -> Tensor:
    """A group's score is the sum of its two best (DeepSeek-V3, section 2.1.2, and its modelling code); `[M, G]`."""
    return torch.sort(groups, dim=-1, descending=True).values[..., :2].sum(-1)


def telling(
    routing: Routing, top_k: int, tokens: int, experts: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, float]:
    """Logits whose routing shows every wrong step, and leaves no choice to rounding: of random ones the first that do.

    Args:
        routing: the layer's routing, which has a `recipe`.
        top_k: experts per token.
        tokens: M.
        experts: E.
        dtype: of the logits that the kernel gets.

    Returns:
        Logits `[M, E]`, correction bias float32 `[E]` (None where the method has none), scaling factor.

    Raises:
        ValueError: no such logits were found: too many experts for the margin.
    """
    chosen = recipe(routing)
    assert chosen is not None
    found: list[Tensor] = []
    bias: Tensor | None = None
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    if chosen.biased:
        bias = (random(experts) * 0.5).to(torch.bfloat16).float()
    for _ in range(4000):
        logits = (random(1, experts) * 2.0).to(dtype)
        if _is_clear(chosen, routing, top_k, logits, bias):
            found.append(logits)
            if len(found) == tokens:
                return torch.cat(found), bias, SCALE if chosen.scaled else 1.0
    raise ValueError(f"no logits over {experts} experts keep a margin of {_MARGIN} for top-{top_k}")


def _is_clear(chosen: Recipe, routing: Routing, top_k: int, logits: Tensor, bias: Tensor | None) -> bool:
    """Whether rounding cannot change the choice of one token, `[1, E]`, at any step."""
    scores = chosen.scores(logits.float())
    ranked = _ranked(chosen, routing, scores, bias)
    # Before softmax, the order is that of the logits: their margin is what matters to kernels that sort these.
    compared = logits.float() if chosen.scores is _softmax else ranked
    in_order = torch.sort(compared, dim=-1, descending=True).values[0]
    if top_k < len(in_order) and in_order[top_k - 1] - in_order[top_k] < _MARGIN:
        return False
    if chosen.grouped and routing.num_groups and routing.num_groups > 1:
        groups = torch.unflatten(scores if bias is None else scores + bias, -1, (routing.num_groups, -1))
        best = torch.sort(_group_scores(groups), dim=-1, descending=True).values[0]
        cut = routing.top_k_groups or 1
        return cut >= len(best) or bool(best[cut - 1] - best[cut] >= _MARGIN)
    return True
