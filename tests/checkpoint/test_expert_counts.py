"""Checkpoints whose files hold another number of experts than the config says: refused, with layers and numbers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.lib import checkpoints, integer_checkpoints
from tests.lib.integer_checkpoints import Integers
from vllm_moe_oracle.checkpoint import tensor_headers
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.layer_names import compact_layer_names
from vllm_moe_oracle.checkpoint.moe_layers import MoeLayers, find_moe_layers, refused_layers
from vllm_moe_oracle.cli.main import app
from vllm_moe_oracle.errors import CheckpointError, DamagedCheckpointError

EXPERTS = 4
SIZE = checkpoints.Size(experts=EXPERTS, top_k=2)
LAYERS = "model.layers.0-1.mlp.experts"

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]


def write(folder: Path, arch: str = "qwen3_moe", **choices: Any) -> Path:
    model = checkpoints.ARCHITECTURES[arch](SIZE, np.random.default_rng(0))
    return checkpoints.write_model(folder, model, **choices)


def write_integers(folder: Path) -> Path:
    plain = write(folder.with_name("plain"), format="bf16")
    return integer_checkpoints.write(plain, folder, Integers("gptq"), twin=False)


FORMATS: Mapping[str, Callable[[Path], Path]] = {
    "mxfp8": write,
    "mxfp4": lambda folder: write(folder, format="mxfp4"),
    "gptq": write_integers,
}


def with_config(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def with_tensors(folder: Path, edit: Callable[[Tensors], None]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return folder


def numbered(name: str, layer: int = 0) -> re.Match[str] | None:
    return re.fullmatch(rf"(model\.layers\.{layer}\.mlp\.experts\.)(\d+)(\..+)", name)


def holds(numbers: Collection[int], layer: int = 0) -> Callable[[Tensors], None]:
    """Leaves a layer the experts of these numbers, copies of its first expert."""

    def edit(tensors: Tensors) -> None:
        own = {
            match: tensors.pop(match[0]) for match in [*map(functools.partial(numbered, layer=layer), tensors)] if match
        }
        for match, tensor in own.items():
            if match[2] == "0":
                tensors |= {f"{match[1]}{number}{match[3]}": tensor.clone() for number in numbers}

    return edit


def find(folder: Path) -> MoeLayers:
    return find_moe_layers(read_checkpoint(folder))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find(folder)
    return caught.value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stated", [1, 2, EXPERTS - 1, EXPERTS, EXPERTS + 1, 2 * EXPERTS])
def test_files_that_hold_another_number_are_refused(stated: int, format: str, tmp_path: Path) -> None:
    folder = with_config(FORMATS[format](tmp_path / "model"), num_experts=stated, num_experts_per_tok=1)
    if stated == EXPERTS:
        assert len(find(folder).problems) == 2
        return
    error = refused(folder)
    assert error.where == f"{folder}/config.json, {LAYERS}"
    assert error.rule.startswith(f"the files hold {EXPERTS} experts, and the config says {stated}: ")
    first, last = min(stated, EXPERTS), max(stated, EXPERTS) - 1
    numbers = f"expert {first}" if first == last else f"experts {first}-{last}"
    assert error.rule.endswith(f": vLLM would not load {numbers}" if stated < EXPERTS else f": they lack {numbers}")
    assert f"set num_experts to {EXPERTS} where the routers have as many rows" in error.remedy


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [
        ((0, 1, 3), "the files hold 3 experts, and the config says 4: they lack expert 2"),
        ((1, 2, 3, 4), "the files hold 4 experts, and the config says 4: vLLM would not load expert 4"),
        ((0, 1, 2, 3, 70000), "the files hold 5 experts, and the config says 4: vLLM would not load expert 70000"),
    ],
)
def test_each_layer_and_each_number_counts(numbers: tuple[int, ...], rule: str, tmp_path: Path) -> None:
    error = refused(with_tensors(write(tmp_path / "model"), holds(numbers, layer=1)))
    assert error.rule == rule and error.where.endswith(", model.layers.1.mlp.experts")
    offered = numbers == (0, 1, 2, 3, 70000)  # of the others no number of experts makes a whole layer
    assert ("or set num_experts to 5" in error.remedy) == offered
    assert error.remedy.startswith("Fetch the files that belong to this config")


@pytest.mark.parametrize("stated", [EXPERTS - 1, EXPERTS, EXPERTS + 1])
def test_tensors_that_hold_all_experts(stated: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "gpt_oss", format="mxfp4")
    with_config(folder, num_local_experts=stated)
    if stated == EXPERTS:
        assert find(folder).problems
        return
    error = refused(folder)
    assert error.rule.startswith(f"a tensor of the files holds {EXPERTS} experts, and the config says {stated}")
    assert f"set num_local_experts to {EXPERTS}" in error.remedy


@pytest.mark.parametrize(
    ("held", "words"), [(EXPERTS + 1, "vLLM would not load expert 4"), (EXPERTS - 1, "they lack expert 3")]
)
def test_of_a_layer_for_multi_token_prediction_it_is_a_note(held: int, words: str, tmp_path: Path) -> None:
    """A server that does not decode speculatively never loads it; a tool that prunes experts may leave it as it was."""
    folder = with_tensors(write(tmp_path / "model", "glm4_moe"), holds(range(held), layer=2))
    layers = find(folder)
    assert layers.mtp_problems
    (note,) = layers.notes_on_files
    assert note in layers.notes and note.startswith("model.layers.2.mlp.experts: the files hold ") and words in note


def test_experts_that_are_not_quantized_are_not_counted(tmp_path: Path) -> None:
    """Stock vLLM serves them."""
    folder = write(tmp_path / "model", "glm4_moe", kept="model.layers.2.")
    with_tensors(folder, holds(range(EXPERTS + 1), layer=2))
    assert find(folder).unquantized == ("model.layers.2.mlp.experts",)


def under(prefix: str, numbers: Collection[int], moved: bool = False) -> Edit:
    """Copies experts of all layers to names with another beginning than ``model.``, or moves them."""

    def edit(tensors: Tensors) -> None:
        for name in [each for each in tensors if any(f".mlp.experts.{number}." in each for number in numbers)]:
            tensors[name.replace("model.", prefix)] = tensors.pop(name) if moved else tensors[name].clone()

    return edit


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (under("", (3,)), "the files hold 4 experts under {}, and expert 3 under {}"),
        (under("", (1, 2), moved=True), "the files hold 2 experts under {}, and experts 1-2 under {}"),
        (
            under("backbone.", (0, 1, 2), moved=True),
            "the files hold 3 experts under {1}, and expert 3 under {0}",
        ),
    ],
    ids=["a copy", "two of four", "three of four"],
)
def test_experts_under_a_second_name_are_not_the_layer(edit: Edit, rule: str, tmp_path: Path) -> None:
    folder = with_tensors(write(tmp_path / "model"), edit)
    prefix = "backbone." if "{1}" in rule else ""
    other = f"{prefix}layers.0-1.mlp.experts"
    error = refused(folder)
    assert error.rule == f"{rule.format(LAYERS, other)}: vLLM's loaders read a layer's experts under one name"
    assert error.where == f"{folder}/config.json, {LAYERS}"


def test_a_layer_may_be_whole_under_two_names(tmp_path: Path) -> None:
    """vLLM reads one of them, such as where a folder holds Mistral's own file beside the converted one."""
    folder = with_tensors(write(tmp_path / "model"), under("", range(EXPERTS)))
    assert len(find(folder).problems) == 2


