"""``--quantization moe_wna16``: GPTQ's and AWQ's checkpoints with their experts in bytes, outputs first.

Stock vLLM also falls back to it with layers of those checkpoints whose shapes do not suit Marlin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import moe_wna16 as stock
from vllm.platforms import current_platform

from ..compat.construction import under_construction
from ..oracle.problem import Scheme
from ..quantization import reader
from ..quantization.answers import Answer
from ..quantization.awq import awq_scheme
from ..quantization.fields import flattened, read_word
from ..quantization.gptq import gptq_scheme
from .dtypes import with_emulated
from .gptq import AutoGPTQConfig, without_act_order
from .wna16 import Wna16MoEMethod, experts_called, has_expert_biases, unquantised

_WHERE = "quantization_config"
_AWQ = ("awq", "awq_marlin")


def fields_of(config: Any) -> dict[str, Any]:
    """A config object of vLLM's for MoeWNA16 as the fields of a checkpoint's config."""
    own = {"bits": config.weight_bits, "group_size": config.group_size}
    if config.linear_quant_method == "gptq":
        return {"desc_act": False, "sym": not config.has_zp, **config.full_config, **own, "quant_method": "gptq"}
    own |= {"quant_method": "awq", "zero_point": config.has_zp, "modules_to_not_convert": config.modules_to_not_convert}
    return {**config.full_config, **own}


def scheme_in_file(config: Any) -> Scheme:
    """What a config says of every module that it names no exception for."""
    fields = fields_of(config)
    return gptq_scheme(fields, _WHERE) if fields["quant_method"] == "gptq" else awq_scheme(fields, _WHERE)


class MoeWNA16Method(Wna16MoEMethod, stock.MoeWNA16Method):
    """MoE layers. Takes the place of the stock class of the same name, whose loader adds one to each packed zero point
    by itself and so loses what a tool's subtraction borrowed from the next."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.quant_config = quant_config
        scheme = scheme_in_file(quant_config)
        self.file_packing = scheme.packing
        self.bias_in_file = getattr(quant_config, "expert_biases", False)
        self.decide(moe, dataclasses.replace(scheme, packing="moe_wna16"))

    @classmethod
    def beyond_stock(cls, quant_config: Any, moe: Any) -> str:
        """See `OracleMoEMethod.beyond_stock`."""
        scheme = scheme_in_file(quant_config)
        return "knows no act order" if scheme.act_order == "group" and scheme.group_size != -1 else ""


class MoeWNA16Config(stock.MoeWNA16Config):
    """The stock config with this project's MoE method; linear layers stay what they are in the stock class."""

    expert_biases: bool = False
    """The checkpoint holds biases of experts."""

    def __init__(
        self,
        linear_quant_method: str,
        weight_bits: int,
        group_size: int,
        has_zp: bool,
        lm_head_quantized: bool,
        modules_to_not_convert: list[Any] | None,
        full_config: dict[str, Any],
    ) -> None:
        plain = {**full_config, "desc_act": False, "dynamic": without_act_order(full_config.get("dynamic") or {})}
        # The stock class asks a GPU for what its AWQ kernels need; a CPU has none of them, and emulates the experts.
        asked = "gptq" if linear_quant_method in _AWQ and current_platform.is_cpu() else linear_quant_method
        super().__init__(
            asked, weight_bits, group_size, has_zp, lm_head_quantized, flattened(modules_to_not_convert), plain
        )
        self.linear_quant_method = linear_quant_method
        self.full_config = full_config

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where experts are emulated, also float32."""
        return with_emulated(super().get_supported_act_dtypes())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; its fields as the checkpoint's own name has them spelled."""
        other = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
        # A null says as little as a field that is not there, which the stock class refuses by its name.
        required = ("bits", "group_size", "sym", "zero_point")
        fields = [*other.items(), *config.items()]
        stated = {name: value for name, value in fields if value is not None or name not in required}
        return super().from_config({**stated, "quant_method": read_word(config, "quant_method", _WHERE)})

    @classmethod
    def is_moe_wna16_compatible(cls, quant_config: dict[str, Any]) -> bool:
        """Whether a checkpoint's config can be served under this name."""
        quant_config = {**quant_config, "quant_method": read_word(quant_config, "quant_method", _WHERE)}
        plain = {**quant_config, "desc_act": False, "dynamic": without_act_order(quant_config.get("dynamic") or {})}
        on_cpu = current_platform.is_cpu() and plain.get("quant_method") in _AWQ and plain.get("bits") == 4
        return on_cpu or bool(super().is_moe_wna16_compatible(plain))

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Which of the checkpoint's tensors no layer reads; as for GPTQ."""
        return AutoGPTQConfig.get_checkpoint_weight_mapper()

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Looks at the names of the checkpoint's tensors, for what the config does not say."""
        super().maybe_update_config(model_name, *args, **kwargs)
        self.expert_biases = has_expert_biases(model_name, kwargs.get("revision"))

    def scheme_of(self, prefix: str, layer: Any = None) -> Answer:
        """What the experts of a layer are stored as, by the rules that `explain` knows too; None for not quantised."""
        return reader(fields_of(self), _WHERE)(experts_called(prefix, layer))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        found = self.scheme_of(prefix, layer)
        if not isinstance(found, Scheme):
            return unquantised(layer.moe_config)
        with under_construction(layer, prefix):
            return MoeWNA16Method(self._of(found), layer.moe_config)

    def _of(self, scheme: Scheme) -> MoeWNA16Config:
        """The config of a layer with that scheme, which an exception in ``dynamic`` may have given it."""
        if scheme == scheme_in_file(self):
            return self
        of_layer: dict[str, Any] = {"desc_act": scheme.act_order != "none", "sym": not scheme.zero_points}
        of_layer |= {"checkpoint_format": scheme.packing, "format": None}
        made: MoeWNA16Config = type(self)(
            self.linear_quant_method,
            scheme.bits,
            scheme.group_size,
            scheme.zero_points,
            self.lm_head_quantized,
            self.modules_to_not_convert,
            {**self.full_config, **of_layer},
        )
        made.expert_biases = self.expert_biases
        return made
