"""FlashInfer's and DeepGEMM's backends for MXFP4 against the stock classes, paddings and conversions behind them, in
every supported release.

Pieces of each release run from its sources; see `stock_code`. Where a backend refuses what stock's class claims, the
reason stands in `STRICTER`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import problem
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load
from tests.lib.stock_rules import (
    ACTIVATIONS,
    CAPABILITIES,
    CLASSES,
    GPT_OSS,
    UNTRIED,
    backend,
    claims_activation,
    codes_of,
    converted,
    every_release,
    experts,
    globals_of,
    gpu,
    home,
    members_of,
    number,
    shuffled_rows,
    source_of,
    stock_class,
    tiled_scales,
)
from vllm_moe_oracle.core.problem import Activation, Problem, Routing, Scheme
from vllm_moe_oracle.layouts import cutlass_mixed

INPUT_KEYS = {"16bit": None, "mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym"}
_UNSEEN = "no checkpoint in MXFP4 has it, and the class was never run with it"
STRICTER: dict[tuple[str, str], str] = {
    **{("cutlass_mxfp4" + kind, "gelu_tanh"): _UNSEEN for kind in ("", "_a8")},
    **{
        ("cutlass_mxfp4" + kind, "relu2_no_mul"): "stock's conversion takes the rows for two halves"
        for kind in ("", "_a8")
    },
}
"""Activations that are refused although stock's class claims them, and why."""

NAMES = [name for name in CLASSES if "_mxfp4" in name and name.startswith(("trtllm", "cutlass", "deep_gemm"))]
every_backend = pytest.mark.parametrize("name", NAMES)


class Recent(Platform):
    """What vLLM's CUDA platform says of DeepGEMM since 0.24."""

    def support_deep_gemm(self) -> bool:
        return super().support_deep_gemm() or self.capability // 10 == 12


def stock(release: str, name: str, capability: int) -> tuple[Any, dict[str, Any]]:
    """A stock class of a release on a device of some capability, and the names of its file."""
    platform = (Recent if number(release) >= (0, 24) else Platform)(capability)
    return stock_class(
        release, *CLASSES[name][:2], platform, is_deep_gemm_supported=platform.support_deep_gemm,
        has_flashinfer=lambda: True, has_flashinfer_cutlass_fused_moe=lambda: True,
    )  # fmt: skip


def layer(name: str, packing: str = "gpt_oss", **changes: Any) -> Problem:
    """A layer whose checkpoint declares the precision that the backend consumes."""
    activation = Activation("silu") if name.startswith("deep_gemm") or packing != "gpt_oss" else GPT_OSS
    scheme = Scheme("mxfp4", 4, 32, packing)
    usual = {"scheme": scheme, "activation": activation, "routing": Routing(method="renormalize")}
    made = problem(**usual | changes)
    return dataclasses.replace(made, scheme=dataclasses.replace(scheme, activations=backend(name).activations(made)))


def refused(name: str, release: str, capability: int, **changes: Any) -> set[str]:
    return codes_of(name, layer(name, **changes), gpu(capability, vllm=release))


def keys(name: str, names: dict[str, Any]) -> tuple[Any, Any]:
    """What stock's oracle asks the class about: keys of weights and activations."""
    inputs = INPUT_KEYS[backend(name).activations(layer(name))]
    return names["kMxfp4Static"], None if inputs is None else names[inputs]


@every_release
@every_backend
def test_every_release_has_the_kernel(name: str, release: str) -> None:
    assert CLASSES[name][2] in members_of(release, f"{FUSED_MOE}/oracle/mxfp4.py", "Mxfp4MoeBackend")
    own = home(name)
    without = name == "deep_gemm_mxfp4" and number(release) < (0, 24)
    assert refused(name, release, own) == ({"package"} if without else set())


@every_release
@every_backend
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(name: str, release: str, capability: int) -> None:
    found, names = stock(release, name, capability)
    claimed = bool(found._supports_current_device()) and bool(found._supports_quant_scheme(*keys(name, names)))
    codes = refused(name, release, capability)
    # DeepGEMM before 0.24 is refused everywhere.
    ours = not codes & {"capability", "package"}
    assert ours == (claimed and not (name == "deep_gemm_mxfp4" and number(release) < (0, 24)))


@every_release
@every_backend
def test_activations(name: str, release: str) -> None:
    own = home(name)
    found, names = stock(release, name, own)
    for stock_name, activation in ACTIVATIONS.items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = refused(name, release, own, activation=activation)
        ours = not {code for code in codes if code.startswith("activation")}
        if (name, stock_name) in STRICTER or (name, stock_name) in UNTRIED:
            assert not ours
        elif name.startswith("cutlass") and stock_name == "silu" and number(release) < (0, 28):
            # Claimed, and computed with gpt-oss's constants.
            assert claimed and "activation.parameters.vllm_version" in codes
        else:
            assert ours == claimed, stock_name


