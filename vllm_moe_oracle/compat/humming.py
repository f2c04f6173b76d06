"""What vLLM's Humming experts want to know in all their eras, in the words of the installed humming-kernels.

Until 0.27 the classes take a layer and read everything from it; since 0.28 they get the library's layer configs inside
their quant config. The library itself moved its description of a layer from a method over a layer to a function.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Mapping
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from ..backends import Tensors
from ..oracle.planner import loaded_group, round_up
from ..oracle.problem import MX_BLOCK, Problem

ROW_MULTIPLE = 256
COLUMN_MULTIPLE = 128
"""What stock pads rows and columns of both matrices to."""

_QUANT_CONFIG_MODULES = (
    "vllm.model_executor.layers.quantization.utils.humming",
    "vllm.model_executor.layers.quantization.utils.humming_utils",
)

_WHOLE_SUMS_SINCE = "0.1.12"
"""First release of humming-kernels whose blocks add up all that their warps have each summed over a part of K."""

Tuning = list[tuple[int, int, dict[str, Any]]]
"""The library's configurations for a product: above how many rows, up to how many, and with what."""


def matrix_shapes(problem: Problem) -> dict[str, tuple[int, int]]:
    """Rows and columns of both matrices of an expert, unpadded."""
    return {
        "w13": (problem.w13_rows, problem.hidden_size),
        "w2": (problem.hidden_size, problem.intermediate_size),
    }


def _schemas(problem: Problem) -> tuple[Any, Any]:
    """The library's schemas of the layer's weights, and of activations that are left alone."""
    schema, dtypes = importlib.import_module("humming.schema"), importlib.import_module("humming.dtypes")
    scheme = problem.scheme
    if scheme.name == "wna16":
        weights = schema.HummingWeightSchema(
            b_dtype=dtypes.DataType.from_str(f"uint{scheme.bits}"),
            weight_scale_group_size=max(loaded_group(problem), 0),
            has_zero_point=scheme.zero_points,
        )
    else:
        weights = schema.HummingWeightSchema(
            b_dtype=dtypes.float4e2m1 if scheme.name == "mxfp4" else dtypes.float8e4m3,
            bs_dtype=dtypes.float8e8m0,
            weight_scale_group_size=MX_BLOCK,
        )
    return weights, schema.HummingInputSchema()


def _described(rows: int, columns: int, problem: Problem, name: str) -> Any:
    """The library's description of one matrix of all experts."""
    weights, inputs = _schemas(problem)
    sizes: dict[str, Any] = {
        "shape_n": rows,
        "shape_k": columns,
        "weight_schema": weights,
        "input_schema": inputs,
        "num_experts": problem.local_experts,
        "pad_n_to_multiple": ROW_MULTIPLE,
        "pad_k_to_multiple": COLUMN_MULTIPLE,
        "has_bias": problem.has_bias,
        "torch_dtype": getattr(torch, problem.dtype),
    }
    if importlib.util.find_spec("humming.transform") is not None:
        return importlib.import_module("humming.transform").prepare_layer_config(**sizes)
    method = importlib.import_module("humming.layer").HummingMethod
    return method.prepare_layer_meta(layer=SimpleNamespace(), sublayer_name=name, **sizes)


def configs(problem: Problem) -> dict[str, Any]:
    """The library's descriptions of both matrices of a layer, by canonical name. Asks the current device."""
    return {name: _described(rows, columns, problem, name) for name, (rows, columns) in matrix_shapes(problem).items()}


def quant_config(stock: Any, problem: Problem) -> Any:
    """vLLM's quant config of Humming's experts, since 0.28: any other's fields, and the library's descriptions.

    Args:
        stock: vLLM's `FusedMoEQuantConfig` with the layer's scales and biases.
        problem: the layer.
    """
    module = next(name for name in _QUANT_CONFIG_MODULES if importlib.util.find_spec(name) is not None)
    known = {each.name: getattr(stock, each.name) for each in dataclasses.fields(stock)}
    described = configs(problem)
    found = importlib.import_module(module).HummingMoEQuantConfig
    return found(**known, w1_humming_config=described["w13"], w2_humming_config=described["w2"])


