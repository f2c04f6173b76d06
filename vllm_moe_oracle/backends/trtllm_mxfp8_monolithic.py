"""FlashInfer's TRTLLM-gen kernels for MXFP8 on sm_100 and sm_103, routing included.

vLLM's class `TrtLlmFp8ExpertsMonolithic` passes the activation's type for MXFP8, and ``n_group`` and ``topk_group`` as
None where routing is not grouped; its limit on experts per token belongs to DeepSeek's FP8 format alone.
"""

from __future__ import annotations

from ..oracle.problem import Device, Problem
from ._limits import Rule
from ._trtllm import RULES, Trtllm, limits

ROUTING_METHODS = ("deepseekv3", "renormalize", "renormalizenaive", "sigmoidrenorm", "sigmoid", "minimax2")
"""What the class says that its kernel routes by, in every release from 0.23.0."""

# FlashInfer 0.7.2, trtllm_fused_moe_kernel_launcher.cu: limits of the routing kernel with groups.
_GROUPED_TOP_K = 8
_GROUPED_TOP_K_MANY = 22
_MANY_EXPERTS = 384
_MAX_TOP_K_GROUPS = 4


def _grouped_top_k(problem: Problem) -> int:
    return _GROUPED_TOP_K if problem.num_experts <= _MANY_EXPERTS else _GROUPED_TOP_K_MANY


def _grouped(problem: Problem, device: Device) -> bool:
    return problem.routing.method == "deepseekv3"


def _within_groups(problem: Problem) -> bool:
    """Whether a token finds enough experts in the groups that it may choose from, and all groups are alike."""
    groups, chosen = problem.routing.num_groups or 1, problem.routing.top_k_groups or 1
    return problem.num_experts % groups == 0 and problem.top_k < chosen * problem.num_experts // groups


class TrtllmMxfp8Monolithic(Trtllm):
    """vLLM's `TrtLlmFp8ExpertsMonolithic` on MXFP8 weights."""

    name = "trtllm_mxfp8_monolithic"
    monolithic = True
    stock_class = "TrtLlmFp8ExpertsMonolithic"
    limits = limits(ungated=("relu2",), max_experts=512, routing_methods=ROUTING_METHODS)
    rules = (
        *RULES,
        Rule(
            "routing.groups",
            lambda problem, device: _grouped(problem, device) and not problem.routing.num_groups,
            lambda problem, device: "routes by deepseekv3 only with expert groups, the layer has none",
        ),
        Rule(
            "routing.top_k_groups",
            lambda problem, device: (
                _grouped(problem, device) and (problem.routing.top_k_groups or 0) > _MAX_TOP_K_GROUPS
            ),
            lambda problem, device: (
                f"lets a token choose from {_MAX_TOP_K_GROUPS} groups at most, "
                f"the layer from {problem.routing.top_k_groups}"
            ),
        ),
        Rule(
            "routing.top_k",
            lambda problem, device: _grouped(problem, device) and problem.top_k > _grouped_top_k(problem),
            lambda problem, device: (
                f"routes by deepseekv3 to {_grouped_top_k(problem)} of {problem.num_experts} experts at most, "
                f"the layer to {problem.top_k}"
            ),
        ),
        Rule(
            "routing.group_size",
            lambda problem, device: (
                _grouped(problem, device) and bool(problem.routing.num_groups) and not _within_groups(problem)
            ),
            lambda problem, device: (
                f"needs groups of one size with more experts in {problem.routing.top_k_groups} of them than a token "
                f"chooses; the layer has {problem.num_experts} experts in {problem.routing.num_groups} groups and "
                f"top-{problem.top_k}"
            ),
        ),
        Rule(
            "routing.hashed",
            lambda problem, device: problem.routing.hashed,
            lambda problem, device: "has no routing by token ids, the layer routes by a table over them",
        ),
    )


BACKEND = TrtllmMxfp8Monolithic()
