"""llm-compressor's checkpoints, in the format of the compressed-tensors package."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as stock,
)

from ..compat.construction import current_layer
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Scheme
from .base import OracleMoEMethod

SCHEME = Scheme("mxfp8", bits=8, group_size=MX_BLOCK, packing="compressed-tensors", activations="mxfp8")
"""``mxfp8-quantized``: the tensors of ModelOpt's MXFP8 under the same names."""


class CompressedTensorsW8A8Mxfp8MoEMethod(OracleMoEMethod, stock.CompressedTensorsW8A8Mxfp8MoEMethod):
    """MoE layers in MXFP8. Takes the place of the stock class of the same name, which takes weight-only checkpoints
    (``MXFP8A16``) for W8A8; here their activations stay in 16 bits."""

    def __init__(self, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.weight_block_size = [1, MX_BLOCK]
        layer, name = current_layer()
        self.decide(moe, dataclasses.replace(SCHEME, activations=declared_activations(layer, name)))


def declared_activations(layer: Any, name: str) -> ActivationPrecision:
    """What the checkpoint's config declares for the inputs of a layer's experts.

    Args:
        layer: the layer under construction; None where vLLM does not hand it out, which means W8A8, as in vLLM.
        name: the layer's name.
    """
    if layer is None:
        return SCHEME.activations
    down = getattr(layer, "ckpt_down_proj_name", "down_proj")
    scheme = layer.quant_config.get_scheme_dict(layer, f"{name}.0.{down}")
    return "16bit" if scheme is not None and scheme.get("input_activations") is None else SCHEME.activations
