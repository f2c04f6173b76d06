"""Limits and conversions of Marlin, Humming, triton_kernels and the CPU's experts for MXFP4 against the stock classes
behind them, in every supported release.

Pieces of each release run from its sources; see `stock_code`. Where a backend refuses what stock's class claims, the
reason stands in `STRICTER`; where it takes what the class refuses, in `LIFTED`.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest
import torch
from stock_code import FUSED_MOE, QUANTIZATION, Platform, load
from stock_rules import (
    ACTIVATIONS,
    CAPABILITIES,
    UNTRIED,
    claims_activation,
    codes_of,
    every_release,
    globals_of,
    members_of,
    number,
    source_of,
    stock_class,
    tree_of,
)
from test_backends_mxfp4 import GPT_OSS, HALVES, backend, expert, layer, usual

from vllm_moe_oracle.compat import RELEASES
from vllm_moe_oracle.layouts.pack import pack_nibbles
from vllm_moe_oracle.oracle.problem import Activation, Device, Problem, Routing
from vllm_moe_oracle.oracle.registry import default_registry

OAI = "gpt_oss_triton_kernels_moe"
CLASSES = {
    "marlin_mxfp4": ("marlin_moe", "MarlinExperts"),
    "marlin_mxfp4_batched": ("marlin_moe", "BatchedMarlinExperts"),
    "humming_mxfp4": ("fused_humming_moe", "HummingIndexedExperts"),
    "humming_mxfp4_grouped": ("fused_humming_moe", "HummingGroupedExperts"),
    "triton_mxfp4": (OAI, "OAITritonExperts"),
    "triton_mxfp4_monolithic": (OAI, "OAITritonMxfp4ExpertsMonolithic"),
    "triton_mxfp4_unfused": (OAI, "UnfusedOAITritonExperts"),
}
STOCK_NAMES = {
    "marlin_mxfp4": "MARLIN",
    "marlin_mxfp4_batched": "BATCHED_MARLIN",
    "humming_mxfp4": "HUMMING",
    "humming_mxfp4_grouped": "HUMMING",
    "triton_mxfp4": "TRITON",
    "triton_mxfp4_monolithic": "TRITON",
    "triton_mxfp4_unfused": "TRITON_UNFUSED",
    "cpu_mxfp4": "CPU",
}
_SM75 = "bfloat16 needs sm_80, and the kernels have no float16 with e8m0 scales"
STRICTER: dict[tuple[str, str | int], str] = {
    **{(name, 75): _SM75 for name in CLASSES if not name.startswith("triton")},
    **{
        (name, capability): "the order of the codes depends on the CUDA compiler that the library finds"
        for name in ("humming_mxfp4", "humming_mxfp4_grouped")
        for capability in (100, 103, 110, 120, 121)
    },
    **{(name, 110): "nobody ran the package on it" for name in CLASSES if name.startswith("triton")},
}
"""What is refused although stock's class claims it: capability or activation, and why."""

HOME = {"marlin_mxfp4": 80, "marlin_mxfp4_batched": 80}
every_class = pytest.mark.parametrize("name", CLASSES)


def stock(release: str, name: str, capability: int = 90) -> tuple[Any, dict[str, Any]]:
    """A stock class of a release on a device of some capability, and the names of its file."""
    return stock_class(
        release, *CLASSES[name], Platform(capability), has_triton_kernels=lambda: True,
        get_triton_kernels_version=lambda: None, functools=_Functools,
    )  # fmt: skip


class _Functools:
    cache = staticmethod(lambda function: function)


def machine(release: str, capability: int) -> Device:
    packages = {"vllm": release, "humming-kernels": "0.1.19"}
    return Device("cuda", f"sm_{capability}", capability, packages=packages)


def refused(name: str, release: str, capability: int, **changes: Any) -> set[str]:
    return codes_of(name, usual(name, **changes), machine(release, capability))


# --- What the classes claim -----------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("name", STOCK_NAMES)
def test_a_release_that_does_not_offer_the_kernel_is_refused(name: str, release: str) -> None:
    known = STOCK_NAMES[name] in members_of(release, f"{FUSED_MOE}/oracle/mxfp4.py", "Mxfp4MoeBackend")
    if name == "cpu_mxfp4":
        assert known  # and the oldest CPU build that the tests serve on is the lower limit
        return
    codes = refused(name, release, HOME.get(name, 90))
    if name.startswith("humming") and number(release) < (0, 25, 1):
        assert "package" in codes  # offered there, by a humming-kernels that nobody here looked at
        return
    if name == "humming_mxfp4_grouped" and number(release) < (0, 30):
        assert "humming.kind" in codes
        return
    assert known and "package" not in codes


