"""Selection of a layer's backend: the oracle's decision, the verdict of vLLM's own class, and one choice for all
ranks."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..backends import Backend
from ..core.decision import Decision, Reason, Rejected
from ..core.measurement_set import MeasurementSet
from ..core.problem import Problem
from ..devices import detect
from ..errors import NoBackendError, SettingError
from ..measurements import lookup
from ..oracle.registry import Registry
from ..oracle.selection import is_final, remaining_candidates
from ..settings import Settings, env_var
from ..verification import process_state
from . import rank_comparison, rank_sync
from .load_caches import per_load

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")


class LayerMethod(Protocol):
    """A layer's method, as this module sees it; `decision` and `backend` change here."""

    decision: Decision
    backend: Backend
    settings: Settings
    adapter: Adapter
    moe: Any
    registry: Registry
    rank_group: rank_sync.RankGroup

    @property
    def in_own_order(self) -> bool:
        """Whether ranks may reach layers in different orders: with expert parallelism, in a reload or with online
        quantization, a layer is converted as soon as this rank's experts are complete."""


_LayerKind = tuple[Problem, str, str]
_agreed_backends: dict[_LayerKind, tuple[str, bool]] = per_load({})
"""The backend that all ranks take, and whether all have the same token ranges and tiles, by kind of layer of the load.
A kind is the problem, why this rank's own choice won, and that choice."""


_measurements: dict[Problem, MeasurementSet | None] = per_load({})
"""Measurements by problem of the load. Kept, so that a cache file that changes while weights are loaded cannot decide
equal layers differently."""


def measurements_for(problem: Problem, settings: Settings) -> MeasurementSet | None:
    """Measurements of a layer on this machine; the same for all layers of a load with the same problem.

    Args:
        problem: the layer.
        settings: they name the cache and the profile.

    Raises:
        SettingError: the profile of the settings cannot be read, and they are strict.
    """
    key = problem.key()
    if not _measurements:
        _check_profile(settings)
    if key not in _measurements:
        _measurements[key] = lookup.find_measurements(problem, detect.detect(), settings)
    return _measurements[key]


def read_again(problem: Problem) -> None:
    """Forgets a layer's measurements: new ones are in the cache. All ranks of the layer must call it together."""
    _measurements.pop(problem.key(), None)


def _check_profile(settings: Settings) -> None:
    """Warns once per load that the user's profile cannot be read. A profile only affects speed: the server starts
    without it, unless the setting `strict` is on."""
    unread = lookup.profile_error(settings)
    if unread and settings.strict:
        raise SettingError(unread, "Correct the setting, or leave it out")
    if unread:
        logger.warning("moe_oracle: %s", unread)


def select_backend(method: LayerMethod, layer: str, decide: Callable[[], Decision]) -> None:
    """Selects a layer's backend, the same on all ranks.

    Args:
        method: the layer's method; it gets its decision and backend.
        layer: the layer's name.
        decide: makes this rank's own decision.

    Raises:
        NoBackendError: no backend can run the layer on all ranks, or the requested one cannot.
        RankSyncError: another rank could not decide, or has other settings.
    """
    topic = f"the backend of {layer}"
    refusal: NoBackendError | None = None
    with rank_sync.notify_on_failure(method.rank_group, topic):
        try:
            method.decision = decide()
            method.backend = method.registry[method.decision.backend]
            consult_stock_class(method)
        except NoBackendError as error:  # the layer may be left to stock vLLM, on all ranks
            refusal = error
        if method.rank_group.size > 1:
            refusal = _agree_on_backend(method, layer, topic, refusal)
    if refusal is not None:
        raise refusal


def _agree_on_backend(
    method: LayerMethod, layer: str, topic: str, refusal: NoBackendError | None
) -> NoBackendError | None:
    """Takes the first backend of rank 0's order that every rank can run.

    Args:
        method: the layer's method.
        layer: the layer's name.
        topic: names the step.
        refusal: why this rank can run the layer with none; None where it can.

    Returns:
        Why the layer cannot be run on all ranks, on every rank; None where it can be.
    """
    kind = None if refusal else (method.decision.problem.key(), method.decision.why, method.backend.name)
    if kind is None or kind not in _agreed_backends:
        while True:
            own: list[Any] = [[], [], {}]
            if refusal is None:
                own = [_preferred_backends(method), _schedule(method), _backend_properties(method)]
            ranks = rank_sync.all_gather(method.rank_group, topic, functools.partial(list, own))
            orders = [order for order, _, _ in ranks]
            if not all(orders):
                without = ", ".join(str(rank) for rank, order in enumerate(orders) if not order)
                return refusal or NoBackendError(f"no backend can run the layer on rank {without}", "", layer)
            if len({order[0] for order in orders}) == 1:
                break
            common = rank_sync.first_common_name(orders)
            try:
                _follow_ranks(method, common, orders)
            except NoBackendError as error:
                if common is None:
                    return error
                refusal = error
        assert kind is not None
        rank_comparison.require_equal(topic, [properties for _, _, properties in ranks])
        _agreed_backends[kind] = method.backend.name, all(schedule == ranks[0][1] for _, schedule, _ in ranks)
    name, same_schedule = _agreed_backends[kind]
    if name != method.backend.name:
        _follow_ranks(method, name, [])
    if not same_schedule and method.decision.token_ranges:
        layer = method.decision.problem.layer
        logger.warning(
            "moe_oracle: %s: ranks have different measurements; %s runs for every number of tokens", layer, name
        )
    if not same_schedule:
        plan = dataclasses.replace(method.decision.plan, tiles=())
        method.decision = dataclasses.replace(method.decision, token_ranges=(), plan=plan)
    return None


