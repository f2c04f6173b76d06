"""AMD Quark's MXFP4 checkpoints: weight-only, or with activations declared in MXFP4.

vLLM has one class for all of Quark's microscaling formats. MXFP6 weights and static activation scales are left to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization.quark import quark_moe as stock

from ..core.patterns import MatchBudget
from ..core.problem import ActivationPrecision, mx_scheme
from ..quantization.quark import exclusion_matcher
from ..quantization.single_experts import check_exclusions
from ..quantization.types import LayerNames
from .mxfp4 import BaseMxfp4MoEMethod, activation_precision

SERVES = {
    "schemes": ["mxfp4"],
    "quantizations": {"quark": None},
    "replaces": ["quark.quark_moe:QuarkOCP_MX_MoEMethod", "quark.quark:QuarkConfig.get_quant_method"],
}

_WHERE = "quantization_config"
_STOCK_SIGNATURE = inspect.signature(stock.QuarkOCP_MX_MoEMethod.__init__)
_UNSUPPORTED = object()


class QuarkOCP_MX_MoEMethod(BaseMxfp4MoEMethod, stock.QuarkOCP_MX_MoEMethod):
    """MoE layers in MXFP4; replaces the stock class of the same name, which reads every model's rows as gpt-oss's and
    emulates everything without an AMD kernel."""

    weight_dtype = "mxfp4"
    static_input_scales = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class for unsupported formats. `copy.copy` gives no arguments."""
        if (args or kwargs) and _activations_of_arguments(*args, **kwargs) is _UNSUPPORTED:
            made = stock.QuarkOCP_MX_MoEMethod.__new__(stock.QuarkOCP_MX_MoEMethod)
            stock.QuarkOCP_MX_MoEMethod.__init__(made, *args, **kwargs)
            return made
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The stock constructor would choose a backend by its own rules.
        moe = _bind_arguments(*args, **kwargs)["moe"]
        self.decide(moe, mx_scheme("mxfp4", "quark", _activations_of_arguments(*args, **kwargs)))
        self.has_bias = bool(moe.has_bias)


def get_quant_method(original: Any, quant_config: Any, layer: Any, prefix: str) -> Any:
    """The stock function's method of a layer.

    Args:
        original: the stock function.
        quant_config: vLLM's `QuarkConfig`.
        layer: the layer.
        prefix: its name.

    Raises:
        CheckpointError: some experts of a MoE layer are excluded by name, and others not.
    """
    if hasattr(layer, "moe_config"):
        names = LayerNames((prefix,), (), num_experts=layer.moe_config.num_logical_experts)
        entries = tuple(quant_config.quant_config.get("exclude") or ())
        check_exclusions(entries, names, _WHERE, lambda: exclusion_matcher(entries, MatchBudget(_WHERE), _WHERE))
    return original(quant_config, layer, prefix)


def _bind_arguments(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """The arguments of the stock constructor of this release, by name."""
    return _STOCK_SIGNATURE.bind(None, *args, **kwargs).arguments


def _activations_of_arguments(*args: Any, **kwargs: Any) -> ActivationPrecision | Any:
    """Precision that the checkpoint declares for the experts' inputs; `_UNSUPPORTED` for unsupported formats."""
    arguments = _bind_arguments(*args, **kwargs)
    if "weight_config" in arguments:  # until 0.30: entries of Quark's own config
        inputs = arguments["input_config"]
        if arguments["weight_config"]["dtype"] != "fp4" or arguments["weight_config"].get("qscheme") != "per_group":
            return _UNSUPPORTED
        if inputs is None:
            return "16bit"
        return "mxfp4" if inputs["dtype"] == "fp4" and inputs.get("is_dynamic") else _UNSUPPORTED
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic, kMxfp4Static

    if arguments["weight_quant_key"] != kMxfp4Static or arguments["activation_quant_key"] not in (None, kMxfp4Dynamic):
        return _UNSUPPORTED
    return activation_precision(arguments["activation_quant_key"])
