"""AWQ's checkpoints, on releases whose one config class for them is `AutoAWQConfig`."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import auto_awq as stock

from .awq_common import AwqExperts, AwqMoE


class AutoAWQMoEMethod(AwqMoE, stock.AutoAWQMoEMethod):
    """MoE layers. Takes the place of the stock class of the same name."""


class AutoAWQConfig(AwqExperts, stock.AutoAWQConfig):
    """The stock config with this project's MoE method."""

    Method = AutoAWQMoEMethod
