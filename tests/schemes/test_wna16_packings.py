"""Every packing of integer weights: against its documented layout, against the tools, and back again."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.wna16_canonical import from_canonical, to_canonical
from tests.lib.wna16_layers import PACKINGS, TWO_LAYOUTS, Contents, contents_of, layer_of
from vllm_moe_oracle.backends.emulation import BACKEND
from vllm_moe_oracle.compat import weight_storage
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Activation, Problem
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.schemes import wna16
from vllm_moe_oracle.schemes._wna16_parameters import detect_expert_layout, detect_layout

LAYOUTS = {packing: (False, True) if packing in TWO_LAYOUTS else (None,) for packing in PACKINGS}


def weights_of(tensors: dict[str, Tensor], matrix: Any) -> Any:
    """float64 `[E, N, K]` from canonical tensors."""
    return np.stack(
        [
            wna16.dequantize_expert({name: tensor[index] for name, tensor in tensors.items()}, matrix).double().numpy()
            for index in range(len(tensors["w13"]))
        ]
    )


# --- Read what the documented layout says -----------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_kind_of_layer_is_read_exactly(packing: str, bits: int, group: int) -> None:
    for zeros, order, bias, gated, transposed in itertools.product(
        (False, True), ("none", "group", "static"), (False, True), (False, True), LAYOUTS[packing]
    ):
        layer = layer_of(packing, bits, group, zeros, order, bias, gated)  # type: ignore[arg-type]
        made = contents_of(layer)
        loaded = made.parameters(transposed)
        tensors = to_canonical(loaded, layer, transposed)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wna16.shapes(layer)
        for matrix in ("w13", "w2"):
            np.testing.assert_array_equal(weights_of(tensors, matrix), made.weights(matrix))
            if bias:
                assert torch.equal(tensors[f"{matrix}_bias"], made.biases[matrix])
        # And back: nothing but what the reader needs, and that to the bit.
        written = from_canonical(tensors, layer, transposed)
        assert written.keys() == loaded.keys() == wna16.canonical_names(layer).keys()
        for name, tensor in loaded.items():
            assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


def test_what_a_layer_does_not_need_is_not_looked_at() -> None:
    # A symmetric GPTQ file has zero points, whatever they hold, and every GPTQ file a group index.
    layer = layer_of("gptq")
    made = contents_of(layer)
    loaded = made.parameters()
    extra = {"w13_qzeros": torch.full((2, 2, 24), 0x77777777, dtype=torch.int32), "w2_g_idx": torch.zeros(0)}
    np.testing.assert_array_equal(weights_of(to_canonical(loaded | extra, layer), "w13"), made.weights("w13"))
    assert wna16.canonical_names(layer) == {
        "w13_qweight": "w13", "w13_scales": "w13_scale", "w2_qweight": "w2", "w2_scales": "w2_scale"
    }  # fmt: skip


@st.composite
def layers(draw: st.DrawFn) -> tuple[Problem, bool | None, int]:
    """A layer of any kind and size, a layout of its packing, a seed. One rank of a cut of w2 is among them."""
    packing = draw(st.sampled_from(PACKINGS))
    bits, group = draw(st.sampled_from([4, 8])), draw(st.sampled_from([32, 64, 128, -1]))
    multiple = 8 if group == -1 else group
    order = draw(st.sampled_from(["none", "group", "static"]))
    layer = layer_of(
        packing, bits, group, draw(st.booleans()), order, draw(st.booleans()), draw(st.booleans()),  # type: ignore[arg-type]
        hidden_size=multiple * draw(st.integers(1, 2)),
        intermediate_size=multiple * draw(st.integers(1, 3)),
        experts=draw(st.integers(1, 2)),
        tp=draw(st.sampled_from([1, 2])),
    )  # fmt: skip
    return layer, draw(st.sampled_from(LAYOUTS[packing])), draw(st.integers(0, 1000))


def any_canonical(layer: Problem, seed: int) -> dict[str, Tensor]:
    """Random canonical tensors; every byte of codes, every zero point, orders that ascend within a group."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in wna16.shapes(layer).items():
        if name.endswith(("_scale", "_bias")):
            made[name] = torch.randn(shape, generator=generator).to(torch.float16)
        elif name.endswith("_order"):
            columns = shape[1] * (layer.parallel.tp if name == "w2_order" else 1)
            groups = torch.arange(columns) // layer.scheme.group_size
            each = [groups[torch.randperm(columns, generator=generator)][: shape[1]] for _ in range(shape[0])]
            index = torch.stack(each)
            made[name] = index.argsort(stable=True).to(torch.int32)
            if name == "w2_order" and layer.parallel.tp > 1:
                made["w2_group_index"] = index.sort().values.to(torch.int32)
        elif name != "w2_group_index":
            high = 1 << layer.scheme.bits if name.endswith("_zero_point") else 256
            made[name] = torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)
    return made


