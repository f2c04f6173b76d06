"""Which activation the code of vLLM's models gives their experts, by the sources of its releases."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.lib.releases import every_release, sources
from tests.tools.release_names import code_of_class, listed_models
from vllm_moe_oracle.core import activations

ARCHITECTURES = {
    "afmoe": "AfmoeForCausalLM",
    "aria_text": "AriaForConditionalGeneration",
    "axk1": "AXK1ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "grok-1": "Grok1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3": "MiniMaxM3SparseForConditionalGeneration",
    "minimax_m3_text": "MiniMaxM3SparseForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "pangu_ultra_moe": "PanguUltraMoEForCausalLM",
    "param2moe": "Param2MoEForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "step3_text": "Step3TextForCausalLM",
}
"""The class of each model type, or the one whose layers its class takes."""

BY_LAYER = {"step3p5", "step5"}
"""Models whose code chooses by the limit of each layer."""

LAYERS = ("FusedMoE", "FusedMoEFactory", "SharedFusedMoE")
"""What makes a layer of experts, by release."""


def given(code: str) -> Iterator[str]:
    """The activation that each call in a file gives a layer of experts, as source text; silu where it gives none. A
    class of the file that derives from a layer's is one, too; what its constructor hands on counts."""
    tree = ast.parse(code)
    derived = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef) and {ast.unparse(base) for base in each.bases} & {*LAYERS}
    ]
    handing_on = {each.name: each for each in derived if "super().__init__(" in ast.unparse(each)}
    called = {*LAYERS, *(each.name for each in derived)} - {*handing_on}
    places = [(tree, called), *((each, {"__init__"}) for each in handing_on.values())]
    for place, names in places:
        for node in ast.walk(place):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                words = {each.arg: ast.unparse(each.value) for each in node.keywords}
                yield words.get("activation", "'silu'").strip("'")


@every_release
def test_activations_of_models_are_those_of_vllms_code(release: str) -> None:
    package = sources(release) / "vllm"
    layer = (package / "model_executor" / "layers" / "fused_moe" / "layer.py").read_text()
    assert layer.count('activation: str = "silu"') == 1
    classes = listed_models(package)
    seen = set()
    for kind, architecture in ARCHITECTURES.items():
        for module, name in classes.get(architecture, ()):
            found = {each for code in code_of_class(package.parent, module, name) for each in given(code)}
            wanted = activations.name_for_model_type(kind)
            assert {activations.canonical_name(each) for each in found} <= {wanted}, (kind, found)
            seen |= {kind} if found else set()
    assert seen == {kind for kind, architecture in ARCHITECTURES.items() if architecture in classes}


def test_each_model_with_an_activation_of_its_own_is_compared() -> None:
    assert set(activations._BY_MODEL_TYPE) - BY_LAYER == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ["kimi_linear", "kimi_k3", "nemotron_h", "interns2_mobius", "no_such_model"])
def test_other_configs_are_believed(kind: str) -> None:
    assert activations.name_for_model_type(kind) == ""
