"""Conversions that a layer cannot take are found before weights are loaded, and the next candidate gets the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="methods are vLLM's")

from tests.lib import method_layers
from tests.lib.faulty_backends import Faulty, second
from tests.lib.method_layers import Layer, created, load_random, loaded, loader
from vllm_moe_oracle.compat.layer_context import set_current_layer
from vllm_moe_oracle.errors import CheckpointError

EXPERTS, SIZE = 4, 128
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def _refuse() -> Any:
    raise CheckpointError("the codes are odd", "Quantize it anew", "layer")


REFUSED: dict[str, tuple[Convert, str]] = {
    "a parameter's name": (lambda expert: expert | {"w13_weight": expert["w13"]}, "a tensor w13_weight, a name that"),
    "a scale's name": (
        lambda expert: expert | {"w2_weight_scale": expert["w2_scale"]},
        "a tensor w2_weight_scale, a name that",
    ),
    "nested": (
        lambda expert: expert | {"w2": torch.nested.nested_tensor([torch.zeros(2, 2)])},
        "its w2 is not a dense tensor of plain numbers",
    ),
    "sparse": (
        lambda expert: expert | {"z": torch.sparse_coo_tensor(size=(2, 2), check_invariants=True)},
        "its z is not a dense tensor of plain numbers",
    ),
    "huge": (
        lambda expert: expert | {"w2": torch.empty(10**13, dtype=torch.uint8, device="meta")},
        "its tensors have 100000000",
    ),
    "lack of memory": (lambda expert: expert | {"w2": torch.empty(1 << 62, dtype=torch.uint8)}, "allocate"),
    "typed error": (lambda expert: _refuse(), "the codes are odd"),
    "an attribute's name": (lambda expert: expert | {"training": expert["w2"]}, "'training' cannot be a parameter's"),
}


@pytest.fixture
def config() -> Iterator[Any]:
    with method_layers.moe_config({"self_check": "group"}, EXPERTS, SIZE, SIZE) as found:
        yield found


def quantized_online(config: Any, layer: Layer) -> Any:
    """The method of a layer whose 16-bit weights are quantized while they are loaded."""
    from vllm_moe_oracle.methods.online import Mxfp8OnlineMoEMethod

    with set_current_layer(layer):
        method = Mxfp8OnlineMoEMethod(moe=config, layer=layer)
    method.create_weights(layer, EXPERTS, SIZE, SIZE, torch.bfloat16, weight_loader=loader)
    return method


@pytest.mark.parametrize("make", [created, quantized_online], ids=["checkpoint", "online"])
@pytest.mark.parametrize("fault", REFUSED)
def test_the_next_candidate_gets_the_layer(
    config: Any, fault: str, make: Callable[[Any, Layer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, words = REFUSED[fault]
    method_layers.use_backends([Faulty("first", lambda expert, layer: convert(expert)), second()], monkeypatch)
    layer = Layer()
    made = make(config, layer)
    assert made.backend.name == made.decision.backend == "second"
    (reason,) = made.decision.candidate("first").reasons
    assert reason.code == "defect" and words in reason.detail, reason.detail
    if make is created:
        load_random(layer, 0)
        made.process_weights_after_loading(layer)
        assert layer.moe_oracle_state == "converted"


def test_tensors_without_numbers_are_taken(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may have a tensor that is empty for some layers."""
    none = {"none": torch.zeros(0), "no_rows": torch.zeros(0, 3, dtype=torch.float64)}
    method_layers.use_backends([Faulty("first", lambda expert, layer: expert | none), second()], monkeypatch)
    layer, made = loaded(config)
    made.process_weights_after_loading(layer)
    assert made.backend.name == "first" and tuple(layer.no_rows.shape) == (EXPERTS, 0, 3)
