"""A model may ask vLLM's experts for outputs that are not summed over top-k. No check of ours may meet those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from tests.lib import vllm_configs
from tests.lib.cases import problem
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.function_experts import FunctionExperts
from vllm_moe_oracle.core.problem import Parallel

LAYER = problem(num_experts=8, local_experts=8, top_k=2, hidden_size=128, intermediate_size=64, parallel=Parallel(tp=2))

pytestmark = pytest.mark.skipif(
    not hasattr(FusedMoEConfig, "defer_moe_finalize_max_num_tokens"), reason="a release without them"
)


class Unreduced(FunctionExperts):
    """As TensorRT-LLM's experts in vLLM: no tensor where the config asks for unreduced outputs."""

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.moe_config.should_defer_moe_finalize(hidden_states.shape[0]):
            raise AssertionError("a consumer that does not sum would get unreduced outputs")
        output.copy_(hidden_states)


@pytest.fixture
def moe() -> Any:
    """The config of a layer over two ranks whose model asks for unreduced outputs."""
    with set_current_vllm_config(VllmConfig()):
        made = vllm_configs.moe_config(LAYER)
    made.moe_parallel_config.tp_size = 2
    if callable(made.defer_moe_finalize):
        made.defer_moe_finalize(64)
    else:  # a field in older releases
        made.defer_moe_finalize = True
    assert made.should_defer_moe_finalize(16)
    return made


@pytest.mark.parametrize("installed", [False, True])
def test_trial_calls_return_sums(installed: bool, moe: Any) -> None:
    """Those of a small layer, and those of the layer itself as it will serve."""
    adapter = current_adapter()
    with set_current_vllm_config(VllmConfig()):
        config = moe if installed else adapter.single_rank_config(moe, LAYER)
        made = Unreduced(config, adapter.quant_config(LAYER, {}), lambda *arguments: None)
        tensors = {"w13": torch.zeros(8, 128, 128), "w2": torch.zeros(8, 128, 64)}
        x = torch.rand(16, 128, dtype=torch.bfloat16)
        ids = torch.zeros(16, 2, dtype=torch.int32)
        found = adapter.run_single_rank(made, None, tensors, x, torch.ones(16, 2), ids)
    assert torch.equal(found, x) and moe.should_defer_moe_finalize(16)


def test_a_request_is_taken_back_for_experts_that_sum(moe: Any) -> None:
    """The model would take their sums for unreduced outputs."""
    adapter = current_adapter()
    assert adapter.finalize_always(moe) and not moe.should_defer_moe_finalize(16)
