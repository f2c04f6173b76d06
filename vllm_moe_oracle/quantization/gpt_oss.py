"""Configs of gpt-oss, and of other models tagged ``mxfp4``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.problem import Scheme, mx_scheme
from ..errors import CheckpointError, short_repr
from .fields import exclusion_matcher, read_names
from .types import FormatLookup, LayerNames, QuantConfigFormat

EXCLUSION_FIELDS = ("modules_to_not_convert", "ignored_layers")
"""Fields with the names of modules that are not quantized."""

_SCHEME = mx_scheme("mxfp4", "gpt_oss")


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """Only experts are quantized; ``modules_to_not_convert`` lists everything else. Stock vLLM does not read that list.
    This project's config class gives experts in it vLLM's method for unquantized experts."""
    excluded = exclusion_matcher(read_names(config, EXCLUSION_FIELDS, where), where)
    return lambda layer: None if layer.matches(excluded) else _SCHEME


def parse_gpt_oss_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """The same for gpt-oss itself, whose experts are all in MXFP4; see `reject_excluded_experts`."""
    names = read_names(config, EXCLUSION_FIELDS, where)

    def of(layer: LayerNames) -> Scheme:
        reject_excluded_experts(names, layer, where)
        return _SCHEME

    return of


def reject_excluded_experts(names: Sequence[str], layer: LayerNames, where: str) -> None:
    """Refuses a gpt-oss checkpoint with unquantized experts: vLLM's loader and config class take the experts of every
    layer for MXFP4.

    Args:
        names: names and wildcards of modules that are not quantized.
        layer: the layer's names.
        where: file and field, for messages.

    Raises:
        CheckpointError: one of the names excludes the layer's experts.
    """
    if not layer.matches(exclusion_matcher(names, where)):
        return
    name = next((name for name in names if layer.matches(exclusion_matcher([name], where))), names[0])
    rule = f"{short_repr(name)} leaves experts in 16 bits; vLLM's loader of gpt-oss reads them all as MXFP4"
    raise CheckpointError(rule, "Remove the entry, if the experts are in MXFP4", f"{where}, {layer.modules[0]}")


def reject_compressed_tensors(scheme: Scheme, where: str) -> None:
    """Refuses gpt-oss's experts in compressed-tensors' MXFP4 (``weight_packed``). vLLM's loader of the model does not
    know these names and skips them: scales would be loaded without their codes.

    Args:
        scheme: the format of the layer's experts.
        where: file, field and layer, for messages.

    Raises:
        CheckpointError: the experts are in this format.
    """
    if scheme.name == "mxfp4" and scheme.packing == "compressed-tensors":
        rule = "vLLM's loader of gpt-oss skips experts in MXFP4 under compressed-tensors' names (weight_packed)"
        raise CheckpointError(rule, "Serve the checkpoint in MXFP4 that OpenAI publishes", where)


FORMAT = QuantConfigFormat(
    {"mxfp4": parse_config, "gpt_oss_mxfp4": parse_gpt_oss_config}, aliases={"mxfp4": ("gpt_oss_mxfp4",)}
)
