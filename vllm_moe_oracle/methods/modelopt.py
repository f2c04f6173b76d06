"""ModelOpt's MXFP8 checkpoints, MXFP8 layers of its mixed precision, and checkpoints tagged ``mxfp8``."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from vllm.model_executor.layers.quantization import modelopt as stock

from ..compat import current_adapter
from ..compat.layer_context import set_current_layer
from ..core.problem import MX_BLOCK, ActivationPrecision, mx_scheme
from ..quantization import check_release
from ..quantization.fields import matches_number_prefix
from ..quantization.modelopt import MixedPrecision, modelopt_activation_precision, modelopt_exclusion_matcher
from ..quantization.single_experts import check_exclusions
from ..quantization.types import GATED_PROJECTIONS, UNGATED_PROJECTIONS, LayerNames
from .base import OracleMoEMethod
from .dtypes import EmulatedDtypesMixin

SERVES = {
    "schemes": ["mxfp8"],
    "quantizations": {
        "modelopt_mxfp8": "ModelOptMxFp8Config",
        "modelopt_mixed": "ModelOptMixedPrecisionConfig",
        "mxfp8": "Mxfp8Config",
    },
    "replaces": ["modelopt:ModelOptMxFp8FusedMoE"],
}

SCHEME = mx_scheme("mxfp8", "modelopt", "mxfp8")
"""ModelOpt's MXFP8 is W8A8: activations are quantized while serving."""


class ModelOptMxFp8FusedMoE(OracleMoEMethod, stock.ModelOptMxFp8FusedMoE):
    """MoE layers; replaces the stock class of the same name."""

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.quant_config = quant_config
        self.weight_block_size = [1, MX_BLOCK]
        activations = getattr(quant_config, "activations", SCHEME.activations)
        self.decide(moe_config, dataclasses.replace(SCHEME, activations=activations))


class _ModelOptConfigMixin(EmulatedDtypesMixin):
    """The mix-in in front of a stock config class for ModelOpt's checkpoints."""

    exclude_modules: Any

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a module is not quantized; vLLM calls it.

        An exclusion does not match a module only because its layer number starts with the exclusion's:
        ``model.layers.1`` or ``model.layers.1*`` excludes layer 1 with everything below it, as ModelOpt writes it.
        Stock classes also exclude layers 10 to 19, and load their codes as 16-bit weights.
        """
        config = copy.copy(self)
        config.exclude_modules = [name for name in self.exclude_modules if not matches_number_prefix(name, prefix)]
        excluded: bool = super(_ModelOptConfigMixin, config).is_layer_excluded(prefix)  # type: ignore[misc]  # of the mixin's stock class
        return excluded

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class.

        Raises:
            CheckpointError: some experts of a MoE layer are excluded by name, and others not.
        """
        if hasattr(layer, "moe_config"):
            names = LayerNames((prefix,), (), num_experts=layer.moe_config.num_logical_experts)
            entries, where = tuple(self.exclude_modules), "quantization_config"
            check_exclusions(entries, names, where, lambda: modelopt_exclusion_matcher(entries, where))
        with set_current_layer(layer, prefix):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]  # of the mixin's stock class


class ModelOptMxFp8Config(_ModelOptConfigMixin, stock.ModelOptMxFp8Config):
    """The stock config with this project's MoE method; everything else is the stock class's.

    Attributes:
        activations: precision that the checkpoint declares for the experts' inputs.
    """

    FusedMoEMethodCls = ModelOptMxFp8FusedMoE
    activations: ActivationPrecision = SCHEME.activations

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint, with its activation precision, which the stock class does not keep."""
        made = super().from_config(config)
        made.activations = modelopt_activation_precision(config)
        return made


class Mxfp8Config(ModelOptMxFp8Config):
    """Checkpoints tagged ``mxfp8``: the same tensors, with a config that may not name the algorithm."""

    @classmethod
    def override_quantization_method(cls, *args: Any, **kwargs: Any) -> None:
        """Never overrides: the tag selects this class, and some releases reject overrides under this name."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; not every release accepts a config without an algorithm."""
        if not config.get("quantization") and not config.get("quant_algo"):
            config = {**config, "quant_algo": "MXFP8", "ignore": config.get("ignored_layers") or []}
        return super().from_config(config)


class ModelOptMixedPrecisionConfig(_ModelOptConfigMixin, stock.ModelOptMixedPrecisionConfig):
    """The stock config of mixed precision, which decides for each MoE layer as `explain` does.

    The stock class uses the algorithm of the first matrix that it finds for a whole layer, that of a shared expert for
    routed experts, and no wildcards.
    """

    _algorithms: tuple[Any, MixedPrecision | None] = None, None
    """vLLM's dictionary of layers, and the algorithms parsed from it."""

    def _resolve_quant_algo(self, prefix: str) -> str | None:
        """The algorithm of a module; vLLM calls it.

        Raises:
            CheckpointError: matrices of a MoE layer have different algorithms.
            DeploymentError: the release does not load the layer's; the stock class would take it for unquantized.
        """
        if prefix.rpartition(".")[2] != "experts":
            algo: str | None = super()._resolve_quant_algo(prefix)
            return algo
        layers, algorithms = self._algorithms
        if layers is not self.quantized_layers or algorithms is None:  # vLLM renames layers once it has the model
            algorithms = MixedPrecision.read(self.quantized_layers, "quantization_config")
            self._algorithms = self.quantized_layers, algorithms
        # The config does not know whether the experts are gated.
        projections = GATED_PROJECTIONS + UNGATED_PROJECTIONS
        algo = algorithms.of(LayerNames(tuple(self._quantized_layer_prefix_candidates(prefix)), projections))
        if algo == "MXFP8":
            check_release("modelopt_mixed", SCHEME, current_adapter().version(), "quantization_config")
        return algo
