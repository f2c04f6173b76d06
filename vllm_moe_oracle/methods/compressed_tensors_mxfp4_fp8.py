"""MXFP4 weights with 8-bit activations in the format of the compressed-tensors package; vLLM reads it since 0.32."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a8_mxfp4 as stock,
)

from ..compat.construction import current_layer
from .compressed_tensors import declared_inputs
from .mxfp4 import AnyMxfp4MoEMethod, mxfp4_scheme, precision_of


class CompressedTensorsW4A8Mxfp4MoEMethod(AnyMxfp4MoEMethod, stock.CompressedTensorsW4A8Mxfp4MoEMethod):
    """MoE layers in MXFP4 with activations declared in FP8. Takes the place of the stock class of the same name."""

    weight_dtype = "mxfp4"

    def __init__(self, moe: Any, activation_key: Any = None) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        layer, name = current_layer()
        # The config says what scales are; vLLM's key has float32 for every group.
        declared = precision_of(activation_key) if layer is None else declared_inputs(layer, name, "fp8_token")
        self.decide(moe, mxfp4_scheme("compressed-tensors", declared))
