"""The decision: which backend runs a layer, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..backends import Backend
from ..core.decision import (
    Accepted,
    Answers,
    Candidate,
    DecidedBy,
    Decision,
    Reason,
    Rejected,
    ShardPlan,
    TimeComparison,
    TokenRange,
    format_candidates,
)
from ..core.field_checks import check_value
from ..core.measurement_set import MeasurementSet
from ..core.objectives import parse_objective
from ..core.overrides import first_match
from ..core.problem import Device, Problem, satisfies_precision
from ..errors import BackendDefect, NoBackendError
from ..releases.vllm_names import MOE_BACKENDS
from ..settings import AUTO, Settings, env_var
from .backend_names import known_names, require_known, suggest
from .checked_backend import is_own
from .measured_choice import LatencyCurve, MeasuredChoice, choose_fastest
from .registry import REFERENCE_BACKEND, Registry, default_registry


@dataclass(frozen=True, slots=True)
class _ExplicitRequest:
    """A backend that the user names.

    Attributes:
        name: the backend's name, or vLLM's.
        why: the kind of request.
        source: the setting or option that makes it.
        is_vllm_option: it is vLLM's ``--moe-backend``, which knows only vLLM's names.
    """

    name: str
    why: DecidedBy
    source: str
    is_vllm_option: bool = False


@dataclass(frozen=True, slots=True)
class _DecisionInput:
    """What a decision is made from, with the verdict of every candidate in static order."""

    problem: Problem
    device: Device
    settings: Settings
    registry: Registry
    candidates: tuple[Candidate, ...]

    @property
    def backends(self) -> list[Backend]:
        return self.registry.for_scheme(self.problem.scheme.name)

    @property
    def accepted(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.accepted]

    def decision(self, chosen: Candidate, why: DecidedBy, explanation: str) -> Decision:
        plan, numerics = chosen.answers.plan, chosen.answers.numerics
        return Decision(self.problem, chosen.backend, why, explanation, plan, numerics, self.candidates)


def evaluate_candidates(
    problem: Problem, device: Device, settings: Settings, registry: Registry | None = None
) -> tuple[Candidate, ...]:
    """The verdict of every backend for the problem's scheme: accepted ones first, each part in static order.

    Raises:
        SettingError: the setting `disable` names an unknown backend.
    """
    registry = registry if registry is not None else default_registry()
    backends = registry.for_scheme(problem.scheme.name)
    require_known(settings.disable, known_names(registry), settings.source("disable"), registry, backends)
    disabled = {backend: name for name in settings.disable for backend in registry.selected(name)}
    verdicts = [_evaluate(backend, problem, device, settings, disabled.get(backend.name, "")) for backend in backends]
    return tuple(sorted(verdicts, key=lambda each: (not each.accepted, each.priority, each.backend)))


def decide(
    problem: Problem,
    device: Device,
    settings: Settings,
    moe_backend: str = AUTO,
    registry: Registry | None = None,
    measurements: MeasurementSet | None = None,
) -> Decision:
    """Decides which backend runs a layer.

    In order of precedence: a per-layer override, the `backend` setting, vLLM's ``--moe-backend``, measured or predicted
    times, the static order.

    Args:
        problem: the layer on this rank.
        device: the machine.
        settings: the user's settings.
        moe_backend: vLLM's ``--moe-backend``.
        registry: the backends; None for the default registry of this process.
        measurements: times of this layer on such a machine. Without `measurements` the static order decides;
            `explain_checkpoint` looks them up.

    Raises:
        NoBackendError: no backend can run the layer, or the requested one cannot (and ``on_unavailable`` is not
            ``fallback``). The message holds every candidate's every reason.
        SettingError: the setting `disable` names an unknown backend, an override takes too long to match, or an
            argument has another type.
    """
    for name, value, kind in (
        ("problem", problem, Problem),
        ("device", device, Device),
        ("settings", settings, Settings),
        ("moe_backend", moe_backend, str),
    ):
        check_value(name, value, (kind,))
    registry = registry if registry is not None else default_registry()
    candidates = evaluate_candidates(problem, device, settings, registry)
    case = _DecisionInput(problem, device, settings, registry, candidates)
    request = _explicit_request(problem, settings, moe_backend)
    note = ""
    if request is not None:
        requested = _requested_candidates(request, case)
        chosen = next((candidate for candidate in requested if candidate.accepted), None)
        if chosen is not None:
            decision = _with_few_tokens(case.decision(chosen, request.why, request.source), case)
            return _with_tiles(decision, measurements)
        unavailable = _describe_unavailable(request, requested, case)
        if settings.on_unavailable == "error":
            raise _request_error(request, unavailable, case)
        note = f"; not what was asked for: {unavailable}"
    return _with_tiles(_automatic_decision(case, note, measurements), measurements)


def _no_choice_error(case: _DecisionInput, note: str) -> NoBackendError:
    """That no candidate runs the layer without being named, with every reason; `note`: what was asked for before."""
    what = "kernel" if case.accepted else "backend"
    rejected = tuple(
        sorted(
            (_only_by_name(candidate, case.registry) for candidate in case.candidates),
            key=lambda each: (each.priority, each.backend),
        )
    )
    case = dataclasses.replace(case, candidates=rejected)
    kernels = tuple(each for each in rejected if what == "backend" or each.backend != REFERENCE_BACKEND)
    rule = f"no {what} can run {case.problem.scheme.name} experts here, on {case.device}"
    rule += f"{_describe_shared_reasons(kernels)}{note}"
    return _refusal(rule, _nearest_remedy(case), case)


def _automatic_decision(case: _DecisionInput, note: str, measurements: MeasurementSet | None) -> Decision:
    """The decision without an explicit request, or after one that cannot be followed.

    Args:
        case: the candidates.
        note: why an explicit request cannot be followed; "" without one.
        measurements: as for `decide`.
    """
    names = automatic_choices(case.candidates)
    if not names:
        raise _no_choice_error(case, note)
    chosen = next(candidate for candidate in case.accepted if candidate.backend == names[0])
    if chosen.backend == REFERENCE_BACKEND:
        # A kernel would be faster, if a remedy makes one available.
        decision = case.decision(chosen, "static", f"{_explain_reference(case)}{note}")
        return dataclasses.replace(decision, degraded=_has_alternative(case) or bool(note))
    explanation = "first accepted backend in the static order (stock vLLM's, then this project's)"
    if len(equivalent_backends(chosen, case.candidates, named=True)) == 1:
        explanation = "no other kernel here computes the same numbers"
    choice = MeasuredChoice(chosen.backend, "")
    if measurements is not None:
        choice = _choose_by_measurement(measurements, chosen, case)
    why: DecidedBy = "static"
    if choice.backend != chosen.backend and choice.comparison is None:
        explanation = f"the next accepted backend in the static order, because {chosen.backend} failed"
    chosen = next(candidate for candidate in case.accepted if candidate.backend == choice.backend)
    if choice.comparison is not None:
        why, explanation = "predicted" if choice.comparison.is_predicted else "measured", choice.explanation
    elif choice.explanation:
        explanation = f"{explanation}; {choice.explanation}"
    tunable = False
    if measurements is not None and (
        choice.comparison is None or _is_uncertain(choice.comparison) or _has_gaps(measurements, chosen, case)
    ):
        tunable = _can_be_measured(chosen, case, measurements)
    if tunable and measurements is not None and not measurements.times:
        explanation += "; no measurements of this layer are valid here"
    explanation += _unused_permission(chosen, case)
    decision = case.decision(chosen, why, f"{explanation}{note}")
    return dataclasses.replace(
        decision, degraded=bool(note), comparison=choice.comparison, token_ranges=choice.token_ranges, tunable=tunable
    )


def is_final(decision: Decision, settings: Settings) -> bool:
    """Whether a decision is the user's, and nothing may take the backend's place when it fails later."""
    return decision.is_explicit and settings.on_unavailable == "error"


def automatic_choices(candidates: Iterable[Candidate]) -> list[str]:
    """Names of the accepted candidates that may run without being asked for by name, in static order."""
    return [each.backend for each in candidates if each.accepted and not each.answers.only_by_name]


def remaining_candidates(decision: Decision, failed: str) -> list[str]:
    """The accepted candidates without the failed one, best first; on a GPU also without the emulation."""
    return [name for name in automatic_choices(decision.candidates) if name != failed]


def _only_by_name(candidate: Candidate, registry: Registry) -> Candidate:
    """The candidate, rejected if it is accepted: none may be chosen."""
    if not candidate.accepted:
        return candidate
    name = candidate.backend
    detail = f"{candidate.answers.only_by_name}: it runs only when it is asked for by name"
    remedy = f"{env_var('backend')}={name}"
    if name in registry[name].vllm_names:
        remedy += f", or --moe-backend {name}"
    return dataclasses.replace(candidate, verdict=Rejected((Reason("by_name", detail, remedy),)))


def _unused_permission(chosen: Candidate, case: _DecisionInput) -> str:
    """What to do where the setting allow_activation_quantization is on and the automatic choice does not use it."""
    declared = case.problem.scheme.activations

    def needs_it(candidate: Candidate) -> bool:
        return not satisfies_precision(candidate.answers.activations, declared)

    if not case.settings.allow_activation_quantization or needs_it(chosen):
        return ""
    names = [each.backend for each in case.accepted if needs_it(each)]
    what = f"{', '.join(names)} must be chosen by name" if names else "no backend that quantizes activations can run"
    return f"; {env_var('allow_activation_quantization')}=1 changes nothing here: {what}"


def _can_be_measured(static: Candidate, case: _DecisionInput, measurements: MeasurementSet) -> bool:
    """Whether measuring could decide: on a GPU, between several backends that compute the same and have not failed
    when they were measured. Tokens that an all-to-all sorts by expert are not measured."""
    if case.problem.parallel.is_batched:
        return False
    names = equivalent_backends(static, case.candidates)
    return case.device.kind == "cuda" and len([name for name in names if name not in measurements.failures]) > 1


def _has_gaps(measurements: MeasurementSet, chosen: Candidate, case: _DecisionInput) -> bool:
    """Whether a candidate was measured, but at too few numbers of tokens to be compared."""
    objective = parse_objective(case.settings.objective)
    names = set(equivalent_backends(chosen, case.candidates)) - measurements.failures.keys()
    times = (measurements.known_times(name) for name in names if name in measurements.times)
    return any(bool(LatencyCurve(each).coverage_gap(objective)) for each in times)


def _is_uncertain(outcome: TimeComparison) -> bool:
    """Whether the static choice stands although another backend is predicted to be faster at some numbers of tokens."""
    return outcome.is_predicted and not outcome.time_saved and bool(outcome.slower_at)


def _with_few_tokens(decision: Decision, case: _DecisionInput) -> Decision:
    """An explicit choice, with the backend that runs its calls with few tokens on the same weights, if there is one."""
    own = decision.candidate(decision.backend).answers
    few = own.few_tokens
    if few is None or not any(
        each.backend == few.backend and each.answers.layout == own.layout for each in case.accepted
    ):
        return decision
    ranges = few, TokenRange(decision.backend, None)
    explanation = f"{decision.explanation}; by number of tokens: {', '.join(map(str, ranges))}, over the same weights"
    return dataclasses.replace(decision, explanation=explanation, token_ranges=ranges)


def _with_tiles(decision: Decision, measurements: MeasurementSet | None) -> Decision:
    """The decision with the fastest measured tile configurations in the plans of the backends that run the layer."""
    running = {decision.backend, *(each.backend for each in decision.token_ranges)}
    found = {name: tiles for name, tiles in measurements.tiles.items() if name in running} if measurements else {}
    if not found:
        return decision

    def tiled(name: str, plan: ShardPlan) -> ShardPlan:
        return dataclasses.replace(plan, tiles=found.get(name, ()))

    candidates = tuple(
        dataclasses.replace(each, known=dataclasses.replace(each.answers, plan=tiled(each.backend, each.answers.plan)))
        if each.backend in found
        else each
        for each in decision.candidates
    )
    return dataclasses.replace(decision, plan=tiled(decision.backend, decision.plan), candidates=candidates)


def equivalent_backends(static: Candidate, candidates: tuple[Candidate, ...], named: bool = False) -> tuple[str, ...]:
    """Names of the accepted candidates that compute the same numbers as the static choice, in static order.

    Measurements decide about speed only: a candidate that takes activations in another precision computes other
    numbers.

    Args:
        static: the first accepted candidate.
        candidates: all candidates, in static order.
        named: also those that run only when they are asked for by name.
    """
    accepted = [each for each in candidates if each.accepted and each.backend != REFERENCE_BACKEND]
    if not named:
        accepted = [each for each in accepted if not each.answers.only_by_name or each.backend == static.backend]
    return tuple(each.backend for each in accepted if each.answers.activations == static.answers.activations)


def _choose_by_measurement(measurements: MeasurementSet, static: Candidate, case: _DecisionInput) -> MeasuredChoice:
    problem, settings = case.problem, case.settings

    def can_share(one: str, other: str) -> bool:
        """Whether two backends may share the layer, each for a range of token counts."""
        backends = [case.registry[name] for name in (one, other)]
        # Data-parallel ranks must run the same backend at the same time, EPLB moves experts between ranks, and a
        # monolithic kernel gets router logits instead of routed ids.
        if problem.parallel.dp > 1 or problem.eplb or any(backend.monolithic for backend in backends):
            return False
        # vLLM's LoRA layer calls one kernel, whatever the number of tokens.
        if problem.lora:
            return False
        # Even if both are batch-invariant, a token's result would depend on the backend that its batch size selects.
        if problem.batch_invariant:
            return False
        answers = [each.answers for each in case.accepted if each.backend in (one, other)]
        if any(each.plan.hidden_size != problem.hidden_size for each in answers):
            return False  # vLLM pads the input for one of them only
        return settings.allow_second_layout or len({each.layout for each in answers}) == 1

    names = equivalent_backends(static, case.candidates)
    return choose_fastest(measurements, names, parse_objective(settings.objective), settings.min_time_saving, can_share)


def _evaluate(backend: Backend, problem: Problem, device: Device, settings: Settings, disabled_as: str) -> Candidate:
    try:
        return _ask(backend, problem, device, settings, disabled_as)
    except BackendDefect as error:  # the other candidates are asked all the same
        return Candidate(backend.name, Rejected((Reason("defect", error.rule, error.remedy),)), 0.0)


def _ask(backend: Backend, problem: Problem, device: Device, settings: Settings, disabled_as: str) -> Candidate:
    """The verdict of one backend; `disabled_as`: its name or its family's in the setting `disable`, "" where that has
    neither."""
    detail, what = f"disabled by {settings.source('disable')}", "it"
    if disabled_as != backend.name:
        detail, what = f"{detail}, as every backend of {disabled_as}", disabled_as
    disabled = Reason("disabled", detail, f"take {what} out of {env_var('disable')}")
    if disabled_as and not is_own(backend):
        # That is how users get rid of a method that hangs or fails: it is not called.
        return Candidate(backend.name, Rejected((disabled,)), math.inf)
    plan = backend.plan(problem, device)  # before `check`, which calls it: an error names the method that fails
    reasons = list(backend.check(problem, device).reasons)
    consumed, declared = backend.activations(problem), problem.scheme.activations
    priority = backend.priority(problem, device)
    if disabled_as:
        reasons.append(disabled)
    if not satisfies_precision(consumed, declared) and not settings.allow_activation_quantization:
        detail = f"would quantize activations to {consumed}; the layer declares {declared}"
        reasons.append(
            Reason(
                "activation_quantization",
                detail,
                f"to use it, set {env_var('allow_activation_quantization')} to 1 and choose it by name",
            )
        )
    if reasons:
        return Candidate(backend.name, Rejected(tuple(reasons)), priority)
    numerics, layout = backend.numerics(problem), backend.layout(problem, plan)
    by_name, few = backend.only_by_name(problem, device), backend.few_tokens(problem)
    answers = Answers(plan, numerics, consumed, layout, by_name, few)
    return Candidate(backend.name, Accepted(), priority, answers)


def _explicit_request(problem: Problem, settings: Settings, moe_backend: str) -> _ExplicitRequest | None:
    override = first_match(settings.overrides, problem.layer, settings.source("overrides"))
    if override is not None:
        if override.backend == AUTO:
            return None
        source = f"re:{override.pattern} from {settings.source('overrides')}"
        return _ExplicitRequest(override.backend, "override", source)
    if settings.backend != AUTO:
        source = settings.source("backend")
        if moe_backend not in (AUTO, settings.backend):
            source = f"{source}, which goes before --moe-backend {moe_backend}"
        return _ExplicitRequest(settings.backend, "user", source)
    if moe_backend != AUTO:
        return _ExplicitRequest(moe_backend, "user", f"--moe-backend {moe_backend}", is_vllm_option=True)
    return None


def _requested_candidates(request: _ExplicitRequest, case: _DecisionInput) -> list[Candidate]:
    """The candidates that a request names: the backend of that name, else those with that vLLM name."""
    if not request.is_vllm_option:
        by_name = [candidate for candidate in case.candidates if candidate.backend == request.name]
        if by_name:
            return by_name
    return [each for each in case.candidates if request.name in case.registry[each.backend].vllm_names]


def _merge_reasons(candidates: list[Candidate], case: _DecisionInput) -> str:
    """Why none of the candidates can run, each reason once; prefixed with names when it holds for some of them only."""
    remedy_follows = not case.accepted and _nearest(case.candidates) in candidates
    holders: dict[str, list[str]] = {}
    for candidate in candidates:
        for reason in _reasons_for_rule(candidate) if remedy_follows else candidate.sentences:
            holders.setdefault(reason, []).append(candidate.backend)
    shared = [reason for reason, names in holders.items() if len(names) == len(candidates)]
    apart = [f"{', '.join(names)}: {reason}" for reason, names in holders.items() if len(names) < len(candidates)]
    return "; ".join(shared + apart)


def _distance(candidate: Candidate) -> tuple[bool, bool, int]:
    """How far a candidate is from running the layer: one that remedies make run is nearer than any other, then one that
    options do without another release of vLLM, then one with fewer reasons against it."""
    reasons = candidate.reasons
    needs_release = any(reason.code.endswith(".vllm_version") for reason in reasons)
    return not _is_fixable(candidate), needs_release, len(reasons)


def _is_fixable(candidate: Candidate) -> bool:
    """Whether remedies would make a candidate run."""
    return all(reason.remedy for reason in candidate.reasons)


def _reasons_for_rule(candidate: Candidate) -> tuple[str, ...]:
    """What speaks against a candidate, for the rule of an error, whose remedy follows: those of a candidate that they
    make run stand there."""
    if not _is_fixable(candidate):
        return candidate.sentences
    return tuple(dict.fromkeys(reason.detail for reason in candidate.reasons))


def _nearest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate with the least `_distance`, of several the first in static order; None without candidates."""
    return min(candidates, key=lambda each: (_distance(each), each.priority, each.backend), default=None)


