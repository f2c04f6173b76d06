"""The check of a layer's backend on its loaded weights, with one result for all ranks, and the fallback."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

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
    OracleError,
    SelfCheckError,
    asked_memory,
    describe_error,
    describe_traceback,
    is_interruption,
    is_out_of_memory,
    sanitize,
)
from ..oracle.checked_backend import overrides
from ..oracle.selection import remaining_candidates
from ..oracle.watchdog import report_while_running
from ..settings import env_var
from ..verification import process_state
from ..verification.converted_layer import InstalledLayer, WeightParts, skip_reason
from ..verification.inputs import canonical_experts
from ..verification.self_check import Comparison, compare_with_reference
from . import rank_sync
from .backend_selection import LayerMethod, is_binding, switch_backend, why_tried
from .load_caches import per_load

logger = logging.getLogger("vllm.moe_oracle")


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The result of one check over all ranks.

    Attributes:
        message: the error and its tolerance, or the failure; with several ranks, those of the ranks that failed.
        passed: every rank passed.
        alternative: the best backend that every rank could take instead; None if there is none.
    """

    message: str
    passed: bool
    alternative: str | None


_PASSED = CheckOutcome("", True, None)

_Kind = tuple[Problem, str]
"""A problem, without a layer's name, and a backend."""

_kernel_outcomes: dict[_Kind, CheckOutcome] = per_load({})
"""Outcome of the self-check by kind of layer of the load."""

_convertible: set[_Kind] = per_load(set())
"""Kinds of layers of the load whose conversion has told every rank the kernel tensors' shapes."""

_weight_outcomes: dict[_Kind, CheckOutcome] = per_load({})
"""Outcome of `check_weights` for the last layer of a kind of the load."""

_converted_outcomes: dict[_Kind, CheckOutcome] = per_load({})
"""Kinds of layers of the load of which one was checked after its conversion, with all of its experts; all passed."""


class ConvertedLayer(LayerMethod, Protocol):
    """A layer's method after the conversion; `installed` is what its check needs, until the next layer was checked or
    the load ends; of the first layer of a kind until the load ends."""

    installed: InstalledLayer | None


