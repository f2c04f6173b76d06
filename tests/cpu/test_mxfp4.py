"""MXFP4: codes, scales and both directions, against definitions and against the packages that write such files; layers
in either order of rows."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from peak import Peak
from test_mx_layers import APART, MXFP4_LAYER, mxfp4_parameters
from torch import Tensor, nn

from vllm_moe_oracle.backends.emulation import BACKEND
from vllm_moe_oracle.methods import storage
from vllm_moe_oracle.oracle.decision import Plan
from vllm_moe_oracle.oracle.problem import Problem
from vllm_moe_oracle.schemes import mxfp4

RULES: tuple[Literal["ceil", "floor"], ...] = ("ceil", "floor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Every positive finite number of a 16-bit format, subnormals included.
BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
FP16 = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)


def interesting_amax() -> Tensor:
    """float32: every binade's first number, 1.5 and 1.75 times it (6 is 1.5 * 2**2), and the neighbours of all."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).to(torch.float32)
    centres = torch.cat([powers, powers[30:] * 1.5, powers[30:] * 1.75])
    return torch.cat([centres, centres.nextafter(torch.tensor(torch.inf)), centres.nextafter(torch.tensor(0.0))])


# --- Decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_of_codes_is_decoded_exactly_under_every_scale(dtype: torch.dtype) -> None:
    # Row s holds all 256 bytes, so 512 elements in 16 blocks, with scale code s.
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    values = mxfp4.dequantise(codes, scales, dtype)
    exact = reference.dequantise_mxfp4(codes.numpy(), scales.numpy())
    assert values.dtype == dtype and np.isnan(exact[255]).all() and np.isfinite(exact[:255]).all()
    # float64 holds every product; in the narrower types, this is the exact product rounded once.
    expected = torch.from_numpy(exact).to(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values[:255].signbit(), expected[:255].signbit())
    fits = np.abs(exact[:255]) < 2.0**128
    np.testing.assert_array_equal(values[:255].double().numpy()[fits], exact[:255][fits])


def test_the_low_nibble_comes_first() -> None:
    codes = torch.full((1, 16), 0x2F, dtype=torch.uint8)
    assert mxfp4.dequantise(codes, torch.tensor([[127]], dtype=torch.uint8)).tolist() == [[-6.0, 1.0] * 16]


# --- Scale rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [BF16, FP16, interesting_amax()], ids=["bf16", "fp16", "float32"])
def test_scale_exponents_follow_their_definition(amax: Tensor, rule: Literal["ceil", "floor"]) -> None:
    found = mxfp4.scale_exponents(amax, rule)
    expected = [reference.mxfp4_exponent(value, rule) + 127 for value in amax.double().tolist()]
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("rule", ["ceil", "floor", "llm-compressor"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_blocks_of_zeros_and_blocks_that_are_not_finite_have_codes_of_their_own(rule: Any, dtype: torch.dtype) -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan], dtype=dtype)
    assert mxfp4.scale_exponents(amax, rule).tolist() == [0, 255, 255]


@given(st.floats(2.0**-100, 2.0**120, width=32))
def test_ceil_is_the_smallest_scale_that_does_not_saturate(amax: float) -> None:
    code = int(mxfp4.scale_exponents(torch.tensor(amax)))
    assert 6 * 2.0 ** (code - 128) < amax <= 6 * 2.0 ** (code - 127)


def test_the_three_rules_differ_where_they_should() -> None:
    amax = torch.tensor([4.0, 5.9, 6.0, 6.1, 6.9, 7.0, 8.0])
    codes = {rule: (mxfp4.scale_exponents(amax, rule).int() - 127).tolist() for rule in (*RULES, "llm-compressor")}
    assert codes == {
        "ceil": [0, 0, 0, 1, 1, 1, 1],
        "floor": [0, 0, 0, 0, 0, 0, 1],
        "llm-compressor": [0, 0, 0, 0, 0, 1, 1],
    }


# --- Encoding --------------------------------------------------------------------------------------------------------


def test_every_bfloat16_number_gets_the_nearest_code_with_ties_to_even() -> None:
    values = torch.cat([torch.zeros(1), BF16.float()])
    values = torch.cat([values, -values])
    np.testing.assert_array_equal(mxfp4.encode(values).numpy(), reference.encode_e2m1(values.double().numpy()))


