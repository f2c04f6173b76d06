"""MXFP8: codes, scales and both directions, against definitions and against the packages that write such files."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_moe_oracle.schemes import mxfp8

RULES: tuple[Literal["ceil", "floor"], ...] = ("ceil", "floor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Every positive finite number of a 16-bit format, subnormals included.
BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
FP16 = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)


def bits(codes: Tensor) -> Any:
    return codes.view(torch.uint8).numpy()


def interesting_amax() -> Tensor:
    """float32: every binade's first number, 1.75 times it (448 is 1.75 * 2**8), and the neighbours of both."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).to(torch.float32)
    centres = torch.cat([powers, powers[30:] * 1.75])
    return torch.cat([centres, centres.nextafter(torch.tensor(torch.inf)), centres.nextafter(torch.tensor(0.0))])


# --- Decoding --------------------------------------------------------------------------------------------------------


def test_scales_are_exact_for_every_code() -> None:
    values = mxfp8.scale_values(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.double().numpy(), [reference.e8m0_value(code) for code in range(256)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_of_codes_is_decoded_exactly(dtype: torch.dtype) -> None:
    # Row s holds all 256 elements with scale code s: 8 blocks of 32.
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    values = mxfp8.dequantise(codes.view(torch.float8_e4m3fn), scales, dtype)
    exact = reference.dequantise_mxfp8(codes.numpy(), scales.numpy())
    assert values.dtype == dtype and np.isnan(exact[255]).all() and np.isnan(exact[:, [127, 255]]).all()
    # float64 holds every product; in the narrower types, this is the exact product rounded once.
    expected = torch.from_numpy(exact).to(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float32:
        finite = np.isfinite(exact) & (np.abs(exact) < 2.0**128)
        np.testing.assert_array_equal(values.double().numpy()[finite], exact[finite])


# --- Scale rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [BF16, FP16, interesting_amax()], ids=["bf16", "fp16", "float32"])
def test_scale_exponents_follow_their_definition(amax: Tensor, rule: Literal["ceil", "floor"]) -> None:
    found = mxfp8.scale_exponents(amax, rule)
    expected = [reference.mxfp8_exponent(value, rule) + 127 for value in amax.double().tolist()]
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("rule", ["ceil", "floor", "llm-compressor"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_blocks_of_zeros_and_blocks_that_are_not_finite_have_codes_of_their_own(rule: Any, dtype: torch.dtype) -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)
    assert mxfp8.scale_exponents(amax, rule).tolist() == [0, 255, 255]


def test_what_float32_cannot_hold_is_treated_as_what_it_becomes() -> None:
    assert mxfp8.scale_exponents(torch.tensor([1e-300, 1e300], dtype=torch.float64)).tolist() == [0, 255]


@given(st.floats(2.0**-100, 2.0**120, width=32))
def test_ceil_is_the_smallest_scale_that_does_not_saturate(amax: float) -> None:
    code = int(mxfp8.scale_exponents(torch.tensor(amax)))
    assert amax <= 448 * 2.0 ** (code - 127)
    assert amax > 448 * 2.0 ** (code - 128)


def test_an_unknown_rule_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown scale rule 'round'; valid are ceil, floor, llm-compressor"):
        mxfp8.quantise(torch.ones(32), "round")  # type: ignore[arg-type]


# --- Encoding --------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """[1 to 3 rows, 32 to 96]: blocks of very different size, with zeros, and signs of both kinds."""
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, blocks, 32, generator=generator)
    values *= torch.randint(0, 4, values.shape, generator=generator) > 0
    exponents = [draw(st.one_of(st.integers(-150, 124), st.just(-1000))) for _ in range(rows * blocks)]
    # In two steps: a power of two below the smallest subnormal would be zero by itself.
    exponent = torch.tensor(exponents, dtype=torch.float64).reshape(rows, blocks, 1)
    values = (values.double() * torch.exp2(exponent)).reshape(rows, blocks * 32)
    return values.to(draw(st.sampled_from(DTYPES))).nan_to_num(0.0, 1.0, -1.0)


@given(tensors(), st.sampled_from(RULES))
def test_quantising_follows_the_definition_to_the_bit(values: Tensor, rule: Literal["ceil", "floor"]) -> None:
    codes, scales = mxfp8.quantise(values, rule)
    expected_codes, expected_scales = reference.quantise_mxfp8(values.double().numpy(), rule)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.uint8
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(bits(codes), expected_codes)


@given(tensors(), st.sampled_from(["ceil", "floor", "llm-compressor"]))
def test_what_was_quantised_once_is_not_changed_by_quantising_again(values: Tensor, rule: Any) -> None:
    once = mxfp8.dequantise(*mxfp8.quantise(values, rule))
    twice = mxfp8.dequantise(*mxfp8.quantise(once, rule))
    assert torch.equal(once, twice)


@given(tensors())
def test_the_round_trip_of_activations_is_the_ceil_rule(values: Tensor) -> None:
    expected = reference.fake_quantise_mxfp8(values.double().numpy(), "ceil")
    np.testing.assert_array_equal(mxfp8.round_trip(values).double().numpy(), expected)


@given(tensors())
def test_ceil_never_saturates_so_the_error_is_at_most_half_a_step(values: Tensor) -> None:
    exact = values.double().reshape(-1, 32)
    found = mxfp8.round_trip(values).double().reshape(-1, 32)
    # Of an element with a normal code: half of 2**-3 of its binade. Below: half of the smallest subnormal, 2**-9.
    scales = mxfp8.scale_values(mxfp8.scale_exponents(exact.abs().amax(-1))).double()[:, None]
    assert bool(((found - exact).abs() <= torch.maximum(exact.abs() * 2**-4, scales * 2**-10)).all())


@pytest.mark.parametrize("amax", [465.0, 480.0, 511.0])
def test_the_floor_rule_saturates_what_the_ceil_rule_holds(amax: float) -> None:
    block = torch.full((32,), amax)
    ceil, floor = (mxfp8.dequantise(*mxfp8.quantise(block, rule)) for rule in RULES)
    assert floor.unique().tolist() == [448.0]
    assert abs(float(ceil[0]) - amax) <= amax * 2**-4 and float(ceil[0]) != 448.0


def test_a_block_of_zeros_stays_zeros_beside_large_blocks() -> None:
    values = torch.cat([torch.zeros(32), torch.full((32,), 3e38), torch.full((32,), -0.0)])
    codes, scales = mxfp8.quantise(values)
    assert scales.tolist()[::2] == [0, 0]
    back = mxfp8.dequantise(codes, scales)
    assert back[:32].tolist() == [0.0] * 32 and back[64:].tolist() == [0.0] * 32 and bool((back[32:64] > 2.8e38).all())


def test_the_smallest_numbers() -> None:
    # Scale code 0 is 2**-127 and the smallest element 2**-9: 2**-136 is the smallest number there is; half rounds to 0.
    values = torch.zeros(3, 32)
    values[:, 0] = torch.tensor([2.0**-136, 2.0**-137, 1.5 * 2.0**-137])
    codes, scales = mxfp8.quantise(values)
    assert scales.unique().tolist() == [0]
    assert bits(codes)[:, 0].tolist() == [1, 0, 1]
    assert mxfp8.dequantise(codes, scales)[:, 0].tolist() == [2.0**-136, 0.0, 2.0**-136]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad: float) -> None:
    values = torch.ones(2, 64)
    values[0, 40] = bad
    back = mxfp8.round_trip(values)
    assert bool(back[0, 32:].isnan().all())
    assert back[0, :32].tolist() == [1.0] * 32 and back[1].tolist() == [1.0] * 64


def test_views_are_quantised_as_their_copies() -> None:
    base = torch.randn(128, 96, generator=torch.Generator().manual_seed(3))
    batched = base.reshape(4, 32, 96)
    for view in (base.T, base[::3, :64], base[:, 32:], base[:1].expand(5, 96), batched.permute(2, 0, 1), batched[:, 5]):
        for found, expected in zip(mxfp8.quantise(view), mxfp8.quantise(view.clone().contiguous()), strict=True):
            np.testing.assert_array_equal(bits(found.contiguous()), bits(expected))
        codes, scales = mxfp8.quantise(view)
        assert torch.equal(mxfp8.dequantise(codes, scales), mxfp8.dequantise(codes.contiguous(), scales.contiguous()))


@pytest.mark.parametrize(("k", "rest"), [(33, 1), (31, 31), (2050, 2)])
def test_a_dimension_that_blocks_do_not_divide_is_refused_with_numbers(k: int, rest: int) -> None:
    with pytest.raises(ValueError, match=rf"{k} values are no multiple of the MX block 32 \(remainder {rest}\)"):
        mxfp8.quantise(torch.ones(2, k))
    with pytest.raises(ValueError, match=rf"{k} values are no multiple"):
        mxfp8.dequantise(torch.ones(2, k).to(torch.float8_e4m3fn), torch.zeros(2, k // 32, dtype=torch.uint8))


def test_no_tokens_are_no_blocks() -> None:
    codes, scales = mxfp8.quantise(torch.zeros(0, 64, dtype=torch.bfloat16))
    assert (codes.shape, scales.shape) == ((0, 64), (0, 2))
    assert mxfp8.dequantise(codes, scales).shape == (0, 64)


def test_inputs_are_not_changed() -> None:
    values = torch.randn(4, 64)
    before = values.clone()
    codes, scales = mxfp8.quantise(values)
    codes_before, scales_before = codes.clone(), scales.clone()
    mxfp8.dequantise(codes, scales)
    assert torch.equal(values, before) and torch.equal(scales, scales_before)
    np.testing.assert_array_equal(bits(codes), bits(codes_before))


# --- Against what others write ---------------------------------------------------------------------------------------


def normal(values: Tensor) -> Tensor:
    """Those which are normal numbers in float32."""
    return values[values >= torch.finfo(torch.float32).tiny]


def edge_blocks(dtype: torch.dtype) -> Tensor:
    """[n, 32]: every bf16 number (or float32's interesting ones) as the largest of its block, and random elements."""
    amax = BF16 if dtype == torch.bfloat16 else normal(interesting_amax())
    generator = torch.Generator().manual_seed(7)
    fractions = torch.rand(len(amax), 32, generator=generator) * 2 - 1
    fractions[:, 5] = torch.where(torch.arange(len(amax)) % 2 == 0, 1.0, -1.0)
    blocks = (fractions * amax.to(torch.float32)[:, None]).to(dtype)
    assert torch.equal(blocks.abs().amax(-1), amax.to(dtype))
    return torch.cat([blocks, torch.zeros(3, 32, dtype=dtype)])


def test_the_ceil_rule_is_stock_vllms_to_the_bit() -> None:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    random = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for values in (edge_blocks(torch.bfloat16), random, random.reshape(4, 4, 128), torch.zeros(2, 64).bfloat16()):
        stock_codes, stock_scales = _mxfp8_e4m3_quantize_torch(values)
        codes, scales = mxfp8.quantise(values, "ceil")
        np.testing.assert_array_equal(scales.numpy(), stock_scales.numpy())
        np.testing.assert_array_equal(bits(codes), bits(stock_codes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_llm_compressor_rule_is_compressed_tensors_to_the_bit(dtype: torch.dtype) -> None:
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    generator = torch.Generator().manual_seed(11)
    spread = torch.exp2(torch.randint(-30, 30, (512, 1), generator=generator))
    random = (torch.randn(512, 32, generator=generator) * spread).to(dtype)
    for values in (edge_blocks(dtype), random):
        # From 1.75 * 2**127 on, compressed-tensors rounds the block's largest number up to an infinity.
        values = values[values.abs().amax(-1).float() < 1.75 * 2.0**127]
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        factors, _ = calculate_qparams(low, high, arguments)
        expected_codes = quantize(values, factors, None, arguments, dtype=torch.float8_e4m3fn)
        codes, scales = mxfp8.quantise(values, "llm-compressor")
        np.testing.assert_array_equal(scales.numpy(), compress_mx_scale(factors, torch.uint8).numpy())
        np.testing.assert_array_equal(bits(codes), bits(expected_codes))


def test_the_llm_compressor_rule_holds_to_the_end_of_the_range() -> None:
    largest = torch.tensor(torch.finfo(torch.float32).max)
    assert int(mxfp8.scale_exponents(largest, "llm-compressor")) - 127 == 128 - 8


def test_the_three_rules_differ_where_they_should() -> None:
    # Of 1.75 * 2**8 = 448 times a power of two: ceil and floor fit it exactly, llm-compressor takes the next scale.
    amax = torch.tensor([256.0, 447.0, 448.0, 449.0, 512.0])
    codes = {rule: (mxfp8.scale_exponents(amax, rule).int() - 127).tolist() for rule in (*RULES, "llm-compressor")}
    assert codes == {"ceil": [0, 0, 0, 1, 1], "floor": [0, 0, 0, 0, 1], "llm-compressor": [0, 0, 1, 1, 1]}


def test_one_expert_is_dequantised_as_the_layer_is() -> None:
    generator = torch.Generator().manual_seed(1)
    codes, scales = mxfp8.quantise(torch.randn(2, 8, 64, generator=generator))
    expert = {"w13": codes[1], "w13_scale": scales[1]}
    found = mxfp8.dequantise_expert(expert, "w13")
    assert found.dtype == torch.float32 and torch.equal(found, mxfp8.dequantise(codes, scales)[1])
