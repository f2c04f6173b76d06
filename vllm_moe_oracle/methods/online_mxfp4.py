"""MXFP4 made while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp4``, since 0.28. See `online`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.online import mxfp4 as stock

from ..schemes import mxfp4
from .mxfp4 import mxfp4_scheme
from .online import OnlineMoEMethod

SCHEME = mxfp4_scheme("online", "mxfp4")
"""vLLM's own online MXFP4 is W4A4: it asks for kernels that quantise activations too."""


class Mxfp4OnlineMoEMethod(OnlineMoEMethod, stock.Mxfp4OnlineMoEMethod):
    """MoE layers of a 16-bit checkpoint. Takes the place of the stock class of the same name."""

    scheme = SCHEME
    codes = torch.uint8
    per_byte = 2

    def __init__(self, *, moe: Any = None, layer: Any = None) -> None:
        """
        Args:
            moe: vLLM's `FusedMoEConfig`; releases before 0.30 give the layer instead.
            layer: the layer.

        Raises:
            CheckpointError: an input size that blocks of 32 do not divide.
        """
        # The stock class's base, not the class itself: that would choose a backend by its own list.
        self.begin(super(stock.Mxfp4OnlineMoEMethod, self).__init__, moe, layer)

    def quantise_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP4; see `OnlineMoEMethod.quantise_into`."""
        mxfp4.quantise_into(values, codes, scales, self.settings.mxfp4_scale_rule)
