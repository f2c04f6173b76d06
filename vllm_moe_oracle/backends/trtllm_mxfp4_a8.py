"""FlashInfer's TRTLLM-gen kernels for MXFP4 with MXFP8 activations on sm_100 and sm_103, on routed ids."""

from __future__ import annotations

from ._flashinfer_trtllm import NO_EXPERT_MAP
from ._flashinfer_trtllm_mxfp4 import MXFP8_ARITHMETIC, TrtllmMxfp4Backend
from ._stock import EXPERTS


class TrtllmMxfp4Mxfp8(TrtllmMxfp4Backend):
    """vLLM's `TrtLlmMxfp4ExpertsModular` on MXFP8 activations."""

    name = "trtllm_mxfp4_a8"
    stock_class = f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular"
    stock_kernel = "FLASHINFER_TRTLLM_MXFP4_MXFP8"
    stock_differences = (*TrtllmMxfp4Backend.stock_differences, NO_EXPERT_MAP)
    static_priority = 21.0
    activation_precision = "mxfp8"
    arithmetic = MXFP8_ARITHMETIC
    quantize_inputs = "mxfp8"


BACKEND = TrtllmMxfp4Mxfp8()
