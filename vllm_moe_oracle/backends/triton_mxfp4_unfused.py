"""OpenAI's triton_kernels for MXFP4 with activation and sum apart: what other activations than gpt-oss's need."""

from __future__ import annotations

import dataclasses

from ..compat import since
from ..oracle.problem import Device, Problem
from ._limits import Rule
from ._stock import activation_rule
from ._triton_kernels import LOCAL_IDS, RULES, TritonKernels

_HALVES = activation_rule(swigluoai_since=since.TRITON_KERNELS_HALVES)


def _broken(problem: Problem, device: Device) -> bool:
    activation = problem.activation
    if activation.interleaved:
        return activation.beta != 1.0 or activation.alpha is None or activation.limit is None
    return _HALVES.broken(problem, device)


def _detail(problem: Problem, device: Device) -> str:
    if problem.activation.interleaved:
        return f"has beta 1 built in for rows that alternate gate and up, the layer has {problem.activation}"
    return _HALVES.detail(problem, device)


class TritonMxfp4Unfused(TritonKernels):
    """vLLM's `UnfusedOAITritonExperts`."""

    name = "triton_mxfp4_unfused"
    vllm_names = ("triton_unfused",)
    stock_class = "UnfusedOAITritonExperts"
    place = "triton_unfused"
    limits = dataclasses.replace(TritonKernels.limits, gated=("silu", "gelu", "swigluoai"))
    rules = (*RULES, LOCAL_IDS, Rule("activation.parameters", _broken, _detail))


BACKEND = TritonMxfp4Unfused()
