"""Intel AutoRound."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..expressions import Expression
from ..oracle.problem import MX_BLOCK, Scheme
from .answers import Answer, Foreign, LayerNames, SchemeOf, foreign_reader, in_words
from .fields import read_boolean, read_integer, read_word, shown

_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""The scheme's word for how integers are packed, by AutoRound's."""


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """MX formats, and integers as GPTQ's or AWQ's tools pack them.

    ``extra_config`` gives modules other widths: by full name, by the end of a name, or by an expression found in it, in
    this order. ``block_name_to_quantize`` holds how names of quantised modules begin; others have 16 bits unless an
    entry says how many. vLLM asks for the experts' module alone: what entries say of matrices must be the same. Only
    releases whose layers of experts are called FusedMoE look for entries on matrices where the module has none.
    """
    bits, data_type = read_integer(config, "bits", where), read_word(config, "data_type", where) or "int"
    packing = _PACKINGS.get(read_word(config, "packing_format", where) or "auto_round:auto_gptq")
    integers = data_type == "int" and packing is not None and read_integer(config, "act_bits", where, default=16) >= 16
    if bits not in (4, 8) or not (integers or "mx_fp" in data_type):
        return foreign_reader(config, where)
    entries = config.get("extra_config") or {}
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise CheckpointError(f"extra_config is {shown(entries)}, not an object of objects", where=where)
    blocks = _blocks(config, where)

    def answer(entry: Mapping[str, Any]) -> Answer:
        fields = {**config, **entry}
        width = read_integer(fields, "bits", where, default=bits)
        if width >= 16:
            return None
        if integers:
            group = read_integer(fields, "group_size", where, default=128)
            zeros = not read_boolean(fields, "sym", where, default=True)
            return Scheme("wna16", width, group, str(packing), zeros)
        if width not in (4, 8):
            return Foreign(f"{data_type} of {width} bits")
        if width == 4:
            return Scheme("mxfp4", width, MX_BLOCK, "auto-round", activations="mxfp4")
        return Scheme("mxfp8", width, MX_BLOCK, "auto-round", activations="mxfp8")

    usual = answer({})
    named = {name: answer(entry) for name, entry in entries.items()}
    places = {name: place for place, name in enumerate(named)}
    expressions = [(found, name) for name, found in _expressions(named, where) if found is not None]
    below: dict[str, list[str]] = {}
    for name in named:
        head, sign, _ = name.rpartition(".experts.")
        if sign:
            below.setdefault(f"{head}.experts", []).append(name)

    def entry_of(names: Iterable[str]) -> str | None:
        """The entry that speaks of something with these names."""
        names = tuple(names)
        full = next((name for name in names if name in named), None)
        if full is not None:
            return full
        ends = {end for name in names for end in _ends(name) if end in named}
        if ends:
            return min(ends, key=places.__getitem__)
        return next((entry for found, entry in expressions if any(map(found.search, names))), None)

    def of_module(layer: LayerNames, entry: str | None) -> Answer:
        if entry in layer.modules and "bits" not in entries[entry]:
            return None  # vLLM takes an entry under the full name that says no width for one of 16 bits
        inside = not blocks or any(module.startswith(blocks) for module in layer.modules)
        by_name = entry is not None and any(entry in (name, *_ends(name)) for name in layer.modules)
        if not inside and not by_name and "bits" not in entries.get(entry, ()):
            return None
        return usual if entry is None else named[entry]

    def of(layer: LayerNames) -> Answer:
        own = entry_of(layer.modules)
        served = of_module(layer, own)
        by_name = {entry: named[entry] for name in layer.modules for entry in below.get(name, ())}
        conventions = []
        for convention in (layer.own,) if layer.own else layer.projections:
            found = {entry_of(names) for names in zip(*layer.matrices(convention), strict=True)} - {own, None}
            conventions.append({entry: named[entry] for entry in named if entry in found and named[entry] != served})
        # Which names the checkpoint has may be unknown: an expression that finds those of one convention may mean
        # something else, such as the router called gate.
        differing = {entry: said for entry, said in by_name.items() if said != served} or min(conventions, key=len)
        for entry, said in differing.items():
            rule = f"{shown(entry)} stores matrices of experts as {in_words(said)}, their module is {in_words(served)}"
            remedy = (
                "vLLM's INC reads the entries of the experts' module only (its oldest supported releases those of "
                "matrices too, where that has none): give the module an entry of its own, which every release reads"
            )
            raise CheckpointError(rule, remedy, f"{where}.extra_config, {layer.modules[0]}")
        return served

    return of


def _ends(name: str) -> Iterable[str]:
    """Everything that follows a dot of a name."""
    while name:
        name = name.partition(".")[2]
        yield name


def _blocks(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """How names of quantised modules begin; nothing where all are. vLLM splits at commas and strips nothing."""
    field = "block_name_to_quantize" if "block_name_to_quantize" in config else "to_quant_block_names"
    stated = config.get(field)
    blocks = stated.split(",") if isinstance(stated, str) else stated or ()
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(block, str) for block in blocks):
        raise CheckpointError(f"{field} is {shown(stated)}, neither names nor a list of names", where=where)
    return tuple(blocks)


def _expressions(names: Iterable[str], where: str) -> Iterable[tuple[str, Expression | None]]:
    """The names of entries that vLLM takes for expressions, with the expression; None for one that is broken.

    Raises:
        CheckpointError: an expression that cannot be matched in bounded time.
    """
    for name in names:
        if any(sign in name for sign in "*+?^$()[]{}|\\"):
            try:
                yield name, Expression(name, where)
            except CheckpointError as error:
                if not isinstance(error.__cause__, re.error):
                    raise
                yield name, None


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What to know of the answers for a config that `reader` took, one sentence each."""
    entries = config.get("extra_config") or {}
    expressions = dict(_expressions(entries, where))
    for name in entries:
        if name in expressions and expressions[name] is None:
            yield f"{where}.extra_config: {shown(name)} is no regular expression; vLLM skips it"
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        if name not in expressions and last == "experts" and first not in ("model", "language_model", "backbone"):
            yield f"{where}.extra_config: {shown(name)} is the end of a name, which older releases of vLLM do not read"
