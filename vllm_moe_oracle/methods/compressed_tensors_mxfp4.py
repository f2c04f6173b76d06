"""MXFP4 in the format of the compressed-tensors package: weight-only, or with activations declared in MXFP4 (W4A4)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as stock,
)

from ..compat.layer_context import current_layer
from ..core.problem import MX_BLOCK, mx_scheme
from .compressed_tensors import declared_activations
from .mxfp4 import BaseMxfp4MoEMethod

SERVES = {
    "schemes": ["mxfp4"],
    "quantizations": {"compressed-tensors": None},
    "replaces": [
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4"
        ":CompressedTensorsW4A4Mxfp4MoEMethod",
    ],
}


class CompressedTensorsW4A4Mxfp4MoEMethod(BaseMxfp4MoEMethod, stock.CompressedTensorsW4A4Mxfp4MoEMethod):
    """MoE layers in MXFP4; replaces the stock class of the same name, which quantizes activations on GPUs with kernels
    for it, even if the checkpoint does not declare it."""

    def __init__(self, moe: Any) -> None:
        # The stock constructor would choose a backend by the GPU alone.
        self.group_size = MX_BLOCK
        declared = declared_activations(*current_layer(), default="mxfp4")
        self.decide(moe, mx_scheme("mxfp4", "compressed-tensors", declared))
