"""One layer of a checkpoint, with all of its experts, through a backend's kernel and through the float32 reference.

The check at load (`self_check`, `converted_layer`) has to be over in a second. This one is for a user who waits: every
expert of the layer, with the checkpoint's own weights and biases, on realistic inputs, in calls of several sizes, in
repeated calls, and once more after the weights were loaded anew.

Two kinds of tokens are compared. An *isolated* token gives one expert the weight 1 and the others of its slots 0, so
that a wrong expert is known by its number; there are `ISOLATED` of them for each expert, and one of zeros where experts
have biases, whose output shows the biases alone. A *mixed* token is routed as the model routes it.

Memory: the kernel's tensors of one layer, and beside them one expert in the checkpoint's form and its matrices in
float32. Experts are read from the files one after the other; none is kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from ..backends import MAX_CHECK_TOKENS, Backend, Tensors
from ..compat import standalone_layer, weight_storage
from ..compat.experts_builder import VllmBuilder
from ..core.decision import ShardPlan
from ..core.problem import Problem
from ..errors import BackendDefect, CheckpointError, HostMemoryError, asked_memory, describe_error, is_out_of_memory
from ..layouts.byte_views import cat_bytes
from ..oracle.checked_backend import overrides, watched_calls, watched_kernel
from . import bounds, inputs, process_state, routing, self_check
from .layer_result import LayerResult
from .tolerances import rounding_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

ISOLATED = 2
"""Isolated tokens of each expert, that of zeros apart."""

CALLS = 28
"""Calls before the reload, at least: a fault in one call of twenty shows."""

_RELOADED_CALLS = (9, 1, 1, 1)
"""Numbers of mixed tokens of calls after the reload, besides all isolated ones."""

_MAX_NAMED = 8
"""Most experts that a fault names."""

ReadExpert = Callable[[int], dict[str, Tensor]]


class WeightsRefused(Exception):
    """A backend cannot hold an expert's weights; a server takes the next candidate then."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tokens of one kind, with their reference.

    Attributes:
        x: `[M, hidden]` in the model's dtype, on the kernel's device, as are the others.
        weights: float32 `[M, top_k]`.
        ids: int64 `[M, top_k]`; the first slot of an isolated token holds its expert.
        reference: the reference outputs.
        logits: router logits `[M, experts]`, correction bias and scaling factor for a kernel that routes; else None.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    reference: bounds.Reference
    logits: routing.RouterInputs | None = None


