"""MXFP4 of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..oracle.problem import MX_BLOCK, Scheme
from .answers import SchemeOf
from .fields import exclusion, read_names

LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
"""Fields with the names of modules that are not quantised."""


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """Only experts are quantised, and ``modules_to_not_convert`` lists everything else."""
    excluded = exclusion(read_names(config, LEFT_OUT, where), where)
    scheme = Scheme("mxfp4", 4, MX_BLOCK, "gpt_oss")
    return lambda layer: None if layer.match(excluded) else scheme
