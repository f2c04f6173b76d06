"""The check of a layer's backend on its loaded weights, with one result for all ranks, and the fallback."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..backends import Tensors
from ..core.decision import Reason
from ..core.problem import Problem
from ..errors import (
    BackendDefect,
    CheckpointError,
    HostMemoryError,
    LifecycleError,
    NoBackendError,
    SelfCheckError,
    asked_memory,
    describe_error,
    is_interruption,
    is_out_of_memory,
)
from ..oracle.checked_backend import overrides
from ..oracle.registry import Registry, default_registry
from ..verification.inputs import canonical_experts
from ..verification.installed import WeightParts, skip_reason
from ..verification.self_check import Comparison, compare_with_reference
from . import rank_sync
from .backend_selection import LayerMethod, is_binding, remaining_candidates, switch_backend, why_tried

logger = logging.getLogger("vllm.moe_oracle")


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The result of one check over all ranks.

    Attributes:
        message: the error and its tolerance, or the failure; with several ranks, those of the ranks that failed.
        passed: every rank passed.
        alternatives: backends that every rank could take instead, best first.
    """

    message: str
    passed: bool
    alternatives: tuple[str, ...]


_CheckKey = tuple[Problem, str]
_outcomes: dict[_CheckKey, CheckOutcome] = {}
"""Outcome of the self-check by problem and backend, for the model that is being loaded."""


_convertible: set[_CheckKey] = set()
"""Problems and backends of the load whose conversion has told every rank the kernel tensors' shapes."""

_installed: set[_CheckKey] = set()
"""The same for layers that were checked after their conversion."""


def reset() -> None:
    """Ends a load: outcomes do not hold for other weights, whether another model's or reloaded ones."""
    _outcomes.clear()
    _convertible.clear()
    _installed.clear()


def reserve_or_fallback(method: LayerMethod, reserve: Callable[[], None], registry: Registry | None = None) -> None:
    """Reserves a layer's buffers for its backend, and switches to the next candidate when the backend cannot say what
    it converts to.

    Args:
        method: the layer's method; its backend and decision change with a fallback.
        reserve: asks the method's backend for the shapes of its kernel tensors, and reserves buffers.
        registry: the backends that the decision names; None for the default registry.

    Raises:
        NoBackendError: the backend is defective, and it was chosen explicitly, or no candidate remains.
        RankSyncError: another rank could not reserve its buffers.
    """

    def failure() -> str:
        try:
            reserve()
        except BackendDefect as error:
            return str(error)
        return ""

    while True:
        problem, name = method.decision.problem, method.backend.name
        key = (problem.key(), name)
        if key in _convertible:  # all ranks agreed on this kind of layer
            reserve()
            return
        outcome = _combine_ranks(method, f"the buffers of {problem.layer} for {name}", failure)
        if outcome.passed:
            _convertible.add(key)
            return
        words = f"{name} cannot convert {problem}: {outcome.message}"
        if is_binding(method) or not outcome.alternatives:
            raise NoBackendError(words, "Choose another backend", problem.layer)
        _fall_back(method, words, Reason("defect", outcome.message), "is defective", outcome, registry)


