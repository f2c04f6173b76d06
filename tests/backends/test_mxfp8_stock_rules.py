"""Limits of MXFP8 backends against the stock classes that run them, in every supported release that has them.

Pieces of each release run from its sources; see `stock_code`. Where a backend refuses what stock's class claims, the
reason stands in `STRICTER`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import vllm_moe_oracle
from tests.lib.releases import ReleaseUnavailable, sources
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, tree
from tests.lib.stock_rules import (
    CAPABILITIES,
    CLASSES,
    IN_HALVES,
    UNTRIED,
    Operators,
    alternating_rows,
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
    node_of,
    number,
    shuffled_rows,
    source_of,
    stock_of,
    tree_of,
    usual,
)
from vllm_moe_oracle.compat import RELEASES
from vllm_moe_oracle.compat.humming import COLUMN_MULTIPLE, ROW_MULTIPLE
from vllm_moe_oracle.core.problem import Activation, Routing

_SM75 = "bfloat16 needs sm_80, and the kernels have no float16 with e8m0 scales"
STRICTER: dict[tuple[str, str | int], str] = {
    ("marlin_mxfp8", 75): _SM75,
    ("humming_mxfp8", 75): _SM75,
    ("humming_mxfp8_grouped", 75): _SM75,
    **{
        (name, capability): "the order of the codes depends on the CUDA compiler that the library finds"
        for name in ("humming_mxfp8", "humming_mxfp8_grouped")
        for capability in (100, 103, 110, 120, 121)
    },
    ("trtllm_mxfp8", "relu2_no_mul"): "the class claims it and never passes the activation to the kernel",
}
"""What is refused although stock's class claims it: capability or activation, and why."""
CLAIMED_BUT_NOT_CONVERTED = {
    (name, release): "the class claims experts without a gate, whose conversion asks for twice their rows"
    for name in ("humming_mxfp8", "humming_mxfp8_grouped")
    for release in ("0.25.1", "0.26.0")
}
"""The same of non-gated experts in some releases."""


def stock(release: str, name: str, capability: int = 100) -> tuple[Any, Mapping[str, Any]]:
    """A stock class of a release on a device of some capability, and the names of its file."""
    return stock_of(release, name, capability, is_deep_gemm_supported=Platform(capability).support_deep_gemm)


def offered(release: str, name: str) -> bool:
    """Whether stock's MXFP8 oracle of the release knows the kernel."""
    file = tree_of(release, f"{FUSED_MOE}/oracle/mxfp8.py")
    listed = next(
        node.value
        for node in file.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_SUPPORTED_BACKENDS"
    )
    assert isinstance(listed, ast.Tuple)
    return CLASSES[name][2] in [each.attr for each in listed.elts if isinstance(each, ast.Attribute)]


def refused(name: str, release: str, capability: int, **changes: Any) -> set[str]:
    return codes_of(name, usual(name, **changes), gpu(capability, vllm=release))


def skip_unless_offered(release: str, name: str) -> None:
    if not offered(release, name):
        pytest.skip("the release does not offer it")


every_backend = pytest.mark.parametrize("name", [name for name in CLASSES if "mxfp8" in name])


@every_release
@every_backend
def test_a_release_that_does_not_offer_the_kernel_is_refused(name: str, release: str) -> None:
    known = offered(release, name)
    codes = refused(name, release, home(name))
    if name == "humming_mxfp8_grouped" and "humming.kernel_kind" in codes:
        # Before 0.30 vLLM's grouped kernels ran only where an environment variable asked for them.
        assert number(release) < (0, 30, 0)
        return
    if name.startswith("trtllm") and release == "0.22.1":
        # Offered there; its class passes groups of 0 to a kernel that wants none, and takes SiLU alone.
        assert known and "package" in codes
        return
    assert ("package" not in codes) == known


@every_release
@every_backend
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capabilities(name: str, release: str, capability: int) -> None:
    skip_unless_offered(release, name)
    found, names = stock(release, name, capability)
    claimed = bool(found._supports_current_device()) and bool(
        found._supports_quant_scheme(names["kMxfp8Static"], names["kMxfp8Dynamic"])
    )
    ours = "capability" not in refused(name, release, capability)
    if (name, capability) in STRICTER:
        assert claimed and not ours
    else:
        assert ours == claimed


