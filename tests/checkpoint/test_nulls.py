"""Fields of quantization configs that are null or left out: accepted where vLLM accepts them, else refused.

Each field of a usual config of each family is made null and left out, and vLLM's own class of the config is asked, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.configs import quantized
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.releases.min_versions import MODELOPT_EXCLUDE_MODULES

Config = dict[str, Any]

MX8 = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
RECIPES = {"model.layers.0.mlp.experts": {"quant_algo": "MXFP8"}}


def compressed(format: str, weights: Config, inputs: Config | None) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": {"g": group},
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


USUAL: dict[str, Config] = {
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "group_size": 32, "config_groups": {"g": {"weights": {}, "input_activations": {}}},
    },
    "modelopt in a file": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], "group_size": 32,
        },
    },
    "mixed": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": [], "quantized_layers": RECIPES,
    },
    "minimax": {"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "quant_algo": "MXFP8", "ignore": []},
    "mxfp8": compressed("mxfp8-quantized", MX8, MX8 | {"dynamic": True}),
    "integers": compressed("pack-quantized", INT4, None),
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "backend": "auto",
        "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers", "extra_config": {},
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"], "lm_head": False,
    },
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
        "dynamic": {}, "modules_in_block_to_quantize": ["mlp"], "checkpoint_format": "gptq",
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip

NOTED = ("desc_act", "sym", "zero_point")
"""Fields that vLLM requires and `explain` assumes a value for, with a note that says so."""
OTHERS = ("group_size",)
"""Fields of AWQ and GPTQ at whose null vLLM fails later, in a layer."""


def paths(config: Config, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if (*before, name) != ("quant_method",):
            yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def without(config: Config, path: tuple[str, ...], is_null: bool) -> Config:
    made = copy.deepcopy(config)
    part = made
    for name in path[:-1]:
        part = part[name]
    if is_null:
        part[path[-1]] = None
    else:
        del part[path[-1]]
    return made


CASES = [
    pytest.param(name, path, is_null, id=f"{name} {'.'.join(path)} {'null' if is_null else 'absent'}")
    for name, usual in USUAL.items()
    for path in paths(usual)
    for is_null in (True, False)
]


@pytest.fixture
def explain(explain: Any) -> Any:
    """Reads a config of one layer in this format."""
    return lambda config: explain(quantized(num_hidden_layers=1, quantization_config=config))


def words_of_vllm(config: Config) -> str:
    """Why vLLM's class of the config refuses it; "" where it does not."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    fields = config.get("quantization") or config
    algorithms = {"MXFP8": "modelopt_mxfp8", "MIXED_PRECISION": "modelopt_mixed"}  # without one: modelopt
    method = str(config["quant_method"])
    named = {"auto-round": "inc", "modelopt": algorithms.get(fields.get("quant_algo"), method)}
    try:
        get_quantization_config(named.get(method, method)).from_config(copy.deepcopy(config))
    except Exception as error:  # of many types
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("name", "path", "is_null"), CASES)
def test_nulls_and_missing_fields_are_what_they_are_in_vllm(
    name: str, path: tuple[str, ...], is_null: bool, explain: Any, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="asks vLLM's classes")
    config = without(USUAL[name], path, is_null)
    refused = words_of_vllm(config)
    try:
        found = explain(config)
    except CheckpointError as error:
        assert any(word in str(error) for word in (*path, "quant_algo")), error
        assert error.where.startswith(str(tmp_path))
        lately = (name in ("awq", "gptq") and path[-1] in OTHERS) or path[-1] in ("format", "quant_algo")
        assert refused or lately, error
    else:
        noted = any(path[-1] in NOTED and f": {path[-1]} is not set" in note for note in found.notes)
        # This project's class for AWQ refuses a null zero_point, which the stock one takes for false.
        assert noted == bool(refused) or (path[-1] == "zero_point" and is_null), refused


