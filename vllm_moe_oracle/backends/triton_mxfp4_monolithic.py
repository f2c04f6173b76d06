"""OpenAI's triton_kernels for MXFP4, routing included: vLLM's choice for gpt-oss on Hopper.

The kernel takes the largest logits and their softmax. vLLM's class reads from the layer's routing method whether the
softmax comes before or after, and refuses all other methods.
"""

from __future__ import annotations

import dataclasses

from ..core.capabilities import Rule
from ..core.problem import Problem
from ._stock import EXPERTS
from ._stock_rules import gpt_oss_activation_rule
from ._triton_kernels import RULES, TritonKernelsBackend

ROUTING_METHODS = ("renormalize", "renormalizenaive")


def _unsupported_routing(problem: Problem) -> list[str]:
    """What the layer's routing needs and the kernel does not do."""
    routing = problem.routing
    return [
        words
        for words, asked in (
            (f"{routing.scoring} scores", routing.scoring != "softmax"),
            (f"{routing.num_groups} group{'s' * (routing.num_groups != 1)} of experts", routing.num_groups is not None),
            ("a correction bias", routing.correction_bias),
            ("experts from a table over token ids", routing.hash_routing),
        )
        if asked
    ]


class TritonMxfp4Monolithic(TritonKernelsBackend):
    """vLLM's `OAITritonMxfp4ExpertsMonolithic`."""

    name = "triton_mxfp4_monolithic"
    vllm_names = ("triton",)
    stock_class = f"{EXPERTS}.gpt_oss_triton_kernels_moe:OAITritonMxfp4ExpertsMonolithic"
    static_priority = 30.0
    sm120_priority = 62.0
    monolithic = True
    capabilities = dataclasses.replace(TritonKernelsBackend.capabilities, routing_methods=ROUTING_METHODS)
    rules = (
        *RULES,
        gpt_oss_activation_rule("OAITritonMxfp4ExpertsMonolithic"),
        Rule(
            "routing.softmax",
            lambda problem, device: bool(_unsupported_routing(problem)),
            lambda problem, device: (
                f"routes by softmax alone; the layer asks for {', '.join(_unsupported_routing(problem))}"
            ),
        ),
        Rule(
            "data_parallel",
            lambda problem, device: problem.parallel.dp > 1,
            lambda problem, device: (
                f"routes before tokens are exchanged; {problem.parallel.dp} data-parallel ranks exchange routed ones"
            ),
        ),
    )


BACKEND = TritonMxfp4Monolithic()
