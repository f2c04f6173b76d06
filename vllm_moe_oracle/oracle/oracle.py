"""The decision: which backend runs a layer, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..backends import Backend
from ..errors import NoBackendError, SettingError, meant
from ..settings import AUTO, Settings
from .decision import Accepted, Candidate, Decision, Reason, Rejected, Why, table
from .measured import Choice, Evidence, choose
from .objectives import parse
from .overrides import first_match
from .problem import Device, Problem, answers
from .registry import Registry, default_registry

REFERENCE = "emulation"
"""The backend that computes expert by expert what the format says, on any device: what is taken when no kernel can."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """An explicit choice: the backend's name, what kind of choice it is, who made it, whether by vLLM's own option."""

    name: str
    why: Why
    by: str
    stock: bool = False


def candidates(
    problem: Problem, device: Device, settings: Settings, registry: Registry | None = None
) -> tuple[Candidate, ...]:
    """The verdict of every backend that knows the problem's scheme: accepted ones first, each part in static order.

    Raises:
        SettingError: the setting `disable` names something that is no backend.
    """
    registry = registry if registry is not None else default_registry()
    unknown = [name for name in settings.disable if name not in registry and name not in registry.broken]
    if unknown:
        rule = f"{', '.join(map(repr, unknown))} cannot be disabled: there is no such backend"
        names = sorted(backend.name for backend in registry)
        remedy = f"{meant(unknown[0], names)}Valid are {', '.join(names)}"
        raise SettingError(rule, remedy, settings.source("disable"))
    judged = [_judge(backend, problem, device, settings) for backend in registry.for_scheme(problem.scheme.name)]
    return tuple(sorted(judged, key=lambda candidate: (not candidate.accepted, candidate.rank, candidate.backend)))


def decide(
    problem: Problem,
    device: Device,
    settings: Settings,
    moe_backend: str = AUTO,
    registry: Registry | None = None,
    evidence: Evidence | None = None,
) -> Decision:
    """Decides which backend runs a layer.

    An override for the layer goes before the `backend` setting, that before vLLM's ``--moe-backend``, any of them
    before measurements, and these before the static order.

    Args:
        problem: the layer on this rank.
        device: the machine.
        settings: what the user asked for.
        moe_backend: vLLM's ``--moe-backend``.
        registry: the backends; None for this process's own.
        evidence: what was measured of this layer on such a machine; None when nothing was looked for.

    Raises:
        NoBackendError: no backend can run the layer, or the one that was chosen explicitly cannot (and
            ``on_unavailable`` is not ``fallback``). The message holds every candidate's every reason.
        SettingError: the setting `disable` names something that is no backend.
    """
    registry = registry if registry is not None else default_registry()
    judged = candidates(problem, device, settings, registry)
    wish = _wish(problem, settings, moe_backend)
    note = ""
    if wish is not None:
        named = _named(wish, judged, registry)
        chosen = next((candidate for candidate in named if candidate.accepted), None)
        if chosen is not None:
            return _tiled(_decision(chosen, wish.why, wish.by, judged, problem, device, registry), evidence)
        rule = _unavailable(wish, named, problem, device, registry)
        if settings.on_unavailable == "error":
            remedy = _way_out(judged)
            if accepted := _accepted(wish, judged, registry):
                remedy = f"Choose an accepted one ({accepted}), or auto, or set on_unavailable=fallback"
            if not named:
                remedy = meant(wish.name, [AUTO, *_names(wish, problem, registry)]) + remedy
            rule = f"{rule}\nEvery candidate for {problem}:\n{table(judged)}\n"
            raise NoBackendError(rule, remedy, problem.layer, judged)
        note = f"; not what was asked for: {rule}"
    chosen = next((candidate for candidate in judged if candidate.accepted), None)
    if chosen is None:
        rule = f"no backend can run {problem.scheme.name} experts here: {problem}; on {device}{note}"
        raise NoBackendError(f"{rule}\n{table(judged)}\n", _way_out(judged), problem.layer, judged)
    because = "first that can run here in the static order, which follows the newest stock vLLM's"
    slow = chosen.backend == REFERENCE and (device.kind != "cpu" or _avoidable(judged))
    if chosen.backend == REFERENCE:
        because = _why_the_reference(judged, problem, device)
    why: Why = "estimate"
    choice = Choice(chosen.backend, "")
    if evidence is not None and chosen.backend != REFERENCE:
        choice = _choice(evidence, chosen, judged, problem, device, settings, registry)
    if choice.measured is not None:
        chosen = next(candidate for candidate in judged if candidate.backend == choice.backend)
        why, because = "measured", choice.because
    elif choice.because:
        because = f"{because}; {choice.because}"
    decision = _decision(chosen, why, f"{because}{note}", judged, problem, device, registry)
    decision = dataclasses.replace(decision, regretted=slow or bool(note), measured=choice.measured, steps=choice.steps)
    return _tiled(decision, evidence)


def _tiled(decision: Decision, evidence: Evidence | None) -> Decision:
    """The decision with the tile configurations that were measured for its backend."""
    tiles = evidence.tiles.get(decision.backend, ()) if evidence is not None else ()
    return dataclasses.replace(decision, plan=dataclasses.replace(decision.plan, tiles=tiles)) if tiles else decision


def comparable(
    static: Candidate, judged: tuple[Candidate, ...], problem: Problem, registry: Registry
) -> tuple[str, ...]:
    """Names of the accepted candidates that compute as the static choice does, in static order, it first.

    Only speed is decided by measurement: a candidate that takes activations in another precision gives other numbers.

    Args:
        static: the first accepted candidate.
        judged: all candidates, in static order.
        problem: the layer.
        registry: the backends.
    """
    precision = registry[static.backend].activations(problem)
    accepted = [each.backend for each in judged if each.accepted and each.backend != REFERENCE]
    return tuple(name for name in accepted if registry[name].activations(problem) == precision)


def _choice(
    evidence: Evidence,
    static: Candidate,
    judged: tuple[Candidate, ...],
    problem: Problem,
    device: Device,
    settings: Settings,
    registry: Registry,
) -> Choice:
    """What measurements choose for the layer."""

    def together(one: str, other: str) -> bool:
        """Whether two backends may run the layer by turns."""
        pair = registry[one], registry[other]
        # With data parallelism ranks step together, with EPLB experts move; a kernel that routes is given other inputs.
        if problem.parallel.dp > 1 or problem.eplb or any(backend.monolithic for backend in pair):
            return False
        # Each of the two may be invariant: a token would still get the numbers of the one that its batch's size gets.
        if problem.batch_invariant:
            return False
        plans = [backend.plan(problem, device) for backend in pair]
        if any(plan.hidden_size != problem.hidden_size for plan in plans):  # vLLM pads the input for one of them only
            return False
        layouts = {backend.layout(problem, plan) for backend, plan in zip(pair, plans, strict=True)}
        return settings.second_copy or len(layouts) == 1

    names = comparable(static, judged, problem, registry)
    return choose(evidence, names, parse(settings.objective), settings.margin, together)


def _judge(backend: Backend, problem: Problem, device: Device, settings: Settings) -> Candidate:
    try:
        reasons = list(backend.check(problem, device).reasons)
        consumed, declared = backend.activations(problem), problem.scheme.activations
        rank = backend.estimate(problem, device)
    except Exception as error:  # a stranger's backend must not take the others down
        reason = Reason("defect", f"asking it failed with {type(error).__name__}: {error}")
        return Candidate(backend.name, Rejected((reason,)), 0.0)
    if backend.name in settings.disable:
        detail = f"disabled by {settings.source('disable')}"
        reasons.append(Reason("disabled", detail, "take it out of the setting disable"))
    if not answers(consumed, declared) and not settings.allow_activation_quantization:
        detail = f"would quantise activations to {consumed}; the layer's are {declared}"
        reasons.append(Reason("activation_quantization", detail, "set allow_activation_quantization to allow it"))
    verdict = Rejected(tuple(reasons)) if reasons else Accepted()
    return Candidate(backend.name, verdict, rank)


def _wish(problem: Problem, settings: Settings, moe_backend: str) -> _Wish | None:
    override = first_match(settings.overrides, problem.layer)
    if override is not None and override.backend != AUTO:
        by = f"re:{override.pattern} from {settings.source('overrides')}"
        return _Wish(override.backend, "override", by)
    if override is None and settings.backend != AUTO:
        over = f", which goes before --moe-backend {moe_backend}" if moe_backend not in (AUTO, settings.backend) else ""
        return _Wish(settings.backend, "user", f"{settings.source('backend')}{over}")
    if override is None and moe_backend != AUTO:
        return _Wish(moe_backend, "user", f"--moe-backend {moe_backend}", stock=True)
    return None


def _named(wish: _Wish, judged: tuple[Candidate, ...], registry: Registry) -> list[Candidate]:
    """Candidates that a choice means: the backend of that name, which vLLM's option does not know, else those which
    vLLM calls so."""
    own = [candidate for candidate in judged if candidate.backend == wish.name and not wish.stock]
    return own or [candidate for candidate in judged if wish.name in registry[candidate.backend].vllm_names]


def _all_reasons(candidates: list[Candidate]) -> str:
    """Why none of several can run, each reason once; with the names of those that it holds for, unless it is all."""
    holds: dict[str, list[str]] = {}
    for candidate in candidates:
        for reason in map(str, candidate.reasons):
            holds.setdefault(reason, []).append(candidate.backend)
    shared = [reason for reason, names in holds.items() if len(names) == len(candidates)]
    apart = [f"{', '.join(names)}: {reason}" for reason, names in holds.items() if len(names) < len(candidates)]
    return "; ".join(shared + apart)


def _unavailable(wish: _Wish, named: list[Candidate], problem: Problem, device: Device, registry: Registry) -> str:
    """Why the explicit choice cannot be followed, in one line."""
    scheme = problem.scheme.name
    if named:
        return f"{wish.name} ({wish.by}) cannot run this layer on {device}: {_all_reasons(named)}"
    if wish.name in registry.broken:
        return f"{wish.name} ({wish.by}) could not be loaded: {registry.broken[wish.name]}"
    names = _names(wish, problem, registry)
    rule = f"{wish.name} ({wish.by}) is no backend for {scheme} experts"
    if wish.name in registry and not wish.stock:
        rule += f" but for {' and '.join(registry[wish.name].schemes)} experts"
    rule += f"; valid are {', '.join([AUTO, *names])}"
    if wish.stock:
        rule += "; this project's own names go into the setting backend"
    # An entry point need not have the name of its backend.
    return f"{rule}; entry points that could not be loaded: {', '.join(registry.broken)}" if registry.broken else rule


def _names(wish: _Wish, problem: Problem, registry: Registry) -> list[str]:
    """Names that an explicit choice may be for a layer, sorted: to vLLM's option only its own."""
    scheme = problem.scheme.name
    if not wish.stock:
        return registry.names(scheme)
    return sorted({name for backend in registry.for_scheme(scheme) for name in backend.vllm_names})


