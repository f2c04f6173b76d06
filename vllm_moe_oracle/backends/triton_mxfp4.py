"""OpenAI's triton_kernels for MXFP4 on routed tokens.

The first product applies SwiGLU-OAI in its epilogue, the second adds up the experts of a token.
"""

from __future__ import annotations

from ._stock import EXPERTS, UNPROVEN_EPLB
from ._stock_rules import gpt_oss_activation_rule
from ._triton_kernels import EMPTY_SLOTS_RULE, RULES, TritonKernelsBackend


class TritonMxfp4(TritonKernelsBackend):
    """vLLM's `OAITritonExperts`."""

    name = "triton_mxfp4"
    vllm_names = ("triton",)
    stock_class = f"{EXPERTS}.gpt_oss_triton_kernels_moe:OAITritonExperts"
    stock_differences = (*TritonKernelsBackend.stock_differences, UNPROVEN_EPLB)
    static_priority = 31.0
    sm120_priority = 63.0
    rules = (*RULES, EMPTY_SLOTS_RULE, gpt_oss_activation_rule("OAITritonExperts"))


BACKEND = TritonMxfp4()
