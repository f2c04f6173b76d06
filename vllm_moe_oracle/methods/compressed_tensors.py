"""llm-compressor's checkpoints, in the format of the compressed-tensors package: MXFP8 and integers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as stock_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as stock,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as stock_wna16,
)

from ..compat import current_adapter
from ..compat.layer_context import current_layer
from ..core.problem import MX_BLOCK, ActivationPrecision, Scheme, mx_scheme
from ..errors import CheckpointError
from ..quantization.compressed_tensors import (
    compressed_act_order,
    group_format,
    online_transforms,
    reject_transforms,
)
from ..quantization.types import ExpertFormat, UnsupportedFormat
from ..releases.expert_names import stock_uses_ckpt_names
from .base import OracleMoEMethod
from .gptq import stock_refuses_act_order
from .wna16 import Wna16MoEMethod

SERVES = {
    "schemes": ["mxfp8", "wna16"],
    "quantizations": {"compressed-tensors": "CompressedTensorsConfig"},
    "replaces": [
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe:CompressedTensorsMoEMethod.get_moe_method",
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8"
        ":CompressedTensorsW8A8Mxfp8MoEMethod",
    ],
}

SCHEME = mx_scheme("mxfp8", "compressed-tensors", "mxfp8")
"""``mxfp8-quantized``: tensors like ModelOpt's MXFP8, with the same names."""


_WHERE = "quantization_config"
PACK_QUANTIZED = "pack-quantized"
"""The only integer format that stock vLLM reads for experts."""


class CompressedTensorsW8A8Mxfp8MoEMethod(OracleMoEMethod, stock.CompressedTensorsW8A8Mxfp8MoEMethod):
    """MoE layers in MXFP8; replaces the stock class of the same name, which treats weight-only checkpoints
    (``MXFP8A16``) as W8A8. Here their activations stay in 16 bits."""

    def __init__(self, moe: Any) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.weight_block_size = [1, MX_BLOCK]
        layer, name = current_layer()
        declared = declared_activations(layer, name, default=SCHEME.activations)
        self.decide(moe, dataclasses.replace(SCHEME, activations=declared))


def declared_activations(layer: Any, name: str, default: ActivationPrecision) -> ActivationPrecision:
    """Precision that the checkpoint's config declares for the inputs of a layer's experts.

    Args:
        layer: the layer under construction; None where vLLM does not pass it.
        name: the layer's name.
        default: the precision without a layer, or without an entry for it: the one in the stock class's name.

    Raises:
        CheckpointError: no backend computes with the declared precision.
    """
    if layer is None:
        return default
    # The name that stock vLLM uses to select the class: another name may match no entry, or another one.
    projection = getattr(layer, "ckpt_down_proj_name", "") if stock_uses_ckpt_names(current_adapter().version()) else ""
    entry = layer.quant_config.get_scheme_dict(layer, f"{name}.0.{projection or 'down_proj'}")
    if entry is None:
        return default
    found = _entry_format(entry)
    if not isinstance(found, Scheme):
        declared_as = found.format if isinstance(found, UnsupportedFormat) else "unquantized"
        rule = f"experts are declared as {declared_as}, which nothing computes"
        remedy = "Serve a checkpoint that declares MXFP8, MXFP4, or 8-bit floats by token or in groups of 128; or none"
        raise CheckpointError(rule, remedy, name)
    return found.activations


def _entry_format(entry: dict[str, Any]) -> ExpertFormat:
    """The format that one of vLLM's entries for targets stands for."""
    arguments = {name: entry.get(name) for name in ("weights", "input_activations")}
    group = {name: each.model_dump(mode="json") for name, each in arguments.items() if each is not None}
    return group_format(group, _enum_value(entry.get("format")), _WHERE)


class CompressedTensorsWNA16MoEMethod(Wna16MoEMethod, stock_wna16.CompressedTensorsWNA16MoEMethod):
    """MoE layers in integers with 16-bit activations; replaces the stock class of the same name, and the separate class
    for Marlin in older releases."""

    def __init__(
        self,
        weight_quant: Any,
        input_quant: Any,
        moe: Any,
        *,
        scheme: Scheme,
        build_stock: Callable[[], Any] | None = None,
    ) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.weight_quant = weight_quant
        self.input_quant = input_quant
        self.file_packing = scheme.packing
        self.decide(moe, scheme)

    @classmethod
    def build_stock_method(cls, stock_class: Any, *args: Any, build_stock: Callable[[], Any], **kwargs: Any) -> Any:
        """What the stock function makes, which selects one of several classes in older releases."""
        return build_stock()


