"""What configs of MXFP4 experts say: gpt-oss cut between blocks, FP8 checkpoints with 4-bit experts, other tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.configs import CT_INPUTS, CT_MXFP8, compressed, config, group
from vllm_moe_oracle.checkpoint.moe_layers import MoeLayers
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.core.sharding import describe_shard, shard_by_blocks, shard_size
from vllm_moe_oracle.errors import CheckpointError

QWEN3, GPT_OSS = config("qwen3-30b-a3b"), config("gpt-oss-20b")


@pytest.fixture
def explain(explain: Any) -> Any:
    """Reads a model's config with another quantization."""

    def run(model: dict[str, Any], quantization: dict[str, Any] | None = None, **ranks: Any) -> Any:
        return explain(model if quantization is None else {**model, "quantization_config": quantization}, **ranks)

    return run


# --- Shares of whole blocks -----------------------------------------------------------------------------------------


def gpt_oss_shares(width: int, ranks: int) -> list[int]:
    """`GptOssModel._load_weights_mxfp4`, in every release: what each rank slices out of the checkpoint's tensor."""
    share = -(-(width // 32) // ranks) * 32
    return [min((rank + 1) * share, width) - rank * share for rank in range(ranks)]


@pytest.mark.parametrize(("tp", "share", "last"), [(1, 2880, 2880), (2, 1440, 1440), (4, 736, 672), (8, 384, 192)])
def test_ranks_hold_what_gpt_oss_s_loader_gives_them(explain: Any, tp: int, share: int, last: int) -> None:
    problem: Problem = explain(GPT_OSS, tp=tp).problems[0]
    assert (problem.intermediate_size, problem.unsharded_intermediate_size) == (share, 2880)
    shares = [shard_size(problem, rank) for rank in range(tp)]
    assert shares == gpt_oss_shares(2880, tp) and shares[-1] == last and sum(shares) == 2880
    if tp > 2:
        assert "of 2880" in str(problem) and str(share) in describe_shard(problem)


def test_ranks_of_which_some_would_have_nothing_are_left_to_be_refused(explain: Any) -> None:
    # 90 blocks over 60 ranks are 2 each, for 45 of them.
    problem = explain({**GPT_OSS, "num_attention_heads": 120}, tp=60).problems[0]
    assert (problem.intermediate_size, problem.ragged_intermediate_size) == (48, 0)
    assert shard_by_blocks(problem) is problem


def test_other_models_are_not_cut_between_blocks(explain: Any) -> None:
    problem = explain({**QWEN3, "moe_intermediate_size": 2880}, {"quant_method": "mxfp4"}, tp=4).problems[0]
    assert (problem.intermediate_size, problem.ragged_intermediate_size) == (720, 0)


def test_expert_parallelism_cuts_nothing(explain: Any) -> None:
    problem = explain(GPT_OSS, tp=8, ep=True).problems[0]
    assert (problem.intermediate_size, problem.local_experts) == (2880, 4)


@pytest.mark.parametrize("tag", ["mxfp4", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("entry", ["model.layers.3.mlp.experts", "model.layers.3*", r"re:.*\.3\.mlp\.experts"])
def test_experts_of_gpt_oss_are_all_quantized_or_none_are_served(explain: Any, entry: str, tag: str) -> None:
    """Those of another model that is tagged so may be left out."""
    quantization = {"quant_method": tag, "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head", entry]}
    with pytest.raises(CheckpointError, match="leaves experts in 16 bits; vLLM's loader of gpt-oss reads") as caught:
        explain(GPT_OSS, quantization)
    assert "model.layers.3.mlp.experts" in caught.value.where and repr(entry)[2:-1] in caught.value.rule
    if tag == "mxfp4":
        assert explain(QWEN3, quantization).unquantized == ("model.layers.3.mlp.experts",)


# --- Who wrote it ---------------------------------------------------------------------------------------------------

PACKED = "mxfp4-pack-quantized"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUARK_WEIGHT = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False
}  # fmt: skip
QUARK = {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": QUARK_WEIGHT}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp", "sym": True}


def scheme(found: MoeLayers) -> tuple[str, str, str]:
    (only,) = {problem.scheme for problem in found.problems}
    return only.name, only.packing, only.activations


def test_the_tag_mxfp4_is_gpt_oss_s_layout_for_gpt_oss_only(explain: Any) -> None:
    assert scheme(explain(GPT_OSS)) == ("mxfp4", "gpt_oss", "16bit")
    assert scheme(explain(QWEN3, {"quant_method": "mxfp4"})) == ("mxfp4", "mxfp4", "16bit")


def test_kimi_k3_experts_in_compressed_tensors_are_read_as_mxfp4(explain: Any) -> None:
    inputs = {**CT_INPUTS, "num_bits": 4}
    stored = compressed(group(inputs | {"dynamic": False}, inputs), format=PACKED, ignore=["re:.*self_attn.*"])
    assert scheme(explain(QWEN3, stored)) == ("mxfp4", "compressed-tensors", "mxfp4")
    kimi = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": QWEN3}
    found = explain(kimi, stored)
    # vLLM writes another method into the config before it asks anybody: what is declared of inputs is not read.
    assert scheme(found) == ("mxfp4", "mxfp4", "16bit") and found.method == "mxfp4"
    assert found.problems[0].layer.startswith("language_model.model.layers.0.")


@pytest.mark.parametrize("inputs", [None, {"num_bits": 4}, {"num_bits": 8, "strategy": "token", "group_size": None}])
def test_gpt_oss_is_not_read_as_compressed_tensors_stores_mxfp4(explain: Any, inputs: dict[str, Any] | None) -> None:
    """Its loader in vLLM maps no name of theirs (`tests/methods/test_mxfp4_methods.py`); of other models it is read."""
    declared = inputs and {"type": "float", "strategy": "group", "group_size": 32, "dynamic": True} | inputs
    stored = compressed(group({**CT_MXFP8, "num_bits": 4}, declared), format=PACKED)
    assert len(explain(QWEN3, stored).problems) == 48
    with pytest.raises(
        CheckpointError, match=r"gpt-oss skips .*\(weight_packed\)\. Serve .* OpenAI publishes"
    ) as caught:
        explain(GPT_OSS, stored)
    assert "model.layers.0.mlp.experts" in str(caught.value)


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41"])
@pytest.mark.parametrize("stated", [{}, {"expert_dtype": "fp4"}])
def test_deepseek_v4_has_four_bit_experts_and_fp8_activations(explain: Any, kind: str, stated: dict[str, str]) -> None:
    found = explain({**QWEN3, "model_type": kind, **stated}, FP8)
    assert scheme(found) == ("mxfp4", "mxfp4", "fp8") and found.method == "deepseek_v4_fp8"


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ({"model_type": "deepseek_v4", "expert_dtype": "fp8"}, FP8),
        ({"model_type": "deepseek_v4"}, {**FP8, "moe_quant_algo": "NVFP4"}),
        ({}, FP8),
        ({}, {**QUARK, "global_quant_config": {"weight": {**QUARK_WEIGHT, "dtype": "fp6_e3m2"}}}),
        ({}, {**QUARK, "global_quant_config": {"weight": [QUARK_WEIGHT, QUARK_WEIGHT]}}),
        ({}, {**QUARK, "global_quant_config": {"weight": {**QUARK_WEIGHT, "group_size": 16}}}),
        ({}, {**QUARK, "global_quant_config": {"weight": {**QUARK_WEIGHT, "scale_format": "float32"}}}),
        ({}, {**QUARK, "global_quant_config": {"weight": {**QUARK_WEIGHT, "scale_format": None}}}),
        ({}, {**QUARK, "global_quant_config": {"weight": QUARK_WEIGHT, "input_tensors": QUARK_WEIGHT}}),
        ({}, {**AUTO_ROUND, "data_type": "fp", "group_size": 128}),
    ],
)
def test_what_is_not_mxfp4_is_named_as_another_format(
    explain: Any, model: dict[str, str], config: dict[str, Any]
) -> None:
    found = explain({**QWEN3, **model}, config)
    assert not found.problems and len(found.unsupported_formats) == 48
    assert "which are left to stock vLLM, unaffected by this plugin" in found.notes[0]


