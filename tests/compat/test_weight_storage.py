"""Conversion in place: the storage that loaders fill becomes the storage that kernels read, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.lib.peak_memory import Peak
from vllm_moe_oracle.compat import weight_storage
from vllm_moe_oracle.errors import LifecycleError

EXPERTS, ROWS, COLUMNS = 5, 6, 8
NAMES = {"w13": "w13_weight", "w13_scale": "w13_weight_scale"}
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def make_layer(experts: int = EXPERTS, rows: int = ROWS, columns: int = COLUMNS) -> nn.Module:
    """A layer with random bytes as codes `[experts, rows, columns]` and scales `[experts, rows, columns / 4]`."""
    layer = nn.Module()
    codes = torch.randint(0, 256, (experts, rows, columns), dtype=torch.uint8)
    scales = torch.randint(0, 256, (experts, rows, columns // 4), dtype=torch.uint8)
    layer.w13_weight = nn.Parameter(codes, requires_grad=False)
    layer.w13_weight_scale = nn.Parameter(scales, requires_grad=False)
    return layer


def raw_of(layer: nn.Module) -> dict[str, Tensor]:
    return {own: getattr(layer, name).data.clone() for own, name in NAMES.items()}


def grow(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**expert, "w13": nn.functional.pad(expert["w13"], (0, 3, 0, 2))}


def shrink(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**expert, "w13": expert["w13"][::2].contiguous()}


def retype(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**expert, "w13_scale": expert["w13_scale"].to(torch.float32)}


def swap_halves(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """A view of the very memory that it replaces."""
    return {**expert, "w13": torch.roll(expert["w13"], ROWS // 2, 0), "w13_scale": expert["w13_scale"].flip(-1)}


def alias(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**expert, "w13": expert["w13"].view(COLUMNS, ROWS)}


def add_and_drop(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"w13": expert["w13"], "sums": expert["w13"].to(torch.int32).sum(-1) + expert["w13_scale"].sum(-1)}


def add_empty(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without numbers, one of them in a parameter's place."""
    more = {"none": torch.zeros(0), "no_rows": torch.zeros(0, 3, dtype=torch.float64), "w13_scale": torch.zeros(2, 0)}
    return {**expert, **more}


CONVERSIONS = [grow, shrink, retype, swap_halves, alias, add_and_drop, add_empty]


