"""What backends take, against the vLLM classes that they wrap, in every supported release.

Pieces of each release run from its sources; see `tests.lib.stock_code`. Where a backend refuses what its class claims,
the backend names the reason in its `stock_differences`.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.lib.releases import DEFAULT_RELEASE, some_releases
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load
from tests.lib.stock_rules import (
    ACTIVATIONS,
    CAPABILITIES,
    CLASSES,
    IN_HALVES,
    Wrapped,
    backend,
    bases_of,
    claims_activation,
    differs,
    disagreement,
    every_release,
    has_class,
    home,
    machine,
    number,
    oracle_of,
    quant_keys,
    refused,
    skip_unless_taken,
    stock_kernels,
    stock_of,
    unknown_differences,
    usual,
    wrappers,
)
from vllm_moe_oracle.backends._stock import StockDifference
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Activation, Routing
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST

ROUNDED = [name for name in wrappers("mxfp4") if CLASSES[name].kernel != "HUMMING"]
"""Backends whose layers' sizes stock rounds before it makes tensors; Humming's library pads by itself."""

every_backend = pytest.mark.parametrize("name", CLASSES)
on_gpus = pytest.mark.parametrize("name", [name for name in CLASSES if home(name)])


def test_every_wrapped_class_of_vllm_is_compared() -> None:
    """A backend over a class that is no `StockBackend` would be tested against nothing."""
    assert {each.name: each.stock_class for each in default_registry() if each.stock_class} == {
        name: each.stock_class for name, each in CLASSES.items()
    }


@every_release
@every_backend
def test_a_release_without_the_kernel_is_refused(name: str, release: str) -> None:
    """vLLM's oracle for the scheme knows the kernel, and finds the class for it, in the releases that are taken."""
    codes, own = refused(name, release), CLASSES[name]
    kernels = stock_kernels(release, backend(name).schemes[0])
    found = f"of {own.kernel} among {kernels}, the backend's is {own.stock_class}; refused by {codes}"
    if own.stock_class in kernels.get(own.kernel, ()):
        assert bool(codes) == differs(name, "", release), found
    elif differs(name, "unlisted", release):
        assert codes == set() and has_class(release, own.path, own.class_name), found
    else:
        assert "package" in codes, found


@every_release
@every_backend
def test_the_class_takes_weights_and_activations(name: str, release: str) -> None:
    """And the oracle chooses the kernel for activations of this precision."""
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    weights, inputs = quant_keys(name, names)
    assert found._supports_quant_scheme(weights, inputs)
    if backend(name).schemes[0] == "mxfp4":
        oracle = oracle_of(release, "mxfp4", **{key: each for key, each in names.items() if key[0] == "k"})
        kernel = oracle["Mxfp4MoeBackend"][CLASSES[name].kernel]
        assert oracle["_backend_activation_key"](kernel) is inputs


