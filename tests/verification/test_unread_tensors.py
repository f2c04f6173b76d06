"""`verify` of tensors that nothing reads: what a server refuses or warns of when it loads them, and unknown ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lib import cli, integer_checkpoints
from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint
from tests.lib.integer_checkpoints import Integers

LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(2)]
EXPERT = f"{LAYERS[0]}.1"

Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each packing."""
    folder = tmp_path_factory.mktemp("unread")
    size = Size(experts=3, top_k=2)
    plain = write_checkpoint(folder / "plain", format="bf16", size=size)
    found = {
        packing: integer_checkpoints.write(plain, folder / packing, Integers(packing), twin=False)
        for packing in ("gptq", "awq", "compressed-tensors")
    }
    return found | {"mxfp8": write_checkpoint(folder / "mxfp8", size=size)}


def replaced(ending: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.{ending}"] = change(tensors[f"{EXPERT}.{ending}"]).contiguous()

    return edit


def added(ending: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({f"{EXPERT}.{ending}": tensor})


NOT_DECLARED = "the group index orders the input features, but the config declares no act order"
GROUPS = "the group index has groups from {}; there are 4 of 32 input features"


@pytest.mark.parametrize(
    ("packing", "ending", "change", "words"),
    [
        ("gptq", "gate_proj.g_idx", lambda index: index.roll(3), NOT_DECLARED),
        ("gptq", "gate_proj.g_idx", lambda index: index * 0 - 1, GROUPS.format("-1 to -1")),
        ("gptq", "up_proj.g_idx", lambda index: index + 1000, GROUPS.format("1000 to 1003")),
        ("compressed-tensors", "up_proj.weight_shape", lambda shape: 2 * shape, "weight_shape is (128, 256), expected"),
        ("compressed-tensors", "down_proj.weight_shape", lambda shape: shape.flip(0), "weight_shape is (64, 128)"),
    ],
)
def test_what_a_server_refuses(
    run: cli.Run,
    models: dict[str, Path],
    tmp_path: Path,
    packing: str,
    ending: str,
    change: Callable[[Tensor], Tensor],
    words: str,
) -> None:
    folder = rewrite_tensors(models[packing], tmp_path / "damaged", replaced(ending, change))
    found = run("verify", folder, "--json")
    assert found.status == 1
    first, second = found.json["layers"]
    assert (first["status"], second["status"]) == ("damaged", "passed")
    assert first["fault"].startswith(f"expert 1, {EXPERT}.{ending} (model.safetensors): {words}"), first["fault"]
    assert f"error: {LAYERS[0]}: {first['backend']}: {first['fault']}\n" in found.err


def test_a_bias_of_a_format_whose_config_declares_none(run: cli.Run, models: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's loaders drop it; one of zeros, as some tools write it, has no effect."""
    for value, status in ((0.0, 0), (1.0, 1)):
        bias = torch.full((64,), value)
        folder = rewrite_tensors(models["mxfp8"], tmp_path / f"{value}", added("up_proj.bias", bias))
        found = run("verify", folder)
        assert found.status == status
        assert ("the checkpoint has expert biases, which the model's config does not declare" in found.err) == status


@pytest.mark.parametrize(
    ("packing", "ending"),
    [
        ("gptq", "up_proj.weight"),
        ("gptq", "up_proj.weight_shape"),
        ("gptq", "gate_up_proj.qweight"),
        ("awq", "up_proj.scale"),
        ("compressed-tensors", "down_proj.weight"),
        ("mxfp8", "down_proj.input_scale"),
        ("mxfp8", "weight"),
    ],
)
def test_a_tensor_that_the_format_does_not_have(
    run: cli.Run, models: dict[str, Path], tmp_path: Path, packing: str, ending: str
) -> None:
    found = run("verify", rewrite_tensors(models[packing], tmp_path / "more", added(ending, torch.zeros(8))))
    assert (found.status, found.out) == (1, "")
    where = f"{LAYERS[0]}, expert 1, {EXPERT}.{ending} (model.safetensors)"
    assert found.err.startswith(f"error: {where}: experts in ") and "have no such tensor" in found.err


def test_zero_points_that_are_not_applied_are_a_warning(run: cli.Run, models: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for matrix in ("gate_proj", "down_proj"):
            tensors[f"{EXPERT}.{matrix}.qzeros"][:] = 0x12345678

    found = run("verify", rewrite_tensors(models["gptq"], tmp_path / "odd", edit), "--json")
    assert found.status == 0
    first, second = found.json["layers"]
    (words,) = first["warnings"]
    assert words.startswith(f"{EXPERT}.gate_proj.qzeros (model.safetensors) and 1 more: the config declares symmetric")
    assert second["warnings"] == []
    assert found.err.count("warning: ") == 1 and f"warning: {LAYERS[0]}: {words}\n" in found.err


def test_scales_that_the_models_dtype_rounds_are_a_warning(
    run: cli.Run, models: dict[str, Path], tmp_path: Path
) -> None:
    tiny = replaced("up_proj.weight_scale", lambda scales: torch.full_like(scales, 1.1e-7))
    folder = rewrite_tensors(models["compressed-tensors"], tmp_path / "tiny", tiny)
    assert "warning: " not in run("verify", folder).err
    (words,) = run("verify", folder, "--dtype", "float16", "--json").json["layers"][0]["warnings"]
    assert words.startswith(f"{EXPERT}.up_proj.weight_scale (model.safetensors): float16, the model's dtype, changes")


def test_a_bias_that_only_some_experts_have_is_zero_elsewhere(
    run: cli.Run, models: dict[str, Path], tmp_path: Path
) -> None:
    """No config declares biases of GPTQ's experts: a server warns, and serves zeros."""
    found = run(
        "verify", rewrite_tensors(models["gptq"], tmp_path / "one", added("up_proj.bias", torch.ones(64))), "--json"
    )
    assert found.status == 0, found.err
    first, second = found.json["layers"]
    lacking = "not in the files, as others are: it is zero"
    assert first["warnings"] == [f"{LAYERS[0]}.0.gate_proj.bias and 7 more: {lacking}"]
    assert second["warnings"] == [f"{LAYERS[1]}.0.gate_proj.bias and 8 more: {lacking}"]
