"""The check of a layer as it will serve: every expert of the converted weights, through the kernel that was built.

The check of `self_check` runs before the conversion, in a small layer of some experts. It cannot see an expert that was
converted into another's place, nor a kernel that computes with other weights than the layer's, as one may after a
reload.

A whole reference of all experts would take as long as loading them. So of each expert a part is kept while it is
converted: the columns of w13 for a few input features, and a few rows of w2. Tokens that are zero in all other features
need no other columns, and those rows of w2 give as many columns of the output. One call routes tokens to all experts,
and another one repeats these tokens until kernels for many tokens run.

Layers of a kind that was checked like this get one call of a few tokens, whose experts are the last and random ones. It
shows that the kernel computes with this layer's weights. The layer before is called once more then: its kernel may have
lost its own to this one. So is the first layer of the kind when all layers of the load are converted: a kernel may have
places for a few layers.
"""

from __future__ import annotations

import math
import time
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import schemes
from ..backends import MAX_CHECK_TOKENS, Backend, Tensors
from ..backends.emulation import ieee_fp32_matmul, round_inputs
from ..core.problem import Problem
from ..kernels.activations import activate
from . import bounds
from .inputs import WEIGHT_SUMS, rows_of_call, spread_order
from .self_check import Calls, Comparison, is_reference
from .tolerances import rounding_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

PART = 8
"""Input features of w13, and rows of w2, that are kept of each expert: 35 MiB of a layer of gpt-oss-120b."""

FEW_EXPERTS = 2
"""Experts of a layer whose kind was checked before, at least; as many tokens of a layer that is called once more."""

_VALUES = 1 << 22
"""Inputs or first products that the reference computes with at once: 16 MiB, and a few times that of temporaries."""

_SIZE = 2.0
"""Root mean square of the first product of the expert with the largest weights: activations are curved there."""


def skip_reason(backend: Backend, problem: Problem) -> str:
    """Why a layer cannot be checked as it is; "" where it can."""
    parallel = problem.parallel
    if is_reference(backend):
        return "it is the reference"
    if backend.monolithic:
        return "its kernel routes tokens itself"
    return "its calls need other ranks" if parallel.dp > 1 or parallel.is_batched else ""


