"""What vLLM's code for integer weights passes to its kernels and makes of weights, against ours, in every supported
release.

Pieces of each release run from its sources; see `tests.lib.stock_code`.
"""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.lib.bit_moves import undone
from tests.lib.cases import RELU2, SILU
from tests.lib.releases import some_releases
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, load, tree
from tests.lib.stock_rules import (
    alternating_rows,
    backend,
    converted,
    every_release,
    experts,
    home,
    machine,
    node_of,
    number,
    offered,
    refused,
    shuffled_rows,
    skip_unless_taken,
    source_of,
    stock_of,
    tiled_scales,
    usual,
    wrappers,
)
from tests.lib.stock_rules import wna16_scheme as scheme
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.layouts.mma_tiles import pack_nibbles, pack_tiles
from vllm_moe_oracle.releases.supported import RELEASES
from vllm_moe_oracle.schemes import wna16

# --- What the classes pass ------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("name", [name for name in wrappers("wna16") if 8 in backend(name).capabilities.bits])
def test_bytes_are_claimed_by_the_name_that_ours_asks_by(name: str, release: str) -> None:
    skip_unless_taken(release, name)
    found, names = stock_of(release, name, home(name))
    assert found._supports_quant_scheme(names["kInt8Static"], None)


@every_release
def test_marlins_types_and_orders(release: str) -> None:
    path = f"{FUSED_MOE}/experts/marlin_moe.py"
    made = source_of(release, path, "MarlinExpertsBase", "__init__")
    assert ("use_int8_w8a16" in made) == (number(release) >= (0, 23))
    assert ("w13_g_idx_sort_indices" in made) == (number(release) < (0, 30))
    kinds = source_of(release, path, "MarlinExpertsBase", "quant_type_id")
    assert "scalar_types.uint4.id" in kinds and "scalar_types.uint4b8.id" in kinds
    assert "scalar_types.uint8.id" not in kinds  # no zero points of bytes
    for name in ("MarlinExperts", "BatchedMarlinExperts"):
        apply = source_of(release, path, name, "apply")
        assert "w1_zeros=self.w1_zp" in apply and "bias1=self.w1_bias" in apply


@every_release
def test_the_triton_kernel_gets_no_bias_and_reads_64_columns(release: str) -> None:
    apply = source_of(release, f"{FUSED_MOE}/experts/triton_moe.py", "TritonWNA16Experts", "apply")
    assert "bias" not in apply and "self.quant_config.w1_zp" in apply
    blocks = source_of(release, f"{FUSED_MOE}/fused_moe.py", "get_moe_wna16_block_config")
    assert "'BLOCK_SIZE_N': 32, 'BLOCK_SIZE_K': 64" in blocks and "'BLOCK_SIZE_N': 64, 'BLOCK_SIZE_K': 32" in blocks
    since = number(release) >= (0, 28)
    activation = source_of(release, f"{FUSED_MOE}/modular_kernel.py", "FusedMoEExpertsModular", "activation")
    assert ("self.activation_config" in activation) == since


@every_release
def test_the_trtllm_class_passes_nothing_of_the_activation(release: str) -> None:
    skip_unless_taken(release, "trtllm_mxint4")
    source = source_of(release, f"{QUANTIZATION}/utils/flashinfer_mxint4_moe.py", "flashinfer_trtllm_mxint4_moe")
    for given in ("gemm1_alpha=None", "gemm1_beta=None", "gemm1_clamp_limit=None"):
        assert given in source
    assert "bias=" not in source.replace("routing_bias=", "")


@every_release
def test_the_cpu_class_asks_for_amx_and_routes_tokens_itself_before_0_30(release: str) -> None:
    """That the operator needs no AMX is in the test of the operator, which has none on machines without."""
    if not offered(release, "cpu_int4"):
        pytest.skip("the release does not offer it")
    node = node_of(release, f"{FUSED_MOE}/experts/cpu_moe.py", "CPUExpertsInt4")
    modular = "Modular" in " ".join(map(ast.unparse, node.bases))
    assert modular == (number(release) >= (0, 30)) == ("package" not in refused("cpu_int4", release))
    assert number(release) < (0, 30) or "_is_amx_tile_supported" in ast.unparse(node)
    assert not backend("cpu_int4").check_stock_class


