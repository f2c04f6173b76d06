"""Entries of quantization configs for single experts: those of all experts of a layer keep their meaning, and others
are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.lib.configs import AUTO_ROUND, CT_INPUTS, CT_MXFP8, GPTQ, MODELOPT, compressed, config, group
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization.modelopt import modelopt_exclusion_matcher
from vllm_moe_oracle.quantization.single_experts import check_exclusions
from vllm_moe_oracle.quantization.types import LayerNames

EXPERTS = 128
NAMES = "gate", "up", "down"
MODULE = "model.layers.{}.mlp.experts"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    },
}
MXFP8 = compressed(group(CT_MXFP8, CT_INPUTS))

Quantization = dict[str, Any]


def escaped(name: str) -> str:
    return name.replace(".", r"\.")


LEAVE_OUT: dict[str, Callable[[list[str]], Quantization]] = {
    "compressed-tensors": lambda names: MXFP8 | {"ignore": names},
    "compressed-tensors expressions": lambda names: MXFP8 | {"ignore": [f"re:{escaped(name)}$" for name in names]},
    "gptq": lambda names: GPTQ | {"dynamic": {f"-:{escaped(name)}": {} for name in names}},
    "gptq expressions": lambda names: GPTQ | {"dynamic": {f"-:.*{escaped(name[5:])}": {} for name in names}},
    "modelopt": lambda names: MODELOPT | {"ignore": names},
    "quark": lambda names: QUARK | {"exclude": names},
    "awq": lambda names: AWQ | {"modules_to_not_convert": names},
    "awq parts": lambda names: AWQ | {"modules_to_not_convert": [name[6:] for name in names]},
}
"""Quantization configs of each family that leave matrices of these names out."""


@pytest.fixture
def read(explain: Any) -> Callable[[Quantization], Any]:
    def find(quantization: Quantization) -> Any:
        return explain(config(quantization_config=quantization))

    return find


def matrices(layers: range | tuple[int, ...], experts: range | tuple[int, ...] = range(EXPERTS)) -> list[str]:
    modules = [f"{MODULE.format(layer)}.{expert}" for layer in layers for expert in experts]
    return [f"{module}.{name}_proj" for module in modules for name in NAMES]


@pytest.mark.parametrize("experts", [(0,), (7,), (0, 1, 2), tuple(range(EXPERTS - 1))], ids=["0", "7", "0-2", "most"])
@pytest.mark.parametrize("family", LEAVE_OUT)
def test_leaving_out_some_experts_of_a_layer_is_refused(family: str, experts: tuple[int, ...], read: Any) -> None:
    with pytest.raises(CheckpointError, match=r"expert \d+ differs from others: it is (stored as|not)") as caught:
        read(LEAVE_OUT[family](matrices((2,), experts)))
    assert caught.value.where.endswith(MODULE.format(2)) and "for each of them, or none" in caught.value.remedy


@pytest.mark.parametrize("layers", [(2,), range(24), range(48)], ids=["one", "half", "all"])
@pytest.mark.parametrize("family", [each for each in LEAVE_OUT if "expressions" not in each])
def test_leaving_out_all_experts_of_a_layer_keeps_its_meaning(family: str, layers: Any, read: Any) -> None:
    found = read(LEAVE_OUT[family](matrices(layers)))
    assert found.unquantized == tuple(MODULE.format(layer) for layer in layers)
    assert len(found.problems) == 48 - len(layers)


@pytest.mark.parametrize("family", ["compressed-tensors expressions", "gptq expressions"])
def test_expressions_for_each_expert_of_a_layer_keep_their_meaning(family: str, read: Any) -> None:
    assert read(LEAVE_OUT[family](matrices((2,)))).unquantized == (MODULE.format(2),)


ONE = "model.layers.2.mlp.experts.7.down_proj"
REFUSED = {
    "ignore one matrix": MXFP8 | {"ignore": [ONE]},
    "ignore expressions": MXFP8 | {"ignore": [r"re:.*layers\.2\..*experts\.7\..*"]},
    "ignore a digit": MXFP8 | {"ignore": [r"re:.*layers\.2\..*experts\.[0-8]\..*"]},
    "ignore two digits": MXFP8 | {"ignore": [r"re:model\.layers\.2\.mlp\.experts\.\d\d\.down_proj"]},
    "ignore a choice": MXFP8 | {"ignore": [r"re:.*layers\.2\.mlp\.experts\.(7|9)\.(gate|up|down)_proj"]},
    "ignore all but some": MXFP8 | {"ignore": [r"re:.*layers\.2\.mlp\.experts\.(?!7\.).*"]},
    "targets": compressed(group(CT_MXFP8, CT_INPUTS), group({**CT_MXFP8, "num_bits": 4}, None, (ONE,))),
    "dynamic": GPTQ | {"dynamic": {r".*layers\.2\.mlp\.experts\.7\.down_proj": {"bits": 8}}},
    "dynamic group": GPTQ | {"dynamic": {r"+:.*2\.mlp\.experts\.7\..*": {"group_size": 64}}},
    "modules": GPTQ | {"modules_in_block_to_quantize": [f"mlp.experts.0.{name}_proj" for name in NAMES]},
    "modules without one": GPTQ | {"modules_in_block_to_quantize": [each for each in matrices((2,)) if each != ONE]},
    "not converted": AWQ | {"modules_to_not_convert": [ONE]},
    "not converted part": AWQ | {"modules_to_not_convert": ["2.mlp.experts.7."]},
    "not converted, a matrix of all": AWQ | {"modules_to_not_convert": matrices((2,))[2::3]},
    "modelopt": MODELOPT | {"ignore": [ONE]},
    "modelopt below": MODELOPT | {"ignore": ["model.layers.2.mlp.experts.7*"]},
    "modelopt digits": MODELOPT | {"ignore": ["model.layers.2.mlp.experts.[0-9].*"]},
    "quark": QUARK | {"exclude": [ONE]},
    "extra_config": AUTO_ROUND | {"extra_config": {ONE: {"bits": 8}}},
    "extra_config end": AUTO_ROUND | {"extra_config": {"2.mlp.experts.7.down_proj": {"bits": 8}}},
    "extra_config expression": AUTO_ROUND | {"extra_config": {r".*layers\.2.*experts\.7\.down_proj": {"bits": 8}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_entry_for_one_expert_is_refused(kind: str, read: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(REFUSED[kind])
    at = "2" if kind != "modules" else "0"
    assert MODULE.format(at) in caught.value.where or "layers.2" in str(caught.value) or ".2." in str(caught.value)
    said = (
        r"expert \d+ differs from others: |stores matrices of experts as|the matrices of one layer's experts are stored"
    )
    assert re.search(said, caught.value.rule) and caught.value.remedy


KEPT: dict[str, tuple[Quantization, int]] = {
    "numbers": (MXFP8 | {"ignore": [r"re:.*layers\.2\.mlp\.experts\.\d+\..*"]}, 1),
    "layers": (MXFP8 | {"ignore": [r"re:.*layers\.(0|1|2)\..*experts.*", r"re:.*layers\.[3-5]\.mlp.*"]}, 6),
    "digits of layers": (MXFP8 | {"ignore": [r"re:.*layers.1\d.mlp.*"]}, 10),
    "other modules": (MXFP8 | {"ignore": ["re:.*shared_expert.*", "re:.*vision.*blocks.7.*", r"re:.*\.gate$"]}, 0),
    "router": (AWQ | {"modules_to_not_convert": ["gate", "visual.blocks.7.attn", "lm_head"]}, 0),
    "layer": (AWQ | {"modules_to_not_convert": ["model.layers.2."]}, 1),
    "dynamic": (GPTQ | {"dynamic": {r"-:.*layers\.2\..*": {}, r"+:.*experts.*": {"bits": 8}}}, 1),
    "all modules": (GPTQ | {"modules_in_block_to_quantize": matrices(range(48))}, 0),
    "modules of a block": (
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], [name[15:] for name in matrices((0,))]]}, 0
    ),
    "modelopt wildcard": (MODELOPT | {"ignore": ["model.layers.2.mlp.experts.*.up_proj"]}, 1),
    "modelopt layer": (MODELOPT | {"ignore": ["model.layers.2*", ONE]}, 1),
    "quark module": (QUARK | {"exclude": ["model.layers.2.mlp.experts", ONE]}, 1),
    "same": (AUTO_ROUND | {"extra_config": {name: {"bits": 4} for name in matrices(range(48))}}, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_entries_for_all_experts_keep_their_meaning(kind: str, read: Any) -> None:
    quantization, left_out = KEPT[kind]
    found = read(quantization)
    assert (len(found.unquantized), len(found.problems)) == (left_out, 48 - left_out)


def test_a_server_makes_a_matcher_for_odd_layers_alone() -> None:
    """Time runs from a budget's creation, and a server looks layers up for minutes."""
    made: list[str] = []

    def matcher() -> Callable[[LayerNames], bool]:
        made.append("matcher")
        return modelopt_exclusion_matcher(entries, "config")

    entries = ("lm_head", *(f"a.0.experts.{number}.up_proj" for number in range(4)), "a.1.experts.2", "a.2")
    entries += ("a.2.experts.1",)
    for layer in ("a.0.experts", "a.3.experts", "a.2.experts"):
        check_exclusions(entries, LayerNames((layer,), (), num_experts=4), "config", matcher)
    assert made == ["matcher"]  # for the layer that is excluded by a name above it, too
    with pytest.raises(CheckpointError, match="expert 2 is"):
        check_exclusions(entries, LayerNames(("a.1.experts",), (), num_experts=4), "config", matcher)
