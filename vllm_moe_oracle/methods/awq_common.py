"""AWQ's checkpoints: what the config classes and methods of all releases share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

from ..compat.construction import under_construction
from ..oracle.problem import Scheme
from ..quantization import reader
from ..quantization.answers import Answer
from ..quantization.awq import awq_scheme
from ..quantization.fields import flattened
from .dtypes import with_emulated
from .wna16 import Wna16MoEMethod, experts_called, has_expert_biases, unquantised

_WHERE = "quantization_config"


def fields_of(config: Any) -> dict[str, Any]:
    """A config object of vLLM's for AWQ, of any release, as the fields of a checkpoint's config."""
    return {
        "quant_method": "awq",
        "bits": config.weight_bits,
        "group_size": config.group_size,
        "zero_point": config.zero_point,
        "modules_to_not_convert": config.modules_to_not_convert,
        **getattr(config, "packed_for", {}),
    }


class AwqMoE(Wna16MoEMethod):
    """Mixed in before a stock method class for AWQ."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.quant_config = quant_config
        self.file_packing = "awq"
        self.bias_in_file = getattr(quant_config, "expert_biases", False)
        self.decide(moe, awq_scheme(fields_of(quant_config), _WHERE))


class AwqExperts:
    """Mixed in before a stock config class for AWQ: its experts get this project's method, everything else stays the
    stock class's."""

    Method: type[Any]
    """The method of its experts."""
    expert_biases: bool = False
    """The checkpoint holds biases of experts."""
    packed_for: Mapping[str, Any] = MappingProxyType({})
    """Fields of the checkpoint's config that say how its codes are packed; stock classes keep none of them."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; lists of modules may be lists of lists."""
        # A null says as little as a field that is not there, which the stock class refuses.
        stated = {name: value for name, value in config.items() if name != "zero_point" or value is not None}
        listed = config.get("modules_to_not_convert")
        made = super().from_config({**stated, "modules_to_not_convert": flattened(listed)})  # type: ignore[misc]
        return _keeping(made, {name: config.get(name) for name in ("version", "checkpoint_format", "format")})

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where experts are emulated, also float32."""
        return with_emulated(super().get_supported_act_dtypes())  # type: ignore[misc]

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Looks at the names of the checkpoint's tensors, for what the config does not say."""
        super().maybe_update_config(model_name, *args, **kwargs)  # type: ignore[misc]
        self.expert_biases = has_expert_biases(model_name, kwargs.get("revision"))

    def scheme_of(self, prefix: str, layer: Any = None) -> Answer:
        """What the experts of a layer are stored as, by the rules that `explain` knows too; None for not quantised."""
        return reader(fields_of(self), _WHERE)(experts_called(prefix, layer))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if not isinstance(self.scheme_of(prefix, layer), Scheme):
            return unquantised(layer.moe_config)
        with under_construction(layer, prefix):
            return self.Method(self, layer.moe_config)


def _keeping(config: Any, packed_for: Mapping[str, Any]) -> Any:
    """The config object, which knows how its checkpoint is packed."""
    config.packed_for = packed_for
    return config
