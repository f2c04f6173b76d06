"""What a checkpoint's config says about its MoE layers: real models' configs, every spelling of the quantisation, and
files that are damaged or hostile."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_moe_oracle.checkpoint import Layers, layers, read
from vllm_moe_oracle.checkpoint.files import MAX_BYTES
from vllm_moe_oracle.checkpoint.names import compact
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.oracle.problem import Activation, Parallel, Problem, Scheme
from vllm_moe_oracle.quantization import reader
from vllm_moe_oracle.quantization.answers import GATED_PROJECTIONS, LayerNames

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.mlp.gate", "*self_attn*"]}
MXFP8 = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")


def config(name: str = "qwen3-30b-a3b", **changes: Any) -> dict[str, Any]:
    """A published model's config; `changes` replace fields, None removes one."""
    data = json.loads((CONFIGS / f"{name}.json").read_text())
    data.update(changes)
    return {key: value for key, value in data.items() if value is not None}


def quantised(name: str = "qwen3-30b-a3b", **changes: Any) -> dict[str, Any]:
    """The same as ModelOpt writes it after quantising to MXFP8."""
    return config(name, **{"quantization_config": MODELOPT, **changes})


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    """Reads a config as a checkpoint folder with that config.json, and what else is given by file name."""

    def run(data: dict[str, Any], tp: int = 1, ep: bool = False, **files: Any) -> Layers:
        (tmp_path / "config.json").write_text(json.dumps(data))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return layers(read(tmp_path), tp, ep)

    return run


# --- published models -------------------------------------------------------------------------------------------------


# Layers as vLLM names them, experts, top-k, hidden size, intermediate size: from the models' published configs.
MODELS = {
    "qwen3-30b-a3b": ("model.layers.0-47.mlp.experts", 128, 8, 2048, 768),
    "qwen3-235b-a22b": ("model.layers.0-93.mlp.experts", 128, 8, 4096, 1536),
    "qwen3-vl-30b-a3b": ("language_model.model.layers.0-47.mlp.experts", 128, 8, 2048, 768),
    "minimax-m2": ("model.layers.0-61.mlp.experts", 256, 8, 3072, 1536),
    "minimax-m3": ("language_model.model.layers.3-59.block_sparse_moe.experts", 128, 4, 6144, 3072),
    "nemotron-3-nano-30b-a3b": (
        "model.layers.1,3,6,8,10,13,15,17,20,22,24,27,29,31,34,36,38,40,43,45,47,49,51.mixer.experts",
        128, 6, 2688, 1856,
    ),
    "deepseek-v3": ("model.layers.3-60.mlp.experts", 256, 8, 7168, 2048),
    "kimi-k2-thinking": ("model.layers.1-60.mlp.experts", 384, 8, 7168, 2048),
    "gpt-oss-20b": ("model.layers.0-23.mlp.experts", 32, 4, 2880, 2880),
    "mixtral-8x7b": ("model.layers.0-31.block_sparse_moe.experts", 8, 2, 4096, 14336),
    "glm-4.5": ("model.layers.3-91.mlp.experts", 160, 8, 5120, 1536),
    "llama-4-maverick": (
        f"language_model.model.layers.{','.join(map(str, range(1, 48, 2)))}.feed_forward.experts", 128, 1, 5120, 8192,
    ),
}  # fmt: skip


def test_every_published_config_has_an_expectation() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_quantised_to_mxfp8_is_read(name: str, explain: Any) -> None:
    found = explain(quantised(name))
    names, experts, top_k, hidden, intermediate = MODELS[name]
    assert compact(problem.layer for problem in found.problems) == names
    assert len({problem.key() for problem in found.problems}) == 1
    problem = found.problems[0]
    shape = (problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size)
    assert shape == (experts, top_k, hidden, intermediate)
    assert problem.scheme == MXFP8
    assert (problem.local_experts, problem.parallel, problem.dtype) == (experts, Parallel(), "bfloat16")
    assert not found.unquantised and not found.foreign


@pytest.mark.parametrize(
    ("name", "activation", "bias"),
    [
        ("qwen3-30b-a3b", Activation("silu"), False),
        ("nemotron-3-nano-30b-a3b", Activation("relu2", gated=False), False),
        ("gpt-oss-20b", Activation("swigluoai", True, 1.702, 1.0, 7.0, interleaved=True), True),
        ("minimax-m3", Activation("swigluoai", True, 1.702, 1.0, 7.0), False),
    ],
)
def test_activation_and_biases(name: str, activation: Activation, bias: bool, explain: Any) -> None:
    problem = explain(quantised(name)).problems[0]
    assert (problem.activation, problem.has_bias) == (activation, bias)


