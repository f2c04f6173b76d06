"""AutoRound's MXFP4 checkpoints, which vLLM's INC config reads since 0.27.1; their tensors are those of
compressed-tensors."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.inc.schemes import inc_mxfp4_moe as stock

from ..compat import current_adapter
from ..core.problem import MX_BLOCK, mx_scheme
from ..errors import CheckpointError
from ..quantization.auto_round import mx_activations
from .mxfp4 import BaseMxfp4MoEMethod

SERVES = {
    "schemes": ["mxfp4"],
    "quantizations": {"inc": None},
    "replaces": ["inc.schemes.inc_mxfp4_moe:INCMxfp4MoEMethod"],
}


class INCMxfp4MoEMethod(BaseMxfp4MoEMethod, stock.INCMxfp4MoEMethod):
    """MoE layers in MXFP4; replaces the stock class of the same name, which takes all for W4A4."""

    def __init__(self, moe: Any) -> None:
        # The stock constructor would choose a backend by the GPU alone.
        self.group_size = MX_BLOCK
        config = current_adapter().checkpoint_quantization()
        declared = mx_activations(config, "quantization_config")
        if declared is None:
            rule = f"experts in MXFP4 with inputs of {config.get('act_bits')} bits, which no format has"
            raise CheckpointError(rule, "Check act_bits", "quantization_config")
        self.decide(moe, mx_scheme("mxfp4", "auto-round", declared))