@every_release
@pytest.mark.parametrize("name", ["trtllm_mxfp4_monolithic", "trtllm_mxfp4_a8_monolithic"])
def test_routing_inside_the_kernel(release: str, name: str) -> None:
    found, names = stock(release, name, 100)
    methods = load(release, f"{FUSED_MOE}/config.py")["RoutingMethodType"]
    names["RoutingMethodType"] = methods
    for method in methods:
        claimed = found._supports_routing_method(method, *keys(name, names))
        routing = Routing(method=method.name.lower(), num_groups=8, top_k_groups=4)
        codes = refused(name, release, 100, routing=routing)
        assert (not {"routing", "routing.vllm_version"} & codes) == claimed, method


# --- What the classes pass ------------------------------------------------------------------------------------------


@every_release
def test_trtllms_classes_pass_biases_and_parameters(release: str) -> None:
    for kind in ("Modular", "Monolithic"):
        text = source_of(release, f"{FUSED_MOE}/experts/trtllm_mxfp4_moe.py", f"TrtLlmMxfp4Experts{kind}")
        text = text.replace("'", "").replace(": ", "=")
        for given in ("gemm1_bias=self.w1_bias", "gemm2_bias=self.w2_bias", "gemm1_alpha=self.gemm1_alpha",
                      "gemm1_beta=self.gemm1_beta", "gemm1_clamp_limit=self.gemm1_clamp_limit"):  # fmt: skip
            assert given in text, (kind, given)
        # A rank's first expert: an even split is assumed.
        assert "self.ep_rank * self.local_num_experts" in text or "self.moe_config.ep_rank * local_num_experts" in text
    monolithic = source_of(release, f"{FUSED_MOE}/experts/trtllm_mxfp4_moe.py", "TrtLlmMxfp4ExpertsMonolithic")
    assert "routing_method_type=self.routing_method_type" in monolithic
    base = source_of(release, f"{FUSED_MOE}/experts/trtllm_mxfp4_moe.py", "TrtLlmMxfp4ExpertsBase")
    assert "self.routing_method_type = moe_config.routing_method" in base
    assert "super().__init__" not in base  # why the adapter runs the base initializer
    passes_all = number(release) >= (0, 27, 1)
    for given in ("routing_bias=e_score_correction_bias", "routed_scaling_factor=routed_scaling_factor"):
        assert (given in monolithic) == passes_all


@every_release
def test_cutlass_has_gpt_oss_s_constants_built_in_until_0_28(release: str) -> None:
    made = source_of(release, f"{FUSED_MOE}/experts/flashinfer_cutlass_moe.py", "FlashInferExperts", "__init__")
    constants = "[1.702] * self.num_experts" in made and "[7.0] * self.num_experts" in made
    assert constants == (number(release) < (0, 28))
    apply = source_of(release, f"{FUSED_MOE}/experts/flashinfer_cutlass_moe.py", "FlashInferExperts", "apply")
    for given in ("fc1_expert_biases = self.w1_bias", "swiglu_alpha = self.gemm1_alpha", "ep_rank=self.ep_rank"):
        assert given in apply


@every_release
def test_deep_gemm_adds_no_biases_and_passes_the_limit(release: str) -> None:
    text = source_of(release, f"{FUSED_MOE}/experts/deep_gemm_moe.py", "DeepGemmFP4Experts")
    assert "bias" not in text and "alpha" not in text.replace("alphas", "")
    assert "clamp_limit=self.gemm1_clamp_limit" in text and "_ACT_BLOCK_K = 128" in text


# --- Padding --------------------------------------------------------------------------------------------------------


