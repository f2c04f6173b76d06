"""Configs of NVIDIA ModelOpt, and of MiniMax, whose tag ``mxfp8`` means the same tensors."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..core.patterns import MatchBudget, NameParts, WildcardPattern
from ..core.problem import ActivationPrecision, Scheme, mx_scheme
from ..errors import CheckpointError, DeploymentError, short_repr
from ..releases import min_versions
from .fields import (
    has_wildcard,
    matches_number_prefix,
    names_below,
    read_config_groups,
    read_names,
    read_string,
    reject_nulls,
)
from .single_experts import names_below_experts, reject_some_experts
from .types import ExpertFormat, FormatLookup, LayerNames, QuantConfigFormat, UnsupportedFormat


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """ModelOpt's config: its fields stand at the top (config.json) or under ``quantization`` (hf_quant_config.json).

    vLLM's classes look only the experts' module up among the exclusions; see `modelopt_exclusion_matcher`.
    """
    reject_nulls(config, ("quantization",), where)
    nested = config.get("quantization")
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError(f"quantization is {short_repr(nested)}, not an object", where=where)
    fields = config if nested is None else nested
    method = read_string(config, "quant_method", where)
    algo = read_string(fields, "quant_algo", where).upper() or ("MXFP8" if method == "modelopt_mxfp8" else "")
    if nested is not None and algo == "MXFP8":
        _check_legacy_fields(nested, where)
    field = _exclusion_field(config)
    if nested is not None or field == "ignore":  # of the others vLLM takes null for an empty list, or notes say more
        reject_nulls(fields, (field,), where, "Write [], or leave the field out")
    excluded = modelopt_exclusion_matcher(read_names(fields, (field,), where), where)
    if algo == "MIXED_PRECISION":
        return _mixed_precision_lookup(fields, excluded, where)
    if not algo:
        raise CheckpointError("there is no quant_algo", "ModelOpt writes it beside quant_method", where)
    activations = modelopt_activation_precision(config, where)
    scheme = _algorithm_format(algo, activations)
    if algo not in ALGORITHMS:
        taken = f"Quantize to one that it takes: {', '.join(ALGORITHMS)}"
        if algo in _REFUSED_ALGORITHMS:
            rule = f"quant_algo is {algo}, which vLLM refuses: a server does not start"
            raise DeploymentError(rule, taken, where)
        raise CheckpointError(f"unknown quant_algo {short_repr(algo)}: vLLM refuses it", taken, where)
    return lambda layer: None if excluded(layer) else scheme


def _check_legacy_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuses an hf_quant_config.json without fields that vLLM requires there."""
    missing = [name for name in ("kv_cache_quant_algo", "exclude_modules") if name not in fields]
    if missing:
        rule = f"quantization has no {' and no '.join(missing)}: vLLM refuses MXFP8 without"
        values = {"kv_cache_quant_algo": "null", "exclude_modules": "[]"}
        remedy = " and ".join(f'"{name}": {values[name]}' for name in missing)
        raise CheckpointError(rule, f"Add {remedy}, if nothing else is meant", where)


_EXCLUSION_FIELDS = ("ignore", "exclude_modules", "ignored_layers")


def _exclusion_field(config: Mapping[str, Any]) -> str:
    """The field of exclusions that vLLM reads: one, by the form of the config."""
    if config.get("quantization") is not None:  # hf_quant_config.json
        return "exclude_modules"
    method = str(config.get("quant_method")).replace("-", "_")
    if method in ("mxfp8", "modelopt_mxfp8") and not config.get("quant_algo"):  # MiniMax's form
        return "ignored_layers"
    return "exclude_modules" if "exclude_modules" in config and "ignore" not in config else "ignore"


def modelopt_exclusion_matcher(entries: Iterable[str], where: str) -> Callable[[LayerNames], bool]:
    """The exclusions of experts' modules, as vLLM's ModelOpt classes and this project's subclasses apply them.

    An entry excludes a module if the module's name contains the entry (``mlp.experts``, ``model.layers.1``), if the
    entry names something below the module (a matrix of one expert), or if the entry is a wildcard that matches the
    whole name. ``name*`` is the same as ``name``: vLLM writes it so for models whose names it maps. Entries are never
    regular expressions. Numbers match as a whole: ``model.layers.1`` does not exclude layer 10.

    Args:
        entries: names and wildcards.
        where: file and field, for messages.

    Returns:
        A predicate over names of layers. It raises CheckpointError for a layer of which some experts are excluded by
        name.

    Raises:
        CheckpointError: a name holds "experts" more than `_MAX_EXPERTS_IN_NAME` times.
    """
    entries = tuple(dict.fromkeys(entries))
    excluded = _plain_exclusion_matcher(entries, where)
    wider = cache(lambda: _plain_exclusion_matcher([each for each in entries if not names_below_experts(each)], where))

    def checked(layer: LayerNames) -> bool:
        if not excluded(layer):
            return False
        if not wider()(layer):
            reject_some_experts(entries, layer, where)
        return True

    return checked


