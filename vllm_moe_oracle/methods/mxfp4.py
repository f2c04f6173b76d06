"""MXFP4 checkpoints of gpt-oss and of other models tagged ``mxfp4``, and MXFP4 experts in FP8 checkpoints
(DeepSeek-V4).

vLLM's class for ``mxfp4`` gives a MoE layer gpt-oss's method up to 0.26, and another one from 0.27.1. Here each name
has one method in every release; the activation says whether rows of gate and up are interleaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from ..compat.layer_context import current_layer, set_current_layer
from ..core.problem import E8M0_BIAS, MX_BLOCK, ActivationPrecision, Problem, Scheme, mx_scheme
from ..core.sharding import loader_shards_by_blocks, shard_by_blocks, shard_size
from ..errors import CheckpointError, SettingError
from ..quantization.fields import exclusion_matcher, read_names
from ..quantization.gpt_oss import EXCLUSION_FIELDS, reject_compressed_tensors, reject_excluded_experts
from . import weight_loading
from .base import OracleMoEMethod
from .dtypes import EmulatedDtypesMixin
from .wna16 import expert_layer_names

SERVES = {
    "schemes": ["mxfp4"],
    "quantizations": {"mxfp4": "Mxfp4Config", "gpt_oss_mxfp4": "GptOssMxfp4Config", "deepseek_v4_fp8": None},
    "replaces": ["mxfp4:GptOssMxfp4MoEMethod", "mxfp4:Mxfp4MoEMethod"],
}

_WHERE = "quantization_config"


class BaseMxfp4MoEMethod(OracleMoEMethod):
    """The common part of the methods for MXFP4.

    A backend's plan pads, where stock classes pad by their own rules. gpt-oss's loader shards the intermediate size by
    whole blocks, so that the last rank's shard may be smaller.
    """

    @property
    def supports_pre_processed_weights(self) -> bool:
        """No: vLLM's cache of converted weights only holds layouts of stock classes."""
        return False

    @property
    def skip_forward_padding(self) -> bool:
        """Whether the kernel accepts inputs narrower than its weights."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """Whether the kernel crops its output itself."""
        return False

    def _requested_scheme(self, scheme: Scheme) -> tuple[Scheme, str]:
        """The requested scheme; vLLM's own option counts where our setting has its default, as in the stock classes."""
        scheme, requested_by = super()._requested_scheme(scheme)
        requested = activation_precision(self.adapter.requested_activations())
        if requested_by or self.settings.activations != "checkpoint" or requested in ("16bit", scheme.activations):
            return scheme, requested_by
        option = "--quantization-config's moe.activation"
        if scheme.activations == "16bit":
            return dataclasses.replace(scheme, activations=requested), option
        rule = f"the checkpoint declares {scheme.activations} for the experts' inputs, {option} requests {requested}"
        raise SettingError(rule, "Leave it out", current_layer()[1])

    def _refine_problem(self, problem: Problem) -> Problem:
        if problem.even_expert_split:
            reject_compressed_tensors(problem.scheme, problem.layer)
        problem = super()._refine_problem(problem)
        return shard_by_blocks(problem) if loader_shards_by_blocks(problem) else problem

    def _register_parameters(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """As the stock class does, with a bias loader that accepts biases of single experts in every release."""
        super()._register_parameters(layer, num_experts, *args, **kwargs)
        for name in ("w13_bias", "w2_bias") if self.decision.problem.has_bias else ():
            parameter = getattr(layer, name)
            if hasattr(parameter, "weight_loader"):
                loader = self.adapter.bias_loader(layer, parameter.weight_loader)
                parameter.weight_loader = weight_loading.filling_loader(loader)

    def _read_weights(self, layer: Any) -> dict[str, Tensor]:
        self._zero_padding(layer)
        return super()._read_weights(layer)

    def _zero_padding(self, layer: Any) -> None:
        """Zeroes the part of the weights beyond the last rank's shard, where nothing is loaded."""
        problem = self.decision.problem
        shard = shard_size(problem, self.moe.moe_parallel_config.tp_rank) if problem.ragged_intermediate_size else 0
        if not 0 < shard < problem.intermediate_size:
            return
        names = self._parameter_names(self._scheme().shapes(problem))
        padding: Mapping[str, tuple[Any, int]] = {
            "w13": ((slice(None), slice(2 * shard, None)), 0),
            "w13_scale": ((slice(None), slice(2 * shard, None)), E8M0_BIAS),
            "w13_bias": ((slice(None), slice(2 * shard, None)), 0),
            "w2": ((..., slice(shard // 2, None)), 0),
            "w2_scale": ((..., slice(shard // MX_BLOCK, None)), E8M0_BIAS),
        }
        for own, (part, value) in padding.items():
            if own in names:
                getattr(layer, names[own]).data[part] = value


class _GptOssLayoutMoEMethod(BaseMxfp4MoEMethod):
    """For checkpoints whose tensors have the names and shapes of gpt-oss's parameters in vLLM.

    Attributes:
        packing: packing of the scheme.
        weight_dtype: read by gpt-oss's loader; ``gpt_oss_mxfp4`` and ``mxfp4`` are packed.
    """

    packing: ClassVar[str]
    weight_dtype: Any

    def __init__(self, moe: Any, activation_key: Any = None, *args: Any, **kwargs: Any) -> None:
        """
        Args:
            moe: vLLM's `FusedMoEConfig`.
            activation_key: vLLM's `QuantKey` of the activations that the checkpoint declares; since 0.32.
            args: arguments of later releases.
            kwargs: likewise.
        """
        # The stock constructors would choose a backend by their own rules, and raise where they find none.
        self.decide(moe, mx_scheme("mxfp4", self.packing, activations_of_key(current_layer()[0], activation_key)))


class GptOssMxfp4MoEMethod(_GptOssLayoutMoEMethod, stock.GptOssMxfp4MoEMethod):
    """MoE layers of gpt-oss; replaces the stock class of the same name."""

    packing = "gpt_oss"
    weight_dtype = "gpt_oss_mxfp4"


class Mxfp4MoEMethod(_GptOssLayoutMoEMethod, stock.Mxfp4MoEMethod):
    """MoE layers of other models; replaces the stock class of the same name, which vLLM's FP8 configs construct."""

    packing = "mxfp4"
    weight_dtype = "mxfp4"

    def _register_parameters(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """As the stock class does, with one loader for codes and scales: its own loader of scales (since 0.28) rounds
        those that are stored as numbers, before they are validated."""
        super()._register_parameters(layer, num_experts, *args, **kwargs)
        for name in ("w13_weight", "w2_weight"):
            getattr(layer, f"{name}_scale").weight_loader = getattr(layer, name).weight_loader


def activations_of_key(layer: Any, activation_key: Any) -> ActivationPrecision:
    """Precision that a checkpoint declares for the inputs of a layer's experts.

    An FP8 config quantizes activations dynamically, whatever a release passes to the constructor: for DeepSeek-V4
    nothing until 0.31, and ``mxfp8`` as a constant in 0.33.

    Args:
        layer: the layer under construction; None where vLLM does not pass it.
        activation_key: vLLM's `QuantKey` of dynamic activations, or None.
    """
    if isinstance(getattr(layer, "quant_config", None), Fp8Config):
        return "fp8"
    return activation_precision(activation_key)


def activation_precision(key: Any) -> ActivationPrecision:
    """The activation precision of vLLM's `QuantKey` of dynamic activations; None is the model's dtype.

    Raises:
        CheckpointError: no backend computes with this precision.
    """
    if key is None:
        return "16bit"
    group, mx = tuple(key.scale.group_shape), key.scale.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    known: dict[object, ActivationPrecision] = {
        (True, (1, -1), False): "fp8_token",  # vLLM's GroupShape.PER_TOKEN
        (True, (1, 128), False): "fp8",
        (True, (1, MX_BLOCK), True): "mxfp8",
        (False, (1, MX_BLOCK), True): "mxfp4",
    }
    found = known.get((key.dtype == torch.float8_e4m3fn, group, mx))
    if found is None or key.scale.static or not key.symmetric:
        raise CheckpointError(f"activations in {key} are not supported for experts in MXFP4", where=current_layer()[1])
    return found


class _ExclusionsMixin(EmulatedDtypesMixin):
    """The mix-in in front of a stock config class, which keeps the names of modules that are not quantized."""

    excluded_modules: tuple[str, ...] = ()
    """Names and wildcards of modules that are not quantized, in vLLM's names."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint."""
        made = super().from_config(config)  # type: ignore[misc]  # of the mixin's stock class
        made.excluded_modules = tuple(read_names(config, EXCLUSION_FIELDS, _WHERE))
        return made

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Maps the checkpoint's names to vLLM's; vLLM calls it with a model's mapper."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]  # of the mixin's stock class
        self.excluded_modules = tuple(hf_to_vllm_mapper.apply_list(list(self.excluded_modules)))


class Mxfp4Config(_ExclusionsMixin, stock.Mxfp4Config):
    """The stock config with this project's MoE method; linear layers stay the stock class's.

    Experts that the checkpoint leaves unquantized get vLLM's own method: the stock class reads no exclusions.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class."""
        excludes = isinstance(layer, RoutedExperts) and exclusion_matcher(self.excluded_modules, _WHERE)
        if excludes and expert_layer_names(prefix, layer).matches(excludes):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return _moe_method(Mxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


class GptOssMxfp4Config(_ExclusionsMixin, stock.GptOssMxfp4Config):
    """The stock config with this project's MoE method; see `Mxfp4Config`."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class.

        Raises:
            CheckpointError: the layer's experts are not quantized.
        """
        if isinstance(layer, RoutedExperts):
            reject_excluded_experts(self.excluded_modules, expert_layer_names(prefix, layer), _WHERE)
        return _moe_method(GptOssMxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


def _moe_method(method_cls: type[_GptOssLayoutMoEMethod], layer: Any, prefix: str) -> _GptOssLayoutMoEMethod | None:
    """Our method of a MoE layer; None for any other layer."""
    if not isinstance(layer, RoutedExperts):
        return None
    with set_current_layer(layer, prefix):
        return method_cls(layer.moe_config)