@settings(max_examples=60)
@given(layers())
def test_reading_what_was_written_changes_nothing(case: tuple[Problem, bool | None, int]) -> None:
    layer, transposed, seed = case
    made = any_canonical(layer, seed)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == wna16.shapes(layer)
    back = to_canonical(from_canonical(made, layer, transposed), layer, transposed)
    assert back.keys() == made.keys()
    for name, tensor in made.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["scale", "bias"])
@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_nan_scales_and_biases_are_named_and_counted(matrix: str, what: str, bad: float) -> None:
    """Of biases the self-check would not notice it: it puts its own in the place of the checkpoint's."""
    layer = layer_of("gptq", bias=True)
    made = any_canonical(layer, 0)
    made[f"{matrix}_{what}"].view(-1)[7:9] = bad
    words = rf"2 of {made[f'{matrix}_{what}'].numel()} {what}(s|es) in {matrix}_{what}s? are NaN or infinite"
    with pytest.raises(CheckpointError, match=words):
        wna16.read(from_canonical(made, layer), layer)


# --- Zero points of GPTQ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_zero_borrow_as_gptqmodel_does(bits: int) -> None:
    # GPTQModel subtracts one from every code of a word as from one number, and adds it likewise.
    ones = {4: 0b00010001000100010001000100010001, 8: 0b00000001000000010000000100000001}[bits]
    layer = layer_of("gptq", bits, zero_points=True)
    newer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, packing="gptq_v2"))
    made = contents_of(layer)
    for matrix in ("w13", "w2"):
        made.zeros[matrix][:, ::2] = 0  # type: ignore[index]
    v1 = made.parameters()
    v2 = dataclasses.replace(made, problem=newer).parameters()
    for name in ("w13_qzeros", "w2_qzeros"):
        assert torch.equal(v1[name], v2[name] - ones) and not torch.equal(v1[name], v2[name])
    old, new = to_canonical(v1, layer), to_canonical(v2, newer)
    for name in old:
        assert torch.equal(old[name], new[name])
    np.testing.assert_array_equal(old["w13_zero_point"].numpy(), made.zeros["w13"])


def test_zero_points_read_by_the_other_rule_are_wrong() -> None:
    layer = layer_of("gptq", zero_points=True)
    made = contents_of(layer)
    other = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, packing="gptq_v2"))
    assert (weights_of(to_canonical(made.parameters(), other), "w13") != made.weights("w13")).all()


def without_zero(made: Contents) -> Contents:
    """The same contents, but no zero point is 0."""
    return dataclasses.replace(made, zeros={matrix: np.maximum(zeros, 1) for matrix, zeros in made.zeros.items()})


# --- The tools themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_where_vllms_own_packing_functions_put_them(bits: int) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    for packing, pack in (("gptq", utils.gptq_pack), ("awq", utils.awq_pack)):
        layer = layer_of(packing, bits, zero_points=True)
        made = without_zero(contents_of(layer))
        loaded = made.parameters()
        for matrix in ("w13", "w2"):
            for expert in range(2):
                by_inputs = torch.from_numpy(made.codes[matrix][expert].T.copy())  # type: ignore[index]
                assert torch.equal(loaded[f"{matrix}_qweight"][expert], pack(by_inputs, bits, *by_inputs.shape))
                zeros = torch.from_numpy(made.zeros[matrix][expert].T.copy())  # type: ignore[index]
                # Both pack zero points along outputs; GPTQ's are one less, and none is zero here.
                stored, along_outputs = (zeros - 1, utils.pack_cols) if packing == "gptq" else (zeros, pack)
                packed = along_outputs(stored, bits, *zeros.shape)
                assert torch.equal(loaded[f"{matrix}_qzeros"][expert], packed)


