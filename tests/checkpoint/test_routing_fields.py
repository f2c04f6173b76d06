"""Routing as a model's config and its code say it, and fields of routing that vLLM has no code for."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.lib.configs import quantized
from tests.lib.releases import every_release, sources
from vllm_moe_oracle.checkpoint.layer_problem import _SCORING_FUNCTIONS
from vllm_moe_oracle.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "method", "scoring", "renormalize", "groups", "bias"),
    [
        ("qwen3-30b-a3b", "renormalizenaive", "softmax", True, (None, None), False),
        ("minimax-m2", "minimax2", "sigmoid", True, (None, None), True),
        ("minimax-m3", "minimax2", "sigmoid", True, (None, None), True),
        ("nemotron-3-nano-30b-a3b", "deepseekv3", "sigmoid", True, (1, 1), True),
        ("deepseek-v3", "deepseekv3", "sigmoid", True, (8, 4), True),
        ("kimi-k2-thinking", "deepseekv3", "sigmoid", True, (1, 1), True),
        ("mixtral-8x7b", "renormalizenaive", "softmax", True, (None, None), False),
        ("glm-4.5", "deepseekv3", "sigmoid", True, (1, 1), True),
        ("llama-4-maverick", "llama4", "sigmoid", False, (None, None), False),
    ],
)
def test_routing(
    name: str, method: str, scoring: str, renormalize: bool, groups: tuple[int | None, ...], bias: bool, explain: Any
) -> None:
    routing = explain(quantized(name)).problems[0].routing
    assert (routing.method, routing.scoring, routing.renormalize) == (method, scoring, renormalize)
    assert ((routing.num_groups, routing.top_k_groups), routing.correction_bias) == (groups, bias)
    assert routing.apply_router_weight_on_input == (name == "llama-4-maverick")


@pytest.mark.parametrize(
    ("kind", "fields", "method", "renormalize", "groups", "bias"),
    [
        ("jamba", {}, "default", False, None, False),
        ("phimoe", {}, "default", False, None, False),
        ("olmoe", {"norm_topk_prob": True}, "default", False, None, False),
        ("qwen3_moe", {}, "default", False, None, False),  # what the config's class has for a missing field
        # As transformers' module of the model, which vLLM runs.
        ("dots1", {"scoring_func": "noaux_tc", "norm_topk_prob": True, "n_group": 1, "topk_group": 1}, "deepseekv3",
         True, 1, True),
        ("qwen3_next", {}, "renormalizenaive", True, None, False),
        ("afmoe", {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}, "deepseekv3", True, 1,
         True),
        ("step3p5", {"moe_router_activation": "sigmoid", "norm_expert_weight": True}, "minimax2", True, None, True),
        ("step3_text", {"norm_expert_weight": False}, "default", False, None, False),
        ("lfm2_moe", {"use_expert_bias": True}, "deepseekv3", True, 1, True),
        ("lfm2_moe", {"use_expert_bias": False}, "sigmoidrenorm", True, 1, False),
        ("sarvam_mla", {"moe_router_enable_expert_bias": True}, "minimax2", True, None, True),
        ("axk1", {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}, "deepseekv3", True, 1, True),
    ],
)  # fmt: skip
def test_routing_that_a_models_code_decides(
    kind: str, fields: dict[str, Any], method: str, renormalize: bool, groups: int | None, bias: bool, explain: Any
) -> None:
    """As the calls of `FusedMoE` in vLLM's files of these models have it, in 0.23 to 0.33."""
    data = quantized("qwen3-30b-a3b", model_type=kind, norm_topk_prob=None) | fields
    routing = explain(data).problems[0].routing
    assert (routing.method, routing.renormalize, routing.correction_bias) == (method, renormalize, bias)
    assert (routing.num_groups, routing.top_k_groups) == (groups, groups)


def test_routing_by_table_and_by_square_root_of_softplus(explain: Any) -> None:
    data = quantized("deepseek-v3", model_type="deepseek_v4", scoring_func="sqrtsoftplus", num_hash_layers=4)
    first, *_, last = explain(data).problems
    assert first.layer == "model.layers.3.ffn.experts"
    assert (first.routing.hash_routing, first.routing.correction_bias) == (True, False)
    assert (last.routing.hash_routing, last.routing.correction_bias) == (False, True)
    assert {first.routing.method, last.routing.method} == {"deepseekv4"}