@every_release
def test_the_trtllm_class_claims_no_activation_before_0_25_1(release: str) -> None:
    if not offered(release, "trtllm_mxint4"):
        pytest.skip("the release does not offer it")
    found, names = stock_of(release, "trtllm_mxint4", 100)
    claimed = found._supports_activation(names["MoEActivation"]("silu"))
    assert claimed == (number(release) >= (0, 25, 1)) == ("package" not in refused("trtllm_mxint4", release))


# --- Conversions ----------------------------------------------------------------------------------------------------

FORMATS = {
    "int4": scheme(4, 32),
    "int4 channel": scheme(4, -1),
    "int4 zeros": scheme(4, 32, zeros=True),
    "int8": scheme(8, 64),
    "int8 channel": scheme(8, -1),
    "act order": scheme(4, 32, order="group"),
}


def originals(layer: Problem) -> dict[str, torch.Tensor]:
    """Canonical tensors of three experts. Features are sorted within a group, as a checkpoint's always are."""
    found = experts(layer)
    for name in [name for name in found if name.endswith("_order")]:
        found[name] = found[name].unflatten(1, (-1, layer.scheme.group_size)).sort().values.flatten(1)
    return found


def files(layer: Problem, canonical: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What vLLM loads of them: int32 along the input features, which come last; zero points along the rows."""
    bits, found = layer.scheme.bits, {}
    for matrix in ("w13", "w2"):
        codes = wna16.unpack_codes(canonical[matrix], bits)
        if f"{matrix}_order" in canonical:
            order = canonical[f"{matrix}_order"].long()
            codes = torch.stack([each[:, one.argsort()] for each, one in zip(codes, order, strict=True)])
            groups = torch.arange(order.shape[1]) // layer.scheme.group_size
            found[f"{matrix}_g_idx"] = torch.stack([groups[one.argsort()] for one in order]).to(torch.int32)
        found[matrix] = _words(codes, bits)
        if f"{matrix}_zero_point" in canonical:
            zeros = canonical[f"{matrix}_zero_point"].transpose(1, 2)
            found[f"{matrix}_zero_point"] = _words(zeros, bits).transpose(1, 2)
        for suffix in ("_scale", "_bias"):
            if f"{matrix}{suffix}" in canonical:
                found[f"{matrix}{suffix}"] = canonical[f"{matrix}{suffix}"].clone()
    return found


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    words = codes.unflatten(-1, (-1, 32 // bits)).to(torch.int64)
    shifts = bits * torch.arange(32 // bits)
    return (words << shifts).sum(-1).to(torch.uint32).view(torch.int32)


class MoeOperators:
    """vLLM's operators where they repack. The tests of the layout prove these against PTX and stock's reference."""

    @staticmethod
    def gptq_marlin_moe_repack(words: torch.Tensor, *args: Any, **extra: Any) -> Any:
        """Codes `[E, K * bits / 32, N]`, and until 0.29 the features in the order of the result."""
        assert not extra.get("is_a_8bit")
        given = [each for each in (*args, *extra.values()) if not isinstance(each, bool)]
        order = given.pop(0) if isinstance(given[0], torch.Tensor) else None
        _, _, bits = given
        found = []
        for index, each in enumerate(words):
            codes = each.T.contiguous().view(torch.uint8)
            if order is not None and order[index].numel():
                codes = wna16.pack_codes(wna16.unpack_codes(codes, bits)[:, order[index].long()], bits)
            found.append(pack_nibbles(codes) if bits == 4 else pack_tiles(codes))
        return torch.stack(found)


def marlins(release: str, layer: Problem, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stock makes of them for Marlin."""
    bits, group = layer.scheme.bits, layer.scheme.group_size
    general = load(
        release, f"{QUANTIZATION}/utils/marlin_utils.py", round_up=lambda a, b: -(-a // b) * b, numpy=numpy,
        **{name: _quant_utils(release)[name] for name in ("pack_cols", "unpack_cols")},
    )  # fmt: skip
    wanted = (
        "marlin_moe_permute_scales", "marlin_permute_bias", "marlin_moe_padded_intermediate",
        "moe_packed_to_marlin_zero_points",
    )  # fmt: skip
    names = load(
        release, f"{FUSED_MOE}/oracle/int_wna16.py", ops=MoeOperators,
        **{name: general[name] for name in wanted if name in general},
    )  # fmt: skip
    function = names["_process_weights_marlin"]
    inputs_first = number(release) < (0, 31)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if inputs_first and tensor.dim() == 3 else tensor
        for name, tensor in loaded.items()
    }
    none = torch.empty(3, 0, dtype=torch.int32)
    kind = SimpleNamespace(
        pack_factor=32 // bits, group_size=group, desc_act="w13_g_idx" in loaded,
        quant_type=SimpleNamespace(size_bits=bits),
    )  # fmt: skip
    given: dict[str, Any] = {
        "layer": SimpleNamespace(
            intermediate_size_per_partition=layer.intermediate_size, num_groups_w13=2, num_groups_w2=2
        ),
        "quant_config": kind, "input_dtype": None, "num_bits": bits, "pack_factor": 32 // bits, "group_size": group,
        "actorder": "group" if kind.desc_act else None,
        "w13_qweight": turned["w13"], "w2_qweight": turned["w2"],
        "w13_scales": turned["w13_scale"], "w2_scales": turned["w2_scale"],
        "w13_g_idx": turned.get("w13_g_idx", none), "w2_g_idx": turned.get("w2_g_idx", none),
        "w13_qzeros": turned.get("w13_zero_point"), "w2_qzeros": turned.get("w2_zero_point"),
        "w13_bias": turned.get("w13_bias"), "w2_bias": turned.get("w2_bias"),
    }  # fmt: skip
    found = function(**{name: given[name] for name in inspect.signature(function).parameters})
    results = ["w13", "w2", "w13_scale", "w2_scale"]
    if len(found) == 14:
        results += ["w13_group_index", "w2_group_index", "w13_order", "w2_order"]
    results += ["w13_zero_point", "w2_zero_point", "", "", "w13_bias", "w2_bias"]
    return {name: tensor for name, tensor in zip(results, found, strict=True) if name and tensor is not None}


def _quant_utils(release: str) -> dict[str, Any]:
    """Functions of a file whose classes need more than this."""
    wanted = ("pack_cols", "unpack_cols", "get_pack_factor", "convert_packed_uint4b8_to_signed_int4_inplace")
    body = tree(release, f"{QUANTIZATION}/utils/quant_utils.py").body
    found = [ast.unparse(node) for node in body if getattr(node, "name", "") in wanted]
    found = [each.replace("assert t.is_cuda, 'tensor must be on gpu'", "pass") for each in found]
    names: dict[str, Any] = {"torch": torch, "numpy": numpy}
    exec("\n".join(("from __future__ import annotations", *found)), names)
    return names


@every_release
@pytest.mark.parametrize("form", FORMATS)
def test_conversion_for_marlin_is_stocks(release: str, form: str) -> None:
    if refused("marlin_wna16", release, 80, scheme=FORMATS[form]):
        pytest.skip("the backend does not take it")
    stocks = source_of(release, f"{FUSED_MOE}/oracle/int_wna16.py", "_process_weights_marlin")
    if form == "int4 zeros" and "moe_packed_to_marlin_zero_points" not in stocks:
        pytest.skip("stock has zero points for AWQ's files alone")
    for inner, activation, biases in ((128, SILU, False), (96, SILU, True), (128, RELU2, True)):
        if FORMATS[form].group_size == 64 and inner % 64:
            inner = 192
        layer = usual(
            "marlin_wna16", hidden_size=256, intermediate_size=inner, scheme=FORMATS[form], activation=activation,
            has_bias=biases, experts=3, top_k=1,
        )  # fmt: skip
        plan = backend("marlin_wna16").plan(layer, machine(release, 80))
        if plan.pads(layer) and (number(release) < (0, 25, 1) or form == "act order" or not activation.gated):
            continue  # stock does not pad it
        canonical = originals(layer)
        theirs = marlins(release, layer, files(layer, canonical))
        made = converted("marlin_wna16", canonical, layer, machine(release, 80))
        assert {name for name, tensor in theirs.items() if tensor.numel()} == made.keys()
        if "w13_order" in made:
            # Within a group stock's sort leaves features in any order; back in their own they must be the same.
            for name in ("w13", "w2"):
                found = [_in_order(each.pop(name), each.pop(f"{name}_order")) for each in (made, theirs)]
                assert torch.equal(*found), (name, layer)
                if release == "0.22.1":  # which sorts the groups, and then hands over those that it did not sort
                    theirs[f"{name}_group_index"] = theirs[f"{name}_group_index"].sort(dim=-1).values
        for name, ours in made.items():
            assert ours.shape == theirs[name].shape, (name, layer)
            assert torch.equal(ours, theirs[name].to(ours.dtype)), (name, layer)


def _in_order(packed: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits by the input features' own order, `[E, N, K]`."""
    shape = packed.shape[2] // 2, 8 * packed.shape[1]
    codes = [wna16.unpack_codes(undone(pack_nibbles, each, shape), 4) for each in packed]
    return torch.stack([each[:, one.long().argsort()] for each, one in zip(codes, order, strict=True)])


@every_release
def test_scales_of_a_group_as_wide_as_w2_are_ordered_as_the_kernel_reads(release: str) -> None:
    """Stock orders the first product's scales by the second's width, and takes 16 groups of it for one a row; the
    operator goes by the number of scales."""
    layer = usual("marlin_wna16", hidden_size=256, intermediate_size=128, scheme=scheme(4, 128), experts=3, top_k=1)
    canonical = originals(layer)
    theirs = marlins(release, layer, files(layer, canonical))
    plan = backend("marlin_wna16").plan(layer, machine(release, 90))
    ours = backend("marlin_wna16").convert({name: tensor[0] for name, tensor in canonical.items()}, layer, plan)
    assert torch.equal(ours["w2_scale"], theirs["w2_scale"][0])
    assert not torch.equal(ours["w13_scale"], theirs["w13_scale"][0])
    wide = usual("marlin_wna16", hidden_size=256, intermediate_size=256, scheme=scheme(4, 128), experts=3, top_k=1)
    right = marlins(release, wide, files(layer, canonical) | {"w2_scale": originals(wide)["w2_scale"]})
    assert torch.equal(ours["w13_scale"], right["w13_scale"][0])


@some_releases(*(each for each in RELEASES if number(each) >= (0, 31)))
def test_conversion_for_triton_is_stocks(release: str) -> None:
    names = load(release, f"{FUSED_MOE}/oracle/int_wna16.py")
    for form in ("int4", "int4 zeros", "int8"):
        layer = usual(
            "triton_wna16", hidden_size=256, intermediate_size=128, scheme=FORMATS[form], experts=3, top_k=1
        )  # fmt: skip
        canonical = originals(layer)
        order = ("w13", "w2", "w13_scale", "w2_scale", "w13_zero_point", "w2_zero_point")
        loaded = files(layer, canonical)
        theirs = names["convert_to_wna16_moe_kernel_format"](
            names["WNA16MoEBackend"].TRITON, None, None, None, *map(loaded.get, order)
        )
        ours = converted("triton_wna16", canonical, layer, machine(release, 90))
        for name, tensor in zip(order, theirs[:6], strict=True):
            assert (tensor is None) == (name not in ours), (name, form)
            assert tensor is None or torch.equal(ours[name], tensor), (name, form)


def _flashinfer() -> dict[str, Any]:
    """FlashInfer's functions, from its documentation."""

    def shuffled(cache: Any, matrix: torch.Tensor, tile: int, **extra: Any) -> torch.Tensor:
        assert matrix.shape[0] % 128 == 0
        return shuffled_rows(matrix, tile)

    def alternating(cache: Any, matrix: torch.Tensor, tile: int, **extra: Any) -> torch.Tensor:
        return alternating_rows(matrix)[shuffled(cache, matrix, tile)]

    return {
        "block_scale_interleave": tiled_scales,
        "convert_to_block_layout": lambda matrix, width: torch.stack(matrix.split(width, dim=1)),
        "_maybe_get_cached_w3_w1_permute_indices": alternating,
        "get_w2_permute_indices_with_cache": shuffled,
    }


@every_release
def test_conversion_for_trtllm_is_stocks(release: str) -> None:
    skip_unless_taken(release, "trtllm_mxint4")
    layer = usual("trtllm_mxint4", hidden_size=256, intermediate_size=256, experts=3, top_k=1)
    canonical = originals(layer)
    loaded = files(layer, canonical)
    signs = _quant_utils(release)["convert_packed_uint4b8_to_signed_int4_inplace"]
    swap = load(release, f"{QUANTIZATION}/utils/flashinfer_fp4_moe.py")["reorder_w1w3_to_w3w1"]
    names = load(
        release, f"{QUANTIZATION}/utils/flashinfer_mxint4_moe.py", reorder_w1w3_to_w3w1=swap,
        convert_packed_uint4b8_to_signed_int4_inplace=signs, **_flashinfer(),
    )  # fmt: skip
    theirs = names["prepare_static_weights_for_trtllm_mxint4_moe"](
        loaded["w13"], loaded["w13_scale"], loaded["w2"], loaded["w2_scale"]
    )
    plan = backend("trtllm_mxint4").plan(layer, machine(release, 100))
    assert not plan.pads(layer)
    ours = converted("trtllm_mxint4", canonical, layer, machine(release, 100))
    for own, name in (("w13", "gemm1_weights"), ("w2", "gemm2_weights"), ("w13_scale", "gemm1_scales"),
                      ("w2_scale", "gemm2_scales")):  # fmt: skip
        assert ours[own].dtype == theirs[name].dtype and torch.equal(ours[own], theirs[name]), own


@every_release
def test_the_triton_kernel_can_be_launched_for_any_number_of_tokens(release: str) -> None:
    pytest.importorskip("vllm", reason="the patches are vLLM's")
    from vllm_moe_oracle.compat import registration

    def power(value: int) -> int:
        return 1 << (value - 1).bit_length()

    environment = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    given = {"current_platform": Platform(90), "envs": environment, "next_power_of_2": power}
    stock_module = SimpleNamespace(**load(release, f"{FUSED_MOE}/fused_moe.py", **given))
    patch = registration._int4_small_batch(stock_module)  # type: ignore[arg-type]
    assert (patch is None) == (number(release) >= (0, 27))
    configured = stock_module.get_default_config if patch is None else patch.replacement
    for tokens in (1, 2, 3, 7, 8, 20, 64, 513):
        for bits in (4, 8):
            for group in (32, 64, 128, 2048):
                found = configured(tokens, 128, 768, 2048, 8, f"int{bits}_w{bits}a16", [0, group])
                assert {"BLOCK_SIZE_M", "GROUP_SIZE_M", "SPLIT_K"} <= found.keys()
                assert found["BLOCK_SIZE_M"] == power(found["BLOCK_SIZE_M"])


@every_release
def test_stock_orders_scales_of_marlins_w13_by_the_columns_of_w2(release: str) -> None:
    """So they are wrong where a rank's intermediate size is at most one group, and the hidden size is more: the one
    conversion that is not stock's byte for byte."""
    calls = [
        {each.arg: ast.unparse(each.value) for each in node.keywords}
        for node in ast.walk(ast.parse(source_of(release, f"{FUSED_MOE}/oracle/int_wna16.py")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "marlin_moe_permute_scales"
    ]
    first = [call for call in calls if "w13" in call["s"]]
    assert first and {call["size_k"] for call in first} == {"layer.intermediate_size_per_partition"}