def test_parameters_of_an_activation_are_the_models_own(explain: Any) -> None:
    changes = {"model_type": "minimax_m3", "hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6}
    problem = explain(quantised(**changes)).problems[0]
    assert problem.activation == Activation("swigluoai", True, 1.5, 1.0, 6.0)
    assert explain(quantised(swiglu_limit=10.0)).problems[0].activation == Activation("silu", limit=10.0)


def test_a_clamp_that_only_some_layers_have_makes_two_kinds_of_layers(explain: Any) -> None:
    found = explain(quantised(swiglu_limits=[0.0] * 47 + [7.0])).problems
    assert [problem.activation.limit for problem in found] == [None] * 47 + [7.0]


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
    routing = explain(quantised(name)).problems[0].routing
    assert (routing.method, routing.scoring, routing.renormalize) == (method, scoring, renormalize)
    assert ((routing.num_groups, routing.top_k_groups), routing.correction_bias) == (groups, bias)
    assert routing.weight_on_input == (name == "llama-4-maverick")


def test_routing_by_table_and_by_square_root_of_softplus(explain: Any) -> None:
    data = quantised("deepseek-v3", model_type="deepseek_v4", scoring_func="sqrtsoftplus", num_hash_layers=4)
    first, *_, last = explain(data).problems
    assert first.layer == "model.layers.3.ffn.experts"
    assert (first.routing.hashed, first.routing.correction_bias) == (True, False)
    assert (last.routing.hashed, last.routing.correction_bias) == (False, True)
    assert {first.routing.method, last.routing.method} == {"deepseekv4"}


def test_multi_token_prediction_layers_are_said_to_be_missing(explain: Any) -> None:
    assert any("multi-token-prediction" in note for note in explain(quantised("minimax-m2")).notes)
    assert explain(quantised()).notes == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_sparse_step": 2}, list(range(1, 48, 2))),
        ({"mlp_only_layers": [0, 1, 2]}, list(range(3, 48))),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 4}, list(range(4, 48, 4))),
        ({"moe_layer_freq": [0, 1] + [1] * 46}, list(range(1, 48))),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 45}, list(range(3, 48))),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"] * 12}, list(range(1, 48, 2))),
        ({"moe_layers_enum": "4, 5,6"}, [4, 5, 6]),
        ({"is_moe_layer": [False] + [True] * 47}, list(range(1, 48))),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 1}, [1, 2, 3, 4]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, list(range(1, 48, 2))),
        ({"num_dense_layers": 40}, list(range(40, 48))),
    ],
)
def test_every_way_of_saying_which_layers_have_experts(
    changes: dict[str, Any], expected: list[int], explain: Any
) -> None:
    found = explain(quantised(**changes)).problems
    assert [int(problem.layer.split(".")[2]) for problem in found] == expected


def test_layers_may_differ_in_size(explain: Any) -> None:
    found = explain(quantised(num_experts=[64] * 8 + [128] * 40)).problems
    assert [problem.num_experts for problem in found] == [64] * 8 + [128] * 40


def test_experts_in_a_latent_space_are_narrower_than_the_hidden_state(explain: Any) -> None:
    assert explain(quantised("nemotron-3-nano-30b-a3b", moe_latent_size=1024)).problems[0].hidden_size == 1024


@pytest.mark.parametrize(
    ("field", "value", "dtype"),
    [
        ("torch_dtype", "float16", "float16"),
        ("torch_dtype", "float32", "bfloat16"),
        ("dtype", "torch.float16", "float16"),
    ],
)
def test_dtype_is_the_one_that_vllm_serves_in(field: str, value: str, dtype: str, explain: Any) -> None:
    assert explain(quantised(**{"torch_dtype": None, field: value})).problems[0].dtype == dtype


# --- what a rank holds ------------------------------------------------------------------------------------------------


def test_tensor_parallelism_cuts_the_intermediate_size(explain: Any) -> None:
    problem = explain(quantised("nemotron-3-nano-30b-a3b"), tp=2).problems[0]
    assert (problem.intermediate_size, problem.full_intermediate_size, problem.local_experts) == (928, 1856, 128)
    assert problem.parallel == Parallel(tp=2)


def test_expert_parallelism_gives_whole_experts(explain: Any) -> None:
    problem = explain(quantised(), tp=8, ep=True).problems[0]
    assert (problem.intermediate_size, problem.num_experts, problem.local_experts) == (768, 128, 16)
    assert problem.parallel == Parallel(tp=1, ep=8)


def test_an_uneven_split_of_experts_is_judged_by_the_fullest_rank(explain: Any) -> None:
    assert explain(quantised(num_attention_heads=33), tp=3, ep=True).problems[0].local_experts == 43


def test_one_rank_with_expert_parallelism_is_one_rank(explain: Any) -> None:
    assert explain(quantised(), tp=1, ep=True).problems == explain(quantised()).problems


def test_a_cut_that_does_not_divide_is_refused_with_the_numbers_and_a_way_out(explain: Any) -> None:
    with pytest.raises(CheckpointError, match=r"over 5 ranks .* 768 \(768 mod 5 = 3\)\. TP 4 divides it, or .* --ep"):
        explain(quantised(num_attention_heads=20), tp=5)
    with pytest.raises(CheckpointError, match="over 16 ranks leaves ranks without one of the 8 experts"):
        explain(quantised("mixtral-8x7b"), tp=16, ep=True)


@pytest.mark.parametrize("ep", [False, True])
def test_ranks_that_do_not_divide_the_heads_are_refused_whatever_is_cut(ep: bool, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=r"do not divide the 32 .* \(32 mod 6 = 2\)\. TP 4 would do") as caught:
        explain(quantised(), tp=6, ep=ep)
    assert "--ep" not in str(caught.value)


def test_expert_parallelism_is_no_way_out_for_more_ranks_than_experts(explain: Any) -> None:
    with pytest.raises(CheckpointError, match="TP 32 divides it") as caught:
        explain(quantised("mixtral-8x7b", num_attention_heads=96, intermediate_size=14368), tp=48)
    assert "--ep" not in str(caught.value)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp", [65536, 10**9])
def test_absurd_numbers_of_ranks_are_refused_at_once(tp: int, ep: bool, explain: Any) -> None:
    begin = time.perf_counter()
    with pytest.raises(CheckpointError):
        explain(quantised(num_experts=65536, num_attention_heads=10**30 + 1), tp=tp, ep=ep)
    assert time.perf_counter() - begin < 1.0


