"""What backends take, against the vLLM classes that they wrap, in every supported release.

Pieces of each release run from its sources; see `tests.lib.stock_code`. Where a backend refuses what its class claims,
the reason stands in `STRICTER` or `UNTRIED`; where it takes what the release does not offer, in `LIFTED`.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest
import torch

from tests.lib.releases import some_releases
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load
from tests.lib.stock_rules import (
    ACTIVATIONS,
    CAPABILITIES,
    CLASSES,
    IN_HALVES,
    UNTRIED,
    backend,
    claims_activation,
    every_release,
    home,
    humming_conversion,
    machine,
    number,
    offered,
    quant_keys,
    refused,
    skip_unless_taken,
    source_of,
    stock_of,
    usual,
)
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Routing
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST

_SM75 = "bfloat16 needs sm_80, and the kernels have no float16 with e8m0 scales"
_CODE_ORDER = "the order of the codes depends on the CUDA compiler that the library finds"
_UNSEEN = "no checkpoint in MXFP4 has it, and the class was never run with it"
_TRITON_KERNELS = ("triton_mxfp4", "triton_mxfp4_monolithic", "triton_mxfp4_unfused")
_OF_MX = [name for name in CLASSES if name.startswith(("marlin_mx", "humming_mx"))]
STRICTER: dict[tuple[str, str | int], str] = {
    **{(name, 75): _SM75 for name in _OF_MX},
    **{(name, capability): _CODE_ORDER for name in _OF_MX for capability in (100, 103, 110, 120, 121)
       if name.startswith("humming")},
    **{(name, 110): "nobody ran the package on it" for name in _TRITON_KERNELS},
    ("triton_wna16", 70): "vLLM has no kernels of its own for sm_70 any more",
    ("trtllm_mxfp8", "relu2_no_mul"): "the class claims it and never passes the activation to the kernel",
    **{(name, "gelu_tanh"): _UNSEEN for name in ("cutlass_mxfp4", "cutlass_mxfp4_a8")},
    **{(name, "relu2_no_mul"): "stock's conversion takes the rows for two halves"
       for name in ("cutlass_mxfp4", "cutlass_mxfp4_a8")},
    ("cpu_int4", "gelu_tanh"): "nobody measured it, and the operator is not told",
    ("trtllm_mxint4", "llama4"): "its routing multiplies the input, which the class passes nobody",
}  # fmt: skip
"""What is refused although stock's class claims it (a compute capability, an activation, a routing method), and why."""

_GROUPED = "before, vLLM's grouped kernels ran only where an environment variable asked for them"
REFUSED_BEFORE = {
    "humming_mxfp8_grouped": [("0.30", "humming.kernel_kind", _GROUPED)],
    "humming_mxfp4": [("0.25.1", "package", "offered before, by a humming-kernels that nobody here looked at")],
    "humming_mxfp4_grouped": [("0.25.1", "package", "the same"), ("0.30", "humming.kernel_kind", _GROUPED)],
    "humming_wna16_grouped": [("0.30", "humming.kernel_kind", _GROUPED)],
    "trtllm_mxfp8": [("0.23", "package", "the class takes SiLU alone")],
    "trtllm_mxfp8_monolithic": [("0.23", "package", "the class passes groups of 0 to a kernel that wants none")],
    "deep_gemm_mxfp4": [("0.24", "package", "stock's scales are float32, which DeepGEMM packs at every call")],
    "trtllm_mxint4": [("0.25.1", "package", "the class claims no activation")],
    "cpu_int4": [("0.30", "package", "the class routes tokens itself")],
}
"""Backends that refuse releases which offer the kernel: the first release that they take, the code, and why."""

LIFTED = {
    "triton_wna16": "a class since 0.22.1 and offered since 0.27; before, vLLM runs the same kernel by a function",
}
"""Backends that are taken in releases whose oracle does not know the kernel, and why."""

every_backend = pytest.mark.parametrize("name", CLASSES)
on_gpus = pytest.mark.parametrize("name", [name for name in CLASSES if home(name)])


def converts_ungated_experts(release: str, name: str) -> bool:
    """Whether stock's conversion knows experts without a gate; that for Humming asked for twice their rows at first."""
    if not name.startswith("humming_mxfp8"):
        return True
    twice = "'shape_n': layer.moe_config.intermediate_size_per_partition * 2" in humming_conversion(release)
    assert twice != ("(2 if is_gated else 1)" in humming_conversion(release))
    return not twice


def test_every_wrapped_class_of_vllm_is_compared() -> None:
    """A backend that is not in `CLASSES` would be tested against nothing."""
    wrapped = {each.name: each.stock_class.split(".")[-1].split(":") for each in default_registry() if each.stock_class}
    assert wrapped == {name: [file, class_name] for name, (file, class_name, _) in CLASSES.items()}


