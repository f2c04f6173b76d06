"""Integer weights: numbers, quantization, the arithmetic of a cut, and emulation of every kind of layer."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib import reference
from tests.lib.cases import H200, INT4_G128, problem
from tests.lib.tolerances import Layer, moe_bound, outside
from tests.lib.wna16_canonical import to_canonical
from tests.lib.wna16_layers import PACKINGS, contents_of, emulation_error, layer_of
from vllm_moe_oracle.backends.emulation import BACKEND, forward
from vllm_moe_oracle.core.decision import Accepted
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.core.sharding import (
    codes_per_word,
    has_act_order,
    has_group_index,
    loaded_group_size,
    scale_columns,
    split_reasons,
)
from vllm_moe_oracle.schemes import wna16

# --- Numbers ----------------------------------------------------------------------------------------------------------


def extreme_scales(dtype: torch.dtype) -> Tensor:
    """Of every size that the type has: largest, smallest, full significands, both signs, zero."""
    info = torch.finfo(dtype)
    values = torch.tensor([info.max / 512, info.tiny, 1 + info.eps, 2 - info.eps, 1 / 3, -1.7, 0.0, 3e-3])
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_with_every_zero_point_is_exact(bits: int, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    count = 1 << bits
    scales = extreme_scales(scale_dtype)
    # Row z has zero point z; each of the 8 groups holds all codes.
    codes = torch.arange(count).repeat(count, len(scales)).to(torch.uint8)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    zeros = torch.arange(count).repeat(len(scales), 1).T.to(torch.uint8)
    each = scales.repeat(count, 1)
    found = wna16.dequantize(packed, each, bits, zeros, dtype=dtype)
    expected = reference.dequantize_integers(
        codes.numpy().astype(np.int64), each.double().numpy(), bits, zeros.numpy().astype(np.int64)
    )
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.double().numpy(), expected)
    symmetric = wna16.dequantize(packed, each, bits, dtype=dtype)
    assert torch.equal(symmetric[0], wna16.dequantize(packed, each, bits, torch.full_like(zeros, count // 2))[0])


def test_the_low_nibble_is_the_first_code() -> None:
    packed = torch.tensor([[0x98, 0x7A]], dtype=torch.uint8)
    assert wna16.dequantize(packed, torch.ones(1, 1), 4).tolist() == [[0.0, 1.0, 2.0, -1.0]]


def test_an_order_and_an_index_of_groups_put_features_back() -> None:
    # Features 0, 2 are of group 1, features 1, 3 of group 0; the columns of codes are sorted by group.
    codes = torch.tensor([[9, 10, 11, 12]], dtype=torch.uint8)
    scales, order = torch.tensor([[1.0, 100.0]]), torch.tensor([1, 3, 0, 2], dtype=torch.int32)
    whole = wna16.dequantize(codes, scales, 8, torch.tensor([[8, 8]]).to(torch.uint8), order)
    assert whole.tolist() == [[300.0, 1.0, 400.0, 2.0]]
    # A rank with three of four features, one of them of group 0.
    index = torch.tensor([0, 1, 1], dtype=torch.int32)
    part = wna16.dequantize(
        codes[:, :3], scales, 8, torch.tensor([[8, 9]]).to(torch.uint8), torch.tensor([1, 0, 2]), index
    )
    assert part.tolist() == [[100.0, 1.0, 200.0]]


def test_groups_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="4 input features are not a multiple of 3 scales"):
        wna16.dequantize(torch.zeros(1, 4, dtype=torch.uint8), torch.ones(1, 3), 8)
    with pytest.raises(ValueError, match="96 input features are not a multiple of the group 64"):
        wna16.quantize(torch.ones(1, 96), 4, 64)


# --- Quantizing -------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([4, 8]), st.sampled_from([32, 64, -1]), st.booleans(), st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(-8, 8), st.integers(0, 10_000),
)  # fmt: skip
def test_quantizing_errs_by_half_a_step(
    bits: int, group: int, zero_points: bool, ordered: bool, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 128, generator=generator) * 2.0**exponent
    values[1] = values[1].abs()
    values[2, :64] = 0
    order = torch.randperm(128, generator=generator) if ordered else None
    codes, scales, zeros = wna16.quantize(values, bits, group, zero_points, order, dtype)
    groups = 1 if group == -1 else 128 // group
    assert codes.dtype == torch.uint8 and codes.shape == (3, 128 * bits // 8)
    assert scales.dtype == dtype and scales.shape == (3, groups)
    assert (zeros is not None) is zero_points and (zeros is None or zeros.shape == scales.shape)
    found = wna16.dequantize(codes, scales, bits, zeros, order, dtype=torch.float64)
    steps = scales.double().repeat_interleave(128 // groups, 1)
    if order is not None:
        steps = steps[:, order.argsort()]
    # Half a step; a scale that was rounded down leaves up to its relative error of the whole range at each end, and
    # quotients are of float32.
    unit = torch.finfo(dtype).eps / 2 + 2.0**-22
    assert ((found - values).abs() <= steps * (0.5 + (1 << bits) * unit)).all()
    assert (found[2, :64] == 0).all()


def test_quantized_values_are_found_again() -> None:
    # Values on the grid, both ends in use, come back as they are.
    layer = layer_of(bits=4, group=32, zero_points=True)
    made = contents_of(layer)
    made.codes["w2"][:, :, ::32], made.codes["w2"][:, :, 1::32] = 0, 15
    made.zeros["w2"][:] = 7
    weights = torch.from_numpy(made.weights("w2")[0]).float()
    codes, scales, zeros = wna16.quantize(weights, 4, 32, True)
    assert zeros is not None and (zeros == 7).all() and torch.equal(scales, made.scales["w2"][0])
    assert torch.equal(wna16.dequantize(codes, scales, 4, zeros), weights)


# --- A cut ------------------------------------------------------------------------------------------------------------


def test_sharding_cuts_scales_with_groups_unless_act_order() -> None:
    whole = Problem(
        "layer", Scheme("wna16", 4, 128, "gptq"), 8, 8, 2, 2048, 768, Activation("silu")
    )  # fmt: skip
    for act_order, ranks, columns, ordered, indexed in (
        ("none", 1, (16, 6), False, False),
        ("none", 2, (16, 3), False, False),
        ("static", 2, (16, 3), False, False),
        ("group", 1, (16, 6), True, False),
        ("group", 2, (16, 6), True, True),
        ("group", 4, (16, 6), True, True),
    ):
        scheme = dataclasses.replace(whole.scheme, act_order=act_order)  # type: ignore[arg-type]
        part = problem(scheme=scheme, experts=8, intermediate_size=768 // ranks, tp=ranks)
        assert (scale_columns(part), has_act_order(part), has_group_index(part)) == (columns, ordered, indexed)
        assert split_reasons(part) == []
    channel = problem(scheme=Scheme("wna16", 8, -1, "gptq", act_order="group"), intermediate_size=192, tp=4)
    assert scale_columns(channel) == (1, 1) and not has_act_order(channel) and not has_group_index(channel)


def test_groups_out_of_order_are_not_halved() -> None:
    ordered = Scheme("wna16", 4, 128, "moe_wna16", act_order="group")
    part = problem(scheme=ordered, intermediate_size=320, tp=2)
    assert loaded_group_size(part) == 128 and scale_columns(part) == (16, 5)
    assert (
        loaded_group_size(problem(scheme=dataclasses.replace(ordered, act_order="none"), intermediate_size=320)) == 64
    )


def test_with_act_order_only_the_whole_size_must_be_whole_groups() -> None:
    scheme = dataclasses.replace(INT4_G128, act_order="group")
    assert split_reasons(problem(scheme=scheme, intermediate_size=320, tp=2)) == []
    (reason,) = split_reasons(problem(scheme=scheme, intermediate_size=352, tp=2))
    assert reason.detail == "intermediate size 704 is not a multiple of the scale group 128 (704 mod 128 = 64)"


@given(st.sampled_from([32, 64, 96, 128, 256, -1]), st.integers(1, 64), st.integers(1, 64))
def test_the_group_that_moe_wna16_loads_is_the_largest_half_that_fits(group: int, hidden: int, inner: int) -> None:
    layer = problem(
        scheme=Scheme("wna16", 4, group, "moe_wna16"), hidden_size=32 * hidden, intermediate_size=32 * inner
    )
    found = loaded_group_size(layer)
    halves = [group >> times for times in range(4) if group >> times >= 32 and group % (1 << times) == 0]
    fitting = [each for each in halves if 32 * hidden % each == 0 and 32 * inner % each == 0]
    assert found == (-1 if group == -1 else fitting[0] if fitting else halves[-1])
    assert bool(split_reasons(layer)) is (group != -1 and not fitting)


@pytest.mark.parametrize(
    ("packing", "bits", "codes"),
    [
        ("gptq", 4, 8), ("gptq_v2", 8, 4), ("awq", 4, 8), ("compressed-tensors", 4, 8), ("compressed-tensors", 8, 4),
        ("moe_wna16", 4, 2), ("moe_wna16", 8, 1), ("compressed-tensors-int", 4, 2), ("compressed-tensors-int", 8, 1),
    ],
)  # fmt: skip
def test_shards_never_split_a_packed_word(packing: str, bits: int, codes: int) -> None:
    scheme = Scheme("wna16", bits, -1, packing)
    good = problem(scheme=scheme, hidden_size=64, intermediate_size=8 * codes, tp=2)
    assert codes_per_word(good) == codes and split_reasons(good) == []
    if codes > 1:
        bad = problem(scheme=scheme, hidden_size=64 + codes // 2, intermediate_size=codes * 3 // 2, tp=2)
        first, second = split_reasons(bad)
        assert (first.code, second.code) == ("packing.hidden", "packing.intermediate")
        size = codes * 3 // 2
        assert second.detail == (
            f"intermediate size {2 * size} / 2 = {size} is not a multiple of the {codes} codes in one word of the "
            f"packing {packing} ({size} mod {codes} = {codes // 2})"
        )
        assert (first.remedy, second.remedy) == ("", "")  # no other cut makes the hidden size fit
        (only,) = split_reasons(dataclasses.replace(bad, hidden_size=64))
        assert only.remedy.startswith("TP 1 or expert parallelism")
        assert [reason.code for reason in BACKEND.check(bad, H200).reasons] == [first.code, second.code]  # type: ignore[union-attr]


def test_unpacked_formats_have_no_packing_reasons() -> None:
    codes = [reason.code for reason in split_reasons(problem(hidden_size=33, intermediate_size=35))]
    assert codes == ["group.hidden", "group.intermediate"]


# --- Emulation --------------------------------------------------------------------------------------------------------

H, I, E, M, K = 128, 128, 3, 4, 2  # noqa: E741 - the usual letters


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_emulation_of_every_kind_of_layer(bits: int, group: int) -> None:
    packings = itertools.cycle(PACKINGS)
    for zeros, order, bias, gated in itertools.product(
        (False, True), ("none", "group", "static"), (False, True), (False, True)
    ):
        layer = layer_of(
            next(packings), bits, group, zeros, order, bias, gated,  # type: ignore[arg-type]
            experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype="float32" if bias else "bfloat16",
        )  # fmt: skip
        assert BACKEND.check(layer, H200) == Accepted()
        made = contents_of(layer)
        tensors = to_canonical(made.parameters(), layer, None if "compressed" not in layer.scheme.packing else False)
        assert emulation_error(made, layer, tensors) == "", layer


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w13_zero_point", "w13_order", "w2_scale", "w2_zero_point", "w2"])
def test_a_fault_in_any_tensor_is_noticed(name: str) -> None:
    layer = layer_of(
        "gptq", 4, 32, True, "group", experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype="float32"
    )
    made = contents_of(layer)
    tensors = to_canonical(made.parameters(), layer)
    assert emulation_error(made, layer, tensors) == ""
    # Neighbors in place of each other: a wrong order of nibbles, groups, features.
    assert "outside" in emulation_error(made, layer, tensors | {name: tensors[name].roll(1, -1)})


def test_nibbles_the_wrong_way_round_are_noticed() -> None:
    layer = layer_of(experts=E, top_k=K, hidden_size=H, intermediate_size=I)
    made = contents_of(layer)
    tensors = to_canonical(made.parameters(), layer)
    assert "outside" in emulation_error(made, layer, tensors | {"w13": tensors["w13"] >> 4 | tensors["w13"] << 4})


@pytest.mark.parametrize("order", ["none", "group"])
def test_the_ranks_outputs_sum_to_the_layers(order: Any) -> None:
    layer = layer_of(
        "gptq", 4, 32, True, order, experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype="float32"
    )
    made = contents_of(layer)
    rng = np.random.default_rng(1)
    ids, weights = np.argsort(rng.random((M, E)), axis=1)[:, :K], rng.uniform(0.1, 1.0, (M, K)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((M, H))).to(torch.float32)
    total = torch.zeros(M, H)
    for rank in range(2):
        part, out = made.on_rank(2), torch.empty(M, H)
        shard = to_canonical(made.parameters(None, rank, 2), part)
        forward(shard, part, out, x, torch.from_numpy(weights), torch.from_numpy(ids))
        total += out
    exact = Layer(made.weights("w13"), made.weights("w2"), "silu")
    inputs = (x.double().numpy(), exact, ids.astype(np.int64), weights.astype(np.float64))
    expected, bound = moe_bound(*inputs, dtype="float32")
    # One more rounded sum than in one layer.
    assert outside(total.double().numpy(), expected, bound + 2.0**-23 * np.abs(expected) + bound) == ""


def test_declared_activation_quantization_is_refused() -> None:
    layer = layer_of()
    layer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, activations="fp8"))
    (reason,) = BACKEND.check(layer, H200).reasons  # type: ignore[union-attr]
    assert reason.code == "activations" and "model's dtype, the checkpoint declares fp8" in reason.detail
    assert BACKEND.numerics(layer_of()).activations == "left in the model's dtype"


@pytest.mark.parametrize("bits", [2, 3])
def test_other_widths_are_refused(bits: int) -> None:
    reasons = BACKEND.check(layer_of(bits=bits), H200).reasons  # type: ignore[union-attr]
    assert [(reason.code, reason.detail) for reason in reasons] == [
        ("bits", f"takes 4, 8-bit codes, the checkpoint has {bits}")
    ]
