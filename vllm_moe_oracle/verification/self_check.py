"""The self-check: a few tokens through a backend's kernel and through the float32 reference, on a layer's own weights.

Some of the loaded experts are converted into a small layer of their own. The check needs no second copy of the weights
and leaves the loaded ones as they are, so that another backend can still take the layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..backends import Backend, Tensors
from ..backends.emulation import Emulation
from ..compat import weight_storage
from ..compat.experts_builder import VllmBuilder
from ..core.decision import ShardPlan
from ..core.problem import Parallel, Problem, Routing
from ..errors import CheckpointError
from ..oracle.checked_backend import unchecked
from . import bounds, inputs, routing
from .tolerances import rounding_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter


_CALLS = 24
"""Calls of a check, at least."""

_HOST_VALUES = 1 << 24
"""Weights of one matrix that repeated calls read in all, where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A kernel compared with the reference on this rank.

    Attributes:
        error: largest relative error of all calls, over blocks of columns and over columns; see `bounds`.
        tolerance: largest error that the formats explain; NaN if there is none because nothing was compared.
        seconds: duration, compilation included.
        skip_reason: why nothing was compared; "" when something was.
        fault: what is wrong and in which call; "" when nothing is.
    """

    error: float
    tolerance: float
    seconds: float
    skip_reason: str = ""
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether the kernel agrees with the reference, or nothing was compared. NaN does not agree."""
        return bool(self.skip_reason) or (self.error <= self.tolerance and not self.fault)

    def __str__(self) -> str:
        if self.skip_reason:
            return f"not checked: {self.skip_reason}"
        fault = f"; {self.fault}" if self.fault else ""
        return f"relative error {self.error:.2e}, allowed {self.tolerance:.2e}; took {self.seconds:.2f} s{fault}"


def compare_with_reference(
    backend: Backend,
    problem: Problem,
    plan: ShardPlan,
    raw: Tensors,
    moe: Any,
    adapter: Adapter,
    hand_overs: Iterable[int] = (),
) -> Comparison:
    """Compares a backend's kernel with the reference on some experts of a layer, in calls of several sizes.

    Args:
        backend: the backend whose conversion and kernel are checked.
        problem: the layer.
        plan: the backend's plan for it.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each; not modified.
        moe: vLLM's `FusedMoEConfig` of the layer.
        adapter: vLLM's side.
        hand_overs: numbers of tokens up to which one of several kernels runs, besides those in the plan.

    Raises:
        CheckpointError: the reference itself is NaN or infinite on these weights.
    """
    start = time.perf_counter()
    if backend.monolithic and routing.routing_reference(problem.routing) is None:
        return Comparison(0.0, math.nan, 0.0, skip_reason=f"no reference for routing by {problem.routing.method}")
    count = routing.min_experts(problem, backend.capabilities.experts_multiple) if backend.monolithic else 0
    sampled = inputs.sample_experts(problem, count)
    experts = inputs.canonical_experts(problem, raw, sampled)
    inputs.make_discriminating(experts, problem)
    remote = len(sampled) if _takes_expert_map(backend, problem) else 0
    small = _small_problem(problem, len(sampled), remote, backend.monolithic)
    # The reference rounds activations to the precision in which this backend consumes them.
    scheme = dataclasses.replace(small.scheme, activations=backend.activations(problem))
    exact = dataclasses.replace(small, scheme=scheme)
    # `Forward`'s contract has slots without an expert; vLLM's own classes get such slots from some all-to-alls only.
    x, weights, ids = inputs.make_inputs(exact, experts, not backend.stock_class and not backend.monolithic, remote)
    router_inputs: routing.RouterInputs | None = None
    if backend.monolithic:
        router_inputs = routing.discriminating_logits(
            small.routing, small.top_k, inputs.NUM_TOKENS, len(sampled), adapter.logits_dtype(moe)
        )
        weights, ids = (each.to(x.device) for each in routing.route(small.routing, small.top_k, *router_inputs))
    expert_map = None
    if remote:
        expert_map = torch.arange(len(sampled) + remote, dtype=torch.int32, device=x.device)
        expert_map = expert_map.masked_fill(expert_map >= len(sampled), -1)
    reference = bounds.reference_output(experts, exact, rounding_error(backend, problem), x, weights, ids, expert_map)
    _require_finite_reference(reference.expected, sampled, problem)
    planned = _plan_calls(backend, problem, small, plan, hand_overs, adapter.trial_tokens(moe), experts)
    planned = [(rows.to(x.device), poisoned) for rows, poisoned in planned]
    most = max(len(rows) for rows, _ in planned)
    built, layer, tensors = _build_small_layer(backend, small, plan, experts, moe, adapter, most)
    ids = ids.to(adapter.ids_dtype(moe))

    def run(given: Tensor, rows: Tensor, poisoned: bool) -> Tensor:
        if router_inputs is None:
            routed = weights[rows], ids[rows]
            return adapter.run_single_rank(built, layer, tensors, given, *routed, expert_map, poisoned=poisoned)
        logits, bias, scale = router_inputs
        return adapter.run_single_rank_monolithic(built, tensors, given, small, logits.to(x.device)[rows], bias, scale)

    calls = Calls(run, reference, x)
    for rows, poisoned in planned:
        calls.make(rows, poisoned)
    return calls.result(start)


