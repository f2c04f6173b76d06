"""The self-check: a few tokens through a backend's kernel and through the float32 reference, on a layer's own weights.

Some of the loaded experts are converted into a small layer of their own. The check needs no second copy of the weights
and leaves the loaded ones as they are, so that another backend can still take the layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..backends import Backend, Tensors
from ..backends.emulation import Emulation
from ..compat import weight_storage
from ..compat.experts_builder import VllmBuilder
from ..compat.kernel_memory import Guards
from ..core.decision import ShardPlan
from ..core.problem import Parallel, Problem
from ..errors import CheckpointError
from ..oracle.checked_backend import unchecked, watched_kernel
from . import bounds, inputs, process_state, routing
from .tolerances import rounding_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter


_CALLS = 24
"""Calls of a check, at least."""

_PART_OF_RANGE = 2.0**-4
"""Largest expected output, as a share of the dtype's largest number: sums on the way to it may be larger."""

_LARGEST = 2.0**56
"""The largest number counts as this in dtypes that hold larger ones: bounds sum squares of outputs in float32."""

_TRIES = 6
"""References at most, of smaller tokens each, until outputs are within that: limits of activations up to 100,000."""

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
    exact = small.with_activations(backend.activations(problem))
    # `Forward`'s contract has slots without an expert; vLLM's own classes get such slots from some all-to-alls only.
    empty_slots = not backend.stock_class and not backend.monolithic
    x, weights, ids = inputs.make_inputs(exact, experts, empty_slots, remote)
    nothing = inputs.ELSEWHERE_TOKEN if remote else inputs.EXPERTLESS_TOKEN if empty_slots else None
    if is_reference(backend):
        x, weights, ids = (each[: inputs.NUM_TOKENS] for each in (x, weights, ids))
    groups = len(x) // inputs.NUM_TOKENS
    router_inputs: routing.RouterInputs | None = None
    if backend.monolithic:
        router_inputs = routing.discriminating_logits(
            small.routing, small.top_k, inputs.NUM_TOKENS, len(sampled), adapter.logits_dtype(moe)
        )
        routed = routing.route(small.routing, small.top_k, *router_inputs)
        weights, ids = (each.to(x.device).repeat(groups, 1) for each in routed)
    expert_map = _expert_map(remote, x.device) if remote else None
    rounding = rounding_error(backend, problem)

    def reference_of(x: Tensor) -> bounds.Reference:
        return bounds.reference_output(experts, exact, rounding, x, weights, ids, expert_map, groups)

    x, reference, used = _within_range(x, reference_of, sampled, problem)
    most, spoiled = adapter.trial_tokens(moe), len(x)
    planned = _plan_calls(backend, problem, small, plan, hand_overs, most, experts, used, spoiled, nothing)
    x, weights, ids = inputs.add_strange_tokens(x, weights, ids)
    reference = bounds.with_strange_tokens(reference, inputs.NUM_TOKENS)
    most = max(len(rows) for rows, _ in planned)
    built, layer, tensors = _build_small_layer(backend, small, plan, experts, moe, adapter, most)
    given = {"tokens": x, "routing weights": weights, "expert ids": ids.to(adapter.ids_dtype(moe))}
    whole = {} if expert_map is None else {"expert map": expert_map}
    scale = 1.0
    if router_inputs is not None:
        given, whole, scale = _given_to_router(x, *router_inputs)

    def run(*routed: Tensor, **memory: Any) -> Tensor:
        on_input = small.routing.apply_router_weight_on_input
        return adapter.run_single_rank(built, layer, tensors, *routed, **memory, weights_on_input=on_input)

    def run_monolithic(x: Tensor, logits: Tensor, bias: Tensor | None = None, **memory: Any) -> Tensor:
        # Its output and workspaces are its own.
        return adapter.run_single_rank_monolithic(built, tensors, x, small, logits, bias, scale)

    calls = Calls(run_monolithic if backend.monolithic else run, reference, given, whole, backend, spoiled, tensors)
    calls.make_all(planned)
    return calls.result(start)


