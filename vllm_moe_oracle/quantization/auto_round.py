"""Intel AutoRound, which vLLM calls INC."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.patterns import BoundedPattern, InvalidPatternError, MatchBudget, SearchList
from ..core.problem import MX_BLOCK, ActivationPrecision, Scheme, mx_scheme
from ..errors import CheckpointError, short_repr, shortened
from ..releases import min_versions
from .fields import read_boolean, read_integer, read_string, reject_nulls
from .gptq import refused_linear_scheme
from .single_experts import ExpertEntries
from .types import (
    LINEAR_LAYER,
    ExpertFormat,
    FormatLookup,
    LayerNames,
    QuantConfigFormat,
    UnsupportedFormat,
    describe_format,
)

_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""`Scheme.packing` of AutoRound's ``packing_format``."""
_MX_PACKING = "auto_round:llm_compressor"
"""The ``packing_format`` of MX formats."""


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """MX formats, and integers as GPTQ's or AWQ's tools pack them.

    ``extra_config`` gives modules other bit widths. Its keys are full names, ends of names, or regular expressions that
    are searched in names, in this order of precedence. ``block_name_to_quantize`` lists prefixes of quantized modules;
    other modules have 16 bits unless an entry states their bits. vLLM asks for the experts' module alone, so entries
    for its matrices must agree with it. Only releases whose MoE layer class is FusedMoE look for entries of matrices
    where the module has none.
    """
    reject_nulls(config, ("data_type", "backend" if "backend" in config else "vllm_backend"), where)
    if config.get("group_size") is None:
        raise CheckpointError("group_size is missing: vLLM refuses that, and a server does not start", where=where)
    format_of = _entry_format(config, where)
    if format_of is None:
        kind = read_string(config, "data_type", where) or "int"
        inputs = config.get("act_bits")
        words = f"auto-round {kind} of {config.get('bits')} bits"
        if isinstance(inputs, int) and inputs < 16:
            words += f" with inputs of {inputs} bits"
        if packing := read_string(config, "packing_format", where):
            words += f" packed as {packing}"
        low = kind == "int" and not (isinstance(inputs, int) and inputs < 16)
        unsupported = UnsupportedFormat(shortened(words), min_versions.AUTO_ROUND_LOW_BITS if low else "")
        return lambda layer: unsupported
    entries = config.get("extra_config") or {}
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise CheckpointError(f"extra_config is {short_repr(entries)}, not an object of objects", where=where)
    return _ModuleFormats(entries, format_of, _quantized_blocks(config, where), where).lookup


def _entry_format(config: Mapping[str, Any], where: str) -> Callable[[Mapping[str, Any]], ExpertFormat] | None:
    """The format of an entry of ``extra_config``; None when this package does not read the config's own format."""
    bits, data_type = read_integer(config, "bits", where), read_string(config, "data_type", where) or "int"
    packing = _PACKINGS.get(read_string(config, "packing_format", where) or "auto_round:auto_gptq")
    integers = data_type == "int" and packing is not None and read_integer(config, "act_bits", where, default=16) >= 16
    if bits not in (4, 8) or not (integers or "mx_fp" in data_type):
        return None
    usual = dict(config)

    def format_of(entry: Mapping[str, Any]) -> ExpertFormat:
        fields = ChainMap(dict(entry), usual)
        width = read_integer(fields, "bits", where, default=bits)
        if width >= 16:
            return None
        if integers:
            if width not in (4, 8):
                return UnsupportedFormat(f"auto-round int of {width} bits", min_versions.AUTO_ROUND_LOW_BITS)
            group = read_integer(fields, "group_size", where, default=128)
            zero_points = not read_boolean(fields, "sym", where, default=True)
            return Scheme("wna16", width, group, str(packing), zero_points)
        unread = _unread_mx(fields, where)
        activations = mx_activations(config, where)
        if width == 4 and activations is not None and not unread:
            return mx_scheme("mxfp4", "auto-round", activations)
        # vLLM looks at the inputs of a config of 8 bits alone.
        if width == 8 and (bits == 4 or activations == "mxfp8") and not unread:
            return mx_scheme("mxfp8", "auto-round", "mxfp8")
        if not unread and width in (4, 8):
            unread = f" with inputs of {config.get('act_bits')} bits"
        return UnsupportedFormat(f"{data_type} of {width} bits{unread}")

    return format_of


