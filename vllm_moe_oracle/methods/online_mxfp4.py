"""MXFP4 made while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp4``, since 0.28. See `online`."""

from __future__ import annotations

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

    def quantise_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP4; see `OnlineMoEMethod.quantise_into`."""
        mxfp4.quantise_into(values, codes, scales, self.settings.mxfp4_scale_rule)