def test_each_usual_config_is_read_by_both(explain: Any) -> None:
    pytest.importorskip("vllm", reason="asks vLLM's classes")
    for name, usual in USUAL.items():
        assert explain(usual).problems, name
        assert words_of_vllm(usual) == "", name


REFUSED = [
    ("modelopt", ("ignore",), "ignore is null: vLLM refuses that, and a server does not start. Write [], or leave"),
    ("modelopt", ("quantization",), "quantization is null: vLLM refuses that"),
    ("modelopt", ("producer",), "producer is null: vLLM refuses that"),
    ("modelopt", ("quant_algo",), "there is no quant_algo"),
    ("modelopt in a file", ("quantization", "exclude_modules"), "exclude_modules is null: vLLM refuses that"),
    ("modelopt in a file", ("quantization", "quant_algo"), "there is no quant_algo"),
    ("mixed", ("ignore",), "ignore is null: vLLM refuses that"),
    ("mxfp8", ("format",), "format is null: vLLM refuses that"),
    ("mxfp8", ("config_groups",), "config_groups is null: vLLM refuses that"),
    ("mxfp8", ("config_groups", "g", "weights"), "a group has no weights: vLLM refuses that"),
    ("mxfp8", ("config_groups", "g", "targets"), "a group has no targets: vLLM refuses that"),
    ("mxfp8", ("config_groups", "g", "weights", "num_bits"), "num_bits is null: vLLM refuses that"),
    ("mxfp8", ("config_groups", "g", "input_activations", "dynamic"), "dynamic is null: vLLM refuses that"),
    ("integers", ("config_groups", "g", "weights", "group_size"), "strategy group has no group_size"),
    ("auto-round", ("group_size",), "group_size is missing: vLLM refuses that"),
    ("auto-round", ("data_type",), "data_type is null: vLLM refuses that"),
]


@pytest.mark.parametrize(("name", "path", "words"), REFUSED)
def test_what_is_refused_is_said_in_a_sentence(name: str, path: tuple[str, ...], words: str, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json, quantization_config.*: .*{words}".replace("[]", r"\[\]")):
        explain(without({**USUAL[name], **({} if len(path) > 1 else {path[0]: None})}, path, True))


@pytest.mark.parametrize(
    ("name", "more", "scheme"),
    [
        ("minimax", {"ignored_layers": None, "quant_algo": None, "ignore": None}, "mxfp8"),
        ("modelopt", {"config_groups": {"g": None}}, "mxfp8"),
        ("modelopt", {"exclude_modules": None, "ignored_layers": None}, "mxfp8"),
        ("awq", {"modules_to_not_convert": None}, "wna16"),
        ("gptq", {"modules_in_block_to_quantize": None, "dynamic": None}, "wna16"),
        ("mxfp4", {"modules_to_not_convert": None}, "mxfp4"),
        ("integers", {"ignore": None}, "wna16"),  # this plugin's class of the config takes it for none
    ],
)
def test_what_is_accepted_is_an_empty_list(name: str, more: Config, scheme: str, explain: Any) -> None:
    assert {each.scheme.name for each in explain(USUAL[name] | more).problems} == {scheme}


def test_modules_that_older_releases_do_not_read_are_a_note(explain: Any) -> None:
    config = without(USUAL["modelopt"], ("ignore",), False) | {"exclude_modules": None}
    found = explain(config)
    words = f"exclude_modules is null, which vLLM refuses from {MODELOPT_EXCLUDE_MODULES} on"
    assert found.problems and any(words in each for each in found.notes)


@pytest.mark.parametrize("groups", [{}, {"g": {"targets": [], "weights": MX8}}])
def test_a_config_without_targets_quantizes_nothing(groups: Config, explain: Any) -> None:
    found = explain(USUAL["mxfp8"] | {"config_groups": groups})
    assert found.unquantized and not found.problems
    assert any("config_groups is missing or empty: vLLM takes no layer for quantized" in each for each in found.notes)
