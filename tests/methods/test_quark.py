"""What Quark's configs leave out, and what they give single modules: as vLLM's own class reads it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import parse_config
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames

WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}


def experts(index: int) -> str:
    return f"model.layers.{index}.mlp.experts"


@st.composite
def entries(draw: st.DrawFn) -> str:
    """Parts of a matrix's name, most from its start, with wildcards here and there, some of them expressions."""
    name = f"{experts(draw(st.sampled_from((1, 2, 10))))}.{draw(st.sampled_from((0, 7)))}.gate_proj"
    start, stop = sorted(draw(st.tuples(*[st.integers(0, len(name))] * 2)))
    start = draw(st.sampled_from((0, 0, start)))
    assume(start < stop)
    entry = name[start:stop]
    for sign in draw(st.lists(st.sampled_from(("*", "?", ".*", "[12]", ".")), max_size=2)):
        place, skipped = draw(st.integers(0, len(entry))), draw(st.integers(0, 3))
        entry = entry[:place] + sign + entry[place + skipped :]
    start = draw(st.sampled_from(("", "*", "re:", "re:.*")))
    # Not what is no expression, which both refuse; and not Python's atomic repeats, which only we do.
    assume(not start.startswith("re:") or not re.search(r"\[[^]]*$|[*?][*?]|^[*?]", f"{start}{entry}"[3:]))
    return start + entry


@given(st.lists(entries(), max_size=2), st.lists(entries(), max_size=2))
def test_explain_reads_any_names_as_vllm_does(excluded: list[str], special: list[str]) -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    config: dict[str, Any] = {
        "quant_method": "quark",
        "export": {"kv_cache_group": []},
        "exclude": excluded,
        "layer_type_quant_config": {},
        "layer_quant_config": {entry: {"weight": {**WEIGHT, "dtype": "fp6_e3m2"}} for entry in special},
        "global_quant_config": {"weight": WEIGHT},
    }
    stock, scheme_of = QuarkConfig.from_config(config), parse_config(config, "quantization_config")
    for module in map(experts, (1, 2, 10)):
        if stock.get_quant_method_target(module, RoutedExperts)[2] is UnquantizedFusedMoEMethod:
            expected = None
        else:
            weight = stock._find_matched_config(module, RoutedExperts)["weight"]
            expected = {"fp4": "mxfp4", "fp6_e3m2": "quark fp6_e3m2"}[weight["dtype"]]
        try:
            found = scheme_of(LayerNames((module,), GATED_PROJECTIONS))
        except CheckpointError as error:
            assert "expert 0 differs from others: it is not excluded by name, and expert 7 is" in error.rule
            found = None
        assert (found and (getattr(found, "name", "") or found.format)) == expected  # type: ignore[union-attr]


def test_a_layer_of_which_some_experts_are_excluded_is_refused() -> None:
    from vllm_moe_oracle.methods.quark import get_quant_method

    asked: list[str] = []
    layer = SimpleNamespace(moe_config=SimpleNamespace(num_logical_experts=2))
    names = [f"{experts(1)}.{number}.up_proj" for number in (0, 1)]
    for exclude, refused in ((names[:1], True), (names, False)):
        config = SimpleNamespace(quant_config={"exclude": exclude})
        with pytest.raises(CheckpointError, match="and expert 0 is, for which vLLM") if refused else nullcontext():
            get_quant_method(lambda config, layer, prefix: asked.append(prefix), config, layer, experts(1))
    get_quant_method(lambda config, layer, prefix: asked.append(prefix), None, object(), "lm_head")
    assert asked == [experts(1), "lm_head"]
