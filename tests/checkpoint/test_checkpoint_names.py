"""Entries of quantization configs under a checkpoint's own names of modules, for a model with a nested language model:
they mean what they mean for vLLM, which maps names of some fields and no expressions of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
from vllm.model_executor.models.utils import WeightsMapper

from tests.lib.configs import AUTO_ROUND, GPTQ, INT4, MODELOPT, PACKED, compressed, config, group

OWN, CHECKPOINT = "language_model.model.layers.{}.mlp.experts", "model.language_model.layers.{}.mlp.experts"
MAPPER = WeightsMapper(
    orig_to_new_prefix={"model.language_model.": "language_model.model.", "model.visual.": "visual."}
)
QUARK_MXFP4 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
QUARK = {"quant_method": "quark", "global_quant_config": QUARK_MXFP4, "layer_type_quant_config": {}, "export": {}}

ENTRIES = {
    r"model\.language_model\.layers\.[0-4]\..*": False,
    r".*language_model\.layers\.[0-4]\..*": False,
    r"language_model\.layers\.[0-4]\..*": False,
    r"language_model\.model\.layers\.[0-4]\..*": True,
    r"(model\.)?language_model\.(model\.)?layers\.[0-4]\..*": True,
    r".*layers\.[0-4]\.mlp\..*": True,
}
"""Expressions for layers 0 to 4, and whether they match vLLM's names of them."""


@pytest.fixture
def left_out(explain: Any) -> Any:
    """How many of the model's 48 layers a quantization config leaves unquantized."""

    def count(quantization: dict[str, Any]) -> int:
        found = explain(config("qwen3-vl-30b-a3b", quantization_config=quantization))
        assert len(found.unquantized) + len(found.problems) == 48
        return len(found.unquantized)

    return count


@pytest.mark.parametrize(("expression", "matches"), ENTRIES.items())
def test_expressions_are_for_vllms_own_names(expression: str, matches: bool, left_out: Any) -> None:
    expected = 5 * matches
    assert left_out(compressed(group(INT4), format=PACKED, ignore=["lm_head", f"re:{expression}"])) == expected
    only = compressed(group(INT4, targets=(f"re:{expression}",)), format=PACKED)
    assert left_out(only) == (43 if matches else 48)
    assert left_out(GPTQ | {"dynamic": {f"-:{expression}": {}}}) == expected
    asked = get_dynamic_override(SimpleNamespace(dynamic={f"-:{expression}": {}}), OWN.format(3))
    assert (asked is False) == matches
    assert left_out(QUARK | {"exclude": [f"re:{expression}"]}) == expected


@pytest.mark.parametrize("name", [OWN, CHECKPOINT])
def test_full_names_may_be_either(name: str, left_out: Any) -> None:
    experts = [f"{name.format(index)}.{expert}" for index in range(5) for expert in range(128)]
    matrices = [f"{expert}.{each}_proj" for expert in experts for each in ("gate", "up", "down")]
    assert left_out(compressed(group(INT4), format=PACKED, ignore=matrices)) == 5
    assert left_out(GPTQ | {"modules_in_block_to_quantize": matrices}) == 43
    assert left_out(MODELOPT | {"ignore": [name.format(3)]}) == 1
    assert left_out(QUARK | {"exclude": [name.format(3)]}) == 1
    assert left_out(AUTO_ROUND | {"extra_config": {name.format(3): {"bits": 16}}}) == 1


@pytest.mark.parametrize(
    ("wildcard", "count"),
    [
        ("model.language_model.layers.3.*", 1),
        ("language_model.model.layers.3.*", 1),
        ("*language_model.layers.3.*", 0),
        ("*.layers.3.*", 1),
        ("model.language*layers.3.*", 0),
    ],
)
def test_wildcards_are_mapped_where_they_begin_as_a_name(wildcard: str, count: int, left_out: Any) -> None:
    from vllm_moe_oracle.methods.modelopt import ModelOptMxFp8Config

    quantization = MODELOPT | {"ignore": [wildcard]}
    asked = ModelOptMxFp8Config.from_config(quantization)
    asked.apply_vllm_mapper(MAPPER)
    assert asked.is_layer_excluded(OWN.format(3)) == bool(count)
    assert left_out(quantization) == count
    expression = wildcard.replace("*", ".*").replace("3.", r"3\.")
    assert left_out(AUTO_ROUND | {"extra_config": {expression: {"bits": 16}}}) == count
