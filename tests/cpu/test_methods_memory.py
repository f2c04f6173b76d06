"""What conversion takes beside the layer, through the method that vLLM calls: at most one expert and 64 MiB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import registry
from peak import Peak
from permuted import Permuted
from torch import nn

pytest.importorskip("vllm", reason="the method is a subclass of vLLM's")

from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import LifecycleError

EXPERTS, HIDDEN, INNER = 64, 512, 1024
EXPERT = 3 * HIDDEN * INNER * 33 // 32
"""Bytes of one expert in the checkpoint."""
MORE = 64 << 20


class Layer(nn.Module):
    """What the method sees of vLLM's MoE layer."""

    layer_name = "model.layers.0.mlp.experts"
    scoring_func = "softmax"
    renormalize = True
    use_grouped_topk = False
    e_score_correction_bias = None
    apply_router_weight_on_input = False

    class quant_config:
        """Weight-only, whatever the layer."""

        @staticmethod
        def get_scheme_dict(layer: Any, name: str) -> dict[str, Any]:
            assert name == "model.layers.0.mlp.experts.0.down_proj"
            return {"input_activations": None}

    def _expert_routing_tables(self) -> None:
        return None


@contextmanager
def inside_vllm(backend: Any, monkeypatch: pytest.MonkeyPatch, experts: int = EXPERTS) -> Iterator[Any]:
    """vLLM's config of a MoE layer, in a process that has only this backend."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    from vllm_moe_oracle.methods import choice
    from vllm_moe_oracle.oracle import oracle

    backends = registry([backend])
    monkeypatch.setattr(choice, "default_registry", lambda: backends)
    monkeypatch.setattr(oracle, "default_registry", lambda: backends)
    with set_current_vllm_config(VllmConfig(additional_config={"moe_oracle": {"self_check": "off"}})):
        yield FusedMoEConfig(
            num_experts=experts,
            num_local_experts=experts,
            num_logical_experts=experts,
            experts_per_token=2,
            hidden_dim=HIDDEN,
            intermediate_size=INNER,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )


def loader(*args: Any, **kwargs: Any) -> None:
    """Stands for the layer's own loader."""


def created(config: Any, layer: Layer) -> Any:
    """The method of an MXFP8 layer of llm-compressor's, with its parameters registered."""
    from vllm_moe_oracle.compat.construction import under_construction
    from vllm_moe_oracle.methods.compressed_tensors import CompressedTensorsW8A8Mxfp8MoEMethod

    with under_construction(layer):
        method = CompressedTensorsW8A8Mxfp8MoEMethod(config)
    assert method.decision.problem.scheme.activations == "16bit"
    method.create_weights(layer, config.num_experts, HIDDEN, INNER, torch.bfloat16, weight_loader=loader)
    return method


def load(layer: Layer) -> None:
    """Small numbers in every code, ones in every scale."""
    for name, parameter in layer.named_parameters():
        parameter.data.view(torch.uint8).fill_(127 if name.endswith("_scale") else 0x11)


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
