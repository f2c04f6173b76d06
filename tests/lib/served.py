"""Comparison of a tiny model, served through vLLM and the plugin, with float32 transformers.

Tolerance. Both sides compute the same real function; they differ in roundings alone. About 12 results per layer are
rounded to the working precision (two norms, q, k, v, attention, its projection, router, two products, activation, sum
over experts, residual), plus embedding and head: n = 12 * layers + 2 roundings with relative error u each. Independent
errors add as sqrt(n) u; dot products of K terms in another order add sqrt(K) u for float32. A logit is at most about 6
here (the head is scaled so), so a logprob may differ by 6 sqrt(n) (1 + sqrt(K)) u, doubled because a logprob is the
difference of two logits. With activations in MXFP8, a value that differs by e on the two sides may round to
neighboring codes, s = 2**-3 of itself apart: a share e / s of K values does, and moves the vector by sqrt(e s), or,
when e is so small that hardly any does, by the one that does, s / sqrt(K). Two vectors are quantized per layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib import reference

LAYERS, HIDDEN, LOGIT = 2, 128, 6.0
ROUNDINGS = 12 * LAYERS + 2
PROMPT = [5, 6, 7, 8, 9, 10]

Results = dict[str, dict[str, Any]]
"""What `vllm_runner.run` returns."""
Expected = dict[str, reference.Continuation]
"""What transformers say, by a model's name."""


def job(checkpoint: Path, dtype: str = "float32", tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A job of `tests/e2e/run_generate.py` with `PROMPT`."""
    return {"checkpoint": str(checkpoint), "dtype": dtype, "prompt": PROMPT, "tokens": tokens, **more}


def tolerance(dtype: str, mxfp8_activations: bool = False) -> float:
    """Largest difference of a logprob that roundings explain; see the module."""
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[dtype]
    # In bfloat16 sums are in float32: only results are rounded.
    order = 1 + math.sqrt(HIDDEN) if dtype == "float32" else 1
    spread = math.sqrt(ROUNDINGS) * order * unit
    flips = 0.0
    if mxfp8_activations:
        step = 2.0**-3
        flips = math.sqrt(2 * LAYERS) * max(math.sqrt(spread * step), step / math.sqrt(HIDDEN))
    return 2 * LOGIT * (spread + flips)


def difference(result: dict[str, Any], continuation: reference.Continuation, prompt: list[int] = PROMPT) -> float:
    """Largest difference of a logprob, over the positions generated after a prompt and the whole vocabulary."""
    assert "error" not in result, result["error"]
    start = len(prompt) - 1
    found = np.array(result["logprobs"])
    largest = float(np.abs(found - continuation.logprobs[start : start + len(found)]).max())
    print(f"largest difference of a logprob {largest:.2e}")
    return largest


def assert_says(
    result: dict[str, Any], continuation: reference.Continuation, allowed: float, prompt: list[int] = PROMPT
) -> None:
    """Asserts that a served model says what transformers say: the same tokens, with logprobs within a tolerance."""
    assert difference(result, continuation, prompt) <= allowed
    assert result["tokens"] == continuation.tokens
