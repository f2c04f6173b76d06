"""Modules for multi-token prediction, whose experts `explain` lists apart: vLLM loads them as a model of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_moe_oracle import api
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import MoeLayers, find_moe_layers
from vllm_moe_oracle.cli.main import app
from vllm_moe_oracle.errors import CheckpointError

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}


def written(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / "config.json"
    data = json.loads((CONFIGS / f"{name}.json").read_text()) | {"quantization_config": MXFP8}
    file.write_text(json.dumps(data | changes))
    return file


def found(folder: Path, name: str, **changes: Any) -> MoeLayers:
    return find_moe_layers(read_checkpoint(written(folder, name, **changes)))


@pytest.mark.parametrize(("name", "first"), [("deepseek-v3", 61), ("glm-4.5", 92)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_they_follow_the_last_layer(name: str, first: int, count: int, tmp_path: Path) -> None:
    made = found(tmp_path, name, num_nextn_predict_layers=count)
    assert [problem.layer for problem in made.mtp_problems] == [
        f"model.layers.{index}.mlp.experts" for index in range(first, first + count)
    ]
    assert {problem.key() for problem in made.mtp_problems} <= {problem.key() for problem in made.problems}
    assert not any("multi-token" in note for note in made.notes)


def test_they_take_the_draft_s_backend_or_else_the_model_s(tmp_path: Path) -> None:
    path, settings = written(tmp_path, "deepseek-v3", num_nextn_predict_layers=1), api.load_settings({})
    for options, backends in (
        ({"draft_moe_backend": "Marlin"}, ("", "marlin_mxfp8")),
        ({"moe_backend": "marlin"}, ("marlin_mxfp8", "marlin_mxfp8")),
        ({"moe_backend": "marlin", "draft_moe_backend": "auto"}, ("marlin_mxfp8", "")),
    ):
        decisions = api.explain_checkpoint(path, "nvidia-h200", tp=8, settings=settings, **options)
        assert [each.problem.layer for each in decisions[-2:]] == [f"model.layers.{n}.mlp.experts" for n in (60, 61)]
        words = [f"--{name.replace('_', '-')}={word}" for name, word in options.items()]
        told = CliRunner().invoke(app, ["explain", str(path), "--device", "h200", "--tp", "8", "--json", *words])
        groups = json.loads(told.stdout)["groups"]
        assert [group["is_mtp"] for group in groups] == [False, True]
        for decision, group, expected in zip(decisions[-2:], groups, backends, strict=True):
            assert decision.backend == group["decision"]["backend"]
            assert (decision.backend == expected) if expected else (decision.why != "user")


def test_the_draft_s_backend_is_a_name_and_has_a_layer(tmp_path: Path) -> None:
    path = written(tmp_path, "glm-4.5", num_nextn_predict_layers=0)
    command = ["explain", str(path), "--device", "h200", "--draft-moe-backend"]
    told = CliRunner().invoke(app, [*command, "marlin", "--brief"])
    assert "--draft-moe-backend marlin changes nothing here: no quantized experts" in " ".join(told.output.split())
    refused = CliRunner().invoke(app, [*command, "marlni"])
    assert str(refused.exception).startswith("--draft-moe-backend: 'marlni' is not a backend. Did you mean marlin?")


def test_they_decide_for_themselves(tmp_path: Path) -> None:
    """ModelOpt often leaves them in 16 bits, or in another format than the model."""
    left_out = {**MXFP8, "ignore": ["lm_head", "model.layers.61*"]}
    made = found(tmp_path, "deepseek-v3", num_nextn_predict_layers=1, quantization_config=left_out)
    assert made.unquantized == ("model.layers.61.mlp.experts",) and not made.mtp_problems
    recipes = {f"model.layers.{index}.mlp.experts.0.gate_proj": {"quant_algo": "MXFP8"} for index in range(3, 61)}
    recipes |= {"model.layers.61.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4"}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipes}
    made = found(tmp_path, "deepseek-v3", num_nextn_predict_layers=1, quantization_config=mixed)
    assert len(made.problems) == 58 and dict(made.unsupported_formats) == {"model.layers.61.mlp.experts": "NVFP4"}


@pytest.mark.parametrize(
    ("tensors", "noted"),
    [
        ({"experts.0.gate_proj.weight": torch.bfloat16, "experts.0.gate_proj.bias": torch.bfloat16}, True),
        ({"experts.0.gate_proj.weight": torch.float8_e4m3fn, "experts.0.gate_proj.weight_scale": torch.uint8}, False),
        ({"experts.0.gate_proj.weight": torch.bfloat16, "experts.1.gate_proj.weight_scale": torch.uint8}, False),
        ({"shared_experts.gate_proj.weight": torch.bfloat16}, False),
    ],
)
def test_files_that_say_otherwise_than_the_config_are_noted(
    tensors: dict[str, torch.dtype], noted: bool, tmp_path: Path
) -> None:
    written(tmp_path, "glm-4.5")
    stored = {f"model.layers.92.mlp.{name}": torch.zeros(1, dtype=dtype) for name, dtype in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    for path, expected in ((tmp_path, noted), (tmp_path / "config.json", False)):
        made = find_moe_layers(read_checkpoint(path))
        assert [problem.layer for problem in made.mtp_problems] == ["model.layers.92.mlp.experts"]
        words = "the files hold the experts of model.layers.92.mlp.experts in 16 bits"
        assert any(note.startswith(words) for note in made.notes) is expected


def test_files_that_cannot_be_read_are_a_note_with_a_remedy(tmp_path: Path) -> None:
    written(tmp_path, "glm-4.5")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    (note,) = (each for each in find_moe_layers(read_checkpoint(tmp_path)).notes if "is not known" in each)
    assert "is not a safetensors file" in note and "git lfs pull" in note


def test_those_whose_layers_have_other_names_are_only_counted(tmp_path: Path) -> None:
    made = found(tmp_path, "minimax-m2")
    assert not made.mtp_problems
    assert "layers of the 3 multi-token-prediction module(s) are not listed" in made.notes


@pytest.mark.parametrize("value", ["one", -1, 1 << 20, True])
def test_an_invalid_number_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        found(tmp_path, "deepseek-v3", num_nextn_predict_layers=value)


def test_explain_shows_them_as_groups_that_overrides_match(tmp_path: Path) -> None:
    file = str(written(tmp_path, "deepseek-v3", num_nextn_predict_layers=1))
    words = ["explain", file, "--device", "nvidia-h200", "--set", "backend=humming"]
    words += ["--set", r"overrides=re:layers\.61\.=marlin"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "58 layers: model.layers.3-60.mlp.experts\n" in told.output
    assert "1 layer: model.layers.61.mlp.experts, for multi-token prediction\n" in told.output
    groups = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["groups"]
    assert [(group["count"], group["is_mtp"], group["decision"]["backend"]) for group in groups] == [
        (58, False, "humming_mxfp8"),
        (1, True, "marlin_mxfp8"),
    ]


def test_explain_names_activations_that_a_setting_changes_only_there(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    inputs = weights | {"dynamic": True}
    groups = {
        "model": {"targets": ["Linear"], "weights": weights},
        "beyond": {"targets": [r"re:.*layers\.61\."], "weights": weights, "input_activations": inputs},
    }
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": groups}
    file = written(tmp_path, "deepseek-v3", num_nextn_predict_layers=1, quantization_config=quantization)
    words = ["explain", str(file), "--device", "nvidia-h200", "--set", "activations=16bit"]
    told = " ".join(CliRunner().invoke(app, words).output.split())
    assert "activations are 16bit by --set activations, the checkpoint declares mxfp8" in told
    assert "activations are" not in CliRunner().invoke(app, words[:-2]).output


@pytest.mark.parametrize(
    "lists",
    [
        {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58},
        {"moe_layer_freq": [0] * 3 + [1] * 58},
    ],
)
def test_lists_of_the_models_layers_say_nothing_of_the_module_beyond(tmp_path: Path, lists: dict[str, Any]) -> None:
    made = found(tmp_path, "deepseek-v3", num_nextn_predict_layers=1, **lists)
    plain = found(tmp_path, "deepseek-v3", num_nextn_predict_layers=1)
    assert [each.layer for each in made.problems] == [each.layer for each in plain.problems]
    assert [each.layer for each in made.mtp_problems] == ["model.layers.61.mlp.experts"]
