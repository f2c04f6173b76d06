"""Checkpoints whose files hold experts otherwise than the config says, which `explain` notes; and healthy ones of every
format that is written here, of which it says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.lib import checkpoints, integer_checkpoints
from tests.lib.integer_checkpoints import Integers
from vllm_moe_oracle.checkpoint import tensor_headers
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.cli.main import app

LAYERS = "model.layers.0-1.mlp.experts"
SIZE = checkpoints.Size(experts=2)

Write = Callable[[Path], Path]


def written(arch: str, **choices: Any) -> Write:
    """Writes a tiny model without a tokenizer into a folder."""
    return lambda folder: checkpoints.write_model(
        folder, checkpoints.ARCHITECTURES[arch](SIZE, np.random.default_rng(0)), **choices
    )


def integers(how: Integers) -> Write:
    return lambda folder: integer_checkpoints.write(
        written("qwen3_moe", format="bf16")(folder.with_name("plain")), folder, how, twin=False
    )


FLOATS = {
    f"{arch} {format} {tag}": written(arch, format=format, tag=tag)
    for arch in checkpoints.ARCHITECTURES
    for format, tags in (
        ("mxfp8", get_args(checkpoints.Tag)),
        ("mxfp4", ("modelopt", "compressed-tensors", "compressed-tensors-a16")),
        ("bf16", ("modelopt",)),
    )
    for tag in tags
    if arch != "gpt_oss" or (format != "mxfp8" and tag == "modelopt")  # as it is published
}
INTEGERS = {
    name: integers(how)
    for name, how in {
        "gptq": Integers("gptq"),
        "gptq rows, biases": Integers("gptq", 8, -1, bias=True),
        "gptq act order": Integers("gptq", act_order="group"),
        "gptq_v2": Integers("gptq_v2", zero_points=True),
        "awq": Integers("awq", zero_points=True),
        "awq biases": Integers("awq", bias=True),
        "packed": Integers("compressed-tensors"),
        "packed act order": Integers("compressed-tensors", zero_points=True, act_order="group"),
        "bytes": Integers("compressed-tensors-int", 8),
    }.items()
}
KEPT = {"glm4_moe with a layer left out": written("glm4_moe", kept="model.layers.2.")}
HEALTHY = FLOATS | INTEGERS | KEPT
SLOW = ("packed", "packed act order", "bytes")
"""These import the package compressed-tensors, which takes many seconds."""
STORED = (
    "qwen3_moe mxfp8 modelopt", "qwen3_moe mxfp8 compressed-tensors", "qwen3_moe mxfp4 modelopt",
    "qwen3_moe mxfp4 compressed-tensors", "gpt_oss mxfp4 modelopt", "gptq", "gptq_v2", "awq", "packed", "bytes",
)  # fmt: skip
"""Of each way to store experts one."""


def each_of(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in names]


def notes(path: Path, online: str = "") -> list[str]:
    """What is said of a checkpoint's files."""
    said = find_moe_layers(read_checkpoint(path), online=online).notes
    return [note for note in said if note.startswith(("the files hold", "whether the files hold"))]