def _plain_exclusion_matcher(entries: Sequence[str], where: str) -> Callable[[LayerNames], bool]:
    """The same for entries of which each counts by itself, as in vLLM."""
    parts: set[str] = set()
    heads: set[str] = set()
    wildcards: list[WildcardPattern] = []
    budget = MatchBudget(where)
    for entry in entries:
        budget.check(entry)
        stem = entry.removesuffix("*")
        # A name before one "*" is a part of names, which includes their beginning.
        if has_wildcard(entry) and (has_wildcard(stem) or not stem or stem.endswith(".")):
            wildcards.append(WildcardPattern(entry, budget))
        parts.add(entry if has_wildcard(stem) or stem.endswith(".") else stem)
        if (count := entry.count("experts")) > _MAX_EXPERTS_IN_NAME:
            rule = f'{short_repr(entry)} holds "experts" {count} times; a name of a module does not'
            raise CheckpointError(rule, where=where)
        if count:
            heads.update(entry[: found.end()] for found in re.finditer("experts", entry))
    parts.discard("")
    ends = sorted(head[::-1] for head in heads)
    texts = NameParts(parts, budget)

    def contained(module: str) -> bool:
        return _any_starts_with(ends, module[::-1]) or any(
            not matches_number_prefix(part, module) for part in texts.within(module)
        )

    def excluded(layer: LayerNames) -> bool:
        return any(map(contained, layer.modules)) or any(
            wildcard.match(name, budget) for wildcard in wildcards for name in layer.for_pattern(wildcard.text).modules
        )

    return excluded


_MAX_EXPERTS_IN_NAME = 4
"""Most occurrences of "experts" in a name: all beginnings of a name that end so are kept."""


def _any_starts_with(texts: Sequence[str], prefix: str) -> bool:
    """Whether one of the sorted texts starts with a prefix."""
    at = bisect.bisect_left(texts, prefix)
    return at < len(texts) and texts[at].startswith(prefix)


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """Notes for the user about a config that `parse_config` accepted, one sentence each."""
    nested, field = config.get("quantization"), _exclusion_field(config)
    fields = config if nested is None else nested
    for other in _EXCLUSION_FIELDS:
        if other != field and read_names(fields, (other,), where):
            yield f"{where}: {other} has no effect: vLLM reads {field} in a config of this form"
    if nested is None and field == "exclude_modules" and fields[field] is None:
        rule = f"exclude_modules is null, which vLLM refuses from {min_versions.MODELOPT_EXCLUDE_MODULES} on"
        yield f"{where}: {rule}. Write [], or leave the field out"
    if nested is None and field == "exclude_modules" and fields[field]:
        rule = f"vLLM before {min_versions.MODELOPT_EXCLUDE_MODULES} does not read exclude_modules beside quant_algo"
        yield f"{where}: {rule}, and would not load such files"
    for name in read_names(fields, (field,), where):
        if name.startswith("re:"):
            yield f"{where}: the exclusion {short_repr(name)} has no effect: vLLM expects names and wildcards there"
        elif (found := re.search(r"(?<![A-Za-z_])experts\.", name)) and has_wildcard(name[: found.start()]):
            rule = "vLLM looks up the experts' module, whose name ends with experts"
            yield f"{where}: the exclusion {short_repr(name)} excludes no experts: {rule}"


ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
"""Values of ``quant_algo`` that vLLM takes, in every supported release (its `QUANT_ALGOS`)."""

_REFUSED_ALGORITHMS = (
    "FP8_BLOCK_SCALES", "NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL", "MXFP4",
    "W4A8_MXFP4_FP8",
)  # fmt: skip
"""Values that ModelOpt writes and vLLM does not take."""
_TAKEN_IN_PART = "FP8_BLOCK_SCALES"
"""The one of these that vLLM takes for a layer of mixed precision."""


def _algorithm_format(algo: str, activations: ActivationPrecision) -> Scheme | UnsupportedFormat:
    if algo == "MXFP8":
        return mx_scheme("mxfp8", "modelopt", activations)
    return UnsupportedFormat(algo)


def modelopt_activation_precision(config: Mapping[str, Any], where: str = "quantization_config") -> ActivationPrecision:
    """The activation precision that a ModelOpt MXFP8 config declares.

    Newer releases of ModelOpt list in ``config_groups`` what they quantized. Without it, MXFP8 is W8A8.

    Raises:
        CheckpointError: ``config_groups`` is not what ModelOpt writes.
    """
    stated = config.get("config_groups")
    if isinstance(stated, Mapping):  # vLLM does not read them
        stated = {name: group for name, group in stated.items() if group is not None}
    groups = read_config_groups({"config_groups": stated}, where)
    if groups and all("input_activations" in group and group["input_activations"] is None for group in groups):
        return "16bit"
    return "mxfp8"


