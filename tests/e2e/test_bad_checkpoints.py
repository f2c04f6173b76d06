"""Damaged checkpoints through vLLM's own loaders: each gives one clear error that names layer, tensor and numbers."""

from __future__ import annotations

from typing import Any

import checkpoints
import pytest
import runner
import torch

pytest.importorskip("vllm", reason="loading needs vLLM")

EXPERT = "model.layers.1.mlp.experts.3."


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(EXPERT + name)


def put(name: str, make: Any) -> Any:
    return lambda tensors: tensors.update({EXPERT + name: make(tensors[EXPERT + name])})


LAYER = "model.layers.1.mlp.experts"
FAULTS = {
    "missing scale": (
        drop("up_proj.weight_scale"),
        f"{LAYER}: 256 of 4096 scales in w13_weight_scale are NaN (e8m0 code 255). The checkpoint is damaged, or a "
        "scale was never loaded",
    ),
    "missing weight": (
        drop("gate_proj.weight"),
        f"{LAYER}: the gate projection of local expert 3 was never loaded. The checkpoint lacks it, or names it "
        "differently (1 such in w13_weight)",
    ),
    "weight in bfloat16": (
        put("down_proj.weight", lambda tensor: tensor.to(torch.bfloat16)),
        "the checkpoint stores it as bfloat16, mxfp8 as float8_e4m3fn. The checkpoint is not in the format that its "
        "config names",
    ),
    "scale in float32": (
        put("down_proj.weight_scale", lambda tensor: tensor.to(torch.float32)),
        "the checkpoint stores it as float32, mxfp8 as uint8",
    ),
    "scale per row": (
        put("gate_proj.weight_scale", lambda tensor: tensor[:, :1].clone()),
        "an expert's tensor has shape [64, 1], expected [64, 4]",
    ),
    "transposed weight": (
        put("up_proj.weight", lambda tensor: tensor.t().contiguous()),
        "an expert's tensor has shape [128, 64], expected [64, 128]",
    ),
    "scale as e8m0": (put("up_proj.weight_scale", lambda tensor: tensor.view(torch.float8_e8m0fnu)), ""),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bad")
    plain = checkpoints.write_checkpoint(folder / "plain")
    made = {}
    for number, (name, (change, _)) in enumerate(FAULTS.items()):
        path = checkpoints.rewrite_tensors(plain, folder / str(number), change)
        made[name] = {"checkpoint": str(path), "dtype": "bfloat16", "prompt": [5, 6, 7], "tokens": 1}
    return runner.run("generate.py", made, folder)


@pytest.mark.parametrize("name", [name for name, (_, message) in FAULTS.items() if message])
def test_a_damaged_checkpoint_is_refused_with_the_tensor_and_the_numbers(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    assert FAULTS[name][1] in outcomes[name]["error"]
    assert LAYER in outcomes[name]["error"]


def test_scales_stored_as_e8m0_numbers_are_the_bytes_that_they_are(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    assert "error" not in outcomes["scale as e8m0"]
    assert outcomes["scale as e8m0"]["tokens"] == [8]