@every_release
@every_class
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(name: str, release: str, capability: int) -> None:
    found, names = stock(release, name, capability)
    claimed = bool(found._supports_current_device()) and bool(found._supports_quant_scheme(names["kMxfp4Static"], None))
    ours = not {"capability", "capability.since"} & refused(name, release, capability)
    if (name, capability) in STRICTER and claimed:
        assert not ours
    else:
        assert ours == claimed


@every_release
@every_class
def test_activations(name: str, release: str) -> None:
    if name.startswith("humming") and number(release) < (0, 25, 1):
        pytest.skip("the release's humming-kernels is not offered")
    found, names = stock(release, name, HOME.get(name, 90))
    for stock_name, activation in ACTIVATIONS.items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = refused(name, release, HOME.get(name, 90), activation=activation)
        ours = not codes & {"activation", "activation.parameters"}
        assert ours == (claimed and (name, stock_name) not in UNTRIED), stock_name


@every_release
def test_routing_inside_the_kernel(release: str) -> None:
    name = "triton_mxfp4_monolithic"
    found, names = stock(release, name)
    names["RoutingMethodType"] = methods = load(release, f"{FUSED_MOE}/config.py")["RoutingMethodType"]
    for method in methods:
        claimed = found._supports_routing_method(method, names["kMxfp4Static"], None)
        codes = refused(name, release, 90, routing=Routing(method=method.name.lower()))
        assert ("routing" not in codes) == claimed, method
    made = source_of(release, f"{FUSED_MOE}/experts/{OAI}.py", "OAITritonMxfp4ExpertsMonolithic", "__init__")
    assert "self.renormalize = moe_config.routing_method in" in made


# --- What the classes pass ------------------------------------------------------------------------------------------


@every_release
def test_the_fused_triton_kernels_get_gpt_oss_s_constants(release: str) -> None:
    function = source_of(release, f"{FUSED_MOE}/experts/{OAI}.py", "triton_kernel_fused_experts")
    assert "swiglu_alpha: float=1.702" in function and "swiglu_limit: float=7.0" in function
    for name in ("OAITritonExperts", "OAITritonMxfp4ExpertsMonolithic"):
        assert "alpha" not in source_of(release, f"{FUSED_MOE}/experts/{OAI}.py", name)
    for given in ("quant_config.w1_bias", "quant_config.w2_bias", "quant_config.w1_precision"):
        assert given in function


@every_release
def test_the_unfused_triton_kernels_get_alpha_and_limit(release: str) -> None:
    text = source_of(release, f"{FUSED_MOE}/experts/{OAI}.py", "UnfusedOAITritonExperts", "activation")
    assert "swigluoai_and_mul(output, input, alpha, limit)" in text
    assert "quant_config.gemm1_alpha" in text and "quant_config.gemm1_clamp_limit" in text
    assert ("quant_config.gemm1_clamp_limit, alpha, beta" in text) == (number(release) >= (0, 24))


@every_release
def test_empty_slots_and_tops_that_are_no_power_of_two(release: str) -> None:
    whole = source_of(release, f"{FUSED_MOE}/experts/{OAI}.py")
    since = number(release) >= (0, 25, 1)
    assert ("expert_map[topk_ids]" in whole) == (not since)
    assert ("masked_moe_sum" in whole) == since
    assert ("_patch_legacy_routing_for_nonpow2_topk" in whole) == since


@every_release
def test_the_rows_of_gpt_oss_have_its_constants_built_in(release: str) -> None:
    text = source_of(release, f"{FUSED_MOE}/activation.py")
    assert "swigluoai_and_mul(output, input)" in text or "7.0, 1.702" in text or "alpha=1.702" in text


@every_release
def test_one_generation_of_triton_kernels_is_brought(release: str) -> None:
    matmul = tree_of(release, "vllm/third_party/triton_kernels/matmul_ogs.py")
    tensor = tree_of(release, "vllm/third_party/triton_kernels/tensor.py")
    assert "weight_scale" in ast.unparse(matmul)
    assert not any(getattr(node, "name", "") == "SparseMatrix" for node in tensor.body)