@every_release
@every_backend
def test_activations(name: str, release: str) -> None:
    skip_unless_offered(release, name)
    found, names = stock(release, name, home(name))
    for stock_name, activation in IN_HALVES.items():
        claimed = claims_activation(found, names, stock_name, activation)
        codes = refused(name, release, home(name), activation=activation)
        ours = not codes & {
            "activation", "activation.parameters", "activation.parameters.vllm_version", "activation.vllm_version",
        }  # fmt: skip
        unconverted = not activation.gated and (name, release) in CLAIMED_BUT_NOT_CONVERTED
        if (name, stock_name) in UNTRIED:
            assert not ours
        elif (name, stock_name) in STRICTER or unconverted:
            assert claimed and not ours
        else:
            assert ours == claimed, stock_name


def hummings_conversion(release: str) -> str:
    """Source of the file in which stock converts for Humming."""
    folder = sources(release) / f"{QUANTIZATION}/utils"
    file = folder / "humming_utils.py"
    return (file if file.exists() else folder / "humming/moe.py").read_text()


@every_release
def test_hummings_conversion_of_experts_without_a_gate(release: str) -> None:
    """What stands in `CLAIMED_BUT_NOT_CONVERTED` is what stock's conversion does."""
    skip_unless_offered(release, "humming_mxfp8")
    text = hummings_conversion(release)
    twice = '"shape_n": layer.moe_config.intermediate_size_per_partition * 2' in text
    assert twice != ("(2 if is_gated else 1)" in text)
    assert twice == (("humming_mxfp8", release) in CLAIMED_BUT_NOT_CONVERTED)


