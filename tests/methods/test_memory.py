"""What conversion takes beside the layer, through the method that vLLM calls: at most one expert and 64 MiB."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.fake_layout import Permuted
from tests.lib.method_layers import EXPERTS, HIDDEN, INNER, Layer, created, inside_vllm, load
from tests.lib.peak_memory import Peak
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import LifecycleError

EXPERT = 3 * HIDDEN * INNER * 33 // 32
"""Bytes of one expert in the checkpoint."""
MORE = 64 << 20


@pytest.mark.parametrize("backend", [Emulation(), Permuted()], ids=lambda backend: backend.name)
def test_conversion_takes_one_expert_and_a_little(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    with inside_vllm(backend, monkeypatch) as config:
        method = created(config, layer)
        assert layer.moe_oracle_state == "raw"
        assert tuple(layer.w13_weight.shape) == (EXPERTS, 2 * INNER, HIDDEN), "loaders see the checkpoint's shape"
        load(layer)
        whole = sum(parameter.untyped_storage().nbytes() for parameter in layer.parameters())
        assert whole > EXPERT + MORE, "a second copy would be noticed"
        with Peak(*layer.parameters()) as peak:
            method.process_weights_after_loading(layer)
    assert layer.moe_oracle_state == "converted"
    assert peak.peak <= EXPERT + MORE
    if backend.name == "permuted":
        assert tuple(layer.w13_weight.shape) == (EXPERTS, 2 * INNER + 3, HIDDEN + 5)
        assert bool((layer.w13_weight[:, 0, HIDDEN:].view(torch.uint8) == 0x55).all())


def test_states_are_explicit_and_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    x, weights, ids = torch.zeros(1, HIDDEN), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32)
    with inside_vllm(Permuted(), monkeypatch, experts=8) as config:
        method = created(config, layer)
        with pytest.raises(LifecycleError, match=r"model\.layers\.0\.mlp\.experts: the layer was run before.* are raw"):
            method.apply(layer, x, weights, ids)
        load(layer)
        layer.w2_weight_scale.data[7, 7, 7] = 255
        with pytest.raises(Exception, match="NaN"):
            method.process_weights_after_loading(layer)
        assert layer.moe_oracle_state == "converting"
        with pytest.raises(LifecycleError, match="they are converting"):
            method.apply(layer, x, weights, ids)
        layer.w2_weight_scale.data[7, 7, 7] = 127
        method.process_weights_after_loading(layer)
        for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_sums"):
            parameter = getattr(layer, name)
            with pytest.raises(LifecycleError, match="in the kernel's layout already"):
                parameter.weight_loader(parameter, torch.zeros(1), name, shard_id="w1", expert_id=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_tensor_parallel_rank_adds_the_second_bias(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    layer.params_dtype = torch.bfloat16  # type: ignore[assignment]
    with inside_vllm(Emulation(), monkeypatch, experts=2) as config:
        config.has_bias = True
        config.moe_parallel_config.tp_size, config.moe_parallel_config.tp_rank = 2, rank
        method = created(config, layer)
        load(layer)
        layer.w2_bias.data.fill_(3.0)
        layer.w13_bias.data.fill_(5.0)
        method.process_weights_after_loading(layer)
    assert bool((layer.w2_bias == (3.0 if rank == 0 else 0.0)).all())
    assert bool((layer.w13_bias == 5.0).all())
