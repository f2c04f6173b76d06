"""The router's weight multiplies an expert's input once, whatever a stock class does with it, through vLLM's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep

from tests.lib.cases import problem
from tests.lib.method_layers import moe_config
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.function_experts import FunctionExperts
from vllm_moe_oracle.compat.standalone_layer import single_rank_worker

EXPERTS, HIDDEN, TOKENS = 4, 8, 6


class StandIn(FunctionExperts):
    """An expert squares its input and multiplies by its number plus one, so that a weight on the input counts twice."""

    multiplies_input = multiplies_output = refuses = False

    def __init__(self, moe: Any, quant_config: Any) -> None:
        super().__init__(moe, quant_config, lambda *args: None)

    def apply(self, **given: Any) -> None:
        weights, on_input = given["topk_weights"], given["apply_router_weight_on_input"]
        assert not (on_input and self.refuses)
        x = given["hidden_states"] * (weights if on_input and self.multiplies_input else 1.0)
        y = x**2 * (given["topk_ids"] + 1)
        given["output"].copy_(y * (1.0 if on_input and not self.multiplies_output else weights))


class OnceMore(StandIn):
    """As Marlin: the first product multiplies, too."""

    multiplies_input = True


class OnOutput(StandIn):
    """As TRTLLM-gen: the second product always multiplies."""

    multiplies_output = True


class Refusing(StandIn):
    """As Humming."""

    refuses = True


@pytest.mark.parametrize("stock", [StandIn, OnceMore, OnOutput, Refusing])
@pytest.mark.parametrize("on_input", [True, False])
def test_the_weight_multiplies_once(stock: type[StandIn], on_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = current_adapter()
    monkeypatch.setattr(adapter, "stock_class", lambda name: stock)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 1, generator=generator) + 0.5
    ids = torch.arange(TOKENS, dtype=torch.int32).remainder(EXPERTS).unsqueeze(1)
    empty = torch.zeros(EXPERTS, HIDDEN, HIDDEN)
    with single_rank_worker("cpu", TOKENS), moe_config({}, EXPERTS, HIDDEN, HIDDEN) as moe:
        config = adapter.quant_config(problem(), {})
        experts = adapter.stock_experts("module:Class", moe, config, apply_router_weight_on_input=on_input)
        prepare = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
        got = FusedMoEKernel(prepare, experts).apply(
            x.clone(), empty, empty, topk_weights=weights, topk_ids=ids, activation=moe.activation,
            global_num_experts=EXPERTS, expert_map=None, apply_router_weight_on_input=on_input,
        )  # fmt: skip
    expected = (x * weights) ** 2 * (ids + 1) if on_input else x**2 * (ids + 1) * weights
    torch.testing.assert_close(got, expected)