def mx_activations(config: Mapping[str, Any], where: str) -> ActivationPrecision | None:
    """The precision that a config in MX formats declares for inputs: that of the weights where it does not say; None
    for one that no scheme has.

    Args:
        config: the checkpoint's ``quantization_config``, or an empty one, of 4 bits.
        where: file and field, for messages.
    """
    width = read_integer(config, "bits", where, default=4)
    bits = read_integer(config, "act_bits", where, default=width)
    precisions: dict[int, ActivationPrecision] = {4: "mxfp4", 8: "mxfp8"}
    return "16bit" if bits >= 16 else precisions.get(bits)


def _unread_mx(fields: Mapping[str, Any], where: str) -> str:
    """What vLLM does not read of an entry in MX formats, after its width; "" if it reads it."""
    group = read_integer(fields, "group_size", where, default=MX_BLOCK)
    packing = read_string(fields, "packing_format", where) or _MX_PACKING
    if group != MX_BLOCK:
        return f" in groups of {group}"
    if not read_boolean(fields, "sym", where, default=True):
        return " with zero points"
    return "" if packing == _MX_PACKING else f" packed as {packing}"


class _ModuleFormats:
    """The formats of modules, by the entries of ``extra_config``.

    Args:
        entries: ``extra_config``.
        format_of: the format of an entry.
        blocks: prefixes of quantized modules; empty when all are quantized.
        where: file and field, for messages.
    """

    def __init__(
        self,
        entries: Mapping[str, Mapping[str, Any]],
        format_of: Callable[[Mapping[str, Any]], ExpertFormat],
        blocks: Iterable[str],
        where: str,
    ) -> None:
        self._entries = entries
        self._blocks = frozenset(blocks)
        self._block_lengths = sorted({len(block) for block in self._blocks})
        self._where = where
        self._default = format_of({})
        known: dict[str, ExpertFormat] = {}  # most entries of a list say the same
        self._formats: dict[str, ExpertFormat] = {}
        for name, entry in entries.items():
            if (words := repr(entry)) not in known:
                known[words] = format_of(entry)
            self._formats[name] = known[words]
        self._positions = {name: position for position, name in enumerate(entries)}
        budget = MatchBudget(where)
        patterns = _entry_patterns(entries, budget)
        self._patterns = [(pattern, name) for name, pattern in patterns if pattern is not None]
        self._searched = SearchList((pattern for pattern, _ in self._patterns), budget)
        expressions = {name for _, name in self._patterns}
        self._singles = ExpertEntries(
            {name: found for name, found in self._formats.items() if name not in expressions},
            {name: self._formats[name] for name in expressions},
            budget,
            searched=True,
        )
        self._expert_entries: dict[str, list[str]] = {}
        for name in entries:
            parent, separator, _ = name.rpartition(".experts.")
            if separator:
                self._expert_entries.setdefault(f"{parent}.experts", []).append(name)

    def lookup(self, layer: LayerNames) -> ExpertFormat:
        """The format of a layer's experts.

        Raises:
            CheckpointError: entries give matrices of the experts another format than their module.
        """
        entry = self._entry_of(layer.modules)
        found = self._module_format(layer, entry)
        conflicts = self._matrix_conflicts(layer, entry, found)
        if conflicts:
            name, other = next(iter(conflicts.items()))
            rule = (
                f"{short_repr(name)} stores matrices of experts as {describe_format(other)}, "
                f"their module is {describe_format(found)}"
            )
            remedy = (
                "vLLM's INC reads only the entries of the experts' module (its oldest supported releases also those of "
                "matrices where the module has none): give the module an entry of its own, which every release reads"
            )
            raise CheckpointError(rule, remedy, f"{self._where}.extra_config, {layer.modules[0]}")
        return found

    def _entry_of(self, names: Iterable[str]) -> str | None:
        """The entry for a module or matrix that has these names."""
        names = tuple(names)
        for name in names:
            if name in self._entries:
                return name
        suffixes = {suffix for name in names for suffix in _name_suffixes(name) if suffix in self._entries}
        if suffixes:
            return min(suffixes, key=self._positions.__getitem__)
        layer = LayerNames(names, ())
        possible = (self._patterns[position] for position in self._searched.possible(names))
        found = (entry for pattern, entry in possible if any(map(pattern.search, layer.for_pattern(entry).modules)))
        return next(found, None)

    def _module_format(self, layer: LayerNames, entry: str | None) -> ExpertFormat:
        """What vLLM takes the experts' module for."""
        states_bits = entry is not None and "bits" in self._entries[entry]
        if entry in layer.modules and not states_bits:
            return None  # vLLM takes an entry under the full name without bits for one of 16 bits
        in_block = not self._blocks or any(
            module[:length] in self._blocks for module in layer.modules for length in self._block_lengths
        )
        by_name = entry is not None and any(entry in (name, *_name_suffixes(name)) for name in layer.modules)
        if not in_block and not by_name and not states_bits:
            return None
        return self._default if entry is None else self._formats[entry]

    def _matrix_conflicts(
        self, layer: LayerNames, module_entry: str | None, module_format: ExpertFormat
    ) -> dict[str, ExpertFormat]:
        """Entries that give matrices of the experts another format than their module."""
        named = [name for module in layer.modules for name in self._expert_entries.get(module, ())]
        by_name = {name: self._formats[name] for name in named if self._formats[name] != module_format}
        if by_name:
            return by_name
        by_convention = []
        experts = (0, *self._singles.representatives(layer))
        for convention in layer.conventions():
            matrices = (zip(*layer.matrix_names(convention, expert), strict=True) for expert in experts)
            entries = {self._entry_of(names) for each in matrices for names in each}
            entries -= {module_entry, None}
            named = sorted((entry for entry in entries if entry is not None), key=self._positions.__getitem__)
            by_convention.append({name: self._formats[name] for name in named if self._formats[name] != module_format})
        # Where the checkpoint's convention is unknown, a pattern that matches the names of one convention may mean
        # something else, such as the router called gate.
        return min(by_convention, key=len, default={})


