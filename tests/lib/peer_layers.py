"""Layers of another project's kernels, computed on a CPU by stand-ins of its package."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.measuring.random_weights import canonical_experts, random_tokens


class FunctionBuilder:
    """A builder whose experts are the function itself."""

    def from_function(self, function: Any) -> Any:
        return function


def assert_computes(peer: Any, layer: Problem, ranks: int, device: Device, tokens: int = 7) -> None:
    """Asserts that a peer accepts a layer, and computes it as the reference does.

    Args:
        peer: the peer, whose package is a stand-in.
        layer: the layer.
        ranks: number of ranks that share its experts. With more than one, the last rank is computed, and a slot has no
            expert.
        device: the machine that it is asked about.
        tokens: number of tokens, 4 at least.
    """
    assert not peer.check(layer, device).reasons
    layer = dataclasses.replace(layer, local_experts=layer.num_experts // ranks)
    plan = peer.plan(layer, device)
    canonical = canonical_experts(layer, "cpu", layer.local_experts)
    converted = [
        peer.convert({name: each[index] for name, each in canonical.items()}, layer, plan)
        for index in range(layer.local_experts)
    ]
    tensors = {name: torch.stack([each[name] for each in converted]) for name in converted[0]}
    run = peer.build_experts(tensors, layer, plan, FunctionBuilder())
    batch = random_tokens(dataclasses.replace(layer, local_experts=layer.num_experts), tokens, "uniform", "cpu")
    expert_map, ids = None, batch.ids.int()
    if ranks > 1:
        expert_map = torch.full((layer.num_experts,), -1, dtype=torch.int32)
        expert_map[-layer.local_experts :] = torch.arange(layer.local_experts, dtype=torch.int32)
        ids[3] = -1
    out, expected = torch.empty_like(batch.x), torch.empty(batch.x.shape)
    run(out, batch.x, batch.weights, ids, expert_map)
    local = ids if expert_map is None else expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1)
    small = dataclasses.replace(layer, num_experts=layer.local_experts)
    forward(canonical, small, expected, batch.x, batch.weights, local)
    assert (out.float() - expected).norm() <= 5 * 2.0**-8 * expected.norm()
