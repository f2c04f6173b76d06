"""GPTQ, as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..core.patterns import MatchBudget, NameParts, PatternList
from ..core.problem import ActOrder, Scheme
from ..errors import CheckpointError, DeploymentError, short_repr
from .fields import read_boolean, read_integer, read_names, read_string
from .single_experts import ExpertEntries, same_for_all
from .types import (
    LINEAR_LAYER,
    UNLISTED,
    ExpertFormat,
    FormatLookup,
    LayerNames,
    QuantConfigFormat,
    Unlisted,
    shared_format,
)

SUPPORTED_BITS = (4, 8)
"""Widths for which vLLM has a type of GPTQ's codes, in every supported release."""


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """``dynamic`` overrides the format of modules by regular expression; ``-:`` before an expression excludes them.
    vLLM matches expressions with its own names of modules, and maps ``modules_in_block_to_quantize`` to them: entries
    there, where it is set, may be any part of a name."""
    rules = _dynamic_rules(config, where)
    budget = MatchBudget(where)
    expressions = PatternList([expression for expression, _ in rules], budget)
    quantized = read_names(config, ("modules_in_block_to_quantize",), where)
    parts = NameParts(quantized, budget)
    scheme, usual = _expert_scheme(config, where), dict(config)
    said: dict[str, str] = {}
    for expression, override in rules:
        said.setdefault(expression, repr(override))
    singles = ExpertEntries(dict.fromkeys(quantized), said, budget)

    def lookup(layer: LayerNames) -> ExpertFormat:
        # A rule that matches the experts' module applies to every matrix: only earlier rules can differ.
        own = replace(layer, modules=layer.modules[:1])
        last = expressions.first(own.modules)

        def matrix_format(name: str) -> ExpertFormat | Unlisted:
            found = expressions.first((name,), last)
            found = last if found is None else found
            if found is None:
                return UNLISTED
            override = rules[found][1]
            return None if override is None else _expert_scheme(ChainMap(dict(override), usual), where)

        def expert_format(expert: int) -> ExpertFormat:
            listed = not quantized or layer.matches(parts.any_within, expert)
            return shared_format(own, cache(matrix_format), scheme if listed else None, where, expert)

        return same_for_all(layer, expert_format, singles, where)

    return lookup


def _expert_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of experts; see `gptq_scheme`.

    Raises:
        DeploymentError: vLLM's class for GPTQ refuses the width, in every supported release.
    """
    scheme = gptq_scheme(config, where)
    if scheme.bits not in SUPPORTED_BITS:
        rule = f"bits is {scheme.bits}; vLLM's classes for GPTQ refuse any width but 4 and 8 bits"
        raise DeploymentError(rule, "Quantize again with 4 or 8 bits", where)
    return scheme


def _dynamic_rules(config: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any] | None]]:
    """The entries of ``dynamic``: expression and override, None where it excludes modules.

    Raises:
        CheckpointError: it is not an object, or an override is not.
    """
    dynamic = config.get("dynamic")
    dynamic = {} if dynamic is None or dynamic is False else dynamic
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"dynamic is {short_repr(dynamic)}, not an object", where=where)
    rules: list[tuple[str, Mapping[str, Any] | None]] = []
    for pattern, override in dynamic.items():
        expression = pattern.removeprefix("-:").removeprefix("+:")
        if pattern.startswith("-:") or override is False:
            rules.append((expression, None))
        elif isinstance(override, Mapping):
            rules.append((expression, override))
        else:
            rule = f"dynamic: {short_repr(pattern)} is {short_repr(override)}, not an object"
            raise CheckpointError(rule, "Write the fields that differ, or -: before the expression to exclude", where)
    return rules


def refused_linear(config: Mapping[str, Any], where: str) -> str:
    """Why vLLM refuses the model's linear layers, as far as the config says; "" where it does not."""
    modules = read_names(config, ("modules_in_block_to_quantize",), where)
    if modules and all("expert" in name for name in modules):
        return ""
    rules = _dynamic_rules(config, where)
    rule = PatternList([expression for expression, _ in rules], MatchBudget(where)).first((LINEAR_LAYER,))
    override = {} if rule is None else rules[rule][1]
    if override is None:
        return ""
    scheme = gptq_scheme(ChainMap(dict(override), dict(config)), where)
    return refused_linear_scheme(scheme)


