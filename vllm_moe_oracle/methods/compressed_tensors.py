"""llm-compressor's checkpoints, in the format of the compressed-tensors package."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
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
from ..compat.construction import current_layer
from ..compat.expert_names import asks_as_models_say
from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Scheme
from ..quantization.compressed_tensors import (
    COMPRESSED_PACKINGS,
    compressed_activations,
    compressed_order,
    inputs_in_words,
    online_transforms,
    refuse_transforms,
)
from .base import OracleMoEMethod
from .dtypes import with_emulated
from .gptq import refuse_act_order
from .wna16 import Wna16MoEMethod

SCHEME = Scheme("mxfp8", bits=8, group_size=MX_BLOCK, packing="compressed-tensors", activations="mxfp8")
"""``mxfp8-quantized``: the tensors of ModelOpt's MXFP8 under the same names."""


_WHERE = "quantization_config"
PACKED = "pack-quantized"
"""The one integer format that stock vLLM reads for experts."""


class CompressedTensorsW8A8Mxfp8MoEMethod(OracleMoEMethod, stock.CompressedTensorsW8A8Mxfp8MoEMethod):
    """MoE layers in MXFP8. Takes the place of the stock class of the same name, which takes weight-only checkpoints
    (``MXFP8A16``) for W8A8; here their activations stay in 16 bits."""

    def __init__(self, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.weight_block_size = [1, MX_BLOCK]
        layer, name = current_layer()
        declared = declared_inputs(layer, name, without_layer=SCHEME.activations)
        self.decide(moe, dataclasses.replace(SCHEME, activations=declared))


def declared_inputs(layer: Any, name: str, without_layer: ActivationPrecision) -> ActivationPrecision:
    """What the checkpoint's config declares for the inputs of a layer's experts.

    Args:
        layer: the layer under construction; None where vLLM does not hand it out.
        name: the layer's name.
        without_layer: the answer without a layer, or without an entry for it: what the stock class is called after.

    Raises:
        CheckpointError: inputs of which nothing here computes the very numbers.
    """
    if layer is None:
        return without_layer
    # By the name that stock vLLM, which chose the class, has asked for: another may be in no entry, or in another one.
    said = getattr(layer, "ckpt_down_proj_name", "") if asks_as_models_say(current_adapter().version()) else ""
    scheme = layer.quant_config.get_scheme_dict(layer, f"{name}.0.{said or 'down_proj'}")
    if scheme is None:
        return without_layer
    inputs = scheme.get("input_activations")
    given = None if inputs is None else inputs.model_dump()
    found = compressed_activations(given)
    if found is None:
        declared_as = inputs_in_words(given or {})
        rule = f"inputs of experts in an MX format are declared as {declared_as}, which nothing computes"
        remedy = "Serve a checkpoint that declares MXFP8, MXFP4, or 8-bit floats by token or in groups of 128; or none"
        raise CheckpointError(rule, remedy, name)
    return found


class CompressedTensorsWNA16MoEMethod(Wna16MoEMethod, stock_wna16.CompressedTensorsWNA16MoEMethod):
    """MoE layers in integers with activations in 16 bits. Takes the place of the stock class of the same name, and of
    the one for Marlin that older releases have beside it."""

    def __init__(
        self, weight_quant: Any, input_quant: Any, moe: Any, layer_name: str | None = None, *, form: str = PACKED
    ) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.weight_quant = weight_quant
        self.input_quant = input_quant
        self.file_packing = COMPRESSED_PACKINGS[form]
        self.decide(moe, integer_scheme(weight_quant, form))

    @classmethod
    def beyond_stock(cls, weight_quant: Any, input_quant: Any, moe: Any, *args: Any, form: str = PACKED) -> str:
        """See `OracleMoEMethod.beyond_stock`."""
        if form != PACKED:
            return f"reads the format {PACKED} only, not {form}"
        ordered = integer_scheme(weight_quant, form).act_order == "group"
        return "does not know act order" if ordered and refuse_act_order is not None else ""

    @classmethod
    def made_by_stock(cls, stock_class: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `get_moe_method` asks the stock function, which knows of the two classes of older releases the one
        that can read the checkpoint."""


def integer_scheme(arguments: Any, form: str) -> Scheme:
    """What a checkpoint holds for experts.

    Args:
        arguments: the weights' `QuantizationArgs`.
        form: the format that the config names, a key of `COMPRESSED_PACKINGS`.
    """
    group = -1 if _word(arguments.strategy) == "channel" or arguments.group_size is None else int(arguments.group_size)
    order = compressed_order(_word(arguments.actorder), _WHERE)
    return Scheme("wna16", int(arguments.num_bits), group, COMPRESSED_PACKINGS[form], not arguments.symmetric, order)


class CompressedTensorsConfig(stock_config.CompressedTensorsConfig):
    """The stock config, which refuses checkpoints as a whole for what its own kernels do not know: integers that are
    not packed, and in newer releases act order. Here such experts are served, and such linear layers are refused."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where experts are emulated, also float32."""
        return with_emulated(super().get_supported_act_dtypes())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config object of a checkpoint; a list that is null has nothing in it."""
        return super().from_config({**config, "ignore": config.get("ignore") or []})

    @classmethod
    def _quantization_scheme_map_from_config(cls, config: dict[str, Any]) -> Any:
        """What each target's weights and activations are; stock code asks."""
        groups = config.get("config_groups") or {}
        served = {name: _as_stock_takes_it(group, config.get("format")) for name, group in groups.items()}
        found = super()._quantization_scheme_map_from_config({**config, "config_groups": served})
        for name, group in groups.items():
            if served[name] is group:
                continue
            for target in group["targets"]:
                found[target]["weights"] = QuantizationArgs.model_validate(group["weights"])
                found[target]["format"] = group.get("format") or config.get("format")
        return found

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer; see the stock class.

        Raises:
            ValueError: a linear layer has act order, which vLLM's kernels no longer know.
        """
        if isinstance(layer, LinearBase) and refuse_act_order is not None:
            weights = (self.get_scheme_dict(layer, prefix) or {}).get("weights")
            if weights is not None and compressed_order(_word(weights.actorder), _WHERE) == "group":
                rule = f"{prefix}: group/dynamic activation ordering (actorder={_word(weights.actorder)!r})"
                raise ValueError(f"{rule} is not supported for linear layers by this vLLM release")
        return super().get_quant_method(layer, prefix)


def _as_stock_takes_it(group: dict[str, Any], common_format: Any) -> dict[str, Any]:
    """A group of the config without what the stock reader refuses; the very group where it refuses nothing.

    Args:
        group: one of ``config_groups``.
        common_format: that of the config, for a group without its own.
    """
    weights, form = group.get("weights"), group.get("format") or common_format
    kind = (weights or {}).get("type", "int")
    if not weights or str(_word(kind)).lower() != "int" or group.get("input_activations"):
        return group
    ordered = compressed_order(weights.get("actorder"), _WHERE) == "group"
    if form not in COMPRESSED_PACKINGS or (form == PACKED and not ordered):
        return group
    return {**group, "format": PACKED, "weights": {**weights, "actorder": None}}


def get_moe_method(original: Any, quant_config: Any, layer: Any, layer_name: str) -> Any:
    """Which method a MoE layer gets: ours for integers with activations in 16 bits, else stock vLLM's own answer.

    Stock vLLM decides by the shapes that its own kernels take, and refuses formats and orders that they do not know.

    Args:
        original: the stock function.
        quant_config: vLLM's `CompressedTensorsConfig`.
        layer: the MoE layer.
        layer_name: its name.
    """
    found = _integers(quant_config, layer, layer_name)
    if found is not None:
        weights, inputs, form = found
        more = {} if form == PACKED else {"form": form}
        made = CompressedTensorsWNA16MoEMethod(weights, inputs, layer.moe_config, **more)
    else:
        made = None
    made = original(quant_config, layer, layer_name) if made is None else made
    if isinstance(made, OracleMoEMethod):
        transforms = online_transforms(quant_config.config or {}, _WHERE)
        refuse_transforms(transforms, [f"{layer_name}.0.{name}" for name in _projections(layer)], _WHERE)
    return made


def _projections(layer: Any) -> list[str]:
    """What the checkpoint calls the matrices of an expert."""
    names = (getattr(layer, f"ckpt_{each}_proj_name", "") or f"{each}_proj" for each in ("gate", "up", "down"))
    return list(names)


def _integers(quant_config: Any, layer: Any, layer_name: str) -> tuple[Any, Any, str] | None:
    """Weights' and inputs' arguments and the format of a layer whose experts are all integers of 4 or 8 bits with
    activations in 16 bits; None for any other layer."""
    quant_config._add_fused_moe_to_target_scheme_map()
    schemes = [quant_config.get_scheme_dict(layer, f"{layer_name}.0.{name}") for name in _projections(layer)]
    first = schemes[-1]
    if first is None or any(scheme != first for scheme in schemes):
        return None
    weights, inputs = first.get("weights"), first.get("input_activations")
    form = _word(first.get("format"))
    if weights is None or form not in COMPRESSED_PACKINGS or _word(weights.type) != "int":
        return None
    if not quant_config._is_wNa16_group_channel(weights, inputs) or weights.num_bits not in (4, 8):
        return None
    return weights, inputs, form


def _word(value: Any) -> Any:
    """What an enumeration's member of compressed-tensors stands for; anything else as it is."""
    return getattr(value, "value", value)
