"""A model with a layer that drafts the token after the next, over one rank and two: drafts by quantized experts and by
experts in 16 bits. What is said equals float32 transformers, and drafts are accepted while their experts are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu import ranks
from tests.lib import checkpoints, reference
from tests.lib.served import PROMPT

TOKENS = 12


def serve(path: Path, folder: Path, layers: int, engine: dict[str, Any]) -> dict[str, Any]:
    job = {
        "feature": "generate", "checkpoint": str(path), "dtype": "bfloat16", "prompt": PROMPT, "tokens": TOKENS,
        "oracle": {"activations": "16bit"}, "engine": ranks.MTP | engine, "layers": layers,
    }  # fmt: skip
    folder.mkdir()
    exact = reference.greedy(reference.load_transformers(path), PROMPT, TOKENS)
    found = ranks.serve(folder, job, 0)
    print(found["records"])
    return ranks.judge(job, found, exact, None)


ENGINES: dict[str, dict[str, Any]] = {"one": {}, "tp2": ranks.TWO, "tp2 ep": ranks.TWO | ranks.EXPERTS}
CASES = [(name, case) for name in ranks.DRAFTS for case in ENGINES if not (ranks.DRAFTS[name] and case == "tp2 ep")]
"""Not whole experts in 16 bits on each rank: vLLM 0.32's operator for CPUs ends the process there, without the plugin,
too."""


@pytest.mark.parametrize(("name", "case"), CASES)
def test_drafts_of_right_experts_are_accepted(name: str, case: str, tmp_path: Path) -> None:
    engine = ENGINES[case]
    path, _ = ranks.write_format(tmp_path, name, 0)
    row = serve(path, tmp_path / "served", 1 + (not ranks.DRAFTS[name]), engine)
    assert row["ok"] and row["accepted"] == row["drafted"] >= TOKENS // 2 - 1, row
    assert row["ranks"] == engine.get("tensor_parallel_size", 1)


def test_drafts_of_other_experts_are_not(tmp_path: Path) -> None:
    """What the test above asserts depends on the drafts' experts."""
    path, _ = ranks.write_format(tmp_path, "mxfp8 mtp", 0)

    def other_experts(tensors: dict[str, Any]) -> None:
        for name in [each for each in tensors if each.startswith("model.layers.1.mlp.experts.")]:
            expert = int(name.split(".")[5])
            if expert % 2 == 0:
                other = name.replace(f".experts.{expert}.", f".experts.{expert + 1}.")
                tensors[name], tensors[other] = tensors[other], tensors[name]

    path = checkpoints.rewrite_tensors(path, tmp_path / "swapped", other_experts)
    row = serve(path, tmp_path / "served", 2, {})
    assert row["tokens_equal"] and row["accepted"] < row["drafted"], row
