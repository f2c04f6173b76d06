"""Formats that vLLM serves and this package does not. They are named, so that messages do not call them unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import shortened
from .types import FormatLookup, QuantConfigFormat, UnsupportedFormat


def parse_unsupported(config: Mapping[str, Any], where: str) -> FormatLookup:
    """Every layer is stored in the unsupported format that ``quant_method`` names."""
    method = UnsupportedFormat(shortened(str(config["quant_method"])))
    return lambda layer: method


FORMAT = QuantConfigFormat(
    dict.fromkeys(
        ("bitsandbytes", "experts_int8", "fbgemm_fp8", "fp_quant", "humming", "torchao"),
        parse_unsupported,
    )
)

UNSUPPORTED_ONLINE = (
    "bitsandbytes",
    "experts_int8",
    "fp8",
    "fp8_per_block",
    "fp8_per_channel",
    "fp8_per_tensor",
    "humming",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "online",
    "torchao",
)
"""Values of ``--quantization`` for checkpoints in 16 bits that vLLM serves and this package does not."""
