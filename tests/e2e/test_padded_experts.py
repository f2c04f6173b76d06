"""vLLM's own MoE block of Kimi on two ranks of a real vLLM, which pads its experts with zeros under tensor parallelism.

The block stands in GLM-4.5's layers, which route and store their experts alike. vLLM 0.32 starts none of Kimi's own
models on a CPU: their constructor imports CUTLASS for a fused all-reduce; without it (VLLM_KIMI_K3_GEMM_AR=0) the
attention backend CPU_MLA refuses the block size of the cache, and the attention itself calls CUDA operators.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, distributions, reference, vllm_runner
from tests.lib.served import PROMPT, assert_says, job, tolerance

TOKENS = 4
RANKS = 2
ENGINE: dict[str, Any] = {"tensor_parallel_size": RANKS}
FIELDS = {
    "model_type": "kimi_linear", "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1,
    "topk_group": 1,
}  # fmt: skip
"""What Kimi's code and config class read, of the same model."""

PLUGIN = '''
"""A plugin of vLLM that gives GLM-4.5's layers the MoE block of Kimi."""
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.models import glm4_moe


class Block(glm4_moe.Glm4MoE):
    def __init__(self, config, quant_config=None, prefix="", enable_eplb=False):
        from vllm.models.kimi_k3.nvidia.model import KimiMoE

        nn.Module.__init__(self)
        made = KimiMoE(config, get_current_vllm_config(), quant_config, prefix)
        for name, child in made.named_children():
            setattr(self, name, child)
        self.made = [made]  # not a module of its own: its children have their names already
        self.n_routed_experts = self.n_logical_experts = self.n_physical_experts = config.num_experts
        self.n_local_physical_experts, self.n_redundant_experts, self.n_shared_experts = config.num_experts, 0, 1
        self.is_fused_shared_expert_enabled = False

    def forward(self, hidden_states):
        return self.made[0](hidden_states)


def register():
    glm4_moe.Glm4MoE = Block
'''


@pytest.fixture(scope="module")
def outcome(folder: Path) -> dict[str, Any]:
    """What was served, what transformers says of it, and the log."""
    points, modules = ["kimi_block = kimi_block:register"], {"kimi_block": PLUGIN}
    plugin = distributions.install(folder / "kimi", "kimi-block", "vllm.general_plugins", points, modules)
    model = checkpoints.write_checkpoint(folder / "model", arch="glm4_moe", quantize_linears=False)
    expected = reference.greedy(reference.load_transformers(model), PROMPT, TOKENS)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | FIELDS))
    jobs = {
        "rows": job(model, tokens=TOKENS, engine=ENGINE),
        "experts": job(model, tokens=TOKENS, engine=ENGINE | {"enable_expert_parallel": True}),
    }
    log: list[str] = []
    variables = {"PYTHONPATH": str(plugin), "VLLM_PLUGINS": "moe_oracle,kimi_block"}
    said = vllm_runner.run("run_generate.py", jobs, folder, log, **variables)
    return {"said": said, "expected": expected, "log": log}


def test_padded_experts_end_the_start_where_stock_has_no_kernel_either(outcome: dict[str, Any]) -> None:
    assert "error" in outcome["said"]["rows"], outcome["said"]["rows"]
    raised = [line for line in outcome["log"] if "NoBackendError: " in line]
    words = "experts that the model's code pads with zeros: no backend can run mxfp8 experts here"
    assert vllm_runner.ranks_that_said(raised, words) == {0, 1}, raised
    assert all("(64 over 2 ranks: 32)" in line for line in raised)
    assert any("expert parallelism over the 2 ranks (--enable-expert-parallel)" in line for line in outcome["log"])


def test_whole_experts_are_not_padded_and_equal_transformers(outcome: dict[str, Any]) -> None:
    assert_says(outcome["said"]["experts"], outcome["expected"], tolerance("float32"))
