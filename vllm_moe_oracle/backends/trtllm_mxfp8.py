"""FlashInfer's TRTLLM-gen kernels for MXFP8 on sm_100 and sm_103, given routed ids.

vLLM's class `TrtLlmFp8ExpertsModular` claims ReLU² and never passes the activation to the kernel, which then computes
SwiGLU over rows that are no halves: non-gated experts are refused here and left to the monolithic class.
"""

from __future__ import annotations

from ._trtllm import RULES, Trtllm, limits


class TrtllmMxfp8(Trtllm):
    """vLLM's `TrtLlmFp8ExpertsModular` on MXFP8 weights."""

    name = "trtllm_mxfp8"
    stock_class = "TrtLlmFp8ExpertsModular"
    limits = limits(ungated=(), max_experts=2048, routing_methods=None)
    rules = RULES


BACKEND = TrtllmMxfp8()
