"""AutoRound's MXFP4 checkpoints, which vLLM's INC config reads since 0.27.1: the tensors of compressed-tensors."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.inc.schemes import inc_mxfp4_moe as stock

from ..oracle.problem import MX_BLOCK
from .mxfp4 import AnyMxfp4MoEMethod, mxfp4_scheme


class INCMxfp4MoEMethod(AnyMxfp4MoEMethod, stock.INCMxfp4MoEMethod):
    """MoE layers in MXFP4. Takes the place of the stock class of the same name; AutoRound's MXFP4 is W4A4."""

    def __init__(self, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by the card alone.
        self.group_size = MX_BLOCK
        self.decide(moe, mxfp4_scheme("auto-round", "mxfp4"))
