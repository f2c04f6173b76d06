"""A router's correction bias after loading: damage that a checkpoint brings ends the load, vLLM's default does not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="layers are vLLM's")

from tests.lib import method_layers
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import correction_bias

EXPERTS = 4
SAID = "model.layers.0.mlp.experts: 1 of 4 values of the router's correction bias are NaN or infinite"


class Router(nn.Module):
    """What holds the bias."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias, requires_grad=False)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Makes a layer of our method whose correction bias is given."""
    monkeypatch.setattr(correction_bias, "_watched", type(correction_bias._watched)())
    with method_layers.inside_vllm(Emulation(), monkeypatch, experts=EXPERTS) as config:

        def made(bias: Any) -> Any:
            layer = type("Layer", (method_layers.Layer,), {"e_score_correction_bias": bias})()
            method_layers.created(config, layer)
            return layer

        yield made


def load_model(bring: Callable[[], object] = lambda: None) -> Any:
    """What vLLM's worker does."""
    return plugin._load_model(lambda worker: bring(), None)


def spoiled(value: float) -> Tensor:
    return torch.tensor([0.5, -1.0, value, 2.0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("own_loader", [False, True])
def test_damage_that_a_checkpoint_brings_is_named(make: Any, value: float, own_loader: bool) -> None:
    router = Router(torch.zeros(EXPERTS))
    if own_loader:  # MiniMax-M2
        router.bias.weight_loader = lambda param, tensor: param.data.copy_(tensor.float())  # type: ignore[attr-defined]
    layer = make(router.bias)
    bias: Any = router.bias
    with pytest.raises(CheckpointError) as raised:
        load_model(lambda: bias.weight_loader(bias, spoiled(value)))
    assert str(raised.value).startswith(f"{SAID}; the first is {value:g} of expert 2")
    assert "damaged" in raised.value.remedy
    load_model(lambda: bias.weight_loader(bias, spoiled(1.0)))
    assert torch.equal(layer.e_score_correction_bias, spoiled(1.0))


@pytest.mark.parametrize(("default", "warns"), [(0.0, False), (3e38, False), (torch.nan, True)])
def test_a_bias_that_no_tensor_fills_is_what_vllm_makes_it(
    make: Any, default: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros in Param2MoE, the memory as it was in A.X K1."""
    layer = make(Router(spoiled(default)).bias)
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        load_model()
    assert (f"{SAID}: the checkpoint has no tensor for it" in caplog.text) is warns
    assert torch.equal(layer.e_score_correction_bias, spoiled(default)) or warns


def test_counting_elements_on_the_meta_device_brings_nothing(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    bias: Any = Router(spoiled(torch.nan)).bias
    layer = make(bias)
    counted: Any = nn.Parameter(torch.empty(EXPERTS, device="meta"), requires_grad=False)
    bias.weight_loader(counted, torch.empty(EXPERTS, device="meta"))
    load_model()
    assert "no tensor for it" in caplog.text and layer.e_score_correction_bias is bias


@pytest.mark.parametrize("bias", [None, spoiled(torch.nan)])
def test_a_bias_whose_loading_nobody_sees_is_left_alone(make: Any, bias: Tensor | None) -> None:
    """A row of a parameter (ERNIE-4.5-VL), or a parameter's data."""
    make(bias)
    load_model()
    assert not correction_bias._watched


def test_a_reload_is_checked_at_its_end(make: Any) -> None:
    bias: Any = Router(torch.zeros(EXPERTS)).bias
    layer = make(bias)
    load_model(lambda: bias.weight_loader(bias, spoiled(1.0)))
    with pytest.raises(CheckpointError, match="correction bias"):
        plugin._finish_reload(lambda: bias.weight_loader(bias, spoiled(torch.nan)))
    assert layer.e_score_correction_bias is bias


def test_a_layer_that_is_gone_is_forgotten(make: Any) -> None:
    layer = make(Router(torch.zeros(EXPERTS)).bias)
    assert len(correction_bias._watched) == 1
    del layer
    gc.collect()
    assert not correction_bias._watched
