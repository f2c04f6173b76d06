"""Which layers LoRA adapters may reach, by the names of the modules that they are for."""

from __future__ import annotations

import pytest

from vllm_moe_oracle.core.lora import targets_experts

LAYER = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    "target", ["q_proj", "qkv_proj", "o_proj", "gate_up_proj", "mlp.down_proj", "lm_head", "model"]
)
def test_other_modules_are_no_experts(target: str) -> None:
    assert not targets_experts([target], LAYER)


@pytest.mark.parametrize("target", ["experts", LAYER, f"{LAYER}.7.down_proj", "shared_expert", "mlp", "routed_experts"])
def test_names_of_experts_and_names_that_may_be_theirs_count(target: str) -> None:
    assert targets_experts(["q_proj", target], LAYER)


def test_a_layer_of_another_name_is_known_by_its_last_part() -> None:
    assert targets_experts(["ffn"], "model.layers.0.ffn") and not targets_experts(["ffn"], LAYER)
    assert not targets_experts([], LAYER)
