"""Configs of AMD Quark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.patterns import MatchBudget, PatternList, WildcardPattern
from ..core.problem import MX_BLOCK, mx_scheme
from ..errors import CheckpointError, short_repr
from .fields import any_at_or_below, has_wildcard, read_names, read_string
from .single_experts import reject_some_experts
from .types import ExpertFormat, FormatLookup, LayerNames, QuantConfigFormat, UnsupportedFormat


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """A format for all modules, other formats for modules in ``layer_quant_config``, and exclusions.

    vLLM looks up only the experts' module. ``exclude`` excludes it by its own name, by the name of anything below it
    (some matrices of each expert are enough), or by a regular expression after ``re:``, matched from the start. There
    are no wildcards, and excluding a parent does not exclude the experts below it. In ``layer_quant_config`` the first
    entry counts that contains the module's name, or that has a ``*`` and matches the whole name.
    """
    budget = MatchBudget(where)
    excluded = exclusion_matcher(read_names(config, ("exclude",), where), budget, where)
    entries = config.get("layer_quant_config") or {}
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"layer_quant_config is {short_repr(entries)}, not an object", where=where)
    special = [(_entry_matcher(name, budget), _entry_format(entry, where)) for name, entry in entries.items()]
    usual = _entry_format(config.get("global_quant_config"), where)

    def of(layer: LayerNames) -> ExpertFormat:
        if excluded(layer):
            return None
        return next((answer for matches, answer in special if matches(layer)), usual)

    return of


def exclusion_matcher(entries: Iterable[str], budget: MatchBudget, where: str) -> Callable[[LayerNames], bool]:
    """A predicate over layers: whether ``exclude`` excludes the experts' module. It raises CheckpointError for a layer
    of which some experts are excluded by name.

    Args:
        entries: names, and expressions after ``re:``.
        budget: the time of the config's expressions.
        where: file and field, for messages.
    """
    entries = list(entries)
    names = sorted(entry for entry in entries if not entry.startswith("re:"))
    exact = {*names}
    expressions = PatternList([entry[3:] for entry in entries if entry.startswith("re:")], budget)

    def excluded(layer: LayerNames) -> bool:
        # vLLM maps no name that follows "re:".
        if expressions.first(layer.modules[:1]) is not None or any(each in exact for each in layer.modules):
            return True
        if not any(any_at_or_below(names, each) for each in layer.modules):
            return False
        reject_some_experts(names, layer, where)
        return True

    return excluded


def _entry_matcher(pattern: str, budget: MatchBudget) -> Callable[[LayerNames], bool]:
    """Whether an entry of ``layer_quant_config`` applies to a layer's experts."""
    if "*" not in pattern:

        def contains(layer: LayerNames) -> bool:
            budget.check(pattern)
            return any(module in pattern for module in layer.modules)

        budget.check(pattern)
        return contains
    expression = WildcardPattern(pattern, budget)
    return lambda layer: any(expression.match(module, budget) for module in layer.for_pattern(pattern).modules)


_REQUIRED_FIELDS = ("exclude", "export", "layer_type_quant_config")


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """Notes for the user about a config that `parse_config` accepted, one sentence each."""
    missing = [name for name in _REQUIRED_FIELDS if config.get(name) is None]
    export = config.get("export")
    if isinstance(export, Mapping) and not isinstance(export.get("kv_cache_group"), list):
        missing.append("export.kv_cache_group")
    if missing:
        verb, which = ("is", "it") if len(missing) == 1 else ("are", "them")
        yield f"{where}: {', '.join(missing)} {verb} not set; vLLM fails without {which}"
    names = read_names(config, ("exclude",), where)
    for name in names:
        stem = name[: next((place for place, sign in enumerate(name) if has_wildcard(sign)), len(name))]
        if not name.startswith("re:") and has_wildcard(name) and not re.search(r"(^|\.)experts\.", stem):
            rule = "entries are names, or regular expressions after re:"
            yield f"{where}.exclude: {short_repr(name)} has no effect: {rule}"
    if any(re.search(r"(?<![A-Za-z_])experts", name) for name in names):  # not shared_experts
        rule = "fail if experts are excluded by name, and ignore names of their matrices"
        yield f"{where}.exclude: the oldest supported releases of vLLM {rule}"


def _single_step(steps: object) -> Any:
    """The element of a list of one; any other value unchanged."""
    return steps[0] if isinstance(steps, list) and len(steps) == 1 else steps


def _entry_format(entry: object, where: str) -> ExpertFormat:
    """The format that one entry of a Quark config gives experts."""
    if not isinstance(entry, Mapping):
        rule = f"global_quant_config or an entry of layer_quant_config is {short_repr(entry)}, not an object"
        raise CheckpointError(rule if entry is not None else "global_quant_config is missing", where=where)
    weights, inputs = (_single_step(entry.get(name)) for name in ("weight", "input_tensors"))
    if weights is None:
        return None
    parts = [part for part in (weights, inputs) if part is not None]
    if not all(isinstance(part, Mapping) for part in parts):
        return UnsupportedFormat("quark in several steps")
    kinds = [
        (read_string(part, "dtype", where), read_string(part, "qscheme", where), part.get("group_size"))
        for part in parts
    ]
    if kinds[0][0] == "fp4" and read_string(weights, "scale_format", where) != "e8m0":
        return UnsupportedFormat(
            f"quark fp4 with scales in {read_string(weights, 'scale_format', where) or 'no format'}"
        )
    mxfp4 = ("fp4", "per_group", MX_BLOCK)
    if kinds == [mxfp4] or (kinds == [mxfp4, mxfp4] and parts[1].get("is_dynamic") is True):
        return mx_scheme("mxfp4", "quark", "16bit" if inputs is None else "mxfp4")
    return UnsupportedFormat(f"quark {' with inputs in '.join(kind[0] or 'no dtype' for kind in kinds)}")


FORMAT = QuantConfigFormat({"quark": parse_config}, notes)
