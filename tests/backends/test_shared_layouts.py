"""Backends that say that they share a layout convert to the same bits: they may run one layer by turns."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from tests.lib.cases import GPT_OSS, H200, INT4_G128, MXFP8_W8A8, SILU, backend, problem
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measuring.random_weights import canonical_experts
from vllm_moe_oracle.oracle.registry import default_registry

SMALL: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 192}
ALTERNATING = dataclasses.replace(GPT_OSS, interleaved=True)
LAYERS = {
    "mxfp8": problem(**SMALL, scheme=MXFP8_W8A8),
    "mxfp8, biases": problem(**SMALL, scheme=MXFP8_W8A8, has_bias=True),
    "gpt-oss": problem(**SMALL, scheme=Scheme("mxfp4", 4, 32, "gpt_oss"), activation=ALTERNATING, has_bias=True),
    "mxfp4": problem(**SMALL, scheme=Scheme("mxfp4", 4, 32, "compressed-tensors"), activation=SILU),
    "int4": problem(**SMALL | {"intermediate_size": 256}, scheme=INT4_G128),
    "int8": problem(**SMALL | {"intermediate_size": 256}, scheme=dataclasses.replace(INT4_G128, bits=8)),
}
DEVICES = {"H200": H200, "B200": known_device("nvidia-b200"), "A100": known_device("nvidia-a100")}


def sharing(layer: Problem, device: Any) -> list[tuple[Any, Any]]:
    """Pairs of backends that name the same layout for a layer."""
    found = default_registry().for_scheme(layer.scheme.name)
    names = {each.name: each.layout(layer, each.plan(layer, device)) for each in found}
    return [(one, other) for one, other in itertools.combinations(found, 2) if names[one.name] == names[other.name]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_shares_a_layout_is_the_same_to_the_bit(name: str, device: str) -> None:
    layer = LAYERS[name]
    pairs = sharing(layer, DEVICES[device])
    if not pairs:
        return
    experts = canonical_experts(layer, "cpu", 2)
    one_expert = {key: tensor[1] for key, tensor in experts.items()}
    for pair in pairs:
        plans = [each.plan(layer, DEVICES[device]) for each in pair]
        first, second = (
            each.convert({key: tensor.clone() for key, tensor in one_expert.items()}, layer, plan)
            for each, plan in zip(pair, plans, strict=True)
        )
        words = f"{pair[0].name} and {pair[1].name}"
        assert plans[0].hidden_size == plans[1].hidden_size, words
        assert first.keys() == second.keys(), words
        for key, tensor in first.items():
            assert (tensor.shape, tensor.dtype) == (second[key].shape, second[key].dtype), f"{words}: {key}"
            same = torch.equal(tensor.contiguous().view(torch.uint8), second[key].contiguous().view(torch.uint8))
            assert same, f"{words}: {key}"


def test_some_backends_share_one() -> None:
    """The test above would hold if nobody did."""
    pairs = {(one.name, other.name) for layer in LAYERS.values() for one, other in sharing(layer, H200)}
    assert ("triton_mxfp4", "triton_mxfp4_unfused") in pairs


def test_a_backend_that_says_nothing_shares_with_nobody() -> None:
    layer = LAYERS["mxfp8"]
    one, other = backend("one"), backend("other")
    assert one.layout(layer, one.plan(layer, H200)) != other.layout(layer, other.plan(layer, H200))
