"""`verify` reads scales of MXFP4 that a file stores as numbers, as a server does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="reads weights for vLLM's layers")

from tests.lib import cli
from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mxfp4") / "model", format="mxfp4", size=Size(layers=1))


def as_numbers(folder: Path, to: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """The checkpoint with other scales: `change` gets them as numbers."""

    def edit(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name and name.endswith("scale"):
                tensors[name] = change(torch.exp2(tensor.view(torch.uint8).to(torch.float32) - 127))

    return rewrite_tensors(folder, to, edit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_powers_of_two_are_read(codes: Path, tmp_path: Path, dtype: torch.dtype, run: cli.Run) -> None:
    found = run("verify", as_numbers(codes, tmp_path / "model", lambda numbers: numbers.to(dtype)), "--json")
    assert found.status == 0, found.err
    assert [each["status"] for each in found.json["layers"]] == ["passed"]


def test_numbers_that_a_server_would_round_are_damage(codes: Path, tmp_path: Path, run: cli.Run) -> None:
    found = run("verify", as_numbers(codes, tmp_path / "model", lambda numbers: (numbers * 1.4).bfloat16()), "--json")
    assert found.status == 1
    (layer,) = found.json["layers"]
    assert layer["status"] == "damaged" and layer["fault"].startswith("expert 0, "), layer
    for words in (".0.gate_proj.weight_scale (model.safetensors): ", "stored as bfloat16", "no powers of two"):
        assert words in layer["fault"]
