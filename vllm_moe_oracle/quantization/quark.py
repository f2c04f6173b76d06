"""AMD Quark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Any

from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, Scheme
from .answers import Answer, Foreign, LayerNames, SchemeOf
from .fields import exclusion, matching, read_names, read_word, shown


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """One entry for all modules, and others by wildcards over names in ``layer_quant_config``."""
    excluded = exclusion(read_names(config, ("exclude",), where), where)
    entries = config.get("layer_quant_config") or {}
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"layer_quant_config is {shown(entries)}, not an object", where=where)
    special = [(matching(re.compile(translate(name))), _answer(entry, where)) for name, entry in entries.items()]
    usual = _answer(config.get("global_quant_config"), where)

    def of(layer: LayerNames) -> Answer:
        if layer.match(excluded):
            return None
        return next((answer for matches, answer in special if layer.match(matches)), usual)

    return of


def _answer(entry: object, where: str) -> Answer:
    """What one entry of a Quark config means for experts."""
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"an entry of Quark's config is {shown(entry)}, not an object", where=where)
    weights, inputs = entry.get("weight"), entry.get("input_tensors")
    if weights is None:
        return None
    parts = [part for part in (weights, inputs) if part is not None]
    if not all(isinstance(part, Mapping) for part in parts):
        return Foreign("quark in several steps")
    kinds = [
        (read_word(part, "dtype", where), read_word(part, "qscheme", where), part.get("group_size")) for part in parts
    ]
    mxfp4 = ("fp4", "per_group", MX_BLOCK)
    if kinds == [mxfp4] or (kinds == [mxfp4, mxfp4] and parts[1].get("is_dynamic") is True):
        return Scheme("mxfp4", 4, MX_BLOCK, "quark", activations="mxfp4" if inputs is not None else "16bit")
    return Foreign(f"quark {' with inputs in '.join(kind[0] or 'no dtype' for kind in kinds)}")
