"""OpenAI's triton_kernels for MXFP4 with the activation and the sum over experts as separate kernels.

That supports other activations than gpt-oss's.
"""

from __future__ import annotations

import dataclasses

from ..core.capabilities import Rule
from ..core.problem import Device, Problem
from ..releases import min_versions
from ._stock import EXPERTS, UNPROVEN_EPLB, UNPROVEN_LORA, StockDifference
from ._stock_rules import activation_rule, lacks_parameters_of_swigluoai
from ._triton_kernels import EMPTY_SLOTS_RULE, RULES, TritonKernelsBackend

_HALVES_RULE = activation_rule(swigluoai_since=min_versions.TRITON_KERNELS_UNINTERLEAVED)


def _rejects_activation(problem: Problem, device: Device) -> bool:
    activation = problem.activation
    if activation.interleaved:
        return lacks_parameters_of_swigluoai(activation)
    return _HALVES_RULE.violated(problem, device)


def _activation_detail(problem: Problem, device: Device) -> str:
    if problem.activation.interleaved:
        return f"has beta 1 built in for rows that alternate gate and up, the layer has {problem.activation}"
    return _HALVES_RULE.detail(problem, device)


class TritonMxfp4Unfused(TritonKernelsBackend):
    """vLLM's `UnfusedOAITritonExperts`."""

    name = "triton_mxfp4_unfused"
    vllm_names = ("triton_unfused",)
    stock_class = f"{EXPERTS}.gpt_oss_triton_kernels_moe:UnfusedOAITritonExperts"
    stock_kernel = "TRITON_UNFUSED"
    stock_differences = (
        *TritonKernelsBackend.stock_differences,
        UNPROVEN_EPLB,
        UNPROVEN_LORA,
        StockDifference(("swiglustep",), "nobody has run it between these products"),
    )
    # vLLM lists it nowhere, and runs it only where it is asked for: here it comes after the lists.
    static_priority = 90.0
    gpt_oss_only = False
    capabilities = dataclasses.replace(TritonKernelsBackend.capabilities, gated=("silu", "gelu", "swigluoai"))
    rules = (*RULES, EMPTY_SLOTS_RULE, Rule("activation.parameters", _rejects_activation, _activation_detail))


BACKEND = TritonMxfp4Unfused()
