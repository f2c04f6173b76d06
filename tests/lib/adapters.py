"""Writes LoRA adapters of a tiny checkpoint's attention, and the checkpoint with the adapter merged into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.lib import checkpoints

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj")


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
            weight = file.get_tensor(name).float()
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, RANK, generator=generator) / RANK**0.5
            b *= 4 * RANK / ALPHA * weight.norm() / (b @ a).norm()
            key = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{key}.lora_A.weight": a.bfloat16(), f"{key}.lora_B.weight": b.bfloat16()}
            updates[name] = ALPHA / RANK * b.bfloat16().float() @ a.bfloat16().float()
    assert updates, f"{checkpoint} has no unquantized {' or '.join(TARGETS)}"
    folder.mkdir(parents=True)
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(TARGETS)}))

    def merge(tensors: dict[str, Any]) -> None:
        for name, update in updates.items():
            tensors[name] = (tensors[name].float() + update).to(tensors[name].dtype)

    checkpoints.rewrite_tensors(checkpoint, merged, merge)
    return folder
