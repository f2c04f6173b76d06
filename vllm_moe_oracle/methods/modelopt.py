"""ModelOpt's MXFP8 checkpoints, MXFP8 in its mixed precision, and checkpoints of the same layout tagged ``mxfp8``."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.quantization import modelopt as stock

from ..compat.construction import under_construction
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Scheme
from ..quantization.answers import GATED_PROJECTIONS, PLAIN_PROJECTIONS, LayerNames
from ..quantization.fields import runs_over
from ..quantization.modelopt import MixedAlgorithms, modelopt_activations
from .base import OracleMoEMethod
from .dtypes import with_emulated

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


def _meant(names: list[str], prefix: str) -> list[str]:
    """Exclusions, without those that would take a module for excluded only because its layer's number begins alike.

    An excluded ``model.layers.1`` or ``model.layers.1*`` is layer 1: that is how ModelOpt writes a module with all that
    is below it. The stock classes take layers 10 to 19 for excluded too, and load their codes as 16-bit weights.
    """
    return [name for name in names if not runs_over(name, prefix)]


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

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a module is not quantised; stock code asks."""
        meant = _meant(self.exclude_modules, prefix)
        if len(meant) < len(self.exclude_modules):
            asked = copy.copy(self)
            asked.exclude_modules = meant
            return asked.is_layer_excluded(prefix)
        excluded: bool = super().is_layer_excluded(prefix)
        return excluded

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where both the experts and vLLM's linear layers are emulated, also float16 and
        float32."""
        return with_emulated(super().get_supported_act_dtypes())

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


class ModelOptMixedPrecisionConfig(stock.ModelOptMixedPrecisionConfig):
    """The stock config of mixed precision, which decides for each MoE layer as `explain` does.

    The stock class takes the algorithm of the first matrix that it finds for the whole layer, takes that of a shared
    expert for that of the routed ones, and knows no wildcards.
    """

    _algorithms: tuple[Any, MixedAlgorithms | None] = None, None
    """vLLM's dictionary of layers, and what was read of it."""

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a module is not quantised; stock code asks."""
        meant = _meant(self.exclude_modules, prefix)
        if len(meant) < len(self.exclude_modules):
            asked = copy.copy(self)
            asked.exclude_modules = meant
            return asked.is_layer_excluded(prefix)
        excluded: bool = super().is_layer_excluded(prefix)
        return excluded

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model; see `ModelOptMxFp8Config`."""
        return with_emulated(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        with under_construction(layer, prefix):
            return super().get_quant_method(layer, prefix)

    def _resolve_quant_algo(self, prefix: str) -> str | None:
        """The algorithm of a module; stock code asks.

        Raises:
            CheckpointError: matrices of a MoE layer have different algorithms.
        """
        if prefix.rpartition(".")[2] != "experts":
            algo: str | None = super()._resolve_quant_algo(prefix)
            return algo
        recipes, algorithms = self._algorithms
        if recipes is not self.quantized_layers or algorithms is None:  # vLLM renames layers when it has the model
            algorithms = MixedAlgorithms.read(self.quantized_layers, "quantization_config")
            self._algorithms = self.quantized_layers, algorithms
        # Whether the experts have a gate is not known here.
        projections = GATED_PROJECTIONS + PLAIN_PROJECTIONS
        return algorithms.of(LayerNames(tuple(self._quantized_layer_prefix_candidates(prefix)), projections))
