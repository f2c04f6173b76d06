"""What vLLM's code for MXFP8 passes to its kernels and makes of weights, against ours, in every supported release.

Pieces of each release run from its sources; see `tests.lib.stock_code`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version

import vllm_moe_oracle
from tests.lib.cases import RELU2, SILU
from tests.lib.releases import DEFAULT_RELEASE, some_releases
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load, tree
from tests.lib.stock_rules import (
    CLASSES,
    DeepGemmScales,
    Operators,
    alternating_rows,
    assert_same_bits,
    backend,
    bases_of,
    converted,
    differs,
    every_release,
    experts,
    gpu,
    home,
    humming_conversion,
    node_of,
    number,
    refused,
    shuffled_rows,
    skip_unless_taken,
    source_of,
    stock_of,
    usual,
)
from vllm_moe_oracle.backends._humming import COLUMN_MULTIPLE, ROW_MULTIPLE
from vllm_moe_oracle.core.problem import Routing
from vllm_moe_oracle.oracle.checked_backend import unchecked
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import RELEASES, packages_of


@every_release
def test_humming_pads_as_stock_pads_for_it(release: str) -> None:
    """Rows and columns that our conversion pads to, and tells the library of, are stock's."""
    skip_unless_taken(release, "humming_mxfp8")
    text = humming_conversion(release)
    assert set(re.findall(r"pad_n_to_multiple=(\d+)", text)) == {str(ROW_MULTIPLE)}
    assert set(re.findall(r"pad_k_to_multiple=(\d+)", text)) == {str(COLUMN_MULTIPLE)}
    each = usual("humming_mxfp8", hidden_size=2688, intermediate_size=928)
    made = converted("humming_mxfp8", experts(each), each, gpu(90, vllm=release))
    rows, columns = -(-2 * 928 // ROW_MULTIPLE) * ROW_MULTIPLE, -(-928 // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    # Codes by K / 16 and 4 N words of four bytes.
    assert made["w13"].view(torch.uint8).shape == (3, 2688 // 16, 4 * rows * 4)
    assert made["w2"].view(torch.uint8).shape == (3, columns // 16, 4 * -(-2688 // ROW_MULTIPLE) * ROW_MULTIPLE * 4)


@every_release
def test_hummings_conversion_knows_the_ungated_experts_it_gets(release: str) -> None:
    """At first it asked for twice their rows."""
    skip_unless_taken(release, "humming_mxfp8")
    text = humming_conversion(release)
    twice = "'shape_n': layer.moe_config.intermediate_size_per_partition * 2" in text
    assert twice != ("(2 if is_gated else 1)" in text)
    assert twice == differs("humming_mxfp8", "silu_no_mul", release)


@every_release
@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if "HummingGrouped" in each.class_name])
def test_hummings_grouped_kernels_run_where_they_are_taken(name: str, release: str) -> None:
    text = source_of(release, CLASSES[name].path, "get_humming_moe_gemm_type")
    assert ("moe_parallel_config.use_ep" in text) == ("humming.kernel_kind" not in refused(name, release))


HUMMING = [name for name, each in CLASSES.items() if each.kernel == "HUMMING"]


@every_release
@pytest.mark.parametrize("name", HUMMING)
def test_vllm_runs_hummings_class_on_the_layers_that_are_taken(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    if "humming.kernel_kind" in refused(name, release):
        pytest.skip("the backend refuses the layer there")
    found, names = stock_of(release, name, home(name))
    kinds = {each: SimpleNamespace(value=each.lower()) for each in ("INDEXED", "GROUPED_CONTIGUOUS", "GROUPED_MASKED")}
    names["HummingGemmType"] = SimpleNamespace(**kinds)
    names["envs"] = SimpleNamespace(VLLM_HUMMING_MOE_GEMM_TYPE=None)
    asked, spread = names["get_humming_moe_gemm_type"], usual(name).parallel.ep > 1
    config = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=spread))
    wanted = asked(config) if inspect.signature(asked).parameters else asked()
    assert found.humming_gemm_type().value == wanted