@pytest.mark.parametrize("order", [[], {}, 1, 1.5, "sideways"])
def test_an_order_that_is_no_word_is_refused(order: object, explain: Any) -> None:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "actorder": order}
    with pytest.raises(CheckpointError, match="unknown actorder"):
        explain(config(quantization_config=compressed(group(weights), format="pack-quantized")))


@pytest.mark.parametrize("word", ["\ud800", "soft max\n", "\x1b[31m"])
def test_a_scoring_function_that_is_no_name_is_refused_in_plain_letters(word: str, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the scoring function .* is not a name") as caught:
        explain(quantised(scoring_func=word))
    assert str(caught.value).isascii() and str(caught.value).isprintable()


# --- spellings of MXFP8 -----------------------------------------------------------------------------------------------


def group(weights: dict[str, Any], inputs: object = None, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    """A compressed-tensors config group."""
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


CT_MXFP8 = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
CT_INPUTS = {**CT_MXFP8, "dynamic": True}


def compressed(*groups: dict[str, Any], format: str = "mxfp8-quantized", **more: Any) -> dict[str, Any]:
    """A compressed-tensors quantization_config."""
    named = {f"group_{index}": item for index, item in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": named, **more}


@pytest.mark.parametrize(
    ("quantization", "activations", "packing", "method"),
    [
        (MODELOPT, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt_mxfp8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "mxfp8", "modelopt", "mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": None}, "mxfp8", "modelopt", "mxfp8"),
        (
            {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"quant_algo": "MXFP8"}},
            "mxfp8", "modelopt", "modelopt_mxfp8",
        ),
        (MODELOPT | {"config_groups": {"group_0": group({"num_bits": 8})}}, "16bit", "modelopt", "modelopt_mxfp8"),
        (
            MODELOPT | {"config_groups": {"group_0": group({"num_bits": 8}, {"num_bits": 8})}},
            "mxfp8", "modelopt", "modelopt_mxfp8",
        ),
        (compressed(group(CT_MXFP8)), "16bit", "compressed-tensors", "compressed-tensors"),
        (compressed(group(CT_MXFP8, CT_INPUTS)), "mxfp8", "compressed-tensors", "compressed-tensors"),
        (
            compressed(group({**CT_MXFP8, "scale_dtype": "uint8"}, CT_INPUTS)) | {"quant_method": "compressed_tensors"},
            "mxfp8", "compressed-tensors", "compressed-tensors",
        ),
    ],
)  # fmt: skip
def test_every_spelling_of_mxfp8(
    quantization: dict[str, Any], activations: Any, packing: str, method: str, explain: Any
) -> None:
    found = explain(quantised(quantization_config=quantization))
    assert {problem.scheme for problem in found.problems} == {Scheme("mxfp8", 8, 32, packing, activations=activations)}
    assert (len(found.problems), found.method) == (48, method)


def test_older_modelopt_keeps_the_quantisation_in_a_file_of_its_own(explain: Any) -> None:
    inner = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["model.layers.0*"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": inner}
    found = explain(config(), hf_quant_config=beside)
    assert (len(found.problems), found.unquantised) == (47, ("model.layers.0.mlp.experts",))


def test_config_json_goes_before_the_other_file_as_in_vllm(explain: Any) -> None:
    beside = {"quantization": {"quant_algo": "NVFP4"}}
    assert explain(quantised(), hf_quant_config=beside).problems[0].scheme == MXFP8


def test_a_bare_config_needs_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "anything.txt"
    file.write_text(json.dumps(quantised()))
    assert len(layers(read(file)).problems) == 48


def test_a_multimodal_models_quantisation_may_stand_in_its_language_part(explain: Any) -> None:
    data = config("qwen3-vl-30b-a3b")
    data["text_config"]["quantization_config"] = MODELOPT
    assert len(explain(data).problems) == 48


# --- layers that are left out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("model.layers.1.mlp.experts", [1]),
        ("model.layers.1", [1]),  # and nothing of layers 10 to 19
        ("model.layers.1*", [1]),
        ("model.layers.1.*", [1]),
        ("model.layers.1.mlp*", [1]),
        ("layers.1.mlp", [1]),
        ("*.layers.1.mlp.experts.*", [1]),
        ("re:model\\.layers\\.[0-3]\\.", [0, 1, 2, 3]),
        ("*", list(range(48))),
        ("mlp.experts", list(range(48))),
        ("lm_head", []),
        ("model.layers.*.mlp.gate", []),
        ("*gate*", []),
        ("*self_attn*", []),
        ("mlp.shared_experts", []),
    ],
)
def test_patterns_of_excluded_modules(pattern: str, left_out: list[int], explain: Any) -> None:
    for spelling in ("ignore", "exclude_modules"):
        quantization = {"quant_method": "modelopt", "quant_algo": "MXFP8", spelling: [pattern]}
        found = explain(quantised(quantization_config=quantization))
        assert found.unquantised == tuple(f"model.layers.{index}.mlp.experts" for index in left_out)
        assert len(found.problems) == 48 - len(left_out)
        assert any("unquantised" in note for note in found.notes) == bool(left_out)


