"""Compiles this project's kernels before anybody waits for them.

A kernel is compiled once for each configuration of tiles, and that depends on the number of tokens. Small numbers are
run while a layer is loaded, as long as their scratch memory is little beside what converting an expert takes; larger
ones with the first call that is as large as any, which in vLLM is the one that finds out how much memory a step needs.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ..oracle.problem import Problem

if TYPE_CHECKING:
    from ..kernels.weights import OwnWeights

logger = logging.getLogger("vllm.moe_oracle")

LOADING_BYTES = 40 * 2**20
"""Scratch memory of the calls that are made while a layer is loaded."""

_EVERY = 1024
"""Up to this number of tokens every one is asked for its tiles; beyond, every `_STEP`-th."""
_STEP = 64

_ready: dict[Any, set[int]] = {}
"""Numbers of tokens that are ready, by everything else that a kernel is compiled for."""


def token_counts(most: int) -> list[int]:
    """Numbers of tokens between which tiles do not change, ascending, up to `most`."""
    return sorted({*range(1, min(most, _EVERY) + 1), *range(_EVERY, most + 1, _STEP), most})


def warm_up(weights: OwnWeights, problem: Problem, counts: list[int], *, quantise: bool = False) -> None:
    """Runs what calls with these numbers of tokens run, on zeros; nothing is run twice for layers that are alike.

    Args:
        weights: of the layer, on a GPU.
        problem: the layer.
        counts: numbers of tokens, ascending.
        quantise: with activations rounded to MXFP8.
    """
    import torch

    from ..kernels.fused_moe import warmup

    activation, device = problem.activation, weights.w13.codes.device
    key = (
        weights.format, weights.group, weights.dtype, weights.gated, weights.experts, weights.hidden,
        weights.intermediate, problem.scheme.zero_points, problem.has_bias, problem.top_k, activation.name,
        activation.limit is None, problem.parallel.ep > 1, problem.batch_invariant, device,
        quantise,
    )  # fmt: skip
    done = _ready.setdefault(key, set())
    missing = [count for count in counts if count not in done]
    if not missing:
        return
    places = None
    if problem.parallel.ep > 1:
        places = torch.arange(problem.num_experts, dtype=torch.int32, device=device)
        places[problem.local_experts :] = -1
    start = time.perf_counter()
    variants = warmup(
        weights,
        problem.top_k,
        missing,
        activation=activation.name,
        limit=activation.limit,
        expert_map=places,
        quantise_activations=quantise,
        batch_invariant=problem.batch_invariant,
    )
    done.update(missing)
    logger.info(
        "own kernels for %s weights of %d experts, %d x %d, up to %d tokens: %d configurations ready in %.1f s "
        "(compiled, or read from Triton's cache, which lasts across starts)",
        weights.format, weights.experts, weights.hidden, weights.intermediate, missing[-1], variants,
        time.perf_counter() - start,
    )  # fmt: skip
