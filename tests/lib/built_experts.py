"""vLLM's own expert classes, as backends build them inside vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from tests.lib import vllm_configs
from tests.lib.stock_rules import backend, expert, stacked
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Device, Problem


@contextmanager
def inside_vllm(layer: Problem, routing: str = "Renormalize") -> Iterator[Any]:
    """vLLM's `FusedMoEConfig` of a layer; skips where vLLM is not installed."""
    pytest.importorskip("vllm", reason="vLLM's own classes are asked")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType

    parallel, activation = FusedMoEParallelConfig.make_no_parallel(), layer.activation
    if layer.parallel.ep > 1:
        parallel.ep_size, parallel.use_ep = layer.parallel.ep, True
    halves = activation.name == "swigluoai" and not activation.interleaved
    situ = {"activation_situ_beta": activation.alpha, "activation_situ_linear_beta": activation.beta}
    with set_current_vllm_config(VllmConfig()):
        yield vllm_configs.moe_config(
            layer, activation=MoEActivation("swigluoai_uninterleave" if halves else activation.name),
            routing_method=RoutingMethodType[routing], moe_parallel_config=parallel, in_dtype=torch.bfloat16,
            **(situ if activation.name == "situ" else {}),
        )  # fmt: skip


class Built(NamedTuple):
    """What a backend built.

    Attributes:
        experts: an instance of vLLM's class.
        tensors: its kernel tensors, of one expert again and again.
        plan: the backend's.
        config: vLLM's config of the layer, afterwards.
    """

    experts: Any
    tensors: dict[str, torch.Tensor]
    plan: ShardPlan
    config: Any


def built(
    name: str, layer: Problem, device: Device, monkeypatch: pytest.MonkeyPatch, routing: str = "Renormalize"
) -> Built:
    """The experts of a layer that a backend takes on a device, built as on it."""
    assert backend(name).check(layer, device).reasons == ()
    with inside_vllm(layer, routing) as config:
        from vllm_moe_oracle.compat import current_adapter
        from vllm_moe_oracle.compat.experts_builder import VllmBuilder

        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
        monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: True)
        plan = backend(name).plan(layer, device)
        tensors = stacked([dict(backend(name).convert(expert(layer), layer, plan))] * layer.local_experts)
        release = current_adapter()
        builder = VllmBuilder(release, config, release.quant_config(layer, tensors))
        made = backend(name).build_experts(tensors, layer, plan, builder)
    assert type(made).__name__ == backend(name).stock_class_name
    return Built(made, tensors, plan, config)
