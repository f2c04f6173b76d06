"""FP8, with four-bit experts as DeepSeek-V4 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.problem import mx_scheme
from .fields import exclusion_matcher, read_names, read_string
from .types import FormatLookup, QuantConfigFormat
from .unsupported import parse_unsupported


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """FP8 configs, whose experts this project does not run unless the model stores them in 4 bits, as DeepSeek-V4 does.

    ``expert_dtype`` stands in the model's own config; `checkpoint` puts it here. Activations are FP8 for every layer.
    """
    if read_string(config, "expert_dtype", where) != "fp4" or read_string(config, "moe_quant_algo", where):
        return parse_unsupported(config, where)
    excluded = exclusion_matcher(read_names(config, ("modules_to_not_convert", "ignored_layers"), where), where)
    scheme = mx_scheme("mxfp4", "mxfp4", "fp8")
    return lambda layer: None if layer.matches(excluded) else scheme


FORMAT = QuantConfigFormat(
    dict.fromkeys(("fp8", "deepseek_v4_fp8"), parse_config),
    vllm_method=lambda config, method: "deepseek_v4_fp8" if config.get("expert_dtype") else method,
    aliases={"deepseek_v4_fp8": ("fp8",)},
)
