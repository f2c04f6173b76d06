"""How a layer's method comes to its backend, and to another one: what the oracle decides, what vLLM's own class says to
it, and what the other ranks of the layer can run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from .. import device
from ..backends import Backend
from ..errors import NoBackendError, SettingError
from ..measure import lookup
from ..oracle.decision import Decision, Reason, Rejected
from ..oracle.measured import Evidence
from ..oracle.problem import Problem
from ..oracle.registry import Registry, default_registry
from ..settings import Settings
from . import agreement

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")


class Chooser(Protocol):
    """A layer's method, as far as its choice goes; `decision` and `backend` may be changed here."""

    decision: Decision
    backend: Backend
    settings: Settings
    release: Adapter
    moe: Any
    group: agreement.Group


_Kind = tuple[Problem, str, str]
_agreed: dict[_Kind, tuple[str, bool]] = {}
"""The backend that all ranks take for each kind of layer of the load, and whether they all take the same turns of
backends and tile configurations. A kind is a problem, what decided, and this rank's own choice."""


_evidence: dict[Problem, Evidence | None] = {}
"""What was measured of each kind of layer of the load. Kept: a cache that changes while weights are loaded must not
part layers that are alike."""


def forget() -> None:
    """Ends a load: other ranks may answer for another model, or find out something else."""
    _agreed.clear()
    _evidence.clear()


def evidence(problem: Problem, settings: Settings) -> Evidence | None:
    """What was measured of a layer on this machine; the same for all layers of its kind, until `forget`.

    Args:
        problem: the layer.
        settings: where to look.

    Raises:
        SettingError: the profile of the settings cannot be read, and they are strict.
    """
    key = problem.key()
    if not _evidence:
        _check_profile(settings)
    if key not in _evidence:
        _evidence[key] = lookup.evidence(problem, device.detect(), settings)
    return _evidence[key]


def _check_profile(settings: Settings) -> None:
    """Says once a load that the user's profile cannot be read: only speed hangs on it, so that a server starts without
    it unless it is strict."""
    unread = lookup.profile_error(settings)
    if unread and settings.strict:
        raise SettingError(unread, "Correct the setting, or leave it out")
    if unread:
        logger.warning("moe_oracle: %s", unread)


def choose(method: Chooser, layer: str, decide: Callable[[], Decision], registry: Registry | None = None) -> None:
    """Chooses a layer's backend, the same on all ranks.

    Args:
        method: gets its decision and backend.
        layer: its name.
        decide: what this rank would take.
        registry: the backends that decisions speak of; None for this process's own.

    Raises:
        NoBackendError: no backend can run the layer on all ranks, or the one asked for cannot.
        AgreementError: another rank could not decide, or has other settings.
    """
    registry = registry or default_registry()
    topic = f"the backend of {layer}"
    with agreement.telling(method.group, topic):
        method.decision = decide()
        method.backend = registry[method.decision.backend]
        ask_stock(method, registry)
        if method.group.size > 1:
            _agree(method, topic, registry)


def _agree(method: Chooser, topic: str, registry: Registry) -> None:
    """Takes the backend that is best for all ranks."""
    kind = (method.decision.problem.key(), method.decision.why, method.backend.name)
    if kind not in _agreed:
        while True:
            ranks = agreement.gather(
                method.group, topic, lambda: [method.settings.self_check, _order(method), _steps(method)]
            )
            # A rank that checks would wait for one that does not.
            agreement.compare(topic, "MOE_ORACLE_SELF_CHECK", [mode for mode, _, _ in ranks])
            orders = [order for _, order, _ in ranks]
            if len({order[0] for order in orders}) == 1:
                break
            _follow(method, agreement.best_for_all(orders), orders, registry)
        _agreed[kind] = method.backend.name, all(steps == ranks[0][2] for _, _, steps in ranks)
    name, alike = _agreed[kind]
    if name != method.backend.name:
        _follow(method, name, [], registry)
    if not alike and method.decision.steps:
        layer = method.decision.problem.layer
        logger.warning("moe_oracle: %s: not every rank has measurements for turns; %s runs alone", layer, name)
    if not alike:
        plan = dataclasses.replace(method.decision.plan, tiles=())
        method.decision = dataclasses.replace(method.decision, steps=(), plan=plan)


