"""AWQ's checkpoints on releases that have one config class for their linear kernel and another for Marlin's."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import awq_marlin as stock

from .awq_common import AwqExperts, AwqMoE


class AWQMarlinMoEMethod(AwqMoE, stock.AWQMarlinMoEMethod):
    """MoE layers. Takes the place of the stock class of the same name."""


class AWQMarlinConfig(AwqExperts, stock.AWQMarlinConfig):
    """The stock config with this project's MoE method. Experts under the other config class arrive here too: it makes
    one of these for them."""

    Method = AWQMarlinMoEMethod