def leaves_out(config: Mapping[str, Any]) -> bool:
    """Whether a block of this configuration leaves out parts of its sums before 0.1.12.

    Where several warps each sum over a part of K, they add up their accumulators through shared memory by turns, as
    many as the block has whole 16 rows, each of the same number of 16-byte words. What does not go into that is never
    added: of 56 rows by 32 columns, which are 14 words a thread in three turns, the last two. These are rows 40 to 55
    of half the columns, which then have half of K. Which tokens stand there changes from run to run.

    Source: the package humming-kernels, ``epilogue/smem_reducer.cuh``; its configurations for sm_90 have blocks of 56
    rows for products of at most 4096 rows of weights, whose experts have 25 to 38 tokens each on average.
    """
    rows, columns, depth = config["warp_shape"]
    words = rows * columns // 128
    return bool(config["block_shape"][2] > depth and words % max(rows // 16, 1))


def with_whole_sums(products: Mapping[str, Tuning]) -> dict[str, Tuning]:
    """The same configurations with blocks of so many more rows that nothing of their sums is left out.

    Both products are changed alike: tokens are sorted once, for blocks of the same height.

    Args:
        products: configurations by product; not changed, the library keeps them for other layers.
    """
    faulty = {each[2]["block_shape"][0] for tuning in products.values() for each in tuning if leaves_out(each[2])}
    return {
        name: [
            (above, to, _taller(config) if config["block_shape"][0] in faulty else config)
            for above, to, config in tuning
        ]
        for name, tuning in products.items()
    }


def _taller(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with rows up to the next multiple of 16."""
    rows, *warp = config["warp_shape"]
    height, *block = config["block_shape"]
    new = round_up(rows, 16)
    return {**config, "warp_shape": (new, *warp), "block_shape": (height // rows * new, *block)}


def sum_whole(experts: Any) -> None:
    """Gives one of vLLM's experts over a library before 0.1.12 configurations that leave nothing out.

    Args:
        experts: an instance of vLLM's class; its configurations are replaced.
    """
    if Version(metadata.version("humming-kernels")) >= Version(_WHOLE_SUMS_SINCE):
        return
    # By name: only these classes among vLLM's have them.
    found = {name: getattr(experts, f"{name}_tuning_config") for name in ("w13", "w2")}
    for name, tuning in with_whole_sums(found).items():
        setattr(experts, f"{name}_tuning_config", tuning)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(tuning))


def stand_in(problem: Problem, tensors: Tensors, inner: int) -> Any:
    """What the classes before 0.28 read from a layer, and nothing else: the layer itself stays as it is.

    Args:
        problem: the layer.
        tensors: kernel tensors of the layer by canonical name.
        inner: what the class must take for the intermediate size.
    """
    attributes: dict[str, Any] = {
        "humming_metas": configs(problem),
        "local_num_experts": problem.local_experts,
        "num_experts": problem.local_experts,
        "global_num_experts": problem.num_experts,
        "intermediate_size_per_partition": inner,
        "hidden_size": problem.hidden_size,
        "params_dtype": getattr(torch, problem.dtype),
        "param_dtype": getattr(torch, problem.dtype),
        "locks": torch.zeros(1024, dtype=torch.int32, device=tensors["w13"].device),
    }
    return SimpleNamespace(**attributes, **{_parameter_name(name): tensor for name, tensor in tensors.items()})


def _parameter_name(name: str) -> str:
    """The library's name of a kernel tensor of a layer."""
    matrix, _, kind = name.partition("_")
    return name if kind in ("bias", "zero_point") else f"{matrix}_weight{f'_{kind}' if kind else ''}"