def _accepted(wish: _Wish, judged: tuple[Candidate, ...], registry: Registry) -> str:
    """What an explicit choice may be instead: names of the accepted candidates, best first; "" where there are none."""
    names = [candidate.backend for candidate in judged if candidate.accepted]
    theirs = list(dict.fromkeys(word for name in names for word in registry[name].vllm_names)) if wish.stock else names
    return ", ".join(theirs) or (f"by the setting backend: {', '.join(names)}" if names else "")


def _way_out(judged: tuple[Candidate, ...]) -> str:
    """The remedies of the candidate that has the fewest reasons against it, when each of them has one."""
    fixable = [candidate for candidate in judged if all(reason.remedy for reason in candidate.reasons)]
    if not fixable:
        return ""
    nearest = min(fixable, key=lambda candidate: len(candidate.reasons))
    return f"Nearest is {nearest.backend}: {'; '.join(reason.remedy for reason in nearest.reasons)}"


def _why_the_reference(judged: tuple[Candidate, ...], problem: Problem, device: Device) -> str:
    """Why nothing but the reference runs the layer, with the candidate that comes next: of those for such a device the
    one with the fewest reasons against it, the best of these."""
    missed = [each for each in judged if not each.accepted and all(reason.code != "device" for reason in each.reasons)]
    if not missed and device.kind == "cpu":
        return f"no other backend runs {problem.scheme.name} experts on {device}"
    words = f"no kernel for {device} can run the layer; {REFERENCE} runs it slowly"
    if not missed:
        return words
    nearest = min(missed, key=lambda candidate: (len(candidate.reasons), candidate.rank))
    return f"{words}; nearest is {nearest.backend}: {'; '.join(map(str, nearest.reasons))}"


def _avoidable(judged: tuple[Candidate, ...]) -> bool:
    """Whether another candidate would run the layer if the user did what its reasons suggest; one that the user has
    switched off would not."""
    missed = [each.reasons for each in judged if not each.accepted]
    return any(all(reason.remedy and reason.code != "disabled" for reason in reasons) for reasons in missed)


def _decision(
    chosen: Candidate,
    why: Why,
    because: str,
    judged: tuple[Candidate, ...],
    problem: Problem,
    device: Device,
    registry: Registry,
) -> Decision:
    backend = registry[chosen.backend]
    plan = backend.plan(problem, device)
    return Decision(problem, chosen.backend, why, because, plan, backend.numerics(problem), judged)
