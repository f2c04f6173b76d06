"""MXFP4 of gpt-oss, and of other models that are tagged ``mxfp4``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, Scheme
from .answers import LayerNames, SchemeOf
from .fields import exclusion, read_names, shown

LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
"""Fields with the names of modules that are not quantised."""

_SCHEME = Scheme("mxfp4", 4, MX_BLOCK, "gpt_oss")


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """Only experts are quantised, and ``modules_to_not_convert`` lists everything else. Stock vLLM reads no such list;
    this project's config class leaves experts that are in it to vLLM's method for unquantised ones."""
    excluded = exclusion(read_names(config, LEFT_OUT, where), where)
    return lambda layer: None if layer.match(excluded) else _SCHEME


def own_reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """The same for gpt-oss itself, all of whose experts are in MXFP4; see `refuse_left_out`."""
    names = read_names(config, LEFT_OUT, where)

    def of(layer: LayerNames) -> Scheme:
        refuse_left_out(names, layer, where)
        return _SCHEME

    return of


def refuse_left_out(names: Sequence[str], layer: LayerNames, where: str) -> None:
    """Refuses experts of gpt-oss that are not quantised. vLLM's loader of the model knows tensors of one kind for all
    layers, and its config class, which reads no exclusions, makes every layer of experts an MXFP4 one.

    Args:
        names: names and wildcards of modules that are not quantised.
        layer: the layer's names.
        where: file and field, for messages.

    Raises:
        CheckpointError: one of the names is the layer's.
    """
    if not layer.match(exclusion(names, where)):
        return
    name = next((name for name in names if layer.match(exclusion([name], where))), names[0])
    rule = f"{shown(name)} leaves experts in 16 bits; vLLM's loader of gpt-oss reads them all as MXFP4"
    raise CheckpointError(rule, "Take the entry out, if they are in MXFP4", f"{where}, {layer.modules[0]}")


def refuse_packed(scheme: Scheme, where: str) -> None:
    """Refuses experts of gpt-oss in compressed-tensors' MXFP4 (``weight_packed``). vLLM's loader of the model maps no
    such name to a parameter and skips what it does not know: scales may arrive without the codes that they belong to.

    Args:
        scheme: what the layer's experts are stored as.
        where: file, field and layer, for messages.

    Raises:
        CheckpointError: the experts are such ones.
    """
    if scheme.name == "mxfp4" and scheme.packing == "compressed-tensors":
        rule = "vLLM's loader of gpt-oss skips experts in MXFP4 under compressed-tensors' names (weight_packed)"
        raise CheckpointError(rule, "Serve the checkpoint in MXFP4 that OpenAI publishes", where)
