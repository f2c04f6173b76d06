"""MXFP4 weights with 8-bit activations in the format of the compressed-tensors package; vLLM reads it since 0.32."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a8_mxfp4 as stock,
)

from ..compat.layer_context import current_layer
from ..core.problem import mx_scheme
from .compressed_tensors import declared_activations
from .mxfp4 import BaseMxfp4MoEMethod, activation_precision

SERVES = {
    "schemes": ["mxfp4"],
    "quantizations": {"compressed-tensors": None},
    "replaces": [
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4"
        ":CompressedTensorsW4A8Mxfp4MoEMethod",
    ],
}


class CompressedTensorsW4A8Mxfp4MoEMethod(BaseMxfp4MoEMethod, stock.CompressedTensorsW4A8Mxfp4MoEMethod):
    """MoE layers in MXFP4 with activations declared in FP8; replaces the stock class of the same name."""

    weight_dtype = "mxfp4"

    def __init__(self, moe: Any, activation_key: Any = None) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        layer, name = current_layer()
        # The config has the dtype of scales; vLLM's key has float32 for every group.
        declared = (
            activation_precision(activation_key) if layer is None else declared_activations(layer, name, "fp8_token")
        )
        self.decide(moe, mx_scheme("mxfp4", "compressed-tensors", declared))
