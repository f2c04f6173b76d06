"""The roofline of a layer: the least time it can take on a GPU.

The bound is the larger of two times: the layer's bytes at the GPU's memory bandwidth, and its multiply-adds at the
GPU's bfloat16 matrix rate. Both rates are measured (`devices.catalog.MeasuredRates`), or the data sheet's where nothing
was measured. No kernel reaches a data sheet's rates: that bound is looser.
"""

from __future__ import annotations

from ..core.problem import MX_BLOCK, Problem
from ..core.sharding import loaded_group_size
from ..devices.catalog import find_spec
from .kernel_shape import KernelShape


def active_experts(problem: Problem | KernelShape, tokens: int) -> float:
    """Expected number of experts on this rank that receive a token under uniform routing."""
    chance = 1.0 - (1.0 - problem.top_k / problem.num_experts) ** tokens
    return problem.local_experts * chance


def expert_bytes(problem: Problem) -> float:
    """Bytes of one expert's codes, scales, zero points and biases in the checkpoint."""
    rows, hidden_size, intermediate_size = problem.w13_rows, problem.hidden_size, problem.intermediate_size
    weights = rows * hidden_size + hidden_size * intermediate_size
    total = weights * problem.scheme.bits / 8
    if problem.scheme.name == "wna16":
        group_size = loaded_group_size(problem)
        per_row = (hidden_size / group_size, intermediate_size / group_size) if group_size > 0 else (1, 1)
        scales = rows * per_row[0] + hidden_size * per_row[1]
        total += scales * (2 + (problem.scheme.bits / 8 if problem.scheme.zero_points else 0))
    else:
        total += weights / MX_BLOCK
    return total + (2 * (rows + hidden_size) if problem.has_bias else 0)


def roofline_us(problem: Problem, tokens: int, gpu: str) -> float | None:
    """Least time of a layer in microseconds under uniform routing; None for a GPU that the catalog does not describe.

    Args:
        problem: the layer.
        tokens: rows of the input.
        gpu: product name of the GPU.
    """
    spec = find_spec(gpu)
    if spec is None:
        return None
    if spec.measured is not None:
        gb_s, tflops = spec.measured.copy_gb_s, spec.measured.bf16_tflops
    else:
        gb_s, tflops = spec.memory_bandwidth_gb_s, spec.peak_tflops.get("bf16", 0.0)
    if not (gb_s and tflops):
        return None
    moved_bytes = active_experts(problem, tokens) * expert_bytes(problem)
    moved_bytes += 2 * 2 * tokens * problem.hidden_size  # 16-bit input read once, output written once
    local_share = problem.local_experts / problem.num_experts
    weights = problem.w13_rows * problem.hidden_size + problem.hidden_size * problem.intermediate_size
    operations = 2.0 * tokens * problem.top_k * local_share * weights
    return max(moved_bytes / (gb_s * 1e9), operations / (tflops * 1e12)) * 1e6