def test_ties_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert mxfp4.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert mxfp4.encode(ties.nextafter(torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mxfp4.encode(ties.nextafter(torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert mxfp4.encode(torch.tensor([6.0, 6.1, 1e30, -1e30, -0.0, -0.25])).tolist() == [7, 7, 7, 15, 8, 8]


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
    codes, scales = mxfp4.quantise(values, rule)
    expected_codes, expected_scales = reference.quantise_mxfp4(values.double().numpy(), rule)
    assert codes.dtype == scales.dtype == torch.uint8
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.numpy(), expected_codes)


@given(tensors(), st.sampled_from(["ceil", "floor", "llm-compressor"]))
def test_what_was_quantised_once_is_not_changed_by_quantising_again(values: Tensor, rule: Any) -> None:
    once = mxfp4.dequantise(*mxfp4.quantise(values, rule))
    assert torch.equal(once, mxfp4.dequantise(*mxfp4.quantise(once, rule)))


@given(tensors())
def test_the_round_trip_of_activations_is_the_ceil_rule(values: Tensor) -> None:
    expected = reference.fake_quantise_mxfp4(values.double().numpy(), "ceil")
    np.testing.assert_array_equal(mxfp4.round_trip(values).double().numpy(), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad: float) -> None:
    values = torch.ones(2, 64)
    values[0, 40] = bad
    back = mxfp4.round_trip(values)
    assert bool(back[0, 32:].isnan().all())
    assert back[0, :32].tolist() == [1.0] * 32 and back[1].tolist() == [1.0] * 64


def test_views_are_quantised_as_their_copies_and_stay_as_they_are() -> None:
    base = torch.randn(128, 96, generator=torch.Generator().manual_seed(3))
    before = base.clone()
    for view in (
        base.T,
        base[::3, :64],
        base[:, 32:],
        base[:1].expand(5, 96),
        base.reshape(4, 32, 96).permute(2, 0, 1),
    ):
        for found, expected in zip(mxfp4.quantise(view), mxfp4.quantise(view.clone().contiguous()), strict=True):
            assert torch.equal(found, expected)
        codes, scales = (each.mT.contiguous().mT for each in mxfp4.quantise(view))
        assert torch.equal(mxfp4.dequantise(codes, scales), mxfp4.dequantise(codes.contiguous(), scales.contiguous()))
    assert torch.equal(base, before)


@pytest.mark.parametrize(("k", "rest"), [(34, 2), (30, 30), (2050, 2)])
def test_a_dimension_that_blocks_do_not_divide_is_refused_with_numbers(k: int, rest: int) -> None:
    with pytest.raises(ValueError, match=rf"{k} values are no multiple of the MX block 32 \(remainder {rest}\)"):
        mxfp4.quantise(torch.ones(2, k))
    with pytest.raises(ValueError, match=rf"{k} values are no multiple"):
        mxfp4.dequantise(torch.zeros(2, k // 2, dtype=torch.uint8), torch.zeros(2, k // 32, dtype=torch.uint8))


def test_no_tokens_are_no_blocks() -> None:
    codes, scales = mxfp4.quantise(torch.zeros(0, 64, dtype=torch.bfloat16))
    assert (codes.shape, scales.shape) == ((0, 32), (0, 2))
    assert mxfp4.dequantise(codes, scales).shape == (0, 64)


# --- Against what others write and read ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_llm_compressor_rule_is_the_packages_compressor(dtype: torch.dtype, seed: int) -> None:
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, 512, generator=generator)
    values *= torch.exp2(torch.randint(-12, 12, (64, 1), generator=generator))
    # Largest numbers of 1.5 and 1.75 times a power of two, where the rules part; and every tie.
    blocks = values.view(64, 16, 32)
    powers = torch.exp2(torch.log2(blocks.abs().amax(-1)).ceil())
    blocks[:, ::2, 0], blocks[:, 1::2, 0] = powers[:, ::2] * 1.75, powers[:, 1::2] * 1.5
    blocks[:, :, 1:8] = powers[:, :, None] * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / 8
    values = values.to(dtype)
    scheme = preset_name_to_scheme("MXFP4", ["Linear"])
    split = values.view(64, 16, 32)
    scale, zero_point = calculate_qparams(split.amin(-1), split.amax(-1), scheme.weights)
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero_point}
    made = package.compressors.MXFP4PackedCompressor.compress(state, scheme)
    codes, scales = mxfp4.quantise(values, "llm-compressor")
    assert torch.equal(scales, made["weight_scale"])
    assert torch.equal(without_signs_of_zero(codes), without_signs_of_zero(made["weight_packed"]))
    assert not torch.equal(mxfp4.quantise(values, "floor")[1], scales)


def without_signs_of_zero(codes: Tensor) -> Tensor:
    """One code a byte, with -0 as 0: the package loses the sign of some."""
    each = torch.stack((codes & 15, codes >> 4), -1)
    return each.masked_fill(each == 8, 0)


def test_gpt_oss_is_read_as_transformers_reads_it() -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 128, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 128, 2), dtype=torch.uint8, generator=generator)
    # [E, K, N], with columns that alternate gate and up.
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    layer = dataclasses.replace(MXFP4_LAYER, has_bias=False, hidden_size=64, intermediate_size=64)
    raw = {"w13": blocks.view(3, 128, 32), "w13_scale": scales}
    for index in range(3):
        expert = mxfp4.canonical_expert({name: tensor[index] for name, tensor in raw.items()}, layer)
        ours = mxfp4.dequantise_expert(expert, "w13")
        assert torch.equal(ours[:64], theirs[index, :, 0::2].T) and torch.equal(ours[64:], theirs[index, :, 1::2].T)


# --- Rows that alternate ---------------------------------------------------------------------------------------------


def expert_of(layer: Problem) -> dict[str, Tensor]:
    return {name: tensor[0] for name, tensor in mxfp4.read(mxfp4_parameters(layer), layer).items()}


def test_rows_that_alternate_become_halves_in_weights_scales_and_biases() -> None:
    raw = expert_of(MXFP4_LAYER)
    before = {name: tensor.clone() for name, tensor in raw.items()}
    made = mxfp4.canonical_expert(raw, MXFP4_LAYER)
    order = [*range(0, 192, 2), *range(1, 192, 2)]
    for name in ("w13", "w13_scale", "w13_bias"):
        assert made[name].reshape(192, -1)[:, 0].tolist() == order
        assert (made[name].shape, made[name].dtype) == (raw[name].shape, raw[name].dtype)
    assert all(made[name] is raw[name] for name in ("w2", "w2_scale", "w2_bias"))
    assert all(torch.equal(raw[name], before[name]) for name in raw)


def test_rows_that_stand_apart_are_the_very_tensors() -> None:
    raw = expert_of(APART)
    assert all(mxfp4.canonical_expert(raw, APART)[name] is raw[name] for name in raw)


def converted(layer: Problem, module: nn.Module) -> dict[str, str]:
    def convert(expert: dict[str, Tensor]) -> dict[str, Tensor]:
        return BACKEND.convert(mxfp4.canonical_expert(expert, layer), layer, Plan(64, 96))

    return storage.convert_in_place(module, mxfp4.parameters_of(layer), convert)


def test_a_loaded_layer_is_converted_in_its_own_memory_one_expert_at_a_time() -> None:
    layer = dataclasses.replace(MXFP4_LAYER, num_experts=64, local_experts=64, hidden_size=512)
    module = nn.Module()
    for name, tensor in mxfp4_parameters(layer).items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    raw = mxfp4.read(dict(module.named_parameters()), layer)
    each = [{name: tensor[expert] for name, tensor in raw.items()} for expert in range(64)]
    expected = [mxfp4.canonical_expert(expert, layer) for expert in each]
    expected = [{name: tensor.clone() for name, tensor in expert.items()} for expert in expected]
    places = {name: getattr(module, name).data_ptr() for name in mxfp4.parameters_of(layer).values()}
    one = sum(tensor.nbytes for tensor in expected[0].values())
    with Peak(*module.parameters()) as peak:
        names = converted(layer, module)
    assert 0 < peak.peak <= 3 * one
    for canonical, name in names.items():
        tensor = getattr(module, name)
        assert tensor.data_ptr() == places[name]
        assert torch.equal(tensor.data, torch.stack([each[canonical] for each in expected]))
