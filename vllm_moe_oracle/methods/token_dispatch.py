"""Several backends for one layer: the number of tokens decides which of them runs.

The choice happens in Python before a launch. A CUDA graph is captured for one number of tokens, so it holds one kernel.

Backends that read the same layout share the layer's tensors. Every other backend has a copy of the weights, converted
from the loaded ones before the layer's own conversion overwrites them, and refilled in place by a reload.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..backends import Backend, Tensors
from ..compat import weight_storage
from ..compat.experts_builder import VllmBuilder
from ..core.decision import Answers, ShardPlan
from ..core.problem import Problem
from ..errors import BackendDefect, SelfCheckError
from ..oracle.checked_backend import watched_calls
from ..settings import env_var
from ..verification import process_state
from ..verification.converted_layer import InstalledLayer, WeightParts, skip_reason
from . import backend_check, rank_sync
from .backend_selection import LayerMethod
from .load_caches import per_load

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")

WeightCopies = dict[str, dict[str, Tensor]]
"""Kernel tensors of the backends that have a copy of the weights, by backend and tensor name."""


class DispatchMethod(LayerMethod, Protocol):
    """A layer's method, as this module sees it.

    Attributes:
        weight_copies: kernel tensors beside the layer's own.
        token_dispatch: the dispatch of the converted layer; None before its conversion, and with a single backend.
    """

    weight_copies: WeightCopies
    token_dispatch: TokenDispatch | None

    def canonical(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical tensors of one expert, from its loaded tensors."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The kernel for a range of tokens.

    Attributes:
        max_tokens: the range's last number of tokens; None for no limit.
        kernel: vLLM's kernel.
        layer: the layer, or a view of it with this kernel's weights.
        backend: the backend, where it is not the layer's own; None for that.
        experts: what that backend built.
        tensors: its kernel tensors.
    """

    max_tokens: int | None
    kernel: Any
    layer: Any
    backend: Backend | None = None
    experts: Any = None
    tensors: Tensors = field(default_factory=dict)


_rejected: dict[tuple[Problem, str], str] = per_load({})
"""Why a rank rejects a backend for some numbers of tokens, "" where none does, by problem and backend of the load."""