@every_release
@pytest.mark.parametrize("name", HUMMING)
def test_releases_with_an_old_humming_are_refused(name: str, release: str) -> None:
    brought = packages_of("cuda", release)["humming-kernels"]
    old = Version(brought) < Version(backend(name).capabilities.packages["humming-kernels"])
    assert old == ("package" in refused(name, release))


ON_INPUT = [name for name in CLASSES if default_registry()[name].capabilities.apply_router_weight_on_input]


@every_release
@pytest.mark.parametrize("name", ON_INPUT)
def test_router_weights_of_one_leave_them_to_the_prepare_step(name: str, release: str) -> None:
    """vLLM's prepare step multiplies the input, so a class gets weights of one: it must take the weights as an argument
    by name, as vLLM's kernel gives them, and multiply by these only."""
    skip_unless_taken(release, name)
    path, class_name, *_ = CLASSES[name]
    owners = [class_name, *bases_of(release, name)]
    defined = {each.name: each for each in tree(release, path).body if isinstance(each, ast.ClassDef)}
    applies = [
        member
        for owner in owners if owner in defined
        for member in defined[owner].body if isinstance(member, ast.FunctionDef) and member.name == "apply"
    ]  # fmt: skip
    arguments = {argument.arg for argument in applies[0].args.args}
    assert {"topk_weights", "apply_router_weight_on_input"} <= arguments
    kernel = source_of(release, f"{FUSED_MOE}/modular_kernel.py")
    call = "self.fused_experts.apply(output="
    assert call in kernel and "apply_router_weight_on_input=" in kernel[kernel.index(call) :][:900]


@pytest.mark.parametrize("name", ON_INPUT)
def test_the_builder_is_told_of_weights_on_the_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("deep_gemm"):
        pytest.importorskip("vllm")
        monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: True)

    class Told(Exception):
        pass

    class Recorder:
        def stock(self, class_name: str, **given: Any) -> Any:
            raise Told(given["apply_router_weight_on_input"])

    for on_input in (True, False):
        layer = usual(name, routing=Routing("default", apply_router_weight_on_input=on_input), top_k=1)
        with pytest.raises(Told, match=str(on_input)):
            plain = unchecked(backend(name))
            plain.build_experts(MagicMock(), layer, plain.plan(layer, gpu(90)), Recorder())  # type: ignore[arg-type]


TRTLLM = f"{FUSED_MOE}/experts/trtllm_fp8_moe.py"


