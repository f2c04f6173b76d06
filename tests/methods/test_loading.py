"""What a checkpoint's tensors must be before vLLM's loader copies them, and who hears of it when one is not."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import gloo_ranks
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem, Scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import weight_loading
from vllm_moe_oracle.methods.rank_sync import RankGroup, all_gather

PROBLEM = Problem(
    layer="model.layers.3.mlp.experts",
    scheme=Scheme("mxfp8", 8, 32, "modelopt"),
    num_experts=4,
    local_experts=4,
    top_k=2,
    hidden_size=64,
    intermediate_size=32,
    activation=Activation("silu"),
    parallel=Parallel(tp=2),
)


class Layer(torch.nn.Module):
    """A layer with vLLM's loader of one parameter: rank 0's half of the gate projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(4, 64, 64, dtype=torch.float8_e4m3fn), requires_grad=False)

    def weight_loader(
        self, param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        param.data[expert_id, :32].copy_(loaded_weight[:32])


def local_expert(layer: Any, expert: int) -> int:
    return expert if expert < 4 else -1


def load(group: RankGroup, tensor: torch.Tensor) -> None:
    layer = Layer()
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, group, local_expert)
    assert loader.__self__ is layer  # type: ignore[attr-defined]  # vLLM's reload looks for it
    loader(layer.w13_weight, tensor, "experts.w13_weight", "w1", 1)
    assert torch.equal(layer.w13_weight[1, :32].float(), tensor[:32].float())


def test_a_tensor_that_fits_is_loaded() -> None:
    load(RankGroup(), torch.ones(64, 64).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(64, 64), "stores it as float32, mxfp8 as float8_e4m3fn"),
        (torch.ones(32, 64).to(torch.float8_e4m3fn), r"shape \[32, 64\], expected \[64, 64\]"),
    ],
    ids=["dtype", "shape"],
)
def test_one_that_does_not_is_refused_with_its_layer(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load(RankGroup(), tensor)
    assert f"{PROBLEM.layer}, experts.w13_weight, expert 1, w1: " in str(caught.value)
    assert "not in the format" in str(caught.value)


def test_what_the_loader_itself_raises_is_raised() -> None:
    def plain(param: Any, loaded_weight: torch.Tensor, *args: Any) -> None:
        raise RuntimeError("no room")

    loader = weight_loading.validating_loader(
        plain, dataclasses.replace(PROBLEM, parallel=Parallel()), RankGroup(), local_expert
    )
    with pytest.raises(RuntimeError, match="no room"):
        loader(Layer().w13_weight, torch.ones(32, 64).to(torch.float8_e4m3fn), "experts.w13_weight", "w1", 0)


ONES = torch.ones(64, 64).to(torch.float8_e4m3fn)
NAME = "experts.w13_weight"


def other_in(row: int) -> torch.Tensor:
    """`ONES` with another last value in a row; rows from 32 on are the other rank's."""
    tensor = ONES.clone()
    tensor.view(torch.uint8)[row, 63] ^= 1
    return tensor


def test_two_tensors_for_one_place_are_an_error_where_they_differ() -> None:
    """Of a tensor that is in two files, vLLM's loader keeps the last."""
    layer = Layer()
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, RankGroup(), local_expert)
    for expert in (1, 2, 1):
        loader(layer.w13_weight, ONES, NAME, "w1", expert)
    loader(layer.w13_weight, other_in(32), NAME, "w1", 2)  # this rank's half is the same
    with pytest.raises(CheckpointError, match="two tensors for it, with different values") as caught:
        loader(layer.w13_weight, other_in(31), NAME, "w1", 2)
    assert f"{PROBLEM.layer}, {NAME}, expert 2, w1: " in str(caught.value)


def test_what_a_complete_layer_or_a_reload_gets_is_new() -> None:
    layer = Layer()
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, RankGroup(), local_expert)
    loader(layer.w13_weight, ONES, NAME, "w1", 2)
    fresh = torch.nn.Parameter(layer.w13_weight.data.clone(), requires_grad=False)  # as vLLM's reload has it
    loader(fresh, other_in(31), NAME, "w1", 2)
    weight_loading.end_load(layer.parameters())
    for tensor in (other_in(31), ONES, other_in(0)):
        loader(layer.w13_weight, tensor, NAME, "w1", 2)
        assert torch.equal(layer.w13_weight[2, :32].view(torch.uint8), tensor[:32].view(torch.uint8))


