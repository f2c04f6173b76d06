"""The check of a layer as it will serve: every expert of the converted weights, through the kernel that was built.

The check of `self_check` runs before the conversion, in a small layer of some experts. It cannot see an expert that was
converted into another's place, nor a kernel that computes with other weights than the layer's, as one may after a
reload.

A whole reference of all experts would take as long as loading them. So of each expert a part is kept while it is
converted: the columns of w13 for a few input features, and a few rows of w2. Tokens that are zero in all other features
need no other columns, and those rows of w2 give as many columns of the output. One call routes tokens to all experts,
and another one repeats these tokens until kernels for many tokens run.
"""

from __future__ import annotations

import dataclasses
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
from .inputs import WEIGHT_SUMS, rows_of_call
from .self_check import Calls, Comparison, is_reference
from .tolerances import rounding_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

PART = 8
"""Input features of w13, and rows of w2, that are kept of each expert: 35 MiB of a layer of gpt-oss-120b."""

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
    """Parts of all experts of a layer, collected while they are converted."""

    def __init__(self, problem: Problem) -> None:
        """
        Args:
            problem: the layer. Its name selects the parts: other ones for other layers, the same for all ranks.
        """
        self.problem = problem
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(problem.layer.encode()))
        first = self._random_index(problem.hidden_size // PART) * PART
        self.features = slice(first, first + PART)
        first = self._random_index(problem.hidden_size // PART) * PART
        self.rows = slice(first, first + PART)
        self._w13: list[Tensor] = []
        self._w2: list[Tensor] = []
        self._biases: list[tuple[Tensor, Tensor]] = []

    def _random_index(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator, device="cpu"))

    def add(self, expert: Tensors) -> None:
        """Keeps the parts of the next expert.

        Args:
            expert: its canonical tensors; not modified, and not referred to afterwards.
        """
        scheme = schemes.module(self.problem.scheme.name)
        self._w13.append(scheme.dequantize_part(expert, "w13", self.problem, features=self.features))
        self._w2.append(scheme.dequantize_part(expert, "w2", self.problem, rows=self.rows))
        if self.problem.has_bias:
            biases = expert["w13_bias"].to(torch.float32, copy=True), expert["w2_bias"][self.rows].float().clone()
            self._biases.append(biases)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs `[local_experts, hidden]` in the model's dtype, and weights float32 `[local_experts, top_k]`."""
        problem, count, device = self.problem, len(self._w13), self._w13[0].device
        inputs = torch.randn(count, PART, generator=self._generator, device="cpu", dtype=torch.float32)
        x = torch.zeros(count, problem.hidden_size, device=device, dtype=torch.float32)
        x[:, self.features] = inputs.to(device)
        sums = torch.stack([(x[:, self.features] @ each.T).square().mean() for each in self._w13])
        largest = float(sums.amax().sqrt())
        weights = torch.rand(count, problem.top_k, generator=self._generator, device="cpu", dtype=torch.float32) + 0.5
        weights *= max(WEIGHT_SUMS) / problem.top_k  # sums that differ from token to token
        return (x * (_SIZE / (largest or 1.0))).to(getattr(torch, problem.dtype)), weights.to(device)

    def reference(self, problem: Problem, rounding: float, x: Tensor, weights: Tensor) -> bounds.Reference:
        """The reference for `rows` of the outputs; token t is routed to the experts t, t + 1, ... of this rank.

        Args:
            problem: the layer; activations are quantized as its scheme says.
            rounding: see `bounds.reference_output`.
            x: from `tokens`.
            weights: likewise; 0 in slots that another rank computes.
        """
        plain = dataclasses.replace(problem, scheme=dataclasses.replace(problem.scheme, activations="16bit"))
        expected, size = self._outputs(problem, x, weights)
        exact = expected if problem.scheme.activations == "16bit" else self._outputs(plain, x, weights)[0]
        return bounds.from_parts(expected, size, exact, rounding, problem.dtype)

    def _outputs(self, problem: Problem, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the rows, and the squares of their terms, float32 `[local_experts, rows]` each."""
        count = len(self._w13)
        expected = torch.zeros(count, self._w2[0].shape[0], device=x.device, dtype=torch.float32)
        size = torch.zeros_like(expected)
        inputs = round_inputs(x.to(torch.float32), x.dtype, problem)[:, self.features]
        for expert in range(count):
            # The tokens whose slot 0, 1, ... holds this expert.
            slots = torch.arange(weights.shape[1], device=x.device)
            token = (expert - slots) % count
            hidden = inputs[token] @ self._w13[expert].T
            if self._biases:
                hidden += self._biases[expert][0]
            hidden = round_inputs(activate(hidden, problem.activation), x.dtype, problem)
            output = hidden @ self._w2[expert].T
            if self._biases:
                output += self._biases[expert][1]
            weight = weights[token, slots].unsqueeze(-1)
            terms = torch.maximum(hidden.square() @ self._w2[expert].square().T, output.square())
            expected.index_add_(0, token, output * weight)
            size.index_add_(0, token, terms * weight.square())
        return expected, size


def compare_installed(
    backend: Backend, parts: WeightParts, experts: Any, layer: Any, tensors: Tensors, adapter: Adapter
) -> Comparison:
    """Compares a converted layer with the reference, in calls that route tokens to all of its experts.

    Args:
        backend: the layer's.
        parts: parts of all experts' weights, from before the conversion.
        experts: what the backend built for the layer.
        layer: vLLM's layer.
        tensors: its kernel tensors by canonical name.
        adapter: vLLM's side.
    """
    start = time.perf_counter()
    problem = parts.problem
    scheme = dataclasses.replace(problem.scheme, activations=backend.activations(problem))
    x, weights = parts.tokens()
    count, device = len(x), x.device
    token, slot = torch.arange(count, device=device)[:, None], torch.arange(weights.shape[1], device=device)[None, :]
    ids = (token + slot) % count
    counted, expert_map = weights, None
    if problem.local_experts != problem.num_experts:
        expert_map = layer.expert_map
        if expert_map is None:
            return Comparison(0.0, math.nan, 0.0, skip_reason="the layer has no expert map")
        here, away = (expert_map >= 0).nonzero().flatten(), (expert_map < 0).nonzero().flatten()
        # Slots beyond this rank's experts are another rank's, and so is the last one of every third token.
        other = (slot >= count) | ((token % 3 == 2) & (slot == slot.amax()) & (slot > 0))
        by_place = here[expert_map[here].argsort()]
        ids = torch.where(other, away[(ids + slot) % len(away)], by_place[ids])
        counted = weights.masked_fill(other, 0.0)
    with ieee_fp32_matmul():
        reference = parts.reference(
            dataclasses.replace(problem, scheme=scheme), rounding_error(backend, problem), x, counted
        )

    ids = ids.to(adapter.ids_dtype(experts.moe_config))

    def run(given: Tensor, rows: Tensor, poisoned: bool) -> Tensor:
        routed = weights[rows], ids[rows]
        output = adapter.run_single_rank(experts, layer, tensors, given, *routed, expert_map, poisoned=poisoned)
        return output[:, parts.rows]

    calls = Calls(run, reference, x)
    most = adapter.trial_tokens(experts.moe_config)
    for rows in torch.arange(count, device=device).split(most):  # type: ignore[no-untyped-call]
        calls.make(rows)
    large = min(most, MAX_CHECK_TOKENS)
    # On a CPU calls take long, and are made only where another kernel runs.
    if large > count and (device.type != "cpu" or backend.hand_overs(problem, large)):
        calls.make(rows_of_call(large, count, count - 1).to(device))
    return calls.result(start)
