"""MXFP8 backends over vLLM's kernels: what they say, and what their conversions make of an expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import GPT_OSS, MXFP8, MXFP8_W8A8, RELU2, problem
from tests.lib.stock_rules import at_home, backend, expert, gpu, usual
from vllm_moe_oracle.core.decision import Rejected
from vllm_moe_oracle.core.overrides import Override
from vllm_moe_oracle.core.problem import Activation, Problem, Routing
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings

NAMES = (
    "marlin_mxfp8",
    "humming_mxfp8",
    "humming_mxfp8_grouped",
    "trtllm_mxfp8",
    "trtllm_mxfp8_monolithic",
    "deep_gemm_mxfp8",
)
RENORMALIZE = Routing(method="renormalize")


def codes_of(verdict: Any) -> set[str]:
    return {reason.code for reason in verdict.reasons}


def layer(**changes: Any) -> Problem:
    return problem(**({"scheme": MXFP8_W8A8, "routing": RENORMALIZE} | changes))


WEIGHT_ONLY = ("marlin_mxfp8", "humming_mxfp8", "humming_mxfp8_grouped")


# --- What they take ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_biases_reach_the_kernel_or_the_layer_is_refused(name: str) -> None:
    verdict = backend(name).check(usual(name, has_bias=True), at_home(name))
    assert codes_of(verdict) == (set() if name in WEIGHT_ONLY else {"bias"})


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("marlin_mxfp8", set()),
        ("humming_mxfp8", set()),
        ("trtllm_mxfp8", {"activation"}),
        ("trtllm_mxfp8_monolithic", set()),
        ("deep_gemm_mxfp8", {"activation"}),
    ],
)
def test_non_gated_experts(name: str, codes: set[str]) -> None:
    nemotron = usual(name, activation=RELU2, hidden_size=2688, intermediate_size=1856, top_k=6)
    assert codes_of(backend(name).check(nemotron, at_home(name))) == codes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("activation", "taken"),
    [
        (GPT_OSS, True),
        (Activation("silu", limit=7.0), True),
        (Activation("silu", alpha=1.0, beta=0.0), True),
        (Activation("silu", alpha=1.702), False),
        (Activation("swigluoai", alpha=1.702, beta=1.0), False),
    ],
)
def test_parameters_reach_the_kernel_or_the_layer_is_refused(name: str, activation: Activation, taken: bool) -> None:
    verdict = backend(name).check(usual(name, activation=activation), at_home(name))
    assert codes_of(verdict) == (set() if taken else {"activation.parameters"})


WITHOUT_MEANING = ("situ (alpha=4, beta=25, limit=7)", "swiglustep (alpha=1.702, limit=7)")
"""Activations with a parameter that their formula does not have: no backend takes them."""


@pytest.mark.parametrize(
    ("activation", "taken"),
    [
        (Activation("situ", alpha=4.0, beta=25.0), True),
        (Activation("situ", alpha=4.0), True),
        (Activation("situ", beta=25.0), False),
        (Activation("situ", alpha=0.0, beta=25.0), False),
        (Activation("situ", alpha=-4.0, beta=25.0), False),
        (Activation("situ", alpha=4.0, beta=25.0, limit=7.0), False),
        (Activation("swiglustep", limit=7.0), True),
        (Activation("swiglustep", limit=16.0), False),
        (Activation("swiglustep"), False),
        (Activation("swiglustep", alpha=1.702, limit=7.0), False),
    ],
    ids=str,
)
def test_numbers_of_other_gated_activations(activation: Activation, taken: bool) -> None:
    """By Marlin, and where numbers mean nothing, by the reference neither."""
    for name in ("marlin_mxfp8", "emulation"):
        verdict = default_registry()[name].check(usual(name, activation=activation), at_home("marlin_mxfp8"))
        codes = {code for code in codes_of(verdict) if code.startswith("activation")}
        expected = taken or (name == "emulation" and activation == Activation("swiglustep", limit=16.0))
        refusals = {"activation.parameters.undefined"} if name == "emulation" else {"activation.parameters"}
        refusals |= {"activation.parameters.undefined"} if str(activation) in WITHOUT_MEANING else set()
        assert codes == (set() if expected else refusals)


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("marlin_mxfp8", "0.24.0"),
        ("humming_mxfp8", "0.28.0"),
        ("trtllm_mxfp8", "0.25.1"),
        ("deep_gemm_mxfp8", "0.24.0"),
    ],
)
def test_swigluoai_is_taken_since(name: str, since: str) -> None:
    machine = at_home(name)
    before = {"0.24.0": "0.23.0", "0.25.1": "0.24.0", "0.28.0": "0.27.1"}[since]
    for version, taken in ((since, True), (before, False)):
        device = dataclasses.replace(machine, packages=machine.packages | {"vllm": version})
        reasons = backend(name).check(usual(name, activation=GPT_OSS), device).reasons
        assert ("activation.parameters" not in {reason.code for reason in reasons}) == taken
        assert taken or f"only since vLLM {since}" in " ".join(map(str, reasons))


def test_humming_runs_where_vllm_itself_runs_it() -> None:
    alone, spread = layer(), layer(ep=4, local_experts=32)
    new, old = gpu(90), gpu(90, vllm="0.26.0", **{"humming-kernels": "0.1.10"})
    table = [
        (backend(name).check(each, device).reasons == ())
        for device in (new, old)
        for each in (alone, spread)
        for name in ("humming_mxfp8", "humming_mxfp8_grouped")
    ]
    assert table == [True, False, False, True, True, False, True, False]
    reason = str(backend("humming_mxfp8").check(spread, new).reasons[0])
    assert reason == "not for expert parallelism: over 4 ranks vLLM runs Humming's grouped kernels"


def test_humming_needs_its_package() -> None:
    without = dataclasses.replace(gpu(90), packages={"vllm": NEWEST})
    reason = backend("humming_mxfp8").check(layer(), without).reasons[0]
    assert reason.code == "package" and "humming-kernels>=0.1.10" in str(reason)
    too_old = gpu(90, vllm="0.24.0")
    assert codes_of(backend("humming_mxfp8").check(layer(), too_old)) == {"package"}


def test_humming_reads_another_order_before_its_wgmma_kernels_changed() -> None:
    kinds = {
        (capability, version): backend("humming_mxfp8")
        .plan(layer(), gpu(capability, **{"humming-kernels": version}))
        .layout
        for capability in (80, 90)
        for version in ("0.1.10", "0.1.16", "0.1.17", "0.1.19")
    }
    assert {key for key, kind in kinds.items() if kind == "transposed"} == {(90, "0.1.10"), (90, "0.1.16")}


@pytest.mark.parametrize("top_k", [8, 11, 32])
def test_the_limit_of_ten_experts_per_token_is_deep_seeks_alone(top_k: int) -> None:
    for name in ("trtllm_mxfp8", "trtllm_mxfp8_monolithic"):
        assert backend(name).check(layer(top_k=top_k), gpu(100)).reasons == ()
    assert codes_of(backend("trtllm_mxfp8").check(layer(top_k=33), gpu(100))) == {"top_k.max"}


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"experts": 130}, {"experts.multiple"}),
        ({"experts": 516}, {"experts.max"}),
        ({"experts": 8, "top_k": 8}, {"experts.more_than_top_k"}),
        ({"routing": Routing(method="topk")}, {"routing"}),
        ({"routing": Routing(method="renormalize", hash_routing=True)}, {"routing.hashed"}),
        ({"routing": Routing(method="deepseekv3")}, {"routing.groups"}),
        ({"routing": Routing(method="deepseekv3", num_groups=8, top_k_groups=4)}, set()),
        ({"routing": Routing(method="deepseekv3", num_groups=8, top_k_groups=5)}, {"routing.top_k_groups"}),
        ({"routing": Routing(method="deepseekv3", num_groups=1, top_k_groups=1), "top_k": 9}, {"routing.top_k"}),
        (
            {"routing": Routing(method="deepseekv3", num_groups=1, top_k_groups=1), "top_k": 22, "experts": 512},
            set(),
        ),
        # 8 experts a group: 8 of them are all that a token may choose from.
        ({"routing": Routing(method="deepseekv3", num_groups=16, top_k_groups=1), "top_k": 8}, {"routing.group_size"}),
        ({"routing": Routing(method="deepseekv3", num_groups=16, top_k_groups=1), "top_k": 7}, set()),
        ({"routing": Routing(method="deepseekv3", num_groups=7, top_k_groups=4)}, {"routing.group_size"}),
        # Not asked where routing is not grouped.
        ({"routing": Routing(method="renormalize", num_groups=16, top_k_groups=1), "top_k": 8}, set()),
    ],
)
def test_only_monolithic_backends_route_inside_the_kernel(changes: dict[str, Any], codes: set[str]) -> None:
    assert codes_of(backend("trtllm_mxfp8_monolithic").check(layer(**changes), gpu(100))) == codes


def test_the_modular_class_is_given_routed_ids() -> None:
    for changes in ({"routing": Routing(method="topk")}, {"routing": Routing(method="deepseekv3")}, {"experts": 1024}):
        assert backend("trtllm_mxfp8").check(layer(**changes), gpu(100)).reasons == ()


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "plan"),
    [
        ("marlin_mxfp8", 2688, 1856, (2688, 1856)),
        ("marlin_mxfp8", 2688, 928, (2688, 960)),
        ("humming_mxfp8", 2688, 1856, (2688, 1856)),
        ("trtllm_mxfp8_monolithic", 2688, 1856, (2816, 1920)),
        ("deep_gemm_mxfp8", 2048, 96, (2048, 128)),
    ],
)
def test_plans_are_padded_to_the_kernels_multiples(name: str, hidden: int, inner: int, plan: tuple[int, int]) -> None:
    chosen = layer(hidden_size=hidden, intermediate_size=inner)
    found = backend(name).plan(chosen, at_home(name))
    assert (found.hidden_size, found.intermediate_size) == plan
    assert backend(name).check(chosen, at_home(name)).reasons == ()


@pytest.mark.parametrize("name", ["marlin_mxfp8", "deep_gemm_mxfp8"])
def test_hidden_sizes_other_than_multiples_of_128(name: str) -> None:
    verdict = backend(name).check(layer(hidden_size=2880), at_home(name))
    assert isinstance(verdict, Rejected)
    assert str(verdict.reasons[0]) == "hidden size 2880 is not a multiple of 128 (2880 mod 128 = 64)"


# --- What they make of an expert -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["marlin_mxfp8", "humming_mxfp8"])
def test_biases_are_given_in_the_models_dtype(name: str) -> None:
    each = layer(hidden_size=128, intermediate_size=64, has_bias=True)
    source = expert(each)
    source["w13_bias"] = source["w13_bias"].float()
    converted = backend(name).convert(source, each, backend(name).plan(each, at_home(name)))
    assert converted["w13_bias"].dtype == converted["w2_bias"].dtype == torch.bfloat16


def test_schemes_without_activation_quantization_are_theirs_too() -> None:
    each = layer(scheme=MXFP8)
    assert backend("marlin_mxfp8").check(each, gpu(80)).reasons == ()


# --- Explicit choices ----------------------------------------------------------------------------------------------


def test_a_named_kernel_for_another_card_is_refused_with_its_reason() -> None:
    with pytest.raises(NoBackendError, match=r"needs compute capability .*sm_100.*sm_90"):
        decide(layer(), gpu(90), Settings(), moe_backend="flashinfer_trtllm")


def test_names_of_this_projects_backends_are_invalid_for_moe_backend() -> None:
    with pytest.raises(
        NoBackendError, match=r"Did you mean humming\? Valid are auto, .*humming, marlin; this project's own names"
    ):
        decide(layer(), gpu(80), Settings(), moe_backend="humming_mxfp8")


def test_a_name_of_another_format_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(NoBackendError) as caught:
        decide(layer(), gpu(90), Settings(), moe_backend="flashinfer_cutlass")
    words = str(caught.value)
    for name in ("auto", "deep_gemm", "emulation", "flashinfer_trtllm", "humming", "marlin"):
        assert name in words


def test_when_everything_is_switched_off_every_candidate_says_so() -> None:
    names = tuple(each.name for each in default_registry() if "mxfp8" in each.schemes)
    with pytest.raises(NoBackendError) as caught:
        decide(layer(hidden_size=4096, intermediate_size=1536), gpu(90), Settings(disable=names))
    words = str(caught.value)
    assert all(name in words for name in names) and words.count("disabled by") == len(names) + 1, (
        "each, and once for all"
    )


def test_layers_may_choose_for_themselves() -> None:
    settings = Settings(overrides=(Override(r"layers\.[0-9]\.", "marlin"),))
    chosen = {
        index: decide(layer(layer=f"model.layers.{index}.mlp.experts"), gpu(90), settings).backend for index in (9, 10)
    }
    assert chosen == {9: "marlin_mxfp8", 10: "humming_mxfp8"}