@pytest.mark.parametrize("word", ["tanh", "Sigmoid", "noaux_tc", "\ud800", "s\u00f6ftmax", "soft max\n", "\x1b[31m"])
def test_an_unknown_scoring_function_is_refused_in_ascii(word: str, explain: Any) -> None:
    """Each spelling that vLLM's router refuses when a model is built."""
    known = "Write softmax, sigmoid or sqrtsoftplus"
    for field in ("scoring_func", "score_function", "router_score_func"):
        with pytest.raises(
            CheckpointError, match=rf"{field} is '.*, a scoring function .* no code for\. {known}"
        ) as caught:
            explain(quantized(**{field: word}))
        assert str(caught.value).isascii() and str(caught.value).isprintable()


def test_scoring_functions_that_groups_do_not_have_are_refused(explain: Any) -> None:
    rule = r"scoring_func is 'sqrtsoftplus', .* for groups of experts \(n_group\)\. Write softmax or sigmoid"
    with pytest.raises(CheckpointError, match=rule):
        explain(quantized("deepseek-v3", scoring_func="sqrtsoftplus"))
    found = explain(quantized("deepseek-v3", scoring_func="sqrtsoftplus", n_group=1, topk_group=1)).problems[0]
    assert found.routing.method == "deepseekv4"


@every_release
def test_scoring_functions_are_those_of_vllms_router(release: str) -> None:
    """Read from `create_fused_moe_router`, which asserts that it knows the function."""
    tree = ast.parse((sources(release) / "vllm/model_executor/layers/fused_moe/router/router_factory.py").read_text())
    (known,) = (
        ast.literal_eval(node.comparators[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left) == "scoring_func"
        and isinstance(node.ops[0], ast.In)
    )
    assert set(known) == set(_SCORING_FUNCTIONS)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"topk_group": 9}, "topk_group 9 is more than the 8 groups of n_group"),
        ({"n_group": 64, "topk_group": 1}, "a token chooses 8 experts from topk_group 1 of 64 groups of 4"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 5}, "is more than the 4 groups of num_exp"),
    ],
)
def test_groups_that_do_not_fit_the_experts_are_refused(fields: dict[str, Any], rule: str, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=rule):
        explain(quantized("deepseek-v3") | fields)
    # Without both fields a router has no groups.
    assert explain(quantized("deepseek-v3") | fields | {"topk_group": 0}).problems


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_group": 7}, "n_group 7 makes no groups of 256 experts (256 mod 7 = 4): vLLM chooses among all of them"),
        ({"n_group": 512, "topk_group": 1}, "n_group 512 makes no groups of 256 experts (256 mod 512 = 256)"),
        ({"n_group": 256, "topk_group": 8}, "n_group 256 makes no groups of 256 experts (one expert each)"),
        ({"use_grouped_topk": True, "num_expert_group": 7}, "num_expert_group 7 makes no groups of 256 experts"),
    ],
)
def test_groups_that_vllm_ignores_are_noted(fields: dict[str, Any], words: str, explain: Any) -> None:
    found = explain(quantized("deepseek-v3") | fields)
    (note,) = (each for each in found.notes if "makes no groups" in each)
    assert words in note
    routing = found.problems[0].routing
    assert routing.num_groups is None and routing.top_k_groups is None


def test_an_unknown_topk_method_is_noted(explain: Any) -> None:
    found = explain(quantized("deepseek-v3", topk_method="noaux"))
    assert not found.problems[0].routing.correction_bias
    (note,) = (each for each in found.notes if "topk_method" in each)
    assert "'noaux', which is none of noaux_tc, greedy, group_limited_greedy: vLLM takes it for a router with" in note
    for known in ("noaux_tc", "greedy", "group_limited_greedy", None):
        assert not any("topk_method" in each for each in explain(quantized("deepseek-v3", topk_method=known)).notes)


def test_a_missing_norm_topk_prob_is_what_the_class_of_the_config_has(explain: Any) -> None:
    configs = pytest.importorskip("transformers").CONFIG_MAPPING
    kinds = {"qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "solar_open"}
    for kind in sorted(kinds & set(configs)):
        data = quantized("qwen3-30b-a3b", model_type=kind, norm_topk_prob=None)
        assert explain(data).problems[0].routing.renormalize is configs[kind]().norm_topk_prob, kind
