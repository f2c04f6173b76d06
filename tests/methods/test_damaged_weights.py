"""Weights that no kernel can compute with end the load, whichever expert has them: at a start and at a reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lib import method_layers
from tests.lib.method_layers import HIDDEN, INNER, Layer, created, load
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods.base import PROCESSED_ATTRIBUTE

EXPERTS = 9
"""More than the self-check samples."""


@pytest.fixture(params=["off", "group", "all", "strict"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """A mode of the self-check, and vLLM's config of a layer in an engine with it."""
    method_layers.use_backends([Emulation()], monkeypatch)
    with method_layers.moe_config({"self_check": request.param}, EXPERTS, HIDDEN, INNER) as config:
        yield request.param, config


@pytest.mark.parametrize("reloaded", [False, True])
def test_a_nan_code_in_an_expert_that_is_not_sampled(mode: tuple[str, Any], reloaded: bool) -> None:
    name, config = mode
    layer = Layer()
    method = created(config, layer)
    load(layer)
    if reloaded:
        method.process_weights_after_loading(layer)
        load(layer)  # the emulation keeps the checkpoint's layout
        delattr(layer, PROCESSED_ATTRIBUTE)
    layer.w2_weight.data[5].view(torch.uint8)[3, 5] = 0x7F
    if name == "off":
        method.process_weights_after_loading(layer)
        return
    rule = "codes in w2_weight of 1 of 9 local experts are NaN .* code 127 of local expert 5 at \\[3, 5\\]"
    with pytest.raises(CheckpointError, match=f"model.layers.0.mlp.experts: {rule}"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("rank", [0, 1])
def test_biases_into_which_nothing_was_loaded(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank needs the bias of the second product."""
    layer = Layer()
    layer.params_dtype = torch.bfloat16  # type: ignore[assignment]
    with method_layers.inside_vllm(Emulation(), monkeypatch, experts=2) as config:
        config.has_bias = True
        config.moe_parallel_config.tp_size, config.moe_parallel_config.tp_rank = 2, rank
        method = created(config, layer)
        method_layers.load_random(layer, 0)
        said = "the biases of the {} projection of local expert {} were never loaded"
        with pytest.raises(CheckpointError, match=said.format("gate", 0) + r".*\(4 such in w13_bias\)"):
            method.process_weights_after_loading(layer)
        layer.w13_bias.data[:1].zero_()  # of one expert
        with pytest.raises(CheckpointError, match=said.format("gate", 1) + r".*\(2 such in w13_bias\)"):
            method.process_weights_after_loading(layer)
        layer.w13_bias.data.zero_()
        if rank == 0:
            with pytest.raises(CheckpointError, match=said.format("down", 0) + r".*\(2 such in w2_bias\)"):
                method.process_weights_after_loading(layer)
            return
        method.process_weights_after_loading(layer)
    assert bool((layer.w2_bias == 0.0).all())
