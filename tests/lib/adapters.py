"""Writes LoRA adapters of a tiny checkpoint's attention or experts, and the checkpoint with it merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.lib import checkpoints, reference

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj")
EXPERT = ("gate_proj", "up_proj", "down_proj")
EXPERTS_SIZE = 0.15
"""Norm of an expert's update, relative to its weight's."""


def write(checkpoint: Path, folder: Path, merged: Path, seed: int = 0) -> Path:
    """An adapter in PEFT's format for the projections `TARGETS`, which are not quantized, of every layer.

    Its update is about four times as large as the weights: it changes logprobs by four times what roundings may, and
    the model still recites.

    Args:
        checkpoint: the model.
        folder: of the adapter.
        merged: where the model with ``W + (alpha / rank) B A`` goes.
        seed: of the adapter's random numbers.

    Returns:
        `folder`.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    updates: dict[str, torch.Tensor] = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            if not name.endswith(tuple(f"{target}.weight" for target in TARGETS)):
                continue
            pair = _random_pair(file.get_tensor(name).float(), 4.0, generator)
            adapter |= _named(name, pair)
            updates[name] = _update(pair)
    assert updates, f"{checkpoint} has no unquantized {' or '.join(TARGETS)}"
    _save(folder, adapter, TARGETS)

    def merge(tensors: dict[str, Any]) -> None:
        for name, update in updates.items():
            tensors[name] = (tensors[name].float() + update).to(tensors[name].dtype)

    checkpoints.rewrite_tensors(checkpoint, merged, merge)
    return folder


def write_experts(checkpoint: Path, folder: Path, merged: Path, seed: int = 0) -> Path:
    """The same for the experts, one by one: `write`, with updates about a seventh as large as the
    weights, since these models' answers come from their experts: logprobs change by six times what roundings may.

    Args:
        checkpoint: the model, quantized or not; its experts have a name each.
        folder: of the adapter.
        merged: where the model in float32 goes, with the weights that it stands for and the adapter.
        seed: of the adapter's random numbers.

    Returns:
        `folder`.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    tensors = {name: torch.from_numpy(array) for name, array in reference.read_weights(checkpoint).items()}
    for name in sorted(tensors):
        if ".experts." in name and name.endswith(tuple(f"{target}.weight" for target in EXPERT)):
            pair = _random_pair(tensors[name], EXPERTS_SIZE, generator)
            adapter |= _named(name, pair)
            tensors[name] = tensors[name] + _update(pair)
    assert adapter, f"{checkpoint} has no experts with names of their own"
    _save(folder, adapter, EXPERT)
    merged.mkdir(parents=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    (merged / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_pair(weight: torch.Tensor, size: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 A `[RANK, columns]` and B `[rows, RANK]` whose update has `size` times the weight's norm."""
    rows, columns = weight.shape
    a = torch.randn(RANK, columns, generator=generator) / columns**0.5
    b = torch.randn(rows, RANK, generator=generator) / RANK**0.5
    b *= size * RANK / ALPHA * weight.norm() / (b @ a).norm()
    return a.bfloat16(), b.bfloat16()


def _update(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ALPHA / RANK * pair[1].float() @ pair[0].float()


def _named(weight: str, pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's names of both tensors."""
    key = f"base_model.model.{weight.removesuffix('.weight')}"
    return {f"{key}.lora_A.weight": pair[0], f"{key}.lora_B.weight": pair[1]}


def _save(folder: Path, adapter: dict[str, torch.Tensor], targets: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(targets)}))