class _LayerView:
    """The layer with other weights."""

    def __init__(self, layer: Any, tensors: Tensors) -> None:
        self._layer = layer
        self.w13_weight, self.w2_weight = tensors["w13"], tensors["w2"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class TokenDispatch:
    """The kernels of one layer by number of tokens."""

    def __init__(self, adapter: Adapter, ranges: list[_Range]) -> None:
        """
        Args:
            adapter: vLLM's side.
            ranges: ranges of tokens in ascending order; the last one has no limit.
        """
        self._adapter, self._ranges = adapter, ranges
        self._reserved = 0

    def select(self, tokens: int) -> tuple[Any, Any]:
        """The kernel for a number of tokens, and the layer to call it with."""
        found = next(each for each in self._ranges if each.max_tokens is None or tokens <= each.max_tokens)
        return found.kernel, found.layer

    def installed(self, parts: WeightParts) -> Iterator[tuple[Backend, Callable[[], InstalledLayer]]]:
        """The backends beside the layer's own, each with what makes the layer as it will serve it.

        Args:
            parts: of the layer's experts.
        """
        for backend, each in {each.backend: each for each in self._ranges}.items():
            if backend is not None and not skip_reason(backend, parts.problem):
                given = backend, parts, each.experts, each.layer, each.tensors, self._adapter
                yield backend, functools.partial(InstalledLayer, *given)

    def reserve_workspaces(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        """Runs the kernels of smaller ranges too when a call has more tokens than any before.

        In vLLM the largest call is the profile run, which measures the memory of a step; workspaces cannot grow after
        it.

        Args:
            x: `[M, hidden]`.
            topk_weights: `[M, top_k]`.
            topk_ids: `[M, top_k]`.
        """
        tokens = x.shape[0]
        if tokens <= self._reserved or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._reserved = tokens
        for each in self._ranges:
            if each.max_tokens is not None and each.max_tokens < tokens:
                part = slice(0, each.max_tokens)
                self._adapter.apply(each.kernel, each.layer, x[part], topk_weights[part], topk_ids[part], {})


def prepare_copies(method: DispatchMethod, raw: Tensors) -> None:
    """Checks the backends beside a method's own, and creates or refills their copies of the weights.

    Args:
        method: the layer's method; its decision loses its token ranges when one of the backends is rejected.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each; not modified.

    Raises:
        SelfCheckError: one of the backends rejects reloaded weights: its kernel is built, and captured graphs run it;
            or one rejects the weights where the self-check is strict.
        RankSyncError: another rank could not check.
    """
    problem = method.decision.problem
    for name in _other_backends(method):
        backend = method.registry[name]
        rejection, of_weights = _rejection(method, backend, raw)
        if rejection and method.token_dispatch is not None:
            rule = f"{name}, which runs beside {method.backend.name}, cannot take the reloaded weights: {rejection}"
            raise SelfCheckError(rule, "Restart, or reload other weights", problem.layer)
        if of_weights and method.settings.self_check == "strict":
            rule = f"{name}, which was to run beside {method.backend.name}, rejects the weights: {rejection}"
            raise SelfCheckError(
                rule, f"Set {env_var('disable')}={name}, or {env_var('self_check')}=group", problem.layer
            )
        if rejection:
            logger.error(
                "moe_oracle: %s: %s cannot run beside %s, which runs alone: %s",
                problem.layer, name, method.backend.name, rejection,
            )  # fmt: skip
            method.decision = dataclasses.replace(method.decision, token_ranges=())
            return
    for name in _other_backends(method):
        backend, mine = method.registry[name], _answers(method, name)
        if mine.layout == _answers(method, method.backend.name).layout:
            continue
        new = name not in method.weight_copies
        topic = f"the copy for {name} of {problem.layer}"
        with rank_sync.notify_on_failure(method.rank_group, topic), process_state.kept():
            method.weight_copies[name] = _convert_copy(method, backend, mine.plan, raw, method.weight_copies.get(name))
        if new:
            size = sum(each.nbytes for each in method.weight_copies[name].values()) / 2**20
            logger.info("moe_oracle: %s: a second copy of the weights for %s: %.0f MiB", problem.layer, name, size)


def build_dispatch(method: DispatchMethod, layer: Any, tensors: Tensors, own_kernel: Any) -> TokenDispatch | None:
    """The dispatch of a converted layer; None with a single backend.

    Args:
        method: the layer's method, after `prepare_copies`.
        layer: the layer.
        tensors: kernel tensors of the method's own backend.
        own_kernel: the kernel of the method's own backend.
    """
    problem, ranges = method.decision.problem, []
    for each in method.decision.token_ranges:
        if each.backend == method.backend.name:
            ranges.append(_Range(each.max_tokens, own_kernel, layer))
            continue
        backend, plan = method.registry[each.backend], _answers(method, each.backend).plan
        mine = method.weight_copies.get(each.backend, tensors)
        # A copy of vLLM's config of the layer: some stock classes get their sizes by a change of it.
        moe = copy.copy(method.moe)
        quant_config = method.adapter.quant_config(problem, mine)
        builder = VllmBuilder(method.adapter, moe, quant_config)
        with process_state.kept(), watched_calls(backend, "experts"):
            experts = backend.build_experts(mine, problem, plan, builder)
            kernel = method.adapter.kernel(moe, quant_config, layer, experts)
        weight_storage.register_buffers(layer, builder.buffers, f"range_{len(ranges)}_")
        view = layer if mine is tensors else _LayerView(layer, mine)
        ranges.append(_Range(each.max_tokens, kernel, view, backend, experts, mine))
    return TokenDispatch(method.adapter, ranges) if ranges else None


def check_installed(method: DispatchMethod, parts: WeightParts) -> None:
    """Checks a converted layer through the backends beside its own.

    Args:
        method: the layer's method, after `build_dispatch`.
        parts: of the layer's experts.

    Raises:
        SelfCheckError: one of them disagrees with the reference.
    """
    for backend, prepare in method.token_dispatch.installed(parts) if method.token_dispatch is not None else ():
        backend_check.check_beside(_with_backend(method, backend), prepare)


def _with_backend(method: DispatchMethod, backend: Backend) -> LayerMethod:
    """The method as it would be with another backend of its token ranges."""
    other = copy.copy(method)
    # With the ranges: the check calls kernels on both sides of their ends.
    other.decision = dataclasses.replace(
        method.decision, backend=backend.name, plan=_answers(method, backend.name).plan
    )
    other.backend = backend
    return other


def _other_backends(method: DispatchMethod) -> list[str]:
    return list(
        dict.fromkeys(step.backend for step in method.decision.token_ranges if step.backend != method.backend.name)
    )


def _answers(method: DispatchMethod, name: str) -> Answers:
    """What a backend of the layer's token ranges answered when it was decided on."""
    return method.decision.candidate(name).answers


def _rejection(method: DispatchMethod, backend: Backend, raw: Tensors) -> tuple[str, bool]:
    """Why a backend cannot run beside the method's own on all ranks, "" when it can; whether the weights show it."""
    problem = method.decision.problem
    key = (problem.key(), backend.name)
    if key not in _rejected:  # by kind: ranks may be at other layers of it (`in_own_order`)
        topic = f"the token range of {backend.name} for {problem}"
        found = rank_sync.all_gather(method.rank_group, topic, lambda: _rejection_without_weights(method, backend, raw))
        own = found[method.rank_group.rank]
        _rejected[key] = own or next((f"on another rank {each}" for each in found if each), "")
    if _rejected[key]:
        return _rejected[key], False
    stand_in = _with_backend(method, backend)
    weights = backend_check.check_weights(stand_in, raw)
    if not weights.passed:
        return f"it cannot hold the loaded weights: {weights.message}", True
    if method.settings.self_check == "off":
        return "", False
    kernel = backend_check.check_kernel(stand_in, raw)
    return ("", False) if kernel.passed else (f"it fails its self-check: {kernel.message}", True)


def _rejection_without_weights(method: DispatchMethod, backend: Backend, raw: Tensors) -> str:
    """Why a backend cannot run beside the method's own whatever the weights are, on this rank; "" when it can."""
    with process_state.kept():
        stock_rejection = method.adapter.stock_class_rejection(backend, method.moe, method.decision.problem)
    if stock_rejection:
        return f"vLLM's own class rejects it: {stock_rejection}"
    answers = _answers(method, backend.name)
    if answers.layout == _answers(method, method.backend.name).layout:  # it has no copy
        return ""
    try:
        with process_state.kept():
            weight_storage.converted_specs(_conversion(method, backend, answers.plan), raw)
    except BackendDefect as error:
        return f"it cannot convert: {error}"
    return ""


def _conversion(method: DispatchMethod, backend: Backend, plan: ShardPlan) -> weight_storage.ConvertFunction:
    """A backend's kernel tensors of one expert, from the checkpoint's."""
    return lambda expert: backend.convert(method.canonical(expert), method.decision.problem, plan)


def _convert_copy(
    method: DispatchMethod, backend: Backend, plan: ShardPlan, raw: Tensors, into: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """A backend's kernel tensors of all experts, one expert at a time; written to `into` if given."""
    convert = _conversion(method, backend, plan)
    count, device = next((each.shape[0], each.device) for each in raw.values())
    if into is None:
        specs = weight_storage.converted_specs(convert, raw)
        into = {name: torch.empty(count, *spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}
    for index in range(count):
        for name, tensor in convert({name: each[index] for name, each in raw.items()}).items():
            into[name][index].copy_(tensor)
    return into
