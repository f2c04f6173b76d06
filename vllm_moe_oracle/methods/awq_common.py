"""AWQ checkpoints: the common part of the config classes and methods of all releases."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..core.problem import Scheme
from ..quantization.awq import awq_scheme
from ..quantization.fields import flatten_names
from .wna16 import ConfigWna16MoEMethod, Wna16ConfigMixin

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


class AwqMoEMethod(ConfigWna16MoEMethod):
    """The mix-in in front of a stock method class for AWQ."""

    @staticmethod
    def read_scheme(quant_config: Any) -> Scheme:
        """See `ConfigWna16MoEMethod`."""
        return awq_scheme(config_fields(quant_config), _WHERE)


class AwqConfigMixin(Wna16ConfigMixin):
    """The mix-in in front of a stock config class for AWQ: see `Wna16ConfigMixin`.

    Attributes:
        packing_fields: fields of the checkpoint's config that name the packing; stock classes do not keep them.
    """

    packing_fields: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; a list of modules may be nested."""
        # A null counts as a missing field, which the stock class reports.
        stated = {name: value for name, value in config.items() if name != "zero_point" or value is not None}
        stated["modules_to_not_convert"] = flatten_names(config.get("modules_to_not_convert"))
        made = super().from_config(stated)  # type: ignore[misc]  # of the mixin's stock class
        made.packing_fields = {name: config.get(name) for name in ("version", "checkpoint_format", "format")}
        return made

    def checkpoint_fields(self) -> dict[str, Any]:
        """See `Wna16ConfigMixin`."""
        return config_fields(self)
