"""ModelOpt's mixed precision inside vLLM: each MoE layer decides for itself, and as `explain` says."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.lib.configs import quantized
from vllm_moe_oracle.errors import CheckpointError, DeploymentError
from vllm_moe_oracle.quantization.modelopt import modelopt_exclusion_matcher
from vllm_moe_oracle.quantization.types import LayerNames

CONFIG = Path(__file__).parents[1] / "golden" / "configs" / "qwen3-30b-a3b.json"


def config_of(recipes: dict[str, str], **more: Any) -> Any:
    from vllm_moe_oracle.methods.modelopt import ModelOptMixedPrecisionConfig

    return ModelOptMixedPrecisionConfig.from_config(quantization(recipes, **more))


def quantization(recipes: dict[str, str], **more: Any) -> dict[str, Any]:
    layers = {name: {"quant_algo": algo} for name, algo in recipes.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **more}


def experts(index: int) -> str:
    return f"model.layers.{index}.mlp.experts"


RECIPES = {
    experts(0): "MXFP8",
    f"{experts(1)}.0.gate_proj": "MXFP8",
    f"{experts(1)}.0.up_proj": "MXFP8",
    f"{experts(1)}.0.down_proj": "MXFP8",
    "model.layers.2.mlp.gate_proj": "mxfp8",
    "model.layers.3.mlp.shared_expert.gate_proj": "MXFP8",
    f"{experts(4)}.*": "MXFP8",
    f"{experts(10)}.7.w1": "MXFP8",
    f"{experts(11)}.0.gate_proj": "FP8",
}


def test_vllm_and_explain_decide_alike(explain: Any) -> None:
    found = explain(quantized(quantization_config=quantization(RECIPES)))
    explained = {problem.layer: "MXFP8" for problem in found.problems} | dict(found.unsupported_formats)
    config = config_of(RECIPES)
    served = {experts(index): config._resolve_quant_algo(experts(index)) for index in range(48)}
    assert {name: algo for name, algo in served.items() if algo} == explained
    assert sorted(int(name.split(".")[2]) for name in explained) == [0, 1, 2, 4, 10, 11]


def test_a_release_without_mxfp8_there_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stock class would load the codes into layers in 16 bits."""
    from vllm_moe_oracle.methods import modelopt

    monkeypatch.setattr(modelopt, "current_adapter", lambda: SimpleNamespace(version=lambda: "0.24.0"))
    config = config_of(RECIPES)
    assert config._resolve_quant_algo(experts(5)) is None and config._resolve_quant_algo(experts(11)) == "FP8"
    with pytest.raises(DeploymentError, match=r"MXFP8 of the quantization modelopt_mixed from 0\.25\.1 on\. Serve it"):
        config._resolve_quant_algo(experts(0))


def test_linear_layers_resolve_as_in_stock() -> None:
    config = config_of({"model.layers.0.self_attn.q_proj": "MXFP8", "model.layers.0.mlp.down_proj": "NVFP4"})
    assert config._resolve_quant_algo("model.layers.0.self_attn.q_proj") == "MXFP8"
    assert config._resolve_quant_algo("model.layers.0.mlp.down_proj") == "NVFP4"


def test_a_draft_models_layers_decide_for_themselves() -> None:
    config = config_of({f"{experts(0)}.0.gate_proj": "MXFP8", "mtp.layers.0.mlp.experts.0.gate_proj": "NVFP4"})
    assert config._resolve_quant_algo("mtp.layers.0.mlp.experts") == "NVFP4"
    assert config._resolve_quant_algo("mtp.layers.1.mlp.experts") is None
    assert config._resolve_quant_algo(experts(0)) == "MXFP8"


def test_names_of_multimodal_checkpoints_are_vllms_by_another_order() -> None:
    config = config_of({"model.language_model.layers.0.mlp.experts.0.up_proj": "MXFP8"})
    assert config._resolve_quant_algo("language_model.model.layers.0.mlp.experts") == "MXFP8"


def test_matrices_of_one_layer_in_two_formats_are_refused() -> None:
    config = config_of({f"{experts(0)}.0.gate_proj": "MXFP8", f"{experts(0)}.1.gate_proj": "NVFP4"})
    with pytest.raises(CheckpointError, match=r"different quant_algo: MXFP8, NVFP4"):
        config._resolve_quant_algo(experts(0))


def test_layers_that_vllm_renames_are_found_by_their_new_names() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = config_of({"backbone.layers.0.mixer.experts.0.up_proj": "MXFP8"})
    assert config._resolve_quant_algo("model.layers.0.mixer.experts") is None
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"backbone.": "model."}))
    assert config._resolve_quant_algo("model.layers.0.mixer.experts") == "MXFP8"


def test_a_used_config_can_be_pickled() -> None:
    config = config_of(RECIPES)
    assert config._resolve_quant_algo(experts(1)) == "MXFP8"
    assert pickle.loads(pickle.dumps(config))._resolve_quant_algo(experts(1)) == "MXFP8"


def test_an_excluded_layer_is_not_quantized_whatever_its_recipe_says() -> None:
    config = config_of({experts(0): "MXFP8"}, ignore=[experts(0)])
    assert config.is_layer_excluded(experts(0)) and not config.is_layer_excluded(experts(1))