def refused_linear_scheme(scheme: Scheme) -> str:
    """Why vLLM refuses a linear layer in GPTQ's packing; "" where it does not."""
    if scheme.bits in SUPPORTED_BITS and not scheme.zero_points:  # `AutoGPTQConfig.TYPE_MAP` in every supported release
        return ""
    found = f"bits {scheme.bits} and sym {str(not scheme.zero_points).lower()}"
    return f"vLLM's linear layers of GPTQ take 4- and 8-bit codes with sym true, the config says {found}"


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """Notes for the user about a config that `parse_config` accepted, one sentence each."""
    # vLLM asks for the presence of both, takes a null desc_act for false, and has no type of codes for a null sym.
    for name, is_missing, usual in (
        ("desc_act", "desc_act" not in config, "false"),
        ("sym", config.get("sym") is None, "true"),
    ):
        if is_missing:
            yield f"{where}: {name} is not set: taken as {usual}; vLLM refuses to serve without it"


def gptq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """The default scheme of a GPTQ config, before `dynamic` overrides.

    With ``static_groups`` the groups are of neighbors, whatever the order in which features were quantized; with one
    scale per output row act order has no effect.
    ``checkpoint_format`` says how zero points are stored: ``gptq_v2`` as they are, ``gptq`` less one; some tools call
    the field ``format``. ``pack_dtype`` is the type of a packed word, ``is_marlin_format`` AutoGPTQ's mark of codes in
    a kernel's own order.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have, or fields that contradict another.
    """
    ordered = read_boolean(config, "desc_act", where, default=False)
    static = read_boolean(config, "static_groups", where, default=False)
    bits, group = read_integer(config, "bits", where), read_integer(config, "group_size", where)
    order: ActOrder = "none" if not ordered or group == -1 else "static" if static else "group"
    asymmetric = not read_boolean(config, "sym", where, default=True)
    return Scheme("wna16", bits, group, _checkpoint_format(config, where), asymmetric, order)


_CHECKPOINT_FORMATS = ("gptq", "gptq_v2")


def _checkpoint_format(config: Mapping[str, Any], where: str) -> str:
    """The word of `Scheme.packing` for how a config's tensors are packed."""
    words = [read_string(config, name, where) for name in ("checkpoint_format", "format")]
    stored = words[0] or words[1] or "gptq"
    if stored not in _CHECKPOINT_FORMATS:
        raise CheckpointError(
            f"unknown checkpoint_format {short_repr(stored)}", f"Known are {', '.join(_CHECKPOINT_FORMATS)}", where
        )
    if words[1] in _CHECKPOINT_FORMATS and words[1] != stored:
        raise CheckpointError(f"checkpoint_format is {stored} and format is {words[1]}", "Take one of them out", where)
    if read_boolean(config, "is_marlin_format", where, default=False):
        rule = "is_marlin_format: codes are in the order of a kernel, which is not read"
        raise CheckpointError(rule, "Serve the checkpoint that this one was made from", where)
    word = read_string(config, "pack_dtype", where).removeprefix("torch.")
    if word not in ("", "int32"):
        raise CheckpointError(f"pack_dtype is {short_repr(word)}; codes are read from int32 words only", where=where)
    return stored


FORMAT = QuantConfigFormat(
    dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq"), parse_config),
    notes,
    refused_linear=refused_linear,
    module_list="modules_in_block_to_quantize",
    expert_biases=True,
    aliases={"gptq": ("gptq_marlin", "auto_gptq", "moe_wna16")},
)
