"""Damaged checkpoints through vLLM's own loaders: each gives one clear error that names layer, tensor and numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib import checkpoints, vllm_runner
from tests.lib.served import Results, job

EXPERT = "model.layers.1.mlp.experts.3."


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(EXPERT + name)


def put(name: str, make: Any) -> Any:
    return lambda tensors: tensors.update({EXPERT + name: make(tensors[EXPERT + name])})


LAYER = "model.layers.1.mlp.experts"


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def spoiled(tensor: torch.Tensor, byte: int, place: tuple[int, int]) -> torch.Tensor:
    codes = tensor.clone().view(torch.uint8)
    codes[place] = byte
    return codes.view(tensor.dtype)


def with_second_file(source: Path, target: Path, name: str, added: int) -> Path:
    """A copy of a checkpoint with a second file that holds one of its tensors again, `added` to its first byte."""
    shutil.copytree(source, target)
    tensor = load_file(source / "model.safetensors")[name]
    tensor.view(torch.uint8).view(-1)[0] += added
    save_file({name: tensor}, target / "model-2.safetensors", metadata={"format": "pt"})
    return target


FAULTS = {
    "missing scale": (
        drop("up_proj.weight_scale"),
        f"{LAYER}: the scales of the up projection of local expert 3 were never loaded. The checkpoint lacks them, or "
        "names them differently (1 such in w13_weight_scale)",
    ),
    "NaN in all scales": (
        put("up_proj.weight_scale", lambda tensor: torch.full_like(tensor, 255)),
        f"{LAYER}: 256 of 4096 scales in w13_weight_scale are NaN (e8m0 code 255); the first is code 255 of "
        "local expert 3 at [64, 0]. The checkpoint is damaged",
    ),
    "NaN in all codes": (
        put("up_proj.weight", lambda tensor: torch.full_like(tensor.view(torch.uint8), 0x7F).view(tensor.dtype)),
        f"{LAYER}: codes in w13_weight of 1 of 8 local experts are NaN (e4m3 codes 127 and 255); the first is code 127 "
        "of local expert 3 at [64, 0]. The checkpoint is damaged",
    ),
    "missing weight": (
        drop("gate_proj.weight"),
        f"{LAYER}: the gate projection of local expert 3 was never loaded. The checkpoint lacks it, or names it "
        "differently (1 such in w13_weight)",
    ),
    "weight in bfloat16": (
        put("down_proj.weight", lambda tensor: tensor.to(torch.bfloat16)),
        "the checkpoint stores it as bfloat16, mxfp8 as float8_e4m3fn. The checkpoint is not in the format that its "
        "config names",
    ),
    "scale in float32": (
        put("down_proj.weight_scale", lambda tensor: tensor.to(torch.float32)),
        "the checkpoint stores it as float32, mxfp8 as uint8",
    ),
    "scale per row": (
        put("gate_proj.weight_scale", lambda tensor: tensor[:, :1].clone()),
        "an expert's tensor has shape [64, 1], expected [64, 4]",
    ),
    "transposed weight": (
        put("up_proj.weight", lambda tensor: tensor.t().contiguous()),
        "an expert's tensor has shape [128, 64], expected [64, 128]",
    ),
    "NaN code": (
        put("down_proj.weight", lambda tensor: spoiled(tensor, 0xFF, (7, 5))),
        f"{LAYER}: codes in w2_weight of 1 of 8 local experts are NaN (e4m3 codes 127 and 255); the first is code 255 "
        "of local expert 3 at [7, 5]. The checkpoint is damaged",
    ),
    "huge scale": (
        put("up_proj.weight_scale", lambda tensor: spoiled(tensor, 254, (2, 1))),
        f"{LAYER}: w13_weight: the weight of local expert 3 in row 66, input feature 3",
    ),
    "scale as e8m0": (put("up_proj.weight_scale", lambda tensor: tensor.view(torch.float8_e8m0fnu)), ""),
}
ONLINE_FAULTS = {
    "missing weight": (
        drop("up_proj.weight"),
        f"{LAYER}: the up projection of local expert 3 was never loaded. The checkpoint lacks it, or names it "
        "differently (1 such in w13_weight)",
    ),
    "no down projections": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if f"{LAYER}." in name and "down_proj" in name],
        f"{LAYER}: nothing was loaded into w2_weight. The checkpoint lacks it or names it differently",
    ),
    "NaN everywhere": (
        put("up_proj.weight", lambda tensor: torch.full_like(tensor.view(torch.int16), -1).view(tensor.dtype)),
        f"{LAYER}: 256 of 4096 scales in w13_weight_scale are NaN (e8m0 code 255); the first is code 255 of "
        "local expert 3 at [64, 0]. The checkpoint is damaged",
    ),
    "one column": (
        put("up_proj.weight", lambda tensor: tensor[:, :1].contiguous()),
        "an expert's tensor has shape [64, 1], expected [64, 128]",
    ),
    "weight in fp8": (
        put("up_proj.weight", lambda tensor: tensor.to(torch.float8_e4m3fn)),
        "the checkpoint stores it as float8_e4m3fn, a model in 16 bits as bfloat16",
    ),
}
"""Of a checkpoint in 16 bits that is quantized while it loads."""
BIASES = {"gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"}
"""Parameter by tensor: biases that a model's code declares, of all experts."""
ONLINE = {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Results:
    plain = checkpoints.write_checkpoint(folder / "plain")
    made = {}
    for number, (name, (change, _)) in enumerate(FAULTS.items()):
        path = checkpoints.rewrite_tensors(plain, folder / str(number), change)
        made[name] = job(path, "bfloat16", 1)
    path = with_second_file(plain, folder / "second", EXPERT + "up_proj.weight", 1)
    made["second file"] = job(path, "bfloat16", 1)
    plain = checkpoints.write_checkpoint(folder / "16bit", format="bf16")
    for number, (name, (change, _)) in enumerate(ONLINE_FAULTS.items()):
        path = checkpoints.rewrite_tensors(plain, folder / f"online{number}", change)
        made[f"online {name}"] = job(path, "bfloat16", 1, engine=ONLINE)
        if name in ("missing weight", "no down projections"):
            made[f"mxfp4 {name}"] = job(path, "bfloat16", 1, online_experts="kMxfp4Static")
    gpt_oss = checkpoints.write_checkpoint(folder / "gpt_oss", arch="gpt_oss", format="bf16")
    made["gpt_oss"] = job(gpt_oss, "bfloat16", 1, online_experts="kMxfp4Static")
    plain = checkpoints.write_checkpoint(folder / "gpt_oss_mxfp4", arch="gpt_oss", format="mxfp4")
    for name in BIASES:
        path = checkpoints.rewrite_tensors(plain, folder / name, without(f"{LAYER}.{name}"))
        made[name] = job(path, "bfloat16", 1)
    made["two files"] = job(with_second_file(plain, folder / "two", f"{LAYER}.down_proj_scales", 1), "bfloat16", 1)
    made["equal files"] = job(with_second_file(plain, folder / "equal", f"{LAYER}.down_proj_scales", 0), "bfloat16", 1)
    plain = checkpoints.write_checkpoint(folder / "glm4_moe", arch="glm4_moe")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name, change in (
        ("no correction bias", lambda tensors: tensors.pop(bias)),
        ("NaN in a correction bias", lambda tensors: tensors[bias][2:3].fill_(torch.nan)),
    ):
        made[name] = job(checkpoints.rewrite_tensors(plain, folder / name, change), "bfloat16", 1)
    return vllm_runner.run("run_generate.py", made, folder)


@pytest.mark.parametrize("name", [name for name, (_, message) in FAULTS.items() if message])
def test_a_damaged_checkpoint_is_refused_with_the_tensor_and_the_numbers(outcomes: Results, name: str) -> None:
    assert FAULTS[name][1] in outcomes[name]["error"]
    assert LAYER in outcomes[name]["error"] and "expert 3" in outcomes[name]["error"]


@pytest.mark.parametrize("name", ONLINE_FAULTS)
def test_so_is_one_that_is_quantized_while_it_loads(outcomes: Results, name: str) -> None:
    assert ONLINE_FAULTS[name][1] in outcomes[f"online {name}"]["error"]
    assert LAYER in outcomes[f"online {name}"]["error"]


def test_and_one_that_becomes_mxfp4(outcomes: Results) -> None:
    missing, nothing = outcomes["mxfp4 missing weight"]["error"], outcomes["mxfp4 no down projections"]["error"]
    assert ONLINE_FAULTS["missing weight"][1] in missing
    assert ONLINE_FAULTS["no down projections"][1] in nothing


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_the_model_has_and_the_file_lacks(outcomes: Results, name: str) -> None:
    error = outcomes[name]["error"]
    projection, count = ("gate", 16) if BIASES[name] == "w13_bias" else ("down", 8)
    assert f"{LAYER}: the biases of the {projection} projection of local expert 0 were never loaded" in error
    assert f"({count} such in {BIASES[name]})" in error


@pytest.mark.parametrize(
    ("name", "place"),
    [("second file", "w13_weight, expert 3, w3"), ("two files", "w2_weight_scale")],
)
def test_a_tensor_that_two_files_hold_with_different_values(outcomes: Results, name: str, place: str) -> None:
    error = outcomes[name]["error"]
    assert LAYER in error and f".{place}: the checkpoint has two tensors for it, with different values" in error


def test_a_correction_bias_is_damaged_but_not_missed(outcomes: Results) -> None:
    """vLLM serves a quantized model whose files lack it."""
    error = outcomes["NaN in a correction bias"]["error"]
    assert f"{LAYER}: 1 of 8 values of the router's correction bias are NaN or infinite; the first is nan of" in error
    assert "error" not in outcomes["no correction bias"]


def test_a_tensor_that_two_files_hold_alike(outcomes: Results) -> None:
    assert "error" not in outcomes["equal files"]


def test_a_model_with_its_own_loader_is_not_quantized_online(outcomes: Results) -> None:
    """vLLM loads a gpt-oss in 16 bits by copying into the parameters, which have no memory yet."""
    error = outcomes["gpt_oss"]["error"]
    assert "model.layers.0.mlp.experts: nothing was loaded into w13_weight, w2_weight" in error
    assert "the model's loader bypasses vLLM's weight loader, which quantization and reload need" in error


def test_scales_stored_as_e8m0_numbers_are_the_bytes_that_they_are(outcomes: Results) -> None:
    assert "error" not in outcomes["scale as e8m0"]
    assert outcomes["scale as e8m0"]["tokens"] == [11]
