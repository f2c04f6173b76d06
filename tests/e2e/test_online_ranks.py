"""Two ranks of a real vLLM whose model's loader offers each rank the other's experts: quantized while they load, and in
a reload. What is served equals float32 transformers, as one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, assert_says, job, tolerance

TOKENS = 4
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
ONLINE = {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}
THREADS = {"enable_multithread_load": True}
"""Several threads read files, which then arrive in any order."""
CASES: dict[str, tuple[checkpoints.Format, dict[str, Any]]] = {
    "online": ("bf16", ONLINE | EXPERTS),
    "online, shards": ("bf16", ONLINE | {"tensor_parallel_size": 2, "model_loader_extra_config": THREADS}),
    "checkpoint": ("mxfp8", EXPERTS),
}


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[tuple[str, int], Path]:
    """Two models in each format, by format and seed."""
    found = {
        (format, seed): checkpoints.write_checkpoint(folder / f"{format}-{seed}", format=format, seed=seed)
        for format in ("bf16", "mxfp8")
        for seed in (0, 1)
    }
    for seed in (0, 1):
        split_by_layer(found["bf16", seed])
    return found


def split_by_layer(folder: Path) -> None:
    """Writes a checkpoint's tensors into one file for each layer, and one for the others."""
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in load_file(single).items():
        layer = name.partition("layers.")[2].partition(".")[0] or "rest"
        parts.setdefault(layer, {})[name] = tensor
    single.unlink()
    for layer, tensors in parts.items():
        save_file(tensors, folder / f"model-{layer}.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def served(models: dict[tuple[str, int], Path], folder: Path) -> dict[str, Any]:
    jobs = {
        name: job(models[format, 0], "bfloat16", TOKENS, reload=str(models[format, 1]), engine=engine)
        for name, (format, engine) in CASES.items()
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.mark.parametrize("seed", [0, 1], ids=["loaded", "reloaded"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_say_what_transformers_say(
    served: dict[str, Any], models: dict[tuple[str, int], Path], name: str, seed: int
) -> None:
    assert "error" not in served[name], served[name]["error"]
    said = served[name]["reloaded"] if seed else served[name]
    model = reference.load_transformers(models["mxfp8", seed], quantize_activations="ceil")
    expected = reference.greedy(model, PROMPT, TOKENS)
    assert_says(said, expected, tolerance("bfloat16", True))
