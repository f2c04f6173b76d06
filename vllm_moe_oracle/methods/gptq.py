"""GPTQ checkpoints, written by AutoGPTQ, GPTQModel and others."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization import auto_gptq as stock
from vllm.model_executor.layers.quantization.utils import gptq_utils
from vllm.scalar_type import scalar_types

from ..compat import current_adapter, weight_storage
from ..core.problem import Scheme
from ..errors import CheckpointError, short_repr
from ..quantization.fields import flatten_names
from ..quantization.gptq import gptq_scheme
from ..releases import min_versions
from .wna16 import ConfigWna16MoEMethod, Wna16ConfigMixin, Wna16MoEMethod

SERVES = {
    "schemes": ["wna16"],
    "quantizations": {
        "gptq": "AutoGPTQConfig",
        "auto_gptq": "AutoGPTQConfig",
        "gptq_marlin": "AutoGPTQConfig",
        "inc": None,
    },
    "replaces": ["auto_gptq:AutoGPTQConfig", "auto_gptq:AutoGPTQMoEMethod"],
}

_WHERE = "quantization_config"

_reject_act_order = getattr(gptq_utils, "normalize_and_validate_gptq_desc_act", None)
"""vLLM's check of linear layers that rejects act order; None in releases without it."""


def config_fields(config: Any) -> dict[str, Any]:
    """vLLM's config object for GPTQ as the fields of a checkpoint's config.

    Args:
        config: vLLM's `AutoGPTQConfig`; the config class of Intel's AutoRound makes them, too.
    """
    fields = ("checkpoint_format", "format", "static_groups", "pack_dtype", "is_marlin_format")
    static = config.full_config.get("static_groups") and config.full_config.get("desc_act")
    return {
        **{name: config.full_config.get(name) for name in fields},
        "quant_method": "gptq",
        "bits": config.weight_bits,
        "group_size": config.group_size,
        "desc_act": bool(config.desc_act or static),
        "sym": config.is_sym,
        "dynamic": config.dynamic,
        "modules_in_block_to_quantize": config.modules_in_block_to_quantize,
    }


class AutoGPTQMoEMethod(ConfigWna16MoEMethod, stock.AutoGPTQMoEMethod):
    """MoE layers; replaces the stock class of the same name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class; see `StockFallback`."""
        method = super().__new__(cls, *args, **kwargs)
        if not isinstance(method, Wna16MoEMethod):
            # The weight mapper keeps group indices of experts, which some stock classes do not expect.
            method.create_weights = functools.partial(_create_weights_with_group_index, method.create_weights)
        return method

    @staticmethod
    def read_scheme(quant_config: Any) -> Scheme:
        """See `ConfigWna16MoEMethod`."""
        return gptq_scheme(config_fields(quant_config), _WHERE)


def _create_weights_with_group_index(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """The stock class's parameters, and parameters for group indices that are not read."""
    original(layer, *args, **kwargs)
    for name in ("w13_g_idx", "w2_g_idx"):
        if not hasattr(layer, name):
            weight_storage.replace_parameter(layer, name, torch.zeros(0), weight_loader=_skip_tensor)


def _skip_tensor(*args: Any, return_success: bool = False, **kwargs: Any) -> bool | None:
    return True if return_success else None


class AutoGPTQConfig(Wna16ConfigMixin, stock.AutoGPTQConfig):
    """The stock config with this project's MoE method.

    The stock class rejects every checkpoint with zero points, and in newer releases with act order. Here its experts
    are served, and a linear layer of that kind raises the stock class's error."""

    moe_method_cls = AutoGPTQMoEMethod
    TYPE_MAP: ClassVar[Any] = {
        **stock.AutoGPTQConfig.TYPE_MAP,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, Any],
        full_config: dict[str, Any],
        modules_in_block_to_quantize: list[Any] | None = None,
    ) -> None:
        if not isinstance(dynamic or {}, Mapping):
            raise CheckpointError(f"dynamic is {short_repr(dynamic)}, not an object", where=_WHERE)
        dynamic = dynamic or {}
        modules = flatten_names(modules_in_block_to_quantize)
        super().__init__(
            weight_bits, group_size, False, is_sym, lm_head_quantized, without_act_order(dynamic), full_config, modules
        )
        self.dynamic = dynamic
        # With static groups, the order of quantization does not matter to a reader.
        self.desc_act = bool(desc_act and group_size != -1 and not full_config.get("static_groups"))

    def checkpoint_fields(self) -> dict[str, Any]:
        """See `Wna16ConfigMixin`."""
        return config_fields(self)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Drops tensors that no layer reads: group indices, except those of experts."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={re.compile(r"^(?!.*\bexperts\.\d+\.).*\.g_idx$"): None})

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer.

        Raises:
            ValueError: a linear layer has zero points or act order, which vLLM's kernels do not support.
        """
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, stock.AutoGPTQLinearMethod):
            _validate_linear(method, prefix)
        return method

    def with_scheme(self, scheme: Scheme) -> AutoGPTQConfig:
        """The config of a layer with another scheme, from a rule in ``dynamic``."""
        found = copy.copy(self)
        found.weight_bits, found.group_size = scheme.bits, scheme.group_size
        found.is_sym, found.desc_act = not scheme.zero_points, scheme.act_order == "group"
        found.pack_factor = 32 // scheme.bits
        # The oracle rejects widths without a vLLM type, with the reasons of every backend.
        found.quant_type = self.TYPE_MAP.get((scheme.bits, not scheme.zero_points), self.quant_type)
        found.full_config = {**self.full_config, "checkpoint_format": scheme.packing, "format": None}
        return found


def _validate_linear(method: stock.AutoGPTQLinearMethod, prefix: str) -> None:
    config = method.quant_config
    if (config.weight_bits, config.is_sym) not in stock.AutoGPTQConfig.TYPE_MAP:
        found = f"bits={config.weight_bits}, sym={config.is_sym}"
        raise ValueError(f"{prefix}: Unsupported quantization config: {found}")
    if _reject_act_order is not None:
        _reject_act_order(config.desc_act, config.group_size, {})


def stock_refuses_act_order() -> bool:
    """Whether the installed vLLM's own methods refuse act order in groups."""
    return min_versions.refuses_act_order_in_linear(current_adapter().version())


def without_act_order(dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of ``dynamic`` without act order, which newer stock classes reject."""
    return {
        pattern: {name: value for name, value in rule.items() if name != "desc_act"} if isinstance(rule, dict) else rule
        for pattern, rule in dynamic.items()
    }
