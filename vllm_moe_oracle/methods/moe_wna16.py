"""``--quantization moe_wna16``: GPTQ and AWQ checkpoints with their experts packed in bytes, output dimension first.

Stock vLLM also falls back to it for layers of those checkpoints whose shapes Marlin does not support.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import moe_wna16 as stock
from vllm.platforms import current_platform

from ..core.problem import Scheme
from ..quantization.awq import awq_scheme
from ..quantization.fields import flatten_names, read_string
from ..quantization.gptq import gptq_scheme
from .gptq import AutoGPTQConfig, without_act_order
from .wna16 import ConfigWna16MoEMethod, Wna16ConfigMixin

SERVES = {
    "schemes": ["wna16"],
    "quantizations": {"moe_wna16": "MoeWNA16Config"},
    "replaces": ["moe_wna16:MoeWNA16Config", "moe_wna16:MoeWNA16Method"],
}

_WHERE = "quantization_config"
_AWQ_METHODS = ("awq", "awq_marlin")


def config_fields(config: Any) -> dict[str, Any]:
    """vLLM's config object for MoeWNA16 as the fields of a checkpoint's config."""
    own = {"bits": config.weight_bits, "group_size": config.group_size}
    if config.linear_quant_method == "gptq":
        return {"desc_act": False, "sym": not config.has_zp, **config.full_config, **own, "quant_method": "gptq"}
    own |= {"quant_method": "awq", "zero_point": config.has_zp, "modules_to_not_convert": config.modules_to_not_convert}
    return {**config.full_config, **own}


def default_scheme(config: Any) -> Scheme:
    """The scheme of every module without a rule of its own."""
    fields = config_fields(config)
    return gptq_scheme(fields, _WHERE) if fields["quant_method"] == "gptq" else awq_scheme(fields, _WHERE)


class MoeWNA16Method(ConfigWna16MoEMethod, stock.MoeWNA16Method):
    """MoE layers; replaces the stock class of the same name. The stock loader adds one to each packed zero point
    separately, which loses the borrow of the tool that subtracted it."""

    parameter_packing = "moe_wna16"

    @staticmethod
    def read_scheme(quant_config: Any) -> Scheme:
        """See `ConfigWna16MoEMethod`."""
        return default_scheme(quant_config)


class MoeWNA16Config(Wna16ConfigMixin, stock.MoeWNA16Config):
    """The stock config with this project's MoE method."""

    moe_method_cls = MoeWNA16Method

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
        # The stock class checks the GPU for its AWQ kernels; on a CPU the experts are emulated.
        method = "gptq" if linear_quant_method in _AWQ_METHODS and current_platform.is_cpu() else linear_quant_method
        super().__init__(
            method, weight_bits, group_size, has_zp, lm_head_quantized, flatten_names(modules_to_not_convert), plain
        )
        self.linear_quant_method = linear_quant_method
        self.full_config = full_config

    def checkpoint_fields(self) -> dict[str, Any]:
        """See `Wna16ConfigMixin`."""
        return config_fields(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint, with the field names of its own quantization method."""
        other = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
        # A null counts as a missing field, which the stock class reports by name.
        required = ("bits", "group_size", "sym", "zero_point")
        fields = [*other.items(), *config.items()]
        stated = {name: value for name, value in fields if value is not None or name not in required}
        return super().from_config({**stated, "quant_method": read_string(config, "quant_method", _WHERE)})

    @classmethod
    def is_moe_wna16_compatible(cls, quant_config: dict[str, Any]) -> bool:
        """Whether a checkpoint's config can be served under this name."""
        quant_config = {**quant_config, "quant_method": read_string(quant_config, "quant_method", _WHERE)}
        plain = {**quant_config, "desc_act": False, "dynamic": without_act_order(quant_config.get("dynamic") or {})}
        on_cpu = current_platform.is_cpu() and plain.get("quant_method") in _AWQ_METHODS and plain.get("bits") == 4
        return on_cpu or bool(super().is_moe_wna16_compatible(plain))

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Drops tensors that no layer reads; as for GPTQ."""
        return AutoGPTQConfig.get_checkpoint_weight_mapper()

    def with_scheme(self, scheme: Scheme) -> MoeWNA16Config:
        """The config of a layer with another scheme, from a rule in ``dynamic``."""
        if scheme == default_scheme(self):
            return self
        of_layer: dict[str, Any] = {"desc_act": scheme.act_order != "none", "sym": not scheme.zero_points}
        of_layer |= {"checkpoint_format": scheme.packing, "format": None}
        config: MoeWNA16Config = type(self)(
            self.linear_quant_method,
            scheme.bits,
            scheme.group_size,
            scheme.zero_points,
            self.lm_head_quantized,
            self.modules_to_not_convert,
            {**self.full_config, **of_layer},
        )
        config.expert_biases = self.expert_biases
        return config