class _Pass:
    """The layers that were checked after their conversion, each once: one that comes again begins another pass, before
    which the weights of the others may have gone.

    Attributes:
        names: their names, in order.
        first: the one that was checked first, by kind.
        last: the one that was checked last, by kind.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.first: dict[_Kind, weakref.ref[ConvertedLayer]] = {}
        self.last: dict[_Kind, weakref.ref[ConvertedLayer]] = {}

    def clear(self) -> None:
        """Forgets the layers, and what they keep for a second check."""
        for each in (*self.first.values(), *self.last.values()):
            if (method := each()) is not None:
                method.installed = None
        self.first.clear()
        self.last.clear()
        self.names.clear()


_pass = per_load(_Pass())

_Reloaded = dict[_Kind, tuple[LayerMethod, Sequence[Callable[[], InstalledLayer]]]]
_reloaded: _Reloaded = per_load({}, kept_for_reload=True)
"""A layer of each kind whose weights were reloaded beside the tensors that its kernel reads, and what makes the checks
of it as it serves. vLLM copies a layer's weights after its conversion, and calls nothing then: the end of the reload is
the first place to check it."""


def _kind(method: LayerMethod) -> _Kind:
    return method.decision.problem.key(), method.backend.name


def reserve_or_fallback(method: LayerMethod, reserve: Callable[[], None]) -> None:
    """Reserves a layer's buffers for its backend, and switches to the next candidate when the backend cannot say what
    it converts to, or when there is no memory for that.

    Args:
        method: the layer's method; its backend and decision change with a fallback.
        reserve: asks the method's backend for the shapes of its kernel tensors, and reserves buffers.

    Raises:
        NoBackendError: the backend is defective, or there is no memory for its tensors, and it was chosen explicitly,
            or no candidate remains.
        RankSyncError: another rank could not reserve its buffers.
    """

    def failure() -> str:
        try:
            reserve()
        except BackendDefect as error:
            return str(error)
        # Conversions may pass typed errors and a lack of memory on; so may buffers that are larger than the weights.
        except Exception as error:
            _log_error(method, "before weights are loaded", error)
            return str(error) if isinstance(error, OracleError) else describe_error(error)
        return ""

    while True:
        problem, name, kind = method.decision.problem, method.backend.name, _kind(method)
        if kind in _convertible:  # all ranks agreed on this kind of layer
            reserve()
            return
        outcome = _combine_ranks(method, f"the buffers of {problem.layer} for {name}", failure)
        if outcome.passed:
            _convertible.add(kind)
            return
        words = f"{name} cannot convert {problem}: {outcome.message}"
        if is_binding(method) or outcome.alternative is None:
            raise NoBackendError(words, "Choose another backend", problem.layer)
        _fall_back(method, words, Reason("defect", outcome.message), "is defective", outcome.alternative)


def check_or_fallback(method: LayerMethod, raw: Tensors, kernel_built: bool = False) -> None:
    """Checks a method's backend on its loaded weights, and switches to the next candidate when a rank rejects it.

    Args:
        method: the layer's method; its backend and decision change with a fallback.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each.
        kernel_built: the kernel exists, and weights are being reloaded into it: there is no fallback.

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
        if kernel_built or mode == "strict" or is_binding(method) or outcome.alternative is None:
            if not weights.passed:
                raise NoBackendError(failure, "Choose another backend", problem.layer)
            remedy = "Choose another backend, and report this with the model's name; "
            remedy += f"{env_var('self_check')}=off skips the check"
            raise SelfCheckError(failure, remedy, problem.layer)
        code = "self_check" if weights.passed else "weights"
        detail = "failed its self-check on the loaded weights" if weights.passed else "cannot hold the loaded weights"
        _fall_back(method, failure, Reason(code, f"{detail}: {outcome.message}"), detail, outcome.alternative)


def _fall_back(method: LayerMethod, failure: str, reason: Reason, detail: str, fallback: str) -> None:
    """Switches a method to another backend, and logs the failure."""
    name = method.backend.name
    logger.error("moe_oracle: %s: %s; taking %s instead", method.decision.problem.layer, failure, fallback)
    explanation = f"{name}, which {why_tried(method)}, {detail}"
    switch_backend(method, reason, explanation, fallback)


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
        return _PASSED

    def first_failure() -> str:
        with process_state.kept():
            for index in range(problem.local_experts):
                expert = {name: each[0] for name, each in canonical_experts(problem, raw, [index]).items()}
                try:
                    failure = backend.validate_weights(expert, problem)
                except BackendDefect as error:
                    failure = str(error)
                if failure:
                    return f"expert {index}: {failure}"
        return ""

    outcome = _agree(method, _weight_outcomes, lambda layer: f"the weights of {layer} in {backend.name}", first_failure)
    _weight_outcomes[_kind(method)] = outcome
    return outcome


def check_kernel(method: LayerMethod, raw: Tensors) -> CheckOutcome:
    """Runs the self-check of a method's backend on all ranks.

    It runs once per problem and backend of a load, or for every layer with the setting ``self_check=all``.

    Args:
        method: the layer's method; not changed.
        raw: see `check_or_fallback`.
    """
    layer, name, kind = method.decision.problem.layer, method.backend.name, _kind(method)
    if method.settings.self_check == "all" or kind not in _kernel_outcomes:
        # A kernel that ends the process says nothing itself.
        remedy = f"{env_var('disable')}={name} leaves it out"
        logger.info("moe_oracle: %s: checking %s; if the process ends here, %s", layer, name, remedy)
        _kernel_outcomes[kind] = _check_on_all_ranks(method, raw)
        logger.info("moe_oracle: %s: self-check of %s: %s", layer, name, _kernel_outcomes[kind].message)
    return _kernel_outcomes[kind]


