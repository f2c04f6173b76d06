"""MXFP4 in the format of the compressed-tensors package: weight-only, or with activations declared in MXFP4 (W4A4)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as stock,
)

from ..compat.construction import current_layer
from ..oracle.problem import MX_BLOCK
from .compressed_tensors import declared_inputs
from .mxfp4 import AnyMxfp4MoEMethod, mxfp4_scheme


class CompressedTensorsW4A4Mxfp4MoEMethod(AnyMxfp4MoEMethod, stock.CompressedTensorsW4A4Mxfp4MoEMethod):
    """MoE layers in MXFP4. Takes the place of the stock class of the same name, which quantises activations on cards
    that have kernels for it, declared or not."""

    def __init__(self, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by the card alone.
        self.group_size = MX_BLOCK
        self.decide(moe, mxfp4_scheme("compressed-tensors", declared_inputs(*current_layer(), without_layer="mxfp4")))