@every_release
@every_backend
def test_a_release_without_the_kernel_is_refused(name: str, release: str) -> None:
    codes = refused(name, release)
    if not offered(release, name):
        file, class_name, _ = CLASSES[name]
        if name in LIFTED:
            assert codes == set() and class_name in source_of(release, f"{FUSED_MOE}/experts/{file}.py")
        else:
            assert "package" in codes
        return
    refusals = [code for before, code, _ in REFUSED_BEFORE.get(name, []) if number(release) < number(before)]
    assert refusals[0] in codes if refusals else codes == set()


@every_release
@on_gpus
def test_compute_capabilities(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    for capability in CAPABILITIES:
        found, names = stock_of(release, name, capability)
        claimed = bool(found._supports_current_device() and found._supports_quant_scheme(*quant_keys(name, names)))
        if name == "trtllm_mxint4":
            # Its class asks a function that also reads an environment variable.
            path = f"{QUANTIZATION}/utils/flashinfer_mxint4_moe.py"
            asked = source_of(release, path, "is_flashinfer_mxint4_moe_available")
            assert "VLLM_USE_FLASHINFER_MOE_INT4" in asked and "is_device_capability_family(100)" in asked
            claimed = Platform(capability).is_device_capability_family(100)
        ours = not {"capability", "capability.vllm_version"} & refused(name, release, capability)
        expected = claimed and (name, capability) not in STRICTER
        assert ours == expected, f"sm_{capability}: taken {ours}, claimed by the class {claimed}"


@every_release
@every_backend
def test_activations(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    for stock_name, activation in (ACTIVATIONS if "mxfp4" in name else IN_HALVES).items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = {code for code in refused(name, release, activation=activation) if code.startswith("activation")}
        expected = claimed and not {(name, stock_name)} & {*STRICTER, *UNTRIED}
        if not activation.gated and not converts_ungated_experts(release, name):
            expected = False
        if name.startswith("cutlass") and stock_name == "silu" and number(release) < (0, 28):
            # Claimed, and computed with gpt-oss's constants.
            assert claimed and "activation.parameters.vllm_version" in codes
            expected = False
        assert (not codes) == expected, f"{stock_name}: refused by {codes}, claimed by the class {claimed}"


@every_release
@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("_monolithic")] + ["trtllm_mxint4"])
def test_routing_inside_the_kernel(release: str, name: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    names["RoutingMethodType"] = methods = load(release, f"{FUSED_MOE}/config.py")["RoutingMethodType"]
    for method in methods:
        own = method.name.lower()
        if own == "simulated":  # vLLM's own load test
            continue
        claimed = bool(found._supports_routing_method(method, *quant_keys(name, names)))
        codes = refused(name, release, routing=Routing(own, num_groups=8, top_k_groups=4))
        expected = claimed and (name, own) not in STRICTER
        assert (not {"routing", "routing.vllm_version"} & codes) == expected, f"{own}: claimed by the class {claimed}"


@some_releases(NEWEST)
def test_what_stock_no_longer_claims_needs_no_reason(release: str) -> None:
    for name, what in STRICTER:
        found, names = stock_of(release, name, what if isinstance(what, int) else home(name))
        if isinstance(what, int):
            assert found._supports_current_device(), (name, what)
        elif what in ACTIVATIONS:
            assert claims_activation(found, names, what, ACTIVATIONS[what]), (name, what)


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
@pytest.mark.parametrize("name", [name for name in CLASSES if "_mxfp4" in name and not name.startswith("humming")])
def test_sizes_are_rounded_as_stock_rounds_them(release: str, name: str) -> None:
    names = load(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(home(name)),
        round_up=lambda a, b: -(-a // b) * b, triton_kernels_version=None, get_triton_kernels_version=lambda: None,
    )  # fmt: skip
    kind = names["Mxfp4MoeBackend"][CLASSES[name][2]]
    for hidden, inner in ((2880, 2880), (2880, 1440), (2880, 736), (2880, 384), (7168, 256), (2048, 768), (96, 32)):
        layer = usual(name, hidden_size=hidden, intermediate_size=inner)
        plan = backend(name).plan(layer, machine(release, home(name)))
        found = (plan.hidden_size, plan.intermediate_size)
        assert bool(plan.notes) == (found != (hidden, inner))
        expected = tuple(names["mxfp4_round_up_hidden_size_and_intermediate_size"](kind, hidden, inner))
        if name.startswith("marlin"):
            # Whole tiles are enough: never more than stock's, which are whole tiles too.
            assert all(ours <= theirs for ours, theirs in zip(found, expected, strict=True)), (hidden, inner)
            assert found[0] % 128 == 0 and found[1] % 64 == 0
        elif name.startswith("deep_gemm") and expected != found:
            # Before stock rounded for DeepGEMM, it rounded to 64, which its packed scales do not take.
            assert expected == (hidden, -(-inner // 64) * 64)
        else:
            assert found == expected, (hidden, inner)


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
