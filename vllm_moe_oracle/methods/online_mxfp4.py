"""MXFP4 made while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp4``, since 0.28. See `online`."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.online import mxfp4 as stock

from ..quantization import ONLINE
from ..schemes import mxfp4
from .online import OnlineMoEMethod


class Mxfp4OnlineMoEMethod(OnlineMoEMethod, stock.Mxfp4OnlineMoEMethod):
    """MoE layers of a 16-bit checkpoint. Takes the place of the stock class of the same name."""

    scheme = ONLINE["mxfp4"]
    codes = torch.uint8
    per_byte = 2

    def quantise_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP4; see `OnlineMoEMethod.quantise_into`."""
        mxfp4.quantise_into(values, codes, scales, self.settings.mxfp4_scale_rule)
