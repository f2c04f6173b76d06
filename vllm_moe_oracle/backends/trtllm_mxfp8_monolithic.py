"""FlashInfer's TRTLLM-gen kernels for MXFP8 on sm_100 and sm_103, routing included.

vLLM's class `TrtLlmFp8ExpertsMonolithic` passes the activation's type for MXFP8, and ``n_group`` and ``topk_group`` as
None where routing is not grouped; its limit on experts per token belongs to DeepSeek's FP8 format alone.
"""

from __future__ import annotations

import dataclasses

from ..core.capabilities import Rule
from ..core.problem import Problem
from ..releases import min_versions
from ._stock import EXPERTS, StockDifference
from ._stock_rules import HASHED_ROUTING_RULE
from .trtllm_mxfp8 import RULES, TrtllmMxfp8

ROUTING_METHODS = ("deepseekv3", "renormalize", "renormalizenaive", "sigmoidrenorm", "sigmoid", "minimax2")
"""Routing methods that the class supports, in every release that has it (`min_versions.TRTLLM_MXFP8`)."""

# FlashInfer 0.7.2, trtllm_fused_moe_kernel_launcher.cu: limits of the routing kernel with groups.
_GROUPED_TOP_K = 8
_GROUPED_TOP_K_MANY = 22
_MANY_EXPERTS = 384
_MAX_TOP_K_GROUPS = 4


def _grouped_top_k(problem: Problem) -> int:
    return _GROUPED_TOP_K if problem.num_experts <= _MANY_EXPERTS else _GROUPED_TOP_K_MANY


def _routes_by_groups(problem: Problem) -> bool:
    return problem.routing.method == "deepseekv3"


def _groups_hold_top_k(problem: Problem) -> bool:
    """Whether a token finds enough experts in the groups that it may choose from, and all groups are alike."""
    groups, chosen = problem.routing.num_groups or 1, problem.routing.top_k_groups or 1
    return problem.num_experts % groups == 0 and problem.top_k < chosen * problem.num_experts // groups


class TrtllmMxfp8Monolithic(TrtllmMxfp8):
    """vLLM's `TrtLlmFp8ExpertsMonolithic` on MXFP8 weights and activations."""

    name = "trtllm_mxfp8_monolithic"
    monolithic = True
    stock_class = f"{EXPERTS}.trtllm_fp8_moe:TrtLlmFp8ExpertsMonolithic"
    static_priority = 10.0
    stock_differences = (
        StockDifference(
            (), "the class passes groups of 0 to a kernel that wants none", before=min_versions.TRTLLM_MXFP8
        ),
    )
    capabilities = dataclasses.replace(
        TrtllmMxfp8.capabilities,
        ungated=("relu2",),
        max_experts=512,
        routing_methods=ROUTING_METHODS,
        apply_router_weight_on_input=False,
    )
    rules = (
        *RULES,
        Rule(
            "routing.groups",
            lambda problem, device: _routes_by_groups(problem) and not problem.routing.num_groups,
            lambda problem, device: "routes by deepseekv3 only with expert groups, the layer has none",
        ),
        Rule(
            "routing.top_k_groups",
            lambda problem, device: (
                _routes_by_groups(problem) and (problem.routing.top_k_groups or 0) > _MAX_TOP_K_GROUPS
            ),
            lambda problem, device: (
                f"lets a token choose from {_MAX_TOP_K_GROUPS} groups at most, "
                f"the layer from {problem.routing.top_k_groups}"
            ),
        ),
        Rule(
            "routing.top_k",
            lambda problem, device: _routes_by_groups(problem) and problem.top_k > _grouped_top_k(problem),
            lambda problem, device: (
                f"routes by deepseekv3 to {_grouped_top_k(problem)} of {problem.num_experts} experts at most, "
                f"the layer to {problem.top_k}"
            ),
        ),
        Rule(
            "routing.group_size",
            lambda problem, device: (
                _routes_by_groups(problem) and bool(problem.routing.num_groups) and not _groups_hold_top_k(problem)
            ),
            lambda problem, device: (
                f"needs groups of one size with more experts in {problem.routing.top_k_groups} of them than a token "
                f"chooses; the layer has {problem.num_experts} experts in {problem.routing.num_groups} groups and "
                f"top-{problem.top_k}"
            ),
        ),
        HASHED_ROUTING_RULE,
    )


BACKEND = TrtllmMxfp8Monolithic()