def test_quark(explain: Any) -> None:
    assert scheme(explain(QWEN3, QUARK)) == ("mxfp4", "quark", "16bit")
    alone = {**QUARK, "global_quant_config": {"weight": [QUARK_WEIGHT], "input_tensors": None}}
    assert scheme(explain(QWEN3, alone)) == ("mxfp4", "quark", "16bit")
    dynamic = {"weight": QUARK_WEIGHT, "input_tensors": {**QUARK_WEIGHT, "is_dynamic": True}}
    assert scheme(explain(QWEN3, {**QUARK, "global_quant_config": dynamic})) == ("mxfp4", "quark", "mxfp4")
    apart = {
        **QUARK,
        "layer_quant_config": {"*layers.3.*": {"weight": None}, f"{module(4)}.0.up_proj": {"weight": None}},
        "exclude": [f"{module(5)}.*.down_proj", r"re:.*\.layers\.7\.", module(9)],
    }
    found = explain(QWEN3, apart)
    assert found.unquantized == tuple(map(module, (3, 4, 5, 7, 9)))
    assert found.method == "quark"


def module(index: int) -> str:
    return f"model.layers.{index}.mlp.experts"


@pytest.mark.parametrize("entry", ["*layers.5.mlp*", "*", "model.layers.5.mlp", "layers.5.mlp.experts", "re:layers"])
def test_quark_leaves_out_names_and_expressions_only(explain: Any, entry: str) -> None:
    found = explain(QWEN3, {**QUARK, "exclude": [entry]})
    assert not found.unquantized
    assert any(f"exclude: {entry!r} has no effect" in note for note in found.notes) == ("*" in entry)


@pytest.mark.parametrize("entry", ["*.experts.*", "*_proj", "*experts.0.up_proj"])
def test_quark_gives_modules_not_their_matrices_a_format_by_wildcard(explain: Any, entry: str) -> None:
    assert not explain(QWEN3, {**QUARK, "layer_quant_config": {entry: {"weight": None}}}).unquantized


