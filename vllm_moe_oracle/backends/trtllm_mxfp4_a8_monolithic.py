"""FlashInfer's TRTLLM-gen kernels for MXFP4 with MXFP8 activations on sm_100 and sm_103, routing included."""

from __future__ import annotations

from ._flashinfer_trtllm_mxfp4 import MXFP8_ARITHMETIC, ROUTING_CAPABILITIES, ROUTING_RULES, TrtllmMxfp4Backend
from ._stock import EXPERTS


class TrtllmMxfp4Mxfp8Monolithic(TrtllmMxfp4Backend):
    """vLLM's `TrtLlmMxfp4ExpertsMonolithic` on MXFP8 activations."""

    name = "trtllm_mxfp4_a8_monolithic"
    monolithic = True
    stock_class = f"{EXPERTS}.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsMonolithic"
    stock_kernel = "FLASHINFER_TRTLLM_MXFP4_MXFP8"
    static_priority = 20.0
    activation_precision = "mxfp8"
    arithmetic = MXFP8_ARITHMETIC
    quantize_inputs = "mxfp8"
    capabilities = ROUTING_CAPABILITIES
    rules = ROUTING_RULES


BACKEND = TrtllmMxfp4Mxfp8Monolithic()
