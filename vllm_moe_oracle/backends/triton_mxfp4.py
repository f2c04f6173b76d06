"""OpenAI's triton_kernels for MXFP4, given routed tokens: SwiGLU-OAI inside the first product, the sum over experts
inside the second."""

from __future__ import annotations

from ._mxfp4 import alternating_rule
from ._triton_kernels import LOCAL_IDS, RULES, TritonKernels


class TritonMxfp4(TritonKernels):
    """vLLM's `OAITritonExperts`."""

    name = "triton_mxfp4"
    vllm_names = ("triton",)
    stock_class = "OAITritonExperts"
    place = "triton"
    rules = (*RULES, LOCAL_IDS, alternating_rule("OAITritonExperts"))


BACKEND = TritonMxfp4()