def test_another_ranks_expert_and_elements_that_are_counted_have_no_place() -> None:
    class OthersLayer(Layer):
        def weight_loader(self, *arguments: Any) -> None:
            """vLLM's loader ignores another rank's expert."""

    layer = OthersLayer()
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, RankGroup(), local_expert)
    counted = torch.nn.Parameter(layer.w13_weight.data.to("meta"), requires_grad=False)
    for tensor in (ONES, other_in(31)):
        loader(layer.w13_weight, tensor, NAME, "w1", 7)
        loader(counted, tensor, NAME, "w1", 1)
    assert not any(weight_loading._loaded_places.get(each) for each in (layer.w13_weight, counted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_values_are_compared_to_the_bit_and_counted(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    held = torch.zeros(*shape, 2, dtype=dtype)[..., 0]  # its elements do not lie together; a scalar for shape ()
    weight_loading.require_equal(held, torch.zeros(shape), "there")
    other = held.clone(memory_format=torch.contiguous_format)
    other.view(-1).view(torch.uint8)[0] = 1
    with pytest.raises(CheckpointError, match=rf"there: .* in 1 of {held.numel() * dtype.itemsize} bytes\."):
        weight_loading.require_equal(held, other, "there")


def test_tensors_of_all_experts_are_compared_as_a_whole() -> None:
    data = torch.zeros(4, 128, 32, dtype=torch.uint8)
    parameter = torch.nn.Parameter(data.clone(), requires_grad=False)
    loader = weight_loading.validating_loader(
        lambda param, tensor, *_: param.data.copy_(tensor), MXFP4, RankGroup(), local_expert
    )
    loader(parameter, data, NAME, None, None)
    loader(parameter, data, NAME, None, None)
    data[3, 127, 31] = 1
    with pytest.raises(CheckpointError, match=f"{NAME}: the checkpoint has two tensors"):
        loader(parameter, data, NAME, None, None)


MXFP4 = dataclasses.replace(PROBLEM, scheme=Scheme("mxfp4", 4, 32, "gpt_oss"), intermediate_size=64,
                            ragged_intermediate_size=96)  # fmt: skip


@pytest.mark.parametrize("stored", ["int8", "float4_e2m1fn_x2"])
def test_packed_codes_are_bytes_whatever_the_files_dtype(stored: str) -> None:
    """DeepSeek-V4's experts are int8."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8).view(64, 32)
    parameter = torch.nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.uint8), requires_grad=False)
    problem = dataclasses.replace(MXFP4, ragged_intermediate_size=0, intermediate_size=32)
    found = weight_loading.validated_tensor(
        parameter, codes.view(getattr(torch, stored)), problem, "experts.w13_weight", "w1", 0
    )
    assert found.dtype == torch.uint8 and torch.equal(found, codes)


def test_numbers_that_may_be_scales_of_another_kind_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 64, 2, dtype=torch.uint8), requires_grad=False)
    problem = dataclasses.replace(MXFP4, ragged_intermediate_size=0, intermediate_size=32)
    with pytest.raises(CheckpointError, match="stores it as int8, mxfp4 as uint8"):
        weight_loading.validated_tensor(
            parameter, torch.zeros(64, 2, dtype=torch.int8), problem, "experts.w13_weight_scale", "w1", 0
        )


def all_experts(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
    """Loads a tensor of all experts into a parameter of the first of two ranks; the second has half as many features
    between the products."""
    shapes = {"w13_weight": (4, 128, 32), "w2_weight": (4, 64, 32), "w13_bias": (4, 128), "w2_bias": (4, 64)}
    parameter = torch.nn.Parameter(torch.zeros(shapes[name], dtype=dtype), requires_grad=False)
    weight_loading.validated_tensor(parameter, torch.zeros(shape, dtype=dtype), MXFP4, f"experts.{name}", None)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w13_weight", (4, 128, 32)), ("w13_weight", (4, 64, 32)), ("w2_weight", (4, 64, 32)),
        ("w2_weight", (4, 64, 16)), ("w13_bias", (4, 128)), ("w13_bias", (4, 64)), ("w2_bias", (4, 64)),
    ],
)  # fmt: skip
def test_tensors_of_all_experts_are_a_rank_s_or_the_last_one_s(name: str, shape: tuple[int, ...]) -> None:
    all_experts(name, shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w13_weight", (1, 128, 32)), ("w13_weight", (4, 127, 32)), ("w13_weight", (4, 128, 1)),
        ("w2_weight", (4, 32, 32)), ("w2_weight", (4, 64, 8)), ("w13_bias", (1, 128)), ("w2_bias", (4, 32)),
        ("w2_bias", (4, 1)), ("w2_bias", ()), ("w13_weight", ()), ("w13_weight", (32,)), ("w2_weight", (64, 32)),
    ],
)  # fmt: skip
def test_shapes_that_broadcast_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        all_experts(name, shape)
    assert str(list(shape)) in str(caught.value) and f"{MXFP4.layer}, experts.{name}" in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (96,), (96, 1), (4, 48, 32), (1, 96, 32), (4, 96, 32, 1)])
@pytest.mark.parametrize(("name", "shard"), [("w13_weight", "w1"), ("w13_weight_scale", "w3")])
def test_an_expert_s_tensor_of_other_dimensions_is_refused(name: str, shard: str, shape: tuple[int, ...]) -> None:
    """vLLM's loader would broadcast it, or fill a part."""
    parameter = torch.nn.Parameter(torch.zeros(4, 128, 32, dtype=torch.uint8), requires_grad=False)
    load = functools.partial(weight_loading.validated_tensor, parameter, problem=MXFP4)
    with pytest.raises(CheckpointError) as caught:
        load(torch.zeros(shape, dtype=torch.uint8), weight_name=f"experts.{name}", shard_id=shard, expert_id=1)
    assert f"{MXFP4.layer}, experts.{name}, expert 1, {shard}: " in str(caught.value)
    assert f"has shape {list(shape)}, expected [96, 32]" in str(caught.value)
    for good in ((96, 32), (4, 96, 32)):
        load(torch.zeros(good, dtype=torch.uint8), weight_name=f"experts.{name}", shard_id=shard, expert_id=1)


@pytest.mark.parametrize("shape", [(), (1,), (4, 96), (96, 1)])
def test_an_expert_s_bias_of_other_dimensions_is_refused(shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 128), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"expected \[96\]"):
        weight_loading.validated_tensor(parameter, torch.zeros(shape), MXFP4, "experts.w13_bias", "w1", 0)


def test_new_memory_is_filled_once_before_loading() -> None:
    """vLLM's reload gives parameters new memory, and copies their attributes."""
    layer = Layer()
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, RankGroup(), local_expert)
    gate = torch.ones(64, 64).to(torch.float8_e4m3fn)
    weight_loading.set_sentinel({"w13": layer.w13_weight}, {"w13": 0x7F})
    weight_loading.fill_with_sentinel({"w13": layer.w13_weight}, {"w13": 0x7F})
    again = torch.nn.Parameter(torch.zeros_like(layer.w13_weight.data), requires_grad=False)
    again.__dict__.update(layer.w13_weight.__dict__)
    with pytest.raises(CheckpointError, match=r"model.layers.3.mlp.experts: nothing was loaded into w13_weight\. The"):
        weight_loading.check_all_loaded({"w13_weight": again}, PROBLEM.layer)
    weight_loading.check_all_loaded({"w13_weight": layer.w13_weight}, PROBLEM.layer)
    for expert in (1, 2):
        loader(again, gate, "experts.w13_weight", "w1", expert)
    weight_loading.check_all_loaded({"w13_weight": again}, PROBLEM.layer)
    loaded = again.data.view(torch.uint8)
    for expert, filled in enumerate((64, 32, 32, 64)):
        assert int((loaded[expert] == 0x7F).sum()) == filled * 64


def test_new_memory_that_files_may_leave_alone_is_zeros() -> None:
    made = {name: torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False) for name in ("w2", "w2_bias")}
    weight_loading.set_sentinel(made, {"w2": 0x7F})
    weight_loading.fill_with_sentinel(made, {"w2": 0x7F})
    made["w2_bias"].data.fill_(3.0)  # by a loader of the model's own
    weight_loading.fill_unloaded(made.values())
    assert bool((made["w2_bias"] == 3.0).all())
    again = {name: torch.nn.Parameter(torch.full((4, 8), 9.0), requires_grad=False) for name in made}
    for name, parameter in again.items():
        parameter.__dict__.update(made[name].__dict__)
    weight_loading.fill_unloaded(again.values())
    assert bool((again["w2_bias"] == 0.0).all()) and bool((again["w2"] == 9.0).all())