@every_release
def test_what_the_trtllm_classes_pass(release: str) -> None:
    monolithic = source_of(release, TRTLLM, "TrtLlmFp8ExpertsMonolithic", "_apply_block_scale")
    modular = source_of(release, TRTLLM, "TrtLlmFp8ExpertsModular", "apply")
    assert "activation_type=" not in modular and "'activation_type'" not in modular
    assert "bias" not in modular.replace("routing_bias", "")
    assert "gemm1_bias" not in monolithic and "w1_bias" not in monolithic
    assert "global_num_experts % 4 == 0" in monolithic and "global_num_experts <= 512" in monolithic
    old = "n_group=num_expert_group or 0" in monolithic
    for name in ("trtllm_mxfp8", "trtllm_mxfp8_monolithic"):
        assert old == ("package" in refused(name, release))
    if old:
        assert "self.topk <= 10" in monolithic
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
def test_marlins_sizes(release: str) -> None:
    """Of hidden and intermediate sizes those are taken that stock's own question about its kernel takes."""
    platform = Platform(80)
    names = load(
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


# --- Conversions ----------------------------------------------------------------------------------------------------


@every_release
def test_conversion_for_marlin_is_stocks(release: str) -> None:
    general = load(release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b)
    given = {key: general[key] for key in ("marlin_permute_scales", "marlin_moe_padded_intermediate") if key in general}
    names = load(release, f"{QUANTIZATION}/utils/marlin_utils_fp8.py", ops=Operators, **given)
    for activation, hidden, inner in ((SILU, 256, 64), (SILU, 128, 192), (RELU2, 256, 128), (SILU, 128, 96)):
        if inner % 64 and number(release) < (0, 25, 1):
            continue  # stock does not pad yet
        each = usual("marlin_mxfp8", hidden_size=hidden, intermediate_size=inner, activation=activation)
        canonical = experts(each)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            theirs = names["prepare_mxfp8_moe_layer_for_marlin"](
                SimpleNamespace(), *(canonical[key] for key in ("w13", "w2", "w13_scale", "w2_scale"))
            )
        finally:
            torch.set_default_dtype(default)
        assert_same_bits(converted("marlin_mxfp8", canonical, each, gpu(80, vllm=release)), theirs, each)


def flashinfer_functions() -> dict[str, Any]:
    """FlashInfer's row orders, from its documentation, and vLLM's own tiling of scales."""
    path = f"{QUANTIZATION}/utils/mxfp8_utils.py"
    swizzle = load(DEFAULT_RELEASE, path, MXFP8_BLOCK_SIZE=32)["swizzle_mxfp8_scale"]

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


@some_releases(*RELEASES[1:])
def test_conversion_for_trtllm_is_stocks(release: str) -> None:
    pads = number(release) >= (0, 33)
    names = load(release, f"{QUANTIZATION}/utils/flashinfer_utils.py", **flashinfer_functions())
    sizes = ((256, 128), (512, 384), (384, 160), (128, 96))
    for activation, (hidden, inner) in itertools.product((SILU, RELU2), sizes):
        if (hidden % 256 or inner % 128) and not pads:
            continue  # stock does not pad yet
        each = usual("trtllm_mxfp8", hidden_size=hidden, intermediate_size=inner, activation=activation)
        canonical = experts(each)
        config = SimpleNamespace(is_act_and_mul=activation.gated)
        kind = SimpleNamespace(is_gated=activation.gated)
        theirs = names["prepare_fp8_moe_layer_for_fi"](
            layer=SimpleNamespace(moe_config=config, weight_block_size=[1, 32], activation=kind),
            w13=canonical["w13"].view(torch.uint8).view(torch.float8_e4m3fn), w2=canonical["w2"],
            w13_scale=canonical["w13_scale"], w13_input_scale=None, w2_scale=canonical["w2_scale"],
            w2_input_scale=None, is_trtllm=True,
        )  # fmt: skip
        ours = converted("trtllm_mxfp8_monolithic", canonical, each, gpu(100, vllm=release))
        plan = backend("trtllm_mxfp8_monolithic").plan(each, gpu(100, vllm=release))
        stocks = (config.hidden_dim, config.intermediate_size_per_partition) if pads else (hidden, inner)
        assert stocks == (plan.hidden_size, plan.intermediate_size)
        assert [ours[key].shape for key in ("w13", "w2", "w13_scale", "w2_scale")] == [each.shape for each in theirs]
        assert_same_bits(ours, theirs, each)


@some_releases(*RELEASES[2:])
def test_conversion_for_deep_gemm_is_stocks(release: str) -> None:
    transform = DeepGemmScales()
    names = load(
        release, f"{QUANTIZATION}/utils/fp8_utils.py", transform_sf_into_required_layout=transform,
        is_deep_gemm_e8m0_used=lambda: True,
    )  # fmt: skip
    each = usual("deep_gemm_mxfp8", hidden_size=256, intermediate_size=128)
    canonical = experts(each)
    w13, w2, *theirs = names["prepare_fp8_moe_layer_for_deepgemm"](
        canonical["w13"], canonical["w2"], canonical["w13_scale"], canonical["w2_scale"], (1, 32)
    )
    assert w13 is canonical["w13"] and w2 is canonical["w2"]
    asked = [(call["mn"], call["k"], call["recipe"]) for call in transform.asked]
    assert asked == [(256, 256, (1, 1, 32)), (256, 128, (1, 1, 32))]
    ours = converted("deep_gemm_mxfp8", canonical, each, gpu(100, vllm=release))
    assert_same_bits(ours, (w13, w2))
    for key, floats in zip(("w13_scale", "w2_scale"), theirs, strict=True):
        transform.assert_packed(ours[key], floats)
