"""A tensor that no loader brought, and one that a file fills with the same bytes: each is told as what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="methods are subclasses of vLLM's")

from tests.lib import method_layers
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.compat.layer_context import set_current_layer
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import mxfp4, online, online_mxfp4
from vllm_moe_oracle.methods.compressed_tensors import CompressedTensorsW8A8Mxfp8MoEMethod

EXPERTS, HIDDEN, INNER = 4, 64, 32
SHARDS = {"w1": "gate", "w3": "up", "w2": "down"}
METHODS: dict[str, Callable[[Any], Any]] = {
    "mxfp8": CompressedTensorsW8A8Mxfp8MoEMethod,
    "mxfp4": mxfp4.Mxfp4MoEMethod,
    "online mxfp8": lambda config: online.Mxfp8OnlineMoEMethod(moe=config),
    "online mxfp4": lambda config: online_mxfp4.Mxfp4OnlineMoEMethod(moe=config),
}
BYTES = {"mxfp8": {"weight": 0x7F, "scale": 0xFF}, "mxfp4": {"weight": 0x88, "scale": 0xFF}}
"""What fills memory before it is loaded; biases, and weights in 16 bits, are filled with 0xFF."""


class Layer(method_layers.Layer):
    """Copies tensors as vLLM's layer does."""

    params_dtype = torch.bfloat16

    def weight_loader(
        self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, **more: Any
    ) -> None:
        """Of one expert."""
        data = param.data[expert_id]
        half = len(data) // 2
        part = data if shard_id == "w2" else data[half:] if shard_id == "w3" else data[:half]
        part.copy_(loaded_weight)


def outcome(
    name: str,
    kind: str,
    shard: str,
    change: Callable[[Tensor], Tensor | None],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> str:
    """The error, "" for none, of a layer whose tensor of local expert 2 is changed; None: it is not in the files."""
    monkeypatch.setattr(online, "initialize_online_processing", lambda layer: None)
    method_layers.use_backends([Emulation()], monkeypatch)
    with method_layers.moe_config({"self_check": mode}, EXPERTS, HIDDEN, INNER) as config:
        config.has_bias, layer = True, Layer()
        with set_current_layer(layer):
            method = METHODS[name](config)
        method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16, weight_loader=layer.weight_loader)
        for own, parameter in list(layer.named_parameters()):  # as vLLM gives them memory
            if parameter.is_meta:
                made = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
                made.__dict__.update(parameter.__dict__)
                setattr(layer, own, made)
        for own, parameter in list(layer.named_parameters()):
            for each in ("w2",) if own.startswith("w2") else ("w1", "w3"):
                rows = parameter.shape[1] // (1 if each == "w2" else 2)
                for expert in range(EXPERTS):
                    byte = 0x3F if parameter.dtype.itemsize > 1 else 0x7E if "scale" in own else 0x11
                    tensor = torch.full((rows, *parameter.shape[2:]), byte, dtype=torch.uint8)
                    if parameter.dtype.itemsize > 1:
                        tensor = torch.full(tensor.shape, 0.5, dtype=parameter.dtype)
                    tensor = tensor if tensor.dtype == parameter.dtype else tensor.view(parameter.dtype)
                    spoiled = change(tensor) if (own.split("_", 1)[1], each, expert) == (kind, shard, 2) else tensor
                    if spoiled is not None:
                        parameter.weight_loader(parameter, spoiled, f"experts.{own}", each, expert)
        try:
            method.process_weights_after_loading(layer)
        except CheckpointError as error:
            return str(error)
    return ""


def filled(name: str, kind: str) -> Callable[[Tensor], Tensor]:
    """A tensor of the bytes that fill memory before it is loaded."""
    scheme = name.rpartition(" ")[2]
    wide = kind == "bias" or name.startswith("online")
    byte = 0xFF if wide else BYTES[scheme][kind.rpartition("_")[2]]

    def fill(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        made.view(torch.uint8).fill_(byte)
        return made

    return fill


CASES = [
    (name, kind) for name in METHODS for kind in ("weight", "weight_scale", "bias")
    if not (name.startswith("online") and kind == "weight_scale")
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("mode", ["off", "group"])
def test_what_no_loader_brought(name: str, kind: str, shard: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(name, kind, shard, lambda tensor: None, monkeypatch, mode)
    what = {"weight": "", "weight_scale": "the scales of ", "bias": "the biases of "}[kind]
    were = "were" if what else "was"
    parameter = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
    assert f"{what}the {SHARDS[shard]} projection of local expert 2 {were} never loaded" in found
    assert f"(1 such in {parameter})" in found and "damaged" not in found


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("mode", ["off", "group"])
def test_what_a_file_fills_with_such_bytes(
    name: str, kind: str, shard: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcome(name, kind, shard, filled(name, kind), monkeypatch, mode)
    if (name, kind) == ("mxfp4", "weight"):  # negative zeros are numbers
        assert found == ""
        return
    assert "The checkpoint is damaged" in found and "never loaded" not in found
    assert "NaN" in found and "local expert 2 at" in found


@pytest.mark.parametrize("name", METHODS)
def test_a_whole_layer_of_them_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(name, "", "", lambda tensor: tensor, monkeypatch, "group") == ""
