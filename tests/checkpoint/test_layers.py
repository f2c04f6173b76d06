"""What a checkpoint's config says about its MoE layers: published models, what a rank holds, every spelling of MXFP8,
layers that are left out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cases import H200
from tests.lib.configs import CONFIGS, CT_INPUTS, CT_MXFP8, MODELOPT, MXFP8, compressed, config, group, mixed, quantized
from tests.lib.stock_rules import codes_of
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.layer_names import compact_layer_names, short_layer_names
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem, Scheme
from vllm_moe_oracle.errors import CheckpointError

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
        "language_model.model.layers.1-47 step 2.feed_forward.experts", 128, 1, 5120, 8192,
    ),
}  # fmt: skip


def test_every_published_config_has_an_expectation() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_quantized_to_mxfp8_is_read(name: str, explain: Any) -> None:
    found = explain(quantized(name))
    names, experts, top_k, hidden, intermediate = MODELS[name]
    assert compact_layer_names(problem.layer for problem in found.problems) == names
    assert len({problem.key() for problem in found.problems}) == 1
    problem = found.problems[0]
    shape = (problem.num_experts, problem.top_k, problem.hidden_size, problem.intermediate_size)
    assert shape == (experts, top_k, hidden, intermediate)
    assert problem.scheme == MXFP8
    assert (problem.local_experts, problem.parallel, problem.dtype) == (experts, Parallel(), "bfloat16")
    assert not found.unquantized and not found.unsupported_formats


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
    problem = explain(quantized(name)).problems[0]
    assert (problem.activation, problem.has_bias) == (activation, bias)


def test_parameters_of_an_activation_are_the_models_own(explain: Any) -> None:
    changes = {"model_type": "minimax_m3", "hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6}
    problem = explain(quantized(**changes)).problems[0]
    assert problem.activation == Activation("swigluoai", True, 1.5, 1.0, 6.0)
    assert explain(quantized(swiglu_limit=10.0)).problems[0].activation == Activation("silu", limit=10.0)


def test_a_clamp_that_only_some_layers_have_makes_two_kinds_of_layers(explain: Any) -> None:
    found = explain(quantized(swiglu_limits=[0.0] * 47 + [7.0])).problems
    assert [problem.activation.limit for problem in found] == [None] * 47 + [7.0]
    other = explain(quantized(expert_swiglu_limit_list=[0.0] * 47 + [5.0])).problems  # Ling's name for it
    assert [problem.activation.limit for problem in other] == [None] * 47 + [5.0]


def test_step_clamps_silus_result_in_layers_with_a_limit(explain: Any) -> None:
    for kind in ("step3p5", "step5"):
        found = explain(quantized(model_type=kind, swiglu_limits=[0.0] * 46 + [7.0, 16.0])).problems
        assert {problem.activation for problem in found[:46]} == {Activation("silu")}
        assert [each.activation for each in found[46:]] == [
            Activation("swiglustep", limit=size) for size in (7.0, 16.0)
        ]
        # vLLM has 7 built in, and refuses the model.
        codes = [codes_of("marlin_mxfp8", each, H200) for each in found[46:]]
        assert codes == [set(), {"activation.parameters"}]


def test_kimi_k3(explain: Any) -> None:
    kimi = {
        "model_type": "kimi_linear", "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "routed_expert_hidden_size": 1024, "norm_topk_prob": None,
        "moe_renormalize": False, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
        "num_expert_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
    }  # fmt: skip
    problem = explain(quantized(**kimi)).problems[0]
    assert problem.layer == "model.layers.0.block_sparse_moe.experts"
    assert problem.activation == Activation("situ", alpha=4.0, beta=25.0)
    assert problem.hidden_size == 1024
    assert (problem.routing.scoring, problem.routing.renormalize, problem.routing.num_groups) == ("sigmoid", False, 4)
    without = explain(quantized(**kimi | {"activation_situ_linear_beta": -1.0})).problems[0]
    assert without.activation == Activation("situ", alpha=4.0)
    # vLLM asks for the first of the two numbers.
    nothing = explain(quantized(**kimi | {"activation_situ_beta": None})).problems[0]
    assert codes_of("marlin_mxfp8", problem, H200) == set()
    assert codes_of("marlin_mxfp8", nothing, H200) == {"activation.parameters"}


def test_layers_for_multi_token_prediction_are_told_from_the_models(explain: Any) -> None:
    """DeepSeek-V3 as it is published, in fp8."""
    published = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    (note,) = (each for each in explain(published).notes if "experts in fp8" in each)
    assert note.endswith("model.layers.3-61.mlp.experts (for multi-token prediction: model.layers.61.mlp.experts)")


def test_unlisted_mtp_layers_are_noted(explain: Any) -> None:
    assert any("multi-token-prediction" in note for note in explain(quantized("minimax-m2")).notes)
    # As Qwen3.5's configs call them.
    (note,) = explain(quantized(mtp_num_hidden_layers=1)).notes
    assert note == "layers of the 1 multi-token-prediction module(s) are not listed"
    assert explain(quantized()).notes == ()


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
        ({"moe_layers_enum": [4, 5, 6]}, [4, 5, 6]),
        ({"is_moe_layer": [False] + [True] * 47}, list(range(1, 48))),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 1}, [1, 2, 3, 4]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, list(range(1, 48, 2))),
        ({"num_dense_layers": 40}, list(range(40, 48))),
        # Models with a default of their own for dense layers.
        ({"model_type": "sarvam_moe"}, list(range(1, 48))),
        ({"model_type": "sarvam_moe", "first_k_dense_replace": 0}, list(range(48))),
        ({"model_type": "sarvam_moe", "first_k_dense_replace": 2, "moe_layer_freq": 3}, list(range(2, 48, 3))),
        ({"model_type": "param2moe"}, list(range(1, 48))),
        ({"model_type": "qwen3_moe"}, list(range(48))),
    ],
)
def test_every_way_of_saying_which_layers_have_experts(
    changes: dict[str, Any], expected: list[int], explain: Any
) -> None:
    found = explain(quantized(**changes)).problems
    assert [int(problem.layer.split(".")[2]) for problem in found] == expected


def test_layers_may_differ_in_size(explain: Any) -> None:
    found = explain(quantized(num_experts=[64] * 8 + [128] * 40)).problems
    assert [problem.num_experts for problem in found] == [64] * 8 + [128] * 40


def test_experts_in_a_latent_space_are_narrower_than_the_hidden_state(explain: Any) -> None:
    assert explain(quantized("nemotron-3-nano-30b-a3b", moe_latent_size=1024)).problems[0].hidden_size == 1024


@pytest.mark.parametrize(
    ("field", "value", "dtype"),
    [
        ("torch_dtype", "float16", "float16"),
        ("torch_dtype", "float32", "bfloat16"),
        ("dtype", "torch.float16", "float16"),
    ],
)
def test_dtype_is_the_one_that_vllm_serves_in(field: str, value: str, dtype: str, explain: Any) -> None:
    assert explain(quantized(**{"torch_dtype": None, field: value})).problems[0].dtype == dtype


# --- what a rank holds ------------------------------------------------------------------------------------------------


def test_kimis_experts_have_the_sizes_to_which_vllm_pads_them(explain: Any) -> None:
    kimi = quantized(model_type="kimi_linear", moe_intermediate_size=3072)

    def problem(tp: int, ep: bool = False, vllm: str | None = None, dp: int = 1, **changes: Any) -> Problem:
        found: Problem = explain(kimi | changes, tp, ep, dp=dp, vllm=vllm).problems[0]
        return found

    def inner(*args: Any, **changes: Any) -> int:
        found = problem(*args, **changes)
        assert not found.unpadded_intermediate_size
        return found.intermediate_size

    assert (inner(8), inner(16, ep=True), inner(16, vllm="0.26.0")) == (384, 3072, 192)
    assert inner(1, dp=16) == 192, "the model's code counts tensor-parallel ranks alone"
    for tp, dp, vllm, size in ((16, 1, None, 256), (16, 1, "0.27.1", 256), (16, 2, None, 128), (32, 1, None, 256)):
        found = problem(tp, dp=dp, vllm=vllm)
        assert (found.intermediate_size, found.unpadded_intermediate_size) == (size, 3072)
        assert found.unsharded_intermediate_size == 3072
    # Ranks that do not divide the size in the checkpoint divide the padded one.
    assert problem(32, moe_intermediate_size=1408 + 16).intermediate_size == 256
    with pytest.raises(CheckpointError, match=r"\(3080 mod 16 = 8\)\. Use TP 8, or --ep"):
        problem(16, moe_intermediate_size=3080, min_moe_intermediate_per_partition=0)
    # A model says how many itself.
    assert inner(16, min_moe_intermediate_per_partition=192) == inner(16, min_moe_intermediate_per_partition=0) == 192
    assert problem(8, min_moe_intermediate_per_partition=512).intermediate_size == 512
    with pytest.raises(CheckpointError, match="min_moe_intermediate_per_partition"):
        inner(8, min_moe_intermediate_per_partition="many")
    assert inner(1, moe_intermediate_size=128) == 128, "one rank's experts stay as they are"
    assert inner(16, model_type="qwen3_moe") == 192


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 20, "intermediate_size": 12288},
        {"num_key_value_heads": 20, "intermediate_size": None, "shared_expert_intermediate_size": 1536},
        {"num_key_value_heads": 20, "intermediate_size": None, "moe_intermediate_size": 1536},
    ],
    ids=["key heads", "dense layers", "shared experts", "experts"],
)
def test_ranks_that_would_do_cut_what_else_vllm_cuts(fields: dict[str, Any], ep: bool, explain: Any) -> None:
    """Five ranks divide 20 heads; vLLM's attention and linear layers assert that they divide these, too."""
    data = quantized(num_attention_heads=20, moe_intermediate_size=1600, intermediate_size=9600) | fields
    with pytest.raises(CheckpointError, match=r"do not divide the 20 .* \(20 mod 8 = 4\)\. Use TP 4"):
        explain(data, tp=8, ep=ep)


