"""Formats that vLLM serves and this package does not. They are named, so that messages do not call them unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .types import FormatLookup, QuantConfigFormat, UnsupportedFormat


def parse_unsupported(config: Mapping[str, Any], where: str) -> FormatLookup:
    """Every layer is stored in the unsupported format that ``quant_method`` names."""
    method = UnsupportedFormat(str(config["quant_method"]))
    return lambda layer: method


FORMAT = QuantConfigFormat(dict.fromkeys(("fbgemm-fp8", "bitsandbytes", "experts-int8", "torchao"), parse_unsupported))
