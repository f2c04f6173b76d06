"""Experts of a checkpoint that is quantized otherwise, made MXFP8 while they load: vLLM 0.33's requantization.

Its parts run from that release's sources, over whatever release is installed. The checkpoint's own method is a stand-in
whose format is as simple as can be: int8 codes and one scale for each output row.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib import method_layers as memory
from tests.lib import stock_code
from tests.lib.fake_layout import Permuted
from tests.lib.releases import DEFAULT_RELEASE
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.schemes import mxfp8

RELEASE = NEWEST
pytestmark = [] if RELEASE == DEFAULT_RELEASE else [pytest.mark.matrix]
EXPERTS, HIDDEN, INNER = 4, memory.HIDDEN, memory.INNER


class Source:
    """The method of the checkpoint's quantization."""

    def __init__(self, bias: bool) -> None:
        self.bias = bias

    def create_weights(
        self, layer: nn.Module, experts: int, hidden: int, inner: int, *args: Any, **kwargs: Any
    ) -> None:
        """Registers its own parameters, and biases as stock methods do."""
        for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            made = {
                f"{name}_codes": torch.zeros(experts, rows, columns, dtype=torch.int8),
                f"{name}_row_scale": torch.ones(experts, rows, 1),
            }
            if self.bias:
                made[f"{name}_bias"] = torch.zeros(experts, rows, dtype=torch.bfloat16)
            for key, tensor in made.items():
                layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))

    def dequantize_weight(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Both matrices in 16 bit."""
        first, second = ((getattr(layer, f"{n}_codes") * getattr(layer, f"{n}_row_scale")) for n in ("w13", "w2"))
        return first.to(torch.bfloat16), second.to(torch.bfloat16)


@pytest.fixture
def method_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our online method over that release's base class."""
    from vllm.model_executor.layers.quantization.online import moe_base

    from vllm_moe_oracle.methods.online import Mxfp8OnlineMoEMethod

    folder = f"{stock_code.QUANTIZATION}/online"
    mixin = stock_code.load(RELEASE, f"{folder}/requantization.py")["OnlineRequantizationMixin"]
    given = {"OnlineRequantizationMixin": mixin}
    base = stock_code.load(RELEASE, f"{folder}/moe_base.py", **given)["OnlineMoEMethodBase"]
    monkeypatch.setattr(moe_base.OnlineMoEMethodBase, "create_weights", base.create_weights)
    parts = (
        "create_requantization_source_weights",
        "release_requantization_source_weights",
        "set_requantization_source",
    )
    more = {name: vars(mixin)[name] for name in parts}
    more["get_weights_for_quantization"] = base.get_weights_for_quantization
    yield type("Mxfp8OnlineMoEMethod", (Mxfp8OnlineMoEMethod,), more)


def layer_of(config: Any) -> Any:
    made: Any = memory.Layer()
    made.moe_config = config
    made.local_num_experts = EXPERTS
    return made


def converted(
    method_class: Any, backend: Any, bias: bool, monkeypatch: pytest.MonkeyPatch, damage: bool = False
) -> Any:
    """A layer whose checkpoint came through its own method, and what that dequantized it to."""
    from vllm_moe_oracle.compat.layer_context import set_current_layer

    with memory.inside_vllm(backend, monkeypatch, experts=EXPERTS) as config:
        config.has_bias = bias
        layer = layer_of(config)
        with set_current_layer(layer):
            method = method_class(moe=config)
        method.requantization_source_parameters = {}
        method.set_requantization_source(Source(bias))
        method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16, weight_loader=memory.loader)
        assert {name for name, _ in layer.named_parameters()} >= {"w13_codes", "w2_row_scale"}
        assert layer.moe_oracle_state == "raw"
        generator = torch.Generator().manual_seed(0)
        for name, parameter in layer.named_parameters():
            values = torch.randint(-127, 128, parameter.shape, generator=generator)
            parameter.data.copy_(values if name.endswith("codes") else values.float() / 1024)
        if damage:
            layer.w2_row_scale.data[1, 2] = torch.nan
        source = dict(zip(("w13", "w2"), Source(bias).dequantize_weight(layer), strict=True))
        biases = {name: getattr(layer, name).data.clone() for name in ("w13_bias", "w2_bias") if bias}
        method.process_weights_after_loading(layer)
        return SimpleNamespace(layer=layer, method=method, source=source, biases=biases)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("backend", [Emulation(), Permuted()], ids=lambda backend: backend.name)
def test_the_checkpoints_own_weights_become_mxfp8_and_are_gone(
    method_class: Any, backend: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = converted(method_class, backend, bias, monkeypatch)
    names = {name for name, _ in found.layer.named_parameters()}
    assert not {name for name in names if name.endswith(("codes", "row_scale"))}
    assert ("w13_bias" in names) == ("w2_bias" in names) == bias
    assert found.layer.moe_oracle_state == "converted" and found.method.requantization_source_parameters == {}
    expected: dict[str, Tensor] = dict(found.biases)
    for name, values in found.source.items():
        expected[name], expected[f"{name}_scale"] = mxfp8.quantize(values)
    problem, plan = found.method.decision.problem, found.method.decision.plan
    for index in range(EXPERTS):
        made = backend.convert({key: tensor[index] for key, tensor in expected.items()}, problem, plan)
        for own, tensor in made.items():
            name = mxfp8.parameter_names(problem).get(own, own)
            there = getattr(found.layer, name).data[index]
            assert torch.equal(there.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), own


def test_a_second_conversion_changes_nothing(method_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = converted(method_class, Permuted(), True, monkeypatch)
    before = {name: (each.data_ptr(), each.data.clone()) for name, each in found.layer.named_parameters()}
    found.method.process_weights_after_loading(found.layer)
    after = dict(found.layer.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name].data_ptr() == address for name, (address, _) in before.items())


def test_damaged_weights_are_noticed_before_anything_is_converted(
    method_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="w2_weight_scale are NaN"):
        converted(method_class, Emulation(), False, monkeypatch, damage=True)