@every_release
def test_hummings_padding(release: str) -> None:
    """Rows and columns that our conversion pads to, and tells the library of, are stock's."""
    skip_unless_offered(release, "humming_mxfp8")
    text = hummings_conversion(release)
    assert set(re.findall(r"pad_n_to_multiple=(\d+)", text)) == {str(ROW_MULTIPLE)}
    assert set(re.findall(r"pad_k_to_multiple=(\d+)", text)) == {str(COLUMN_MULTIPLE)}
    each = usual("humming_mxfp8", hidden_size=2688, intermediate_size=928)
    made = converted("humming_mxfp8", experts(each), each, gpu(90, vllm=release))
    rows, columns = -(-2 * 928 // ROW_MULTIPLE) * ROW_MULTIPLE, -(-928 // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    # Codes by K / 16 and 4 N words of four bytes.
    assert made["w13"].view(torch.uint8).shape == (3, 2688 // 16, 4 * rows * 4)
    assert made["w2"].view(torch.uint8).shape == (3, columns // 16, 4 * -(-2688 // ROW_MULTIPLE) * ROW_MULTIPLE * 4)


@every_release
@every_backend
def test_formats_lora_and_batch_invariance(name: str, release: str) -> None:
    skip_unless_offered(release, name)
    found, names = stock(release, name, home(name))
    limits = backend(name).capabilities
    formats = names["mk"].FusedMoEActivationFormat
    assert found.activation_format() is formats.Standard
    assert found.activation_format() is not formats.BatchedExperts and limits.formats == ("standard",)
    assert limits.lora == ("LoRAExpertsMixin" in bases(release, name))
    # What vLLM claims is believed where this project has proven it, too.
    claimed = getattr(found, "_supports_batch_invariance", bool)()
    assert claimed or not limits.batch_invariant


@every_release
@every_backend
def test_moving_experts(name: str, release: str) -> None:
    """EPLB, and what else vLLM asks the classes about parallelism; all-to-alls of their own are asked at run time."""
    skip_unless_offered(release, name)
    found, _ = stock(release, name, home(name))
    plain = Parallel()
    claimed = {moves: bool(found._supports_parallel_config(plain.having(enable_eplb=moves))) for moves in (False, True)}
    assert claimed[False]
    # The grouped kernels' home is expert parallelism, which is none of the questions here.
    for moves in (False, True):
        assert ("eplb" not in refused(name, release, home(name), eplb=moves)) == claimed[moves]


class Parallel:
    """vLLM's `FusedMoEParallelConfig` of tensor parallelism alone: every question is answered with no."""

    def __getattr__(self, name: str) -> bool:
        return False

    def having(self, **answers: bool) -> Parallel:
        """The same with other answers."""
        changed = Parallel()
        vars(changed).update(answers)
        return changed


def bases(release: str, name: str) -> list[str]:
    """Names of the classes that a stock class is made of, in its file."""
    file, class_name, _ = CLASSES[name]
    nodes = {
        node.name: node
        for node in tree(release, f"{FUSED_MOE}/experts/{file}.py").body
        if isinstance(node, ast.ClassDef)
    }
    found, waiting = [], [class_name]
    while waiting:
        for base in nodes[waiting.pop()].bases:
            found.append(base.id if isinstance(base, ast.Name) else ast.unparse(base))
            waiting += [found[-1]] * (found[-1] in nodes)
    return found


@every_release
@pytest.mark.parametrize("name", ["marlin_mxfp8", "deep_gemm_mxfp8"])
def test_router_weights_multiply_the_input_where_the_class_lets_them(name: str, release: str) -> None:
    skip_unless_offered(release, name)
    file, class_name, _ = CLASSES[name]
    body = source_of(release, f"{FUSED_MOE}/experts/{file}.py", class_name, "apply")
    # vLLM multiplies it in before. DeepGEMM's class only leaves it out when it sums; Marlin's multiplies once more.
    again = "apply_router_weight_on_input=apply_router_weight_on_input" in body
    assert backend(name).capabilities.weight_on_input == (name == "deep_gemm_mxfp8")
    assert again if name == "marlin_mxfp8" else "apply_router_weight_on_input" in body


@every_release
def test_routing_inside_the_kernel(release: str) -> None:
    name = "trtllm_mxfp8_monolithic"
    methods = members_of(release, f"{FUSED_MOE}/config.py", "RoutingMethodType")
    found, names = stock(release, name)
    names["RoutingMethodType"] = type("Methods", (), {method: method for method in methods})
    for method in methods:
        claimed = found._supports_routing_method(method, names["kMxfp8Static"], names["kMxfp8Dynamic"])
        routing = Routing(method=method.lower(), num_groups=8, top_k_groups=4)
        ours = "routing" not in refused(name, release, 100, routing=routing)
        # `Simulated` is vLLM's own load test; 0.22.1's kernel is not offered here at all.
        assert ours == claimed or method == "Simulated" or (release == "0.22.1" and method == "Sigmoid"), method


TRTLLM = f"{FUSED_MOE}/experts/trtllm_fp8_moe.py"


@every_release
def test_what_the_trtllm_classes_pass(release: str) -> None:
    monolithic = source_of(release, TRTLLM, "TrtLlmFp8ExpertsMonolithic", "_apply_block_scale")
    modular = source_of(release, TRTLLM, "TrtLlmFp8ExpertsModular", "apply")
    assert "activation_type=" not in modular and "'activation_type'" not in modular
    assert "bias" not in modular.replace("routing_bias", "")
    assert "gemm1_bias" not in monolithic and "w1_bias" not in monolithic
    assert "global_num_experts % 4 == 0" in monolithic and "global_num_experts <= 512" in monolithic
    if release == "0.22.1":
        assert "self.topk <= 10" in monolithic and "n_group=num_expert_group or 0" in monolithic
        return
    assert "kwargs['activation_type'] = activation_type" in monolithic
    assert "n_group = num_expert_group or None" in monolithic
    # The limit on experts per token stands in the branch of DeepSeek's FP8, after the one of MXFP8.
    limit = re.search(r"self\.topk <= \d+", monolithic)
    assert limit and monolithic.index("Fp8QuantizationType.MxFp8") < limit.start()
    assert monolithic.index("Fp8QuantizationType.DeepSeekFp8") > monolithic.index("if is_mxfp8")
    passes_parameters = "gemm1_clamp_limit=self.gemm1_clamp_limit" in monolithic
    assert passes_parameters == (number(release) >= (0, 25, 1))


@every_release
def test_marlin_is_given_biases_and_parameters(release: str) -> None:
    path = f"{FUSED_MOE}/experts/marlin_moe.py"
    apply = source_of(release, path, "MarlinExperts", "apply")
    assert "bias1=self.w1_bias" in apply and "bias2=self.w2_bias" in apply
    new = "activation_config=self.activation_config" in apply
    assert new or "clamp_limit=self.gemm1_clamp_limit" in apply
    if number(release) >= (0, 24, 0):
        assert new or "gemm1_alpha=self.gemm1_alpha" in apply


@every_release
def test_deep_gemm_adds_no_biases(release: str) -> None:
    assert "bias" not in source_of(release, f"{FUSED_MOE}/experts/deep_gemm_moe.py", "DeepGemmExperts")


@every_release
def test_marlins_padding(release: str) -> None:
    names = globals_of(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    if "marlin_moe_padded_intermediate" not in names:
        assert number(release) < (0, 25, 1)
        return
    for inner in range(32, 2049, 32):
        plan = backend("marlin_mxfp8").plan(usual("marlin_mxfp8", intermediate_size=inner), gpu(80, vllm=release))
        assert plan.intermediate_size == names["marlin_moe_padded_intermediate"](inner, 32)


@every_release
def test_marlins_sizes(release: str) -> None:
    """Of hidden and intermediate sizes those are taken that stock's own question about its kernel takes."""
    platform = Platform(80)
    names = globals_of(
        release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b,
        current_platform=platform,
    )  # fmt: skip
    pads = "marlin_moe_padded_intermediate" in names
    more = {"allow_tile_padding": True} if pads else {}
    for hidden in (2048, 2688, 2880, 4032, 64, 96):
        for inner in (768, 1856, 928, 96, 160, 1536):
            sizes = {
                "hidden_dim": hidden, "hidden_size": hidden, "intermediate_size_per_partition": inner,
                "intermediate_size_per_partition_unpadded": inner, "apply_router_weight_on_input": False,
                "is_act_and_mul": True,
            }  # fmt: skip
            config = SimpleNamespace(**sizes)
            asked = SimpleNamespace(**sizes, moe_config=config, activation=MagicMock())
            claimed = bool(names["check_moe_marlin_supports_layer"](asked, 32, **more))
            codes = refused("marlin_mxfp8", release, 80, hidden_size=hidden, intermediate_size=inner)
            ours = not codes & {"alignment.hidden", "alignment.intermediate"}
            # Where stock does not pad yet, ours does.
            assert ours == claimed or (not pads and ours and inner % 64), (hidden, inner)


@every_release
def test_no_path_of_stock_gives_biases_later(release: str) -> None:
    """Where stock's online method puts biases into a finished quant config, it does so in what ours has instead."""
    node = node_of(release, f"{QUANTIZATION}/online/mxfp8.py", "Mxfp8OnlineMoEMethod")
    where = {
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef) and "_maybe_inject_biases" in ast.unparse(each)
    }
    assert bool(where) == (release == "0.22.1") == ("inject" in ast.unparse(node))
    ours = ast.parse((Path(vllm_moe_oracle.__file__).parent / "methods/base.py").read_text())
    (mixin,) = (each for each in ours.body if getattr(each, "name", "") == "OracleMoEMethod")
    assert isinstance(mixin, ast.ClassDef)
    assert where <= {each.name for each in mixin.body if isinstance(each, ast.FunctionDef)}
    sources_of_ours = Path(vllm_moe_oracle.__file__).parent.rglob("*.py")
    assert not [file for file in sources_of_ours if "inject_bias" in file.read_text()]


def test_trtllms_padding() -> None:
    source = source_of("0.33.0", f"{QUANTIZATION}/utils/flashinfer_utils.py", "prepare_fp8_moe_layer_for_fi")
    assert "min_alignment=128, hidden_alignment=256" in source


# --- Conversions ----------------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize(
    ("gated", "hidden", "inner"), [(True, 256, 64), (True, 128, 192), (False, 256, 128), (True, 128, 96)]
)
def test_marlins_conversion_is_stocks(release: str, gated: bool, hidden: int, inner: int) -> None:
    if inner % 64 and number(release) < (0, 25, 1):
        pytest.skip("stock does not pad yet")
    general = globals_of(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    given = {key: general[key] for key in ("marlin_permute_scales", "marlin_moe_padded_intermediate") if key in general}
    names = globals_of(release, f"{QUANTIZATION}/utils/marlin_utils_fp8.py", ops=Operators, **given)
    activation = Activation("silu") if gated else Activation("relu2", gated=False)
    each = usual("marlin_mxfp8", hidden_size=hidden, intermediate_size=inner, activation=activation)
    canonical = experts(each)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        theirs = names["prepare_mxfp8_moe_layer_for_marlin"](
            type("Layer", (), {})(), *(canonical[key] for key in ("w13", "w2", "w13_scale", "w2_scale"))
        )
    finally:
        torch.set_default_dtype(default)
    ours = converted("marlin_mxfp8", canonical, each, gpu(80, vllm=release))
    for key, tensor in zip(("w13", "w2", "w13_scale", "w2_scale"), theirs, strict=True):
        assert torch.equal(ours[key].view(torch.uint8).flatten(), tensor.contiguous().view(torch.uint8).flatten()), key


def flashinfer_functions() -> dict[str, Any]:
    """FlashInfer's row orders, from its documentation, and vLLM's own tiling of scales."""
    swizzle = globals_of("0.33.0", f"{QUANTIZATION}/utils/mxfp8_utils.py", MXFP8_BLOCK_SIZE=32)["swizzle_mxfp8_scale"]

    def interleaved(scales: torch.Tensor) -> torch.Tensor:
        return torch.stack([swizzle(each, M=each.shape[0], K=each.shape[1] * 32) for each in scales])

    return {
        "get_shuffle_matrix_a_row_indices": shuffled_rows,
        "get_reorder_rows_for_gated_act_gemm_row_indices": alternating_rows,
        "block_scale_interleave": interleaved,
        # What releases before 0.30 call instead, one matrix at a time.
        "reorder_rows_for_gated_act_gemm": lambda matrix: matrix[alternating_rows(matrix)],
        "shuffle_matrix_a": lambda matrix, tile: matrix[shuffled_rows(matrix, tile)],
        "shuffle_matrix_sf_a": lambda scales, tile: interleaved(scales[shuffled_rows(scales, tile)].unsqueeze(0)),
        "round_up": lambda a, b: -(-a // b) * b,
    }


@pytest.mark.parametrize("release", [each for each in RELEASES if each != "0.22.1"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (512, 384), (384, 160), (128, 96)])
def test_trtllms_conversion_is_stocks(release: str, gated: bool, hidden: int, inner: int) -> None:
    pads = release == "0.33.0"
    if (hidden % 256 or inner % 128) and not pads:
        pytest.skip("stock does not pad yet")
    given = flashinfer_functions()
    names = globals_of(release, f"{QUANTIZATION}/utils/flashinfer_utils.py", **given)
    ours_activation = Activation("silu") if gated else Activation("relu2", gated=False)
    each = usual("trtllm_mxfp8", hidden_size=hidden, intermediate_size=inner, activation=ours_activation)
    canonical = experts(each)
    config = type("Config", (), {"is_act_and_mul": gated})()
    activation = type("Kind", (), {"is_gated": gated})()
    stock_layer = type("Layer", (), {"moe_config": config, "weight_block_size": [1, 32], "activation": activation})()
    theirs = names["prepare_fp8_moe_layer_for_fi"](
        layer=stock_layer, w13=canonical["w13"].view(torch.uint8).view(torch.float8_e4m3fn), w2=canonical["w2"],
        w13_scale=canonical["w13_scale"], w13_input_scale=None, w2_scale=canonical["w2_scale"], w2_input_scale=None,
        is_trtllm=True,
    )  # fmt: skip
    ours = converted("trtllm_mxfp8_monolithic", canonical, each, gpu(100, vllm=release))
    plan = backend("trtllm_mxfp8_monolithic").plan(each, gpu(100, vllm=release))
    stocks = (config.hidden_dim, config.intermediate_size_per_partition) if pads else (hidden, inner)
    assert stocks == (plan.hidden_size, plan.intermediate_size)
    for key, tensor in zip(("w13", "w2", "w13_scale", "w2_scale"), theirs, strict=True):
        assert ours[key].shape == tensor.shape
        assert torch.equal(ours[key].view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("release", [each for each in RELEASES if each not in ("0.22.1", "0.23.0")])
def test_deep_gemms_conversion_is_stocks(release: str) -> None:
    """Up to DeepGEMM's own function, which gets float32 scales and the recipe; what it makes of them is in the test of
    `pack_scales`."""
    calls: list[dict[str, Any]] = []

    def transform(**keywords: Any) -> torch.Tensor:
        calls.append(keywords)
        scales: torch.Tensor = keywords["sf"]
        return scales

    names = globals_of(
        release, f"{QUANTIZATION}/utils/fp8_utils.py", transform_sf_into_required_layout=transform,
        is_deep_gemm_e8m0_used=lambda: True,
    )  # fmt: skip
    each = usual("deep_gemm_mxfp8", hidden_size=256, intermediate_size=128)
    canonical = experts(each)
    w13, w2, w13_scale, w2_scale = names["prepare_fp8_moe_layer_for_deepgemm"](
        canonical["w13"], canonical["w2"], canonical["w13_scale"], canonical["w2_scale"], (1, 32)
    )
    assert w13 is canonical["w13"] and w2 is canonical["w2"]
    assert [(call["mn"], call["k"], call["recipe"]) for call in calls] == [
        (256, 256, (1, 1, 32)),
        (256, 128, (1, 1, 32)),
    ]
    ours = converted("deep_gemm_mxfp8", canonical, each, gpu(100, vllm=release))
    for key, floats in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        exponents = (floats.view(torch.int32) >> 23).to(torch.uint8)
        words = ours[key].view(torch.int32).transpose(-1, -2).flatten().view(torch.uint8)
        assert torch.equal(words, exponents.flatten())
    assert math.prod(ours["w13"].shape) == canonical["w13"].numel()


def test_sources_are_there() -> None:
    try:
        assert all((sources(release) / "vllm").is_dir() for release in RELEASES)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))