def is_reference(backend: Backend) -> bool:
    """Whether a backend is the emulation itself: one call shows that the checkpoint's weights have a finite result, and
    more of its slow calls would compare it with itself."""
    return type(unchecked(backend)) is Emulation


class Calls:
    """Calls of a kernel, each compared with the reference."""

    def __init__(self, run: Callable[[Tensor, Tensor, bool], Tensor], reference: bounds.Reference, x: Tensor) -> None:
        """
        Args:
            run: runs the kernel on tokens `[M, hidden]`, whose rows of `x` are `[M]`, and with true on memory that
                holds NaN (`Adapter.run_single_rank`); returns `[M, hidden]`.
            reference: the reference output for `x`.
            x: different tokens.
        """
        self._run, self._reference, self._x = run, reference, x
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def make(self, rows: Tensor, poisoned: bool = True) -> None:
        """One call with rows `[M]` of the tokens, on memory that holds NaN, or what it held before. The host does not
        wait for the device."""
        given = self._x[rows]
        # A copy: the next call may get the same memory.
        actual = self._run(given, rows, poisoned).clone()
        excess = bounds.excess(actual, self._reference, rows)
        changed = (given != self._x[rows]).any().to(torch.float32)
        self._found.append((rows, actual, torch.stack((excess, changed))))

    def result(self, start: float) -> Comparison:
        """All calls together.

        Args:
            start: when the comparison began, by `time.perf_counter`.
        """
        figures = torch.stack([each for _, _, each in self._found]).cpu()
        worst, tolerance = float(figures[:, 0].amax()), float(self._reference.tolerance)
        fault = next((found for index in range(len(figures)) if (found := self._fault(index, figures))), "")
        return Comparison(worst * tolerance, tolerance, time.perf_counter() - start, "", fault)

    def _fault(self, index: int, figures: Tensor) -> str:
        """What is wrong with a call, in words; "" when nothing is."""
        excess, changed = figures[index].tolist()
        rows, actual, _ = self._found[index]
        words = []
        # NaN is wrong, too.
        if not excess <= 1:
            words.append(bounds.describe_excess(actual, self._reference, rows))
        if changed:
            words.append("the kernel has changed its input")
        return f"call {index + 1}, {len(rows)} tokens: {' and '.join(words)}" if words else ""


