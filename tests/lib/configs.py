"""Published models' configs with any quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_moe_oracle.core.problem import Scheme

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.mlp.gate", "*self_attn*"]}
MXFP8 = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")


def config(name: str = "qwen3-30b-a3b", **changes: Any) -> dict[str, Any]:
    """A published model's config; `changes` replace fields, None removes one."""
    data = json.loads((CONFIGS / f"{name}.json").read_text())
    data.update(changes)
    return {key: value for key, value in data.items() if value is not None}


def quantized(name: str = "qwen3-30b-a3b", **changes: Any) -> dict[str, Any]:
    """The same as ModelOpt writes it after quantizing to MXFP8."""
    return config(name, **{"quantization_config": MODELOPT, **changes})


def group(weights: dict[str, Any], inputs: object = None, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    """A compressed-tensors config group."""
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


CT_MXFP8 = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
CT_INPUTS = {**CT_MXFP8, "dynamic": True}


def compressed(*groups: dict[str, Any], format: str = "mxfp8-quantized", **more: Any) -> dict[str, Any]:
    """A compressed-tensors quantization_config."""
    named = {f"group_{index}": item for index, item in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": named, **more}


def mixed(**recipes: str) -> dict[str, Any]:
    """ModelOpt's mixed precision: algorithm by module, with __ for dots."""
    recipe = {name.replace("__", "."): {"quant_algo": algo} for name, algo in recipes.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipe}


PACKED = "pack-quantized"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = INT4 | {"num_bits": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