def described(folder: Path, **fields: Any) -> Path:
    """The checkpoint with these fields in its config; without those that are None."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("name", each_of(HEALTHY))
def test_of_a_healthy_checkpoint_nothing_is_said(name: str, tmp_path: Path) -> None:
    assert notes(HEALTHY[name](tmp_path / "model")) == []


@pytest.mark.parametrize("name", each_of(STORED))
def test_a_config_that_says_nothing_of_quantized_experts_is_noted(name: str, tmp_path: Path) -> None:
    path = described(HEALTHY[name](tmp_path / "model"), quantization_config=None)
    (note,) = notes(path)
    assert note == (
        f"the files hold the experts of {LAYERS} quantized, and {path}/config.json has no quantization_config: a "
        "server does not load them. The config has to say how they are quantized"
    )
    assert notes(path / "config.json") == []
    # What vLLM quantizes while it loads has to be in 16 bits.
    if "gpt_oss" not in name:
        assert notes(path, online="mxfp8") == [note]
    assert not any("would quantize" in each for each in find_moe_layers(read_checkpoint(path)).notes)


@pytest.mark.parametrize("name", each_of(STORED))
def test_experts_in_16_bits_that_a_config_calls_quantized_are_noted(name: str, tmp_path: Path) -> None:
    config = json.loads((HEALTHY[name](tmp_path / "model") / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "gptq":  # else vLLM quantizes what the files hold quantized
        config["modules_in_block_to_quantize"] = [["mlp.experts"]]
    path = described(written(name.split()[0] if name in FLOATS else "qwen3_moe", format="bf16")(tmp_path / "claims"))
    (note,) = notes(described(path, quantization_config=config))
    assert note == (
        f"the files hold the experts of {LAYERS} in 16 bits, and {path}/config.json, quantization_config does not "
        "leave them out: a server does not load them. Add them to the layers that the config ignores"
    )
    assert notes(path / "config.json") == []


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
         "modules_in_block_to_quantize"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
         "modules_to_not_convert"),
    ],
)  # fmt: skip
def test_where_gptq_and_awq_name_no_modules_the_files_do(
    quantization: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """As vLLM fills their lists; not where the config has one."""
    path = described(written("qwen3_moe", format="bf16")(tmp_path / "model"), quantization_config=quantization)
    layers = find_moe_layers(read_checkpoint(path))
    assert not layers.problems and len(layers.unquantized) > 1
    assert not any("does not leave them out" in each for each in layers.notes)
    named = described(path, quantization_config=quantization | {field: ["nothing" if "not" in field else "mlp"]})
    assert any("leave them out" in each for each in find_moe_layers(read_checkpoint(named)).notes)
    assert find_moe_layers(read_checkpoint(named)).problems


def test_each_layer_is_compared_by_itself(tmp_path: Path) -> None:
    """The config leaves out the first layer instead of the last one, which is for multi-token prediction."""
    path = HEALTHY["glm4_moe with a layer left out"](tmp_path / "model")
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    ignored = [each.replace("layers.2.", "layers.0.") for each in quantization["ignore"]]
    quantized, plain = sorted(notes(described(path, quantization_config={**quantization, "ignore": ignored})), key=len)
    assert plain.startswith("the files hold the experts of model.layers.2.mlp.experts in 16 bits, and ")
    assert "speculative decoding with them does not load" in plain
    assert quantized.startswith("the files hold the experts of model.layers.0.mlp.experts quantized, and ")
    assert "quantization_config leaves them out: a server does not load them" in quantized


def test_of_files_that_hold_experts_both_ways_nothing_is_said(tmp_path: Path) -> None:
    """Which of them a server reads is not known: an index may leave one out."""
    path = described(written("qwen3_moe")(tmp_path / "model"), quantization_config=None)
    shutil.copy(
        written("qwen3_moe", format="bf16")(tmp_path / "plain") / "model.safetensors", path / "other.safetensors"
    )
    assert notes(path) == []


def test_formats_that_are_left_to_stock_vllm_are_not_compared(tmp_path: Path) -> None:
    path = written("qwen3_moe", format="bf16")(tmp_path / "model")
    assert notes(described(path, quantization_config={"quant_method": "experts_int8"})) == []


def test_a_layer_whose_tensors_have_other_names_is_not_judged(tmp_path: Path) -> None:
    path = described(written("qwen3_moe", format="bf16")(tmp_path / "model"), quantization_config=None)
    save_file({f"other.{LAYERS}.0.up_proj.qweight": torch.zeros(1, dtype=torch.int32)}, path / "model.safetensors")
    assert notes(path) == []


def test_explain_notes_it_of_a_draft_model(tmp_path: Path) -> None:
    """A model that drafts for another is a checkpoint of its own."""
    path = described(written("qwen3_moe")(tmp_path / "draft"), quantization_config=None)
    told = CliRunner().invoke(app, ["explain", str(path), "--device", "h200"])
    assert told.exit_code == 0
    assert f"the files hold the experts of {LAYERS} quantized" in " ".join(told.output.split())


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        (b"[]", "Expected `object`"),
        (b'{"a": {"dtype": 1}}', "Expected `str`"),
        (b'{"a": {"b": ' + b"[" * 5000 + b"]" * 5000 + b"}}", "RecursionError"),
        (b"[" + b"0," * 1_000_000 + b"0]", "values"),
    ],
)
def test_a_header_that_is_none_is_a_note(header: bytes, cause: str, tmp_path: Path) -> None:
    path = described(written("qwen3_moe", format="bf16")(tmp_path / "model"), quantization_config=None)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (note,) = notes(path)
    assert "is not known" in note and cause in note


def test_names_of_any_length_take_no_time(tmp_path: Path) -> None:
    """Names that are cut at every dot would be copied as often as they have dots."""
    header = b'{"%s": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}' % (b"." * (1 << 24))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert tensor_headers.expert_tensors(tmp_path, ["model.layers.0.mlp.experts"]) == {}
