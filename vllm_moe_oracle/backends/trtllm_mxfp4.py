"""FlashInfer's TRTLLM-gen kernels for MXFP4 with 16-bit activations on sm_100 and sm_103, given routed ids."""

from __future__ import annotations

from ._trtllm_mxfp4 import RULES, TrtllmMxfp4, limits


class TrtllmMxfp4Bf16(TrtllmMxfp4):
    """vLLM's `TrtLlmMxfp4ExpertsModular` on 16-bit activations."""

    name = "trtllm_mxfp4"
    stock_class = "TrtLlmMxfp4ExpertsModular"
    place = "trtllm_bf16"
    limits = limits(routes=False)
    rules = RULES


BACKEND = TrtllmMxfp4Bf16()