@every_release
@on_gpus
def test_compute_capabilities(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    for capability in CAPABILITIES:
        found, names = stock_of(release, name, capability)
        claimed = bool(found._supports_current_device() and found._supports_quant_scheme(*quant_keys(name, names)))
        codes = {"capability", "capability.vllm_version"} & refused(name, release, capability)
        assert not disagreement(name, f"sm_{capability}", release, codes, claimed)


@every_release
@every_backend
def test_activations(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    for stock_name, activation in activations_of(name).items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = {code for code in refused(name, release, activation=activation) if code.startswith("activation")}
        assert not disagreement(name, stock_name, release, codes, claimed)


def activations_of(name: str) -> dict[str, Activation]:
    """Activations of the layers that reach a backend, by vLLM's names."""
    return ACTIVATIONS if "mxfp4" in backend(name).schemes else IN_HALVES


@every_release
@pytest.mark.parametrize("name", [name for name in CLASSES if backend(name).monolithic])
def test_routing_inside_the_kernel(release: str, name: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    names["RoutingMethodType"] = methods = routing_methods(release)
    for method in methods:
        own = method.name.lower()
        if own == "simulated":  # vLLM's own load test
            continue
        claimed = bool(found._supports_routing_method(method, *quant_keys(name, names)))
        codes = refused(name, release, routing=Routing(own, num_groups=8, top_k_groups=4))
        assert not disagreement(name, own, release, {"routing", "routing.vllm_version"} & codes, claimed)


def routing_methods(release: str) -> Any:
    """vLLM's enumeration of them."""
    return load(release, f"{FUSED_MOE}/config.py")["RoutingMethodType"]


@every_release
@every_backend
def test_formats_routing_lora_and_batch_invariance(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    limits = backend(name).capabilities
    formats = names["mk"].FusedMoEActivationFormat
    assert formats.Standard is not formats.BatchedExperts
    (form,) = limits.formats
    assert found.activation_format() is (formats.BatchedExperts if form == "batched" else formats.Standard)
    inherits = bases_of(release, name)
    assert backend(name).monolithic == ("mk.FusedMoEExpertsMonolithic" in inherits)
    mixed_in, declared = "LoRAExpertsMixin" in inherits, differs(name, "lora", release)
    assert limits.lora == (mixed_in and not declared) and mixed_in >= declared
    # What vLLM claims is believed where this project has proven it, too.
    claimed = getattr(found, "_supports_batch_invariance", bool)()
    assert claimed or not limits.batch_invariant


@every_release
@every_backend
def test_moving_experts(name: str, release: str) -> None:
    """EPLB, and what else vLLM asks the classes about parallelism; all-to-alls of their own are asked at run time."""
    skip_unless_taken(release, name)
    found, _ = stock_of(release, name, home(name))
    plain = Parallel()
    claimed = {moves: bool(found._supports_parallel_config(plain.having(enable_eplb=moves))) for moves in (False, True)}
    assert claimed[False]
    # The grouped kernels' home is expert parallelism, which is none of the questions here.
    declared = differs(name, "eplb", release)
    assert "eplb" not in refused(name, release, eplb=False)
    assert ("eplb" not in refused(name, release, eplb=True)) == (claimed[True] and not declared)
    assert claimed[True] >= declared


class Parallel:
    """vLLM's `FusedMoEParallelConfig` of tensor parallelism alone: every question is answered with no."""

    def __getattr__(self, name: str) -> bool:
        return False

    def having(self, **answers: bool) -> Parallel:
        """The same with other answers."""
        changed = Parallel()
        vars(changed).update(answers)
        return changed


@some_releases(DEFAULT_RELEASE)
@every_backend
def test_differences_are_of_what_is_compared(release: str, name: str) -> None:
    routing = [each.name.lower() for each in routing_methods(release)]
    known = {*ACTIVATIONS, *routing, *(f"sm_{each}" for each in CAPABILITIES), "lora", "eplb", "unlisted"}
    if name in ROUNDED:
        known.add("sizes")
    assert not unknown_differences(CLASSES[name].stock_differences, known)


def test_a_wrong_difference_is_named_with_the_nearest_word() -> None:
    known = {*ACTIVATIONS, "lora"}
    found = unknown_differences(
        [
            StockDifference(("gelutanh",), "it would"),
            StockDifference(("lora",), ""),
            StockDifference(("lora",), "it would", "0.0.1"),
            StockDifference((), "it would"),
            StockDifference(("silu",), "it would"),
        ],
        known,
    )
    assert [each.partition("Known are")[0].partition(": give")[0] for each in found] == [
        "the difference 'gelutanh' is of nothing that is compared. Did you mean gelu_tanh? ",
        "the difference ('lora',) has no reason",
        "the difference ('lora',) ends before '0.0.1', which is no supported release. ",
        "the difference () holds for every layer of every release",
    ]


def test_a_disagreement_says_who_says_what_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    name, what, release = "marlin_mxfp8", "silu", NEWEST
    stock = f"{CLASSES[name].class_name} of vLLM {release}"
    differing = CLASSES[name]._replace(stock_differences=(StockDifference((what,), "it would"),))
    plain = CLASSES[name]._replace(stock_differences=())
    for wrapped, codes, claimed, words in (
        (plain, {"activation"}, False, ""),
        (plain, set(), True, ""),
        (differing, {"activation"}, True, ""),
        (plain, set(), False, f"takes it, and {stock} does not claim it. Take it out of the backend's capabilities"),
        (plain, {"activation"}, True, f"refuses it (activation), and {stock} claims it. Add it to the backend's"),
        (differing, set(), True, "Its stock_differences name what it takes: remove 'silu' from them"),
    ):
        monkeypatch.setitem(CLASSES, name, wrapped)
        found = disagreement(name, what, release, codes, claimed)
        assert words in found and bool(words) == bool(found)


@some_releases(DEFAULT_RELEASE)
def test_a_class_that_is_none_of_experts_is_named(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Wrapped(f"{FUSED_MOE}/activation.py", "MoEActivation", "", ())
    monkeypatch.setitem(CLASSES, "marlin_mxfp8", other)
    with pytest.raises(AssertionError, match=r"MoEActivation of vLLM \S+ has no activation_format, .* no class of exp"):
        stock_of(release, "marlin_mxfp8", 90)


@some_releases(NEWEST)
@every_backend
def test_what_vllm_no_longer_claims_is_no_difference(release: str, name: str) -> None:
    """LoRA and EPLB are compared above."""
    methods = {each.name.lower(): each for each in routing_methods(release)}
    for what in [what for each in CLASSES[name].stock_differences for what in each.what]:
        found, names = stock_of(release, name, int(what[3:]) if what.startswith("sm_") else home(name))
        if what.startswith("sm_"):
            assert found._supports_current_device(), (name, what)
        elif what in ACTIVATIONS:
            assert claims_activation(found, names, what, ACTIVATIONS[what]), (name, what)
        elif what in methods:
            names["RoutingMethodType"] = type(methods[what])
            assert found._supports_routing_method(methods[what], *quant_keys(name, names)), (name, what)


@every_backend
def test_every_attribute_reaches_the_builder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, layer = import_module(f"vllm_moe_oracle.backends.{name}").BACKEND, usual(name)
    attributes = {"quantize_inputs": "mxfp8", "swizzle_input_scales": True, "padded_layer": True}
    for attribute, value in attributes.items():
        monkeypatch.setattr(type(wrapper), attribute, value)
    plan = ShardPlan(layer.hidden_size, layer.intermediate_size)
    tensors = {key: torch.zeros(1, 1, 1) for key in ("w13_scale", "w2_scale")}
    found = wrapper.stock_arguments(tensors, layer, plan)
    assert (found["inputs"], found["swizzled"], found["plan"]) == ("mxfp8", True, plan)


# --- Padding --------------------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("name", ROUNDED)
def test_sizes_are_rounded_as_stock_rounds_them(release: str, name: str) -> None:
    skip_unless_taken(release, name)
    names = load(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(home(name)),
        round_up=lambda a, b: -(-a // b) * b, triton_kernels_version=None, get_triton_kernels_version=lambda: None,
    )  # fmt: skip
    kind, limits = names["Mxfp4MoeBackend"][CLASSES[name].kernel], backend(name).capabilities
    same = []
    for hidden, inner in (
        (2880, 2880),
        (2880, 1440),
        (2880, 736),
        (2880, 384),
        (7168, 256),
        (7168, 160),
        (2048, 768),
        (96, 32),
    ):
        layer = usual(name, hidden_size=hidden, intermediate_size=inner)
        plan = backend(name).plan(layer, machine(release, home(name)))
        found = (plan.hidden_size, plan.intermediate_size)
        assert bool(plan.notes) == (found != (hidden, inner))
        expected = tuple(names["mxfp4_round_up_hidden_size_and_intermediate_size"](kind, hidden, inner))
        same.append(found == expected)
        if differs(name, "sizes", release):
            assert all(ours <= theirs for ours, theirs in zip(found, expected, strict=True)), (hidden, inner)
            assert found[0] % limits.hidden_multiple == 0 and found[1] % limits.intermediate_multiple == 0
        else:
            assert found == expected, (hidden, inner)
    assert all(same) != differs(name, "sizes", release)


@every_release
@pytest.mark.parametrize("name", ["marlin_mxfp8", "marlin_wna16"])
def test_marlin_pads_as_stock_pads_for_it(name: str, release: str) -> None:
    names = load(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    if "marlin_moe_padded_intermediate" not in names:
        assert number(release) < (0, 25, 1)
        return
    scheme = usual(name).scheme
    for group in (32,) if name == "marlin_mxfp8" else (-1, 32, 64, 128):
        for inner in range(max(group, 32), 2049, max(group, 32)):
            layer = usual(name, intermediate_size=inner, scheme=dataclasses.replace(scheme, group_size=group))
            plan = backend(name).plan(layer, machine(release, 80))
            assert plan.intermediate_size == names["marlin_moe_padded_intermediate"](inner, group), (group, inner)
