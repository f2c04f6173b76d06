"""MXFP4: codes, scales and both directions, against definitions and against the packages that write such files; layers
in either order of rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.lib import reference
from tests.lib.mx_layers import APART, MXFP4_LAYER, mxfp4_parameters
from tests.lib.mx_values import BF16
from tests.lib.peak_memory import Peak
from vllm_moe_oracle.backends.emulation import BACKEND
from vllm_moe_oracle.compat import weight_storage
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.schemes import mxfp4

# --- Decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_pair_of_codes_is_decoded_exactly_under_every_scale(dtype: torch.dtype) -> None:
    # Row s holds all 256 bytes, so 512 elements in 16 blocks, with scale code s.
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    values = mxfp4.dequantize(codes, scales, dtype)
    exact = reference.dequantize_mxfp4(codes.numpy(), scales.numpy())
    assert values.dtype == dtype and np.isnan(exact[255]).all() and np.isfinite(exact[:255]).all()
    # float64 holds every product; in the narrower types, this is the exact product rounded once.
    expected = torch.from_numpy(exact).to(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values[:255].signbit(), expected[:255].signbit())
    fits = np.abs(exact[:255]) < 2.0**128
    np.testing.assert_array_equal(values[:255].double().numpy()[fits], exact[:255][fits])


def test_the_low_nibble_comes_first() -> None:
    codes = torch.full((1, 16), 0x2F, dtype=torch.uint8)
    assert mxfp4.dequantize(codes, torch.tensor([[127]], dtype=torch.uint8)).tolist() == [[-6.0, 1.0] * 16]


# --- Encoding --------------------------------------------------------------------------------------------------------


def test_every_bfloat16_number_gets_the_nearest_code_with_ties_to_even() -> None:
    values = torch.cat([torch.zeros(1), BF16.float()])
    values = torch.cat([values, -values])
    np.testing.assert_array_equal(mxfp4.encode_e2m1(values).numpy(), reference.encode_e2m1(values.double().numpy()))


def test_ties_go_to_the_even_code_and_their_neighbors_do_not() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert mxfp4.encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert mxfp4.encode_e2m1(ties.nextafter(torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mxfp4.encode_e2m1(ties.nextafter(torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert mxfp4.encode_e2m1(torch.tensor([6.0, 6.1, 1e30, -1e30, -0.0, -0.25])).tolist() == [7, 7, 7, 15, 8, 8]


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
    codes, scales = mxfp4.quantize(values, "llm-compressor")
    assert torch.equal(scales, made["weight_scale"])
    assert torch.equal(without_signs_of_zero(codes), without_signs_of_zero(made["weight_packed"]))
    assert not torch.equal(mxfp4.quantize(values, "floor")[1], scales)


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
        ours = mxfp4.dequantize_expert(expert, "w13")
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
        return BACKEND.convert(mxfp4.canonical_expert(expert, layer), layer, ShardPlan(64, 96))

    return weight_storage.convert_in_place(module, mxfp4.parameter_names(layer), convert)


def test_a_layer_is_converted_in_place_expert_by_expert() -> None:
    layer = dataclasses.replace(MXFP4_LAYER, num_experts=64, local_experts=64, hidden_size=512)
    module = nn.Module()
    for name, tensor in mxfp4_parameters(layer).items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    raw = mxfp4.read(dict(module.named_parameters()), layer)
    each = [{name: tensor[expert] for name, tensor in raw.items()} for expert in range(64)]
    expected = [mxfp4.canonical_expert(expert, layer) for expert in each]
    expected = [{name: tensor.clone() for name, tensor in expert.items()} for expert in expected]
    places = {name: getattr(module, name).data_ptr() for name in mxfp4.parameter_names(layer).values()}
    one = sum(tensor.nbytes for tensor in expected[0].values())
    with Peak(*module.parameters()) as peak:
        names = converted(layer, module)
    assert 0 < peak.peak <= 3 * one
    for canonical, name in names.items():
        tensor = getattr(module, name)
        assert tensor.data_ptr() == places[name]
        assert torch.equal(tensor.data, torch.stack([each[canonical] for each in expected]))