@every_release
@every_backend
def test_sizes_are_rounded_as_stock_rounds_them(release: str, name: str) -> None:
    names = globals_of(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(100),
        round_up=lambda a, b: -(-a // b) * b, triton_kernels_version=None, get_triton_kernels_version=lambda: None,
    )  # fmt: skip
    kind = names["Mxfp4MoeBackend"][CLASSES[name][2]]
    rounded = names["mxfp4_round_up_hidden_size_and_intermediate_size"]
    for hidden, inner in ((2880, 2880), (2880, 1440), (2880, 736), (2880, 384), (7168, 256), (2048, 768), (96, 32)):
        each = layer(name, hidden_size=hidden, intermediate_size=inner)
        plan = backend(name).plan(each, gpu(home(name), vllm=release))
        found = (plan.hidden_size, plan.intermediate_size)
        expected = tuple(rounded(kind, hidden, inner))
        if name.startswith("deep_gemm") and expected != found:
            # Before stock rounded for DeepGEMM, it rounded to 64, which its packed scales do not take.
            assert expected == (hidden, -(-inner // 64) * 64)
            continue
        assert found == expected
        assert bool(plan.notes) == (found != (hidden, inner))


# --- Conversions ----------------------------------------------------------------------------------------------------


def padded_as_stock_loads(canonical: dict[str, torch.Tensor], plan: Any) -> dict[str, torch.Tensor]:
    """What stock's parameters hold after loading: larger, with zeros; but for our scales of padding, which are 1."""
    hidden, inner = plan.hidden_size, plan.intermediate_size
    shapes = {
        "w13": (2, inner, hidden // 2), "w13_scale": (2, inner, hidden // 32), "w13_bias": (2, inner),
        "w2": (1, hidden, inner // 2), "w2_scale": (1, hidden, inner // 32), "w2_bias": (1, hidden),
    }  # fmt: skip
    found = {}
    for name, tensor in canonical.items():
        halves, *sizes = shapes[name]
        split = tensor.unflatten(1, (halves, -1))
        large = torch.full((len(tensor), halves, *sizes), 127 if name.endswith("_scale") else 0, dtype=tensor.dtype)
        large[(slice(None), slice(None), *(slice(size) for size in split.shape[2:]))] = split
        found[name] = large.flatten(1, 2)
    return found


def alternating(tensor: torch.Tensor) -> torch.Tensor:
    """Rows g0, u0, g1, u1, ... of a layer's first product."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def row_order(cache: Any, matrix: torch.Tensor, tile: int, num_elts_per_sf: int | None = None) -> torch.Tensor:
    """FlashInfer's ``get_w2_permute_indices_with_cache``."""
    assert num_elts_per_sf in (None, 16)
    return shuffled_rows(matrix, tile)


def stock_conversions(release: str, generation: str) -> dict[str, Any]:
    """Stock's functions, with stand-ins for FlashInfer's."""

    def woven_codes(weight: torch.Tensor, kind: str = "fp4") -> torch.Tensor:
        assert kind == "fp4" and weight.is_contiguous()
        # The tests of the layout prove this one against the CUDA kernel.
        return torch.stack([cutlass_mixed.interleave_codes(each, generation) for each in weight])  # type: ignore[arg-type]

    def woven_scales(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
        experts, rows, columns = scales.shape
        if generation == "woven":
            return scales.reshape(experts, rows, columns // 4, 4).permute(0, 2, 1, 3).reshape(experts, columns // 4, -1)
        split = scales.reshape(experts, rows // 64, 4, 16, columns // 4, 4)
        return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // 64, columns // 4, 16, 16)

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        gate, up = tensor.chunk(2, dim=1)
        return torch.cat([up, gate], dim=1)

    return globals_of(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(100),
        get_triton_kernels_version=lambda: None, nvfp4_block_scale_interleave=tiled_scales,
        block_scale_interleave=tiled_scales, get_w2_permute_indices_with_cache=row_order, swap_w13_to_w31=swapped,
        interleave_moe_weights_for_sm90_mixed_gemm=woven_codes,
        interleave_moe_scales_for_sm90_mixed_gemm=woven_scales,
    )  # fmt: skip


SIZES = ((256, 128), (384, 160), (128, 96))
GENERATIONS = {"woven": "0.6.17", "scattered": "0.6.18"}


def same(ours: dict[str, torch.Tensor], theirs: Any) -> None:
    for key, tensor in zip(("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"), theirs, strict=True):
        assert (key in ours) == (tensor is not None), key
        if tensor is not None:
            assert ours[key].dtype == tensor.dtype and ours[key].numel() == tensor.numel(), key
            assert torch.equal(*(each.contiguous().view(torch.uint8).flatten() for each in (ours[key], tensor))), key


@every_release
@pytest.mark.parametrize("name", [each for each in NAMES if not each.startswith("deep_gemm")])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_gpt_oss_s_conversion_is_stocks(release: str, name: str, hidden: int, inner: int, generation: str) -> None:
    if generation == "woven" and name != "cutlass_mxfp4":
        pytest.skip("one layout for every FlashInfer")
    names = stock_conversions(release, generation)
    device = gpu(home(name), vllm=release, **{"flashinfer-python": GENERATIONS[generation]})
    each = layer(name, hidden_size=hidden, intermediate_size=inner, has_bias=True)
    canonical = experts(each)
    large = padded_as_stock_loads(canonical, backend(name).plan(each, device))
    given = {key: alternating(tensor) if key.startswith("w13") else tensor for key, tensor in large.items()}
    theirs = names["convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"](
        mxfp4_backend=names["Mxfp4MoeBackend"][CLASSES[name][2]], layer=None, _cache_permute_indices={},
        w13_weight=given["w13"], w2_weight=given["w2"], w13_weight_scale=given["w13_scale"],
        w2_weight_scale=given["w2_scale"], w13_bias=given["w13_bias"], w2_bias=given["w2_bias"],
    )  # fmt: skip
    same(converted(name, canonical, each, device), theirs)


@every_release
@pytest.mark.parametrize("name", [each for each in NAMES if not each.startswith("deep_gemm")])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize("biases", [False, True])
def test_other_models_conversion_is_stocks(release: str, name: str, hidden: int, inner: int, biases: bool) -> None:
    names = stock_conversions(release, "scattered")
    device = gpu(home(name), vllm=release)
    if name.startswith("cutlass") and number(release) < (0, 28):
        pytest.skip("stock converts for CUTLASS only for gpt-oss here")
    each = layer(name, packing="mxfp4", hidden_size=hidden, intermediate_size=inner, has_bias=biases)
    canonical = experts(each)
    given = padded_as_stock_loads(canonical, backend(name).plan(each, device))
    theirs = names["convert_weight_to_mxfp4_moe_kernel_format"](
        mxfp4_backend=names["Mxfp4MoeBackend"][CLASSES[name][2]], layer=None, _cache_permute_indices={},
        w13_weight=given["w13"], w2_weight=given["w2"], w13_weight_scale=given["w13_scale"],
        w2_weight_scale=given["w2_scale"], w13_bias=given.get("w13_bias"), w2_bias=given.get("w2_bias"),
    )  # fmt: skip
    same(converted(name, canonical, each, device), theirs)


@every_release
def test_deep_gemms_conversion_is_stocks(release: str) -> None:
    """Up to DeepGEMM's own function, which gets float32 scales and the recipe; what it makes of them is in the test of
    `pack_scales`."""
    calls: list[dict[str, Any]] = []

    def transform(**keywords: Any) -> torch.Tensor:
        calls.append(keywords)
        found: torch.Tensor = keywords["sf"]
        return found

    helper = globals_of(
        release, f"{QUANTIZATION}/utils/fp8_utils.py", transform_sf_into_required_layout=transform,
        is_deep_gemm_e8m0_used=lambda: True,
    )  # fmt: skip
    names = globals_of(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(100),
        get_triton_kernels_version=lambda: None,
        deepgemm_post_process_weight_scale_block=helper.get("deepgemm_post_process_weight_scale_block"),
        deepgemm_post_process_fp8_weight_block=helper.get("deepgemm_post_process_fp8_weight_block"),
        transform_sf_into_required_layout=transform,
        _upcast_e8m0_to_fp32=helper.get("_upcast_e8m0_to_fp32"),
    )  # fmt: skip
    device = gpu(100, vllm=release)
    each = layer("deep_gemm_mxfp4", packing="mxfp4", hidden_size=256, intermediate_size=128)
    canonical = experts(each)
    w13, w2, *theirs = names["convert_weight_to_mxfp4_moe_kernel_format"](
        mxfp4_backend=names["Mxfp4MoeBackend"].DEEPGEMM_MXFP4, layer=None, _cache_permute_indices={},
        w13_weight=canonical["w13"], w2_weight=canonical["w2"], w13_weight_scale=canonical["w13_scale"],
        w2_weight_scale=canonical["w2_scale"],
    )[:4]  # fmt: skip
    ours = converted("deep_gemm_mxfp4", canonical, each, device)
    assert torch.equal(w13, ours["w13"]) and torch.equal(w2, ours["w2"])
    if number(release) < (0, 24):
        # Float32 scales, which DeepGEMM packs at every call; the release is refused.
        assert not calls and "package" in refused("deep_gemm_mxfp4", release, 100)
        return
    assert [(call["mn"], call["k"], call["num_groups"]) for call in calls] == [(256, 256, 3), (256, 128, 3)]
    for key, floats in zip(("w13_scale", "w2_scale"), theirs, strict=True):
        assert floats.dtype == torch.float32
        exponents = (floats.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        words = ours[key].transpose(-1, -2).flatten().view(torch.uint8)
        assert torch.equal(words, exponents.flatten())