def _mixed_precision_lookup(
    fields: Mapping[str, Any], excluded: Callable[[LayerNames], bool], where: str
) -> FormatLookup:
    """One algorithm per module; see `MixedPrecision`."""
    algorithms = MixedPrecision.read(fields.get("quantized_layers"), where)

    def of(layer: LayerNames) -> ExpertFormat:
        if excluded(layer):
            return None
        algo = algorithms.of(layer)
        if algo in _REFUSED_ALGORITHMS and algo != _TAKEN_IN_PART:
            rule = f"quant_algo of experts is {algo}, which vLLM takes for unquantized: it does not load them"
            remedy = f"Quantize them to one that it takes: {', '.join((*ALGORITHMS[:-1], _TAKEN_IN_PART))}"
            raise DeploymentError(rule, remedy, f"{where}, {layer.modules[0]}")
        return _algorithm_format(algo, "mxfp8") if algo else None

    return of


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """ModelOpt's mixed precision: the algorithm of a layer's experts, by the name of their module or of one of their
    matrices, or by a wildcard.

    Attributes:
        algos: algorithm, in upper case, by name.
        names: the same names, sorted.
        wildcards: names with wildcards, with their algorithms.
        where: file and field, for messages.
    """

    algos: Mapping[str, str]
    names: Sequence[str]
    wildcards: tuple[tuple[WildcardPattern, str], ...]
    where: str

    @classmethod
    def read(cls, recipes: object, where: str) -> MixedPrecision:
        """Reads the field ``quantized_layers``.

        Raises:
            CheckpointError: it is not what ModelOpt writes.
        """
        if not isinstance(recipes, Mapping) or not recipes:
            raise CheckpointError("quant_algo MIXED_PRECISION needs an object quantized_layers", where=where)
        algos: dict[str, str] = {}
        for name, recipe in recipes.items():
            if not isinstance(recipe, Mapping):
                raise CheckpointError(f"quantized_layers.{name} is {short_repr(recipe)}, not an object", where=where)
            algos[name] = read_string(recipe, "quant_algo", where).upper()
            if not algos[name]:
                raise CheckpointError(f"quantized_layers.{name} has no quant_algo", where=where)
        budget = MatchBudget(where)
        wildcards = ((WildcardPattern(name, budget), algo) for name, algo in algos.items() if has_wildcard(name))
        return cls(algos, sorted(algos), tuple(wildcards), where)

    def of(self, layer: LayerNames) -> str | None:
        """The layer's algorithm; None when its experts are not quantized.

        Raises:
            CheckpointError: matrices of the layer have different algorithms.
        """
        budget = MatchBudget(self.where)

        def matches(wildcard: WildcardPattern) -> bool:
            return layer.for_pattern(wildcard.text).matches(lambda name: wildcard.match(name, budget))

        found = self._named(layer) or {algo for wildcard, algo in self.wildcards if matches(wildcard)}
        if len(found) > 1:
            rule = f"the matrices of one layer have different quant_algo: {', '.join(sorted(found))}"
            raise CheckpointError(rule, where=f"{self.where}, {layer.modules[0]}")
        return found.pop() if found else None

    def _named(self, layer: LayerNames) -> set[str]:
        """Algorithms under the layer's name, below it, or under its matrices' names beside it (``mlp.gate_proj``)."""
        for found in (
            {self.algos[name] for name in layer.modules if name in self.algos},
            {self.algos[name] for module in layer.modules for name in names_below(self.names, module)},
        ):
            if found:
                return found
        parents = [name.removesuffix("experts") for name in layer.modules]
        beside = [f"{parent}{name}" for parent in parents for names in layer.projections for name in names]
        return {self.algos[name] for name in beside if name in self.algos}


def parse_minimax_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """MiniMax's tag: ModelOpt's tensors, with the exclusions under ``ignored_layers``."""
    form = _exclusion_field(config)
    algo = config.get("quant_algo") or "MXFP8"
    exclusions = {"ignore": config.get(form) or []} if form == "ignored_layers" else {}
    return parse_config({**config, "quant_algo": algo, **exclusions}, where)


def parse_nvfp4_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """A config whose ``quant_method`` means NVFP4; it may lack ``quant_algo``."""
    return parse_config({**config, "quant_algo": config.get("quant_algo") or "NVFP4"}, where)


def _vllm_method(config: Mapping[str, Any], method: str) -> str:
    """vLLM has a quantization method for each ``quant_algo``."""
    if method == "mxfp8":
        return method
    nested = config.get("quantization")
    algo = read_string(nested if isinstance(nested, Mapping) else config, "quant_algo", "").upper()
    names = {"MXFP8": "modelopt_mxfp8", "": method, "MIXED_PRECISION": "modelopt_mixed"}
    return names.get(algo, "modelopt_fp4" if "NVFP4" in algo else "modelopt")


FORMAT = QuantConfigFormat(
    {
        "modelopt": parse_config,
        "modelopt_mxfp8": parse_config,
        "modelopt_mixed": parse_config,
        "modelopt_fp4": parse_nvfp4_config,
        "mxfp8": parse_minimax_config,
    },
    notes,
    _vllm_method,
    aliases={"modelopt_mxfp8": ("modelopt",), "modelopt_mixed": ("modelopt",)},
    first_releases={("modelopt_mixed", "mxfp8"): min_versions.MODELOPT_MIXED_MXFP8},
)
