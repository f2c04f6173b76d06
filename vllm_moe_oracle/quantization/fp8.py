"""FP8, with four-bit experts as DeepSeek-V4 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..oracle.problem import MX_BLOCK, Scheme
from .answers import SchemeOf, foreign_reader
from .fields import exclusion, read_names, read_word


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """FP8 configs, whose experts are none of ours unless the model stores them in 4 bits, as DeepSeek-V4 does.

    ``expert_dtype`` stands in the model's own config; `checkpoint` puts it here. Activations are FP8 for every layer.
    """
    if read_word(config, "expert_dtype", where) != "fp4" or read_word(config, "moe_quant_algo", where):
        return foreign_reader(config, where)
    excluded = exclusion(read_names(config, ("modules_to_not_convert", "ignored_layers"), where), where)
    scheme = Scheme("mxfp4", 4, MX_BLOCK, "mxfp4", activations="fp8")
    return lambda layer: None if layer.match(excluded) else scheme
