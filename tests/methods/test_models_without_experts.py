"""Nothing but MoE layers changes by installing the plugin: models with and without it, over a grid of configs."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib import forked
from vllm_moe_oracle.compat import models_with_experts
from vllm_moe_oracle.compat.models_with_experts import has_experts

STEPS = [pytest.param(17, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)]


@functools.cache
def outcomes(step: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What processes without and with the plugin make of each question; see `tests.lib.quantization_probe`."""
    files = [folder / f"{side}-{step}.json" for side in ("stock", "plugin")]
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    for file in files:
        call = f"answer({str(file)!r}, {file is files[1]}, {step})"
        # From one server, with its seed for hashes: some of vLLM's messages list a set.
        done = forked.python(f"from tests.lib import quantization_probe\nquantization_probe.{call}", environment, 900)
        assert done.returncode == 0, done.stderr[-3000:]
    stock, plugin = (json.loads(each.read_text()) for each in files)
    return stock, plugin


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.mark.parametrize("step", STEPS)
def test_a_model_without_experts_is_stock_vllms(step: int, folder: Path) -> None:
    """Config classes, dtypes, methods, parameters and refusals, word for word."""
    stock, plugin = outcomes(step, folder)
    assert stock.keys() == plugin.keys()
    dense = {place for place in stock if place.startswith("dense ")}
    assert {place: (stock[place], plugin[place]) for place in dense if stock[place] != plugin[place]} == {}
    served = [place for place in dense if "refused" not in stock[place]]
    assert len(served) > 5 and len(dense) - len(served) > 5


def _is_refused(outcome: Any) -> bool:
    return isinstance(outcome, dict) and "refused" in outcome


@pytest.mark.parametrize("step", STEPS)
def test_layers_beside_experts_are_stock_vllms_where_stock_serves_them(step: int, folder: Path) -> None:
    """Stock refuses whole models for what only their experts need; then there is nothing to compare."""
    stock, plugin = outcomes(step, folder)
    compared = 0
    for place in (place for place in stock if place.startswith("moe ") and not _is_refused(stock[place])):
        if '"zero_point": null' in place:  # of AWQ's experts, which are ambiguous without it
            assert _is_refused(plugin[place])
            continue
        if '"format": "dense"' in place:  # of integers, which stock refuses as it makes the experts
            assert "vLLM refuses them" in plugin[place]["refused"]
            continue
        for name, before in stock[place].items():
            after = plugin[place][name]
            if name == "dtypes":
                assert set(before) <= set(after), place
            elif name == "layer 12" and '["model.layers.1*"]' in place:
                # Stock excludes layers 10 to 19 as well, and reads codes as 16-bit weights.
                assert after == plugin[place]["o_proj"] or "UnquantizedLinearMethod" in str(after), place
            elif name == "class" and after == "Mxfp8Config":
                assert before in plugin[place]["bases"], place
            elif name != "bases" and not _is_refused(before):
                assert before == after, (place, name)
                compared += 1
    assert compared > 20


CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, False),
    "dense": ({"hidden_size": 64, "num_experts": 0, "moe_layers": []}, False),
    "named as nobody else does": ({"my_expert_count": 8}, True),
    "nested": ({"text_config": {"ffn": [{"block_type": "dense"}, {"moe": {"count": 2}}]}}, True),
    "only the quantization": ({"quantization_config": {"ignore": ["re:.*experts.*"], "moe": True}}, False),
    "deeper than is looked": (json.loads('{"a":' * 12 + "1" + "}" * 12), True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_a_field_about_experts_counts_as_one_with_experts(name: str) -> None:
    """vLLM knows four names of the number; a model whose experts it does not see must not lose the plugin."""
    fields, expected = CONFIGS[name]
    config = SimpleNamespace(to_dict=lambda: fields)
    assert has_experts(SimpleNamespace(is_moe=False, hf_config=config)) == expected
    assert has_experts(SimpleNamespace(is_moe=True, hf_config=config))
    assert has_experts(SimpleNamespace(hf_config=config))  # a release that does not say


def test_lookups_outside_of_a_model_find_the_plugins_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_with_experts, "get_current_vllm_config_or_none", lambda: None)
    dense = SimpleNamespace(is_moe=False, hf_config=SimpleNamespace(to_dict=dict))
    seen: list[bool] = []

    def original(model: Any, word: str) -> str:
        seen.append(models_with_experts.is_current_model_served())
        if word == "fails":
            raise ValueError(word)
        return word

    assert models_with_experts.is_current_model_served()
    assert models_with_experts.read_quantization_config(original, dense, word="same") == "same"
    with pytest.raises(ValueError, match="fails"):
        models_with_experts.read_quantization_config(original, dense, "fails")
    models_with_experts.read_quantization_config(original, SimpleNamespace(is_moe=True), "same")
    assert seen == [False, False, True] and models_with_experts.is_current_model_served()


def test_a_draft_model_with_experts_counts_beside_a_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = SimpleNamespace(is_moe=False, hf_config=SimpleNamespace(to_dict=dict))
    for draft, expected in ((None, False), (dense, False), (SimpleNamespace(is_moe=True), True)):
        engine = SimpleNamespace(model_config=dense, speculative_config=SimpleNamespace(draft_model_config=draft))
        monkeypatch.setattr(models_with_experts, "get_current_vllm_config_or_none", lambda engine=engine: engine)
        assert models_with_experts.is_current_model_served() == expected
