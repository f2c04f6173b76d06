"""Limits and conversions of Marlin, Humming, triton_kernels and the CPU's experts for MXFP4 against the stock classes
behind them, in every supported release.

Pieces of each release run from its sources; see `stock_code`. Where a backend refuses what stock's class claims, the
reason stands in `STRICTER`; where it takes what the class refuses, in `LIFTED`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load
from tests.lib.stock_rules import (
    ACTIVATIONS,
    CAPABILITIES,
    CLASSES,
    GPT_OSS,
    HALVES,
    UNTRIED,
    Operators,
    backend,
    claims_activation,
    codes_of,
    converted,
    every_release,
    experts,
    globals_of,
    gpt_oss_layer,
    gpu,
    home,
    members_of,
    number,
    source_of,
    stock_of,
    tree_of,
    usual,
)
from vllm_moe_oracle.compat import RELEASES
from vllm_moe_oracle.core.problem import Activation, Device, Problem, Routing
from vllm_moe_oracle.oracle.registry import default_registry

OAI = "gpt_oss_triton_kernels_moe"
NAMES = [name for name in CLASSES if "_mxfp4" in name and name.startswith(("marlin", "humming", "triton"))]
_SM75 = "bfloat16 needs sm_80, and the kernels have no float16 with e8m0 scales"
STRICTER: dict[tuple[str, str | int], str] = {
    **{(name, 75): _SM75 for name in NAMES if not name.startswith("triton")},
    **{
        (name, capability): "the order of the codes depends on the CUDA compiler that the library finds"
        for name in ("humming_mxfp4", "humming_mxfp4_grouped")
        for capability in (100, 103, 110, 120, 121)
    },
    **{(name, 110): "nobody ran the package on it" for name in NAMES if name.startswith("triton")},
}
"""What is refused although stock's class claims it: capability or activation, and why."""

every_class = pytest.mark.parametrize("name", NAMES)


def stock(release: str, name: str, capability: int = 90) -> tuple[Any, Mapping[str, Any]]:
    """A stock class of a release on a device of some capability, and the names of its file."""
    return stock_of(
        release, name, capability, has_triton_kernels=lambda: True, get_triton_kernels_version=lambda: None,
        functools=_Functools,
    )  # fmt: skip


class _Functools:
    cache = staticmethod(lambda function: function)


def refused(name: str, release: str, capability: int, **changes: Any) -> set[str]:
    return codes_of(name, usual(name, **changes), gpu(capability, vllm=release))


# --- What the classes claim -----------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("name", [*NAMES, "cpu_mxfp4"])
def test_a_release_that_does_not_offer_the_kernel_is_refused(name: str, release: str) -> None:
    kernel = CLASSES[name][2] if name in CLASSES else "CPU"
    known = kernel in members_of(release, f"{FUSED_MOE}/oracle/mxfp4.py", "Mxfp4MoeBackend")
    if name == "cpu_mxfp4":
        assert known  # and the oldest CPU build that the tests serve on is the lower limit
        return
    codes = refused(name, release, home(name))
    if name.startswith("humming") and number(release) < (0, 25, 1):
        assert "package" in codes  # offered there, by a humming-kernels that nobody here looked at
        return
    if name == "humming_mxfp4_grouped" and number(release) < (0, 30):
        assert "humming.kernel_kind" in codes
        return
    assert known and "package" not in codes


@every_release
@every_class
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(name: str, release: str, capability: int) -> None:
    found, names = stock(release, name, capability)
    claimed = bool(found._supports_current_device()) and bool(found._supports_quant_scheme(names["kMxfp4Static"], None))
    ours = not {"capability", "capability.vllm_version"} & refused(name, release, capability)
    if (name, capability) in STRICTER and claimed:
        assert not ours
    else:
        assert ours == claimed


@every_release
@every_class
def test_activations(name: str, release: str) -> None:
    if name.startswith("humming") and number(release) < (0, 25, 1):
        pytest.skip("the release's humming-kernels is not offered")
    found, names = stock(release, name, home(name))
    for stock_name, activation in ACTIVATIONS.items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = refused(name, release, home(name), activation=activation)
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
    kind = names["Mxfp4MoeBackend"][CLASSES[name][2]]
    for hidden, inner in ((2880, 2880), (2880, 1440), (2880, 736), (2880, 384), (7168, 256), (2048, 768)):
        plan = backend(name).plan(gpt_oss_layer(hidden_size=hidden, intermediate_size=inner), gpu(90, vllm=release))
        found = (plan.hidden_size, plan.intermediate_size)
        expected = tuple(names["mxfp4_round_up_hidden_size_and_intermediate_size"](kind, hidden, inner))
        if name == "marlin_mxfp4":  # whole tiles are enough: never more than stock's, which are whole tiles too
            assert all(ours <= theirs for ours, theirs in zip(found, expected, strict=True))
            assert found[0] % 128 == 0 and found[1] % 64 == 0
        else:
            assert found == expected


# --- Conversions ----------------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (512, 384), (256, 192)])
@pytest.mark.parametrize("activation", [GPT_OSS, Activation("silu")], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_marlins_conversion_is_stocks(
    release: str, hidden: int, inner: int, activation: Activation, biases: bool
) -> None:
    each = gpt_oss_layer(hidden_size=hidden, intermediate_size=inner, activation=activation, has_bias=biases)
    canonical = experts(each)
    loaded = {key: _as_loaded(each, key, tensor) for key, tensor in canonical.items()}
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
    assert not backend("marlin_mxfp4").plan(each, gpu(90, vllm=release)).pads(each)
    ours = converted("marlin_mxfp4", canonical, each, gpu(90, vllm=release))
    keys = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
    for key, tensor in zip(keys, theirs, strict=True):
        assert (key in ours) == (tensor is not None)
        if tensor is not None:
            assert torch.equal(*(one.contiguous().view(torch.uint8).flatten() for one in (ours[key], tensor))), key


def _as_loaded(each: Problem, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Canonical tensors as a checkpoint has them: gpt-oss's rows alternate gate and up."""
    if not each.activation.interleaved or not key.startswith("w13"):
        return tensor
    return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)


def test_every_class_of_vllms_that_a_backend_wraps_is_compared() -> None:
    """A backend that is not in `CLASSES` would be tested against nothing."""
    wrapped = {each.name: each.stock_class.split(".")[-1].split(":") for each in default_registry() if each.stock_class}
    assert wrapped == {name: [file, class_name] for name, (file, class_name, _) in CLASSES.items()}


def test_what_the_cpus_class_asks_and_the_operator_does_not() -> None:
    """AMX, since 0.28, and rows that alternate. That the operator needs neither is in the tests of the backend."""
    for release in RELEASES:
        text = source_of(release, f"{FUSED_MOE}/experts/cpu_moe.py", "CPUExpertsMxfp4", "_supports_current_device")
        assert ("_is_amx_tile_supported" in text) == (number(release) >= (0, 28))
    device = Device("cpu", "a CPU", features=("avx512f", "avx512_bf16"), packages={"vllm": "0.32.0"})
    assert backend("cpu_mxfp4").check(gpt_oss_layer(activation=HALVES), device).reasons == ()
