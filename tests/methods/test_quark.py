"""What Quark's configs leave out, and what they give single modules: as vLLM's own class reads it."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

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
        found = scheme_of(LayerNames((module,), GATED_PROJECTIONS))
        assert (found and (getattr(found, "name", "") or found.format)) == expected  # type: ignore[union-attr]