def _describe_shared_reasons(candidates: tuple[Candidate, ...]) -> str:
    """What speaks against the nearest candidate, as words behind a rule; what speaks against all of those that are as
    near, where they share a reason."""
    nearest = _nearest(candidates)
    if nearest is None:
        return ""
    as_near = [each for each in candidates if _distance(each) == _distance(nearest)]
    sentences = _reasons_for_rule(nearest)
    if len(as_near) == 1:
        return f"; nearest is {nearest.backend}: {'; '.join(sentences)}"
    shared = [sentence for sentence in sentences if all(sentence in _reasons_for_rule(each) for each in as_near)]
    if shared:
        return f"; each one: {'; '.join(shared)}"
    return f"; for example {nearest.backend}: {'; '.join(sentences)}"


def _describe_unavailable(request: _ExplicitRequest, requested: list[Candidate], case: _DecisionInput) -> Reason:
    """Why the request cannot be followed; the remedy has the names that can be asked for instead of an unknown one."""
    registry, scheme = case.registry, case.problem.scheme.name
    label = f"{request.name} ({request.source})"
    if requested:
        return Reason("request", f"{label} cannot run this layer on {case.device}: {_merge_reasons(requested, case)}")
    if request.name in registry.load_errors:
        return Reason("request", f"{label} could not be loaded: {registry.load_errors[request.name]}")
    detail = f"{label} is not a backend for {scheme} experts"
    if request.name in registry and not request.is_vllm_option:
        detail += f" but for {' and '.join(registry[request.name].schemes)} experts"
    valid = [AUTO, *_selectable_names(request, case)]
    others = known_names(registry) if not request.is_vllm_option else registry.families().keys() | MOE_BACKENDS
    meant = suggest(request.name, valid if request.name in others else {*valid, *others}, case.backends)
    remedy = f"{meant}Valid are {', '.join(valid)}"
    if request.is_vllm_option:
        remedy += f"; this project's own names go into {env_var('backend')}"
    if registry.load_errors:  # the name of an entry point may differ from its backend's
        remedy += f"; entry points that could not be loaded: {', '.join(registry.load_errors)}"
    return Reason("request", detail, remedy)


