"""AWQ checkpoints, in releases whose only config class for them is `AutoAWQConfig`."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import auto_awq as stock

from .awq_common import AwqConfigMixin, AwqMoEMethod

SERVES = {
    "schemes": ["wna16"],
    "quantizations": {"awq": "AutoAWQConfig", "auto_awq": "AutoAWQConfig", "awq_marlin": "AutoAWQConfig"},
    "replaces": ["auto_awq:AutoAWQConfig", "auto_awq:AutoAWQMoEMethod"],
}


class AutoAWQMoEMethod(AwqMoEMethod, stock.AutoAWQMoEMethod):
    """MoE layers; replaces the stock class of the same name."""


class AutoAWQConfig(AwqConfigMixin, stock.AutoAWQConfig):
    """The stock config with this project's MoE method."""

    moe_method_cls = AutoAWQMoEMethod
