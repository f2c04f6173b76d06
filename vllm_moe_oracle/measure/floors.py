"""The least time that a layer can take on a card: its bytes at the rate of a memory copy, its products at the rate of
the matrix units, whichever is longer. Rates are measured ones, not a data sheet's."""

from __future__ import annotations

from dataclasses import dataclass

from ..oracle.planner import loaded_group
from ..oracle.problem import MX_BLOCK, Problem


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card reaches.

    Attributes:
        copy: bytes a second of a device-to-device copy, read and written.
        products: floating-point operations a second of a large bfloat16 matrix product.
    """

    copy: float
    products: float


RATES = {"NVIDIA H200": Rates(4.3e12, 790e12)}
"""By the product's name: a copy of 1 GiB, and the product of two 8192 x 8192 matrices by cuBLAS."""


def active_experts(problem: Problem, tokens: int) -> float:
    """Expected number of this rank's experts that get a token under uniform routing."""
    chance = 1.0 - (1.0 - problem.top_k / problem.num_experts) ** tokens
    return problem.local_experts * chance


def expert_bytes(problem: Problem) -> float:
    """Bytes of one expert's codes, scales, zero points and biases, as the checkpoint has them."""
    rows, hidden, inner = problem.w13_rows, problem.hidden_size, problem.intermediate_size
    weights = rows * hidden + hidden * inner
    found = weights * problem.scheme.bits / 8
    if problem.scheme.name == "wna16":
        group = loaded_group(problem)
        scales = rows * (hidden / group if group > 0 else 1) + hidden * (inner / group if group > 0 else 1)
        found += scales * (2 + (problem.scheme.bits / 8 if problem.scheme.zero_points else 0))
    else:
        found += weights / MX_BLOCK
    return found + (2 * (rows + hidden) if problem.has_bias else 0)


def floor_us(problem: Problem, tokens: int, gpu: str) -> float | None:
    """Microseconds below which no kernel comes under uniform routing; None for a card whose rates are not known.

    Args:
        problem: the layer.
        tokens: rows of the input.
        gpu: the product's name.
    """
    rates = RATES.get(gpu)
    if rates is None:
        return None
    moved = active_experts(problem, tokens) * expert_bytes(problem)
    moved += 2 * 2 * tokens * problem.hidden_size  # the input once, the output once
    local = problem.local_experts / problem.num_experts
    weights = problem.w13_rows * problem.hidden_size + problem.hidden_size * problem.intermediate_size
    operations = 2.0 * tokens * problem.top_k * local * weights
    return max(moved / rates.copy, operations / rates.products) * 1e6