def _request_error(request: _ExplicitRequest, unavailable: Reason, case: _DecisionInput) -> NoBackendError:
    remedy = _nearest_remedy(case)
    if names := _accepted_names(request, case):
        remedy = f"Choose an accepted one ({names})"
        if automatic_choices(case.candidates):
            remedy += f", or auto, or set {env_var('on_unavailable')}=fallback"
    return _refusal(unavailable.detail, ". ".join(filter(None, (unavailable.remedy, remedy))), case)


def _refusal(rule: str, remedy: str, case: _DecisionInput) -> NoBackendError:
    """The error of a layer that no backend runs, with the table of all candidates."""
    table = f"Every candidate for {case.problem}:\n{format_candidates(case.candidates)}"
    return NoBackendError(rule, remedy, case.problem.layer, case.candidates, table)


def _selectable_names(request: _ExplicitRequest, case: _DecisionInput) -> list[str]:
    """The names that a request of this kind may use for the layer, sorted."""
    scheme = case.problem.scheme.name
    if not request.is_vllm_option:
        return case.registry.names(scheme)
    return sorted({name for backend in case.registry.for_scheme(scheme) for name in backend.vllm_names})


def _accepted_names(request: _ExplicitRequest, case: _DecisionInput) -> str:
    """Names of accepted candidates for a request of this kind, in static order; "" if there are none."""
    names = [candidate.backend for candidate in case.accepted]
    if not request.is_vllm_option:
        return ", ".join(names)
    vllm_names = dict.fromkeys(word for name in names for word in case.registry[name].vllm_names)
    return ", ".join(vllm_names) or (f"by {env_var('backend')}: {', '.join(names)}" if names else "")