def parts_to_check(method: LayerMethod) -> WeightParts | None:
    """What to collect of a layer's experts while they are converted; None where `check_installed` has nothing to do.

    Parts of all experts once per problem and backend of a load, or for every layer with the setting ``self_check=all``;
    parts of a few experts of the other layers.
    """
    problem, mode = method.decision.problem, method.settings.self_check
    if mode == "off" or skip_reason(method.backend, problem):
        return None
    return WeightParts(problem, every=mode == "all" or _kind(method) not in _converted_outcomes)


def check_installed(method: ConvertedLayer, prepare: Callable[[], InstalledLayer]) -> None:
    """Checks a converted layer: on all ranks together where its kind is new, otherwise on this rank. Then the layer of
    its kind that was converted before is called once more.

    Args:
        method: the layer's method.
        prepare: makes the layer's inputs and reference.

    Raises:
        SelfCheckError: one of the layers disagrees with the reference on a rank. There is no fallback: the loaded
            weights are gone.
        RankSyncError: another rank could not check.
    """
    problem, name, kind = method.decision.problem, method.backend.name, _kind(method)
    if problem.layer in _pass.names:
        _pass.clear()
    _pass.names[problem.layer] = None

    def topic(layer: str) -> str:
        return f"the check of {name} in {layer} after its conversion"

    def compare() -> Comparison:
        method.installed = prepare()
        return method.installed.compare()

    if method.settings.self_check == "all" or kind not in _converted_outcomes:
        level, success = logging.INFO, ""

        def failure() -> str:
            nonlocal success
            message, success = _failure(method, compare)
            return message

        message = _agree(method, _converted_outcomes, topic, failure).message
    else:  # no exchange for each layer: one that fails notifies the other ranks
        level, (message, success) = logging.DEBUG, _failure(method, compare)
    rule = f"{name} disagrees with the reference after the conversion of {problem}"
    if not message:
        logger.log(level, "moe_oracle: %s: check of %s after the conversion: %s", problem.layer, name, success)
        message = _check_previous(method, _pass.last.get(kind), _pass.first.get(kind))
        rule = f"{name} disagrees with the reference in a layer that agreed before {problem.layer} was converted"
    if message:
        raise _self_check_error(method, f"{rule}: {message}")
    _converted_outcomes[kind] = _PASSED
    _pass.last[kind] = weakref.ref(method)
    _pass.first.setdefault(kind, _pass.last[kind])


def check_first_layers() -> None:
    """Calls the first layer of each kind once more, on this rank, when the last layer of a load was converted: a
    backend may hold the weights of a few layers only, and the layer before the last is among them.

    It takes a call of two tokens for each kind.

    Raises:
        SelfCheckError: the layer disagrees with the reference now.
    """
    last = next(reversed(_pass.names), "")
    for each in _pass.first.values():
        method = each()
        if method is None or method.installed is None or method.decision.problem.layer == last:
            continue
        when = "after the last conversion"
        topic = f"the check of {method.backend.name} in {method.decision.problem.layer} {when}"
        with rank_sync.notify_on_failure(method.rank_group, topic):
            rule = (
                f"{method.backend.name} disagrees with the reference in a layer that agreed before {last} was converted"
            )
            _require_agreement(method, method.installed.compare_again, when, rule)


def check_beside(method: LayerMethod, prepare: Callable[[], InstalledLayer]) -> None:
    """Checks a converted layer through a backend that runs some numbers of tokens beside the layer's own, on this rank.

    Args:
        method: the layer's method as it would be with that backend.
        prepare: makes the layer's inputs and reference.

    Raises:
        SelfCheckError: the backend disagrees with the reference.
    """
    problem, name = method.decision.problem, method.backend.name
    rule = f"{name}, for some numbers of tokens, disagrees with the reference after the conversion of {problem}"
    _require_agreement(method, functools.partial(_compare, prepare), "after the conversion", rule)


