"""A server's refusal of layers of which the files hold no expert, and what it leaves alone."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint
from vllm_moe_oracle.checkpoint.files import CheckpointFiles, read_checkpoint
from vllm_moe_oracle.errors import CheckpointError, DamagedCheckpointError
from vllm_moe_oracle.methods import absent_experts, load_caches, load_summary
from vllm_moe_oracle.releases.supported import NEWEST

HELD, ABSENT = (f"model.layers.{index}.mlp.experts" for index in range(2))
RULE = f"{ABSENT}: the files hold no expert of 1 of 2 MoE layers, and those of {HELD}"


@dataclass
class Served:
    """The adapter, as far as it is asked."""

    model: str | None
    has_checkpoint: bool = True

    def served_model(self) -> tuple[str, int] | None:
        return None if self.model is None else (self.model, 1)

    def loads_no_checkpoint(self) -> bool:
        return not self.has_checkpoint

    def version(self) -> str:
        return NEWEST


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("absent")

    def drop(tensors: dict[str, object]) -> None:
        for name in [each for each in tensors if each.startswith(f"{ABSENT}.")]:
            del tensors[name]

    return rewrite_tensors(write_checkpoint(parent / "whole", size=Size(experts=3, top_k=2)), parent / "part", drop)


def serve(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr(absent_experts, "current_adapter", lambda: served)


def test_a_layer_that_the_folder_lacks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Served(str(folder)))
    with pytest.raises(DamagedCheckpointError, match=RULE):
        absent_experts.refuse(ABSENT)
    absent_experts.refuse(HELD)
    absent_experts.refuse("model.layers.2.mlp.experts")  # such as a draft's


def test_files_are_read_once_a_load(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: str) -> CheckpointFiles:
        read.append(path)
        return read_checkpoint(path)

    monkeypatch.setattr(absent_experts, "read_checkpoint", counted)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "num_hidden_layers": 2}))
    for path in (folder, tmp_path):
        serve(monkeypatch, Served(str(path)))
        for index in (0, 2, 3):
            absent_experts.refuse(f"model.layers.{index}.mlp.experts")
    assert read == [str(folder), str(tmp_path)]
    load_caches.end_load()
    absent_experts.refuse(HELD)
    assert read == [str(folder), str(tmp_path), str(tmp_path)]


@pytest.mark.parametrize("layer", [HELD, ABSENT])
def test_an_error_of_its_tensors_is_replaced(layer: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Served(str(folder)))
    words = RULE if layer == ABSENT else "^never loaded$"
    with pytest.raises(CheckpointError, match=words), absent_experts.refused(layer):
        raise CheckpointError("never loaded")


def test_what_is_not_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for served in (Served(None), Served("some/model"), Served(str(folder), has_checkpoint=False)):
        serve(monkeypatch, served)
        absent_experts.refuse(ABSENT)


def test_a_config_that_only_vllm_reads_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "num_hidden_layers": 2}))
    serve(monkeypatch, Served(str(tmp_path)))
    monkeypatch.setattr(load_summary, "_warned", set())
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        absent_experts.refuse(ABSENT)
    assert f"{ABSENT}: whether the files hold its experts is not known: " in caplog.text