def test_what_vllm_fails_without_is_told_of_quark_s_configs(explain: Any) -> None:
    whole = {**QUARK, "export": {"kv_cache_group": []}, "layer_type_quant_config": {}}
    assert not any("not set" in note for note in explain(QWEN3, whole).notes)
    (told,) = (note for note in explain(QWEN3, {**whole, "export": None, "exclude": None}).notes if "not set" in note)
    assert told.endswith("exclude, export are not set; vLLM fails without them")
    (told,) = (note for note in explain(QWEN3, {**whole, "export": {}}).notes if "not set" in note)
    assert told.endswith("export.kv_cache_group is not set; vLLM fails without it")


@pytest.mark.parametrize(
    ("entry", "is_told"),
    [
        (module(5), True), (r"re:.*\.experts\.", True), ("experts.0.down_proj", True), ("lm_head", False),
        ("re:.*shared_experts.*", False), ("model.layers.5.mlp.shared_experts.down_proj", False),
    ],
)  # fmt: skip
def test_explain_notes_releases_that_exclude_routed_experts(explain: Any, entry: str, is_told: bool) -> None:
    notes = explain(QWEN3, {**QUARK, "exclude": [entry]}).notes
    assert any("the oldest supported releases" in note for note in notes) == is_told


def test_auto_round(explain: Any) -> None:
    found = explain(QWEN3, AUTO_ROUND)
    assert scheme(found) == ("mxfp4", "auto-round", "mxfp4") and found.method == "inc"
    assert scheme(explain(QWEN3, {**AUTO_ROUND, "bits": 8})) == ("mxfp8", "auto-round", "mxfp8")
    apart = {
        **AUTO_ROUND,
        "extra_config": {"model.layers.2.mlp.experts": {"bits": 16}, r".*layers\.4\..*": {"bits": 16}},
    }
    assert explain(QWEN3, apart).unquantized == ("model.layers.2.mlp.experts", "model.layers.4.mlp.experts")


def test_auto_round_gives_modules_the_other_mx_format(explain: Any) -> None:
    entries = {r".*layers\.1\..*": {"bits": 8}, r".*layers\.2\..*": {"bits": 2}}
    found = explain(QWEN3, {**AUTO_ROUND, "extra_config": entries})
    stored = {problem.layer: problem.scheme for problem in found.problems}
    assert stored["model.layers.0.mlp.experts"].name == "mxfp4"
    other = stored["model.layers.1.mlp.experts"]
    assert (other.name, other.bits, other.activations) == ("mxfp8", 8, "mxfp8")
    assert found.unsupported_formats == {"model.layers.2.mlp.experts": "mx_fp of 2 bits"}


@pytest.mark.parametrize(
    ("changes", "activations"),
    [({"act_bits": 4}, "mxfp4"), ({"act_bits": 8}, "mxfp8"), ({"act_bits": 16}, "16bit"), ({"act_bits": 32}, "16bit")],
)
def test_auto_round_says_what_inputs_are_quantized_to(explain: Any, changes: dict[str, Any], activations: str) -> None:
    assert scheme(explain(QWEN3, {**AUTO_ROUND, **changes})) == ("mxfp4", "auto-round", activations)
    # Modules of 8 bits beside them are W8A8 in vLLM, whatever the config says.
    apart = {"extra_config": {"model.layers.1.mlp.experts": {"bits": 8}}}
    schemes = {each.layer: each.scheme for each in explain(QWEN3, {**AUTO_ROUND, **changes, **apart}).problems}
    assert schemes["model.layers.1.mlp.experts"].activations == "mxfp8"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"act_bits": 2}, "mx_fp of 4 bits with inputs of 2 bits"),
        ({"bits": 8, "act_bits": 16}, "mx_fp of 8 bits with inputs of 16 bits"),
        ({"group_size": 16}, "mx_fp of 4 bits in groups of 16"),
        ({"sym": False}, "mx_fp of 4 bits with zero points"),
        ({"packing_format": "auto_round:auto_gptq"}, "mx_fp of 4 bits packed as auto_round:auto_gptq"),
    ],
)
def test_auto_round_mx_formats_that_vllm_refuses_are_named(explain: Any, changes: dict[str, Any], words: str) -> None:
    found = explain(QWEN3, {**AUTO_ROUND, **changes})
    assert not found.problems and set(found.unsupported_formats.values()) == {words}


@pytest.mark.parametrize(
    "config",
    [
        {**QUARK, "global_quant_config": None},
        {**QUARK, "global_quant_config": 4},
        {**QUARK, "layer_quant_config": [1]},
        {**QUARK, "exclude": "lm_head"},
        {**AUTO_ROUND, "bits": "four"},
        {**AUTO_ROUND, "extra_config": {"a": 16}},
        {**FP8, "modules_to_not_convert": 3, "expert_dtype": "fp4"},
        {**FP8, "expert_dtype": 4},
    ],
)
def test_damaged_configs_are_refused_by_name(explain: Any, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        explain(QWEN3, config)
