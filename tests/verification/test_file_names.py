"""Names of experts and routers in files: vLLM's loaders of some models renumber, rename or transpose them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("vllm", reason="reads weights for vLLM's layers")

from tests.lib import cli
from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint
from vllm_moe_oracle import settings
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measuring import verifying
from vllm_moe_oracle.verification import token_stream

TEXT, IMAGES = 6, 4


def changed(folder: Path, **fields: Any) -> Path:
    """Changes fields of a model's config; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with six experts for text and four for images, numbered without a break."""
    folder = tmp_path_factory.mktemp("ernie") / "model"
    write_checkpoint(folder, size=Size(layers=1, experts=TEXT + IMAGES, top_k=2))
    return changed(
        folder, architectures=["Ernie4_5_VLMoeForConditionalGeneration"], model_type="ernie4_5_moe_vl",
        moe_num_experts=[TEXT, IMAGES], moe_intermediate_size=[64, 64], moe_layer_start_index=[0, 0],
        moe_layer_end_index=[0, 0], moe_layer_interval=1, moe_k=2, num_experts=None, num_experts_per_tok=None,
        decoder_sparse_step=None, mlp_only_layers=None,
    )  # fmt: skip


def test_experts_for_images_follow_those_for_text(ernie: Path, run: cli.Run) -> None:
    found = run("verify", ernie, "--json")
    assert found.status == 0, found.err
    layers = {each["layer"].rpartition(".")[2]: each for each in found.json["layers"]}
    assert {name: (each["status"], each["experts_checked"]) for name, each in layers.items()} == {
        "text_experts": ("passed", TEXT), "vision_experts": ("passed", IMAGES),
    }  # fmt: skip


def test_a_damaged_expert_is_named_by_its_number_in_the_layer(ernie: Path, tmp_path: Path, run: cli.Run) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        tensors[f"model.layers.0.mlp.experts.{TEXT + 2}.down_proj.weight"].view(torch.uint8)[0, 0] = 0x7F

    found = run("verify", rewrite_tensors(ernie, tmp_path / "damaged", damage), "--json")
    assert found.status == 1
    text, images = found.json["layers"]
    assert text["status"] == "passed" and images["status"] == "damaged"
    stored = f"model.layers.0.mlp.experts.{TEXT + 2}.down_proj.weight (model.safetensors)"
    assert images["fault"].startswith(f"expert 2: codes in {stored} are NaN")

    def remove(tensors: dict[str, Any]) -> None:
        del tensors[f"model.layers.0.mlp.experts.{TEXT + 2}.down_proj.weight"]

    missing = run("verify", rewrite_tensors(ernie, tmp_path / "missing", remove))
    assert missing.status == 1
    assert "vision_experts, expert 2, model.layers.0.mlp.experts.8.down_proj.weight" in missing.messages


def test_experts_of_both_kinds_are_counted_together(ernie: Path, tmp_path: Path, run: cli.Run) -> None:
    folder = changed(Path(shutil.copytree(ernie, tmp_path / "model")), moe_num_experts=[TEXT, IMAGES - 1])
    for command, status in (("explain", 2), ("verify", 1)):
        found = run(command, folder)
        assert found.status == status
        assert "the files hold 10 experts, and the config says 9: vLLM would not load expert 9" in found.messages
        assert "or set" not in found.messages  # the field has a number for each kind


def test_verify_notes_what_files_of_a_draft_hold_otherwise(tmp_path: Path, run: cli.Run) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors |= {
            name.replace(".experts.0.", ".experts.4."): tensor.clone()
            for name, tensor in tensors.items()
            if ".layers.2.mlp.experts.0." in name
        }

    plain = write_checkpoint(tmp_path / "plain", arch="glm4_moe", size=Size(layers=2, experts=4, top_k=2))
    found = run("verify", rewrite_tensors(plain, tmp_path / "model", add))
    assert found.status == 0
    assert "note: model.layers.2.mlp.experts: the files hold 5 experts, and the config says 4" in found.err


