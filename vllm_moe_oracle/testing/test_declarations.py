"""What a backend says of itself is complete and agrees with other backends, and what it excludes it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from ..core.decision import Reason
from ..core.problem import DEVICE_KINDS, Activation, ActivationFormat, ActivationPrecision, ActOrder, Problem
from ..devices.catalog import known_device, known_device_names
from .cases import about, backend_names, distinct, layers, machines, registry, supported

BACKENDS = backend_names()

_ENTRY_POINTS = sorted(registry().load_errors)
"""Entry points whose backend could not be loaded."""


def _codes(reasons: tuple[Reason, ...]) -> set[str]:
    return {reason.code for reason in reasons}


@pytest.mark.parametrize("name", sorted({*BACKENDS, *_ENTRY_POINTS}))
def test_can_be_loaded(name: str) -> None:
    """A backend that an entry point names is registered; one that cannot be loaded is left out with a warning only."""
    error = registry().load_errors.get(name)
    rule = f"the entry point {name} of the group vllm_moe_oracle.backends brings no backend"
    assert not error, f"{rule}: {error}. Look at the module that it names"


@pytest.mark.parametrize("name", BACKENDS)
def test_supports_some_layer(name: str) -> None:
    """At least one of the layers here runs on at least one known device; otherwise nothing below tests anything."""
    backend = registry()[name]
    if supported(backend):
        return
    devices, found = machines(backend), list(layers(backend, 1))
    reasons = backend.check(found[0], devices[0]).reasons if devices and found else ()
    words = "; ".join(f"{reason.code}: {reason.detail}" for reason in reasons)
    refused = f"{found[0]} on {devices[0]} is refused: {words}" if words else "no machine or no layer fits"
    tried = (
        f"{name} supports none of {len(found)} layers, with all of them or a half on a rank, on {len(devices)} machines"
    )
    pytest.fail(f"{tried}. {refused}. Look at `schemes`, `capabilities`, `rules`, or add layers to testing/cases.py")


@pytest.mark.parametrize("name", BACKENDS)
def test_declares_what_it_does(name: str) -> None:
    """Priority, precision, numerics, sizes and layout are complete and agree with each other."""
    backend = registry()[name]
    assert not (missing := backend.missing_attributes()), f"{name} does not set {', '.join(missing)}"
    written = f"{name}: `stock_class` is {backend.stock_class!r}: write module:Class, or nothing"
    assert backend.stock_class.count(":") == bool(backend.stock_class), written
    for layer, device in distinct(backend):
        which = about(backend, layer, device)
        precision, numerics, plan = backend.activations(layer), backend.numerics(layer), backend.plan(layer, device)
        known = get_args(ActivationPrecision)
        assert precision in known, f"{which}: `activations` returns {precision!r}. Known are {', '.join(known)}"
        words = (numerics.weights, numerics.activations, numerics.accumulate)
        assert all(words) and "{" not in "".join(words), f"{which}: `numerics` are not all in words: {words}"
        said = f"`activations` returns {precision}, and `numerics` say {numerics.activations!r}"
        remedy = "the word quantized must be there exactly where the precision is not 16bit"
        assert ("quantized" in numerics.activations) == (precision != "16bit"), f"{which}: {said}; {remedy}"
        priority = backend.priority(layer, device)
        assert isinstance(priority, float), f"{which}: `priority` returns {priority!r}, which is no float"
        fits = plan.hidden_size >= layer.hidden_size and plan.intermediate_size >= layer.intermediate_size
        sizes = f"{plan.hidden_size} and {plan.intermediate_size} features"
        assert fits, f"{which}: `plan` cuts it to {sizes}; a plan may add padding, and take nothing away"
        noted = f"`plan` says {sizes}, with the notes {plan.notes}; notes explain padding, and only that"
        assert bool(plan.notes) == plan.pads(layer), f"{which}: {noted}"
        assert backend.layout(layer, plan).strip(), f"{which}: `layout` is empty; it names what `convert` makes"


@pytest.mark.parametrize("name", BACKENDS)
def test_has_a_priority_of_its_own(name: str) -> None:
    """No other backend that supports a layer has the same priority for it: their names would decide."""
    backend = registry()[name]
    for layer, device in distinct(backend):
        own = backend.priority(layer, device)
        ties = [
            other.name
            for other in registry().for_scheme(layer.scheme.name)
            if other.name != name
            and other.priority(layer, device) == own
            and other.activations(layer) == backend.activations(layer)
            and not other.check(layer, device).reasons
        ]
        tied = f"priority {own:g} is also that of {', '.join(ties)}, so that names would decide"
        assert not ties, f"{about(backend, layer, device)}: {tied}. Change `static_priority`"


@pytest.mark.parametrize("name", BACKENDS)
def test_says_where_another_kernel_takes_over(name: str) -> None:
    """Hand-overs ascend, within the calls of the layer."""
    backend = registry()[name]
    for layer, _ in supported(backend):
        for most in (1, 2, 64, 4096):
            found = backend.hand_overs(layer, most)
            valid = list(found) == sorted(set(found)) and all(1 <= each < most for each in found)
            rule = f"must be numbers from 1 to {most - 1}, ascending, for calls of up to {most} tokens"
            assert valid, f"{about(backend, layer)}: `hand_overs` are {found}; they {rule}"


@pytest.mark.parametrize("name", BACKENDS)
def test_another_backend_for_few_tokens_shares_its_weights(name: str) -> None:
    """It loses no more of a number, either."""
    backend = registry()[name]
    for layer, device in supported(backend):
        few = backend.few_tokens(layer)
        if few is None:
            continue
        other, which = registry()[few.backend], f"{about(backend, layer, device)}: `few_tokens` names {few.backend}"
        layouts = {each.layout(layer, each.plan(layer, device)) for each in (backend, other)}
        assert len(layouts) == 1, f"{which}, but they have the layouts {' and '.join(sorted(layouts))}"
        own, its = backend.activations(layer), other.activations(layer)
        assert its in ("16bit", own), f"{which}, whose activations are {its}, and lose what {own} keeps"


def _all_local(layer: Problem, experts: int) -> dict[str, Any]:
    """Changes to a layer that give it this number of experts, all on one rank."""
    parallel = dataclasses.replace(layer.parallel, ep=1)
    return {"num_experts": experts, "local_experts": experts, "parallel": parallel}


@pytest.mark.parametrize("name", BACKENDS)
def test_refuses_with_code_and_words(name: str) -> None:
    """Everything that the capabilities exclude is refused, with the code of the capability and a sentence."""
    backend = registry()[name]
    able = backend.capabilities
    layer, device = supported(backend)[0]
    scheme, parallel = layer.scheme, layer.parallel
    other_format: ActivationFormat = "batched" if parallel.format == "standard" else "standard"
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        ("float32" in able.dtypes, "dtype", {"dtype": "float32"}),
        (False, "activation", {"activation": Activation("unknown")}),
        (able.bias, "bias", {"has_bias": True}),
        (able.lora, "lora", {"lora": True}),
        (able.eplb, "eplb", {"eplb": True}),
        (able.batch_invariant, "batch_invariant", {"batch_invariant": True}),
        (other_format in able.formats, "format", {"parallel": dataclasses.replace(parallel, format=other_format)}),
        (able.apply_router_weight_on_input, "apply_router_weight_on_input", {
            "routing": dataclasses.replace(layer.routing, apply_router_weight_on_input=True), "top_k": 1}),
        (able.expert_parallel, "expert_parallel", {
            "local_experts": 4, "parallel": dataclasses.replace(parallel, ep=4)}),
        (able.max_top_k is None, "top_k.max", _all_local(layer, 64) | {"top_k": (able.max_top_k or 0) + 1}),
        (able.max_experts is None, "experts.max", _all_local(layer, (able.max_experts or 0) + 4)),
        (able.experts_multiple == 1, "experts.multiple", _all_local(layer, 4 * able.experts_multiple + 1)),
        (able.routing_methods is None, "routing", {"routing": dataclasses.replace(layer.routing, method="unknown")}),
    ]  # fmt: skip
    if scheme.name == "wna16":
        fields: list[tuple[bool, str, dict[str, Any]]] = [
            (able.zero_points, "zero_points", {"zero_points": True}),
            (not able.bits or 3 in able.bits, "bits", {"bits": 3}),
            (not able.groups or 16 in able.groups, "group", {"group_size": 16}),
            *((order in able.act_orders, "act_order", {"act_order": order}) for order in get_args(ActOrder)),
        ]
        changes += [
            (allowed, code, {"scheme": dataclasses.replace(scheme, **field)}) for allowed, code, field in fields
        ]
    which = about(backend, layer, device)
    for allowed, code, change in changes:
        reasons = backend.check(dataclasses.replace(layer, **change), device).reasons
        changed = f"{which}, changed to {change}"
        rule = f"must be refused with the code {code}, since `capabilities` do not have it"
        assert allowed or code in _codes(reasons), f"{changed}: it {rule}; the codes are {sorted(_codes(reasons))}"
        mute = [reason for reason in reasons if not reason.code or not reason.detail.strip()]
        assert not mute, f"{changed}: reasons without a code or without words: {mute}. Look at `rules`"
    for kind in set(DEVICE_KINDS).difference(able.devices):
        found = _codes(backend.check(layer, dataclasses.replace(device, kind=kind)).reasons)
        assert "device" in found, f"{which}: a device of the kind {kind} is not refused; `devices` are {able.devices}"
    for other in map(known_device, known_device_names()):
        ranges = able.compute_capabilities
        fits = other.kind != "cuda" or not ranges or any(low <= other.capability < high for low, high in ranges)
        elsewhere = dataclasses.replace(device, kind=other.kind, capability=other.capability)
        found = _codes(backend.check(layer, elsewhere).reasons)
        says = f"`compute_capabilities` are {ranges} and `devices` {able.devices}"
        refused = (other.kind in able.devices and fits) or {"device", "capability"} & found
        assert refused, f"{which}: {other} is not refused; {says}"
    for package in able.packages:
        rest = {key: version for key, version in device.packages.items() if key != package}
        found = _codes(backend.check(layer, dataclasses.replace(device, packages=rest)).reasons)
        assert "package" in found, f"{which}: it is not refused without {package}, which `packages` have"