def _follow_ranks(method: LayerMethod, name: str | None, orders: list[list[str]]) -> None:
    """Switches to the backend that all ranks can run.

    Args:
        method: the layer's method.
        name: the backend; None when there is none.
        orders: preferred backends by rank, for the message.
    """
    own, layer = method.backend.name, method.decision.problem.layer
    if name is None:
        lists = "; ".join(f"rank {rank}: {', '.join(order)}" for rank, order in enumerate(orders))
        raise NoBackendError(f"no backend can run the layer on all ranks ({lists})", "", layer)
    if name != own:
        logger.warning("moe_oracle: %s: %s came first here, but not on every rank; taking %s", layer, own, name)
        reason = Reason("ranks", f"the ranks of the layer take {name}, which all of them can run")
        explanation = f"{own} was first on rank {method.rank_group.rank}, but not every rank can run it"
        switch_backend(method, reason, explanation, name)
        consult_stock_class(method)


def _backend_properties(method: LayerMethod) -> dict[str, dict[str, str]]:
    """What the layer's backends compute with on this rank, by the kind of property. A third party's package may have
    another version on another rank."""
    name = method.backend.name
    properties = {f"numerics of {name}": str(method.decision.numerics)}
    if method.decision.problem.eplb:  # weights move between ranks as they are
        plan = method.decision.plan
        properties[f"layout of {name}"] = f"{plan.hidden_size} x {plan.intermediate_size} {plan.layout}".rstrip()
    backends = dict.fromkeys((name, *(each.backend for each in method.decision.token_ranges)))
    versions = {
        f"{package} of the backend {each}": version
        for each in backends
        for package, version in method.registry.packages(each).items()
    }
    return {"backend": properties, "version": versions}


def _schedule(method: LayerMethod) -> list[list[Any]]:
    """Backends and their tile configurations with the largest number of tokens of each, as JSON."""
    decision = method.decision
    others = dict.fromkeys(each.backend for each in decision.token_ranges if each.backend != decision.backend)
    return [
        *([each.backend, each.max_tokens] for each in decision.token_ranges),
        *([tile, most] for most, tile in decision.plan.tiles),
        *([name, tile, most] for name in others for most, tile in decision.candidate(name).answers.plan.tiles),
    ]


def _preferred_backends(method: LayerMethod) -> list[str]:
    """Backends that this rank can run, its own choice first."""
    return [method.backend.name, *remaining_candidates(method.decision, method.backend.name)]


def consult_stock_class(method: LayerMethod) -> None:
    """Asks the stock class that the backend wraps whether it supports the layer; its answer wins.

    Args:
        method: the layer's method; its backend and decision change when the stock class rejects the layer.

    Raises:
        NoBackendError: it rejects the layer, and nothing may take the backend's place (`is_binding`), or no candidate
            remains.
    """
    while True:
        problem, name = method.decision.problem, method.backend.name
        with process_state.kept():  # the class may be a third party's
            rejection = method.adapter.stock_class_rejection(method.backend, method.moe, problem)
        if not rejection:
            return
        detail = f"vLLM's {method.backend.stock_class_name} rejects what {name} accepts: {rejection}"
        candidates = remaining_candidates(method.decision, name)
        if is_binding(method) or not candidates:
            raise NoBackendError(detail, "Choose another backend", problem.layer, method.decision.candidates)
        logger.error(
            "moe_oracle: %s: %s; please report it (a rule of this plugin is wrong). Using %s instead",
            problem.layer,
            detail,
            candidates[0],
        )
        explanation = f"{name}, which {why_tried(method)}, is rejected by vLLM's own class"
        switch_backend(method, Reason("stock", detail), explanation, candidates[0])


def is_binding(method: LayerMethod) -> bool:
    """Whether the user chose the backend, and no other one may take its place (the setting `on_unavailable`)."""
    return is_final(method.decision, method.settings)


def require_named(decision: Decision, settings: Settings) -> None:
    """Checks that a decision holds on ranks that join later, which decide for themselves.

    Raises:
        NoBackendError: it is this rank's own. Experts move between ranks as the bytes that a backend's layout has.
    """
    if not is_final(decision, settings):
        rule = (
            "with --enable-elastic-ep each rank decides for itself, and experts move between ranks: one that joins "
            "later could take a backend that reads weights in another order"
        )
        remedy = f"Name a backend by --moe-backend or {env_var('backend')}, with {env_var('on_unavailable')}=error"
        raise NoBackendError(rule, remedy, decision.problem.layer, decision.candidates)


def why_tried(method: LayerMethod) -> str:
    """Why a method's backend was tried before all others, for a sentence."""
    return "was asked for" if method.decision.is_explicit else "came first"


def switch_backend(method: LayerMethod, reason: Reason, explanation: str, name: str) -> None:
    """Switches a method to another backend, and records in the decision why the present one is rejected.

    Args:
        method: the layer's method; its backend and decision change.
        reason: why the present backend is rejected.
        explanation: the same in a sentence about the decision; the static order has decided it then.
        name: the new backend, the first in the static order that is left.
    """
    failed = method.backend.name
    candidates = tuple(
        dataclasses.replace(each, verdict=Rejected((reason,))) if each.backend == failed else each
        for each in method.decision.candidates
    )
    answers = method.decision.candidate(name).answers
    method.backend = method.registry[name]
    method.decision = dataclasses.replace(
        method.decision,
        backend=name,
        why="static",
        explanation=explanation,
        candidates=candidates,
        plan=dataclasses.replace(answers.plan, tiles=()),  # ranks have not compared them
        numerics=answers.numerics,
        degraded=method.decision.degraded or method.decision.is_explicit,
        comparison=None,
        token_ranges=(),
        tunable=False,
    )
