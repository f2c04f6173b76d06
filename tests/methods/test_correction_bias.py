"""A router's correction bias after loading: damage that a checkpoint brings ends the load, vLLM's default does not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs

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


def load(bias: Any, tensor: Tensor) -> None:
    """What loaders of models do with a tensor of the checkpoint."""
    getattr(bias, "weight_loader", default_weight_loader)(bias, tensor)


def replace_bias(layer: Any, bias: Tensor | None) -> None:
    type(layer).e_score_correction_bias = bias


def copied(param: Tensor, tensor: Tensor) -> None:
    """MiniMax-M2's loader."""
    param.data.copy_(tensor.float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("loader", ["vLLM's", "own", "assigned later"])
def test_damage_that_a_checkpoint_brings_is_named(make: Any, value: float, loader: str) -> None:
    bias: Any = Router(torch.zeros(EXPERTS)).bias
    if loader == "own":
        bias.weight_loader = copied
    layer = make(bias)
    if loader == "assigned later":
        set_weight_attrs(bias, {"weight_loader": copied})
    with pytest.raises(CheckpointError) as raised:
        load_model(lambda: load(bias, spoiled(value)))
    assert str(raised.value).startswith(f"{SAID}; the first is {value:g} of expert 2")
    assert "damaged" in raised.value.remedy
    load_model(lambda: load(bias, spoiled(1.0)))
    assert torch.equal(layer.e_score_correction_bias, spoiled(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("default", "warns"), [(0.0, False), (3e38, False), (torch.nan, True)])
def test_a_bias_that_no_tensor_fills_is_what_vllm_makes_it(
    make: Any, default: float, warns: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeros in Param2MoE, the memory as it was in A.X K1; some kernels have vLLM change the dtype."""
    layer = make(Router(spoiled(default)).bias)
    replace_bias(layer, layer.e_score_correction_bias.to(dtype))
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        load_model()
    assert (f"{SAID}: loading has not changed them" in caplog.text) is warns
    assert torch.equal(layer.e_score_correction_bias, spoiled(default).to(dtype)) or warns


@pytest.mark.parametrize("before", [torch.empty(EXPERTS, device="meta"), torch.zeros(EXPERTS + 1)])
def test_where_nothing_can_be_compared_nothing_is_claimed(
    make: Any, before: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """A bias whose memory came later, or of which experts were left out."""
    layer = make(Router(before).bias)
    replace_bias(layer, Router(spoiled(torch.nan)).bias)
    load_model()
    assert f"{SAID}: whether the checkpoint has brought them is not known" in caplog.text


def test_a_part_of_a_parameter_is_checked_too(make: Any) -> None:
    """A row of a parameter (ERNIE-4.5-VL)."""
    both: Any = nn.Parameter(torch.zeros(2, EXPERTS), requires_grad=False)
    layer = make(both[1])
    with pytest.raises(CheckpointError, match="correction bias"):
        load_model(lambda: load(both, torch.stack([spoiled(1.0), spoiled(torch.nan)])))
    assert layer.e_score_correction_bias[2].isnan()


@pytest.mark.parametrize("first", [None, torch.zeros(EXPERTS), torch.empty(EXPERTS, device="meta")])
def test_a_layer_without_values_of_a_bias_is_left_alone(make: Any, first: Tensor | None) -> None:
    layer = make(first)
    if first is None or not first.is_meta:
        replace_bias(layer, None)
    load_model()
    assert len(correction_bias._watched) == (first is not None)


def test_a_reload_is_checked_at_its_end(make: Any) -> None:
    bias: Any = Router(torch.zeros(EXPERTS)).bias
    layer = make(bias)
    load_model(lambda: load(bias, spoiled(1.0)))
    with pytest.raises(CheckpointError, match="correction bias"):
        plugin._finish_reload(lambda: load(bias, spoiled(torch.nan)))
    assert layer.e_score_correction_bias is bias


def test_a_layer_that_is_gone_is_forgotten(make: Any) -> None:
    layer = make(Router(torch.zeros(EXPERTS)).bias)
    assert len(correction_bias._watched) == 1
    del layer
    gc.collect()
    assert not correction_bias._watched
