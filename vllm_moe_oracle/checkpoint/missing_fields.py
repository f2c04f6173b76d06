"""Fields that a model's config leaves out: a server reads configs by classes that have defaults for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_defaults import DEFAULTS, OTHER_NAMES, SAME_AS


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
    others = OTHER_NAMES.get(kind, {})
    stated = {others.get(name, name) for name in model}
    return {**{name: value for name, value in DEFAULTS[kind].items() if name not in stated}, **model}
