"""What vLLM's code for MXFP4 passes to its kernels and makes of weights, against ours, in every supported release.

Pieces of each release run from its sources; see `tests.lib.stock_code`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.cases import SILU
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load, tree
from tests.lib.stock_rules import (
    CLASSES,
    GPT_OSS,
    HALVES,
    DeepGemmScales,
    Operators,
    assert_same_bits,
    backend,
    codes_of,
    converted,
    differs,
    every_release,
    experts,
    gpt_oss_layer,
    gpu,
    home,
    machine,
    number,
    refused,
    shuffled_rows,
    source_of,
    stock_kernels,
    tiled_scales,
    usual,
    wrappers,
)
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.layouts import cutlass_mixed
from vllm_moe_oracle.releases.supported import CPU_RELEASES

OAI = "gpt_oss_triton_kernels_moe"

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
def test_empty_slots_and_top_k_other_than_powers_of_two(release: str) -> None:
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
    matmul = tree(release, "vllm/third_party/triton_kernels/matmul_ogs.py")
    tensor = tree(release, "vllm/third_party/triton_kernels/tensor.py")
    assert "weight_scale" in ast.unparse(matmul)
    assert not any(getattr(node, "name", "") == "SparseMatrix" for node in tensor.body)


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
    for name in ("cutlass_mxfp4", "cutlass_mxfp4_a8"):
        assert constants == differs(name, "silu", release)
    apply = source_of(release, f"{FUSED_MOE}/experts/flashinfer_cutlass_moe.py", "FlashInferExperts", "apply")
    for given in ("fc1_expert_biases = self.w1_bias", "swiglu_alpha = self.gemm1_alpha", "ep_rank=self.ep_rank"):
        assert given in apply


@every_release
def test_deep_gemm_adds_no_biases_and_passes_the_limit(release: str) -> None:
    text = source_of(release, f"{FUSED_MOE}/experts/deep_gemm_moe.py", "DeepGemmFP4Experts")
    assert "bias" not in text and "alpha" not in text.replace("alphas", "")
    assert "clamp_limit=self.gemm1_clamp_limit" in text and "_ACT_BLOCK_K = 128" in text


@every_release
def test_the_cpu_class_asks_for_amx_since_0_28(release: str) -> None:
    """That the operator does not need it is in the tests of the backend."""
    text = source_of(release, f"{FUSED_MOE}/experts/cpu_moe.py", "CPUExpertsMxfp4", "_supports_current_device")
    assert ("_is_amx_tile_supported" in text) == (number(release) >= (0, 28))
    assert "CPU" in stock_kernels(release, "mxfp4")
    assert codes_of("cpu_mxfp4", gpt_oss_layer(activation=HALVES), machine(CPU_RELEASES[-1], 0)) == set()


# --- Conversions ----------------------------------------------------------------------------------------------------


@every_release
def test_conversion_for_marlin_is_stocks(release: str) -> None:
    general = load(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    given = {key: general[key] for key in ("marlin_permute_scales", "marlin_permute_bias") if key in general}
    names = load(
        release, f"{QUANTIZATION}/utils/marlin_utils_fp4.py", ops=Operators, current_platform=Platform(90),
        get_marlin_input_dtype=lambda *args: None, **given,
    )  # fmt: skip
    sizes = ((256, 128), (512, 384), (256, 192))
    for (hidden, inner), activation, biases in itertools.product(sizes, (GPT_OSS, SILU), (False, True)):
        each = gpt_oss_layer(hidden_size=hidden, intermediate_size=inner, activation=activation, has_bias=biases)
        canonical = experts(each)
        loaded = {key: as_loaded(each, key, tensor) for key, tensor in canonical.items()}
        theirs = names["prepare_moe_mxfp4_layer_for_marlin"](
            SimpleNamespace(params_dtype=torch.bfloat16), loaded["w13"], loaded["w2"], loaded["w13_scale"],
            loaded["w2_scale"], loaded.get("w13_bias"), loaded.get("w2_bias"),
        )  # fmt: skip
        assert not backend("marlin_mxfp4").plan(each, gpu(90, vllm=release)).pads(each)
        assert_same_bits(converted("marlin_mxfp4", canonical, each, gpu(90, vllm=release)), theirs, each)


def as_loaded(each: Problem, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Canonical tensors as a checkpoint has them: gpt-oss's rows alternate gate and up."""
    if not each.activation.interleaved or not key.startswith("w13"):
        return tensor
    return torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)


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

    def interleaved_codes(weight: torch.Tensor, kind: str = "fp4") -> torch.Tensor:
        assert kind == "fp4" and weight.is_contiguous()
        # The tests of the layout prove this one against the CUDA kernel.
        return torch.stack([cutlass_mixed.interleave_codes(each, generation) for each in weight])  # type: ignore[arg-type]

    def interleaved_scales(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
        experts, rows, columns = scales.shape
        if generation == "interleaved":
            return scales.reshape(experts, rows, columns // 4, 4).permute(0, 2, 1, 3).reshape(experts, columns // 4, -1)
        split = scales.reshape(experts, rows // 64, 4, 16, columns // 4, 4)
        return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // 64, columns // 4, 16, 16)

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        gate, up = tensor.chunk(2, dim=1)
        return torch.cat([up, gate], dim=1)

    return load(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(100),
        get_triton_kernels_version=lambda: None, nvfp4_block_scale_interleave=tiled_scales,
        block_scale_interleave=tiled_scales, get_w2_permute_indices_with_cache=row_order, swap_w13_to_w31=swapped,
        interleave_moe_weights_for_sm90_mixed_gemm=interleaved_codes,
        interleave_moe_scales_for_sm90_mixed_gemm=interleaved_scales,
    )  # fmt: skip


SIZES = ((256, 128), (384, 160), (128, 96))
WITH_FLASHINFER = [name for name in wrappers("mxfp4") if CLASSES[name].kernel.startswith("FLASHINFER")]


@every_release
@pytest.mark.parametrize("name", WITH_FLASHINFER)
def test_conversion_of_gpt_oss_is_stocks(release: str, name: str) -> None:
    generations = {"interleaved": "0.6.17", "folded": "0.6.18"}
    for (generation, flashinfer), (hidden, inner) in itertools.product(generations.items(), SIZES):
        if generation == "interleaved" and name != "cutlass_mxfp4":
            continue  # one layout for every FlashInfer
        names = stock_conversions(release, generation)
        device = gpu(home(name), vllm=release, **{"flashinfer-python": flashinfer})
        each = usual(name, hidden_size=hidden, intermediate_size=inner)
        canonical = experts(each)
        given = padded_as_stock_loads(canonical, backend(name).plan(each, device))
        given = {key: alternating(tensor) if key.startswith("w13") else tensor for key, tensor in given.items()}
        convert = names["convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"]
        theirs = convert(**weights_for_stock(names, name, given))
        assert_same_bits(converted(name, canonical, each, device), theirs, (generation, each))


@every_release
@pytest.mark.parametrize("name", WITH_FLASHINFER)
def test_conversion_of_other_models_is_stocks(release: str, name: str) -> None:
    if name.startswith("cutlass") and number(release) < (0, 28):
        pytest.skip("stock converts for CUTLASS only for gpt-oss here")
    names, device = stock_conversions(release, "folded"), gpu(home(name), vllm=release)
    for (hidden, inner), biases in itertools.product(SIZES, (False, True)):
        each = usual(
            name, hidden_size=hidden, intermediate_size=inner, has_bias=biases, activation=SILU,
            scheme=Scheme("mxfp4", 4, 32, "mxfp4"),
        )  # fmt: skip
        canonical = experts(each)
        given = padded_as_stock_loads(canonical, backend(name).plan(each, device))
        theirs = names["convert_weight_to_mxfp4_moe_kernel_format"](**weights_for_stock(names, name, given))
        assert_same_bits(converted(name, canonical, each, device), theirs, each)


def weights_for_stock(names: Mapping[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of stock's conversions for the kernel behind a backend."""
    given = {
        "mxfp4_backend": names["Mxfp4MoeBackend"][CLASSES[name].kernel],
        "layer": None,
        "_cache_permute_indices": {},
    }
    for matrix in ("w13", "w2"):
        given |= {f"{matrix}_weight": tensors[matrix], f"{matrix}_weight_scale": tensors[f"{matrix}_scale"]}
        given[f"{matrix}_bias"] = tensors.get(f"{matrix}_bias")
    return given


@every_release
def test_conversion_for_deep_gemm_is_stocks(release: str) -> None:
    transform = DeepGemmScales()
    helper = load(
        release, f"{QUANTIZATION}/utils/fp8_utils.py", transform_sf_into_required_layout=transform,
        is_deep_gemm_e8m0_used=lambda: True,
    )  # fmt: skip
    borrowed = ("deepgemm_post_process_weight_scale_block", "deepgemm_post_process_fp8_weight_block",
                "_upcast_e8m0_to_fp32")  # fmt: skip
    names = load(
        release, f"{FUSED_MOE}/oracle/mxfp4.py", current_platform=Platform(100),
        get_triton_kernels_version=lambda: None, transform_sf_into_required_layout=transform,
        **{key: helper.get(key) for key in borrowed},
    )  # fmt: skip
    name = "deep_gemm_mxfp4"
    each = usual(name, hidden_size=256, intermediate_size=128)
    canonical = experts(each)
    convert = names["convert_weight_to_mxfp4_moe_kernel_format"]
    w13, w2, *theirs = convert(**weights_for_stock(names, name, canonical))[:4]
    ours = converted(name, canonical, each, gpu(100, vllm=release))
    assert_same_bits(ours, (w13, w2))
    assert ("package" in refused(name, release)) == (not transform.asked)
    if not transform.asked:
        return  # float32 scales, which DeepGEMM packs at every call
    assert [(call["mn"], call["k"], call["num_groups"]) for call in transform.asked] == [(256, 256, 3), (256, 128, 3)]
    for key, floats in zip(("w13_scale", "w2_scale"), theirs, strict=True):
        transform.assert_packed(ours[key], floats)