def check_or_fallback(
    method: LayerMethod, raw: Tensors, kernel_built: bool = False, registry: Registry | None = None
) -> None:
    """Checks a method's backend on its loaded weights, and switches to the next candidate when a rank rejects it.

    Args:
        method: the layer's method; its backend and decision change with a fallback.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each.
        kernel_built: the kernel exists, and weights are being reloaded into it: there is no fallback.
        registry: the backends that the decision names; None for the default registry.

    Raises:
        NoBackendError: the backend cannot hold the weights, and nothing may take its place (`is_binding`), the check
            is strict, or no candidate remains.
        SelfCheckError: the backend fails its self-check, under the same conditions.
        RankSyncError: another rank could not check.
        LifecycleError: a CUDA graph is being captured, which would record the check.
    """
    mode = method.settings.self_check
    if _is_capturing(raw):
        rule = "weights were loaded during the capture of a CUDA graph, which would record their check and conversion"
        raise LifecycleError(rule, "Load weights before graphs are captured", method.decision.problem.layer)
    while True:
        problem, name = method.decision.problem, method.backend.name
        weights = check_weights(method, raw)
        outcome = weights if not weights.passed or mode == "off" else check_kernel(method, raw)
        if outcome.passed:
            return
        verb = "fails its self-check on" if weights.passed else "cannot hold the loaded weights of"
        failure = f"{name} {verb} {problem}: {outcome.message}"
        if kernel_built or mode == "strict" or is_binding(method) or not outcome.alternatives:
            if not weights.passed:
                raise NoBackendError(failure, "Choose another backend", problem.layer)
            remedy = "Choose another backend, and report this with the model's name; MOE_ORACLE_SELF_CHECK=off skips it"
            raise SelfCheckError(failure, remedy, problem.layer)
        code = "self_check" if weights.passed else "weights"
        detail = "failed its self-check on the loaded weights" if weights.passed else "cannot hold the loaded weights"
        _fall_back(method, failure, Reason(code, f"{detail}: {outcome.message}"), detail, outcome, registry)


def _fall_back(
    method: LayerMethod, failure: str, reason: Reason, detail: str, outcome: CheckOutcome, registry: Registry | None
) -> None:
    """Switches a method to the first alternative of an outcome, and logs the failure."""
    name, fallback = method.backend.name, outcome.alternatives[0]
    logger.error("moe_oracle: %s: %s; taking %s instead", method.decision.problem.layer, failure, fallback)
    explanation = f"{name}, which {why_tried(method)}, {detail}"
    switch_backend(method, reason, explanation, fallback, registry or default_registry())


def _is_capturing(raw: Tensors) -> bool:
    """Whether a CUDA graph records what is done to the tensors now."""
    return any(each.is_cuda for each in raw.values()) and torch.cuda.is_current_stream_capturing()


def check_weights(method: LayerMethod, raw: Tensors) -> CheckOutcome:
    """Checks on all ranks whether a method's backend can hold the loaded weights of every expert.

    Args:
        method: the layer's method; not changed.
        raw: see `check_or_fallback`.
    """
    backend, problem = method.backend, method.decision.problem
    if not overrides(backend, "validate_weights"):
        return CheckOutcome("", True, ())

    def first_failure() -> str:
        for index in range(problem.local_experts):
            expert = {name: each[0] for name, each in canonical_experts(problem, raw, [index]).items()}
            try:
                failure = backend.validate_weights(expert, problem)
            except BackendDefect as error:
                failure = str(error)
            if failure:
                return f"expert {index}: {failure}"
        return ""

    return _combine_ranks(method, f"the weights of {problem.layer} in {backend.name}", first_failure)


def check_kernel(method: LayerMethod, raw: Tensors) -> CheckOutcome:
    """Runs the self-check of a method's backend on all ranks.

    It runs once per problem and backend of a load, or for every layer with the setting ``self_check=all``.

    Args:
        method: the layer's method; not changed.
        raw: see `check_or_fallback`.
    """
    problem, name = method.decision.problem, method.backend.name
    key = (problem.key(), name)
    if method.settings.self_check == "all" or key not in _outcomes:
        _outcomes[key] = _check_on_all_ranks(method, raw)
        logger.info("moe_oracle: %s: self-check of %s: %s", problem.layer, name, _outcomes[key].message)
    return _outcomes[key]


def parts_to_check(method: LayerMethod) -> WeightParts | None:
    """What to collect of a layer's experts while they are converted; None where `check_installed` has nothing to do.

    As `check_kernel`, once per problem and backend of a load, or for every layer with the setting ``self_check=all``.
    """
    problem, mode = method.decision.problem, method.settings.self_check
    key = (problem.key(), method.backend.name)
    if mode == "off" or (mode != "all" and key in _installed) or skip_reason(method.backend, problem):
        return None
    _installed.add(key)
    return WeightParts(problem)


