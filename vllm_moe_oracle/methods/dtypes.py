"""Dtypes of models with quantized experts."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

_EMULATED_DTYPES = (torch.float16, torch.float32)
"""Dtypes that the emulation supports on a CPU beside those of the stock classes."""


class EmulatedDtypesMixin:
    """The mix-in in front of a stock config class whose experts can be emulated on a CPU."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model: the stock class's; on a CPU also float16 and float32."""
        found = cls.stock_act_dtypes()
        if current_platform.is_cpu():
            found += [each for each in _EMULATED_DTYPES if each not in found]
        return found

    @classmethod
    def stock_act_dtypes(cls) -> list[torch.dtype]:
        """The stock class's dtypes."""
        stock = super().get_supported_act_dtypes  # type: ignore[misc]  # of the mixin's stock class
        # A class method, or a method that does not read its object.
        asked = stock if inspect.ismethod(stock) else functools.partial(stock, cls)
        return list(asked())

    def refuse_linear_dtype(self, layer: Any, method: Any, prefix: str) -> None:
        """Refuses a quantized linear layer in a dtype that only experts are emulated in; stock vLLM refuses the model.

        Args:
            layer: the layer.
            method: its method.
            prefix: its name.

        Raises:
            ValueError: the stock class does not support the dtype.
        """
        if not isinstance(layer, LinearBase) or method is None or isinstance(method, UnquantizedLinearMethod):
            return
        supported, dtype = self.stock_act_dtypes(), getattr(layer, "params_dtype", None)
        if dtype is not None and dtype not in supported:  # None: a layer without parameters of its own
            rule = f"{prefix}: {dtype} is not supported for quantized linear layers of {type(self).__name__}"
            raise ValueError(f"{rule}, only for its experts. Supported dtypes: {supported}")
