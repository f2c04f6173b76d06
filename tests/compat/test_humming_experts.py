"""What the constructors of vLLM's Humming classes get, in releases before 0.28 and since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.experts import fused_humming_moe as stock

from tests.lib import vllm_configs
from tests.lib.cases import problem
from vllm_moe_oracle.compat import humming
from vllm_moe_oracle.compat.adapter import Adapter
from vllm_moe_oracle.compat.legacy_adapters import Vllm027Adapter

LAYER = problem(experts=4, top_k=2, hidden_size=64, intermediate_size=32)


class Before028(stock.BatchedHummingGroupedExperts):  # type: ignore[misc]
    """The class as it was up to 0.27: it takes the layer, too."""

    def __init__(self, layer: Any, *rest: Any, **sizes: Any) -> None:
        assert layer.local_num_experts == LAYER.local_experts
        super().__init__(*rest, **sizes)


@pytest.mark.parametrize(
    ("adapter", "batched"), [(Adapter, stock.BatchedHummingGroupedExperts), (Vllm027Adapter, Before028)]
)
def test_batched_classes_get_their_sizes(adapter: Any, batched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library is for GPUs: what the classes ask of it is left out.
    monkeypatch.setattr(stock.HummingExpertsBase, "init_humming_moe", lambda self: None)
    monkeypatch.setattr(stock, "create_humming_locks", lambda device: None)
    monkeypatch.setattr(humming, "quant_config", lambda config, layer: config)
    monkeypatch.setattr(humming, "layer_stub", lambda layer, *_: SimpleNamespace(local_num_experts=layer.local_experts))
    monkeypatch.setattr(humming, "complete_reduction", lambda experts: None)
    moe = vllm_configs.moe_config(LAYER)
    moe.moe_parallel_config.ep_size = 2
    config = adapter().quant_config(LAYER, {})
    config.w1_humming_config = config.w2_humming_config = None
    experts = adapter().humming_experts(batched, moe, config, LAYER, {})
    assert (experts.max_num_tokens, experts.num_dispatchers) == (moe.max_num_tokens, 2)
