"""OpenAI's triton_kernels for MXFP4, which routes itself: stock's choice for gpt-oss on Hopper.

The kernel takes the largest logits and their softmax; vLLM's class reads from the layer's routing method whether the
softmax comes before or after, and refuses the methods that are neither.
"""

from __future__ import annotations

import dataclasses

from ..oracle.problem import Device, Problem
from ._limits import Rule
from ._mxfp4 import alternating_rule
from ._triton_kernels import RULES, TritonKernels

_METHODS = ("renormalize", "renormalizenaive")


def _more_than_softmax(problem: Problem) -> list[str]:
    """What the layer's routing asks and the kernel does not do."""
    routing = problem.routing
    return [
        words
        for words, asked in (
            (f"{routing.scoring} scores", routing.scoring != "softmax"),
            (f"{routing.num_groups} groups of experts", routing.num_groups is not None),
            ("a correction bias", routing.correction_bias),
            ("experts from a table over token ids", routing.hashed),
        )
        if asked
    ]


def _spread(problem: Problem, device: Device) -> bool:
    return problem.parallel.dp > 1


class TritonMxfp4Monolithic(TritonKernels):
    """vLLM's `OAITritonMxfp4ExpertsMonolithic`."""

    name = "triton_mxfp4_monolithic"
    vllm_names = ("triton",)
    stock_class = "OAITritonMxfp4ExpertsMonolithic"
    place = "triton_monolithic"
    monolithic = True
    limits = dataclasses.replace(TritonKernels.limits, routing_methods=_METHODS)
    rules = (
        *RULES,
        alternating_rule("OAITritonMxfp4ExpertsMonolithic"),
        Rule(
            "routing.softmax",
            lambda problem, device: bool(_more_than_softmax(problem)),
            lambda problem, device: f"routes by softmax alone; the layer asks {', '.join(_more_than_softmax(problem))}",
        ),
        Rule(
            "data_parallel",
            _spread,
            lambda problem, device: (
                f"routes before tokens are exchanged; {problem.parallel.dp} data-parallel ranks exchange routed ones"
            ),
        ),
    )


BACKEND = TritonMxfp4Monolithic()
