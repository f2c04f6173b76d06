"""Biases of experts that only tensors of a checkpoint tell of: found, or known to be zeros, without torch or vLLM."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.lib.configs import GPTQ, quantized
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.checkpoint.tensor_headers import (
    INDEX_NAME,
    RefusedFileError,
    expert_tensors,
    has_nonzero_expert_biases,
    is_expert_bias,
    tensor_files,
)
from vllm_moe_oracle.cli.main import app
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.verification.checkpoint_tensors import TensorFiles

NAME = "model.layers.0.mlp.experts.7.down_proj.bias"
ZEROS = torch.zeros(64)


def one(*, at: int, value: float) -> torch.Tensor:
    tensor = torch.zeros(64)
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "biased"),
    [
        (NAME, True),
        ("model.layers.0.block_sparse_moe.experts.0.w1.bias", True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", True),
        ("model.layers.0.mlp.experts.e_score_correction_bias", False),
        ("model.layers.0.mlp.shared_experts.down_proj.bias", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
    ],
)
def test_names(name: str, biased: bool, tmp_path: Path) -> None:
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    assert is_expert_bias(name) is has_nonzero_expert_biases(tmp_path) is biased


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize(
    ("bias", "biased"),
    [
        (ZEROS, False),
        (-ZEROS, False),
        (one(at=0, value=1.0), True),
        (one(at=63, value=-2.0), True),
        (one(at=5, value=float("nan")), True),
        (one(at=5, value=1e-7), True),
    ],
)
def test_zeros_of_either_sign_are_none(bias: torch.Tensor, biased: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    given = bias.to(dtype)
    save_file({"a": torch.ones(3), NAME: given, "z": torch.ones(5)}, tmp_path / "model.safetensors")
    assert has_nonzero_expert_biases(tmp_path) is bool((given != 0).any())
    assert has_nonzero_expert_biases(tmp_path) is biased or dtype == torch.int8


def test_every_file_and_every_tensor_is_looked_at(tmp_path: Path) -> None:
    other = NAME.replace(".7.", ".8.")
    save_file({NAME: ZEROS}, tmp_path / "model-00001.safetensors")
    save_file({NAME: ZEROS, other: ZEROS.clone()}, tmp_path / "model-00002.safetensors")
    assert not has_nonzero_expert_biases(tmp_path)
    save_file({NAME: ZEROS, other: one(at=9, value=0.5)}, tmp_path / "model-00002.safetensors")
    assert has_nonzero_expert_biases(tmp_path)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder whose index names one of two files; the other has a bias, and experts in 16 bits."""
    save_file({MATRIX: torch.ones(4, dtype=torch.int32), NAME: ZEROS}, tmp_path / "a.safetensors")
    save_file({NAME: one(at=3, value=1.0), MODULE + ".1.up_proj.weight": ZEROS}, tmp_path / "old.safetensors")
    weight_map = {MATRIX: "a.safetensors", NAME: "a.safetensors", "there.weight": "not-yet.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))
    return tmp_path


MODULE = "model.layers.0.mlp.experts"
MATRIX = f"{MODULE}.0.up_proj.qweight"


@pytest.mark.parametrize("other", ["there", "truncated"])
def test_files_beside_those_of_the_index_do_not_count(other: str, indexed: Path) -> None:
    """vLLM loads the files of the index alone."""
    if other == "truncated":
        (indexed / "old.safetensors").write_bytes(b"\0" * 5)
    (indexed / "config.json").write_text(json.dumps(quantized(quantization_config=GPTQ, num_hidden_layers=1)))
    assert not has_nonzero_expert_biases(indexed)
    assert expert_tensors(indexed, [MODULE])[MODULE].kinds == {("qweight", "I32")}
    found = find_moe_layers(read_checkpoint(indexed))
    assert not any(problem.has_bias for problem in found.problems)
    assert not any("not known" in note for note in found.notes)
    assert [path.name for path in tensor_files(indexed)] == ["a.safetensors"]


def test_without_the_files_of_the_index_or_without_an_index_all_count(indexed: Path) -> None:
    (indexed / "a.safetensors").unlink()  # such as a state that vLLM saved beside the index
    assert [path.name for path in tensor_files(indexed)] == ["old.safetensors"] and has_nonzero_expert_biases(indexed)
    (indexed / INDEX_NAME).unlink()
    assert [path.name for path in tensor_files(indexed)] == ["old.safetensors"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b"\xff\xfe"])
