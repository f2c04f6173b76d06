"""ModelOpt's MXFP8 checkpoints, and those of the same layout that are tagged ``mxfp8``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.quantization import modelopt as stock
from vllm.platforms import current_platform

from ..compat.construction import under_construction
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Scheme
from ..quantization import modelopt_activations
from .base import OracleMoEMethod

SCHEME = Scheme("mxfp8", bits=8, group_size=MX_BLOCK, packing="modelopt", activations="mxfp8")
"""ModelOpt's MXFP8 quantises weights and, while serving, activations (W8A8)."""


class ModelOptMxFp8FusedMoE(OracleMoEMethod, stock.ModelOptMxFp8FusedMoE):
    """MoE layers. Takes the place of the stock class of the same name."""

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.quant_config = quant_config
        self.weight_block_size = [1, MX_BLOCK]
        activations = getattr(quant_config, "activations", SCHEME.activations)
        self.decide(moe_config, dataclasses.replace(SCHEME, activations=activations))


class ModelOptMxFp8Config(stock.ModelOptMxFp8Config):
    """The stock config with this project's MoE method; everything else in the checkpoint stays the stock classes'."""

    FusedMoEMethodCls = ModelOptMxFp8FusedMoE
    activations: ActivationPrecision = SCHEME.activations
    """What the checkpoint declares for the experts' inputs."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; the stock class does not keep what is said about activations."""
        made = super().from_config(config)
        made.activations = modelopt_activations(config)
        return made

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where both the experts and vLLM's linear layers are emulated, also float16 and
        float32."""
        supported = list(super().get_supported_act_dtypes())
        return [*supported, torch.float16, torch.float32] if current_platform.is_cpu() else supported

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        with under_construction(layer, prefix):
            return super().get_quant_method(layer, prefix)


class Mxfp8Config(ModelOptMxFp8Config):
    """For checkpoints tagged ``mxfp8``: the same tensors, and a config that need not name the algorithm."""

    @classmethod
    def override_quantization_method(cls, *args: Any, **kwargs: Any) -> None:
        """Claims no checkpoint: the tag itself leads here, and some releases refuse claims under this name."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Reads the checkpoint's config; not every release knows the form without an algorithm."""
        if not config.get("quantization") and not config.get("quant_algo"):
            config = {**config, "quant_algo": "MXFP8", "ignore": config.get("ignored_layers") or []}
        return super().from_config(config)