class CompressedTensorsConfig(stock_config.CompressedTensorsConfig):
    """The stock config with support for unpacked integers and, in newer releases, act order.

    The stock class rejects such checkpoints as a whole. Here their experts are served, and their linear layers are
    rejected.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; a null list counts as empty."""
        return super().from_config({**config, "ignore": config.get("ignore") or []})

    @classmethod
    def _quantization_scheme_map_from_config(cls, config: dict[str, Any]) -> Any:
        """Quantization of each target's weights and activations; vLLM calls it."""
        groups = config.get("config_groups") or {}
        served = {name: _stock_compatible_group(group, config.get("format")) for name, group in groups.items()}
        found = super()._quantization_scheme_map_from_config({**config, "config_groups": served})
        owners = {target: name for name, group in groups.items() for target in group["targets"]}
        for target, name in owners.items():
            group = groups[name]
            if served[name] is not group:
                found[target]["weights"] = QuantizationArgs.model_validate(group["weights"])
                found[target]["format"] = group.get("format") or config.get("format")
        return found

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class.

        Raises:
            ValueError: a linear layer has act order, which vLLM's kernels do not know.
        """
        if isinstance(layer, LinearBase) and stock_refuses_act_order():
            weights = (self.get_scheme_dict(layer, prefix) or {}).get("weights")
            if weights is not None and compressed_act_order(_enum_value(weights.actorder), _WHERE) == "group":
                rule = f"{prefix}: group/dynamic activation ordering (actorder={_enum_value(weights.actorder)!r})"
                raise ValueError(f"{rule} is not supported for linear layers by this vLLM release")
        return super().get_quant_method(layer, prefix)


def _stock_compatible_group(group: dict[str, Any], common_format: Any) -> dict[str, Any]:
    """A config group that the stock reader accepts; the same object if it accepts the group unchanged.

    Args:
        group: one of ``config_groups``.
        common_format: that of the config, for a group without its own.
    """
    found = group_format(group, common_format, _WHERE)
    if not isinstance(found, Scheme) or found.name != "wna16":
        return group
    if (group.get("format") or common_format) == PACK_QUANTIZED and found.act_order != "group":
        return group
    return {**group, "format": PACK_QUANTIZED, "weights": {**group["weights"], "actorder": None}}


def get_moe_method(original: Any, quant_config: Any, layer: Any, layer_name: str) -> Any:
    """The method of a MoE layer: ours for integers with 16-bit activations, else the stock function's.

    Stock vLLM decides by the shapes that its own kernels take, and refuses formats and orders that they do not know.

    Args:
        original: the stock function.
        quant_config: vLLM's `CompressedTensorsConfig`.
        layer: the MoE layer.
        layer_name: its name.
    """
    found = _integer_arguments(quant_config, layer, layer_name)
    if found is not None:
        entry, scheme = found
        stock = functools.partial(original, quant_config, layer, layer_name)
        made = CompressedTensorsWNA16MoEMethod(
            entry["weights"], entry["input_activations"], layer.moe_config, scheme=scheme, build_stock=stock
        )
    else:
        made = original(quant_config, layer, layer_name)
    if isinstance(made, OracleMoEMethod):
        transforms = online_transforms(quant_config.config or {}, _WHERE)
        reject_transforms(transforms, [f"{layer_name}.0.{name}" for name in _projection_names(layer)], _WHERE)
    return made


def _projection_names(layer: Any) -> list[str]:
    """Names of an expert's matrices in the checkpoint."""
    names = (getattr(layer, f"ckpt_{each}_proj_name", "") or f"{each}_proj" for each in ("gate", "up", "down"))
    return list(names)


def _integer_arguments(quant_config: Any, layer: Any, layer_name: str) -> tuple[dict[str, Any], Scheme] | None:
    """vLLM's entry and the scheme of a layer with 4- or 8-bit integer experts and 16-bit activations; None for any
    other layer."""
    quant_config._add_fused_moe_to_target_scheme_map()
    entries = [quant_config.get_scheme_dict(layer, f"{layer_name}.0.{name}") for name in _projection_names(layer)]
    entry = entries[-1]
    if entry is None or any(each != entry for each in entries):
        return None
    found = _entry_format(entry)
    if not isinstance(found, Scheme) or found.name != "wna16":
        return None
    return entry, found


def _enum_value(value: Any) -> Any:
    """The value of an enum member of compressed-tensors; any other object unchanged."""
    return getattr(value, "value", value)