def test_an_index_that_cannot_be_read_is_an_error(content: bytes, indexed: Path) -> None:
    (indexed / INDEX_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="has no weight_map from names to files") as caught:
        has_nonzero_expert_biases(indexed)
    assert caught.value.where == str(indexed / INDEX_NAME)
    (indexed / INDEX_NAME).unlink()
    (indexed / INDEX_NAME).mkdir()
    with pytest.raises(CheckpointError):
        tensor_files(indexed)


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({}, "names no file of tensors: its weight_map is empty"),
        *(
            ({MATRIX: "a.safetensors", "x": name}, f"names {name!r}, which is no safetensors file of its folder")
            for name in ("../../../../etc/passwd", "/a.safetensors", "..", "", "b/a.safetensors", "a\0.safetensors")
        ),
    ],
)
def test_an_index_of_other_files_is_refused(
    places: dict[str, str], words: str, is_quantized: bool, indexed: Path
) -> None:
    (indexed / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    found = quantized(quantization_config=GPTQ if is_quantized else None, num_hidden_layers=2)
    (indexed / "config.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError) as caught:
        find_moe_layers(read_checkpoint(indexed))
    assert caught.value.rule == words and caught.value.where == str(indexed / INDEX_NAME) and caught.value.remedy
    with pytest.raises(CheckpointError) as caught:
        TensorFiles(indexed)
    assert caught.value.rule == words


@pytest.mark.parametrize(
    ("places", "size", "words"),
    [
        ({"a": [0, 4], "b": [0, 4]}, 8, "'b' is at bytes 0 to 4, and the tensors before it end at 4"),
        ({"a": [0, 4], "b": [5, 8]}, 8, "'b' is at bytes 5 to 8, and the tensors before it end at 4"),
        ({"a": [0, 4], "b": [4, 2]}, 4, "'b' is at bytes 4 to 2, and the tensors before it end at 4"),
        ({"a": [0, 4], "b": None}, 4, "'b' has no data_offsets"),
        ({"a": [0, 4], "b": [4, 8]}, 7, "its tensors end at byte 8 of 7"),
        ({"a": [0, 4]}, 8, "its tensors end at byte 4 of 8"),
        ({"a": [0, 4], "b": [4, 7]}, 7, "'b' is 'U8' [4] in 3 bytes"),
    ],
)
def test_files_that_vllms_reader_refuses(places: dict[str, Any], size: int, words: str, tmp_path: Path) -> None:
    tensors = {
        name: {"dtype": "U8", "shape": [4]} | ({} if place is None else {"data_offsets": place})
        for name, place in places.items()
    }
    (tmp_path / "model.safetensors").write_bytes(header(**tensors) + bytes(size))
    (tmp_path / "config.json").write_text(json.dumps(quantized()))
    for refuse in (lambda: expert_tensors(tmp_path, [MODULE]), lambda: find_moe_layers(read_checkpoint(tmp_path))):
        with pytest.raises(
            RefusedFileError, match="vLLM's reader refuses the file, and a server does not st"
        ) as caught:
            refuse()
        assert words in caught.value.rule and caught.value.where == str(tmp_path / "model.safetensors")
    with pytest.raises(SafetensorError), safe_open(tmp_path / "model.safetensors", framework="pt"):
        pass
    with pytest.raises(CheckpointError, match="is damaged, or no safetensors file"):
        TensorFiles(tmp_path)
    told = CliRunner().invoke(app, ["explain", str(tmp_path), "--device", "h200"])
    assert isinstance(told.exception, RefusedFileError)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("BOOL", [3], 3), ("F4", [6], 3), ("F6_E2M3", [4], 3), ("F8_E8M0", [], 1), ("F8_E4M3", [2, 2], 4),
        ("F8_E5M2FNUZ", [2], 2), ("I16", [2], 4), ("BF16", [3], 6), ("U32", [0, 7], 0), ("C64", [2], 16),
        ("F64", [1], 8), ("NEW_TYPE", [3], 5),
    ],
)  # fmt: skip
def test_every_dtype_has_the_size_that_safetensors_gives_it(
    dtype: str, shape: list[int], size: int, tmp_path: Path
) -> None:
    """A dtype that is not known has any size: safetensors may know it."""
    path = tmp_path / "model.safetensors"
    for more in (0, 1):
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size + more]}
        path.write_bytes(header(**{f"{MODULE}.0.weight": entry}) + bytes(size + more))
        if more and dtype != "NEW_TYPE":
            with pytest.raises(RefusedFileError, match=f"in {size + more} bytes"):
                expert_tensors(tmp_path, [MODULE])
        else:
            assert expert_tensors(tmp_path, [MODULE])[MODULE].kinds == {("weight", dtype)}
        if dtype != "NEW_TYPE":
            with pytest.raises(SafetensorError) if more else contextlib.nullcontext(), safe_open(path, framework="pt"):
                pass


