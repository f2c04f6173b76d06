"""FlashInfer's TRTLLM-gen kernels for MXFP4 with 16-bit activations on sm_100 and sm_103, routing included."""

from __future__ import annotations

from ._flashinfer_trtllm_mxfp4 import ROUTING_CAPABILITIES, ROUTING_RULES, TrtllmMxfp4Backend
from ._stock import EXPERTS


class TrtllmMxfp4Bf16Monolithic(TrtllmMxfp4Backend):
    """vLLM's `TrtLlmMxfp4ExpertsMonolithic` on 16-bit activations."""

    name = "trtllm_mxfp4_monolithic"
    monolithic = True
    stock_class = f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsMonolithic"
    stock_kernel = "FLASHINFER_TRTLLM_MXFP4_BF16"
    static_priority = 10.0
    capabilities = ROUTING_CAPABILITIES
    rules = ROUTING_RULES


BACKEND = TrtllmMxfp4Bf16Monolithic()