def test_an_exclusion_may_use_the_checkpoints_name_of_a_module(explain: Any) -> None:
    quantization = MODELOPT | {"ignore": ["backbone.layers.1.mixer*"]}
    found = explain(quantised("nemotron-3-nano-30b-a3b", quantization_config=quantization))
    assert found.unquantised == ("model.layers.1.mixer.experts",)
    quantization = {"quant_method": "mxfp8", "ignored_layers": ["model.layers.7.block_sparse_moe"]}
    assert explain(quantised("minimax-m2", quantization_config=quantization)).unquantised == (
        "model.layers.7.mlp.experts",
    )
    quantization = MODELOPT | {"ignore": ["model.language_model.layers.2.mlp.experts"]}
    found = explain(quantised("qwen3-vl-30b-a3b", quantization_config=quantization))
    assert found.unquantised == ("language_model.model.layers.2.mlp.experts",)


def test_an_expert_is_left_out_when_all_its_matrices_are(explain: Any) -> None:
    names = [f"model.layers.5.mlp.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    assert explain(quantised(quantization_config=MODELOPT | {"ignore": names})).unquantised == (
        "model.layers.5.mlp.experts",
    )
    assert explain(quantised(quantization_config=MODELOPT | {"ignore": names[:2]})).unquantised == ()


def test_compressed_tensors_ignores_and_targets_by_name_and_expression(explain: Any) -> None:
    quantization = compressed(group(CT_MXFP8), ignore=["lm_head", r"re:.*layers\.[01]\.mlp\.experts.*"])
    assert len(explain(quantised(quantization_config=quantization)).unquantised) == 2
    targets = (r"re:.*layers\.[0-9]\..*experts.*(gate|up|down)_proj$",)
    found = explain(quantised(quantization_config=compressed(group(CT_MXFP8, targets=targets))))
    assert (len(found.problems), len(found.unquantised)) == (10, 38)


def test_a_long_list_of_excluded_matrices_is_read(explain: Any) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}"
        for layer in range(24)
        for expert in range(128)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert len(explain(quantised(quantization_config=MODELOPT | {"ignore": names})).unquantised) == 24


# --- mixed and other formats ------------------------------------------------------------------------------------------


def mixed(**recipes: str) -> dict[str, Any]:
    """ModelOpt's mixed precision: algorithm by module, with __ for dots."""
    recipe = {name.replace("__", "."): {"quant_algo": algo} for name, algo in recipes.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": recipe}


def test_mixed_precision_is_read_layer_by_layer(explain: Any) -> None:
    quantization = mixed(
        model__layers__0__mlp__experts="MXFP8",
        model__layers__1__mlp__experts__0__gate_proj="MXFP8",
        model__layers__2__mlp__gate_proj="mxfp8",
        model__layers__3__mlp__experts="NVFP4",
        model__layers__4__mlp__shared_expert__gate_proj="MXFP8",
        **{"model__layers__5__mlp__experts*": "MXFP8"},
    )
    found = explain(quantised(quantization_config=quantization))
    assert [problem.layer.split(".")[2] for problem in found.problems] == ["0", "1", "2", "5"]
    assert found.foreign == {"model.layers.3.mlp.experts": "NVFP4"}
    assert len(found.unquantised) == 43
    assert any("1 MoE layer has experts in NVFP4" in note for note in found.notes)
    assert found.method == "modelopt_mixed"


def test_mixed_precision_may_keep_its_layers_in_the_other_file(explain: Any) -> None:
    recipe = {"model.layers.0.mlp.experts": {"quant_algo": "MXFP8"}}
    beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": recipe}}
    short = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    assert len(explain(quantised(quantization_config=short), hf_quant_config=beside).problems) == 1


def test_matrices_of_one_layer_in_two_formats_are_refused(explain: Any) -> None:
    quantization = mixed(
        model__layers__0__mlp__experts__0__gate_proj="MXFP8", model__layers__0__mlp__experts__0__down_proj="FP8"
    )
    with pytest.raises(CheckpointError, match=r"different quant_algo: FP8, MXFP8"):
        explain(quantised(quantization_config=quantization))


PACKED = "pack-quantized"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
            Scheme("wna16", 4, 128, "gptq", False, "group"),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "modules_to_not_convert": None},
            Scheme("wna16", 4, 64, "awq", True),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "sym": False},
            Scheme("wna16", 8, -1, "gptq", True),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "static_groups": True, "sym": False,
             "checkpoint_format": "gptq_v2"},
            Scheme("wna16", 4, 32, "gptq_v2", True, "static"),
        ),
        (compressed(group(INT4 | {"actorder": "dynamic"}), format=PACKED),
         Scheme("wna16", 4, 128, "compressed-tensors", False, "group")),
        (compressed(group(INT4 | {"num_bits": 8}), format="int-quantized"),
         Scheme("wna16", 8, 128, "compressed-tensors-int")),
        (compressed(group(INT4), format=PACKED), Scheme("wna16", 4, 128, "compressed-tensors")),
        (
            compressed(group(INT4 | {"strategy": "channel", "group_size": None, "actorder": "static"}), format=PACKED),
            Scheme("wna16", 4, -1, "compressed-tensors", False, "static"),
        ),
        (
            compressed(group({**CT_MXFP8, "num_bits": 4}, {**CT_INPUTS, "num_bits": 4}), format="mxfp4-pack-quantized"),
            Scheme("mxfp4", 4, 32, "compressed-tensors", activations="mxfp4"),
        ),
        ({"quant_method": "mxfp4"}, Scheme("mxfp4", 4, 32, "mxfp4")),
    ],
)  # fmt: skip
def test_other_formats_of_this_project(quantization: dict[str, Any], scheme: Scheme, explain: Any) -> None:
    found = explain(quantised(quantization_config=quantization))
    assert {problem.scheme for problem in found.problems} == {scheme}


