"""Arguments of vLLM's Humming expert classes, for every supported release and version of humming-kernels.

Up to vLLM 0.27 the classes take a layer and read everything from it. Since 0.28 their quant config holds the library's
layer configs. Newer versions of the library make these in a function, older ones in a method that takes a layer.
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
from ..backends._humming import COLUMN_MULTIPLE, ROW_MULTIPLE
from ..core.problem import MX_BLOCK, Problem
from ..core.sharding import loaded_group_size, round_up

_QUANT_CONFIG_MODULES = (
    "vllm.model_executor.layers.quantization.utils.humming",
    "vllm.model_executor.layers.quantization.utils.humming_utils",
)

_COMPLETE_REDUCTION_SINCE = "0.1.12"
"""First version of humming-kernels that sums all partial results of a block's warps; see `has_incomplete_reduction`."""

TuningConfigs = list[tuple[int, int, dict[str, Any]]]
"""The library's configurations of one GEMM: minimum rows (exclusive), maximum rows (inclusive), configuration."""


def matrix_shapes(problem: Problem) -> dict[str, tuple[int, int]]:
    """Rows and columns of both matrices of an expert, without padding."""
    return {
        "w13": (problem.w13_rows, problem.hidden_size),
        "w2": (problem.hidden_size, problem.intermediate_size),
    }


def _schemas(problem: Problem) -> tuple[Any, Any]:
    """The library's schemas of the layer's weights and of unquantized activations."""
    schema, dtypes = importlib.import_module("humming.schema"), importlib.import_module("humming.dtypes")
    scheme = problem.scheme
    if scheme.name == "wna16":
        weights = schema.HummingWeightSchema(
            b_dtype=dtypes.DataType.from_str(f"uint{scheme.bits}"),
            weight_scale_group_size=max(loaded_group_size(problem), 0),
            has_zero_point=scheme.zero_points,
        )
    else:
        weights = schema.HummingWeightSchema(
            b_dtype=dtypes.float4e2m1 if scheme.name == "mxfp4" else dtypes.float8e4m3,
            bs_dtype=dtypes.float8e8m0,
            weight_scale_group_size=MX_BLOCK,
        )
    return weights, schema.HummingInputSchema()


def _layer_config(rows: int, columns: int, problem: Problem, name: str) -> Any:
    """The library's config of one matrix of all experts."""
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


def layer_configs(problem: Problem) -> dict[str, Any]:
    """The library's configs of both matrices, by canonical name. They depend on the current device."""
    return {
        name: _layer_config(rows, columns, problem, name) for name, (rows, columns) in matrix_shapes(problem).items()
    }


def quant_config(stock: Any, problem: Problem) -> Any:
    """vLLM's quant config of Humming's experts since 0.28: the fields of `stock` and the library's layer configs.

    Args:
        stock: vLLM's `FusedMoEQuantConfig` with the layer's scales and biases.
        problem: the layer.
    """
    module = next(name for name in _QUANT_CONFIG_MODULES if importlib.util.find_spec(name) is not None)
    known = {each.name: getattr(stock, each.name) for each in dataclasses.fields(stock)}
    layers = layer_configs(problem)
    found = importlib.import_module(module).HummingMoEQuantConfig
    return found(**known, w1_humming_config=layers["w13"], w2_humming_config=layers["w2"])


def has_incomplete_reduction(config: Mapping[str, Any]) -> bool:
    """Whether a block of this configuration drops partial sums in humming-kernels before 0.1.12.

    Where several warps each sum over a part of K, they reduce their accumulators through shared memory in several
    steps, one for each 16 whole rows of the block, with the same number of 16-byte words in each. The remainder is
    never added. Example: 56 rows by 32 columns are 14 words a thread in three steps, so the last two words are lost.
    These are rows 40 to 55 of half the columns, which then have the sum over half of K. The tokens in these rows
    change from run to run.

    Source: the package humming-kernels, ``epilogue/smem_reducer.cuh``; its configurations for sm_90 have blocks of 56
    rows for GEMMs with at most 4096 rows of weights and 25 to 38 tokens per expert on average.
    """
    rows, columns, depth = config["warp_shape"]
    words = rows * columns // 128
    return bool(config["block_shape"][2] > depth and words % max(rows // 16, 1))


def with_complete_reduction(products: Mapping[str, TuningConfigs]) -> dict[str, TuningConfigs]:
    """Configurations with blocks of enough rows that no partial sum is dropped.

    Both GEMMs change alike: tokens are sorted once, for blocks of one height.

    Args:
        products: configurations by GEMM. They are not modified: the library keeps them for other layers.
    """
    faulty = {
        each[2]["block_shape"][0]
        for tuning in products.values()
        for each in tuning
        if has_incomplete_reduction(each[2])
    }
    return {
        name: [
            (above, to, _round_up_rows(config) if config["block_shape"][0] in faulty else config)
            for above, to, config in tuning
        ]
        for name, tuning in products.items()
    }


def _round_up_rows(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with its rows rounded up to a multiple of 16."""
    rows, *warp = config["warp_shape"]
    height, *block = config["block_shape"]
    new = round_up(rows, 16)
    return {**config, "warp_shape": (new, *warp), "block_shape": (height // rows * new, *block)}


def complete_reduction(experts: Any) -> None:
    """Replaces configurations that drop partial sums, where humming-kernels is older than 0.1.12.

    Args:
        experts: an instance of vLLM's class; modified.
    """
    if Version(metadata.version("humming-kernels")) >= Version(_COMPLETE_REDUCTION_SINCE):
        return
    # By name: only vLLM's Humming classes have these attributes.
    found = {name: getattr(experts, f"{name}_tuning_config") for name in ("w13", "w2")}
    for name, tuning in with_complete_reduction(found).items():
        setattr(experts, f"{name}_tuning_config", tuning)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(tuning))


def layer_stub(problem: Problem, tensors: Tensors, inner: int) -> Any:
    """An object with the attributes that the classes before 0.28 read from a layer.

    Args:
        problem: the layer.
        tensors: kernel tensors of the layer by canonical name.
        inner: the value that the class expects as intermediate size.
    """
    attributes: dict[str, Any] = {
        "humming_metas": layer_configs(problem),
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
    """The library's name of a kernel tensor."""
    matrix, _, kind = name.partition("_")
    return name if kind in ("bias", "zero_point") else f"{matrix}_weight{f'_{kind}' if kind else ''}"