def header(*, length: int | None = None, **tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "its header would have 0 bytes"),
        (header(length=1 << 40), "its header would have 1099511627776 bytes"),
        (b"\x05\0\0\0\0\0\0\0{tru", "is not a safetensors file"),
        (header() + b"", None),
        (
            header(**{NAME: {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}) + b"\0\0",
            "its tensors end at byte 8 of 2",
        ),
        (
            header(**{NAME: {"dtype": "F16", "shape": [4], "data_offsets": [0, 10**15]}}),
            "biases of experts have more than",
        ),
        (
            header(**{NAME: {"dtype": "F16", "shape": [4], "data_offsets": [0, 10**30]}}),
            "biases of experts have more than",
        ),
        (header(**{NAME: {"dtype": "F16", "shape": [4], "data_offsets": [-2, 0]}}), "has no data_offsets"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "git lfs pull"),
        (header(**{NAME: {"dtype": "F16", "shape": [4]}}), "has no data_offsets"),
        (header(**{NAME: [1, 2]}), "Expected `object`, got `array`"),
        *(
            (
                header(**{NAME: {"dtype": dtype, "data_offsets": place}}) + bytes(16),
                "is not a safetensors file: Expected ",
            )
            for dtype, place in (
                ("F16", "ab"),
                ("F16", [0, 2, 4]),
                ("F16", [0.0, 2.0]),
                ("F16", [False, True]),
                (["F16"], [0, 2]),
                ("F16", [None, 2]),
                (2, [0, 2]),
            )
        ),
        (b"\2\0\0\0\0\0\0\0[]", "Expected `object`, got `array`"),
        (b"\5\0\0\0\0\0\0\0\xef\xbb\xbf{}", "invalid character"),
    ],
)
def test_damaged_files_are_refused_by_name(content: bytes, words: str | None, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    if words is None:
        assert not has_nonzero_expert_biases(tmp_path)
        return
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        has_nonzero_expert_biases(tmp_path)
    assert words in str(error.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        has_nonzero_expert_biases(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "GPTQ", "awq"])
def test_explain_reads_biases_from_a_folder(method: str, tmp_path: Path) -> None:
    quantization = (
        {**GPTQ, "quant_method": method} if method != "awq" else {"quant_method": "awq", "bits": 4, "group_size": 64}
    )
    (tmp_path / "config.json").write_text(json.dumps(quantized(quantization_config=quantization)))
    for bias, biased in ((ZEROS, False), (one(at=3, value=0.25), True)):
        save_file({NAME: bias}, tmp_path / "model.safetensors")
        found = find_moe_layers(read_checkpoint(tmp_path)).problems
        assert {problem.has_bias for problem in found} == {biased}
    alone = find_moe_layers(read_checkpoint(tmp_path / "config.json")).problems
    assert not any(problem.has_bias for problem in alone), "of a config alone nothing is known"
