"""MXFP4 in the format of the compressed-tensors package: weight-only, or with activations declared in MXFP4 (W4A4)."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as stock,
)

from ..compat.construction import current_layer
from ..oracle.problem import MX_BLOCK, ActivationPrecision
from ..quantization import compressed_activations
from .mxfp4 import AnyMxfp4MoEMethod, mxfp4_scheme


class CompressedTensorsW4A4Mxfp4MoEMethod(AnyMxfp4MoEMethod, stock.CompressedTensorsW4A4Mxfp4MoEMethod):
    """MoE layers in MXFP4. Takes the place of the stock class of the same name, which quantises activations on cards
    that have kernels for it, declared or not."""

    def __init__(self, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by the card alone.
        self.group_size = MX_BLOCK
        self.decide(moe, mxfp4_scheme("compressed-tensors", declared_inputs(*current_layer())))


def declared_inputs(layer: Any, name: str) -> ActivationPrecision:
    """What the checkpoint's config declares for the inputs of a layer's experts.

    Args:
        layer: the layer under construction; None where vLLM does not hand it out, which means W4A4, as the stock class
            is called.
        name: the layer's name.
    """
    if layer is None:
        return "mxfp4"
    down = getattr(layer, "ckpt_down_proj_name", "down_proj") or "down_proj"
    scheme = layer.quant_config.get_scheme_dict(layer, f"{name}.0.{down}")
    inputs = None if scheme is None else scheme.get("input_activations")
    return compressed_activations(None if inputs is None else inputs.model_dump())
