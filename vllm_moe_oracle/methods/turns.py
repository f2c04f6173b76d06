"""Several backends of one layer by turns: which one runs is decided by the number of tokens, in Python, before anything
is launched. A CUDA graph is captured for one number of tokens, so it holds one of them.

Where two backends read the same tensors, they share the layer's. Otherwise the second has a copy of its own, made from
the loaded weights before the first one's conversion takes their place, and filled anew in place when weights are
reloaded.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .. import device
from ..backends import Backend, Tensors
from ..errors import SelfCheckError
from ..oracle.decision import Plan
from ..oracle.registry import Registry, default_registry
from . import agreement, selfcheck, storage
from .builder import VllmBuilder
from .choice import Chooser

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")

Copies = dict[str, dict[str, Tensor]]
"""Kernel tensors of a backend that has a copy of its own, by the backend's name."""


class Method(Chooser, Protocol):
    """A layer's method, as far as turns go.

    Attributes:
        copies: kernel tensors beside the layer's own.
        by_turns: the turns of the converted layer; None before, and where one backend runs alone.
    """

    copies: Copies
    by_turns: Turns | None

    def canonical(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical tensors of one expert from the loaded ones."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One backend's part: its kernel, and what stands for the layer where that is called."""

    most: int | None
    kernel: Any
    layer: Any


class _Other:
    """The layer, but with other weights."""

    def __init__(self, layer: Any, tensors: Tensors) -> None:
        self._layer = layer
        self.w13_weight, self.w2_weight = tensors["w13"], tensors["w2"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Turns:
    """The turns of one layer."""

    def __init__(self, release: Adapter, turns: list[_Turn]) -> None:
        self._release, self._turns = release, turns
        self._reserved = 0

    def at(self, tokens: int) -> tuple[Any, Any]:
        """The kernel for a number of tokens, and the layer to give to it."""
        turn = next(each for each in self._turns if each.most is None or tokens <= each.most)
        return turn.kernel, turn.layer

    def reserve(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        """Runs the turns of fewer tokens too, when a call is larger than any before: in vLLM that is the call that
        finds out how much memory a step needs, after which workspaces do not grow any more.

        Args:
            x: `[M, hidden]`.
            topk_weights: `[M, top_k]`.
            topk_ids: `[M, top_k]`.
        """
        tokens = x.shape[0]
        if tokens <= self._reserved or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._reserved = tokens
        for turn in self._turns:
            if turn.most is not None and turn.most < tokens:
                part = slice(0, turn.most)
                self._release.apply(turn.kernel, turn.layer, x[part], topk_weights[part], topk_ids[part], {})


def copy_weights(method: Method, raw: Tensors, registry: Registry | None = None) -> None:
    """Checks the backends that take turns with a method's own, and makes or refills the copies that they need.

    Args:
        method: its decision loses the turns when one of the backends cannot take part.
        raw: the layer's loaded weights by canonical name, `[local_experts, ...]` each; not modified.
        registry: the backends; None for this process's own.

    Raises:
        SelfCheckError: weights are loaded anew, and one of the backends that run by turns fails on them: its kernel is
            built, and captured graphs run it.
        AgreementError: another rank could not check.
    """
    registry = registry or default_registry()
    problem = method.decision.problem
    for name in _others(method):
        backend = registry[name]
        why = _objection(method, backend, raw)
        if why and method.by_turns is not None:
            found = f"{name}, which takes turns with {method.backend.name}, cannot take the reloaded weights: {why}"
            raise SelfCheckError(found, "Restart, or reload other weights", problem.layer)
        if why:
            logger.error(
                "moe_oracle: %s: %s cannot take turns: %s; %s runs alone",
                problem.layer, name, why, method.backend.name,
            )  # fmt: skip
            method.decision = dataclasses.replace(method.decision, steps=())
            return
    for name in _others(method):
        backend, plan = registry[name], _plan(method, registry[name])
        if _shares(method, backend, plan):
            continue
        new = name not in method.copies
        with agreement.telling(method.group, f"the copy for {name} of {problem.layer}"):
            method.copies[name] = _converted(method, backend, plan, raw, method.copies.get(name))
        if new:
            size = sum(each.nbytes for each in method.copies[name].values()) / 2**20
            logger.info("moe_oracle: %s: a second copy of the weights for %s: %.0f MiB", problem.layer, name, size)


def build(method: Method, layer: Any, tensors: Tensors, own: Any, registry: Registry | None = None) -> Turns | None:
    """The turns of a converted layer; None where one backend runs alone.

    Args:
        method: the layer's method, after `copy_weights`.
        layer: the layer.
        tensors: the kernel tensors of the method's own backend.
        own: the method's own kernel.
        registry: the backends; None for this process's own.
    """
    registry = registry or default_registry()
    problem, turns = method.decision.problem, []
    for step in method.decision.steps:
        if step.backend == method.backend.name:
            turns.append(_Turn(step.most, own, layer))
            continue
        backend, plan = registry[step.backend], _plan(method, registry[step.backend])
        mine = method.copies.get(step.backend, tensors)
        # A copy: stock classes are given sizes by changing vLLM's config of the layer.
        moe = copy.copy(method.moe)
        quant_config = method.release.quant_config(problem, mine)
        builder = VllmBuilder(method.release, moe, quant_config)
        experts = backend.experts(mine, problem, plan, builder)
        storage.keep(layer, builder.kept, f"turn_{len(turns)}_")
        kernel = method.release.kernel(moe, quant_config, layer, experts)
        turns.append(_Turn(step.most, kernel, layer if mine is tensors else _Other(layer, mine)))
    return Turns(method.release, turns) if turns else None


def _others(method: Method) -> list[str]:
    return list(dict.fromkeys(step.backend for step in method.decision.steps if step.backend != method.backend.name))


def _plan(method: Method, backend: Backend) -> Plan:
    return backend.plan(method.decision.problem, device.detect())


def _shares(method: Method, backend: Backend, plan: Plan) -> bool:
    """Whether a backend reads the very tensors that the method's own does."""
    problem = method.decision.problem
    return backend.layout(problem, plan) == method.backend.layout(problem, method.decision.plan)


def _objection(method: Method, backend: Backend, raw: Tensors) -> str:
    """Why a backend cannot take part, found by all ranks; "" when it can."""
    problem = method.decision.problem
    objection = method.release.stock_objection(backend, method.moe, problem)
    topic = f"turns of {backend.name} for {problem.layer}"
    if any(agreement.gather(method.group, topic, lambda: bool(objection))):
        return f"vLLM's own class refuses it: {objection}" if objection else "another rank's vLLM refuses it"
    plan = _plan(method, backend)
    decision = dataclasses.replace(method.decision, backend=backend.name, plan=plan, steps=())
    stand_in: Any = SimpleNamespace(
        decision=decision, backend=backend, settings=method.settings, release=method.release, moe=method.moe,
        group=method.group,
    )  # fmt: skip
    held = selfcheck.holds(stand_in, raw)
    if not held.passed:
        return f"it cannot hold the loaded weights: {held.said}"
    if method.settings.self_check == "off":
        return ""
    verdict = selfcheck.judge(stand_in, raw)
    return "" if verdict.passed else f"it fails its self-check: {verdict.said}"


def _converted(
    method: Method, backend: Backend, plan: Plan, raw: Tensors, into: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """A backend's kernel tensors of all experts, expert by expert; written into those that are there."""
    problem = method.decision.problem

    def convert(expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return backend.convert(method.canonical(expert), problem, plan)

    count, where = next((each.shape[0], each.device) for each in raw.values())
    if into is None:
        kinds = storage.kinds_after(convert, raw)
        into = {name: torch.empty(count, *kind.shape, dtype=kind.dtype, device=where) for name, kind in kinds.items()}
    for index in range(count):
        for name, tensor in convert({name: each[index] for name, each in raw.items()}).items():
            into[name][index].copy_(tensor)
    return into
