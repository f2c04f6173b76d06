"""Features of vLLM on a CPU with a model whose experts run through the plugin: it says what float32 transformers says.

Elsewhere in this folder: compiled mode (`test_served_model`), tensor and expert parallelism and vLLM's own reload over
two ranks (`test_online_ranks`, `test_gpt_oss_ranks`), ranks that differ (`test_ranks`), reloads that fail
(`run_lifecycle`). `tests.lib.served` derives the tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import LAYERS, LOGIT, Expected, Results, assert_says, tolerance

PROMPT = [*range(5, 25), *range(5, 25)]
"""Longer than a block of the cache and than a chunk; its second half repeats the first, for drafts by n-grams."""
TOKENS = 5
OTHER = {
    "two_engines": "other", "reload_by_iterator": "other", "reload_by_layer": "other", "reload_attention": "mixed",
    "reload_and_back": "other",
}  # fmt: skip
"""Features that say something of another checkpoint, and of which."""
FEATURES = (
    "prefix_caching", "chunked_prefill", "speculative_decoding", "prompt_logprobs", "embeddings", "two_engines",
    "async_engine", "over_http", "in_a_batch", "reload_by_iterator", "reload_by_layer", "reload_attention",
    "reload_and_back",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """Two models, and the first with the attention of the second."""
    from safetensors.torch import load_file

    made = {
        name: checkpoints.write_checkpoint(folder / name, quantize_linears=False, seed=seed)
        for seed, name in enumerate(("plain", "other"))
    }
    theirs = load_file(made["other"] / "model.safetensors")

    def take_attention(tensors: dict[str, Any]) -> None:
        tensors.update({name: tensor for name, tensor in theirs.items() if ".self_attn." in name})

    return made | {"mixed": checkpoints.rewrite_tensors(made["plain"], folder / "mixed", take_attention)}


@pytest.fixture(scope="module")
def found(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    paths = {"checkpoint": str(models["plain"]), "other": str(models["other"])}
    jobs = {name: {"feature": name, "prompt": PROMPT, "tokens": TOKENS, **paths} for name in FEATURES}
    # On a CPU vLLM's substitutes for Triton kernels of drafts are registered once: no second engine starts after them.
    alone = {"speculative_decoding": jobs.pop("speculative_decoding")}
    return {
        name: result
        for part in (jobs, alone)
        for name, result in vllm_runner.run("run_features.py", part, tmp_path_factory.mktemp("features")).items()
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    return {name: reference.greedy(reference.load_transformers(path), PROMPT, TOKENS) for name, path in models.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_is_said_equals_transformers(found: Results, expected: Expected, feature: str) -> None:
    result = found[feature]
    assert "error" not in result, result["error"]
    assert result.get("served", LAYERS) == LAYERS
    pairs = [(each, expected["plain"]) for each in result.get("said", ())]
    pairs += [(each, expected[OTHER[feature]]) for each in result.get("said_other", ())]
    assert pairs or feature in ("prompt_logprobs", "embeddings")
    for said, continuation in pairs:
        assert_says(said, continuation, tolerance("float32"), PROMPT)


def test_the_models_can_be_told_apart(expected: Expected) -> None:
    start = len(PROMPT) - 1
    for one, two in (("plain", "other"), ("plain", "mixed"), ("other", "mixed")):
        apart = np.abs(expected[one].logprobs[start] - expected[two].logprobs[start]).max()
        assert apart > 2 * tolerance("float32")


def test_the_prompts_second_time_comes_from_the_cache(found: Results) -> None:
    assert found["prefix_caching"]["cached"] == 32


def test_logprobs_of_the_prompt(found: Results, expected: Expected) -> None:
    rows = np.array(found["prompt_logprobs"]["prompt_logprobs"])
    theirs = expected["plain"].logprobs[: len(PROMPT) - 1]
    assert rows.shape == theirs.shape and np.abs(rows - theirs).max() <= tolerance("float32")


def test_an_embedding_is_the_normalized_last_hidden_state(found: Results, models: dict[str, Path]) -> None:
    model: Any = reference.load_transformers(models["plain"])
    with torch.no_grad():
        state = model.model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0, -1].double().numpy()
    # The logprobs' tolerance is twice the largest logit times the relative error of the hidden state.
    allowed = tolerance("float32") / (2 * LOGIT)
    assert np.linalg.norm(found["embeddings"]["embedding"] - state / np.linalg.norm(state)) <= allowed