class WeightParts:
    """Parts of a layer's experts, collected while they are converted.

    Attributes:
        problem: the layer.
        features: input features whose columns of w13 are kept.
        rows: rows of w2 that are kept.
        experts: local numbers of the experts of which parts are kept, ascending.
        order: positions in `experts`: token t is routed to those at `order[t]`, `order[t + 1]`, ..., one for each slot.
        every: whether those are all, as in the first layer of a kind.
    """

    def __init__(self, problem: Problem, every: bool = True) -> None:
        """
        Args:
            problem: the layer. Its name selects the parts: other ones for other layers, the same for all ranks.
            every: keep parts of every expert; of the last and of random ones otherwise, as many as a token has.
        """
        self.problem, self.every = problem, every
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(problem.layer.encode()))
        first = self._random_index(problem.hidden_size // PART) * PART
        self.features = slice(first, first + PART)
        first = self._random_index(problem.hidden_size // PART) * PART
        self.rows = slice(first, first + PART)
        local = problem.local_experts
        others = torch.randperm(local - 1, generator=self._generator, device="cpu").tolist()
        few = max(problem.top_k, FEW_EXPERTS)
        self.experts = [*sorted(others if every else others[: few - 1]), local - 1]
        self.order = spread_order(len(self.experts), self._generator)
        self._seen = 0
        self._w13: list[Tensor] = []
        self._w2: list[Tensor] = []
        self._biases: list[tuple[Tensor, Tensor]] = []

    def _random_index(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator, device="cpu"))

    def add(self, expert: Tensors) -> None:
        """Keeps the parts of the next expert, if it is one of `experts`.

        Args:
            expert: its canonical tensors; not modified, and not referred to afterwards.
        """
        self._seen += 1
        if self._seen - 1 not in self.experts:
            return
        scheme = schemes.module(self.problem.scheme.name)
        self._w13.append(scheme.dequantize_part(expert, "w13", self.problem, features=self.features))
        self._w2.append(scheme.dequantize_part(expert, "w2", self.problem, rows=self.rows))
        if self.problem.has_bias:
            biases = expert["w13_bias"].to(torch.float32, copy=True), expert["w2_bias"][self.rows].float().clone()
            self._biases.append(biases)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs `[len(experts), hidden]` in the model's dtype, and weights float32 `[len(experts), top_k]`."""
        problem, count, device = self.problem, len(self._w13), self._w13[0].device
        inputs = torch.randn(count, PART, generator=self._generator, device="cpu", dtype=torch.float32)
        x = torch.zeros(count, problem.hidden_size, device=device, dtype=torch.float32)
        x[:, self.features] = inputs.to(device)
        # The sum of the squares of all products x @ w13.T, from the products of features with each other.
        matrices, given = torch.stack(self._w13), x[:, self.features]
        squares = ((matrices.mT @ matrices) * (given.T @ given)).sum((1, 2)) / (count * matrices.shape[1])
        largest = float(squares.amax().sqrt())
        weights = torch.rand(count, problem.top_k, generator=self._generator, device="cpu", dtype=torch.float32) + 0.5
        weights *= max(WEIGHT_SUMS) / problem.top_k  # sums that differ from token to token
        return (x * (_SIZE / (largest or 1.0))).to(getattr(torch, problem.dtype)), weights.to(device)

    def reference(self, problem: Problem, rounding: float, x: Tensor, weights: Tensor) -> bounds.Reference:
        """The reference for `rows` of the outputs.

        Args:
            problem: the layer; activations are quantized as its scheme says.
            rounding: see `bounds.reference_output`.
            x: from `tokens`; further tokens have no expert on this rank.
            weights: likewise; 0 in slots that another rank computes.
        """
        plain = problem.with_activations("16bit")
        expected, size = self._outputs(problem, x, weights)
        exact = expected if plain == problem else self._outputs(plain, x, weights)[0]
        return bounds.from_parts(expected, size, exact, rounding, problem.dtype)

    def _outputs(self, problem: Problem, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the rows, and the squares of their terms, float32 `[tokens, rows]` each."""
        count, on_input = len(self._w13), problem.routing.apply_router_weight_on_input
        expected = torch.zeros(len(x), self._w2[0].shape[0], device=x.device, dtype=torch.float32)
        size = torch.zeros_like(expected)
        slots = torch.arange(weights.shape[1], device=x.device)
        # Of each expert the tokens whose slot 0, 1, ... holds it, `[len(experts), top_k]`.
        every = (torch.tensor(self.order, device=x.device).argsort()[:, None] - slots) % count
        # Many experts at once: the products of one take a GPU less time than the host needs to ask for them.
        step = max(1, _VALUES // (weights.shape[1] * max(x.shape[1], self._w13[0].shape[0])))
        for first in range(0, count, step):
            some = slice(first, first + step)
            w13, w2 = torch.stack(self._w13[some]), torch.stack(self._w2[some])
            token = every[some]
            weight = weights[token, slots].unsqueeze(-1)
            given = x[token]
            if on_input:  # as vLLM's prepare step does it
                given, weight = given * weight.to(x.dtype), (weight != 0).to(torch.float32)
            given = round_inputs(given.to(torch.float32), x.dtype, problem)[..., self.features]
            hidden = given @ w13.mT
            if self._biases:
                hidden += torch.stack([each for each, _ in self._biases[some]]).unsqueeze(1)
            hidden = round_inputs(activate(hidden, problem.activation), x.dtype, problem)
            output = hidden @ w2.mT
            if self._biases:
                output += torch.stack([each for _, each in self._biases[some]]).unsqueeze(1)
            terms = torch.maximum(hidden.square() @ w2.square().mT, output.square())
            expected.index_add_(0, token.flatten(), (output * weight).flatten(0, 1))
            size.index_add_(0, token.flatten(), (terms * weight.square()).flatten(0, 1))
        return expected, size


class InstalledLayer:
    """A converted layer with tokens for all experts of its parts, and their reference."""

    def __init__(
        self, backend: Backend, parts: WeightParts, experts: Any, layer: Any, tensors: Tensors, adapter: Adapter
    ) -> None:
        """
        Args:
            backend: the layer's.
            parts: parts of experts' weights, from before the conversion.
            experts: what the backend built for the layer.
            layer: vLLM's layer.
            tensors: its kernel tensors by canonical name.
            adapter: vLLM's side.
        """
        problem = parts.problem
        self.problem, self._backend, self._rows = problem, backend, parts.rows
        self._experts, self._layer, self._tensors, self._adapter = experts, layer, tensors, adapter
        self._is_first, self._count = parts.every, len(parts.experts)
        x, weights = parts.tokens()
        count, device = len(x), x.device
        chosen = torch.tensor(parts.experts, device=device)[torch.tensor(parts.order, device=device)]
        token = torch.arange(count, device=device)[:, None]
        slot = torch.arange(weights.shape[1], device=device)[None, :]
        ids = chosen[(token + slot) % count]
        counted, self._expert_map = weights, None
        self.skip_reason = ""
        self._elsewhere: int | None = None  # the token all of whose experts other ranks have
        if problem.local_experts != problem.num_experts:
            self._expert_map = layer.expert_map
            if self._expert_map is None:
                self.skip_reason = "the layer has no expert map"
                return
            here, away = (self._expert_map >= 0).nonzero().flatten(), (self._expert_map < 0).nonzero().flatten()
            other = _other_ranks(count, weights.shape[1], len(away), device)
            by_place = here[self._expert_map[here].argsort()]
            # Different ones: a token names no expert twice.
            ids = torch.where(other, away[(token + other.cumsum(-1)) % len(away)], by_place[ids])
            counted = weights.masked_fill(other, 0.0)
            if weights.shape[1] <= len(away):
                self._elsewhere = count
                x, weights = torch.cat((x, x[-1:])), torch.cat((weights, weights[-1:]))
                ids = torch.cat((ids, away[: weights.shape[1]].unsqueeze(0)))
                counted = torch.cat((counted, torch.zeros_like(weights[:1])))
        consumed = problem.with_activations(backend.activations(problem))
        with ieee_fp32_matmul():
            self._reference = parts.reference(consumed, rounding_error(backend, problem), x, counted)
        ids = ids.to(adapter.ids_dtype(experts.moe_config))
        self._given = {"tokens": x, "routing weights": weights, "expert ids": ids}
        self._places = self._current_places()

    def _current_places(self) -> list[tuple[int, torch.device]]:
        """Where the kernel tensors lie."""
        return [(tensor.data_ptr(), tensor.device) for tensor in self._tensors.values()]

    def _calls(self) -> Calls:
        on_input = self.problem.routing.apply_router_weight_on_input

        def run(*routed: Tensor, **memory: Any) -> Tensor:
            kernel = self._experts, self._layer, self._tensors
            output = self._adapter.run_single_rank(*kernel, *routed, **memory, weights_on_input=on_input)
            return output[:, self._rows]

        whole = {} if self._expert_map is None else {"expert map": self._expert_map}
        return Calls(run, self._reference, self._given, whole, self._backend)

    def compare(self) -> Comparison:
        """Compares the layer with the reference, in calls that route tokens to all experts of the parts."""
        start = time.perf_counter()
        if self.skip_reason:
            return Comparison(0.0, math.nan, 0.0, skip_reason=self.skip_reason)
        calls = self._calls()
        x, count = self._given["tokens"], self._count
        most = self._adapter.trial_tokens(self._experts.moe_config)
        for rows in torch.split(torch.arange(count, device=x.device), most):
            calls.make(rows)
        large = min(most, MAX_CHECK_TOKENS)
        # On a CPU calls take long, and are made only where another kernel runs.
        if self._is_first and large > count and (not x.is_cpu or self._backend.hand_overs(self.problem, large)):
            calls.make(rows_of_call(large, count, count - 1).to(x.device))
        if self._is_first and self._elsewhere is not None:  # as decode steps of one token have it
            calls.make(torch.tensor([self._elsewhere], device=x.device))
        return calls.result(start)

    def compare_again(self) -> Comparison:
        """Compares one call of a few tokens, if the kernel tensors are still where they were: vLLM may have moved them
        to another memory."""
        start = time.perf_counter()
        skip_reason = self.skip_reason
        if not skip_reason and self._places != self._current_places():
            skip_reason = "its tensors were moved"
        if skip_reason:
            return Comparison(0.0, math.nan, 0.0, skip_reason=skip_reason)
        calls = self._calls()
        x = self._given["tokens"]
        few = min(self._count, FEW_EXPERTS, self._adapter.trial_tokens(self._experts.moe_config))
        calls.make(torch.arange(self._count - few, self._count, device=x.device))
        return calls.result(start)


def _other_ranks(tokens: int, top_k: int, away: int, device: torch.device) -> Tensor:
    """Which slots other ranks compute, bool `[tokens, top_k]`: those beyond the experts of the parts, and some
    neighboring ones of every third token, from all but one down to one. The other tokens reach every expert.

    Args:
        tokens: number of tokens, and of experts of the parts.
        top_k: experts per token.
        away: number of experts of other ranks: no token has more of them.
        device: the result's.
    """
    token = torch.arange(tokens, device=device)[:, None]
    slot = torch.arange(top_k, device=device)[None, :]
    beyond = slot >= tokens
    most = min(min(top_k, tokens) - 1, away - max(top_k - tokens, 0))
    if most < 1:
        return beyond.expand(tokens, top_k)
    turn = token // 3
    some = (slot - turn) % min(top_k, tokens) < most - turn // 2 % most
    return beyond | (some & (token % 3 == 2))