def _plan_calls(
    backend: Backend,
    problem: Problem,
    small: Problem,
    plan: ShardPlan,
    hand_overs: Iterable[int],
    most: int,
    experts: Tensors,
) -> list[tuple[Tensor, bool]]:
    """The tokens of each call by their numbers, `[M]` on the CPU, and whether its memory holds NaN before: in calls of
    new sizes. Repeated ones find what the calls before have left.

    Args:
        backend: the backend.
        problem: the layer.
        small: the layer that is checked.
        plan: see `compare_with_reference`.
        hand_overs: likewise.
        most: most tokens of a call.
        experts: the small layer's canonical tensors.
    """
    edges = {*hand_overs, *(tokens for tokens, _ in plan.tiles)}
    if is_reference(backend):
        sizes, repeats, large = [min(inputs.NUM_TOKENS, inputs.call_counts(edges, most)[-1])], [], 0
    else:
        limit = min(most, inputs.MAX_LARGE_CALL)
        own, soon = backend.hand_overs(problem, limit), backend.hand_overs(small, limit)
        sizes = inputs.call_counts({*edges, *soon[: len(own)]}, most)
        repeats = _repeats(sizes, experts)
        host_values = 0 if experts["w13"].is_cuda else small.top_k * experts["w13"][0].numel()
        large = 0 if problem.parallel.is_batched else inputs.large_call(own, soon, edges, limit, host_values)
    sizes += [large] * (large > 0)
    lasts = itertools.cycle(inputs.LAST_TOKENS)
    found = [(inputs.rows_of_call(tokens, inputs.NUM_TOKENS, next(lasts)), True) for tokens in sizes]
    return found + [(inputs.rows_of_call(tokens, inputs.NUM_TOKENS, next(lasts)), False) for tokens in repeats]


def _repeats(counts: list[int], experts: Tensors) -> list[int]:
    """Numbers of tokens of further calls, which find what a kernel keeps from one call to the next: all tokens once
    more, then those of decode steps; few of them where a call takes long."""
    again = [min(inputs.NUM_TOKENS, counts[-1])]
    left = max(_CALLS - len(counts) - len(again), 1)
    if not experts["w13"].is_cuda:
        left = min(left, max(_HOST_VALUES // experts["w13"][0].numel(), 1))
    sizes = itertools.cycle([count for count in inputs.REPEATED_COUNTS if count <= counts[-1]])
    return again + list(itertools.islice(sizes, left))


def _takes_expert_map(backend: Backend, problem: Problem) -> bool:
    """Whether the check has experts of other ranks. vLLM's own classes meet them in the layer itself."""
    parallel = problem.parallel
    able = backend.capabilities.expert_parallel and not backend.monolithic and not backend.stock_class
    return parallel.ep > 1 and not parallel.is_batched and able


def _small_problem(problem: Problem, num_experts: int, remote: int, monolithic: bool) -> Problem:
    """The layer on one rank with some of its experts, besides `remote` ones of other ranks; only a monolithic kernel
    sees the routing."""
    return dataclasses.replace(
        problem,
        num_experts=num_experts + remote,
        local_experts=num_experts,
        top_k=min(problem.top_k, num_experts),
        parallel=Parallel(tp=problem.parallel.tp, format=problem.parallel.format),
        routing=problem.routing if monolithic else Routing(),
        lora=False,
        eplb=False,
    )


def _require_finite_reference(expected: Tensor, experts: list[int], problem: Problem) -> None:
    """Raises where the reference output is NaN or infinite: every kernel would fail there, none by its own fault."""
    bad = int((~torch.isfinite(expected)).any(-1).sum())
    if bad:
        rule = (
            f"the float32 reference is NaN or infinite for {bad} of {len(expected)} tokens on the weights of local "
            f"experts {', '.join(map(str, dict.fromkeys(experts)))}: no backend can be checked against it"
        )
        # The inputs are scaled by the size of the weights; for tiny weights float16 cannot hold them.
        cause = f"some weights are NaN or infinite, or too small or too large for {problem.dtype}"
        raise CheckpointError(rule, f"The checkpoint is damaged: {cause}", problem.layer)


def _build_small_layer(
    backend: Backend, problem: Problem, plan: ShardPlan, experts: Tensors, moe: Any, adapter: Adapter, tokens: int
) -> tuple[Any, nn.Module, Tensors]:
    """A layer that holds only these experts, for calls of up to `tokens` tokens: the built experts, the module, and the
    kernel tensors by name."""
    layer = nn.Module()
    for name, tensor in experts.items():
        weight_storage.replace_parameter(layer, name, tensor.clone())
    names = weight_storage.convert_in_place(
        layer, {name: name for name in experts}, lambda expert: backend.convert(expert, problem, plan)
    )
    tensors = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    config = adapter.single_rank_config(moe, problem)
    described = adapter.quant_config(problem, tensors)
    builder = VllmBuilder(
        adapter, config, described, for_serving=False, trial_tokens=tokens, batched=problem.parallel.is_batched
    )
    return backend.build_experts(tensors, problem, plan, builder), layer, tensors