def check_installed(method: LayerMethod, compare: Callable[[], Comparison]) -> None:
    """Checks a converted layer on all ranks.

    Args:
        method: the layer's method.
        compare: the comparison on this rank.

    Raises:
        SelfCheckError: the converted layer disagrees with the reference on a rank. There is no fallback: the loaded
            weights are gone.
        RankSyncError: another rank could not check.
    """
    problem, name, success = method.decision.problem, method.backend.name, ""

    def failure() -> str:
        nonlocal success
        try:
            result = compare()
        except BaseException as error:  # a backend that crashes fails its check; the error becomes the reason
            if is_out_of_memory(error) or is_interruption(error):
                raise
            logger.exception("moe_oracle: %s: %s raised after the conversion", problem.layer, name)
            return describe_error(error)
        success = str(result)
        return "" if result.passed else str(result)

    outcome = _combine_ranks(method, f"the check of {name} in {problem.layer} after its conversion", failure)
    if not outcome.passed:
        rule = f"{name} disagrees with the reference after the conversion of {problem}: {outcome.message}"
        remedy = f"Choose another backend (MOE_ORACLE_DISABLE={name}), and report this with the model's name"
        raise SelfCheckError(rule, remedy, problem.layer)
    logger.info("moe_oracle: %s: check of %s after the conversion: %s", problem.layer, name, success)


def _check_on_all_ranks(method: LayerMethod, raw: Tensors) -> CheckOutcome:
    """Runs the self-check on this rank's experts, and combines it with the results of the layer's other ranks."""
    problem, name = method.decision.problem, method.backend.name
    success = ""

    def failure() -> str:
        nonlocal success
        result = _try_kernel(method, raw)
        if isinstance(result, Comparison) and result.passed:
            success = str(result)
            return ""
        return str(result)

    outcome = _combine_ranks(method, f"the self-check of {name} for {problem.layer}", failure)
    return dataclasses.replace(outcome, message=outcome.message or success)


def _combine_ranks(method: LayerMethod, topic: str, failure: Callable[[], str]) -> CheckOutcome:
    """One outcome for all ranks, which passes when `failure` returns "" on each of them."""

    def local_result() -> dict[str, Any]:
        message = failure()
        alternatives = remaining_candidates(method.decision, method.backend.name)
        return {"passed": not message, "message": message, "alternatives": alternatives}

    ranks = rank_sync.all_gather(method.rank_group, topic, local_result)
    failed = {rank: each["message"] for rank, each in enumerate(ranks) if not each["passed"]}
    message = "; ".join(f"rank {rank}: {text}" if len(ranks) > 1 else text for rank, text in failed.items())
    common = [name for name in ranks[0]["alternatives"] if all(name in other["alternatives"] for other in ranks)]
    return CheckOutcome(message, not failed, tuple(common))


def _try_kernel(method: LayerMethod, raw: Tensors) -> Comparison | str:
    """The comparison on this rank, or the exception that the backend raised, in words."""
    problem, plan = method.decision.problem, method.decision.plan
    try:
        edges = [each.max_tokens for each in method.decision.token_ranges if each.max_tokens is not None]
        return compare_with_reference(method.backend, problem, plan, raw, method.moe, method.adapter, edges)
    # Not the backend's fault: another one would need as much memory, and read the same weights.
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except BaseException as error:  # a backend that crashes fails its check; the error becomes the reason
        if is_interruption(error):
            raise
        if is_out_of_memory(error):
            rule = f"the self-check of {method.backend.name} asked for {asked_memory(error)} of memory that is not free"
            remedy = "Free memory, or serve over more ranks; MOE_ORACLE_SELF_CHECK=off skips the check"
            raise HostMemoryError(f"{rule} ({describe_error(error)})", remedy, problem.layer) from error
        logger.exception("moe_oracle: %s: %s raised in its self-check", problem.layer, method.backend.name)
        return describe_error(error)
