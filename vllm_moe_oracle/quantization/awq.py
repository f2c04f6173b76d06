"""AWQ, as AutoAWQ writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..oracle.problem import Scheme
from .answers import SchemeOf
from .fields import read_boolean, read_integer, read_names


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """An entry of ``modules_to_not_convert`` excludes every module whose name holds it."""
    scheme = awq_scheme(config, where)
    excluded = read_names(config, ("modules_to_not_convert",), where)
    return lambda layer: None if layer.match(lambda name: any(part in name for part in excluded)) else scheme


def awq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """What an AWQ config says of every module that it does not exclude.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have.
    """
    bits = read_integer(config, "w_bit" if "w_bit" in config else "bits", where)
    group = read_integer(config, "q_group_size" if "q_group_size" in config else "group_size", where)
    return Scheme("wna16", bits, group, "awq", zero_points=read_boolean(config, "zero_point", where, default=True))