# --- Padding --------------------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("name", ["marlin_mxfp4", "triton_mxfp4", "triton_mxfp4_monolithic", "triton_mxfp4_unfused"])
def test_sizes_against_stocks_rounding(release: str, name: str) -> None:
    names = globals_of(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(90),
        round_up=lambda a, b: -(-a // b) * b, triton_kernels_version=None, get_triton_kernels_version=lambda: None,
    )  # fmt: skip
    kind = names["Mxfp4MoeBackend"][STOCK_NAMES[name]]
    for hidden, inner in ((2880, 2880), (2880, 1440), (2880, 736), (2880, 384), (7168, 256), (2048, 768)):
        plan = backend(name).plan(layer(hidden_size=hidden, intermediate_size=inner), machine(release, 90))
        found = (plan.hidden_size, plan.intermediate_size)
        expected = tuple(names["mxfp4_round_up_hidden_size_and_intermediate_size"](kind, hidden, inner))
        if name == "marlin_mxfp4":  # whole tiles are enough: never more than stock's, which are whole tiles too
            assert all(ours <= theirs for ours, theirs in zip(found, expected, strict=True))
            assert found[0] % 128 == 0 and found[1] % 64 == 0
        else:
            assert found == expected


# --- Conversions ----------------------------------------------------------------------------------------------------


class Operators:
    """vLLM's operators where they repack. The tests of the layout prove this one against PTX and stock's reference."""

    @staticmethod
    def gptq_marlin_repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **extra: Any) -> Any:
        """Codes `[K/8, N]` of eight columns a word."""
        assert num_bits == 4 and b_q_weight.shape == (size_k // 8, size_n) and not extra.get("is_a_8bit")
        return pack_nibbles(b_q_weight.T.contiguous().view(torch.uint8))


@every_release
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (512, 384), (256, 192)])
@pytest.mark.parametrize("activation", [GPT_OSS, Activation("silu")], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_marlins_conversion_is_stocks(
    release: str, hidden: int, inner: int, activation: Activation, biases: bool
) -> None:
    each = layer(hidden_size=hidden, intermediate_size=inner, activation=activation, has_bias=biases)
    originals = [expert(each, seed) for seed in range(3)]
    stacked = {key: torch.stack([one[key] for one in originals]) for key in originals[0]}
    loaded = {key: _as_loaded(each, key, tensor) for key, tensor in stacked.items()}
    general = globals_of(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    given = {key: general[key] for key in ("marlin_permute_scales", "marlin_permute_bias") if key in general}
    names = globals_of(
        release, f"{QUANTIZATION}/utils/marlin_utils_fp4.py", ops=Operators, current_platform=Platform(90),
        get_marlin_input_dtype=lambda *args: None, **given,
    )  # fmt: skip
    stock_layer = type("Layer", (), {"params_dtype": torch.bfloat16})()
    theirs = names["prepare_moe_mxfp4_layer_for_marlin"](
        stock_layer, loaded["w13"], loaded["w2"], loaded["w13_scale"], loaded["w2_scale"], loaded.get("w13_bias"),
        loaded.get("w2_bias"),
    )  # fmt: skip
    chosen = backend("marlin_mxfp4")
    plan = chosen.plan(each, machine(release, 90))
    assert not plan.pads(each)
    converted = [chosen.convert(one, each, plan) for one in originals]
    ours = {key: torch.stack([one[key].view(torch.uint8) for one in converted]) for key in converted[0]}
    keys = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
    for key, tensor in zip(keys, theirs, strict=True):
        assert (key in ours) == (tensor is not None)
        if tensor is not None:
            assert torch.equal(ours[key].flatten(), tensor.contiguous().view(torch.uint8).flatten()), key


def _as_loaded(each: Problem, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Canonical tensors as a checkpoint has them: gpt-oss's rows alternate gate and up."""
    if not each.activation.interleaved or not key.startswith("w13"):
        return tensor
    return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)


def test_every_backend_of_mxfp4_is_in_a_test_of_stock_rules() -> None:
    """One that wraps a class of vLLM and stands in neither file would be tested against nothing."""
    import test_backends_mxfp4_stock_rules as others

    wrapping = {each.name for each in default_registry().for_scheme("mxfp4") if each.stock_class}
    assert wrapping <= CLASSES.keys() | others.CLASSES.keys()


def test_what_the_cpus_class_asks_and_the_operator_does_not() -> None:
    """AMX, since 0.28, and rows that alternate. That the operator needs neither is in the tests of the backend."""
    for release in RELEASES:
        text = source_of(release, f"{FUSED_MOE}/experts/cpu_moe.py", "CPUExpertsMxfp4", "_supports_current_device")
        assert ("_is_amx_tile_supported" in text) == (number(release) >= (0, 28))
    assert dataclasses.replace(GPT_OSS, interleaved=False) == HALVES
    device = Device("cpu", "a CPU", features=("avx512f", "avx512_bf16"), packages={"vllm": "0.32.0"})
    assert backend("cpu_mxfp4").check(layer(activation=HALVES), device).reasons == ()