class LayerCheck:
    """The check of one layer. Experts come from functions, so that weights of any source can be checked.

    Attributes:
        problem: the layer, without what only a kernel that routes sees.
        routed_problem: the layer.
        adapter: vLLM's side.
        kind: where kernels run.
        outputs: after `run`, the reference's outputs of the mixed tokens, float32 `[M, hidden]`.
    """

    outputs: Tensor

    def __init__(
        self,
        problem: Problem,
        read: ReadExpert,
        tokens: tuple[Tensor, Tensor, Tensor],
        adapter: Adapter,
        kind: str,
        read_raw: ReadExpert | None = None,
    ) -> None:
        """
        Args:
            problem: the layer with all of its experts, on one rank.
            read: canonical tensors of an expert by its number, on the CPU.
            tokens: mixed tokens: `[M, hidden]` in the model's dtype, routing weights and ids `[M, top_k]` each.
            adapter: vLLM's side.
            kind: ``cpu`` or ``cuda``: where kernels run.
            read_raw: an expert as its scheme's ``read`` returns it, `[1, ...]` each, for the check that a server makes
                at load; None to leave that one out.
        """
        self.problem = dataclasses.replace(problem, routing=problem.routing.of_routed_tokens(), lora=False, eplb=False)
        self.kind, self.adapter = kind, adapter
        self.routed_problem, self._read, self._read_raw = problem, read, read_raw
        x, weights, ids = tokens
        # The last mixed token is zero: its output shows the biases alone.
        self._x = torch.cat((x, torch.zeros_like(x[:1])))
        self._weights = torch.cat((weights, weights[:1])).float()
        self._ids = torch.cat((ids, ids[:1])).long()
        self._device = torch.device("cuda" if kind == "cuda" else "cpu")

    def run(self, backend: Backend, plan: ShardPlan, hand_overs: tuple[int, ...] = ()) -> LayerResult:
        """Checks a backend.

        Args:
            backend: the backend.
            plan: its plan for the layer.
            hand_overs: numbers of tokens up to which one of several kernels runs.

        Raises:
            CheckpointError: an expert cannot be read, or the reference itself is NaN or infinite on its weights, or so
                small for every token that a kernel which writes zeros would pass.
            HostMemoryError: the memory is not sufficient.
            WeightsRefused: the backend cannot hold an expert's weights.
        """
        try:
            with process_state.kept():  # for the backend that is checked next
                return self._run(backend, plan, hand_overs)
        except Exception as error:  # only memory that is missing has a remedy here; the rest passes
            if not is_out_of_memory(error):
                raise
            rule = f"{backend.name} asked for {asked_memory(error)} of memory that is not free"
            remedy = "Free memory, or use a larger machine"
            raise HostMemoryError(f"{rule} ({describe_error(error)})", remedy, self.problem.layer) from error

    def _run(self, backend: Backend, plan: ShardPlan, hand_overs: tuple[int, ...]) -> LayerResult:
        mixed, isolated = self._mixed(backend), None if backend.monolithic else self._isolated()
        sums = _ExpertSums(self.problem, backend, [each for each in (mixed, isolated) if each is not None])
        made = KernelTensors(backend, self.problem, plan)
        fault = ""
        for index in range(self.problem.num_experts):
            expert = self._on_device(index)
            if words := _refusal(backend, expert, self.problem):
                raise WeightsRefused(f"expert {index}: {words}")
            sums.add(expert, index)
            fault = fault or made.put(expert, index)
            del expert
        batches = sums.batches()
        if not any(_shows_errors(each) for each in batches):
            rule = "the float32 reference is 0, or nearly so, for every token: there is nothing to compare"
            raise CheckpointError(rule, "The checkpoint's experts are empty: their weights are 0", self.problem.layer)
        calls = _LayerCalls(self, made, batches)
        if not fault:
            fault = calls.make(lambda: self._make_calls(calls, made, plan, hand_overs, backend))
        if not fault and self._read_raw is not None and not self_check.is_reference(backend):
            fault = self._check_at_load(backend, plan, hand_overs)
        sizes = self._x[:-1].float()
        peak = float((sizes.abs().amax(-1) / sizes.square().mean(-1).sqrt().clamp(min=1e-30)).amax())
        self.outputs = batches[0].reference.expected[: len(self._x) - 1]
        return calls.result(fault, peak)

    def _on_device(self, index: int) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._read(index).items()}

    def _make_calls(
        self, calls: _LayerCalls, made: KernelTensors, plan: ShardPlan, hand_overs: tuple[int, ...], backend: Backend
    ) -> str:
        """Calls of all sizes, repeated ones, and those after a reload. Returns what is wrong with the reload."""
        calls.isolated()
        if self_check.is_reference(backend):  # more of its slow calls would compare it with itself
            calls.mixed(calls.num_mixed)
            return ""
        edges = {*hand_overs, *(tokens for tokens, _ in plan.tiles)}
        for count in inputs.call_counts(edges, calls.most):
            calls.mixed(count)
        # On a CPU calls take long, and are made only where another kernel runs.
        if self.kind != "cpu" or backend.hand_overs(self.problem, calls.most):
            calls.mixed(calls.most)
        calls.mixed(calls.num_mixed)
        for count in inputs.REPEATED_COUNTS:
            if count <= calls.num_mixed:
                calls.mixed(count, start=calls.count)
        while calls.count < CALLS:
            calls.mixed(1, start=calls.count)
        if backend.monolithic or self.problem.num_experts == 1:
            return ""
        # Loaded anew, each expert in the next one's place: a kernel that keeps anything of the old weights is wrong.
        calls.shift = 1
        for index in range(self.problem.num_experts):
            if fault := made.put(self._on_device(index), (index + 1) % self.problem.num_experts):
                return fault
        calls.isolated()
        for number, count in enumerate(_RELOADED_CALLS):
            calls.mixed(count, start=3 * number)
        return ""

    def _check_at_load(self, backend: Backend, plan: ShardPlan, hand_overs: tuple[int, ...]) -> str:
        """What the check at load finds wrong; "" for nothing."""
        assert self._read_raw is not None
        problem = self.routed_problem
        count = routing.min_experts(problem, backend.capabilities.experts_multiple) if backend.monolithic else 0
        chosen = list(dict.fromkeys(inputs.sample_experts(problem, count)))
        parts = [self._read_raw(index) for index in chosen]
        raw = {name: cat_bytes([each[name] for each in parts]) for name in parts[0]}
        few = dataclasses.replace(
            problem, num_experts=len(chosen), local_experts=len(chosen), top_k=min(problem.top_k, len(chosen))
        )
        moe = standalone_layer.fused_moe_config(few, self.kind, MAX_CHECK_TOKENS)
        raw = {name: each.to(self._device) for name, each in raw.items()}
        try:
            found = self_check.compare_with_reference(backend, few, plan, raw, moe, self.adapter, hand_overs)
        except CheckpointError:
            raise
        except Exception as error:  # what a kernel raises is what is wrong with it
            if is_out_of_memory(error):
                raise
            return f"the check at load: {describe_error(error)}"
        return "" if found.passed else f"the check at load, on experts {', '.join(map(str, chosen))}: {found}"

    def _mixed(self, backend: Backend) -> _Batch:
        """Tokens routed as the model routes them; for a kernel that routes, by logits that no rounding changes."""
        x, weights, ids, logits = self._x, self._weights, self._ids, None
        if backend.monolithic and routing.routing_reference(self.routed_problem.routing) is not None:
            # Enough that most experts have tokens.
            count = max(len(x), min(MAX_CHECK_TOKENS, 4 * self.problem.num_experts // self.problem.top_k))
            moe = standalone_layer.fused_moe_config(self.problem, self.kind, MAX_CHECK_TOKENS)
            logits = routing.discriminating_logits(
                self.routed_problem.routing,
                self.problem.top_k,
                count,
                self.problem.num_experts,
                self.adapter.logits_dtype(moe),
            )
            x = x[torch.arange(count) % len(x)]
            weights, ids = routing.route(self.routed_problem.routing, self.problem.top_k, *logits)
        return self._batch(x, weights, ids, logits)

    def _isolated(self) -> _Batch:
        """The isolated tokens; neighbors get different ones."""
        experts, top_k, last = self.problem.num_experts, self.problem.top_k, len(self._x) - 1
        token = torch.arange((ISOLATED + self.problem.has_bias) * experts)
        weights = torch.zeros(len(token), top_k)
        weights[:, 0] = 1.0
        rows = (token + token // experts * 7) % last
        rows = rows.masked_fill(token >= ISOLATED * experts, last)
        return self._batch(self._x[rows], weights, (token[:, None] + torch.arange(top_k)) % experts, None)

    def _batch(self, x: Tensor, weights: Tensor, ids: Tensor, logits: routing.RouterInputs | None) -> _Batch:
        nothing = torch.empty(0)
        empty = bounds.Reference(nothing, nothing, nothing, nothing)
        return _Batch(x.to(self._device), weights.to(self._device), ids.to(self._device), empty, logits)


def _refusal(backend: Backend, expert: Tensors, problem: Problem) -> str:
    """Why a backend cannot hold an expert's weights, "" if it can; what its method raised, as at load."""
    if not overrides(backend, "validate_weights"):
        return ""
    with process_state.kept():
        try:
            return backend.validate_weights(expert, problem)
        except BackendDefect as error:
            return str(error)


def _shows_errors(batch: _Batch) -> bool:
    """Whether a kernel that writes zeros is off by more than rounding explains."""
    rows = torch.arange(len(batch.x), device=batch.x.device)
    nothing = torch.zeros_like(batch.reference.expected)
    return bool(bounds.excesses([nothing], batch.reference, [rows]) > 1)


class _ExpertSums:
    """The reference of some batches, gathered expert by expert; the first batch is the mixed one."""

    def __init__(self, problem: Problem, backend: Backend, batches: list[_Batch]) -> None:
        # The reference rounds activations to the precision in which this backend consumes them.
        one = dataclasses.replace(problem, num_experts=1, local_experts=1, top_k=1)
        self._one = one.with_activations(backend.activations(problem))
        self._rounding, self._experts = rounding_error(backend, problem), problem.num_experts
        self._batches = batches
        self._weights = torch.cat([each.weights for each in batches])
        self._ids = torch.cat([each.ids for each in batches])
        self._sums = bounds.Sums(self._one, torch.cat([each.x for each in batches]))

    def add(self, expert: Tensors, index: int) -> None:
        """Adds what an expert computes."""
        mine = (self._ids == index) & (self._weights != 0)
        if mine.any():
            alone = {name: tensor.unsqueeze(0) for name, tensor in expert.items()}
            self._sums.add(alone, self._one, self._weights, torch.where(mine, 0, -1))
        bad = ~torch.isfinite(self._sums.expected).all(-1)
        if bool(bad.any()):
            rule = f"the float32 reference is NaN or infinite for {int(bad.sum())} of {len(bad)} tokens"
            remedy = f"The checkpoint is damaged: some weights are too large for {self._one.dtype}"
            raise CheckpointError(rule, remedy, f"{self._one.layer}, expert {index}")

    def batches(self) -> list[_Batch]:
        """The batches with their references."""
        mixed = len(self._batches[0].x)
        found = [dataclasses.replace(self._batches[0], reference=self._reference(slice(0, mixed)))]
        for each in self._batches[1:]:
            # Each expert by itself: one with tiny weights would vanish behind the others' rounding.
            parts = [
                self._reference(slice(mixed + first, mixed + len(each.x), self._experts))
                for first in range(self._experts)
            ]
            place = torch.arange(len(each.x), device=each.x.device)
            order = (place % self._experts) * (len(each.x) // self._experts) + place // self._experts
            found.append(dataclasses.replace(each, reference=bounds.joined(parts).permuted(order)))
        return found

    def _reference(self, rows: slice) -> bounds.Reference:
        sums = self._sums
        parts = sums.expected[rows], sums.size[rows], sums.exact[rows]
        return bounds.from_parts(*parts, self._rounding, self._one.dtype)


class KernelTensors:
    """A layer's kernel tensors, filled expert by expert, and the experts over them.

    Attributes:
        backend: converts experts.
        layer: the module that holds them.
        tensors: they, `[experts, ...]` each, by name.
        nbytes: their bytes, and those of an expert in canonical form and of two of its matrices in float32.
    """

    def __init__(self, backend: Backend, problem: Problem, plan: ShardPlan) -> None:
        """
        Args:
            backend: see the class.
            problem: the layer with all of its experts, on one rank.
            plan: the backend's plan for it.
        """
        self.backend, self._problem, self._plan = backend, problem, plan
        self._specs: dict[str, weight_storage.TensorSpec] = {}
        self.layer = nn.Module()
        self.nbytes = 4 * (problem.w13_rows + problem.intermediate_size) * problem.hidden_size

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, `[experts, ...]` each, by name."""
        return {name: getattr(self.layer, name).data for name in self._specs}

    def put(self, expert: Tensors, index: int) -> str:
        """Converts an expert into a place. Returns what is wrong with the conversion, in words."""
        try:
            with process_state.kept():
                converted = self.backend.convert(expert, self._problem, self._plan)
            with watched_calls(self.backend, "converted tensors"):  # copies of a class of its own run its code
                words = self._copy(converted, expert, index)
        except Exception as error:  # what a backend raises is what is wrong with it
            if is_out_of_memory(error):
                raise
            words = describe_error(error)
        return f"the conversion of expert {index}: {words}" if words else ""

    def _copy(self, converted: Tensors, expert: Tensors, index: int) -> str:
        """Copies an expert's kernel tensors into their place, which the first call makes. Returns what is wrong."""
        specs = {name: weight_storage.TensorSpec.of(tensor) for name, tensor in converted.items()}
        if not self._specs:
            self._specs = specs
            for name, tensor in converted.items():
                data = torch.empty((self._problem.num_experts, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
                weight_storage.replace_parameter(self.layer, name, data)
                self.nbytes += data.nbytes
            self.nbytes += sum(tensor.nbytes for tensor in expert.values())
        if specs != self._specs:
            return "its tensors have other shapes or dtypes than the first expert's"
        for name, tensor in converted.items():
            self.tensors[name][index].copy_(tensor)
        return ""

    def build(self, adapter: Adapter, kind: str, most: int) -> Any:
        """The experts over the tensors.

        Args:
            adapter: vLLM's side.
            kind: ``cpu`` or ``cuda``.
            most: most tokens of a call.
        """
        tensors = self.tensors
        moe = standalone_layer.fused_moe_config(self._problem, kind, MAX_CHECK_TOKENS)
        described = adapter.quant_config(self._problem, tensors)
        builder = VllmBuilder(adapter, moe, described, for_serving=False, trial_tokens=most)
        with process_state.kept():
            return self.backend.build_experts(tensors, self._problem, self._plan, builder)


class _LayerCalls:
    """Calls of a whole layer, and each expert's share of their error.

    Attributes:
        count: calls so far.
        most: most tokens of a call.
        num_mixed: mixed tokens of the largest call without repeats.
        shift: by how many places the experts were moved by a reload.
    """

    def __init__(self, check: LayerCheck, made: KernelTensors, batches: list[_Batch]) -> None:
        self.count = self.shift = 0
        self._check, self._made = check, made
        self._mixed, self._isolated = batches[0], batches[1] if len(batches) > 1 else None
        self._run: Callable[[_Batch, Tensor, Tensor], Tensor] | None = None
        moe = standalone_layer.fused_moe_config(check.problem, check.kind, MAX_CHECK_TOKENS)
        self.most = min(MAX_CHECK_TOKENS, check.adapter.trial_tokens(moe))
        self.num_mixed = min(len(self._mixed.x), self.most)
        self._faults: dict[str, str] = {}
        self._faulty: set[int] = set()
        self._errors = torch.zeros(2, dtype=torch.float64)
        self._worst, self._tolerance, self._outliers, self._blocks = 0.0, 0.0, 0, 0
        self._compared: set[int] = set()

    def make(self, calls: Callable[[], str]) -> str:
        """Builds the experts and makes calls. Returns what the backend raised, or what `calls` returned."""
        try:
            self._run = self._build()
            return calls()
        except Exception as error:  # what a kernel raises is what is wrong with it
            if is_out_of_memory(error) or isinstance(error, CheckpointError):
                raise
            return f"call {self.count + 1}: {describe_error(error)}"

    def _build(self) -> Callable[[_Batch, Tensor, Tensor], Tensor]:
        check, tensors, adapter = self._check, self._made.tensors, self._check.adapter
        problem = check.problem
        on_input = problem.routing.apply_router_weight_on_input
        experts = self._made.build(adapter, check.kind, self.most)
        layer = self._made.layer

        def run(batch: _Batch, given: Tensor, rows: Tensor) -> Tensor:
            if batch.logits is not None:
                logits, bias, scale = batch.logits
                own = check.routed_problem
                return adapter.run_single_rank_monolithic(
                    experts, tensors, given, own, logits.to(given.device)[rows], bias, scale
                )
            ids = ((batch.ids[rows] + self.shift) % problem.num_experts).to(torch.int32)
            return adapter.run_single_rank(
                experts, layer, tensors, given, batch.weights[rows], ids, weights_on_input=on_input
            )

        return run

    def isolated(self) -> None:
        """All isolated tokens; nothing for a kernel that routes."""
        if self._isolated is not None:
            for rows in torch.split(torch.arange(len(self._isolated.x)), self.most):
                self._call(self._isolated, rows, alone=True)

    def mixed(self, count: int, start: int = 0) -> None:
        """A call of some mixed tokens, beginning with one of them."""
        self._call(self._mixed, (start + torch.arange(min(count, self.most))) % len(self._mixed.x), alone=False)

    def _call(self, batch: _Batch, rows: Tensor, alone: bool) -> None:
        assert self._run is not None
        rows = rows.to(batch.x.device)
        given = batch.x[rows]
        self.count += 1
        # As a server calls it; the check at load says what was changed.
        with torch.inference_mode(), watched_kernel(self._made.backend), process_state.kept():
            actual = self._run(batch, given, rows).float()
        reference = batch.reference
        blocks, columns, tokens = (each.nan_to_num(nan=torch.inf) for each in bounds.ratios(actual, reference, rows))
        by_token = torch.maximum(blocks.amax(-1), tokens)
        excess = max(float(by_token.amax()), float(columns.amax()))
        self._worst = max(self._worst, excess * float(reference.tolerance))
        self._tolerance = max(self._tolerance, float(reference.tolerance))
        self._outliers += int((blocks > 1).sum())
        self._blocks += blocks.numel()
        self._compared |= set((batch.ids[rows, :1] if alone else batch.ids[rows]).flatten().tolist())
        differences = (actual - reference.expected[rows]).double().square().sum()
        sizes = reference.expected[rows].double().square().sum()
        self._errors += torch.stack((differences, sizes)).cpu()
        off = by_token > 1
        if alone:
            self._faulty |= set(batch.ids[rows[off], 0].tolist())
        if excess > 1:
            whose = batch.ids[rows[by_token.argmax()]].tolist()
            words = "" if alone else f" (a token of {_experts(whose)})"
            self._note("off", f"{bounds.describe_excess(actual, reference, rows)}{words}", rows)
        if bool((given != batch.x[rows]).any()):
            self._note("changed", "the kernel has changed its input", rows)

    def _note(self, kind: str, words: str, rows: Tensor) -> None:
        """Keeps the first fault of a kind."""
        reloaded = ", after a reload" if self.shift else ""
        self._faults.setdefault(kind, f"call {self.count}, {len(rows)} tokens{reloaded}: {words}")

    def result(self, fault: str, peak: float) -> LayerResult:
        """Everything together.

        Args:
            fault: what is wrong besides the numbers; "" for nothing.
            peak: see `LayerResult`.
        """
        faults = [*self._faults.values(), *([fault] if fault else [])]
        experts = self._check.problem.num_experts
        if self._faulty:
            every = len(self._faulty) == experts
            whose = f"all {experts} experts" if every else _experts(sorted(self._faulty))
            faults.insert(0, f"{whose} {'is wrong by itself' if len(self._faulty) == 1 else 'are wrong by themselves'}")
        error, size = self._errors.tolist()
        found = LayerResult(
            self._check.problem.layer,
            self._made.backend.name,
            "failed" if faults else "passed",
            outliers=self._outliers,
            blocks=self._blocks,
            experts_checked=len(self._compared),
            experts=experts,
            calls=self.count,
            faulty_experts=tuple(sorted(self._faulty)),
            fault="; ".join(faults),
            peak=_finite(peak),
            memory=self._made.nbytes,
        )
        if not self._blocks:
            return found
        whole = (error / size) ** 0.5 if size else float(error > 0)
        figures = {"error": whole, "worst": self._worst, "allowed": self._tolerance}
        return msgspec.structs.replace(found, **{name: _finite(each) for name, each in figures.items()})


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _experts(numbers: list[int]) -> str:
    """Numbers of experts in words."""
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"expert {shown}" if len(numbers) == 1 else f"experts {shown}{more}"