@pytest.mark.parametrize("name", ["kimi-k2-thinking", "gpt-oss-20b"])
def test_published_quantised_models(name: str, explain: Any) -> None:
    scheme = {
        "kimi-k2-thinking": Scheme("wna16", 4, 32, "compressed-tensors"),
        "gpt-oss-20b": Scheme("mxfp4", 4, 32, "gpt_oss"),
    }[name]
    assert {problem.scheme for problem in explain(config(name)).problems} == {scheme}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INT8 = INT4 | {"num_bits": 8}
PARTS = {
    "gptq, other bits": (GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, "int8 symmetric"),
    "gptq, left out": (GPTQ | {"dynamic": {r"-:.*\.experts\..*\.up_proj": {}}}, "up_proj: not quantised"),
    "compressed-tensors, other bits": (
        compressed(
            group(INT4, targets=("re:.*(gate|up)_proj",)), group(INT8, targets=("re:.*down_proj",)), format=PACKED
        ),
        "int8 symmetric",
    ),
    "compressed-tensors, left out": (
        compressed(group(INT4), format=PACKED, ignore=[r"re:.*\.gate_proj"]), "gate_proj: not quantised",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_matrices_of_one_layer_in_different_formats_are_refused(explain: Any, case: str) -> None:
    quantization, words = PARTS[case]
    with pytest.raises(CheckpointError) as error:
        explain(quantised(quantization_config=quantization))
    message = str(error.value)
    assert "the matrices of one layer's experts are stored differently" in message
    assert words in message and "int4 symmetric, groups of 128" in message and "mlp.experts" in message


def test_entries_for_each_matrix_that_agree_are_one_format(explain: Any) -> None:
    by_name = {rf"+:.*\.{name}_proj": {"bits": 8} for name in ("gate", "up", "down")}
    targets = (group(INT8, targets=(rf"re:.*\.{name}_proj",)) for name in ("gate", "up", "down"))
    for quantization in (GPTQ | {"dynamic": by_name}, compressed(*targets, format=PACKED)):
        assert {each.scheme.bits for each in explain(quantised(quantization_config=quantization)).problems} == {8}
    # Says of one matrix what is true of all.
    same = GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 4}}}
    assert {each.scheme.bits for each in explain(quantised(quantization_config=same)).problems} == {4}


def test_a_router_called_gate_is_no_matrix_of_mixtrals_experts(explain: Any) -> None:
    for pattern in (r"-:.*gate.*", r"-:.*\.gate"):
        found = explain(quantised("mixtral-8x7b", quantization_config=GPTQ | {"dynamic": {pattern: {}}}))
        assert found.unquantised == () and len(found.problems) == 32


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        ("minimax-m2", "minimax_m2", 62),
        ("minimax-m3", "minimax_m3", 57),
        ("minimax-m3", "minimax_m3_text", 57),
        ("kimi-k2-thinking", "kimi_linear", 60),
        ("kimi-k2-thinking", "kimi_k3", 60),
    ],
)
def test_a_router_called_gate_is_no_matrix_where_these_are_numbered(
    name: str, kind: str, layers: int, explain: Any
) -> None:
    def of(pattern: str) -> Any:
        data = quantised(name, quantization_config=GPTQ | {"dynamic": {pattern: {}}})
        data.get("text_config", data)["model_type"] = kind
        return explain(data)

    found = of(r"-:.*gate.*")
    assert found.unquantised == () and len(found.problems) == layers
    assert {problem.scheme.bits for problem in found.problems} == {4}
    with pytest.raises(CheckpointError, match="w1: not quantised; w3: int4"):
        of(r"-:.*\.w1")


def test_experts_without_a_gate_are_left_out_by_up_and_down_alone(explain: Any) -> None:
    pattern = r"-:.*layers\.3\.mixer\.experts\..*(up|down)_proj"
    everything = explain(quantised("nemotron-3-nano-30b-a3b", quantization_config=GPTQ))
    found = explain(quantised("nemotron-3-nano-30b-a3b", quantization_config=GPTQ | {"dynamic": {pattern: {}}}))
    layer = "model.layers.3.mixer.experts"
    assert (layer in found.unquantised) == (layer in {problem.layer for problem in everything.problems})


def _of_unknown(*projections: tuple[str, ...], own: tuple[str, ...] = ()) -> LayerNames:
    return LayerNames(("model.layers.3.mlp.experts",), projections, own)


def test_where_nobody_knows_the_convention_one_that_is_uniform_is_enough() -> None:
    router = reader(GPTQ | {"dynamic": {r"-:.*gate.*": {}}}, "config.json")
    assert str(router(_of_unknown(*GATED_PROJECTIONS))) == "int4 symmetric, groups of 128 (gptq)"
    with pytest.raises(CheckpointError, match="gate_proj: not quantised; up_proj: int4"):
        router(_of_unknown(*GATED_PROJECTIONS, own=GATED_PROJECTIONS[0]))
    # By neither convention are all matrices alike.
    both = reader(GPTQ | {"dynamic": {r"-:.*\.(gate_proj|w1)$": {}}}, "config.json")
    with pytest.raises(CheckpointError, match="gate_proj: not quantised; up_proj: int4"):
        both(_of_unknown(*GATED_PROJECTIONS))
    # Entries that name every matrix by one convention count, whichever it is.
    named = reader(GPTQ | {"dynamic": {r"+:.*\.w[123]$": {"bits": 8}}}, "config.json")
    assert str(named(_of_unknown(*GATED_PROJECTIONS))) == "int8 symmetric, groups of 128 (gptq)"


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, Scheme("wna16", 4, 128, "gptq")),
        ({"data_type": None, "bits": 8, "sym": False}, Scheme("wna16", 8, 128, "gptq", True)),
        ({"packing_format": "auto_round:auto_awq", "sym": False}, Scheme("wna16", 4, 128, "awq", True)),
    ],
)
def test_auto_rounds_integers(changes: dict[str, Any], scheme: Scheme, explain: Any) -> None:
    found = explain(quantised(quantization_config=AUTO_ROUND | changes))
    assert {problem.scheme for problem in found.problems} == {scheme} and found.method == "inc"


