"""MXFP8 and MXFP4 quantization by the same rules: scales, codes and shapes against `reference`'s definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib import reference
from tests.lib.mx_values import BF16, DTYPES, FP16, RULES, interesting_amax, tensors
from vllm_moe_oracle.schemes import mxfp4, mxfp8


@dataclasses.dataclass(frozen=True)
class Format:
    """A scheme and its definition."""

    scheme: ModuleType
    largest: float
    code_dtype: torch.dtype
    codes_per_byte: int
    exponent: Callable[..., Any]
    quantize: Callable[..., Any]
    fake_quantize: Callable[..., Any]


FORMATS = {
    "mxfp8": Format(
        mxfp8, 448.0, torch.float8_e4m3fn, 1,
        reference.mxfp8_exponent, reference.quantize_mxfp8, reference.fake_quantize_mxfp8,
    ),
    "mxfp4": Format(
        mxfp4, 6.0, torch.uint8, 2,
        reference.mxfp4_exponent, reference.quantize_mxfp4, reference.fake_quantize_mxfp4,
    ),
}  # fmt: skip
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def bits(codes: Tensor) -> Any:
    """The bytes of codes, as numpy's."""
    return codes.contiguous().view(torch.uint8).numpy()


# --- Scales -----------------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [BF16, FP16, interesting_amax()], ids=["bf16", "fp16", "float32"])
def test_scales_follow_their_definition(amax: Tensor, rule: Literal["ceil", "floor"], format: Format) -> None:
    found = format.scheme.e8m0_from_amax(amax, rule)
    expected = (format.exponent(amax.double().numpy(), rule) + 127).tolist()
    np.testing.assert_array_equal(found.numpy(), expected)


