"""gpt-oss's MXFP4 checkpoints, those of other models that are tagged ``mxfp4``, and experts in MXFP4 within FP8
checkpoints (DeepSeek-V4).

What vLLM's own class for ``mxfp4`` makes of a MoE layer moves: gpt-oss's method up to 0.26, another one from 0.27.1.
Here each name has one method in every release; whether rows alternate gate and up is the activation's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from ..compat.construction import current_layer, under_construction
from ..errors import CheckpointError, SettingError
from ..oracle.planner import in_whole_blocks, share_of
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Problem, Scheme
from ..quantization.fields import exclusion, read_names
from ..quantization.gpt_oss import LEFT_OUT, refuse_left_out, refuse_packed
from ..schemes.mxfp8 import E8M0_BIAS
from .base import OracleMoEMethod
from .dtypes import with_emulated
from .wna16 import experts_called

_WHERE = "quantization_config"


class AnyMxfp4MoEMethod(OracleMoEMethod):
    """What the methods for MXFP4 share: a backend's plan pads, which the stock classes do by a list; and gpt-oss's
    loader cuts the intermediate size between blocks, so that the last rank may have less than the others."""

    @property
    def supports_pre_processed_weights(self) -> bool:
        """vLLM's cache of converted weights knows the layouts of the stock classes only."""
        return False

    @property
    def skip_forward_padding(self) -> bool:
        """Whether the kernel takes inputs that are narrower than its weights."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """Whether the kernel crops its output itself."""
        return False

    def _asked(self, scheme: Scheme) -> tuple[Scheme, str]:
        """As every method does; vLLM's own option is heard where ours says nothing, as by the stock classes."""
        scheme, asked_by = super()._asked(scheme)
        asked = precision_of(self.release.activations_asked())
        if asked_by or self.settings.activations != "checkpoint" or asked in ("16bit", scheme.activations):
            return scheme, asked_by
        by = "--quantization-config's moe.activation"
        if scheme.activations == "16bit":
            return dataclasses.replace(scheme, activations=asked), by
        rule = f"the checkpoint declares {scheme.activations} for the experts' inputs, {by} asks for {asked}"
        raise SettingError(rule, "Leave it out", current_layer()[1])

    def _refined(self, problem: Problem) -> Problem:
        if problem.equal_experts:
            refuse_packed(problem.scheme, problem.layer)
        problem = super()._refined(problem)
        # Rows that alternate come through gpt-oss's loader.
        return in_whole_blocks(problem) if problem.activation.interleaved else problem

    def _register(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """As the stock class does, with a loader for biases that takes those of single experts in every release."""
        super()._register(layer, num_experts, *args, **kwargs)
        for name in ("w13_bias", "w2_bias") if self.decision.problem.has_bias else ():
            parameter = getattr(layer, name)
            if hasattr(parameter, "weight_loader"):
                parameter.weight_loader = self.release.bias_loader(layer, parameter.weight_loader)

    def _read(self, layer: Any) -> dict[str, Tensor]:
        self._clear_beyond_share(layer)
        return super()._read(layer)

    def _clear_beyond_share(self, layer: Any) -> None:
        """Makes what the last rank has no part of zero weights: nothing was loaded there."""
        problem = self.decision.problem
        share = share_of(problem, self.moe.moe_parallel_config.tp_rank) if problem.whole_intermediate_size else 0
        if not 0 < share < problem.intermediate_size:
            return
        names = self._names(self._scheme().shapes(problem))
        places: Mapping[str, tuple[Any, int]] = {
            "w13": ((slice(None), slice(2 * share, None)), 0),
            "w13_scale": ((slice(None), slice(2 * share, None)), E8M0_BIAS),
            "w13_bias": ((slice(None), slice(2 * share, None)), 0),
            "w2": ((..., slice(share // 2, None)), 0),
            "w2_scale": ((..., slice(share // MX_BLOCK, None)), E8M0_BIAS),
        }
        for own, (place, value) in places.items():
            if own in names:
                getattr(layer, names[own]).data[place] = value


class _TaggedMxfp4MoEMethod(AnyMxfp4MoEMethod):
    """For checkpoints whose tensors have the names and shapes of gpt-oss's parameters in vLLM."""

    packing: ClassVar[str]
    weight_dtype: Any
    """gpt-oss's loader asks for it: ``gpt_oss_mxfp4`` and ``mxfp4`` are packed."""

    def __init__(self, moe: Any, activation_key: Any = None, *args: Any, **kwargs: Any) -> None:
        """
        Args:
            moe: vLLM's `FusedMoEConfig`.
            activation_key: what the checkpoint declares for activations, in vLLM's words; since 0.32.
            args: what later releases add.
            kwargs: likewise.
        """
        # Not the stock constructors: they would choose a backend by their own lists, and raise where those have none.
        self.decide(moe, mxfp4_scheme(self.packing, declared_by(current_layer()[0], activation_key)))


class GptOssMxfp4MoEMethod(_TaggedMxfp4MoEMethod, stock.GptOssMxfp4MoEMethod):
    """MoE layers of gpt-oss. Takes the place of the stock class of the same name."""

    packing = "gpt_oss"
    weight_dtype = "gpt_oss_mxfp4"


class Mxfp4MoEMethod(_TaggedMxfp4MoEMethod, stock.Mxfp4MoEMethod):
    """MoE layers of other models. Takes the place of the stock class of the same name, which vLLM's FP8 configs
    construct themselves."""

    packing = "mxfp4"
    weight_dtype = "mxfp4"


def mxfp4_scheme(packing: str, activations: ActivationPrecision = "16bit") -> Scheme:
    """MXFP4 in a checkpoint.

    Args:
        packing: names and shapes of its tensors; see `schemes.mxfp4`.
        activations: what it declares for the experts' inputs.
    """
    return Scheme("mxfp4", bits=4, group_size=MX_BLOCK, packing=packing, activations=activations)


def declared_by(layer: Any, activation_key: Any) -> ActivationPrecision:
    """What a checkpoint declares for the inputs of a layer's experts.

    An FP8 config quantises activations dynamically, whatever a release's constructor says of it: DeepSeek-V4's is FP8
    until 0.31 by its config alone, and ``mxfp8`` in 0.33 by a constant.

    Args:
        layer: the layer under construction; None where vLLM does not hand it out.
        activation_key: vLLM's `QuantKey` of dynamic activations, or None.
    """
    if isinstance(getattr(layer, "quant_config", None), Fp8Config):
        return "fp8"
    return precision_of(activation_key)


def precision_of(key: Any) -> ActivationPrecision:
    """Our word for vLLM's `QuantKey` of dynamic activations; None is the model's own dtype.

    Raises:
        CheckpointError: a key of which nothing here computes the very numbers.
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
        raise CheckpointError(f"activations in {key} are not computed for experts in MXFP4", where=current_layer()[1])
    return found


def _leaving_out(config: Any, names: Iterable[str]) -> Any:
    """The config object, which knows what of its checkpoint is not quantised: the stock classes keep no names."""
    config.left_out = tuple(names)
    return config


class Mxfp4Config(stock.Mxfp4Config):
    """The stock config with this project's MoE method; linear layers stay what they are in the stock class.

    Experts that the checkpoint leaves in 16 bits are vLLM's own: the stock class reads no exclusions.
    """

    left_out: tuple[str, ...] = ()
    """Names and wildcards of modules that are not quantised, as vLLM calls them."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint."""
        return _leaving_out(super().from_config(config), read_names(config, LEFT_OUT, _WHERE))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Takes vLLM's names for the checkpoint's; stock code calls it with a model's mapping."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.left_out = tuple(hf_to_vllm_mapper.apply_list(list(self.left_out)))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where the experts are emulated, also float16 and float32."""
        return with_emulated(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        left_out = isinstance(layer, RoutedExperts) and exclusion(self.left_out, _WHERE)
        if left_out and experts_called(prefix, layer).match(left_out):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return _method(Mxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


class GptOssMxfp4Config(stock.GptOssMxfp4Config):
    """The stock config with this project's MoE method; see `Mxfp4Config`."""

    left_out: tuple[str, ...] = ()
    """Names and wildcards of modules that are not quantised, as vLLM calls them."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint."""
        return _leaving_out(super().from_config(config), read_names(config, LEFT_OUT, _WHERE))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Takes vLLM's names for the checkpoint's; stock code calls it with a model's mapping."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.left_out = tuple(hf_to_vllm_mapper.apply_list(list(self.left_out)))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model; see `Mxfp4Config`."""
        return with_emulated(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class.

        Raises:
            CheckpointError: the layer's experts are not quantised.
        """
        if isinstance(layer, RoutedExperts):
            refuse_left_out(self.left_out, experts_called(prefix, layer), _WHERE)
        return _method(GptOssMxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


def _method(kind: type[_TaggedMxfp4MoEMethod], layer: Any, prefix: str) -> _TaggedMxfp4MoEMethod | None:
    """Our method for a MoE layer; None for any other layer."""
    if not isinstance(layer, RoutedExperts):
        return None
    with under_construction(layer, prefix):
        return kind(layer.moe_config)
