"""Fields that a config leaves out are read as a server reads them: by the defaults of transformers' and vLLM's config
classes, which the table in `config_defaults` repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm  # noqa: F401  # has config classes of its own, before those of transformers

from tests.lib.configs import quantized
from tests.tools import config_defaults as tool
from vllm_moe_oracle.checkpoint import config_defaults
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.errors import OracleError

MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
OFTEN = ("deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "hy_v3", "jamba", "lfm2_moe", "mixtral",
         "qwen3_moe")  # fmt: skip


def test_the_table_is_that_of_the_installed_classes() -> None:
    assert not tool.is_stale(), "run: python -m tests.tools.generate --write"


@pytest.mark.parametrize(
    ("name", "field", "what", "value"),
    [
        ("qwen3-30b-a3b", "moe_intermediate_size", "intermediate_size", 768),
        ("qwen3-30b-a3b", "num_experts", "num_experts", 128),
        ("qwen3-30b-a3b", "num_experts_per_tok", "top_k", 8),
        ("qwen3-30b-a3b", "num_hidden_layers", "num_layers", 24),
        ("kimi-k2-thinking", "moe_intermediate_size", "intermediate_size", 2048),
        ("kimi-k2-thinking", "n_routed_experts", "num_experts", 256),
        ("kimi-k2-thinking", "first_k_dense_replace", "layer", "model.layers.3.mlp.experts"),
    ],
)
def test_a_field_that_is_left_out(name: str, field: str, what: str, value: object, explain: Any) -> None:
    data = quantized(name, model_type="deepseek_v3") if "kimi" in name else quantized(name)
    assert field in data
    assert getattr(explain({key: each for key, each in data.items() if key != field}).problems[0], what) == value


def test_a_field_under_another_name_is_not_left_out(explain: Any) -> None:
    data = quantized("qwen3-30b-a3b")
    renamed = {("num_local_experts" if name == "num_experts" else name): value for name, value in data.items()}
    assert {each.num_experts for each in explain({**renamed, "num_local_experts": 64}).problems} == {64}


@pytest.mark.parametrize(
    ("kind", "stated", "first"),
    [
        ("ernie4_5_vl_moe", {"moe_layer_start_index": [3, 3], "moe_layer_end_index": [5, 5]}, 3),
        ("ernie4_5_vl_moe", {}, 1),
        ("glm4_moe", {"num_dense_layers": 4}, 4),
        ("glm4_moe", {"moe_layer_start_index": 0}, 0),
        ("sarvam_moe", {"num_dense_layers": 4}, 4),
        ("sarvam_moe", {"moe_layer_start_index": 0}, 0),
        ("deepseek_v3", {"moe_layer_freq": 1}, 3),
        ("jamba", {"expert_layer_period": 3}, 1),
    ],
)
def test_a_default_first_layer_yields_to_a_stated_one(kind: str, stated: Any, first: int, explain: Any) -> None:
    """Defaults of fields that say something else stay."""
    assert (
        int(explain(quantized(model_type=kind, **stated)).problems[0].layer.split(".layers.")[1].split(".")[0]) == first
    )


def test_a_default_list_of_layers_is_read(explain: Any) -> None:
    data = quantized(model_type="step3_text", num_hidden_layers=61)
    assert [int(each.layer.split(".")[2]) for each in explain(data).problems] == list(range(4, 60))


def found(data: dict[str, Any], folder: Path) -> object:
    """What `explain` reads; of an error its first words."""
    file = folder / "config.json"
    file.write_text(json.dumps({**data, "quantization_config": MXFP8}, default=str))
    try:
        read = find_moe_layers(read_checkpoint(file))
    except OracleError as error:
        return str(error).replace(str(file), "")[:24]
    return read.problems, read.unquantized, read.mtp_problems


def agrees(kind: str, folder: Path) -> None:
    """Compares, with one field of a model left out after another, the config with what the class makes of it."""
    cls = tool.language_model(kind)
    base = tool.made(cls).to_dict()
    own = {"model_type": kind, "architectures": ["Model"]}
    computed = {"mlp_layer_types"}  # from the numbers of layers, by the class
    for field in filter(base.__contains__, tool.FIELDS):
        left = {name: value for name, value in base.items() if name not in {field, *computed, *own}}
        served = tool.made(cls, **left).to_dict()
        assert found({**left, **own}, folder) == found({**served, **own}, folder), field


@pytest.mark.parametrize("kind", OFTEN)
def test_the_class_fills_in_the_same(kind: str, tmp_path: Path) -> None:
    agrees(kind, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in config_defaults.DEFAULTS if kind not in OFTEN])
def test_the_class_of_every_other_model_does(kind: str, tmp_path: Path) -> None:
    agrees(kind, tmp_path)
