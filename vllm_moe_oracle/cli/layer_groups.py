"""Layers of a checkpoint by equal decision, as `explain` shows them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..checkpoint.layer_names import compact_layer_names
from ..checkpoint.serving import carried_hidden_size, check_exchange
from ..compat import check_platform
from ..core.decision import Candidate, Decision
from ..core.measurement_set import MeasurementSet
from ..core.overrides import first_match
from ..core.problem import Device, Problem, features_for_stock
from ..errors import NoBackendError, StandDown
from ..measurements import lookup
from ..measurements.stock_gain import StockGain, stock_choice, stock_gain, time_errors
from ..oracle.registry import default_registry
from ..oracle.selection import decide
from ..oracle.stock_kernels import is_loadable, stock_candidate
from ..releases.all2all import why_vllm_refuses
from ..settings import AUTO, Settings


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Equal layers with equal decisions.

    Attributes:
        names: the layers' names.
        problem: the first layer's.
        decision: the first layer's; None when no backend can run it.
        failure: why there is no decision; "" when there is one.
        candidates: every backend, with its verdict.
        left_to_stock: what of stock vLLM the layers are left to, its class where that is known; "" where a backend
            runs them, or nothing does.
        gain: the gain over stock vLLM, where it is known.
        runs_stock_kernel: the layers run the kernel that stock vLLM takes alone: nothing can be gained, or lost.
        measure: the command that measures the layers, if that could improve on the static choice; else "".
        is_mtp: the layers are multi-token prediction modules, which vLLM loads as a model of their own for speculative
            decoding.
        refused: why vLLM does not start with the model's other layers, so that nothing is gained; "" where it does.
        switched_off: the plugin would not be registered, so that nothing is gained.
    """

    names: tuple[str, ...]
    problem: Problem
    decision: Decision | None
    failure: str
    candidates: tuple[Candidate, ...]
    left_to_stock: str = ""
    gain: StockGain | None = None
    runs_stock_kernel: bool = False
    measure: str = ""
    is_mtp: bool = False
    refused: str = ""
    switched_off: bool = False

    @property
    def layers(self) -> str:
        """The layers' names, numbers in ranges."""
        return compact_layer_names(self.names)

    def to_json(self, brief: bool) -> dict[str, Any]:
        """The group as JSON values; brief: without rejected candidates."""
        candidates = [each for each in self.candidates if each.accepted or not brief]
        measured = None if self.decision is None else self.decision.measured
        return {
            "layers": self.layers,
            "count": len(self.names),
            "is_mtp": self.is_mtp,
            "problem": self.problem,
            "decision": None if self.decision is None else self.decision.to_record(),
            "failure": self.failure or None,
            "left_to_stock": self.left_to_stock or None,
            "gain_over_stock": self.gain,
            "time_errors": {} if measured is None else time_errors(measured),
            "measure": self.measure or None,
            "candidates": [candidate.to_record() for candidate in candidates],
        }


def group_layers(
    problems: list[Problem], device: Device, settings: Settings, moe_backend: str, all2all: str, measure: str
) -> list[LayerGroup]:
    """Layers by equal problem and equal outcome, in the order of their first layer."""
    groups: dict[object, LayerGroup] = {}
    evidence: dict[Problem, MeasurementSet | None] = {}
    known: dict[object, object] = {}
    for problem in problems:
        kind = problem.key()
        # Equal layers get equal decisions, unless an override names one of them.
        case = (kind, first_match(settings.overrides, problem.layer, settings.source("overrides")))
        if case not in known:
            if kind not in evidence:
                evidence[kind] = lookup.find_measurements(problem, device, settings)
            found = _decided(problem, device, settings, moe_backend, all2all, evidence[kind])
            same = found.decision and dataclasses.replace(found.decision, problem=kind)
            known[case] = (kind, same, found.failure)
            if found.decision is not None and known[case] not in groups:
                chosen, registry = found.decision, default_registry()
                same_kernel = chosen.backend == stock_choice(chosen, device, registry) and not chosen.token_ranges
                found = dataclasses.replace(
                    found,
                    gain=stock_gain(chosen, device, registry, settings.objective),
                    runs_stock_kernel=same_kernel,
                    measure=measure if chosen.tunable else "",
                )
            groups.setdefault(known[case], found)
        before = groups[known[case]]
        groups[known[case]] = dataclasses.replace(before, names=(*before.names, problem.layer))
    return list(groups.values())


def _decided(
    problem: Problem,
    device: Device,
    settings: Settings,
    moe_backend: str,
    all2all: str,
    measurements: MeasurementSet | None,
) -> LayerGroup:
    """What becomes of a layer, as a group that names none yet, without its gain."""
    decision, failure, left_to = None, "", ""
    try:
        decision = decide(problem, device, settings, moe_backend, measurements=measurements)
        judged = decision.candidates
        check_exchange(problem, all2all, device.kind)
    except NoBackendError as error:
        judged = error.candidates
        parallel = problem.parallel
        refused = why_vllm_refuses(all2all, device.kind, parallel.exchanges_tokens, parallel.dp)
        rounded = decision is not None and not refused and carried_hidden_size(problem, all2all) > problem.hidden_size
        refused_exchange = decision is not None and not rounded
        if decision is not None:
            judged, decision = decision.candidates, None
        scheme = problem.scheme.name
        # The error's table is printed anyway.
        failure = error.rule if judged else f"this release has no backend for {scheme} experts yet"
        if judged and error.remedy:
            failure = f"{failure}. {error.remedy}"
        stock = None
        features = features_for_stock(problem.lora, problem.parallel.is_batched, problem.unpadded_intermediate_size > 0)
        features += ["a rounded hidden size"] * rounded
        if not names_backends(settings) and not refused_exchange and is_loadable(judged):
            if moe_backend == AUTO and not rounded:
                stock = stock_candidate(judged, problem, device, default_registry())
            left_to = STOCK_ITSELF if features else ""
        if stock is not None:
            left_to = default_registry()[stock.backend].stock_class_name
            objections = "; ".join(map(str, stock.reasons))
            rules = f"its {left_to} does not have these rules of {stock.backend}: {objections}"
            failure = f"left to stock vLLM: {rules}"
        elif stands_down := _stands_down(device):
            left_to, failure = STOCK_ITSELF, f"left to stock vLLM: {stands_down}"
        elif left_to:
            failure = f"left to stock vLLM, if stock vLLM can run {' and '.join(features)}: {failure}"
    return LayerGroup((), problem, decision, failure, judged, left_to)


STOCK_ITSELF = "stock vLLM's own choice"
"""What layers are left to where only a server can ask stock vLLM what it takes."""


def names_backends(settings: Settings) -> bool:
    """Whether the user names backends to run or not to run; layers that they cannot run are not left to stock vLLM."""
    named = settings.backend != AUTO or settings.overrides or settings.disable
    return bool(named) and settings.on_unavailable != "fallback"


def _stands_down(device: Device) -> str:
    """Why the plugin registers nothing on a kind of device; "" where it does."""
    try:
        check_platform(device.kind, device.name)
    except StandDown as error:
        return str(error)
    return ""
