"""Models whose configs describe experts in fields of their own: several kinds in a layer, experts of zeros, and experts
that vLLM computes without a MoE layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli import Run
from tests.lib.configs import GPTQ
from vllm_moe_oracle.checkpoint.layer_names import compact_layer_names
from vllm_moe_oracle.errors import CheckpointError, LeftToStockError
from vllm_moe_oracle.releases.models import last_release_with
from vllm_moe_oracle.releases.vllm_names import REMOVED_MODELS

ERNIE_VL: dict[str, Any] = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_moe_vl", "hidden_size": 2560,
    "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 2],
    "moe_layer_end_index": [29, 26], "moe_layer_interval": 1, "moe_k": 6, "moe_num_shared_experts": 2,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "quantization_config": GPTQ,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
    "num_hidden_layers": 56, "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048,
    "n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12,
    "torch_dtype": "bfloat16", "quantization_config": GPTQ,
}  # fmt: skip
ARCTIC: dict[str, Any] = {
    "architectures": ["ArcticForCausalLM"], "model_type": "arctic", "hidden_size": 7168, "intermediate_size": 4864,
    "num_hidden_layers": 35, "num_attention_heads": 56, "num_key_value_heads": 8, "num_local_experts": 128,
    "num_experts_per_tok": 2, "moe_layer_frequency": 1, "hidden_act": "silu", "quantization_config": GPTQ,
}  # fmt: skip


def test_experts_for_text_and_for_images_are_two_kinds_of_layers(explain: Any) -> None:
    found = explain(ERNIE_VL, tp=2)
    text, images = (
        [each for each in found.problems if each.layer.endswith(name)] for name in ("text_experts", "vision_experts")
    )
    assert compact_layer_names(each.layer for each in text) == "language_model.model.layers.1-27.mlp.text_experts"
    assert compact_layer_names(each.layer for each in images) == "language_model.model.layers.2-26.mlp.vision_experts"
    assert {(each.num_experts, each.top_k, each.intermediate_size) for each in text} == {(64, 6, 768)}
    assert {(each.num_experts, each.top_k, each.intermediate_size) for each in images} == {(64, 6, 256)}
    assert found.problems[0].routing.method == "unspecified" and found.problems[0].routing.correction_bias
    without = {name: value for name, value in ERNIE_VL.items() if name != "moe_layer_end_index"}
    assert len(explain(without).problems) == 27 + 26


def test_each_kind_may_be_left_unquantized(explain: Any) -> None:
    quantization = GPTQ | {"dynamic": {r"-:.*vision_experts": {}}}
    found = explain(ERNIE_VL | {"quantization_config": quantization})
    assert len(found.problems) == 27 and compact_layer_names(found.unquantized).endswith("2-26.mlp.vision_experts")


@pytest.mark.parametrize("value", [[], [64], [64, 64, 64]])
def test_a_list_that_is_not_of_two_kinds_is_refused(value: list[int], explain: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"moe_intermediate_size is .*; vLLM reads one for text and one for images"
    ):
        explain(ERNIE_VL | {"moe_intermediate_size": value})


def test_experts_of_zeros_have_no_weights(explain: Any) -> None:
    found = explain(LONGCAT, tp=8)
    assert compact_layer_names(each.layer for each in found.problems) == "model.layers.0-27.mlp.experts"
    (problem,) = {each.key() for each in found.problems}
    assert (problem.num_experts, problem.top_k, problem.intermediate_size, problem.num_layers) == (512, 12, 256, 28)
    assert (problem.routing.method, problem.routing.renormalize) == ("unspecified", False)


def test_experts_without_a_moe_layer_are_stock_vllms(explain: Any, tmp_path: Path, run: Run) -> None:
    last = REMOVED_MODELS["ArcticForCausalLM"]
    with pytest.raises(LeftToStockError, match="vLLM's code of arctic computes its experts itself"):
        explain(ARCTIC, vllm=last)
    found = run("explain", tmp_path, "--device", "h100", "--vllm", last)
    assert found.status == 0 and "left to stock vLLM" in found.out
    found = run("explain", tmp_path, "--device", "h100")
    assert found.status == 3 and f"vLLM has ArcticForCausalLM until {last}" in found.err


MINICPM: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760,
    "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36, "num_experts": 8,
    "num_experts_per_tok": 2, "hidden_act": "silu", "quantization_config": GPTQ,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["minicpm", "minicpm3", "moondream3", "moondream3_text", "nomic_bert"])
def test_no_sizes_are_asked_of_experts_without_a_moe_layer(kind: str, explain: Any) -> None:
    config = {name: value for name, value in MINICPM.items() if name != "intermediate_size"}
    with pytest.raises(LeftToStockError, match=f"vLLM's code of {kind} computes its experts itself"):
        explain(config | {"model_type": kind})


@pytest.mark.parametrize("config", [MINICPM, MINICPM | {"num_experts": 0}], ids=["experts", "dense"])
def test_minicpm_is_stock_vllms(config: dict[str, Any], tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run("explain", tmp_path, "--device", "h100")
    assert found.status == 0 and "left to stock vLLM" in found.out


@pytest.mark.parametrize(
    ("vllm", "has"),
    [(each, True) for each in ("0.23.1", "0.24.0", "0.24.0+cpu", "v0.24.0", "0.24.1", "0.24.1rc2", "0.24.2.dev3")]
    + [(each, False) for each in (None, "", "main", "0.25.0", "0.25.0.dev1", "0.240.0", "1.0")],
)
def test_a_release_and_its_patches_have_models_that_later_ones_lack(vllm: str | None, has: bool) -> None:
    assert last_release_with(["x", 3, "Grok1ForCausalLM"], vllm) == (None if has else ("Grok1ForCausalLM", "0.24.0"))


@pytest.mark.parametrize("config", [ERNIE_VL, LONGCAT], ids=["ernie-vl", "longcat"])
def test_explain_reads_them(config: dict[str, Any], tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run("explain", tmp_path, "--device", "h100", "--tp", 4, "--json")
    assert found.status == 0 and all(each["decision"] for each in found.json["groups"])
    assert len(found.json["groups"]) == (2 if config is ERNIE_VL else 1)