def _given_to_router(
    x: Tensor, logits: Tensor, bias: Tensor | None, scale: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """What a kernel that routes tokens gets, by name: the values of each token, those of all, and the scaling factor.

    Args:
        x: tokens in groups, and those of `inputs.add_strange_tokens`.
        logits: those of a group; each one has the same.
        bias: the correction bias.
        scale: the scaling factor.
    """
    every = torch.arange(len(x), device=logits.device) % len(logits)
    given = {"tokens": x, "router logits": logits[every].to(x.device)}
    return given, {} if bias is None else {"correction bias": bias.to(x.device)}, scale


def is_reference(backend: Backend) -> bool:
    """Whether a backend is the emulation itself: one call shows that the checkpoint's weights have a finite result, and
    more of its slow calls would compare it with itself."""
    return type(unchecked(backend)) is Emulation


class Calls:
    """Calls of a kernel, each compared with the reference."""

    def __init__(
        self,
        run: Callable[..., Tensor],
        reference: bounds.Reference,
        given: Tensors,
        whole: Tensors | None = None,
        backend: Backend | None = None,
        spoiled: int | None = None,
        held: Tensors | None = None,
    ) -> None:
        """
        Args:
            run: runs the kernel on some rows of the values of `given` and on those of `whole`, in their order, with
                ``poisoned=True`` on memory that holds NaN, and with ``guards`` between them
                (`Adapter.run_single_rank`); returns `[M, hidden]`.
            reference: the reference output for all rows.
            given: what the kernel gets, `[tokens, ...]` each, by its name in messages: the tokens come first.
            whole: what it gets in every call as it is, by its name in messages; None for nothing.
            backend: whose kernel it is; None for none of a registry.
            spoiled: the token of NaN, whose output is not compared; None for none.
            held: the kernel's own weights and scales, by their names in messages; None not to compare them.
        """
        self._spoiled, self._with_spoiled = spoiled, set[int]()
        self._run, self._reference, self._given, self._backend = run, reference, given, backend
        self._guards = Guards(next(iter(given.values()))[0].nbytes)  # a row of the output, where nothing is padded
        self._whole = {name: (self._guards.around({name: each})[name], each) for name, each in (whole or {}).items()}
        self._held = held or {}
        self._sums = _checksums(self._held)
        self._rows: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._after: dict[str, list[Tensor]] = {name: [] for name in given}
        self._settings: list[list[str]] = []
        # Of calls between other rows: those after the call.
        self._beside: list[Tensor | None] = []
        self._memory: dict[int, dict[str, Tensor]] = {}
        self._tokens: dict[int, Tensor] = {}

    @torch.inference_mode()
    def make(self, rows: Tensor, poisoned: bool = True, spoiled: bool = False) -> None:
        """One call with rows `[M]` of the tokens, on memory that holds NaN, or what it held before. The host does not
        wait for the device. The call is made in torch's inference mode, as a server makes all of its own.

        The tokens of a call on memory that holds NaN begin where their storage begins. Those of other calls are part
        of a larger tensor, as vLLM's are where it splits a batch: the kernel may read the rows before and after them,
        and not change them. Their output and workspaces lie between guards, and what else the kernel gets does in all
        calls. Calls of as many tokens find theirs in the same memory, as in a CUDA graph: a kernel may keep what it has
        computed by the address. `spoiled` says that one of the rows is the token of NaN.
        """
        x = next(iter(self._given.values()))
        held = x[rows] if poisoned else self._among_others(x, rows)
        given = [held if poisoned else held[1:-1], *self._in_place(rows).values()]
        if spoiled:
            self._with_spoiled.add(len(self._rows))
        # Copies: the next call may get the same memory.
        self._rows.append(rows)
        self._guards.when = f"call {len(self._rows)}, {len(rows)} tokens"
        whole = [each for each, _ in self._whole.values()]
        with watched_kernel(self._backend), process_state.kept() as changed:
            output = self._run(*given, *whole, poisoned=poisoned, guards=None if poisoned else self._guards)
            uncompared = torch.eq(rows, self._spoiled).unsqueeze(-1) if spoiled and self._spoiled is not None else None
            self._outputs.append(output.clone() if uncompared is None else output.masked_fill(uncompared, 0.0))
        # The first calls may import and compile.
        self._settings.append([] if poisoned else changed)
        self._beside.append(None if poisoned else held[:: len(held) - 1].clone())
        for each, after in zip(given, self._after.values(), strict=True):
            after.append(each.clone())

    def make_all(self, planned: Sequence[tuple[Tensor, bool]]) -> None:
        """Calls in turn: the rows of each on the CPU, and whether its memory holds NaN."""
        # In one copy: the host waits for each.
        together = torch.cat([rows for rows, _ in planned]).to(self._reference.expected.device)
        places = torch.split(together, [len(rows) for rows, _ in planned])
        for rows, (numbers, poisoned) in zip(places, planned, strict=True):
            self.make(rows, poisoned, self._spoiled is not None and bool((numbers == self._spoiled).any()))

    def _among_others(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of the tokens, in the memory of an earlier call of as many, between two rows of a token that is not
        zero."""
        around = torch.cat((rows[-1:], rows, rows[-1:]))
        if len(rows) not in self._tokens:
            self._tokens[len(rows)] = x.new_empty(len(around), *x.shape[1:])
        return torch.index_select(x, 0, around, out=self._tokens[len(rows)])

    def _in_place(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows of what else the kernel gets, in the memory of an earlier call of as many, between guards."""
        others = {name: each for index, (name, each) in enumerate(self._given.items()) if index}
        if (found := self._memory.get(len(rows))) is None:
            self._guards.when = f"a call of {len(rows)} tokens"
            found = self._memory[len(rows)] = self._guards.around({name: each[rows] for name, each in others.items()})
            return found
        return {name: torch.index_select(each, 0, rows, out=found[name]) for name, each in others.items()}

    def result(self, start: float) -> Comparison:
        """All calls together.

        Args:
            start: when the comparison began, by `time.perf_counter`.
        """
        excesses = bounds.excesses(self._outputs, self._reference, self._rows).unsqueeze(-1)
        allowed = self._reference.tolerance.expand(excesses.shape)
        figures, changed = self._on_host(torch.cat((excesses, allowed, self._changed_beside(), self._changes()), -1))
        worst, tolerance = float(figures[:, 0].amax()), float(figures[0, 1])
        faults = (self._fault(index, each[0], *each[2:]) for index, each in enumerate(figures.tolist()))
        # What was written elsewhere may be why numbers are wrong.
        fault = "; ".join(filter(None, (next(filter(None, faults), ""), changed)))
        return Comparison(worst * tolerance, tolerance, time.perf_counter() - start, "", fault)

    def _on_host(self, figures: Tensor) -> tuple[Tensor, str]:
        """Figures on the CPU, and what the kernel has changed of that which all calls share, in words; "" for nothing.
        The host waits for the device here, once for all calls."""
        kept = [(_bits(now) != _bits(before)).any() for now, before in self._whole.values()]
        kept += (_checksums(self._held) != self._sums).unbind()
        changed = torch.cat((torch.stack(kept), self._guards.changed())) if kept else self._guards.changed()
        together = torch.cat((figures.flatten(), changed.to(figures.dtype))).cpu()
        words = [f"the kernel has changed its {name}" for name in (*self._whole, *self._held)] + self._guards.words()
        found = itertools.compress(words, together[figures.numel() :].tolist())
        return together[: figures.numel()].view(figures.shape), next(found, "")

    def _changed_beside(self) -> Tensor:
        """Whether each call has changed the rows before and after its tokens, float32 `[calls, 1]`: 1 if so."""
        untouched = self._reference.expected.new_zeros(1)
        held = [each for each in self._beside if each is not None]
        if not held:
            return untouched.expand(len(self._rows), 1)
        lasts = [rows[-1:] for rows, each in zip(self._rows, self._beside, strict=True) if each is not None]
        kept = next(iter(self._given.values()))[torch.stack(lasts)]
        changed = (_bits(torch.stack(held)) != _bits(kept)).flatten(1).any(-1, keepdim=True)
        found = iter(changed.to(untouched.dtype))
        return torch.stack([untouched if each is None else next(found) for each in self._beside])

    def _changes(self) -> Tensor:
        """Whether each call has changed each tensor that the kernel got, float32 `[calls, tensors]`: 1 if so."""
        found = []
        for some in bounds.call_batches(self._rows):
            rows = torch.cat(self._rows[some])
            changed = [
                (_bits(torch.cat(self._after[name][some])) != _bits(before[rows])).any(-1)
                for name, before in self._given.items()
            ]
            found.append(bounds.largest_of_calls(torch.stack(changed, -1).to(torch.float32), self._rows[some]))
        return torch.cat(found)

    def _fault(self, index: int, excess: float, beside: float, *changed: float) -> str:
        """What is wrong with a call, in words; "" when nothing is. The figures are a row of those in `result`: `beside`
        says whether rows beside the tokens were changed."""
        rows, words = self._rows[index], []
        # NaN is wrong, too.
        if not excess <= 1:
            words.append(bounds.describe_excess(self._outputs[index], self._reference, rows))
        names = [name for name, each in zip(self._after, changed, strict=True) if each]
        if names:
            words.append(f"the kernel has changed its {' and '.join(names)}")
        if beside:
            words.append("the kernel has written before or after its tokens")
        if self._settings[index]:
            words.append(f"the kernel has changed the process's {' and '.join(self._settings[index])}")
        spoiled = ", one of them of NaN and infinities" if index in self._with_spoiled else ""
        return f"call {index + 1}, {len(rows)} tokens{spoiled}: {' and '.join(words)}" if words else ""


def _bits(values: Tensor) -> Tensor:
    """A tensor's bits as integers, in which NaN equals itself."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _checksums(tensors: Tensors) -> Tensor:
    """The sum of each tensor's words, int64 `[tensors]` on their device."""
    sums = [_words(each).sum(dtype=torch.int64) for each in tensors.values()]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def _words(values: Tensor) -> Tensor:
    """A tensor's bits as integers, of 64 bits where it has whole ones: a CPU adds them eight times as fast."""
    whole = values.is_contiguous() and values.nbytes % 8 == 0 and values.data_ptr() % 8 == 0
    return values.flatten().view(torch.int64) if whole else _bits(values)


def _plan_calls(
    backend: Backend,
    problem: Problem,
    small: Problem,
    plan: ShardPlan,
    hand_overs: Iterable[int],
    most: int,
    experts: Tensors,
    groups: list[int],
    spoiled: int,
    nothing: int | None = None,
) -> list[tuple[Tensor, bool]]:
    """The tokens of each call by their numbers, `[M]` on the CPU, and whether its memory holds NaN before: in calls of
    new sizes, and where no token has an expert. Repeated ones find what the calls before have left.

    Args:
        backend: the backend.
        problem: the layer.
        small: the layer that is checked.
        plan: see `compare_with_reference`.
        hand_overs: likewise.
        most: most tokens of a call.
        experts: the small layer's canonical tensors.
        groups: numbers of the groups of tokens, the first of which calls of all sizes have.
        spoiled: the first token of `inputs.add_strange_tokens`. It takes a place in the large call and in the repeated
            call of all tokens, which has the other one, too.
        nothing: a token without an expert on this rank, for a call of its own; None where there is none.
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
    alone = min(-(-sizes[-1] // inputs.WHOLE_BLOCKS) * inputs.WHOLE_BLOCKS, most)
    sizes += [large] * (large > 0)
    lasts = itertools.cycle(inputs.LAST_TOKENS)
    found: list[tuple[Tensor, bool]] = []
    for number, tokens in enumerate(sizes + repeats):
        # Of two tokens each has experts of its own, with large weights: a kernel may lose an expert with one row.
        last = inputs.LAST_TOKENS[0] if tokens == 2 else next(lasts)
        found.append((inputs.rows_of_call(tokens, inputs.NUM_TOKENS, last), number < len(sizes)))
    whole = inputs.rows_of_call(min(inputs.NUM_TOKENS, most), inputs.NUM_TOKENS, next(lasts))
    found += [(whole + group * inputs.NUM_TOKENS, False) for group in groups[1:]]
    if is_reference(backend):
        return found
    if large:
        found[sizes.index(large)][0][large // 2] = spoiled
    if len(again := found[len(sizes)][0]) > 2:
        again[len(again) // 2] = spoiled
        if not (backend.monolithic or problem.routing.apply_router_weight_on_input):  # their weights are others
            # Beside the token with the same experts: a kernel may take neighbors' weights for equal, too.
            numbers = again.tolist()
            alike = [index for index, each in enumerate(numbers) if each == inputs.LAST_TOKENS[0]]
            beside = [each for index in alike for each in (index - 1, index + 1) if each in range(len(numbers))]
            again[next((each for each in beside if numbers[each] != spoiled), 0)] = spoiled + 1
    # One token alone: its experts get all rows, and a kernel that holds back places for each has too few.
    found.append((torch.full((alone,), inputs.LAST_TOKENS[0], device="cpu"), False))
    if nothing is not None:  # as decode steps of one token have it: no kernel runs, but the output is to be written
        found.append((torch.tensor([nothing], device="cpu"), True))
    return found


def _repeats(counts: list[int], experts: Tensors) -> list[int]:
    """Numbers of tokens of further calls, which find what a kernel keeps from one call to the next: all tokens once
    more, then each of `REPEATED_COUNTS`; few of them where a call takes long."""
    again = [min(inputs.NUM_TOKENS, counts[-1])]
    sizes = [count for count in inputs.REPEATED_COUNTS if count <= counts[-1]]
    left = max(_CALLS - len(counts) - len(again), len(sizes))
    if not experts["w13"].is_cuda:
        left = min(left, max(_HOST_VALUES // experts["w13"][0].numel(), 1))
    return again + list(itertools.islice(itertools.cycle(sizes), left))


def _takes_expert_map(backend: Backend, problem: Problem) -> bool:
    """Whether the check has experts of other ranks. vLLM's own classes meet them in the layer itself."""
    parallel = problem.parallel
    able = backend.capabilities.expert_parallel and not backend.monolithic and not backend.stock_class
    return parallel.ep > 1 and not parallel.is_batched and able


def _expert_map(count: int, device: torch.device) -> Tensor:
    """The map of a small layer with `count` experts and as many of other ranks, int32 `[2 * count]`."""
    found = torch.full((2 * count,), -1, dtype=torch.int32, device=device)
    found[inputs.place_experts(count)[0].to(device)] = torch.arange(count, dtype=torch.int32, device=device)
    return found


def _small_problem(problem: Problem, num_experts: int, remote: int, monolithic: bool) -> Problem:
    """The layer on one rank with some of its experts, besides `remote` ones of other ranks; only a monolithic kernel
    sees how tokens are routed."""
    return dataclasses.replace(
        problem,
        num_experts=num_experts + remote,
        local_experts=num_experts,
        top_k=min(problem.top_k, num_experts),
        parallel=Parallel(tp=problem.parallel.tp, format=problem.parallel.format),
        routing=problem.routing if monolithic else problem.routing.of_routed_tokens(),
        lora=False,
        eplb=False,
    )


def _within_range(
    x: Tensor, reference_of: Callable[[Tensor], bounds.Reference], experts: list[int], problem: Problem
) -> tuple[Tensor, bounds.Reference, list[int]]:
    """Tokens whose outputs the model's dtype holds, with their reference, and the usable groups by number.

    The first group is among them: its tokens are made smaller until they are within range. A large limit of the
    activation makes them large, and their products leave float16 where weights are large, too. Other groups are left
    out.

    Args:
        x: the tokens, `[groups * NUM_TOKENS, hidden]`, the first of which is zero.
        reference_of: the reference for tokens.
        experts: local numbers of the sampled experts.
        problem: the layer.

    Raises:
        CheckpointError: the reference output of the first group is NaN or infinite for tokens of any size: every kernel
            would fail there, none by its own fault.
    """
    most = min(torch.finfo(getattr(torch, problem.dtype)).max, _LARGEST) * _PART_OF_RANGE
    for left in reversed(range(_TRIES)):
        reference = reference_of(x)
        largest = reference.expected.abs().amax(-1).tolist()
        first, last = largest[: inputs.NUM_TOKENS], max(largest[0], largest[inputs.NUM_TOKENS - 1])
        # NaN is beyond, too. What tokens of zeros give, their size does not change.
        beyond = [index for index, each in enumerate(first) if not each <= most]
        if not beyond or not left or not last <= most:
            break
        x = x.clone()
        for index in beyond:
            x[index] *= _shrinkage(first[index] / most)
    if bad := sum(not math.isfinite(each) for each in first):
        rule = (
            f"the float32 reference is NaN or infinite for {bad} of {len(first)} tokens on the weights of local "
            f"experts {', '.join(map(str, dict.fromkeys(experts)))}: no backend can be checked against it"
        )
        # The inputs are scaled by the size of the weights; for tiny weights float16 cannot hold them.
        cause = f"some weights are NaN or infinite, or too small or too large for {problem.dtype}"
        raise CheckpointError(rule, f"The checkpoint is damaged: {cause}", problem.layer)
    groups = range(1, len(x) // inputs.NUM_TOKENS)
    parts = {index: largest[index * inputs.NUM_TOKENS :][: inputs.NUM_TOKENS] for index in groups}
    return x, reference, [0, *(index for index, each in parts.items() if all(value <= most for value in each))]


def _shrinkage(excess: float) -> float:
    """The power of two that makes a token smaller whose outputs are so many times too large. They count as products of
    two numbers of its size, so that it becomes no smaller than it needs."""
    return 2.0 ** -max(1, math.ceil(math.log2(excess) / 2)) if math.isfinite(excess) else 2.0**-4


def _build_small_layer(
    backend: Backend, problem: Problem, plan: ShardPlan, experts: Tensors, moe: Any, adapter: Adapter, tokens: int
) -> tuple[Any, nn.Module, Tensors]:
    """A layer that holds only these experts, for calls of up to `tokens` tokens: the built experts, the module, and the
    kernel tensors by name."""
    layer = nn.Module()
    for name, tensor in experts.items():
        weight_storage.replace_parameter(layer, name, tensor.clone())
    with process_state.kept():
        names = weight_storage.convert_in_place(
            layer, {name: name for name in experts}, lambda expert: backend.convert(expert, problem, plan)
        )
    tensors = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    config = adapter.single_rank_config(moe, problem)
    described = adapter.quant_config(problem, tensors)
    builder = VllmBuilder(
        adapter, config, described, for_serving=False, trial_tokens=tokens, batched=problem.parallel.is_batched
    )
    with process_state.kept():
        return backend.build_experts(tensors, problem, plan, builder), layer, tensors
