"""Entries of compressed-tensors for some experts, which vLLM does not look up: the files decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="writes tensors")

from safetensors.torch import save_file

from tests.lib import cli
from tests.lib.configs import compressed, group, quantized

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
EXPERTS, LAYERS = 4, 2
PACKED = {"format": "pack-quantized"}
BY_EIGHT = group({**INT4, "num_bits": 8}, None, (r"re:.*experts\.3\..*",)) | PACKED
ENTRIES = {
    "ignore": {"ignore": ["lm_head", r"re:.*experts\.3\..*"]},
    "ignore names": {"ignore": [f"model.layers.{layer}.mlp.experts.3.{each}_proj" for layer in range(LAYERS)
                                for each in ("gate", "up", "down")]},
}  # fmt: skip


def checkpoint(folder: Path, changes: dict[str, Any], plain: tuple[int, ...] = ()) -> Path:
    """Files with packed experts; those of the numbers in `plain` are not quantized."""
    found = compressed(group(INT4, None) | PACKED)
    groups = [*found["config_groups"].values(), *changes.pop("groups", ())]
    found |= PACKED | {"config_groups": {str(at): each for at, each in enumerate(groups)}} | changes
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(quantized(quantization_config=found, **sizes)))
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                matrix = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                if expert in plain:
                    tensors[f"{matrix}.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)
                else:
                    tensors[f"{matrix}.weight_packed"] = torch.zeros(2, 2, dtype=torch.int32)
                    tensors[f"{matrix}.weight_scale"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("entries", [*ENTRIES, "targets"])
def test_an_entry_without_effect_is_noted_once_for_all_layers(entries: str, tmp_path: Path, run: cli.Run) -> None:
    folder = checkpoint(tmp_path, dict(ENTRIES.get(entries, {"groups": [BY_EIGHT]})))
    found = run("explain", folder, "--device", "h200", "--json")
    assert found.status == 0, found.err
    assert [group["problem"]["scheme"]["bits"] for group in found.json["groups"]] == [4]
    (note,) = [each for each in found.json["notes"] if "looks up expert 0 alone" in each]
    assert "model.layers.0-1.mlp.experts" in note and "expert 3 differs from others" in note


@pytest.mark.parametrize("entries", ENTRIES)
def test_an_expert_that_the_files_leave_in_16_bits_is_refused(entries: str, tmp_path: Path, run: cli.Run) -> None:
    found = run("explain", checkpoint(tmp_path, dict(ENTRIES[entries]), plain=(3,)), "--device", "h200")
    assert found.status == 2 and "expert 3 differs from others: it is stored as not quantized" in found.err


def test_expert_0_decides_for_vllm(tmp_path: Path, run: cli.Run) -> None:
    """Without it the layer is not quantized, and the files of the others are."""
    changes = {"ignore": [r"re:.*experts\.0\..*"]}
    found = run("explain", checkpoint(tmp_path, changes), "--device", "h200")
    assert found.status == 2 and "differs from others" in found.err


def test_without_files_the_entry_is_refused(tmp_path: Path, run: cli.Run) -> None:
    folder = checkpoint(tmp_path, dict(ENTRIES["ignore"]))
    (folder / "model.safetensors").unlink()
    found = run("explain", folder, "--device", "h200")
    assert found.status == 2 and "expert 3 differs from others" in found.err
