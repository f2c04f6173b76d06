"""FlashInfer's TRTLLM-gen kernels for MXFP4 with MXFP8 activations on sm_100 and sm_103, routing included."""

from __future__ import annotations

from ._trtllm_mxfp4 import ROUTING_RULES, TrtllmMxfp4, limits


class TrtllmMxfp4Mxfp8Monolithic(TrtllmMxfp4):
    """vLLM's `TrtLlmMxfp4ExpertsMonolithic` on MXFP8 activations."""

    name = "trtllm_mxfp4_a8_monolithic"
    monolithic = True
    stock_class = "TrtLlmMxfp4ExpertsMonolithic"
    inputs = "mxfp8"
    place = "trtllm_mxfp8_monolithic"
    limits = limits(routes=True)
    rules = ROUTING_RULES


BACKEND = TrtllmMxfp4Mxfp8Monolithic()
