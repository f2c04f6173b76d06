"""Folders that hold Mistral's params.json and no config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.errors import CheckpointError

MOE = {
    "num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    "first_k_dense_replace": 3, "route_every_n": 1, "routed_scale": 1.5,
    "num_expert_groups": 8, "num_expert_groups_per_tok": 4,
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
CT = {
    "quant_method": "compressed_tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
PARAMS = {
    "dim": 7168, "n_layers": 8, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128, "norm_eps": 1e-6,
    "vocab_size": 131072, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "moe": MOE,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}, "quantization": CT,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    kept = {name: value for name, value in (PARAMS | changes).items() if value is not None}
    (folder / "params.json").write_text(json.dumps(kept))
    return folder


def test_experts_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    read = read_checkpoint(written(tmp_path))
    found = find_moe_layers(read)
    assert read.path == tmp_path / "params.json" and len(found.problems) == 5
    problem = found.problems[0]
    assert problem.layer == "model.layers.3.mlp.experts" and problem.scheme.bits == 4
    assert (problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size) == (128, 4, 7168, 4096)
    assert problem.routing.num_groups == 8


def test_the_fields_are_vllms(tmp_path: Path) -> None:
    adapt = pytest.importorskip("vllm.transformers_utils.configs.mistral").adapt_config_dict
    theirs = adapt(json.loads(json.dumps(PARAMS | {"quantization": None})), {})
    ours = read_checkpoint(written(tmp_path, quantization=None)).model_config
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
                 "hidden_act", "moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group",
                 "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "routed_scaling_factor",
                 "moe_layer_freq", "model_type", "scoring_func", "norm_topk_prob", "topk_method"):  # fmt: skip
        assert ours[name] == getattr(theirs, name), name


@pytest.mark.parametrize("images", [{"vision_encoder": {"size": 1}}, {"multimodal": {"vision_encoder_args": {"a": 1}}}])
def test_with_images_the_language_model_is_a_part(images: dict[str, Any], tmp_path: Path) -> None:
    found = find_moe_layers(read_checkpoint(written(tmp_path, **images)))
    assert found.problems[0].layer == "language_model.model.layers.3.mlp.experts"


def test_mistrals_fp8_is_stocks(tmp_path: Path) -> None:
    found = find_moe_layers(read_checkpoint(written(tmp_path, quantization={"qformat_weight": "fp8_e4m3"})))
    assert set(found.unsupported_formats.values()) == {"fp8"} and not found.problems


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2}}, "Add the model's config.json"),
        ({"moe": [8]}, r"moe is \[8\], not an object"),
        ({"moe": None}, "has no MoE layers"),
        ({"quantization": {"qformat_weight": "int3"}}, "which vLLM does not read"),
        ({"quantization": 4}, "quantization is 4, which vLLM does not read"),
    ],
)
def test_what_vllm_does_not_read_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        find_moe_layers(read_checkpoint(written(tmp_path, **changes)))
    assert caught.value.where.startswith(str(tmp_path / "params.json"))


def test_a_config_beside_it_goes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert read_checkpoint(written(tmp_path)).path == tmp_path / "config.json"