def in_16_bits(number: int, layer: int = 1) -> Edit:
    """Stores an expert's matrices in 16 bits."""

    def edit(tensors: Tensors) -> None:
        start = f"model.layers.{layer}.mlp.experts.{number}."
        for name in [each for each in tensors if each.startswith(start)]:
            del tensors[name]
        tensors |= {f"{start}{each}_proj.weight": torch.zeros(4, 4).bfloat16() for each in ("gate", "up", "down")}

    return edit


@pytest.mark.parametrize("format", FORMATS)
def test_an_expert_in_16_bits_among_quantized_ones_is_refused(format: str, tmp_path: Path) -> None:
    error = refused(with_tensors(FORMATS[format](tmp_path / "model"), in_16_bits(2)))
    assert error.rule == "the files hold expert 2 in 16 bits, and others of the layer quantized"
    assert error.where.endswith(", model.layers.1.mlp.experts")


@pytest.mark.parametrize("others", [("gate_proj.weight", "up_proj.weight"), ("weight_scale",)])
def test_an_expert_with_another_tensor_is_not_in_16_bits(others: tuple[str, ...], tmp_path: Path) -> None:
    """A matrix of another dtype than its format's is named with its tensor where the files are read."""

    def edit(tensors: Tensors) -> None:
        start = "model.layers.1.mlp.experts.2."
        for name in [each for each in tensors if each.startswith(start) and not each.endswith(others)]:
            tensors[name] = tensors[name].to(torch.bfloat16)

    assert len(find(with_tensors(write(tmp_path / "model"), edit)).problems) == 2