def test_parameters_without_memory_are_left_alone() -> None:
    """vLLM counts what is loaded before there is memory for it."""
    layer = Layer().to("meta")
    weight_loading.set_sentinel({"w13": layer.w13_weight}, {"w13": 0x7F})
    loader = weight_loading.validating_loader(layer.weight_loader, PROBLEM, RankGroup(), local_expert)
    loader(layer.w13_weight, torch.ones(64, 64, device="meta").to(torch.float8_e4m3fn), "experts.w13_weight", "w1", 1)
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        weight_loading.check_all_loaded({"w13_weight": layer.w13_weight}, PROBLEM.layer)


def one_cannot_load(processes: Any) -> Any:
    group = RankGroup(processes, 60.0)
    all_gather(group, "before", lambda: 1)
    # Rank 1's part of the files is damaged; rank 0 has loaded its own and goes on to the self-check.
    load(group, torch.ones(64 if group.rank == 0 else 32, 64).to(torch.float8_e4m3fn))
    return all_gather(group, "the self-check", lambda: 1)


def test_ranks_that_could_load_hear_of_the_one_that_could_not(tmp_path: Path) -> None:
    before = time.monotonic()
    first, second = gloo_ranks.run(one_cannot_load, 2, tmp_path)
    assert time.monotonic() - before < 50
    assert second["raised"] == "CheckpointError" and "shape [32, 64]" in second["message"]
    assert first["raised"] == "RankSyncError"
    for word in ("rank 1 gave up", f"loading the weights of {PROBLEM.layer}", "shape [32, 64]"):
        assert word in first["message"], first