@pytest.mark.parametrize("order", ["none", "group", "static"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_compressed_tensors_compresses_is_read_as_it_decompresses_it(
    bits: int, group: int, symmetric: bool, order: Any
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="channel" if group == -1 else "group",
        group_size=None if group == -1 else group, actorder=None if order == "none" or group == -1 else order,
    )  # fmt: skip
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    for packing, compressor in (
        ("compressed-tensors", compressors.PackedQuantizationCompressor),
        ("compressed-tensors-int", compressors.IntQuantizationCompressor),
    ):
        layer = layer_of(packing, bits, group, not symmetric, order, experts=1)
        made = contents_of(layer)
        parameters: dict[str, Tensor] = {}
        exact: dict[str, Tensor] = {}
        for matrix in ("w13", "w2"):
            # Weights that the codes hold exactly, so that quantizing gives these codes.
            scale = made.scales[matrix][0].float()  # type: ignore[index]
            state = {"weight": torch.from_numpy(made.weights(matrix)[0]).float(), "weight_scale": scale}  # type: ignore[arg-type]
            if not symmetric:
                state["weight_zero_point"] = torch.from_numpy(made.zeros[matrix][0] - (1 << bits - 1)).to(torch.int8)  # type: ignore[index]
            if order == "group" and group != -1:
                state["weight_g_idx"] = torch.from_numpy(made.groups[matrix][0]).to(torch.int32)  # type: ignore[index]
            compressed = compressor.compress(state, scheme)
            for name, tensor in compressed.items():
                parameters[f"{matrix}_{name}"] = tensor.unsqueeze(0)
            exact[matrix] = compressor.decompress(compressed, scheme)["weight"]
        assert set(wna16.canonical_names(layer)) <= set(parameters)
        read = to_canonical(parameters, layer)
        for matrix in ("w13", "w2"):
            np.testing.assert_array_equal(weights_of(read, matrix)[0], exact[matrix].double().numpy())
            np.testing.assert_array_equal(weights_of(read, matrix), made.weights(matrix))  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4), ("gptq", 8), ("awq", 4)])