def _name_suffixes(name: str) -> Iterable[str]:
    """Everything that follows a dot of a name."""
    while name:
        name = name.partition(".")[2]
        yield name


def _quantized_blocks(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Prefixes of quantized modules; empty when all are quantized. vLLM splits at commas and strips nothing."""
    field = "block_name_to_quantize" if "block_name_to_quantize" in config else "to_quant_block_names"
    value = config.get(field)
    blocks = value.split(",") if isinstance(value, str) else value or ()
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(block, str) for block in blocks):
        raise CheckpointError(f"{field} is {short_repr(value)}, neither names nor a list of names", where=where)
    return tuple(blocks)


def _entry_patterns(names: Iterable[str], budget: MatchBudget) -> Iterable[tuple[str, BoundedPattern | None]]:
    """The names of entries that vLLM takes for regular expressions, each with its pattern; None for an invalid one.

    Raises:
        CheckpointError: an expression that may take unbounded time.
    """
    for name in names:
        if any(sign in name for sign in "*+?^$()[]{}|\\"):
            try:
                yield name, BoundedPattern(name, budget)
            except InvalidPatternError:
                yield name, None


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What a user should know about a config that `parse_config` accepted, one sentence each."""
    entries = config.get("extra_config") or {}
    patterns = dict(_entry_patterns(entries, MatchBudget(where)))
    for name in entries:
        if name in patterns and patterns[name] is None:
            yield f"{where}.extra_config: {short_repr(name)} is not a regular expression; vLLM skips it"
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        if name not in patterns and last == "experts" and first not in ("model", "language_model", "backbone"):
            rule = "is the end of a name, which older releases of vLLM do not read"
            yield f"{where}.extra_config: {short_repr(name)} {rule}"


def refused_linear(config: Mapping[str, Any], where: str) -> str:
    """Why vLLM refuses the model's linear layers, as far as the config says; "" where it does not."""
    found = parse_config(config, where)(LayerNames((LINEAR_LAYER,), ()))
    # AWQ's packing has kernels for zero points, and other widths have Humming's from some releases on.
    if not isinstance(found, Scheme) or (found.name, found.packing) != ("wna16", "gptq") or found.bits not in (4, 8):
        return ""
    return refused_linear_scheme(found)


FORMAT = QuantConfigFormat(
    dict.fromkeys(("auto-round", "inc"), parse_config),
    notes,
    vllm_method=lambda config, method: "inc",
    refused_linear=refused_linear,
    first_releases={
        ("inc", "mxfp4"): min_versions.AUTO_ROUND_MXFP4,
        ("inc", "mxfp8"): min_versions.AUTO_ROUND_MXFP8,
    },
)
