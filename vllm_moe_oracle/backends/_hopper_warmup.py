"""Compiles the kernels before the first request needs them.

Triton compiles a kernel for each tile configuration, and the configuration depends on the number of tokens. Calls with
few tokens run while a layer is loaded, as long as their workspace is small. Calls with many tokens run with vLLM's
profiling run, which determines the memory of a step.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ..core.problem import Problem

if TYPE_CHECKING:
    import torch

    from ..kernels.launch_config import ConfigTable
    from ..kernels.weights import PackedWeights

logger = logging.getLogger("vllm.moe_oracle")

MAX_LOADING_WORKSPACE = 40 * 2**20
"""Bytes of workspace of the calls that compile kernels while a layer is loaded; those that check it may use more."""

_EVERY_COUNT_UP_TO = 1024
"""Up to this number of tokens, every number is tried; beyond, every `_COUNT_STEP`-th."""
_COUNT_STEP = 64

_warm_counts: dict[Any, set[int]] = {}
"""Numbers of tokens whose kernels are compiled, by everything else that a kernel is compiled for."""


def token_counts(most: int) -> list[int]:
    """Numbers of tokens (rows of a call) up to `most`, ascending, which together run every shipped configuration."""
    return sorted(
        {*range(1, min(most, _EVERY_COUNT_UP_TO) + 1), *range(_EVERY_COUNT_UP_TO, most + 1, _COUNT_STEP), most}
    )


def warm_up(
    weights: PackedWeights,
    problem: Problem,
    counts: list[int],
    *,
    ids_dtype: torch.dtype,
    tuned: ConfigTable = (),
    quantize: bool = False,
) -> None:
    """Runs the kernels of calls with these numbers of tokens on zeros, once for all layers that compile the same.

    Args:
        weights: of the layer, on a GPU.
        problem: the layer.
        counts: numbers of tokens, ascending.
        ids_dtype: of a call's expert ids.
        tuned: configurations measured for the layer.
        quantize: activations pass through MXFP8.
    """
    import torch

    from ..kernels.fused_moe import warmup

    activation, device = problem.activation, weights.w13.codes.device
    key = (
        weights.format, weights.group, weights.dtype, weights.gated, weights.experts, weights.num_experts,
        weights.hidden, weights.intermediate, problem.scheme.zero_points, problem.has_bias, problem.top_k,
        activation.name, activation.limit is None, problem.parallel.ep > 1, problem.batch_invariant, problem.lora,
        device, tuned, quantize, ids_dtype,
    )  # fmt: skip
    done = _warm_counts.setdefault(key, set())
    missing = [count for count in counts if count not in done]
    if not missing:
        return
    expert_map = None
    if problem.parallel.ep > 1:
        expert_map = torch.arange(problem.num_experts, dtype=torch.int32, device=device)
        expert_map[problem.local_experts :] = -1
    start = time.perf_counter()
    variants = 0
    for addend in (False, True)[: 1 + problem.lora]:
        variants += warmup(
            weights,
            problem.top_k,
            missing,
            activation=activation.name,
            limit=activation.limit,
            expert_map=expert_map,
            tuned=tuned,
            quantize_activations=quantize,
            batch_invariant=problem.batch_invariant,
            addend=addend,
            ids_dtype=ids_dtype,
        )
    done.update(missing)
    logger.info(
        "moe_oracle: Hopper kernels for %s weights, %d experts, %d x %d, up to %d tokens: %d configurations ready in "
        "%.1f s (compiled, or read from Triton's cache)",
        weights.format, weights.experts, weights.hidden, weights.intermediate, missing[-1], variants,
        time.perf_counter() - start,
    )  # fmt: skip
