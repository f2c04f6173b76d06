"""MXFP4: codes, scales and both directions, against definitions and against the packages that write such files; reading
a layer in either order of rows; and the experts that emulation computes from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import reference
import torch
from cases import CPU, GPT_OSS, H200, RELU2, problem
from compare import Layer, moe_bound, outside
from hypothesis import given
from hypothesis import strategies as st
from peak import Peak
from torch import Tensor, nn

from vllm_moe_oracle.backends.emulation import BACKEND, forward
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import storage
from vllm_moe_oracle.oracle.decision import Accepted, Plan
from vllm_moe_oracle.oracle.problem import Activation, Problem, Scheme
from vllm_moe_oracle.schemes import fp8, mxfp4

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
    layer = dataclasses.replace(LAYER, has_bias=False, hidden_size=64, intermediate_size=64)
    raw = {"w13": blocks.view(3, 128, 32), "w13_scale": scales}
    for index in range(3):
        expert = mxfp4.canonical_expert({name: tensor[index] for name, tensor in raw.items()}, layer)
        ours = mxfp4.dequantise_expert(expert, "w13")
        assert torch.equal(ours[:64], theirs[index, :, 0::2].T) and torch.equal(ours[64:], theirs[index, :, 1::2].T)


# --- Reading a layer -------------------------------------------------------------------------------------------------

GPT_OSS_SCHEME = Scheme("mxfp4", bits=4, group_size=32, packing="gpt_oss")
ALTERNATING = dataclasses.replace(GPT_OSS, interleaved=True)
LAYER = problem(
    scheme=GPT_OSS_SCHEME, experts=3, top_k=2, hidden_size=64, intermediate_size=96, has_bias=True,
    activation=ALTERNATING,
)  # fmt: skip
APART = dataclasses.replace(LAYER, activation=GPT_OSS)
PACKED = dataclasses.replace(APART, scheme=dataclasses.replace(GPT_OSS_SCHEME, packing="compressed-tensors"))
LAYERS = {"gpt-oss": LAYER, "apart": APART, "compressed-tensors": PACKED}


def parameters(layer: Problem = LAYER) -> dict[str, Tensor]:
    """As vLLM registers them, each row filled with its number so that rows can be told apart."""
    e, h, i, r = layer.local_experts, layer.hidden_size, layer.intermediate_size, layer.w13_rows
    suffix = "_packed" if layer.scheme.packing == "compressed-tensors" else ""

    def rows(count: int, width: int) -> Tensor:
        return (torch.arange(count) % 251).to(torch.uint8)[None, :, None].repeat(e, 1, width)

    return {
        f"w13_weight{suffix}": rows(r, h // 2),
        f"w2_weight{suffix}": rows(h, i // 2),
        "w13_weight_scale": rows(r, h // 32),
        "w2_weight_scale": rows(h, i // 32),
        "w13_bias": torch.arange(r).bfloat16().repeat(e, 1),
        "w2_bias": torch.zeros(e, h, dtype=torch.bfloat16),
        "w13_input_scale": torch.zeros(e),
    }


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_read_without_a_copy(layer: Problem) -> None:
    given_tensors = parameters(layer)
    read = mxfp4.read(given_tensors, layer)
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == mxfp4.shapes(layer)
    names = mxfp4.parameters_of(layer)
    assert set(read) == set(names) == {"w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"}
    for canonical, name in names.items():
        assert read[canonical].data_ptr() == given_tensors[name].data_ptr()


def test_what_the_layer_does_not_have_is_not_asked_for() -> None:
    layer = dataclasses.replace(LAYER, has_bias=False, activation=RELU2)
    assert layer.w13_rows == layer.intermediate_size
    given_tensors = {name: tensor for name, tensor in parameters(layer).items() if "bias" not in name}
    assert set(mxfp4.read(given_tensors, layer)) == {"w13", "w2", "w13_scale", "w2_scale"}


@pytest.mark.parametrize("name", mxfp4.parameters_of(LAYER).values())
def test_a_missing_tensor_is_named(name: str) -> None:
    given_tensors = parameters()
    del given_tensors[name]
    with pytest.raises(CheckpointError, match=f"{name} is missing") as caught:
        mxfp4.read(given_tensors, LAYER)
    assert caught.value.where == LAYER.layer and "w13_input_scale" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "dtype", "stored"),
    [
        ("w13_weight", torch.bfloat16, "uint8"),
        ("w2_weight", torch.int8, "uint8"),
        ("w13_weight_scale", torch.float32, "uint8"),
        ("w13_bias", torch.int32, "bfloat16 or float16 or float32"),
    ],
)
def test_a_wrong_dtype_is_named_with_the_right_one(name: str, dtype: torch.dtype, stored: str) -> None:
    given_tensors = parameters()
    given_tensors[name] = torch.zeros(given_tensors[name].shape).to(dtype)
    with pytest.raises(CheckpointError, match=f"{name} is {dtype}, MXFP4 stores it as {stored}") as caught:
        mxfp4.read(given_tensors, LAYER)
    assert caught.value.where == LAYER.layer


@pytest.mark.parametrize("name", mxfp4.parameters_of(LAYER).values())
@pytest.mark.parametrize("dimension", [0, -1])
def test_a_wrong_shape_is_named_with_the_right_one(name: str, dimension: int) -> None:
    given_tensors = parameters()
    right = list(given_tensors[name].shape)
    wrong = right.copy()
    wrong[dimension] += 1
    given_tensors[name] = torch.zeros(wrong).to(given_tensors[name].dtype)
    with pytest.raises(CheckpointError) as caught:
        mxfp4.read(given_tensors, LAYER)
    assert f"{name} has shape {wrong}, expected {right}" in str(caught.value)
    assert caught.value.where == LAYER.layer


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
def test_a_scale_that_is_nan_is_named_and_counted(name: str) -> None:
    given_tensors = parameters()
    given_tensors[name][1, 3:5, 0] = 255
    total = given_tensors[name].numel()
    with pytest.raises(CheckpointError, match=rf"2 of {total} scales in {name} are NaN \(e8m0 code 255\)"):
        mxfp4.read(given_tensors, LAYER)


@pytest.mark.parametrize("name", mxfp4.UNLOADED)
def test_scales_that_were_never_loaded_are_noticed(name: str) -> None:
    given_tensors = parameters()
    given_tensors[mxfp4.parameters_of(LAYER)[name]][2].fill_(mxfp4.UNLOADED[name])
    with pytest.raises(CheckpointError, match="never loaded"):
        mxfp4.read(given_tensors, LAYER)


# --- Rows that alternate ---------------------------------------------------------------------------------------------


def expert_of(layer: Problem) -> dict[str, Tensor]:
    return {name: tensor[0] for name, tensor in mxfp4.read(parameters(layer), layer).items()}


def test_rows_that_alternate_become_halves_in_weights_scales_and_biases() -> None:
    raw = expert_of(LAYER)
    before = {name: tensor.clone() for name, tensor in raw.items()}
    made = mxfp4.canonical_expert(raw, LAYER)
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
    layer = dataclasses.replace(LAYER, num_experts=64, local_experts=64, hidden_size=512)
    module = nn.Module()
    for name, tensor in parameters(layer).items():
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


# --- Emulation -------------------------------------------------------------------------------------------------------

H, I, E, M, K = 96, 64, 4, 7, 2  # noqa: E741 - the usual letters
OTHER = Activation("swigluoai", alpha=1.25, beta=0.5, limit=2.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores take a hundred times longer than these small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Case:
    """A layer with random weights as the checkpoint has them, and routed tokens."""

    problem: Problem
    raw: dict[str, Tensor]
    x: Tensor
    weights: Tensor
    ids: Tensor

    def run(self) -> Tensor:
        """The emulation's output, `[M, H]`."""
        made = [
            mxfp4.canonical_expert({name: tensor[expert] for name, tensor in self.raw.items()}, self.problem)
            for expert in range(E)
        ]
        tensors = {name: torch.stack([each[name] for each in made]) for name in self.raw}
        out = torch.full(self.x.shape, torch.nan, dtype=self.x.dtype)
        forward(tensors, self.problem, out, self.x, self.weights, self.ids)
        return out

    def judge(self) -> Callable[[Tensor], str]:
        """What is wrong with an output of this case as it is now; empty when it is right."""
        act = self.problem.activation
        order = [*range(0, 2 * I, 2), *range(1, 2 * I, 2)] if act.interleaved else list(range(2 * I))

        def numbers(name: str) -> Any:
            return reference.dequantise_mxfp4(self.raw[name].numpy(), self.raw[f"{name}_scale"].numpy())

        def bias(name: str) -> Any:
            return self.raw[name].double().numpy() if name in self.raw else None

        b13 = bias("w13_bias")
        exact = Layer(
            numbers("w13")[:, order], numbers("w2"), act.name, act.alpha, act.beta, act.limit,
            None if b13 is None else b13[:, order], bias("w2_bias"),
        )  # fmt: skip
        expected, bound = moe_bound(
            self.x.double().numpy(), exact, self.ids.numpy(), self.weights.double().numpy(), dtype=self.problem.dtype,
            quantise=self.problem.scheme.activations == "mxfp8",
        )  # fmt: skip
        return lambda out: outside(out.double().numpy(), expected, bound)


