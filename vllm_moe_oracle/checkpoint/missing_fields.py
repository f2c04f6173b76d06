"""Fields that a model's config leaves out: a server reads configs by classes that have defaults for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_defaults import DEFAULTS, OTHER_NAMES, SAME_AS

FIRST_LAYER_FIELDS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields that say which layer is the first with experts. A default of one holds only where a config states none."""


def has_known_defaults(kind: str) -> bool:
    """Whether the defaults of a ``model_type`` are known."""
    return kind in DEFAULTS or kind in SAME_AS


def with_defaults(model: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The fields of a model's config, with those that it leaves out as a server reads them.

    Args:
        model: the config of the language model.
        kind: its ``model_type``; the fields of one whose defaults are not known are left as they are.
    """
    kind = SAME_AS.get(kind, kind)
    if kind not in DEFAULTS:
        return model
    others = {other: own for (other, own), kinds in OTHER_NAMES.items() if kind in kinds}
    stated = {others.get(name, name) for name in model}
    if states_first_layer(model):
        stated |= set(FIRST_LAYER_FIELDS)
    return {**{name: value for name, value in DEFAULTS[kind].items() if name not in stated}, **model}


def states_first_layer(model: Mapping[str, Any]) -> bool:
    """Whether a model's config says which layer is the first with experts."""
    return any(model.get(name) is not None for name in FIRST_LAYER_FIELDS)