@pytest.mark.parametrize("precision", ["MXFP8", "MIXED_PRECISION"])
@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1",
        "model.layers.1*",
        "layers.1",
        "model.layers.1.mlp*",
        "model.layers.1?",
        "*.mlp.experts",
        "*.mlp.experts.*",
        "model.layers.1.mlp.experts.*",
        "model.layers.1.mlp.experts.*.up_proj",
        "re:.*experts",
        "*.layers.1.mlp.*",
        ".mlp.",
        "mlp.shared_experts",
        "*mlp.gate*",
    ],
)
def test_vllm_leaves_out_the_layers_that_explain_does(precision: str, pattern: str, explain: Any) -> None:
    """A layer's number ends where it ends: `model.layers.1` is no part of layer 10."""
    from vllm_moe_oracle.methods.modelopt import ModelOptMxFp8Config

    if precision == "MXFP8":
        given = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [pattern]}
        config: Any = ModelOptMxFp8Config.from_config(given)
    else:
        given = quantization({experts(index): "MXFP8" for index in range(48)}, ignore=[pattern])
        config = config_of({experts(index): "MXFP8" for index in range(48)}, ignore=[pattern])
    left_out = [name for name in map(experts, range(48)) if config.is_layer_excluded(name)]
    assert left_out == list(explain(quantized(quantization_config=given)).unquantized)
    for index in (1, 10):
        attention = f"model.layers.{index}.self_attn.qkv_proj"
        assert config.is_layer_excluded(attention) == (experts(index) in left_out and "mlp" not in pattern)
    assert config.exclude_modules == [pattern]


EXCLUDED = ["model.layers.0.mlp.experts"]
NESTED = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None}


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        ({"quant_method": "mxfp8", "ignored_layers": EXCLUDED}, True),
        ({"quant_method": "mxfp8", "ignore": EXCLUDED}, False),
        ({"quant_method": "modelopt_mxfp8", "ignored_layers": EXCLUDED}, True),
        ({"quant_method": "modelopt_mxfp8", "ignore": EXCLUDED}, False),
        ({"quant_method": "mxfp8", "exclude_modules": EXCLUDED}, False),
        ({"quant_method": "mxfp8", "quant_algo": None, "ignored_layers": EXCLUDED}, True),
        ({"quant_method": "mxfp8", "quant_algo": "MXFP8", "ignored_layers": EXCLUDED}, False),
        ({"quant_method": "mxfp8", "quant_algo": "MXFP8", "ignore": EXCLUDED}, True),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": EXCLUDED}, True),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignored_layers": EXCLUDED}, False),
        ({"quant_method": "modelopt", "quantization": NESTED | {"exclude_modules": EXCLUDED}}, True),
        ({"quant_method": "modelopt", "quantization": NESTED | {"exclude_modules": [], "ignore": EXCLUDED}}, False),
    ],
)
def test_one_field_has_the_exclusions(config: dict[str, Any], left_out: bool, explain: Any) -> None:
    """Which one, the form of the config says, for vLLM's class and for `explain`; another one is noted."""
    from vllm_moe_oracle.methods.modelopt import ModelOptMxFp8Config, Mxfp8Config

    kind = Mxfp8Config if config["quant_method"] == "mxfp8" else ModelOptMxFp8Config
    found = explain(quantized(quantization_config=config))
    assert kind.from_config(dict(config)).is_layer_excluded(EXCLUDED[0]) == left_out
    assert (list(found.unquantized) == EXCLUDED) == left_out
    assert any("has no effect: vLLM reads" in note for note in found.notes) == (not left_out)


@st.composite
def entries(draw: st.DrawFn) -> str:
    """Parts of a matrix's name, with wildcards here and there."""
    name = f"{experts(draw(st.sampled_from((1, 2, 10))))}.{draw(st.sampled_from((0, 7)))}.gate_proj"
    start, stop = sorted(draw(st.tuples(*[st.integers(0, len(name))] * 2)))
    start = draw(st.sampled_from((0, start)))
    assume(start < stop)
    entry = name[start:stop]
    for sign in draw(st.lists(st.sampled_from(("*", "?", ".*", "re:", "[12]", ".")), max_size=2)):
        place, skipped = draw(st.integers(0, len(entry))), draw(st.integers(0, 3))
        entry = entry[:place] + sign + entry[place + skipped :]
    return entry


@given(st.lists(entries(), min_size=1, max_size=2))
def test_explain_reads_any_exclusions_as_vllm_does(names: list[str]) -> None:
    """With a model's mapping of names and without, which differ where a part of a name ends with a star."""
    from vllm.model_executor.models.utils import WeightsMapper

    from vllm_moe_oracle.methods.modelopt import ModelOptMxFp8Config

    given_ = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": names}
    plain, mapped = (ModelOptMxFp8Config.from_config(given_) for _ in range(2))
    mapped.apply_vllm_mapper(WeightsMapper())
    excluded = modelopt_exclusion_matcher(names, "here")
    for module in map(experts, (1, 2, 10)):
        try:
            found = excluded(LayerNames((module,), ()))
        except CheckpointError as error:
            assert "expert 0 differs from others: it is not excluded by name, and expert 7 is" in error.rule
            found = True
        assert found in {plain.is_layer_excluded(module), mapped.is_layer_excluded(module)}


@pytest.mark.parametrize("entries", [["{}.3.*"], ["{}.0.up_proj", "{}.1*"], ["{}.[0-6].*"]])
def test_a_layer_of_which_some_experts_are_excluded_is_refused(entries: list[str]) -> None:
    from vllm_moe_oracle.methods.modelopt import ModelOptMxFp8Config

    ignore = [entry.format(experts(1)) for entry in entries]
    config = ModelOptMxFp8Config.from_config({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ignore})
    layer = SimpleNamespace(moe_config=SimpleNamespace(num_logical_experts=8))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts: expert . differs from others: it is not"):
        config.get_quant_method(layer, experts(1))
    assert config.get_quant_method(layer, experts(2)) is None  # vLLM's class of a layer is another
    config.exclude_modules = [f"{experts(1)}.{expert}.up_proj" for expert in range(8)]
    assert config.get_quant_method(layer, experts(1)) is None
