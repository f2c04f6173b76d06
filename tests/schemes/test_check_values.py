"""Damage in loaded weights is found in whichever expert it is, and what real checkpoints hold is no damage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.cases import problem
from tests.lib.mx_layers import MXFP4_LAYER, MXFP8_LAYER
from tests.lib.wna16_layers import PACKINGS, contents_of, layer_of
from vllm_moe_oracle import schemes
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.schemes import _checks, mxfp4, mxfp8, wna16

MX = {
    "mxfp8": MXFP8_LAYER,
    "mxfp4, alternating rows": MXFP4_LAYER,
    "mxfp4": problem(scheme=Scheme("mxfp4", 4, 32, "compressed-tensors"), experts=3, top_k=2, hidden_size=64,
                     intermediate_size=96),
}  # fmt: skip
INTEGERS = {
    f"{packing}, {bits} bit{', zero points' * zeros}{', act order' * (order != 'none')}": layer_of(
        packing, bits, zero_points=zeros, act_order=order, experts=3, bias=True
    )
    for packing in PACKINGS
    for bits in (4, 8)
    for zeros, order in ((False, "none"), (True, "none"), (False, "group"))
    if not (order == "group" and packing in ("awq", "moe_wna16", "compressed-tensors-int"))
    and not (bits == 8 and packing == "awq")
}


def healthy(layer: Problem, seed: int = 0) -> dict[str, Tensor]:
    """Weights of an MX layer as a quantizer writes them, as `read` returns them."""
    scheme = schemes.module(layer.scheme.name)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        rows, columns = (layer.w13_rows, layer.hidden_size) if name == "w13" else (
            layer.hidden_size, layer.intermediate_size)  # fmt: skip
        values = torch.randn(layer.local_experts, rows, columns, generator=generator) * 0.02
        found[name], found[f"{name}_scale"] = scheme.quantize(values)
    if layer.has_bias:
        found |= {f"{name}_bias": torch.zeros(found[name].shape[:2], dtype=torch.bfloat16) for name in ("w13", "w2")}
    return found


def integers(layer: Problem) -> dict[str, Tensor]:
    """Weights of an integer layer, as `read` returns them."""
    transposed = True if layer.scheme.packing.startswith("compressed") else None
    return wna16.read(contents_of(layer).parameters(transposed), layer, transposed)


def refused(layer: Problem, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        schemes.module(layer.scheme.name).check_values(tensors, layer)
    assert caught.value.where == layer.layer and "damaged" in caught.value.remedy
    return caught.value.rule


@given(st.sampled_from(["w13", "w2"]), st.sampled_from([0x7F, 0xFF]), st.integers(0, 2), st.data())
def test_a_nan_code_is_found_wherever_it_is(matrix: str, code: int, expert: int, data: st.DataObject) -> None:
    layer = MX["mxfp8"]
    tensors = healthy(layer)
    row, column = (data.draw(st.integers(0, size - 1)) for size in tensors[matrix].shape[1:])
    tensors[matrix].view(torch.uint8)[expert, row, column] = code
    words = refused(layer, tensors)
    assert f"{matrix}_weight of 1 of 3" in words
    assert f"the first is code {code} of local expert {expert} at [{row}, {column}]" in words


def test_nan_codes_are_found_in_experts_that_are_apart_in_memory() -> None:
    """As buffers lie that are larger than the checkpoint's tensors."""
    layer = MX["mxfp8"]
    tensors = healthy(layer)
    wide = torch.zeros(3, tensors["w2"][0].numel() + 48, dtype=torch.uint8)
    strided = wide[:, : tensors["w2"][0].numel()].view(torch.float8_e4m3fn).unflatten(1, tensors["w2"].shape[1:])
    strided.view(torch.uint8).copy_(tensors["w2"].view(torch.uint8))
    wide[:, -48:] = 0xFF  # not of the tensor
    mxfp8.check_values(tensors | {"w2": strided}, layer)
    strided.view(torch.uint8)[1, 2, 3] = 0x7F
    assert "local expert 1 at [2, 3]" in refused(layer, tensors | {"w2": strided})


