"""Online quantization to MXFP4 while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp4``, since 0.28. See
`online`."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.online import mxfp4 as stock

from ..quantization import ONLINE_SCHEMES
from ..schemes import mxfp4
from .online import OnlineMoEMethod

SERVES = {
    "replaces": ["online.mxfp4:Mxfp4OnlineMoEMethod"],
}


class Mxfp4OnlineMoEMethod(OnlineMoEMethod, stock.Mxfp4OnlineMoEMethod):
    """MoE layers of a 16-bit checkpoint; replaces the stock class of the same name."""

    scheme = ONLINE_SCHEMES["mxfp4"]
    codes_dtype = torch.uint8
    codes_per_element = 2
    padded_by_stock = True

    def quantize_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP4; see `OnlineMoEMethod.quantize_into`."""
        mxfp4.quantize_into(values, codes, scales, self.settings.mxfp4_scale_rule)