# --- Files that are not there -----------------------------------------------------------------------------------------


def split(folder: Path, names: tuple[str, str], is_indexed: bool) -> Path:
    """Distributes the tensors to two files, the last expert to the second one, and leaves that one out."""
    tensors = load_file(folder / "model.safetensors")
    last = {name for name in tensors if f".experts.{EXPERTS - 1}." in name}
    (folder / "model.safetensors").unlink()
    save_file({name: tensor for name, tensor in tensors.items() if name not in last}, folder / names[0])
    if is_indexed:
        places = {name: names[name in last] for name in tensors}
        (folder / tensor_headers.INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("is_indexed", [True, False])
def test_experts_of_files_that_are_not_there_yet_are_not_missed(is_indexed: bool, tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    folder = split(write(tmp_path / "model"), names, is_indexed)
    assert len(find(folder).problems) == 2
    save_file({"other": torch.zeros(1)}, folder / names[1])
    assert "they lack expert 3" in refused(folder).rule
    (folder / names[1]).unlink()
    assert "would not load expert 2" in refused(with_config(folder, num_experts=2)).rule


# --- Layers without experts -------------------------------------------------------------------------------------------

ABSENT = "the files hold no expert of 1 of 2 MoE layers, and those of model.layers.0.mlp.experts"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def by_layer(folder: Path, index: Mapping[int, str] | None = None) -> Path:
    """Distributes the tensors to two files, the second layer's to the second one.

    Args:
        folder: the checkpoint's.
        index: the file of each layer's tensors by an index; None for no index.
    """
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    layer_of = {name: int(".layers.1." in name) for name in tensors}
    for layer, part in enumerate(PARTS):
        save_file({name: tensor for name, tensor in tensors.items() if layer_of[name] == layer}, folder / part)
    if index is not None:
        places = {name: index[layer] for name, layer in layer_of.items() if layer in index}
        (folder / tensor_headers.INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_without_any_expert_is_refused(format: str, tmp_path: Path) -> None:
    error = refused(with_tensors(FORMATS[format](tmp_path / "model"), holds((), layer=1)))
    assert isinstance(error, DamagedCheckpointError)
    assert (error.rule, error.where) == (ABSENT, f"{tmp_path}/model/config.json, model.layers.1.mlp.experts")
    assert error.remedy == "Fetch the files that belong to this config"


def test_a_model_without_any_expert_is_refused(tmp_path: Path) -> None:
    """Unless a tensor may be one under an unknown name, or the files are no model's layers."""
    folder = with_tensors(with_tensors(write(tmp_path / "model"), holds(())), holds((), layer=1))
    error = refused(folder)
    assert (error.rule, error.where) == (
        "the files hold no expert of 2 of 2 MoE layers",
        f"{folder}/config.json, {LAYERS}",
    )
    whole = load_file(folder / "model.safetensors")
    for others in (
        {**whole, "model.layers.0.moe.up_proj.weight": torch.zeros(1)},
        {f"base_model.model.{name}": tensor for name, tensor in whole.items()},
        {name: tensor for name, tensor in whole.items() if "attn" not in name},
    ):
        save_file(others, folder / "model.safetensors")
        assert len(find(folder).problems) == 2
    save_file(
        {**whole, "model.layers.0.mlp.shared_expert.up_proj.weight": torch.zeros(1)}, folder / "model.safetensors"
    )
    assert refused(folder).rule == error.rule


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("index", "missing", "remedy"),
    [
        (
            {0: PARTS[0], 1: PARTS[0]},
            False,
            f"{tensor_headers.INDEX_NAME} does not name {PARTS[1]}, which vLLM does not",
        ),
        (
            {0: PARTS[0]},
            False,
            f"{tensor_headers.INDEX_NAME} does not name {PARTS[1]}, which vLLM does not read then. ",
        ),
        (None, True, "Fetch the files that are missing"),
    ],
    ids=["wrong file", "omitted", "numbered"],
)
def test_files_that_vllm_does_not_read(
    index: Mapping[int, str] | None, missing: bool, remedy: str, format: str, tmp_path: Path
) -> None:
    folder = by_layer(FORMATS[format](tmp_path / "model"), index)
    if missing:
        assert len(find(folder).problems) == 2
        (folder / PARTS[1]).unlink()
    error = refused(folder)
    assert error.rule == ABSENT and error.remedy.startswith(remedy), error.remedy


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_the_index_that_are_not_here_yet_end_no_answer(format: str, tmp_path: Path) -> None:
    """`explain` answers by the config, and its status says that no server starts; `verify` refuses them."""
    folder = by_layer(FORMATS[format](tmp_path / "model"), {0: PARTS[0], 1: PARTS[1]})
    whole = find(folder)
    (folder / PARTS[1]).unlink()
    note = f"1 of 2 files of {tensor_headers.INDEX_NAME} are not here, such as {PARTS[1]}: a server does not start"
    found = find(folder)
    assert found.problems == whole.problems and len(found.notes_on_files) == len(whole.notes_on_files) + 1
    assert any(each.startswith(note) for each in found.notes_on_files)
    explained = CliRunner().invoke(app, ["explain", str(folder), "--device", "h200", "--json"])
    assert explained.exit_code == 3 and note in explained.stdout and note in explained.stderr
    assert json.loads(explained.stdout)["groups"][0]["decision"] is not None
    checked = CliRunner().invoke(app, ["verify", str(folder)])
    assert checked.exit_code != 0 and f"{PARTS[1]}: the file is missing" in checked.stderr
    ((layer, error),) = refused_layers(read_checkpoint(folder)).items()
    assert layer == "model.layers.1.mlp.experts" and error.rule == ABSENT
    assert error.remedy == f"Fetch {PARTS[1]}: {tensor_headers.INDEX_NAME} names what the folder lacks"
    (folder / PARTS[0]).unlink()
    assert any(each.startswith("2 of 2 files of") for each in find(folder).notes_on_files)
    save_file({"other": torch.zeros(1)}, folder / "saved-state.safetensors")
    assert find(folder).notes_on_files == whole.notes_on_files


def test_a_file_that_cannot_be_read_hides_no_missing_one(tmp_path: Path) -> None:
    folder = by_layer(write(tmp_path / "model"), {0: PARTS[0], 1: PARTS[1]})
    (folder / PARTS[0]).write_text("not yet written")
    (folder / PARTS[1]).unlink()
    assert find(folder).lacks_files and any(f"such as {PARTS[1]}" in each for each in find(folder).notes)


def test_a_server_fetches_files_of_a_model_that_is_given_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    folder = by_layer(write(cached / "snapshots" / "abc"), {0: PARTS[0], 1: PARTS[1]})
    (folder / PARTS[1]).unlink()
    for path, status, effect in (("some/model", 0, "fetches them first"), (folder, 3, "does not start before they")):
        explained = CliRunner().invoke(app, ["explain", str(path), "--device", "h200", "--json"])
        assert explained.exit_code == status and f"such as {PARTS[1]}: a server {effect}" in explained.stdout


def test_multi_token_prediction_may_have_been_left_out(tmp_path: Path) -> None:
    """Tools leave its layers out; a server that does not decode speculatively loads none of them."""
    folder = with_tensors(write(tmp_path / "model", "glm4_moe"), holds((), layer=2))
    layers = find(folder)
    assert layers.absent_drafts == ("model.layers.2.mlp.experts",) == tuple(each.layer for each in layers.mtp_problems)
    (note,) = layers.notes_on_files
    assert note.startswith("model.layers.2.mlp.experts: the files hold none of their experts: speculative decoding")
    checked = CliRunner().invoke(app, ["verify", str(folder)])
    assert checked.exit_code == 0 and f"note: {note}\n" in checked.stderr
    assert "2 of 2 layers agree" in checked.stdout


def test_layers_that_stock_vllm_serves_may_have_other_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", kept="model.layers.1.")
    assert find(with_tensors(folder, holds((), layer=1))).unquantized == ("model.layers.1.mlp.experts",)


@pytest.mark.parametrize(
    "edit",
    [
        holds(()),
        holds((), layer=1),
        holds((0, 1, 3), layer=1),
        holds(range(EXPERTS + 1)),
        in_16_bits(1),
        under("", (3,)),
    ],
    ids=["no expert of the first", "no expert of the second", "lacking", "too many", "16 bits", "another name"],
)
def test_a_server_refuses_the_same_layers_with_the_same_words(edit: Edit, tmp_path: Path) -> None:
    folder = write_integers(tmp_path / "model")
    assert refused_layers(read_checkpoint(folder)) == {}
    error = refused(with_tensors(folder, edit))
    found = refused_layers(read_checkpoint(folder))
    assert {*map(str, found.values())} == {str(error)}
    assert error.where == f"{folder}/config.json, {compact_layer_names(found)}"


def test_a_folder_without_the_layers_tensors_is_not_judged(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    assert len(find(folder).problems) == 2
    (folder / "model.safetensors").unlink()
    assert len(find(folder).problems) == 2


def test_a_state_that_vllm_saved_holds_the_experts_of_one_rank(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    names = [f"model.layers.{layer}.mlp.experts.w13_weight" for layer in range(2)]
    tensors = {name: torch.zeros(EXPERTS // 2, 64, 128, dtype=torch.float8_e4m3fn) for name in names}
    save_file(tensors, folder / "model.safetensors")
    assert len(find(folder).problems) == 2


# --- Commands ---------------------------------------------------------------------------------------------------------


def test_commands_end_with_the_rule_and_the_remedy(tmp_path: Path) -> None:
    folder = with_config(write(tmp_path / "model"), num_experts=2)
    told = CliRunner().invoke(app, ["explain", str(folder)])
    assert isinstance(told.exception, DamagedCheckpointError)
    words = "the files hold 4 experts, and the config says 2: vLLM would not load experts 2-3"
    assert words in str(told.exception)
    checked = CliRunner().invoke(app, ["verify", str(folder)])
    assert checked.exit_code == 1 and words in checked.stderr
    absent = with_tensors(write(tmp_path / "absent"), holds((), layer=1))
    told = CliRunner().invoke(app, ["explain", str(absent)])
    assert isinstance(told.exception, DamagedCheckpointError) and ABSENT in str(told.exception)
    checked = CliRunner().invoke(app, ["verify", str(absent)])
    assert checked.exit_code == 1 and ABSENT in checked.stderr
    config_alone = CliRunner().invoke(app, ["explain", str(folder / "config.json"), "--device", "h200"])
    assert config_alone.exit_code == 0
