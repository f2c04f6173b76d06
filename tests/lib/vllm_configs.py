"""vLLM's config of a MoE layer, from our description of it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_moe_oracle.core.problem import Problem


def moe_config(layer: Problem, **changes: Any) -> Any:
    """vLLM's `FusedMoEConfig` of a layer on one rank and a CPU, with SiLU.

    Args:
        layer: sizes, dtype and biases are its own; its activation is not looked at.
        changes: fields of the config in place of these.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    fields = {
        "num_experts": layer.num_experts,
        "num_local_experts": layer.local_experts,
        "num_logical_experts": layer.num_experts,
        "experts_per_token": layer.top_k,
        "hidden_dim": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": getattr(torch, layer.dtype),
        "has_bias": layer.has_bias,
    }
    return FusedMoEConfig(**fields | changes)