def _require_agreement(method: LayerMethod, compare: Callable[[], Comparison], when: str, rule: str) -> None:
    """Raises a `SelfCheckError` with the rule where a comparison fails on this rank; logs one that passes."""
    message, success = _failure(method, compare)
    if message:
        raise _self_check_error(method, f"{rule}: {message}")
    layer, name = method.decision.problem.layer, method.backend.name
    logger.debug("moe_oracle: %s: check of %s %s: %s", layer, name, when, success)


def check_when_copied(method: LayerMethod, prepare: Sequence[Callable[[], InstalledLayer]]) -> None:
    """Has a layer checked once vLLM has copied its reloaded weights to where its kernel reads them; the last of each
    kind.

    Args:
        method: the layer's method.
        prepare: of each backend that runs the layer, what makes inputs and reference.
    """
    _reloaded[_kind(method)] = method, prepare


def check_reloaded() -> None:
    """Checks the layers of `check_when_copied`, on this rank.

    Raises:
        SelfCheckError: a layer computes with other weights than those that were reloaded.
    """
    waiting = list(_reloaded.values())
    _reloaded.clear()
    for method, prepare in waiting:
        problem, name = method.decision.problem, method.backend.name
        with rank_sync.notify_on_failure(method.rank_group, f"the check of {name} in {problem.layer} after a reload"):
            for make in prepare:
                message, _ = _failure(method, functools.partial(_compare, make))
                if message:
                    rule = f"{name} disagrees with the reference after a reload of {problem}"
                    remedy = f"Restart with the new weights, or with another backend ({env_var('disable')}={name})"
                    raise SelfCheckError(f"{rule}: {message}", remedy, problem.layer)


def _check_previous(
    method: ConvertedLayer,
    last: weakref.ref[ConvertedLayer] | None,
    first: weakref.ref[ConvertedLayer] | None,
) -> str:
    """What is wrong with the layer that was checked before this one, now that this one is converted; "" if nothing."""
    previous = None if last is None else last()
    if previous is None or previous is method or previous.installed is None:
        return ""
    message, _ = _failure(previous, previous.installed.compare_again)
    if last is not first:  # `check_first_layers` needs that one's
        previous.installed = None
    return f"{previous.decision.problem.layer}: {message}" if message else ""


def _self_check_error(method: LayerMethod, rule: str) -> SelfCheckError:
    """The error of a check that fails where no other backend can be taken any more."""
    other = f"Choose another backend ({env_var('disable')}={method.backend.name})"
    return SelfCheckError(rule, f"{other}, and report this with the model's name", method.decision.problem.layer)


def _compare(prepare: Callable[[], InstalledLayer]) -> Comparison:
    return prepare().compare()


def _failure(method: LayerMethod, compare: Callable[[], Comparison]) -> tuple[str, str]:
    """What is wrong with a converted layer, "" if nothing, and the comparison in words."""
    try:
        with _watched(method, "is being checked after its conversion"), process_state.kept():
            result = compare()
    except BaseException as error:  # a backend that crashes fails its check; the error becomes the reason
        if is_out_of_memory(error) or is_interruption(error):
            raise
        _log_error(method, "after the conversion", error)
        return describe_error(error), ""
    return ("" if result.passed else str(result)), str(result)


def _watched(method: LayerMethod, words: str) -> AbstractContextManager[None]:
    """Reports what a backend is doing while it takes long: the first call of a kernel may compile it for minutes."""
    name = method.backend.name
    remedy = f"{env_var('self_check')}=off skips the check, {env_var('disable')}={name} the backend"
    return report_while_running(sanitize(f"{name} {words} in {method.decision.problem}"), remedy)


