"""AWQ checkpoints, in releases with separate config classes for the AWQ and the Marlin kernels."""

from __future__ import annotations

from vllm.model_executor.layers.quantization import awq_marlin as stock

from .awq_common import AwqConfigMixin, AwqMoEMethod

SERVES = {
    "schemes": ["wna16"],
    "quantizations": {"awq_marlin": "AWQMarlinConfig"},
    "replaces": ["awq_marlin:AWQMarlinConfig", "awq_marlin:AWQMarlinMoEMethod"],
}


class AWQMarlinMoEMethod(AwqMoEMethod, stock.AWQMarlinMoEMethod):
    """MoE layers; replaces the stock class of the same name."""


class AWQMarlinConfig(AwqConfigMixin, stock.AWQMarlinConfig):
    """The stock config with this project's MoE method. The other config class makes one of these for its experts."""

    moe_method_cls = AWQMarlinMoEMethod
