"""FlashInfer's TRTLLM-gen kernels for MXFP4 with 16-bit activations on sm_100 and sm_103, on routed ids."""

from __future__ import annotations

from ._flashinfer_trtllm import NO_EXPERT_MAP
from ._flashinfer_trtllm_mxfp4 import TrtllmMxfp4Backend
from ._stock import EXPERTS


class TrtllmMxfp4Bf16(TrtllmMxfp4Backend):
    """vLLM's `TrtLlmMxfp4ExpertsModular` on 16-bit activations."""

    name = "trtllm_mxfp4"
    stock_class = f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular"
    stock_kernel = "FLASHINFER_TRTLLM_MXFP4_BF16"
    stock_differences = (*TrtllmMxfp4Backend.stock_differences, NO_EXPERT_MAP)
    static_priority = 11.0


BACKEND = TrtllmMxfp4Bf16()
