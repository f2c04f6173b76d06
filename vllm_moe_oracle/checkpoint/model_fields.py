"""Fields of a model's config, checked. Models spell the same thing differently: each reader takes a family of names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import CheckpointError, short_repr
from .files import CheckpointFiles

NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
NUM_LAYERS_FIELDS = ("num_hidden_layers", "n_layers", "num_layers")

# Largest values that are taken for a description of a model and not for a damaged or hostile file.
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16
MAX_FEATURES = 1 << 24
MAX_RANKS = 1 << 16

UNGATED_MODELS = frozenset({"nemotron_h", "nemotron_h_puzzle"})
"""Models whose experts have no gate: their code decides it, no field does."""


def _first_set(config: CheckpointFiles, names: tuple[str, ...], index: int | None) -> tuple[str, Any]:
    """The first field that is set; of one that lists a value for each layer, the layer's."""
    name = next((name for name in names if config.model_config.get(name) is not None), "")
    value = config.model_config.get(name)
    if isinstance(value, list) and index is not None:
        value = value[index] if index < len(value) else None
    return name, value


def read_integer(
    config: CheckpointFiles, names: tuple[str, ...], most: int, index: int | None = None, least: int = 1
) -> int:
    """A whole number from `least` to `most`; of a list, the one of the layer `index`.

    Raises:
        CheckpointError: no field is set, or the first one that is set has another value.
    """
    name, value = _first_set(config, names, index)
    if not name:
        raise CheckpointError(f"none of {', '.join(names)} is set", where=config.where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{name} is {short_repr(value)}, not an integer", where=config.where)
    if not least <= value <= most:
        rule = f"{name} is {short_repr(value)}, not between {least} and {most}"
        raise CheckpointError(rule, where=config.where)
    return value


def read_optional_integer(config: CheckpointFiles, name: str, most: int) -> int | None:
    """A whole number from 0 to `most`; None where the field is not set.

    Raises:
        CheckpointError: it has another value.
    """
    return None if config.model_config.get(name) is None else read_integer(config, (name,), most, least=0)


def read_float(config: CheckpointFiles, names: tuple[str, ...], index: int) -> float | None:
    """A finite number; None where no field is set."""
    name, value = _first_set(config, names, index)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise CheckpointError(f"{name} is {short_repr(value)}, not a number", "Write a finite number", config.where)
    return float(value)


def positive_integer(config: CheckpointFiles, name: str) -> int:
    """The value of a field that is looked at and not required; 0 where it is none above zero."""
    value = config.model_config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def count_experts(config: CheckpointFiles, index: int) -> int:
    """Experts of the layer `index`; 0 where the config does not say. An impossible number is refused where it is used
    (`layer_problem`)."""
    _, value = _first_set(config, NUM_EXPERTS_FIELDS, index)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MAX_EXPERTS else 0


ERNIE_VL_MODELS = frozenset({"ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"})
_FIELDS_BY_KIND = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")


def kinds_of_experts(config: CheckpointFiles) -> list[tuple[str, CheckpointFiles]]:
    """vLLM's name of the experts' module in a layer, and the config as it is for them.

    ERNIE-4.5-VL has experts for text and experts for images in one layer; its fields list a value for each.

    Raises:
        CheckpointError: such a list has another length.
    """
    if config.model_type not in ERNIE_VL_MODELS:
        return [("experts", config)]
    found = []
    for place, name in enumerate(("text_experts", "vision_experts")):
        fields = dict(config.model_config)
        for field in _FIELDS_BY_KIND:
            value = fields.get(field)
            if isinstance(value, list):
                if len(value) != 2:
                    rule = f"{field} is {short_repr(value)}; vLLM reads one for text and one for images"
                    raise CheckpointError(rule, where=config.where)
                fields[field] = value[place]
        found.append((name, replace(config, model_config=fields)))
    return found


def num_layers(config: CheckpointFiles) -> int:
    """Layers of the language model, with experts or without.

    Raises:
        CheckpointError: the config does not say, or there are more than `MAX_LAYERS`.
    """
    pattern = config.model_config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        # LongCat counts attention in num_hidden_layers, twice in each layer.
        names = NUM_LAYERS_FIELDS[::-1] if config.model_type.startswith("longcat_flash") else NUM_LAYERS_FIELDS
        return read_integer(config, names, MAX_LAYERS)
    if len(pattern) > MAX_LAYERS:
        rule = f"hybrid_override_pattern has {len(pattern)} layers, more than {MAX_LAYERS}"
        raise CheckpointError(rule, where=config.where)
    return len(pattern)
