"""MXFP8: codes, scales and both directions, against definitions and against the packages that write such files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.lib import reference
from tests.lib.mx_values import BF16, RULES, interesting_amax, tensors
from vllm_moe_oracle.schemes import mxfp8


def bits(codes: Tensor) -> Any:
    return codes.view(torch.uint8).numpy()


# --- Decoding --------------------------------------------------------------------------------------------------------


def test_scales_are_exact_for_every_code() -> None:
    values = mxfp8.e8m0_to_float(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.double().numpy(), [reference.e8m0_value(code) for code in range(256)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_of_codes_is_decoded_exactly(dtype: torch.dtype) -> None:
    # Row s holds all 256 elements with scale code s: 8 blocks of 32.
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    values = mxfp8.dequantize(codes.view(torch.float8_e4m3fn), scales, dtype)
    exact = reference.dequantize_mxfp8(codes.numpy(), scales.numpy())
    assert values.dtype == dtype and np.isnan(exact[255]).all() and np.isnan(exact[:, [127, 255]]).all()
    # float64 holds every product; in the narrower types, this is the exact product rounded once.
    expected = torch.from_numpy(exact).to(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float32:
        finite = np.isfinite(exact) & (np.abs(exact) < 2.0**128)
        np.testing.assert_array_equal(values.double().numpy()[finite], exact[finite])


# --- Encoding --------------------------------------------------------------------------------------------------------


@given(tensors())
def test_ceil_never_saturates_so_the_error_is_at_most_half_a_step(values: Tensor) -> None:
    exact = values.double().reshape(-1, 32)
    found = mxfp8.fake_quantize(values).double().reshape(-1, 32)
    # Of an element with a normal code: half of 2**-3 of its binade. Below: half of the smallest subnormal, 2**-9.
    scales = mxfp8.e8m0_to_float(mxfp8.e8m0_from_amax(exact.abs().amax(-1))).double()[:, None]
    assert bool(((found - exact).abs() <= torch.maximum(exact.abs() * 2**-4, scales * 2**-10)).all())


@pytest.mark.parametrize("amax", [465.0, 480.0, 511.0])
def test_the_floor_rule_saturates_what_the_ceil_rule_holds(amax: float) -> None:
    block = torch.full((32,), amax)
    ceil, floor = (mxfp8.dequantize(*mxfp8.quantize(block, rule)) for rule in RULES)
    assert floor.unique().tolist() == [448.0]
    assert abs(float(ceil[0]) - amax) <= amax * 2**-4 and float(ceil[0]) != 448.0


def test_a_block_of_zeros_stays_zeros_beside_large_blocks() -> None:
    values = torch.cat([torch.zeros(32), torch.full((32,), 3e38), torch.full((32,), -0.0)])
    codes, scales = mxfp8.quantize(values)
    assert scales.tolist()[::2] == [0, 0]
    back = mxfp8.dequantize(codes, scales)
    assert back[:32].tolist() == [0.0] * 32 and back[64:].tolist() == [0.0] * 32 and bool((back[32:64] > 2.8e38).all())


def test_the_smallest_numbers() -> None:
    # Scale code 0 is 2**-127 and the smallest element 2**-9: 2**-136 is the smallest number there is; half rounds to 0.
    values = torch.zeros(3, 32)
    values[:, 0] = torch.tensor([2.0**-136, 2.0**-137, 1.5 * 2.0**-137])
    codes, scales = mxfp8.quantize(values)
    assert scales.unique().tolist() == [0]
    assert bits(codes)[:, 0].tolist() == [1, 0, 1]
    assert mxfp8.dequantize(codes, scales)[:, 0].tolist() == [2.0**-136, 0.0, 2.0**-136]


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
        codes, scales = mxfp8.quantize(values, "ceil")
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
        codes, scales = mxfp8.quantize(values, "llm-compressor")
        np.testing.assert_array_equal(scales.numpy(), compress_mx_scale(factors, torch.uint8).numpy())
        np.testing.assert_array_equal(bits(codes), bits(expected_codes))


def test_the_llm_compressor_rule_holds_to_the_end_of_the_range() -> None:
    largest = torch.tensor(torch.finfo(torch.float32).max)
    assert int(mxfp8.e8m0_from_amax(largest, "llm-compressor")) - 127 == 128 - 8


def test_one_expert_is_dequantized_as_the_layer_is() -> None:
    generator = torch.Generator().manual_seed(1)
    codes, scales = mxfp8.quantize(torch.randn(2, 8, 64, generator=generator))
    expert = {"w13": codes[1], "w13_scale": scales[1]}
    found = mxfp8.dequantize_expert(expert, "w13")
    assert found.dtype == torch.float32 and torch.equal(found, mxfp8.dequantize(codes, scales)[1])