def test_what_vllms_moe_wna16_loader_stores_is_read_as_the_file_means_it(method: str, bits: int) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.quantization.moe_wna16")
    layer = layer_of(method, bits, zero_points=True)
    # Its own addition of one loses the carry between bytes, which only a zero point of 0 has.
    made = without_zero(contents_of(layer))
    inner, outer = layer.intermediate_size, layer.hidden_size

    class Layer:
        class moe_config:
            tp_size = 1

        class quant_config:
            linear_quant_method, weight_bits, has_zp, bit8_pack_factor = method, bits, True, 8 // bits

        group_size_div_factor, intermediate_size_per_partition = 1, inner

    def stock_loader(param: Tensor, weight: Tensor, name: str, shard: str, expert: int, **kwargs: Any) -> None:
        half = {"w1": slice(0, inner), "w3": slice(inner, None), "w2": slice(None)}[shard]
        param.data[expert, half] = weight

    target = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, packing="moe_wna16"))
    stored: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "get_tp_group", lambda: type("Group", (), {"device": "cpu"}))
        patch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        load = module.MoeWNA16Method.get_weight_loader(Layer, stock_loader)
        for name, tensor in made.parameters().items():
            rows, columns = (2 * inner, outer) if name.startswith("w13") else (outer, inner)
            shape = {
                "qweight": (rows, columns * bits // 8),
                "scales": (rows, columns // 32),
                "qzeros": (rows * bits // 8, columns // 32),
            }[name.partition("_")[2]]
            dtype = tensor.dtype if name.endswith("scales") else torch.uint8
            stored[name] = torch.zeros(2, *shape, dtype=dtype)
            param = torch.nn.Parameter(stored[name], requires_grad=False)
            shards = ("w1", "w3") if name.startswith("w13") else ("w2",)
            for expert in range(2):
                for shard, file in zip(shards, tensor[expert].chunk(len(shards), dim=1), strict=True):
                    load(param, file.contiguous(), name, shard, expert)
    read = to_canonical(stored, target)
    for matrix in ("w13", "w2"):
        np.testing.assert_array_equal(weights_of(read, matrix), made.weights(matrix))  # type: ignore[arg-type]


# --- Which dimension is first -----------------------------------------------------------------------------------------


def square(bits: int = 4, **changes: Any) -> Problem:
    """The codes of w13, which has no gate, have as many rows as words a row."""
    words = 32 // bits
    return layer_of(bits=bits, gated=False, hidden_size=32 * words, intermediate_size=32, **changes)


def marked(loaded: dict[str, Tensor], mark: bool, *names: str) -> dict[str, Tensor]:
    """The same as parameters with vLLM's mark."""
    found: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        found[name] = torch.nn.Parameter(tensor, requires_grad=False)
        if not names or name in names:
            found[name].is_transposed = mark  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_square_codes_are_read_only_when_something_says_how(bits: int, transposed: bool) -> None:
    layer = square(bits)
    made = contents_of(layer)
    loaded = made.parameters(transposed)
    shape = loaded["w13_weight_packed"].shape
    assert shape[1] == shape[2]
    words = r"w13_weight_packed \[2, 32, 32\] could have its rows or its input features first. Report it with"
    with pytest.raises(CheckpointError, match=words):
        wna16.read(loaded, layer)
    for known in (to_canonical(loaded, layer, transposed), to_canonical(marked(loaded, transposed), layer)):
        for matrix in ("w13", "w2"):
            np.testing.assert_array_equal(weights_of(known, matrix), made.weights(matrix))  # type: ignore[arg-type]
    # The wrong word is never believed: the scales, or the other matrix, do not fit it.
    for wrong in (
        dict(parameters=loaded, is_transposed=not transposed),
        dict(parameters=marked(loaded, not transposed)),
    ):
        with pytest.raises(CheckpointError, match=r"has shape .* expected"):
            wna16.read(problem=layer, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", TWO_LAYOUTS)
def test_shapes_decide_where_they_can(packing: str) -> None:
    layer = layer_of(packing, zero_points=True)
    made = contents_of(layer)
    for transposed in (False, True):
        for loaded in (made.parameters(transposed), marked(made.parameters(transposed), transposed)):
            np.testing.assert_array_equal(weights_of(to_canonical(loaded, layer), "w2"), made.weights("w2"))


def test_contradicting_is_transposed_attributes_are_refused() -> None:
    layer = layer_of()
    loaded = contents_of(layer).parameters(False)
    mixed = marked(marked(loaded, False), True, "w2_weight_scale")
    with pytest.raises(CheckpointError, match=r"contradictory .*w2_weight_scale.is_transposed: True"):
        wna16.read(marked(loaded, False, "w2_weight_packed") | {"w2_weight_scale": mixed["w2_weight_scale"]}, layer)
    with pytest.raises(CheckpointError, match=r"is_transposed: True, w13_weight_packed.is_transposed: False"):
        wna16.read(marked(loaded, False), layer, is_transposed=True)
    for packing, mark in (("gptq", False), ("awq", False), ("moe_wna16", True)):
        other = layer_of(packing)
        with pytest.raises(CheckpointError, match=f"the packing {packing} says it: {not mark}"):
            wna16.read(contents_of(other).parameters(), other, mark)
        with pytest.raises(CheckpointError, match=f"the packing {packing} is never"):
            from_canonical(to_canonical(contents_of(other).parameters(), other), other, mark)


def test_matrices_of_different_orders_are_refused() -> None:
    layer = layer_of()
    made = contents_of(layer)
    one, other = made.parameters(False), made.parameters(True)
    half = {name: (one if name.startswith("w13") else other)[name] for name in one}
    with pytest.raises(CheckpointError, match="do not have their dimensions in the same order"):
        wna16.read(half, layer)
    with pytest.raises(CheckpointError, match=r"w13_weight_scale has shape \[2, 2, 192\], expected \[2, 192, 2\]"):
        wna16.read(one | {"w13_weight_scale": other["w13_weight_scale"]}, layer)


@settings(max_examples=60)
@given(layers())
def test_one_experts_tensors_leave_no_choice(case: tuple[Problem, bool | None, int]) -> None:
    # What canonical_expert takes from the shapes is what reading found out from everything.
    layer, transposed, seed = case
    loaded = from_canonical(any_canonical(layer, seed), layer, transposed)
    raw = wna16.read(loaded, layer, transposed)
    # Nothing was copied to read it, and what comes out is known without data.
    assert all(raw[own].data_ptr() == loaded[name].data_ptr() for name, own in wna16.canonical_names(layer).items())
    expert = {name: tensor[0] for name, tensor in raw.items()}
    real = wna16.canonical_expert(expert, layer)
    empty = wna16.canonical_expert({name: tensor.to("meta") for name, tensor in expert.items()}, layer)
    assert {name: (each.shape, each.dtype) for name, each in real.items()} == {
        name: (each.shape, each.dtype) for name, each in empty.items()
    }
    assert all(each.stride() == torch.empty(each.shape).stride() for each in real.values())
    found = detect_expert_layout({name: tensor[0] for name, tensor in raw.items()}, layer)
    assert found == detect_layout(loaded, layer, transposed)


# --- Cut over ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["none", "group", "static"])
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_ranks_shards_are_the_whole(packing: str, group: int, order: Any) -> None:
    for bits, ranks, gated in ((4, 2, True), (4, 4, False), (8, 2, False)):
        layer = layer_of(
            packing, bits, group, True, order, True, gated, hidden_size=128, intermediate_size=256, experts=1
        )
        made, part = contents_of(layer), contents_of(layer).on_rank(ranks)
        loaded = [made.parameters(LAYOUTS[packing][-1], rank, ranks) for rank in range(ranks)]
        shards = [to_canonical(each, part, LAYOUTS[packing][-1]) for each in loaded]
        assert all({name: tuple(each.shape) for name, each in shard.items()} == wna16.shapes(part) for shard in shards)
        second = np.concatenate([weights_of(shard, "w2") for shard in shards], axis=2)
        np.testing.assert_array_equal(second, made.weights("w2"))
        halves = [np.split(weights_of(shard, "w13"), 2 if gated else 1, axis=1) for shard in shards]
        first = np.concatenate([half for side in zip(*halves, strict=True) for half in side], axis=1)
        np.testing.assert_array_equal(first, made.weights("w13"))
        if order == "group" and group != -1:
            # Some rank has groups of unequal size: without the index its scales could not be told.
            members = [np.bincount(shard["w2_group_index"][0], minlength=256 // group) for shard in shards]
            assert any(len(set(count.tolist())) > 1 for count in members) and sum(members).tolist() == [group] * (
                256 // group
            )


def test_split_groups_need_all_scales_on_every_rank() -> None:
    # 640 / 2 = 320 in groups of 128.
    sizes = {"hidden_size": 128, "intermediate_size": 640, "experts": 1}
    for packing in ("gptq", "compressed-tensors"):
        ordered = layer_of(packing, group=128, act_order="group", **sizes)  # type: ignore[arg-type]
        made = contents_of(ordered)
        shards = [to_canonical(made.parameters(None, rank, 2), made.on_rank(2)) for rank in range(2)]
        second = np.concatenate([weights_of(shard, "w2") for shard in shards], axis=2)
        np.testing.assert_array_equal(second, made.weights("w2"))
    plain = contents_of(layer_of("compressed-tensors", group=32, **sizes | {"intermediate_size": 96}))  # type: ignore[arg-type]
    words = r"intermediate size 96 / 2 = 48 is not a multiple of the scale group 32 \(48 mod 32 = 16\). TP 1 would work"
    with pytest.raises(CheckpointError, match=words):
        wna16.read(plain.parameters(), plain.on_rank(2))


@pytest.mark.parametrize("packing", PACKINGS)
def test_groups_are_made_smaller_where_a_shard_would_split_them(packing: str) -> None:
    layer = layer_of(packing, group=128, zero_points=True, hidden_size=128, intermediate_size=640)
    made, part = contents_of(layer), contents_of(layer).on_rank(2)
    assert wna16.shapes(part)["w2_scale"] == (2, 128, 5) and wna16.shapes(part)["w13_scale"] == (2, 640, 2)
    shards = [to_canonical(made.parameters(None, rank, 2), part) for rank in range(2)]
    second = np.concatenate([weights_of(shard, "w2") for shard in shards], axis=2)
    np.testing.assert_array_equal(second, made.weights("w2"))


# --- Wrong ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_parameter_is_checked_for_its_name_its_dtype_and_its_shape(packing: str) -> None:
    layer = layer_of(packing, zero_points=True, act_order="group", bias=True)
    loaded = contents_of(layer).parameters()
    wna16.read(loaded, layer)
    for name, tensor in loaded.items():
        without = {other: each for other, each in loaded.items() if other != name}
        with pytest.raises(CheckpointError, match=f"{layer.layer}: {name} is missing. The layer's parameters are"):
            wna16.read(without, layer)
        with pytest.raises(CheckpointError, match=f"{name} is float64, the packing {packing} stores it as"):
            wna16.read(loaded | {name: tensor.double()}, layer)
        with pytest.raises(CheckpointError, match=rf"{name} has shape \[2, .*\], expected \[2, "):
            wna16.read(loaded | {name: tensor[:, :-1]}, layer)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_scales_are_refused(bad: float) -> None:
    layer = layer_of("awq")
    loaded = contents_of(layer).parameters()
    loaded["w2_scales"][1, 2, 3:5] = bad
    with pytest.raises(CheckpointError, match="2 of 384 scales in w2_scales are NaN or infinite"):
        wna16.read(loaded, layer)


def test_int4_in_whole_bytes_must_be_int4() -> None:
    layer = layer_of("compressed-tensors-int", zero_points=True)
    for name in ("w13_weight", "w2_weight_zero_point"):
        loaded = contents_of(layer).parameters()
        loaded[name][0, 1, 1] = 8
        with pytest.raises(CheckpointError, match=f"{name} has values from -8 to 8; int4 is -8 to 7"):
            wna16.read(loaded, layer)


def test_a_group_index_that_was_never_loaded_is_refused() -> None:
    layer = layer_of("gptq", act_order="group")
    made = contents_of(layer)
    for value, words in (
        (-1, "w2_g_idx has groups from -1 to 2; there are 3 of 32 input features"),
        (3, "w2_g_idx has groups from 0 to 3; there are 3 of 32 input features"),
    ):
        loaded = made.parameters()
        loaded["w2_g_idx"][1, 5] = value
        with pytest.raises(CheckpointError, match=words):
            wna16.read(loaded, layer)
    loaded = made.parameters()
    loaded["w13_g_idx"][1] = 0
    with pytest.raises(CheckpointError, match="w13_g_idx gives group 0 of expert 1 64 input features, not 32"):
        wna16.read(loaded, layer)
    part = made.parameters(None, 1, 2)
    part["w2_g_idx"].zero_()
    with pytest.raises(CheckpointError, match="w2_g_idx gives group 0 of expert 0 48 input features, not 32"):
        wna16.read(part, made.on_rank(2))


def test_layers_that_no_packing_holds_are_refused() -> None:
    cases = [
        (layer_of("marlin"), "unknown packing 'marlin'. Known are gptq, gptq_v2, awq"),
        (layer_of(bits=3), "codes of 3 bits cannot be read, only of 4 and 8"),
        (
            dataclasses.replace(layer_of(), activation=Activation("swigluoai", interleaved=True)),
            "the rows of w13 alternate gate and up",
        ),
        (
            layer_of(group=-1, intermediate_size=100, tp=2),
            r"200 / 2 = 100 is not a multiple of the 8 codes in one word",
        ),
    ]
    for layer, words in cases:
        with pytest.raises(CheckpointError, match=words):
            wna16.read({}, layer)


# --- One expert at a time, in place -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "order"), [(32, "none"), (32, "group"), (-1, "none")])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_layer_is_converted_in_place_for_a_backend(packing: str, group: int, order: Any) -> None:
    whole = contents_of(layer_of(packing, 4, group, True, order, True, intermediate_size=256))
    layer = whole.on_rank(2)
    loaded, plan = whole.parameters(None, 1, 2), ShardPlan(layer.hidden_size, layer.intermediate_size)
    expected = to_canonical(loaded, layer)
    module = torch.nn.Module()
    for name, tensor in loaded.items():
        module.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def convert(expert: dict[str, Tensor]) -> dict[str, Tensor]:
        return BACKEND.convert(wna16.canonical_expert(expert, layer), layer, plan)

    names = {own: name for name, own in wna16.canonical_names(layer).items()}
    for own, kind in weight_storage.converted_specs(
        convert, {own: getattr(module, name).data for own, name in names.items()}
    ).items():
        if own in names:
            weight_storage.reserve_expert_buffers(getattr(module, names[own]), kind)
            getattr(module, names[own]).data.copy_(loaded[names[own]])
    kernel = weight_storage.convert_in_place(module, names, convert)
    assert kernel.keys() == expected.keys()
    for own, name in kernel.items():
        assert torch.equal(getattr(module, name).data, expected[own]), own