@each_format
@pytest.mark.parametrize("rule", ["ceil", "floor", "llm-compressor"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_scales_of_zeros_and_of_non_finite_blocks(rule: Any, dtype: torch.dtype, format: Format) -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)
    assert format.scheme.e8m0_from_amax(amax, rule).tolist() == [0, 255, 255]


@each_format
def test_float64_magnitudes_are_rounded_to_float32_first(format: Format) -> None:
    assert format.scheme.e8m0_from_amax(torch.tensor([1e-300, 1e300], dtype=torch.float64)).tolist() == [0, 255]


@each_format
@given(amax=st.floats(2.0**-100, 2.0**120, width=32))
def test_ceil_is_the_smallest_scale_that_does_not_saturate(amax: float, format: Format) -> None:
    code = int(format.scheme.e8m0_from_amax(torch.tensor(amax)))
    assert format.largest * 2.0 ** (code - 128) < amax <= format.largest * 2.0 ** (code - 127)


@pytest.mark.parametrize(
    ("name", "amax", "expected"),
    [
        # Of 448 = 1.75 * 2**8 times a power of two: ceil and floor fit it exactly, llm-compressor takes the next scale.
        ("mxfp8", (256, 447, 448, 449, 512), ([0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1])),
        ("mxfp4", (4, 5.9, 6, 6.1, 6.9, 7, 8), ([0, 0, 0, 1, 1, 1, 1], [0] * 6 + [1], [0] * 5 + [1, 1])),
    ],
)
def test_the_three_rules_differ_where_they_should(name: str, amax: tuple[float, ...], expected: Any) -> None:
    for rule, codes in zip(("ceil", "floor", "llm-compressor"), expected, strict=True):
        found = FORMATS[name].scheme.e8m0_from_amax(torch.tensor(amax, dtype=torch.float32), rule)
        assert (found.int() - 127).tolist() == codes, rule


@each_format
def test_an_unknown_rule_lists_the_valid_ones(format: Format) -> None:
    with pytest.raises(ValueError, match="unknown scale rule 'round'; valid are ceil, floor, llm-compressor"):
        format.scheme.quantize(torch.ones(32), "round")


# --- Quantization -----------------------------------------------------------------------------------------------------


@each_format
@given(values=tensors(), rule=st.sampled_from(RULES))
def test_quantizing_equals_the_definition(values: Tensor, rule: Literal["ceil", "floor"], format: Format) -> None:
    codes, scales = format.scheme.quantize(values, rule)
    expected_codes, expected_scales = format.quantize(values.double().numpy(), rule)
    assert codes.dtype == format.code_dtype and scales.dtype == torch.uint8
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(bits(codes), expected_codes)


@each_format
@given(values=tensors(), rule=st.sampled_from(["ceil", "floor", "llm-compressor"]))
def test_quantizing_again_changes_nothing(values: Tensor, rule: Any, format: Format) -> None:
    once = format.scheme.dequantize(*format.scheme.quantize(values, rule))
    assert torch.equal(once, format.scheme.dequantize(*format.scheme.quantize(once, rule)))


@each_format
@given(values=tensors())
def test_fake_quantization_uses_the_ceil_rule(values: Tensor, format: Format) -> None:
    expected = format.fake_quantize(values.double().numpy(), "ceil")
    np.testing.assert_array_equal(format.scheme.fake_quantize(values).double().numpy(), expected)


@each_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_value_spoils_only_its_block(bad: float, format: Format) -> None:
    values = torch.ones(2, 64)
    values[0, 40] = bad
    back = format.scheme.fake_quantize(values)
    assert bool(back[0, 32:].isnan().all())
    assert back[0, :32].tolist() == [1.0] * 32 and back[1].tolist() == [1.0] * 64


@each_format
def test_views_are_quantized_like_their_copies(format: Format) -> None:
    base = torch.randn(128, 96, generator=torch.Generator().manual_seed(3))
    before, batched = base.clone(), base.reshape(4, 32, 96)
    for view in (base.T, base[::3, :64], base[:, 32:], base[:1].expand(5, 96), batched.permute(2, 0, 1), batched[:, 5]):
        codes, scales = format.scheme.quantize(view)
        for found, expected in zip(
            (codes, scales), format.scheme.quantize(view.clone().contiguous()), strict=True
        ):  # fmt: skip
            np.testing.assert_array_equal(bits(found), bits(expected))
        expected = format.scheme.dequantize(codes.contiguous(), scales.contiguous())
        strided = (each.view(torch.uint8).mT.contiguous().mT.view(each.dtype) for each in (codes, scales))
        assert torch.equal(format.scheme.dequantize(*strided), expected)
    assert torch.equal(base, before)


@each_format
def test_inputs_are_not_changed(format: Format) -> None:
    values = torch.randn(4, 64)
    before = values.clone()
    codes, scales = format.scheme.quantize(values)
    kept = codes.clone(), scales.clone()
    format.scheme.dequantize(codes, scales)
    assert torch.equal(values, before) and torch.equal(scales, kept[1])
    np.testing.assert_array_equal(bits(codes), bits(kept[0]))


@each_format
@pytest.mark.parametrize(("k", "remainder"), [(34, 2), (30, 30), (2050, 2)])
def test_incomplete_blocks_are_refused_with_numbers(k: int, remainder: int, format: Format) -> None:
    with pytest.raises(
        ValueError, match=rf"{k} values are not a multiple of the MX block 32 \(remainder {remainder}\)"
    ):
        format.scheme.quantize(torch.ones(2, k))
    codes = torch.zeros(2, k // format.codes_per_byte, dtype=torch.uint8).view(format.code_dtype)
    with pytest.raises(ValueError, match=rf"{k} values are not a multiple"):
        format.scheme.dequantize(codes, torch.zeros(2, k // 32, dtype=torch.uint8))


@each_format
def test_zero_rows_are_quantized_to_zero_rows(format: Format) -> None:
    codes, scales = format.scheme.quantize(torch.zeros(0, 64, dtype=torch.bfloat16))
    assert (codes.shape, scales.shape) == ((0, 64 // format.codes_per_byte), (0, 2))
    assert format.scheme.dequantize(codes, scales).shape == (0, 64)
