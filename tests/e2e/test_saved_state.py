"""vLLM's `ShardedStateLoader` saves a model of each scheme; loading it into quantized experts is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, integer_checkpoints, vllm_runner
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import PROMPT

FAMILIES = ("mxfp8", "gpt_oss", "gptq", "awq", "compressed-tensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saved_state")
    plain = checkpoints.write_checkpoint(folder / "bf16", format="bf16", dtype="float32")
    integers = {
        "gptq": Integers("gptq", zero_points=True, act_order="group"),
        "awq": Integers("awq", zero_points=True),
        "compressed-tensors": Integers("compressed-tensors", group=64),
    }
    models: dict[str, Path] = {
        "mxfp8": checkpoints.write_checkpoint(folder / "mxfp8"),
        "gpt_oss": checkpoints.write_checkpoint(
            folder / "gpt_oss", arch="gpt_oss", format="mxfp4", size=replace(checkpoints.Size(), top_k=4)
        ),
        **{name: integer_checkpoints.write(plain, folder / name, kind, 0) for name, kind in integers.items()},
    }
    usual = {"dtype": "float32", "prompt": PROMPT, "tokens": 2, "oracle": {"backend": "emulation"}}
    jobs = {
        name: usual | {"checkpoint": str(path), "folder": str(folder / f"{name}-saved")}
        for name, path in models.items()
    }
    return vllm_runner.run("run_saved_state.py", jobs, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_served_model_is_saved_and_its_state_is_refused(results: dict[str, Any], family: str) -> None:
    found = results[family]
    assert "saved" in found, found["error"]
    assert found["flat"] and len(found["saved"]) >= 4 and all(found["saved"].values())
    assert "a saved state holds the kernels' tensors" in found["error"]
    assert "Load the original checkpoint, with another --load-format" in found["error"]
