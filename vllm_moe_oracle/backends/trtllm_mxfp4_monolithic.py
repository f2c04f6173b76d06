"""FlashInfer's TRTLLM-gen kernels for MXFP4 with 16-bit activations on sm_100 and sm_103, routing included."""

from __future__ import annotations

from ._trtllm_mxfp4 import ROUTING_RULES, TrtllmMxfp4, limits


class TrtllmMxfp4Bf16Monolithic(TrtllmMxfp4):
    """vLLM's `TrtLlmMxfp4ExpertsMonolithic` on 16-bit activations."""

    name = "trtllm_mxfp4_monolithic"
    monolithic = True
    stock_class = "TrtLlmMxfp4ExpertsMonolithic"
    place = "trtllm_bf16_monolithic"
    limits = limits(routes=True)
    rules = ROUTING_RULES


BACKEND = TrtllmMxfp4Bf16Monolithic()
