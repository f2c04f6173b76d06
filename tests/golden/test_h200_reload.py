"""What `tests/gpu/reload.py` found on an H200: new weights under captured CUDA graphs, and sleep; and what holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parents[1] / "golden/h200").glob("reload-vllm-*.json"))
STEPS = {"back", "sleep 2", "sleep 1"}


def cases(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())["cases"]
    return found


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_are_results() -> None:
    assert [file.stem for file in FILES] == ["reload-vllm-0.33.0"]


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    conditions = json.loads(file.read_text())["conditions"]
    assert conditions["device"] == "NVIDIA H200"
    assert conditions["vllm"] == file.stem.removeprefix("reload-vllm-")
    assert {"torch", "tolerance", "date", "command"} <= conditions.keys()


@every_file
def test_checkpoints_of_mxfp8_and_mxfp4_and_online_weights_were_reloaded(file: Path) -> None:
    backends = {name: case["backends"] for name, case in cases(file).items()}
    assert backends["mxfp8:hopper_mxfp8"] == backends["online:hopper_mxfp8"] == ["hopper_mxfp8"]
    # The second one's layers have rows that Marlin pads, which the checkpoint's loaders do not see.
    assert backends["mxfp8:marlin_mxfp8"] == backends["padded:marlin_mxfp8"] == ["marlin_mxfp8"]
    assert len(backends["mxfp4:auto"]) == 1


@every_file
def test_the_same_weights_said_the_same_and_no_kernel_tensor_moved(file: Path) -> None:
    tolerance = json.loads(file.read_text())["conditions"]["tolerance"]
    for name, case in cases(file).items():
        assert case["passed"] and "ended" not in case and case["recites"], name
        assert case["differences"].keys() == STEPS, name
        assert all(each <= tolerance for each in case["differences"].values()), name
        # The other checkpoint would have been seen.
        assert case["between_checkpoints"] > 10 * tolerance, name
        assert case["moved"] == {}, name
