"""AWQ checkpoints: the common part of the config classes and methods of all releases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts

from ..compat.layer_context import set_current_layer
from ..core.problem import Scheme
from ..quantization.awq import awq_scheme
from ..quantization.fields import flatten_names
from .wna16 import Wna16ConfigMixin, Wna16MoEMethod, unquantized_method

_WHERE = "quantization_config"


def config_fields(config: Any) -> dict[str, Any]:
    """vLLM's config object for AWQ, of any release, as the fields of a checkpoint's config."""
    return {
        "quant_method": "awq",
        "bits": config.weight_bits,
        "group_size": config.group_size,
        "zero_point": config.zero_point,
        "modules_to_not_convert": config.modules_to_not_convert,
        **getattr(config, "packing_fields", {}),
    }


class AwqMoEMethod(Wna16MoEMethod):
    """The mix-in in front of a stock method class for AWQ."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.quant_config = quant_config
        self.file_packing = "awq"
        self.bias_in_file = getattr(quant_config, "expert_biases", False)
        self.decide(moe, awq_scheme(config_fields(quant_config), _WHERE))


class AwqConfigMixin(Wna16ConfigMixin):
    """The mix-in in front of a stock config class for AWQ: experts get this project's method, everything else is the
    stock class's.

    Attributes:
        moe_method_cls: the method of the experts.
        packing_fields: fields of the checkpoint's config that name the packing; stock classes do not keep them.
    """

    moe_method_cls: type[Any]
    packing_fields: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; a list of modules may be nested."""
        # A null counts as a missing field, which the stock class reports.
        stated = {name: value for name, value in config.items() if name != "zero_point" or value is not None}
        listed = config.get("modules_to_not_convert")
        made = super().from_config({**stated, "modules_to_not_convert": flatten_names(listed)})  # type: ignore[misc]
        return _with_packing_fields(
            made, {name: config.get(name) for name in ("version", "checkpoint_format", "format")}
        )

    def checkpoint_fields(self) -> dict[str, Any]:
        """See `Wna16ConfigMixin`."""
        return config_fields(self)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if not isinstance(self.scheme_of(prefix, layer), Scheme):
            return unquantized_method(layer.moe_config)
        with set_current_layer(layer, prefix):
            return self.moe_method_cls(self, layer.moe_config)


def _with_packing_fields(config: Any, packing_fields: Mapping[str, Any]) -> Any:
    """The config object with its packing fields."""
    config.packing_fields = packing_fields
    return config