# --- spellings of MXFP8 -----------------------------------------------------------------------------------------------

LEGACY_MXFP8 = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}


@pytest.mark.parametrize(
    ("quantization", "activations", "packing", "method"),
    [
        (MODELOPT, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quantization": LEGACY_MXFP8}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "modelopt_mxfp8"}, "mxfp8", "modelopt", "modelopt_mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "mxfp8", "modelopt", "mxfp8"),
        ({"quant_method": "mxfp8", "ignored_layers": None}, "mxfp8", "modelopt", "mxfp8"),
        (
            {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": LEGACY_MXFP8},
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
    found = explain(quantized(quantization_config=quantization))
    assert {problem.scheme for problem in found.problems} == {Scheme("mxfp8", 8, 32, packing, activations=activations)}
    assert (len(found.problems), found.method) == (48, method)


def test_older_modelopt_keeps_the_quantization_in_a_file_of_its_own(explain: Any) -> None:
    inner = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["model.layers.0*"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": inner}
    found = explain(config(), hf_quant_config=beside)
    assert (len(found.problems), found.unquantized) == (47, ("model.layers.0.mlp.experts",))


PLACES = ("quantization_config", "hf_quant_config.json", "text_config", "compression_config")
"""Where vLLM looks for the quantization, in this order."""


@pytest.mark.parametrize("places", list(itertools.combinations(PLACES, 2)), ids="-".join)
def test_of_two_quantizations_the_one_that_vllm_takes_is_read(places: tuple[str, str], explain: Any) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    data = config("qwen3-vl-30b-a3b")
    data.pop("quantization_config", None)
    beside = {}
    for place, found in zip(places, (MODELOPT, gptq), strict=True):
        if place == "hf_quant_config.json":
            beside["hf_quant_config"] = found
        elif place == "text_config":
            data["text_config"]["quantization_config"] = found
        else:
            data[place] = found
    assert explain(data, **beside).method == "modelopt_mxfp8"


def test_a_bare_config_needs_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "anything.txt"
    file.write_text(json.dumps(quantized()))
    assert len(find_moe_layers(read_checkpoint(file)).problems) == 48


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
        ("*.layers.1.mlp.experts.*", []),  # the module's name has nothing after it
        ("*.layers.1.mlp.*", [1]),
        ("model.layers.1.mlp.experts.*.down_proj", [1]),  # all or nothing
        ("re:model\\.layers\\.[0-3]\\.", []),  # no expressions are read there
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
        found = explain(quantized(quantization_config=quantization))
        assert found.unquantized == tuple(f"model.layers.{index}.mlp.experts" for index in left_out)
        assert len(found.problems) == 48 - len(left_out)
        assert any("unquantized" in note for note in found.notes) == bool(left_out)


def test_an_exclusion_may_use_the_checkpoints_name_of_a_module(explain: Any) -> None:
    quantization = MODELOPT | {"ignore": ["backbone.layers.1.mixer*"]}
    found = explain(quantized("nemotron-3-nano-30b-a3b", quantization_config=quantization))
    assert found.unquantized == ("model.layers.1.mixer.experts",)
    quantization = {"quant_method": "mxfp8", "ignored_layers": ["model.layers.7.block_sparse_moe"]}
    assert explain(quantized("minimax-m2", quantization_config=quantization)).unquantized == (
        "model.layers.7.mlp.experts",
    )
    quantization = MODELOPT | {"ignore": ["model.language_model.layers.2.mlp.experts"]}
    found = explain(quantized("qwen3-vl-30b-a3b", quantization_config=quantization))
    assert found.unquantized == ("language_model.model.layers.2.mlp.experts",)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (r"re:.*experts.*", "has no effect: vLLM expects names and wildcards there"),
        ("*.mlp.experts.*", "excludes no experts: vLLM looks up the experts' module, whose name ends with experts"),
        ("model.layers.1.mlp.experts.*", ""),
        ("*.mlp.shared_experts.*", ""),
        ("*self_attn*", ""),
    ],
)
def test_exclusions_without_effect_are_noted(entry: str, words: str, explain: Any) -> None:
    notes = explain(quantized(quantization_config=MODELOPT | {"ignore": [entry]})).notes
    assert [note.rpartition(f"the exclusion {entry!r} ")[2] for note in notes if "exclusion" in note] == [words] * bool(
        words
    )


def test_compressed_tensors_ignores_and_targets_by_name_and_expression(explain: Any) -> None:
    quantization = compressed(group(CT_MXFP8), ignore=["lm_head", r"re:.*layers\.[01]\.mlp\.experts.*"])
    assert len(explain(quantized(quantization_config=quantization)).unquantized) == 2
    targets = (r"re:.*layers\.[0-9]\..*experts.*(gate|up|down)_proj$",)
    found = explain(quantized(quantization_config=compressed(group(CT_MXFP8, targets=targets))))
    assert (len(found.problems), len(found.unquantized)) == (10, 38)


def test_a_long_list_of_excluded_matrices_is_read(explain: Any) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}"
        for layer in range(24)
        for expert in range(128)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert len(explain(quantized(quantization_config=MODELOPT | {"ignore": names})).unquantized) == 24


# --- mixed and other formats ------------------------------------------------------------------------------------------


def test_mixed_precision_is_read_layer_by_layer(explain: Any) -> None:
    quantization = mixed(
        model__layers__0__mlp__experts="MXFP8",
        model__layers__1__mlp__experts__0__gate_proj="MXFP8",
        model__layers__2__mlp__gate_proj="mxfp8",
        model__layers__3__mlp__experts="NVFP4",
        model__layers__4__mlp__shared_expert__gate_proj="MXFP8",
        **{"model__layers__5__mlp__experts*": "MXFP8"},
    )
    found = explain(quantized(quantization_config=quantization))
    assert [problem.layer.split(".")[2] for problem in found.problems] == ["0", "1", "2", "5"]
    assert found.unsupported_formats == {"model.layers.3.mlp.experts": "NVFP4"}
    assert len(found.unquantized) == 43
    assert any("1 MoE layer has experts in NVFP4" in note for note in found.notes)
    assert found.method == "modelopt_mixed"


def test_mixed_precision_may_keep_its_layers_in_the_other_file(explain: Any) -> None:
    recipe = {"model.layers.0.mlp.experts": {"quant_algo": "MXFP8"}}
    beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": recipe}}
    short = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    assert len(explain(quantized(quantization_config=short), hf_quant_config=beside).problems) == 1


def test_matrices_of_one_layer_in_two_formats_are_refused(explain: Any) -> None:
    quantization = mixed(
        model__layers__0__mlp__experts__0__gate_proj="MXFP8", model__layers__0__mlp__experts__0__down_proj="FP8"
    )
    with pytest.raises(CheckpointError, match=r"different quant_algo: FP8, MXFP8"):
        explain(quantized(quantization_config=quantization))


def test_short_names_are_numbers_where_nothing_else_differs() -> None:
    names = [f"model.layers.{index}.mlp.experts" for index in (0, 7, 12)]
    assert short_layer_names(names) == ["0", "7", "12"]
    assert short_layer_names(names[:1]) == ["0"] and short_layer_names([]) == []
    for others in ([*names, "mtp.layers.0.mlp.experts"], ["a.layers.1.layers.2.b"], ["experts"]):
        assert short_layer_names(others) == others