def _log_error(method: LayerMethod, when: str, error: BaseException) -> None:
    """Logs what a backend raised, with the traceback."""
    layer, name = method.decision.problem.layer, method.backend.name
    logger.error("moe_oracle: %s: %s raised %s:\n%s", layer, name, when, describe_traceback(error))


def _check_on_all_ranks(method: LayerMethod, raw: Tensors) -> CheckOutcome:
    """Runs the self-check on this rank's experts, and combines it with the results of the layer's other ranks."""
    name, success = method.backend.name, ""

    def failure() -> str:
        nonlocal success
        result = _try_kernel(method, raw)
        if isinstance(result, Comparison) and result.passed:
            success = str(result)
            return ""
        return str(result)

    outcome = _agree(method, _kernel_outcomes, lambda layer: f"the self-check of {name} for {layer}", failure)
    return dataclasses.replace(outcome, message=outcome.message or success)


def _agree(
    method: LayerMethod,
    agreed: Mapping[_Kind, CheckOutcome],
    topic: Callable[[str], str],
    failure: Callable[[], str],
) -> CheckOutcome:
    """The outcome of a check for all ranks. Where they come to layers in orders of their own, they exchange the first
    outcome of each kind of layer, whichever layer that is of: a failure holds for all layers of the kind, and after a
    success each rank checks the others alone. They must come to the first layers of the kinds in one order.

    Args:
        method: the layer's method.
        agreed: outcomes that the ranks have exchanged, by kind of layer of the load.
        topic: names the check, given the words for the layer.
        failure: see `_combine_ranks`.

    Raises:
        SelfCheckError: the check fails on this rank alone, which may not take another backend than the others.
    """
    problem = method.decision.problem
    if not method.in_own_order:
        return _combine_ranks(method, topic(problem.layer), failure)
    known = agreed.get(_kind(method))
    if known is None:
        return _combine_ranks(method, topic(f"a layer of {problem}"), failure)
    if not known.passed:
        return known
    if message := failure():
        raise _self_check_error(method, f"{topic(problem.layer)}: {message}")
    return _PASSED


def _combine_ranks(method: LayerMethod, topic: str, failure: Callable[[], str]) -> CheckOutcome:
    """One outcome for all ranks, which passes when `failure` returns "" on each of them."""

    def local_result() -> dict[str, Any]:
        message = failure()
        candidates = remaining_candidates(method.decision, method.backend.name)
        return {"passed": not message, "message": message, "candidates": candidates}

    ranks = rank_sync.all_gather(method.rank_group, topic, local_result)
    failed = {rank: each["message"] for rank, each in enumerate(ranks) if not each["passed"]}
    message = "; ".join(f"rank {rank}: {text}" if len(ranks) > 1 else text for rank, text in failed.items())
    return CheckOutcome(message, not failed, rank_sync.first_common_name([each["candidates"] for each in ranks]))


def _try_kernel(method: LayerMethod, raw: Tensors) -> Comparison | str:
    """The comparison on this rank, or the exception that the backend raised, in words."""
    problem, plan = method.decision.problem, method.decision.plan
    try:
        edges = [each.max_tokens for each in method.decision.token_ranges if each.max_tokens is not None]
        with _watched(method, "is being checked"), process_state.kept():
            return compare_with_reference(method.backend, problem, plan, raw, method.moe, method.adapter, edges)
    # Not the backend's fault: another one would need as much memory, and read the same weights.
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except BaseException as error:  # a backend that crashes fails its check; the error becomes the reason
        if is_interruption(error):
            raise
        if is_out_of_memory(error):
            rule = f"the self-check of {method.backend.name} asked for {asked_memory(error)} of memory that is not free"
            remedy = f"Free memory, or serve over more ranks; {env_var('self_check')}=off skips the check"
            raise HostMemoryError(f"{rule} ({describe_error(error)})", remedy, problem.layer) from error
        _log_error(method, "in its self-check", error)
        return describe_error(error)