def test_vllms_loader_takes_the_same_tensors(ernie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name goes through `load_weights` of vLLM's class, which says what expert and shard it fills."""
    from vllm.model_executor.models import ernie45_vl_moe

    loaded: dict[float, tuple[str, int, str]] = {}

    class Parameter:
        def __init__(self, name: str) -> None:
            self.name = name

        def weight_loader(self, _: object, tensor: torch.Tensor, name: str, *, shard_id: str, expert_id: int) -> None:
            assert name == self.name
            loaded[float(tensor)] = name.partition(".routed_experts")[0], expert_id, shard_id

    class Parameters(dict[str, Parameter]):
        def __missing__(self, name: str) -> Parameter:
            return Parameter(name)

    model = nn.Module()
    model.config = SimpleNamespace(moe_num_experts=[TEXT, IMAGES], tie_word_embeddings=False)
    monkeypatch.setattr(ernie45_vl_moe, "dict", lambda _: Parameters(), raising=False)
    with verifying.Verification(read_checkpoint(ernie), detect.detect(), settings.load({})) as made:
        expected = {}
        names = []
        for plan in made.plans:
            assert plan.tensors is not None
            layer = plan.problem.layer.removeprefix("language_model.")
            for index in range(plan.problem.num_experts):
                for canonical in ("w13", "w2"):
                    for shard, name in plan.tensors._tensor_names(index)[canonical].items():
                        expected[float(len(names))] = layer, index, shard
                        names.append(name)
    stream = [(name, torch.tensor(float(place))) for place, name in enumerate(names)]
    ernie45_vl_moe.Ernie4_5_VLMoeForCausalLM.load_weights(model, stream)
    assert len(names) == 3 * (TEXT + IMAGES) and loaded == expected


def chosen(folder: Path, routers: dict[str, Tensor]) -> dict[str, bool]:
    """Whether each layer's tokens have the experts that its router chooses, by the end of the layer's name.

    Args:
        folder: the checkpoint.
        routers: by the same, `[hidden, experts]`.
    """
    found = {}
    with verifying.Verification(read_checkpoint(folder), detect.detect(), settings.load({})) as made:
        for plan in made.plans:
            assert plan.tensors is not None
            name = plan.problem.layer.rpartition(".")[2]
            inputs = token_stream.TokenStream(made.files, plan.problem.hidden_size, made.gemma_norms).inputs(
                plan.tensors
            )
            theirs = (inputs.x.float() @ routers[name].float()).topk(plan.problem.top_k).indices
            found[name] = torch.equal(inputs.ids.sort().values, theirs.sort().values)
    return found


def test_routers_that_ernie_stores_transposed_route_the_tokens(ernie: Path, tmp_path: Path, run: cli.Run) -> None:
    """As published: ``gate.weight`` for text and ``gate.weight_1`` for images, `[hidden, experts]` both."""
    gate, routers = "model.layers.0.mlp.gate", {}

    def publish(tensors: dict[str, Any]) -> None:
        both = tensors[f"{gate}.weight"].T.contiguous()
        routers["text_experts"], routers["vision_experts"] = both[:, :TEXT], both[:, TEXT:]
        tensors |= {f"{gate}.weight": routers["text_experts"], f"{gate}.weight_1": routers["vision_experts"]}

    folder = rewrite_tensors(ernie, tmp_path / "published", publish)
    assert chosen(folder, routers) == {"text_experts": True, "vision_experts": True}
    found = run("verify", folder, "--json")
    assert found.status == 0, found.err
    assert {each["inputs"] for each in found.json["layers"]} == {
        "embedding, the layer's norm, the layer's router by softmax"
    }


def test_a_router_of_no_known_shape_is_said_to_be_random(ernie: Path, run: cli.Run) -> None:
    """That of the fixture is for both kinds of experts together."""
    found = run("verify", ernie, "--json")
    misfit = " (model.layers.0.mlp.gate.weight is bfloat16 [10, 128], not floats [128, 6])"
    assert {each["inputs"] for each in found.json["layers"]} == {
        f"embedding, the layer's norm, random routing{words} by softmax" for words in (misfit, "")
    }


def test_routers_that_ernie_would_transpose_wrongly_are_noted(ernie: Path, tmp_path: Path, run: cli.Run) -> None:
    def turn(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"][:TEXT].contiguous()

    found = run("verify", rewrite_tensors(ernie, tmp_path / "turned", turn), "--json")
    words = "gate.weight is bfloat16 [6, 128], not floats [128, 6]: it is transposed)"
    assert words in found.json["layers"][0]["inputs"]


def test_a_square_router_is_read_as_other_models_store_it(tmp_path: Path) -> None:
    size = Size(layers=1, experts=128, top_k=2, hidden=128, intermediate=32)
    folder = write_checkpoint(tmp_path / "square", size=size)
    router = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    assert chosen(folder, {"experts": router.T}) == {"experts": True}
    assert chosen(folder, {"experts": router}) == {"experts": False}


@pytest.mark.parametrize(
    ("before", "after", "fields"),
    [
        ("model.layers.0.mlp.experts", "layers.0.ffn.experts", {"model_type": "deepseek_v4"}),
        ("model.", "thinker.model.", {"model_type": "qwen3_omni_moe"}),
        ("model.", "language.model.", {"model_type": "deepseek_vl_v2"}),
    ],
    ids=["deepseek-v4", "qwen3-omni", "deepseek-vl2"],
)
def test_beginnings_that_vllms_loaders_replace(
    before: str, after: str, fields: dict[str, Any], tmp_path: Path, run: cli.Run
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.startswith(before):
                tensors[after + name.removeprefix(before)] = tensors.pop(name)
        if fields["model_type"] == "deepseek_v4":
            for name in [each for each in tensors if ".experts." in each]:
                for own, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                    if own in name:
                        tensors[name.replace(own, theirs)] = tensors.pop(name)

    plain = write_checkpoint(tmp_path / "plain", size=Size(layers=1, experts=4, top_k=2))
    folder = changed(rewrite_tensors(plain, tmp_path / "model", rename), **fields)
    found = run("verify", folder, "--json")
    assert found.status == 0, found.err
    assert [each["status"] for each in found.json["layers"]] == ["passed"]


@pytest.mark.parametrize(
    ("before", "after", "status", "words"),
    [
        # Step-3's files have ``moe.gate_proj.weight`` with all experts.
        (
            ".mlp.experts.",
            ".moe.",
            2,
            (
                "; they have model.layers.0.moe.0.down_proj.weight",
                "Fetch or export the files under the names of the model's class",
            ),
        ),
        # They are those of the model's class, and vLLM's loader does not take them.
        *(
            (before, after, 1, ("fetch the files that belong to this config, or rename them",))
            for before, after in (("model.layers.", "transformer.layers."), ("_proj.weight", "_proj.qweight"))
        ),
    ],
    ids=["unknown", "beginning", "end"],
)
def test_experts_under_other_names_are_shown(
    before: str, after: str, status: int, words: tuple[str, ...], tmp_path: Path, run: cli.Run
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in [each for each in tensors if ".mlp.experts." in each]:
            tensors[name.replace(before, after)] = tensors.pop(name)

    plain = write_checkpoint(tmp_path / "plain", size=Size(layers=1, experts=4, top_k=2))
    found = run("verify", rewrite_tensors(plain, tmp_path / "model", rename))
    said = found.messages.replace("'model.", "model.")
    assert found.status == status and "none of the names that its first expert may have" in said
    assert [each for each in words if each not in said] == []