@pytest.mark.parametrize("convert", CONVERSIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("experts", [1, 2, EXPERTS])
@pytest.mark.parametrize("room", [True, False], ids=["planned", "reloaded"])
def test_every_expert_is_converted_from_its_own_weights(convert: Convert, experts: int, room: bool) -> None:
    layer = make_layer(experts)
    filled = raw_of(layer)
    if room:
        kinds = weight_storage.converted_specs(convert, filled)
        for own, name in NAMES.items():
            if own in kinds:
                weight_storage.reserve_expert_buffers(getattr(layer, name), kinds[own])
        for own, name in NAMES.items():  # loaders write into the parameter, whatever lies under it
            getattr(layer, name).data.copy_(filled[own])
    names = weight_storage.convert_in_place(layer, NAMES, convert)
    for index in range(experts):
        expected = convert({own: tensor[index] for own, tensor in filled.items()})
        assert names.keys() == expected.keys()
        for own, tensor in expected.items():
            assert torch.equal(getattr(layer, names[own])[index], tensor), (own, index)


def test_a_layout_of_the_same_size_stays_in_the_same_memory() -> None:
    layer = make_layer()
    before = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    weight_storage.convert_in_place(layer, NAMES, swap_halves)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == before


def test_a_larger_layout_stays_in_the_memory_that_was_planned_for_it() -> None:
    layer = make_layer()
    weight_storage.reserve_expert_buffers(layer.w13_weight, weight_storage.converted_specs(grow, raw_of(layer))["w13"])
    assert tuple(layer.w13_weight.shape) == (EXPERTS, ROWS, COLUMNS)
    before = layer.w13_weight.data_ptr()
    weight_storage.convert_in_place(layer, NAMES, grow)
    assert layer.w13_weight.data_ptr() == before
    assert tuple(layer.w13_weight.shape) == (EXPERTS, ROWS + 2, COLUMNS + 3)


def test_what_the_kernel_does_not_need_is_freed() -> None:
    layer = make_layer()
    weight_storage.convert_in_place(layer, NAMES, add_and_drop)
    assert not hasattr(layer, "w13_weight_scale")
    assert layer.sums.dtype == torch.int64 or layer.sums.dtype == torch.int32


def test_a_conversion_that_depends_on_values_is_refused() -> None:
    layer = make_layer()
    layer.w13_weight.data.zero_()
    layer.w13_weight.data[3] = 1

    def crop(expert: dict[str, Tensor]) -> dict[str, Tensor]:
        if expert["w13"].is_meta or not expert["w13"].any():
            return dict(expert)
        return {**expert, "w13": expert["w13"][:2].clone()}

    with pytest.raises(
        LifecycleError, match=r"expert 3's w13 became uint8 \[2, 8\], the first one's is uint8 \[6, 8\]"
    ):
        weight_storage.convert_in_place(layer, NAMES, crop)


def test_an_expert_without_one_of_the_first_ones_tensors_is_refused() -> None:
    """Its memory would hold what was there before."""
    layer = make_layer()
    count = iter(range(100))

    def forget(expert: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(expert) if expert["w13"].is_meta or next(count) != 2 else {"w13": expert["w13"]}

    with pytest.raises(LifecycleError, match="expert 2's w13_scale is missing, the first one's is uint8"):
        weight_storage.convert_in_place(layer, NAMES, forget)


@pytest.mark.parametrize("experts", [1, 2, EXPERTS])
def test_room_for_a_refused_backend_leaves_no_gaps_for_the_next_one(experts: int) -> None:
    layer = make_layer(experts)
    filled = raw_of(layer)
    weight_storage.reserve_expert_buffers(layer.w13_weight, weight_storage.converted_specs(grow, filled)["w13"])
    layer.w13_weight.data.copy_(filled["w13"])
    weight_storage.convert_in_place(layer, NAMES, dict)
    assert layer.w13_weight.is_contiguous() and layer.w13_weight.stride() == filled["w13"].stride()
    assert torch.equal(layer.w13_weight, filled["w13"]) and torch.equal(layer.w13_weight_scale, filled["w13_scale"])


def test_loading_into_converted_storage_is_an_error_but_of_other_ranks() -> None:
    layer = make_layer()
    before = layer.w13_weight.clone()
    weight_storage.forbid_loading(
        layer.w13_weight, "model.layers.0.mlp.experts", lambda expert: {0: 0, 2: 1}.get(expert, -1)
    )
    load = layer.w13_weight.weight_loader
    rule = r"model\.layers\.0\.mlp\.experts: checkpoint weights were loaded into"
    for arguments in ((), ("w13_weight", "w1", 0), ("w13_weight", "w3", 2, True), ("w13_weight", None)):
        with pytest.raises(LifecycleError, match=rule):
            load(layer.w13_weight, torch.zeros(1), *arguments)
    assert load(layer.w13_weight, torch.ones(1), "w13_weight", "w1", 1) is None
    assert load(layer.w13_weight, torch.ones(1), "w13_weight", "w1", expert_id=3, return_success=True) is False
    assert torch.equal(layer.w13_weight, before)


@pytest.mark.parametrize("experts", [4, 32])
def test_peak_memory_is_one_expert_however_many_there_are(experts: int) -> None:
    rows, columns = 64, 128
    layer = make_layer(experts, rows, columns)
    with Peak(*layer.parameters()) as peak:
        weight_storage.convert_in_place(layer, NAMES, lambda expert: {**expert, "w13": expert["w13"].flip(0)})
    # flip allocates the expert's codes once; nothing may scale with the number of experts.
    assert peak.peak <= 2 * rows * columns


def converted(filled: Tensor, convert: Convert, planned: bool = True) -> Tensor:
    """What becomes of a layer's only parameter, for whose conversion room was planned or not."""
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(filled.clone(), requires_grad=False)
    if planned:
        specs = weight_storage.converted_specs(convert, {"w13": filled})
        weight_storage.reserve_expert_buffers(layer.w13_weight, specs["w13"])
        layer.w13_weight.data.copy_(filled)
    weight_storage.convert_in_place(layer, {"w13": "w13_weight"}, convert)
    found: Tensor = layer.w13_weight
    return found


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 5),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    more_rows=st.integers(0, 5),
    more_columns=st.integers(0, 5),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]),
)
def test_any_growth_keeps_every_value(
    experts: int, rows: int, columns: int, more_rows: int, more_columns: int, dtype: torch.dtype
) -> None:
    filled = torch.randint(0, 100, (experts, rows, columns), dtype=torch.uint8)

    def convert(expert: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w13": nn.functional.pad(expert["w13"].to(dtype), (0, more_columns, 0, more_rows))}

    found = converted(filled, convert)
    assert torch.equal(found[:, :rows, :columns].to(torch.uint8), filled)
    assert int(found.sum()) == int(filled.sum(dtype=torch.int64))


def test_tensors_that_kernels_hold_are_part_of_the_layer_once() -> None:
    layer = make_layer()
    own, view, blank = torch.ones(3), layer.w13_weight.data[1:], torch.empty(3, device="meta")
    weight_storage.register_buffers(layer, [view, own, blank])
    assert [each is own for each in layer.buffers()] == [True]
    assert "moe_oracle_kept_1" not in layer.state_dict()


@pytest.mark.parametrize("planned", [True, False])
def test_a_smaller_layout_of_wider_numbers_is_aligned(planned: bool) -> None:
    filled = torch.randint(0, 100, (3, 7, 3), dtype=torch.uint8)  # 21 bytes an expert: no multiple of 2
    found = converted(filled, lambda expert: {"w13": expert["w13"].sum(-1, dtype=torch.int16)}, planned)
    assert torch.equal(found, filled.sum(-1, dtype=torch.int16))


def test_names_that_a_conversion_removes_stay_for_other_ranks_experts() -> None:
    """A model's loader looks a name up before it offers another rank's expert; EPLB moves a parameter by experts."""
    layer = torch.nn.Module()
    layer.w2_weight = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    lost = weight_storage.keep_names(layer, ["w2_weight", "w2_weight_scale"], 3)
    assert lost == ["w2_weight_scale"]
    kept = dict(layer.named_parameters())["w2_weight_scale"]
    assert kept.shape == (3, 1) and kept.view(3, -1).shape == (3, 1) and kept.device == layer.w2_weight.device
    weight_storage.forbid_loading(kept, "model.layers.0.mlp.experts", lambda expert: expert if expert < 3 else -1)
    assert kept.weight_loader(kept, torch.ones(1), "w2_weight_scale", "w2", 5, return_success=True) is False
    with pytest.raises(LifecycleError, match="in the kernel's layout already"):
        kept.weight_loader(kept, torch.ones(1), "w2_weight_scale", "w2", 2)
    assert weight_storage.keep_names(layer, ["w2_weight", "w2_weight_scale"], 3) == []
