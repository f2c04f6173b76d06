"""gpt-oss's MXFP4 checkpoints, and those of other models that are tagged ``mxfp4``.

What vLLM's own class for ``mxfp4`` makes of a MoE layer moves: gpt-oss's method up to 0.26, another one from 0.27.1.
Here each name has one method in every release; whether rows alternate gate and up is the activation's business.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.platforms import current_platform

from .. import settings
from ..compat.construction import under_construction
from ..oracle.problem import MX_BLOCK, Scheme
from ..oracle.registry import default_registry
from .base import OracleMoEMethod

logger = logging.getLogger("vllm.moe_oracle")


class _Mxfp4MoEMethod(OracleMoEMethod):
    """What both methods share: nothing is padded but by a backend's plan, which the stock classes do by a list."""

    scheme: ClassVar[Scheme]
    weight_dtype: str
    """gpt-oss's loader asks for it: ``gpt_oss_mxfp4`` and ``mxfp4`` are packed."""

    def __init__(self, moe: Any, *args: Any, **kwargs: Any) -> None:
        # Not the stock constructors: they would choose a backend by their own lists, and raise where those have none.
        self.decide(moe, self.scheme)

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers the checkpoint's parameters as the stock class does, with a loader for biases that takes those of
        single experts in every release."""
        super().create_weights(layer, num_experts, *args, **kwargs)
        for name in ("w13_bias", "w2_bias") if self.decision.problem.has_bias else ():
            parameter = getattr(layer, name)
            if hasattr(parameter, "weight_loader"):
                parameter.weight_loader = self.release.bias_loader(layer, parameter.weight_loader)

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

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Sizes as they are, but for what the all-to-all needs; the stock classes round up for their own backend."""
        sizes: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)
        return sizes


class GptOssMxfp4MoEMethod(_Mxfp4MoEMethod, stock.GptOssMxfp4MoEMethod):
    """MoE layers of gpt-oss. Takes the place of the stock class of the same name."""

    scheme = Scheme("mxfp4", bits=4, group_size=MX_BLOCK, packing="gpt_oss")
    weight_dtype = "gpt_oss_mxfp4"


class Mxfp4MoEMethod(_Mxfp4MoEMethod, stock.Mxfp4MoEMethod):
    """MoE layers of other models. Takes the place of the stock class of the same name."""

    scheme = Scheme("mxfp4", bits=4, group_size=MX_BLOCK, packing="mxfp4")
    weight_dtype = "mxfp4"


def left_to_stock() -> bool:
    """Whether stock vLLM's kernels serve MXFP4: on an accelerator, as long as no backend but emulation knows the format
    and no backend was asked for."""
    if current_platform.is_cpu() or any(each.name != "emulation" for each in default_registry().for_scheme("mxfp4")):
        return False
    chosen = settings.load(additional_config=get_current_vllm_config().additional_config)
    return chosen.backend == "auto" and not chosen.overrides


class Mxfp4Config(stock.Mxfp4Config):
    """The stock config with this project's MoE method; linear layers stay what they are in the stock class."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where the experts are emulated, also float16 and float32."""
        return _with_emulated(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        return _method(Mxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


class GptOssMxfp4Config(stock.GptOssMxfp4Config):
    """The stock config with this project's MoE method; see `Mxfp4Config`."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model; see `Mxfp4Config`."""
        return _with_emulated(super().get_supported_act_dtypes())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        return _method(GptOssMxfp4MoEMethod, layer, prefix) or super().get_quant_method(layer, prefix)


def _method(kind: type[_Mxfp4MoEMethod], layer: Any, prefix: str) -> _Mxfp4MoEMethod | None:
    """Our method for a MoE layer; None for any other layer, and where stock vLLM serves."""
    if not isinstance(layer, RoutedExperts):
        return None
    if left_to_stock():
        logger.info("moe_oracle: %s: no kernel for MXFP4 yet; stock vLLM serves this layer", prefix)
        return None
    with under_construction(layer, prefix):
        return kind(layer.moe_config)


def _with_emulated(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    return [*dtypes, torch.float16, torch.float32] if current_platform.is_cpu() else list(dtypes)