def _nearest_remedy(case: _DecisionInput) -> str:
    """The remedies of the nearest candidate whose reasons all have one, and how to ask for those that run by name
    alone; "" without either."""
    fixable = [candidate for candidate in case.candidates if _is_fixable(candidate)]
    by_name = [candidate for candidate in fixable if candidate.reasons and candidate.reasons[0].code == "by_name"]
    slow = [candidate for candidate in by_name if candidate.backend == REFERENCE_BACKEND]
    nearest = _nearest(candidate for candidate in fixable if candidate not in slow)
    sentences = []
    if nearest is not None and nearest not in by_name:
        sentences = [f"To run {nearest.backend}: {'; '.join(dict.fromkeys(each.remedy for each in nearest.reasons))}"]
    for each in by_name:
        how = "runs it slowly" if each.backend == REFERENCE_BACKEND else "can run it"
        sentences.append(f"{each.backend} {how}: {each.reasons[0].remedy}")
    return ". ".join(sentences)


def _explain_reference(case: _DecisionInput) -> str:
    """Why only the reference runs the layer, with the nearest candidate for this kind of device."""
    rejected = [each for each in case.candidates if not each.accepted]
    nearest = _nearest(each for each in rejected if all(reason.code != "device" for reason in each.reasons))
    if nearest is None:
        return f"no other backend runs {case.problem.scheme.name} experts on {case.device}"
    words = f"no kernel for {case.device} can run the layer; {REFERENCE_BACKEND} runs it slowly"
    return f"{words}; nearest is {nearest.backend}: {'; '.join(map(str, nearest.reasons))}"


def _has_alternative(case: _DecisionInput) -> bool:
    """Whether the remedies of a rejected candidate would make it run; one that is disabled does not count."""
    rejected = [each.reasons for each in case.candidates if not each.accepted]
    return any(all(reason.remedy and reason.code != "disabled" for reason in reasons) for reasons in rejected)
