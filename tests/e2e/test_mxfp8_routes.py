"""Every spelling of an MXFP8 checkpoint, served through vLLM and the plugin.

The same weights reach the same oracle, and say the same, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, Results, assert_says, job, tolerance

TOKENS = 6

TAGS = ("modelopt", "modelopt_mxfp8", "mxfp8", "legacy", "legacy_producer", "compressed-tensors")
OTHERS = [tag for tag in TAGS if tag != "modelopt"]
ONE_SCALE_UP = "one scale of an expert up"


def one_scale_up(tensors: dict[str, Any]) -> None:
    """Of the down projections of one expert, in its first row."""
    for name in tensors:
        if name.endswith(".experts.3.down_proj.weight_scale"):
            tensors[name][0] += 1


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    found = {tag: checkpoints.write_checkpoint(folder / tag, tag=tag) for tag in TAGS}
    found[ONE_SCALE_UP] = checkpoints.rewrite_tensors(found["mxfp8"], folder / "fault", one_scale_up)
    return found


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    jobs = {name: job(path, "bfloat16", TOKENS) for name, path in models.items()}
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.mark.parametrize("tag", TAGS)
def test_every_layer_is_decided_by_the_oracle(served: Results, tag: str) -> None:
    assert "error" not in served[tag], served[tag]["error"]
    record = served[tag]["layers"]
    assert record["served"] == 2
    packing = "compressed-tensors" if tag == "compressed-tensors" else "modelopt"
    assert [
        (group["problem"]["scheme"]["name"], group["problem"]["scheme"]["packing"]) for group in record["groups"]
    ] == [("mxfp8", packing)]
    assert [group["problem"]["scheme"]["activations"] for group in record["groups"]] == ["mxfp8"]


@pytest.mark.parametrize("tag", OTHERS)
def test_all_quantization_tags_give_identical_logprobs(served: Results, tag: str) -> None:
    assert served[tag]["tokens"] == served["modelopt"]["tokens"]
    np.testing.assert_array_equal(served[tag]["logprobs"], served["modelopt"]["logprobs"])


def test_one_changed_scale_changes_logprobs(served: Results) -> None:
    assert not np.array_equal(served[ONE_SCALE_UP]["logprobs"], served["mxfp8"]["logprobs"])


def test_it_is_what_transformers_say(served: Results, models: dict[str, Path]) -> None:
    model = reference.load_transformers(models["modelopt"], quantize_activations="ceil")
    expected = reference.greedy(model, PROMPT, TOKENS)
    assert_says(served["modelopt"], expected, tolerance("bfloat16", True))