@given(
    st.sampled_from(sorted(MX)), st.sampled_from(["w13", "w2"]), st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(0, 2), st.integers(0, 254), st.data(),
)  # fmt: skip
def test_a_scale_is_damage_exactly_where_a_weight_leaves_the_dtype(
    name: str, matrix: str, dtype: str, expert: int, code: int, data: st.DataObject
) -> None:
    layer = dataclasses.replace(MX[name], dtype=dtype)
    tensors = healthy(layer)
    row, block = (data.draw(st.integers(0, size - 1)) for size in tensors[f"{matrix}_scale"].shape[1:])
    tensors[f"{matrix}_scale"][expert, row, block] = code
    values = schemes.module(layer.scheme.name).dequantize(
        tensors[matrix][expert], tensors[f"{matrix}_scale"][expert], torch.float64
    )
    # 2**64 in float32; 65504 is float16's largest number.
    if bool((values.abs() < (65505.0 if dtype == "float16" else 2.0**64)).all()):
        schemes.module(layer.scheme.name).check_values(tensors, layer)
        return
    words = refused(layer, tensors)
    assert f"the weight of local expert {expert} in row {row}, input feature" in words and f"{matrix}_weight" in words


def test_what_pruning_and_padding_leave_is_no_damage() -> None:
    for name, layer in MX.items():
        tensors = healthy(layer)
        tensors["w13"][1].view(torch.uint8).zero_()
        tensors["w13_scale"][1] = 254  # over zeros
        tensors["w2_scale"][1] = 0
        schemes.module(layer.scheme.name).check_values(tensors, layer)
        tensors["w13"][1].view(torch.uint8)[0, 0] = 0x01
        assert "local expert 1 in row 0, input feature 0" in refused(layer, tensors), name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_an_integer_scale_that_is_too_large_is_found(name: str, matrix: str) -> None:
    layer = INTEGERS[name]
    tensors = integers(layer)
    wna16.check_values(tensors, layer)
    before = tensors[f"{matrix}_scale"]
    for expert in range(3):
        tensors[f"{matrix}_scale"] = before.clone()
        tensors[f"{matrix}_scale"][expert, -1, 0] = -3e38
        words = refused(layer, tensors)
        assert f"local expert {expert} in row" in words and matrix in words


@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize("scale", [0.0, 1e-40])
def test_groups_whose_weights_are_lost_are_logged_and_pruned_ones_are_not(
    matrix: str, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    layer = INTEGERS["compressed-tensors, 4 bit"]
    tensors = integers(layer)
    tensors[f"{matrix}_scale"][2] = 0  # a pruned expert
    constant = tensors[matrix][1].flatten()
    constant.zero_()  # a padded one
    tensors[f"{matrix}_scale"][1].flatten()[:3] = 0
    wna16.check_values(tensors, layer)
    assert not caplog.text
    tensors[f"{matrix}_scale"][0].flatten()[1] = scale
    wna16.check_values(tensors, layer)
    for words in ("1 scales in", "local expert 0 are zero or subnormal", matrix, layer.layer):
        assert words in caplog.text


@pytest.mark.parametrize("layer", [MX["mxfp8"], INTEGERS["gptq, 4 bit"]], ids=["mxfp8", "gptq"])
def test_a_bias_that_is_too_large_is_found(layer: Problem) -> None:
    tensors = healthy(layer) if layer.scheme.name == "mxfp8" else integers(layer)
    tensors["w2_bias"] = tensors["w2_bias"].clone()
    tensors["w2_bias"][2, 5] = -3e38
    assert "local expert 2 at [5]" in refused(layer, tensors)


def test_the_limit_is_where_squares_leave_float32() -> None:
    limit = torch.tensor(_checks.largest_weight("bfloat16"), dtype=torch.float32)
    assert torch.isfinite(limit * limit) and not torch.isfinite(torch.nextafter(limit, 2 * limit) ** 2)
    assert _checks.largest_weight("float16") == 65504.0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer in which every scale is suspicious is dequantized in pieces of a few rows."""
    monkeypatch.setattr(_checks, "_CHUNK_ELEMENTS", 256)
    layer = MX["mxfp4"]
    tensors = healthy(layer)
    for each in ("w13", "w2"):
        tensors[each].zero_()
        tensors[f"{each}_scale"].fill_(254)
    sizes: list[int] = []
    dequantize: Any = mxfp4.dequantize

    def measured(codes: Tensor, scales: Tensor) -> Tensor:
        sizes.append(2 * codes.numel())
        return dequantize(codes, scales)  # type: ignore[no-any-return]

    monkeypatch.setattr(mxfp4, "dequantize", measured)
    mxfp4.check_values(tensors, layer)
    assert max(sizes) <= 256 and sum(sizes) == 2 * sum(tensors[each].numel() for each in ("w13", "w2"))