def case(
    activation: Activation = ALTERNATING, dtype: str = "float32", bias: bool = True, activations: Any = "16bit"
) -> Case:
    """Weights and tokens such that first products are of the order of 3: limits of 2 and 7 are reached."""
    layer = problem(
        scheme=dataclasses.replace(GPT_OSS_SCHEME, activations=activations), experts=E, top_k=K, hidden_size=H,
        intermediate_size=I, activation=activation, has_bias=bias, dtype=dtype,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    raw: dict[str, Tensor] = {}
    for name, rows, width in (("w13", layer.w13_rows, H), ("w2", H, I)):
        spread = np.exp2(rng.integers(-2, 3, (E, rows, width // 32))).repeat(32, axis=-1)
        codes, scales = reference.quantise_mxfp4(rng.standard_normal((E, rows, width)) * spread / np.sqrt(width))
        raw |= {name: torch.from_numpy(codes), f"{name}_scale": torch.from_numpy(scales)}
        if bias:
            raw[f"{name}_bias"] = torch.from_numpy(rng.standard_normal((E, rows))).bfloat16()
    ids = np.argsort(rng.random((M, E)), axis=1)[:, :K]
    return Case(
        layer,
        raw,
        torch.from_numpy(rng.standard_normal((M, H)) * 1.5).to(getattr(torch, dtype)),
        torch.from_numpy(rng.uniform(0.1, 1.0, (M, K)).astype(np.float32)),
        torch.from_numpy(ids.astype(np.int64)),
    )


ACTIVATIONS = {
    "swigluoai, alternating": ALTERNATING,
    "swigluoai, apart": GPT_OSS,
    "swigluoai with other numbers": dataclasses.replace(OTHER, interleaved=True),
    "silu": Activation("silu"),
    "silu with limit": Activation("silu", limit=2.0),
    "gelu": Activation("gelu"),
}


@pytest.mark.parametrize("activations", ["16bit", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_every_precision(name: str, bias: bool, dtype: str, activations: str) -> None:
    made = case(ACTIVATIONS[name], dtype, bias, activations)
    assert BACKEND.check(made.problem, H200) == BACKEND.check(made.problem, CPU) == Accepted()
    assert made.judge()(made.run()) == ""


def test_mxfp4_activations_are_rounded_before_both_products() -> None:
    """With integers everything is exact in float32, and so must the result be."""
    rng = np.random.default_rng(4)
    layer = problem(
        scheme=dataclasses.replace(GPT_OSS_SCHEME, activations="mxfp4"), experts=2, top_k=1, hidden_size=64,
        intermediate_size=32, activation=RELU2, dtype="float32",
    )  # fmt: skip
    assert BACKEND.check(layer, H200) == Accepted() and "MXFP4" in str(BACKEND.numerics(layer))
    weights = {"w13": rng.integers(-3, 4, (2, 32, 64)), "w2": rng.integers(-3, 4, (2, 64, 32))}
    tensors: dict[str, Tensor] = {}
    for name, values in weights.items():
        codes, scales = reference.quantise_mxfp4(values)
        np.testing.assert_array_equal(reference.dequantise_mxfp4(codes, scales), values)
        tensors |= {name: torch.from_numpy(codes), f"{name}_scale": torch.from_numpy(scales)}
    x = rng.integers(-9, 10, (5, 64))
    ids = np.array([[0], [1], [1], [0], [1]])
    out = torch.empty(5, 64)
    forward(tensors, layer, out, torch.from_numpy(x).float(), torch.ones(5, 1), torch.from_numpy(ids))
    rounded = reference.fake_quantise_mxfp4(x)
    assert (rounded != x).any()
    for token in range(5):
        expert = int(ids[token, 0])
        hidden = reference.fake_quantise_mxfp4(np.square(np.maximum(weights["w13"][expert] @ rounded[token], 0)))
        np.testing.assert_array_equal(out[token].numpy(), weights["w2"][expert] @ hidden)


def pairs(tensor: Tensor) -> Tensor:
    """Rows of gate for rows of up."""
    return tensor.reshape(E, I, 2, -1).flip(2).reshape(tensor.shape)


Fault = Callable[[Case], None]


def change(*names: str, by: Callable[[Tensor], Tensor]) -> Fault:
    def inject(made: Case) -> None:
        for name in names:
            made.raw[name] = by(made.raw[name])

    return inject


def one_scale(scales: Tensor) -> Tensor:
    scales = scales.clone()
    scales[3, 5, 1] += 1
    return scales


def one_bit(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[3, 5, 7] ^= 1
    return codes


def activation(**changes: Any) -> Fault:
    def inject(made: Case) -> None:
        act = dataclasses.replace(made.problem.activation, **changes)
        made.problem = dataclasses.replace(made.problem, activation=act)

    return inject


def scheme_of(**changes: Any) -> Fault:
    def inject(made: Case) -> None:
        made.problem = dataclasses.replace(made.problem, scheme=dataclasses.replace(made.problem.scheme, **changes))

    return inject


FAULTS: dict[str, Fault] = {
    "rows taken for halves": activation(interleaved=False),
    "gate and up swapped": change("w13", "w13_scale", "w13_bias", by=pairs),
    "gate and up swapped in weights only": change("w13", by=pairs),
    "gate and up swapped in scales only": change("w13_scale", by=pairs),
    "gate and up swapped in biases only": change("w13_bias", by=pairs),
    "high nibble first in w13": change("w13", by=lambda codes: codes << 4 | codes >> 4),
    "high nibble first in w2": change("w2", by=lambda codes: codes << 4 | codes >> 4),
    "no bias of w13": change("w13_bias", by=torch.zeros_like),
    "no bias of w2": change("w2_bias", by=torch.zeros_like),
    "all scales off by one exponent": change("w2_scale", by=lambda scales: scales + 1),
    "one scale off by one exponent": change("w2_scale", by=one_scale),
    "blocks of scales in another order": change("w2_scale", by=lambda scales: scales.flip(-1)),
    "one bit of one code": change("w2", by=one_bit),
    "alpha": activation(alpha=1.0),
    "beta": activation(beta=0.0),
    "limit": activation(limit=None),
    "activations in mxfp8": scheme_of(activations="mxfp8"),
    "activations in mxfp4": scheme_of(activations="mxfp4"),
    "activations in fp8": scheme_of(activations="fp8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_outside_the_bound(fault: str) -> None:
    made = case(dataclasses.replace(OTHER, interleaved=True))
    judge = made.judge()
    assert judge(made.run()) == ""
    FAULTS[fault](made)
    assert judge(made.run()) != ""


@pytest.mark.parametrize("activations", ["int8"])
def test_activations_that_emulation_cannot_round_are_refused_with_what_it_can(activations: Any) -> None:
    layer = dataclasses.replace(LAYER, scheme=dataclasses.replace(GPT_OSS_SCHEME, activations=activations))
    (reason,) = BACKEND.check(layer, CPU).reasons
    assert reason.code == "activations" and "mxfp8 or fp8 or mxfp4" in reason.detail and activations in reason.detail


@pytest.mark.parametrize("columns", [32, 128, 160, 384])
def test_fp8_activations_have_one_power_of_two_per_128(columns: int) -> None:
    """Against a loop over groups in float64, with the code's value from its bits."""
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(3, columns, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (3, columns), generator=generator).float()
    )
    values[0, :20] = 0
    values[1] = 0
    found = fp8.round_trip(values)
    assert found.shape == values.shape and found.dtype == torch.float32
    numbers = [e4m3(code) for code in range(127)]
    for row in range(3):
        for start in range(0, columns, 128):
            group = values[row, start : start + 128].tolist()
            largest = max(map(abs, group))
            scale = 2.0 ** max(math.ceil(math.log2(largest / 448)), -127) if largest else 1.0
            for value, result in zip(group, found[row, start : start + 128].tolist(), strict=True):
                nearest = min(numbers, key=lambda number: abs(abs(value) / scale - number))
                assert abs(abs(result) / scale - abs(value) / scale) == abs(abs(value) / scale - nearest)
                assert result == 0 or (result < 0) == (value < 0)


def e4m3(code: int) -> float:
    """A positive e4m3 number: 4 bits of exponent with bias 7, 3 of fraction."""
    exponent, fraction = code >> 3, code & 7
    return math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)


# TP 4 is a way out of TP 8: its ranks get 736 or 672 features, all in whole blocks.
@pytest.mark.parametrize(("tp", "size", "way_out"), [(4, 720, "TP 2"), (8, 360, "TP 4")])
def test_a_cut_that_splits_blocks_is_refused_with_numbers_and_a_way_out(tp: int, size: int, way_out: str) -> None:
    layer = dataclasses.replace(
        problem(tp=tp), scheme=GPT_OSS_SCHEME, hidden_size=2880, intermediate_size=size, activation=ALTERNATING
    )
    (reason,) = BACKEND.check(layer, CPU).reasons
    assert reason.code == "group.intermediate" and f"2880 / {tp} = {size}" in reason.detail
    assert way_out in reason.remedy and "expert parallel" in reason.remedy
