"""AutoRound's MXFP8 checkpoints, whose experts vLLM's INC config reads since 0.29: the tensors of ModelOpt."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.inc.schemes import inc_mxfp8_moe as stock

from ..core.problem import MX_BLOCK, mx_scheme
from .base import OracleMoEMethod

SERVES = {
    "schemes": ["mxfp8"],
    "quantizations": {"inc": None},
    "replaces": ["inc.schemes.inc_mxfp8_moe:INCMxfp8MoEMethod"],
}

SCHEME = mx_scheme("mxfp8", "auto-round", "mxfp8")
"""AutoRound's MXFP8 is W8A8."""


class INCMxfp8MoEMethod(OracleMoEMethod, stock.INCMxfp8MoEMethod):
    """MoE layers in MXFP8; replaces the stock class of the same name."""

    def __init__(self, moe: Any) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.weight_block_size = [1, MX_BLOCK]
        self.decide(moe, SCHEME)
