"""Scales of MXFP4 that a file stores as numbers. vLLM rounds them to powers of two (since 0.28)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_moe_oracle.core.problem import Activation, Problem, mx_scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import mxfp4
from vllm_moe_oracle.methods.rank_sync import RankGroup
from vllm_moe_oracle.methods.weight_loading import validated_tensor
from vllm_moe_oracle.schemes import _mx

PROBLEM = Problem(
    layer="model.layers.3.mlp.experts",
    scheme=mx_scheme("mxfp4", "mxfp4", "16bit"),
    num_experts=2,
    local_experts=2,
    top_k=1,
    hidden_size=64,
    intermediate_size=32,
    activation=Activation("silu"),
)
CODES = torch.arange(255, dtype=torch.uint8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_power_of_two_that_a_dtype_holds_is_its_code(dtype: torch.dtype) -> None:
    powers = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)
    held = powers.to(dtype)
    same = held.to(torch.float64) == powers
    assert int(same.sum()) > 15
    assert torch.equal(_mx.e8m0_from_float(held[same], "here"), CODES[same])


WRONG = [1.4, 0.0, -0.0, -2.0, float("nan"), float("inf"), -float("inf"), 2.0**-128, 1.5 * 2.0**-127, 3.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", WRONG)
def test_any_other_number_is_refused_with_its_place(number: float, dtype: torch.dtype) -> None:
    scales = torch.ones(3, 4).to(dtype)
    scales[1, 2] = number
    with pytest.raises(CheckpointError, match=r"^here: 1 of 12 scales, .* at \[1, 2\]\. The checkpoint is damaged"):
        _mx.e8m0_from_float(scales, "here")


def registered() -> Any:
    """A layer with the parameters and loaders that the method registers, over a loader that copies."""

    class Layer(torch.nn.Module):
        def weight_loader(self, param: Any, loaded: Tensor, name: str, shard_id: str, expert_id: int, **_: Any) -> None:
            param.data[expert_id, : len(loaded)].copy_(loaded)

    layer: Any = Layer()
    method: Any = mxfp4.Mxfp4MoEMethod.__new__(mxfp4.Mxfp4MoEMethod)
    method.decision = SimpleNamespace(problem=PROBLEM)
    method.moe = SimpleNamespace(w13_num_shards=2, has_bias=False, moe_parallel_config=SimpleNamespace(tp_rank=0))
    method.rank_group = RankGroup()
    method.adapter = SimpleNamespace(local_expert=lambda layer, expert: expert)
    method._register_parameters(layer, 2, 64, 32, torch.bfloat16, weight_loader=layer.weight_loader)
    return layer


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(("name", "shard", "shape"), [("w13", "w1", (32, 2)), ("w2", "w2", (64, 1))])
def test_a_server_loads_the_scales_that_were_meant(
    name: str, shard: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    codes = torch.full(shape, 124, dtype=torch.uint8)
    codes[1, 0] = 129
    stored = torch.exp2(codes.to(torch.float32) - 127).to(dtype) if dtype in DTYPES else codes.view(dtype)
    layer = registered()
    parameter = getattr(layer, f"{name}_weight_scale")
    parameter.weight_loader(parameter, stored, f"experts.{name}_weight_scale", shard, 1)
    assert torch.equal(parameter.data[1, : shape[0]], codes)


def test_a_server_refuses_scales_that_vllm_would_round() -> None:
    parameter = (layer := registered()).w13_weight_scale
    scales = torch.ones(32, 2, dtype=torch.bfloat16)
    scales[5, 1] = 1.4
    with pytest.raises(CheckpointError, match=r"stored as bfloat16, .*1\.3984375 at \[5, 1\]") as caught:
        parameter.weight_loader(parameter, scales, "experts.w13_weight_scale", "w3", 1)
    assert str(caught.value).startswith(f"{PROBLEM.layer}, experts.w13_weight_scale, expert 1, w3: ")
    assert not (layer.w13_weight_scale.data == 127).any()


@pytest.mark.parametrize("packing", ["compressed-tensors", "quark", "gpt_oss", "auto-round"])
def test_formats_for_which_vllm_does_not_round_have_codes_alone(packing: str) -> None:
    problem = dataclasses.replace(PROBLEM, scheme=mx_scheme("mxfp4", packing, "16bit"))
    parameter = torch.nn.Parameter(torch.zeros(2, 64, 2, dtype=torch.uint8), requires_grad=False)
    scales = torch.ones(32, 2, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="stores it as bfloat16, mxfp4 as uint8"):
        validated_tensor(parameter, scales, problem, "experts.w13_weight_scale", "w1", 1)
