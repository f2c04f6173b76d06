"""FlashInfer's TRTLLM-gen kernels for MXFP4 with MXFP8 activations on sm_100 and sm_103, given routed ids."""

from __future__ import annotations

from ._trtllm_mxfp4 import RULES, TrtllmMxfp4, limits


class TrtllmMxfp4Mxfp8(TrtllmMxfp4):
    """vLLM's `TrtLlmMxfp4ExpertsModular` on MXFP8 activations."""

    name = "trtllm_mxfp4_a8"
    stock_class = "TrtLlmMxfp4ExpertsModular"
    inputs = "mxfp8"
    place = "trtllm_mxfp8"
    limits = limits(routes=False)
    rules = RULES


BACKEND = TrtllmMxfp4Mxfp8()
