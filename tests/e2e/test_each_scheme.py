"""One tiny model of each scheme, served through vLLM and the plugin, equals float32 transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lib import checkpoints, integer_checkpoints, reference, vllm_runner
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import LAYERS, PROMPT, Results, assert_says, job, tolerance

SCHEMES = ("mxfp8", "mxfp4", "wna16")
TOKENS = 2


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """MXFP8 as ModelOpt writes it, gpt-oss in MXFP4, and GPTQ with act order and zero points."""
    unquantized = checkpoints.write_checkpoint(folder / "bf16", format="bf16", dtype="float32")
    gptq = Integers("gptq", zero_points=True, act_order="group")
    return {
        "mxfp8": checkpoints.write_checkpoint(folder / "mxfp8"),
        "mxfp4": checkpoints.write_checkpoint(
            folder / "mxfp4", arch="gpt_oss", format="mxfp4", size=replace(checkpoints.Size(), top_k=4)
        ),
        "wna16": integer_checkpoints.write(unquantized, folder / "wna16", gptq, 0),
    }


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    jobs = {
        name: job(
            path,
            tokens=TOKENS,
            oracle={"backend": "emulation", "activations": "16bit"},
            engine={"num_gpu_blocks_override": 64},  # else a CPU's cache is 1 GiB, filled with zeros
        )
        for name, path in models.items()
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_and_logprobs_equal_transformers(served: Results, models: dict[str, Path], scheme: str) -> None:
    path = models[scheme]
    exact = path.with_name(f"{path.name}-exact") if scheme == "wna16" else path
    expected = reference.greedy(reference.load_transformers(exact), PROMPT, TOKENS)
    assert_says(served[scheme], expected, tolerance("float32"))
    record = served[scheme]["layers"]
    assert record["served"] == LAYERS
    assert {group["problem"]["scheme"]["name"] for group in record["groups"]} == {scheme}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weights_go_with_the_engine(served: Results, scheme: str) -> None:
    """vLLM keeps loaders for the life of the process; one that holds its layer would keep the weights, too."""
    assert served[scheme]["digests"] and served[scheme]["kept"] == []
