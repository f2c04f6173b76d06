"""GPTQ, as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..expressions import Expression
from ..oracle.problem import ActOrder, Scheme
from .answers import UNNAMED, Answer, LayerNames, SchemeOf, Unnamed, in_common
from .fields import read_boolean, read_integer, read_names, read_word, shown


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """``dynamic`` overrides modules by regular expression; ``-:`` before it excludes them. Of
    ``modules_in_block_to_quantize``, where there is such a list, an entry is any part of a name."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"dynamic is {shown(dynamic)}, not an object", where=where)
    rules = [
        (Expression(pattern.removeprefix("-:").removeprefix("+:"), where), pattern.startswith("-:"), override)
        for pattern, override in dynamic.items()
    ]
    quantised = read_names(config, ("modules_in_block_to_quantize",), where)
    full_names = frozenset(quantised)
    scheme = gptq_scheme(config, where)

    def of(layer: LayerNames) -> Answer:
        def of_matrix(name: str) -> Answer | Unnamed:
            names = (name, *layer.modules)
            for expression, excludes, override in rules:
                if any(map(expression.match, names)):
                    if excludes or override is False:
                        return None
                    if isinstance(override, Mapping):
                        return gptq_scheme({**config, **override}, where)
            return UNNAMED

        listed = layer.match(lambda name: name in full_names or any(part in name for part in quantised))
        return in_common(layer, of_matrix, scheme if listed or not quantised else None, where)

    return of


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What to know of the answers for a config that `reader` took, one sentence each."""
    for name, usual in (("desc_act", "false"), ("sym", "true")):
        if config.get(name) is None:
            yield f"{where}: {name} is not set: taken as {usual}; vLLM refuses to serve without it"


def gptq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """What a GPTQ config says of every module that it names no exception for.

    With ``static_groups`` the groups are of neighbours, whatever the order in which features were quantised; with one
    scale per output row there is no order.
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
    return Scheme("wna16", bits, group, _stored(config, where), asymmetric, order)


_STORED = ("gptq", "gptq_v2")


def _stored(config: Mapping[str, Any], where: str) -> str:
    """The word of `Scheme.packing` for how a config's tensors are packed."""
    words = [read_word(config, name, where) for name in ("checkpoint_format", "format")]
    stored = words[0] or words[1] or "gptq"
    if stored not in _STORED:
        raise CheckpointError(f"unknown checkpoint_format {shown(stored)}", f"Known are {', '.join(_STORED)}", where)
    if words[1] in _STORED and words[1] != stored:
        raise CheckpointError(f"checkpoint_format is {stored} and format is {words[1]}", "Take one of them out", where)
    if read_boolean(config, "is_marlin_format", where, default=False):
        rule = "is_marlin_format: codes are in the order of a kernel, which is not read"
        raise CheckpointError(rule, "Serve the checkpoint that this one was made from", where)
    word = read_word(config, "pack_dtype", where).removeprefix("torch.")
    if word not in ("", "int32"):
        raise CheckpointError(f"pack_dtype is {shown(word)}; codes are read from int32 words only", where=where)
    return stored