def test_auto_round_gives_modules_other_widths(explain: Any) -> None:
    entries = {
        "model.layers.0.mlp.experts": {"bits": 16},
        r".*layers\.1\.mlp\.experts.*": {"bits": 8, "sym": False},
        "model.layers.2.mlp.gate": {"bits": 16},
    }
    found = explain(quantised(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert found.unquantised == ("model.layers.0.mlp.experts",)
    assert {(each.scheme.bits, each.scheme.zero_points) for each in found.problems[:1]} == {(8, True)}
    assert {(each.scheme.bits, each.scheme.zero_points) for each in found.problems[1:]} == {(4, False)}


def widths(found: Layers) -> set[int]:
    return {problem.scheme.bits for problem in found.problems}


def matrices_of(layer: int, experts: int = 128) -> list[str]:
    names = ("gate", "up", "down")
    return [f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj" for expert in range(experts) for name in names]


@pytest.mark.parametrize(
    ("entries", "entry", "words"),
    [
        # What follows the experts' module is never asked for, by name or by an expression that needs it.
        ({name: {"bits": 16} for name in matrices_of(1)}, "model.layers.1.mlp.experts.0.gate_proj", "not quantised"),
        ({"model.layers.1.mlp.experts.77.up_proj": {"bits": 4}}, "model.layers.1.mlp.experts.77.up_proj", "int4"),
        ({r".*mlp\.experts\..*": {"bits": 4}}, r".*mlp", "int4"),
        ({r".*\.down_proj": {"bits": 4}}, r".*", "int4"),
        ({"down_proj": {"bits": 4}}, "down_proj", "int4"),
        ({"model.layers.1.mlp.experts": {"bits": 4}, r".*_proj": {"bits": 16}}, ".*_proj", "not quantised"),
    ],
)
def test_auto_round_refuses_entries_on_matrices_that_vllm_does_not_read(
    entries: dict[str, Any], entry: str, words: str, explain: Any
) -> None:
    with pytest.raises(CheckpointError) as error:
        explain(quantised(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    message = str(error.value)
    assert entry in message and f"stores matrices of experts as {words}" in message
    assert "their module is int8" in message and "reads the entries of the experts' module only" in message


def test_auto_round_takes_entries_on_matrices_that_say_what_the_module_has(explain: Any) -> None:
    same = {name: {"bits": 8} for name in matrices_of(1)} | {r".*\.down_proj": {"bits": 8}}
    found = explain(quantised(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": same}))
    assert widths(found) == {8} and found.unquantised == ()
    router = {r".*gate.*": {"bits": 16}}
    found = explain(quantised("mixtral-8x7b", quantization_config=AUTO_ROUND | {"extra_config": router}))
    assert widths(found) == {4} and found.unquantised == ()


def test_auto_round_reads_ends_of_names_before_expressions(explain: Any) -> None:
    entries = {r".*experts.*": {"bits": 16}, "mlp.experts": {"bits": 4}}
    with pytest.raises(CheckpointError, match="their module is int4"):  # the expression finds matrices too
        explain(quantised(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    entries = {r".*experts$": {"bits": 16}, "mlp.experts": {"bits": 4}, "p.experts": {"bits": 16}}
    found = explain(quantised(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    assert widths(found) == {4} and found.unquantised == ()
    assert any("'mlp.experts' is the end of a name" in note for note in found.notes)


def test_auto_round_takes_a_full_name_without_a_width_for_one_of_16_bits(explain: Any) -> None:
    entries = {"model.layers.0.mlp.experts": {"group_size": 64}, r".*layers\.1\..*": {"group_size": 64}}
    found = explain(quantised(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert found.unquantised == ("model.layers.0.mlp.experts",)
    assert [problem.scheme.group_size for problem in found.problems[:2]] == [64, 128]
    assert not any("end of a name" in note for note in found.notes)


@pytest.mark.parametrize(
    ("blocks", "quantised_layers"),
    [
        ({"block_name_to_quantize": "model.layers.0."}, {0}),
        ({"block_name_to_quantize": "model.layers.0.,model.layers.7."}, {0, 7}),
        ({"block_name_to_quantize": "model.layers.0., model.layers.7."}, {0}),  # nothing is stripped
        ({"to_quant_block_names": ["model.layers.1"]}, {1, *range(10, 20)}),
        ({"block_name_to_quantize": None, "to_quant_block_names": "model.layers.1"}, set(range(48))),
        ({"block_name_to_quantize": "model.layers"}, set(range(48))),
        # Entries that say a width are of modules outside too; without one, an expression means 16 bits there.
        (
            {
                "block_name_to_quantize": "model.layers.0.",
                "extra_config": {r".*layers\.5\..*": {"bits": 4}, r".*layers\.6\..*": {"sym": True}},
            },
            {0, 5},
        ),
    ],
)
def test_auto_round_leaves_other_blocks_in_16_bits(
    blocks: dict[str, Any], quantised_layers: set[int], explain: Any
) -> None:
    found = explain(quantised(quantization_config=AUTO_ROUND | blocks))
    assert {int(problem.layer.split(".")[2]) for problem in found.problems} == quantised_layers
    assert len(found.unquantised) == 48 - len(quantised_layers)


@pytest.mark.parametrize("blocks", [3, [["model.layers.0"]], {"model.layers.0": True}])
def test_auto_rounds_blocks_are_names(blocks: object, explain: Any) -> None:
    with pytest.raises(CheckpointError, match="block_name_to_quantize is"):
        explain(quantised(quantization_config=AUTO_ROUND | {"block_name_to_quantize": blocks}))


@pytest.mark.parametrize("name", ["*.gate(", "*.gate", "("])
def test_auto_round_skips_broken_expressions_with_a_note(name: str, explain: Any) -> None:
    entries = {name: {"bits": 16}, r".*layers\.1\..*": {"bits": 8}}
    found = explain(quantised(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert [problem.scheme.bits for problem in found.problems[:3]] == [4, 8, 4]
    (note,) = [note for note in found.notes if "no regular expression" in note]
    assert repr(name) in note and "vLLM skips it" in note


def test_auto_round_refuses_expressions_without_a_bound(explain: Any) -> None:
    with pytest.raises(CheckpointError, match="bounded time"):
        explain(quantised(quantization_config=AUTO_ROUND | {"extra_config": {r"(a)\1": {"bits": 16}}}))


@pytest.mark.parametrize("changes", [{"act_bits": 8}, {"bits": 2}, {"packing_format": "auto_round:llm_compressor"}])
def test_what_vllm_reads_otherwise_of_auto_round_is_foreign(changes: dict[str, Any], explain: Any) -> None:
    with pytest.raises(CheckpointError, match="stored as auto-round"):
        explain(quantised(quantization_config=AUTO_ROUND | changes))


def test_gptq_may_leave_modules_out_and_give_others_another_group(explain: Any) -> None:
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "dynamic": {r"-:.*layers\.0\..*": {}, r"+:.*layers\.1\..*": {"group_size": 64}},
    }  # fmt: skip
    found = explain(quantised(quantization_config=quantization))
    assert found.unquantised == ("model.layers.0.mlp.experts",)
    assert [problem.scheme.group_size for problem in found.problems[:2]] == [64, 128]


def test_lists_of_modules_may_be_lists_of_lists(explain: Any) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    experts = [[f"mlp.experts.0.{name}_proj"] for name in ("gate", "up", "down")]
    found = explain(quantised(quantization_config=gptq | {"modules_in_block_to_quantize": [["self_attn.q"], *experts]}))
    assert len(found.problems) == 48 and not found.unquantised
    found = explain(quantised(quantization_config=gptq | {"modules_in_block_to_quantize": [["self_attn.q"]]}))
    assert len(found.unquantised) == 48 and not found.problems
    names = [f"model.layers.{index}.mlp.experts.0.{name}_proj" for index in (1, 3) for name in ("gate", "up", "down")]
    found = explain(quantised(quantization_config=gptq | {"modules_in_block_to_quantize": names}))
    assert [problem.layer for problem in found.problems] == ["model.layers.1.mlp.experts", "model.layers.3.mlp.experts"]
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    found = explain(quantised(quantization_config=awq | {"modules_to_not_convert": [["gate"], [["layers.0."]]]}))
    assert found.unquantised == ("model.layers.0.mlp.experts",)


def test_groups_of_gptq_that_a_cut_splits_are_halved_and_those_of_compressed_tensors_are_not(explain: Any) -> None:
    from vllm_moe_oracle.oracle.planner import group_reasons, loaded_group

    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    halved = explain(quantised(quantization_config=gptq), tp=4).problems[0]
    assert loaded_group(halved) == 64 and not group_reasons(halved)
    (reason,) = group_reasons(
        explain(quantised(quantization_config=compressed(group(INT4), format=PACKED)), tp=4).problems[0]
    )
    assert "768 / 4 = 192 is no multiple of the scale group 128 (192 mod 128 = 64)" in reason.detail


def test_integers_of_gpt_oss_are_loaded_with_gate_and_up_apart(explain: Any) -> None:
    ints = compressed(group(INT4 | {"group_size": 32}), format=PACKED)
    found = explain({**config("gpt-oss-20b"), "quantization_config": ints})
    assert {problem.activation.interleaved for problem in found.problems} == {False}
    assert {problem.activation.name for problem in found.problems} == {"swigluoai"}


# --- input that cannot be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "has no MoE layers: none of num_experts, "),
        ({"num_experts": 0}, "has no MoE layers"),
        ({"mlp_only_layers": list(range(48))}, "none of the 48 layers has experts"),
        ({"num_experts": -128}, "num_experts is -128, not between 1 and"),
        ({"num_experts": 1e30}, "num_experts is 1e\\+30, not an integer"),
        ({"num_experts": 10**30}, "num_experts is 1000.*, not between 1 and 65536"),
        ({"num_experts": "many"}, "num_experts is 'many', not an integer"),
        ({"num_experts": True}, "num_experts is True, not an integer"),
        ({"num_experts": [128]}, "num_experts is None, not an integer"),
        ({"num_experts_per_tok": None}, "none of num_experts_per_tok, .* is set"),
        ({"num_experts_per_tok": 129}, "top-129 of 128 experts"),
        ({"num_experts_per_tok": 8.5}, "num_experts_per_tok is 8.5"),
        ({"hidden_size": {}}, "hidden_size is {}, not an integer"),
        ({"hidden_size": 0}, "hidden_size is 0, not between"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not between 1 and 4096"),
        ({"num_hidden_layers": None}, "none of num_hidden_layers, "),
        ({"decoder_sparse_step": "often"}, "decoder_sparse_step is 'often'"),
        ({"hidden_act": 3}, "the activation is 3, not a name"),
        ({"swiglu_limit": "high"}, "swiglu_limit is 'high', not a number"),
        ({"torch_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"text_config": [1]}, r"text_config is \[1\], not an object"),
        ({"block_configs": [{}]}, "block_configs .* does not read"),
        ({"hybrid_override_pattern": "E" * 5000}, "has 5000 layers, more than 4096"),
        ({"quantization_config": None}, "there is no quantization_config and no hf_quant_config.json"),
        ({"quantization_config": "MXFP8"}, "quantization_config is 'MXFP8', not an object"),
        ({"quantization_config": {}}, "there is no quant_method. Known are modelopt, "),
        ({"quantization_config": {"quant_method": "fancy8"}}, "unknown quant_method 'fancy8'. Known are modelopt, "),
        ({"quantization_config": {"quant_method": 8}}, "quant_method is 8, not a word"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "there is no quant_algo"),
        ({"quantization_config": MODELOPT | {"quant_algo": "MXFP7"}}, "unknown quant_algo 'MXFP7'. Known are MXFP8, "),
        ({"quantization_config": MODELOPT | {"quant_algo": "NVFP4"}}, "stored as NVFP4, which this release does not"),
        ({"quantization_config": {"quant_method": "fp8"}}, "stored as fp8, which this release does not read"),
        ({"quantization_config": MODELOPT | {"ignore": "lm_head"}}, "ignore is 'lm_head', not a list of names"),
        ({"quantization_config": MODELOPT | {"ignore": [1]}}, r"ignore is \[1\], not a list of names"),
        ({"quantization_config": MODELOPT | {"ignore": ["re:("]}}, "is no regular expression"),
        ({"quantization_config": MODELOPT | {"config_groups": []}}, "config_groups is not an object of objects"),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": 1}}, "quantization is 1, not an object"),
        ({"quantization_config": MODELOPT | {"quant_algo": "MIXED_PRECISION"}}, "needs an object quantized_layers"),
        ({"quantization_config": mixed(a="")}, "quantized_layers.a has no quant_algo"),
        ({"quantization_config": compressed()}, "there are no config_groups"),
        ({"quantization_config": compressed(group({"type": "float"}))}, "num_bits is None"),
        ({"quantization_config": compressed(group(CT_MXFP8, [1]))}, r"input_activations is \[1\]"),
        ({"quantization_config": compressed(group({**CT_MXFP8, "group_size": 16}))}, "8-bit float.* does not read"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits is '4', not a width"),
        (
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "group_size": 32,
                    "checkpoint_format": "marlin",
                }
            },
            "unknown checkpoint_format 'marlin'. Known are gptq, gptq_v2",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": 32,
                    "modules_to_not_convert": [[1]],
                }
            },
            "modules_to_not_convert is .*, not a list of names",
        ),
        (
            {"quantization_config": compressed(group(INT4 | {"actorder": "best"}), format=PACKED)},
            "unknown actorder 'best'",
        ),
    ],
)
def test_unusable_configs_say_what_and_where(
    changes: dict[str, Any], message: str, explain: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        explain(quantised(**changes))
    assert caught.value.where.startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: Expecting value"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00{", "is not JSON"),
        (b"[1, 2]", r"holds \[1, 2\], not a JSON object"),
        (b"null", "holds None, not a JSON object"),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"a":' * 200_000, "is nested too deeply"),
        (b'{"num_experts": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_files_that_are_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        layers(read(file))


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such file or folder\. Give a checkpoint's folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"the folder has no config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="is no regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is no regular file"):
        read(tmp_path / "pipe")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match="has 67108865 bytes"):
        read(large)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = [("top", name) for name in sorted({key for path in MODELS for key in config(path)})] + [
    ("quantization", name)
    for name in (
        "quant_method", "quant_algo", "ignore", "exclude_modules", "quantization", "config_groups",
        "quantized_layers", "producer", "format", "bits", "group_size", "dynamic", "sym", "desc_act", "zero_point",
        "modules_to_not_convert",
    )
]  # fmt: skip


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused_by_name(data: st.DataObject, tmp_path: Path) -> None:
    """A hostile file gets an answer or a CheckpointError, never another exception."""
    made = copy.deepcopy(quantised(data.draw(st.sampled_from(sorted(MODELS)))))
    starts = [
        MODELOPT,
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        compressed(group(CT_MXFP8)),
        mixed(a="MXFP8"),
    ]
    made["quantization_config"] = copy.deepcopy(data.draw(st.sampled_from(starts)))
    for place, name in data.draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        (made if place == "top" else made["quantization_config"])[name] = data.draw(JSON)
        if not isinstance(made.get("quantization_config"), dict):
            break
    (tmp_path / "config.json").write_text(json.dumps(made))
    try:
        found = layers(read(tmp_path), data.draw(st.sampled_from([1, 2, 3])), data.draw(st.booleans()))
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(problem, Problem) for problem in found.problems)
