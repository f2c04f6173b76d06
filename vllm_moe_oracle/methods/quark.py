"""AMD Quark's MXFP4 checkpoints: weight-only, or with activations declared in MXFP4.

vLLM has one class for everything that Quark makes of microscaling formats. MXFP6 weights and activations with scales
from the checkpoint are left to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization.quark import quark_moe as stock

from ..oracle.problem import ActivationPrecision
from .mxfp4 import AnyMxfp4MoEMethod, mxfp4_scheme, precision_of

_SIGNATURE = inspect.signature(stock.QuarkOCP_MX_MoEMethod.__init__)
_OTHERS = object()


class QuarkOCP_MX_MoEMethod(AnyMxfp4MoEMethod, stock.QuarkOCP_MX_MoEMethod):
    """MoE layers in MXFP4. Takes the place of the stock class of the same name, which reads the rows of every model as
    gpt-oss's and emulates what has no kernel of AMD's."""

    weight_dtype = "mxfp4"
    static_input_scales = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class for formats that are not read here."""
        if _declared(*args, **kwargs) is _OTHERS:
            made = stock.QuarkOCP_MX_MoEMethod.__new__(stock.QuarkOCP_MX_MoEMethod)
            stock.QuarkOCP_MX_MoEMethod.__init__(made, *args, **kwargs)
            return made
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list.
        moe = _arguments(*args, **kwargs)["moe"]
        self.decide(moe, mxfp4_scheme("quark", _declared(*args, **kwargs)))
        self.has_bias = bool(moe.has_bias)


def _arguments(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """What the stock constructor of this release is called with, by name."""
    return _SIGNATURE.bind(None, *args, **kwargs).arguments


def _declared(*args: Any, **kwargs: Any) -> ActivationPrecision | Any:
    """What the checkpoint declares for the experts' inputs; `_OTHERS` for formats that are not read here."""
    given = _arguments(*args, **kwargs)
    if "weight_config" in given:  # until 0.30: entries of Quark's own config
        inputs = given["input_config"]
        if given["weight_config"]["dtype"] != "fp4" or given["weight_config"].get("qscheme") != "per_group":
            return _OTHERS
        if inputs is None:
            return "16bit"
        return "mxfp4" if inputs["dtype"] == "fp4" and inputs.get("is_dynamic") else _OTHERS
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic, kMxfp4Static

    if given["weight_quant_key"] != kMxfp4Static or given["activation_quant_key"] not in (None, kMxfp4Dynamic):
        return _OTHERS
    return precision_of(given["activation_quant_key"])