def _follow(method: Chooser, name: str | None, orders: list[list[str]], registry: Registry) -> None:
    """Takes the backend of that name because other ranks do; `orders` are the ranks' own, for the message."""
    own, layer = method.backend.name, method.decision.problem.layer
    if name is None:
        lists = "; ".join(f"rank {rank}: {', '.join(order)}" for rank, order in enumerate(orders))
        raise NoBackendError(f"no backend can run the layer on all ranks ({lists})", "", layer)
    if name != own:
        logger.warning("moe_oracle: %s: %s would be taken here, but not by all ranks; taking %s", layer, own, name)
        reason = Reason("ranks", f"the ranks of the layer take {name}, which all of them can run")
        take(
            method, reason, f"{own}, which came first on rank {method.group.rank}, is not every rank's", name, registry
        )
        ask_stock(method, registry)


def _steps(method: Chooser) -> list[list[Any]]:
    """Which backend, and which tile configuration, runs up to which number of tokens, as JSON."""
    return [
        *([step.backend, step.most] for step in method.decision.steps),
        *([tile, most] for most, tile in method.decision.plan.tiles),
    ]


def _order(method: Chooser) -> list[str]:
    """Names of the backends that this rank can run, its own choice first."""
    accepted = [each.backend for each in method.decision.candidates if each.accepted]
    return [method.backend.name, *(name for name in accepted if name != method.backend.name)]


def ask_stock(method: Chooser, registry: Registry | None = None) -> None:
    """Asks the stock class that the chosen backend wraps whether it would run the layer; its answer wins.

    Args:
        method: its backend and decision are changed when the stock class refuses.
        registry: the backends that the decision speaks of; None for this process's own.

    Raises:
        NoBackendError: it refuses, and the backend was chosen explicitly, or nothing is left.
    """
    while True:
        problem, name = method.decision.problem, method.backend.name
        objection = method.release.stock_objection(method.backend, method.moe, problem)
        if not objection:
            return
        found = f"vLLM's {method.backend.stock_class} refuses what {name} accepts: {objection}"
        left = remaining(method.decision, name)
        if method.decision.why in ("user", "override") or not left:
            raise NoBackendError(found, "Choose another backend", problem.layer, method.decision.candidates)
        logger.error("moe_oracle: %s: %s; a defect of our rules. Taking %s instead", problem.layer, found, left[0])
        because = f"{name}, which came first, is refused by vLLM's own class"
        take(method, Reason("stock", found), because, left[0], registry or default_registry())


def remaining(decision: Decision, failed: str) -> list[str]:
    """The accepted candidates without the one that has failed, best first."""
    return [each.backend for each in decision.candidates if each.accepted and each.backend != failed]


def take(method: Chooser, reason: Reason, because: str, following: str, registry: Registry) -> None:
    """Makes another backend the method's, and says in the decision why the one before it is not.

    Args:
        method: its backend and decision are changed.
        reason: why the present backend is no candidate any more.
        because: the same in a sentence about the decision.
        following: name of the new one.
        registry: the backends.
    """
    failed = method.backend.name
    candidates = tuple(
        dataclasses.replace(each, verdict=Rejected((reason,))) if each.backend == failed else each
        for each in method.decision.candidates
    )
    method.backend = registry[following]
    method.decision = dataclasses.replace(
        method.decision,
        backend=following,
        because=because,
        candidates=candidates,
        plan=method.backend.plan(method.decision.problem, device.detect()),
        numerics=method.backend.numerics(method.decision.problem),
        measured=None,
        steps=(),
    )
