"""What configs of MXFP4 experts say: gpt-oss cut between blocks, FP8 checkpoints with 4-bit experts, other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_oracle.checkpoint import Layers, layers, read
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.oracle.planner import cut_in_words, in_whole_blocks, share_of
from vllm_moe_oracle.oracle.problem import Problem

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
QWEN3 = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
GPT_OSS = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    def run(model: dict[str, Any], quantization: dict[str, Any] | None = None, tp: int = 1, ep: bool = False) -> Layers:
        data = dict(model) if quantization is None else {**model, "quantization_config": quantization}
        (tmp_path / "config.json").write_text(json.dumps(data))
        return layers(read(tmp_path), tp, ep)

    return run


# --- Shares of whole blocks -----------------------------------------------------------------------------------------


def gpt_oss_shares(width: int, ranks: int) -> list[int]:
    """`GptOssModel._load_weights_mxfp4`, in every release: what each rank slices out of the checkpoint's tensor."""
    share = -(-(width // 32) // ranks) * 32
    return [min((rank + 1) * share, width) - rank * share for rank in range(ranks)]


@pytest.mark.parametrize(("tp", "share", "last"), [(1, 2880, 2880), (2, 1440, 1440), (4, 736, 672), (8, 384, 192)])
def test_ranks_hold_what_gpt_oss_s_loader_gives_them(explain: Any, tp: int, share: int, last: int) -> None:
    problem: Problem = explain(GPT_OSS, tp=tp).problems[0]
    assert (problem.intermediate_size, problem.full_intermediate_size) == (share, 2880)
    shares = [share_of(problem, rank) for rank in range(tp)]
    assert shares == gpt_oss_shares(2880, tp) and shares[-1] == last and sum(shares) == 2880
    if tp > 2:
        assert "of 2880" in str(problem) and str(share) in cut_in_words(problem)


def test_ranks_of_which_some_would_have_nothing_are_left_to_be_refused(explain: Any) -> None:
    # 90 blocks over 60 ranks are 2 each, for 45 of them.
    assert gpt_oss_shares(2880, 60)[45:] != [64] * 15
    problem = explain({**GPT_OSS, "num_attention_heads": 120}, tp=60).problems[0]
    assert (problem.intermediate_size, problem.whole_intermediate_size) == (48, 0)
    assert in_whole_blocks(problem) is problem


def test_other_models_are_not_cut_between_blocks(explain: Any) -> None:
    model = {**QWEN3, "moe_intermediate_size": 2880}
    problem = explain(model, {"quant_method": "mxfp4"}, tp=4).problems[0]
    assert (problem.intermediate_size, problem.whole_intermediate_size) == (720, 0)


def test_expert_parallelism_cuts_nothing(explain: Any) -> None:
    problem = explain(GPT_OSS, tp=8, ep=True).problems[0]
    assert (problem.intermediate_size, problem.local_experts) == (2880, 4)


# --- Who wrote it ---------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False}
QUARK = {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": QUARK_WEIGHT}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp", "sym": True}


def scheme(found: Layers) -> tuple[str, str, str]:
    (only,) = {problem.scheme for problem in found.problems}
    return only.name, only.packing, only.activations


def test_the_tag_mxfp4_is_gpt_oss_s_layout_for_gpt_oss_only(explain: Any) -> None:
    assert scheme(explain(GPT_OSS)) == ("mxfp4", "gpt_oss", "16bit")
    assert scheme(explain(QWEN3, {"quant_method": "mxfp4"})) == ("mxfp4", "mxfp4", "16bit")


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
        ({}, {**QUARK, "global_quant_config": {"weight": QUARK_WEIGHT, "input_tensors": QUARK_WEIGHT}}),
        ({}, {**AUTO_ROUND, "data_type": "fp", "group_size": 128}),
    ],
)
def test_what_is_not_mxfp4_is_named_as_another_format(
    explain: Any, model: dict[str, str], config: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="which this release does not read"):
        explain({**QWEN3, **model}, config)


def test_quark(explain: Any) -> None:
    assert scheme(explain(QWEN3, QUARK)) == ("mxfp4", "quark", "16bit")
    dynamic = {"weight": QUARK_WEIGHT, "input_tensors": {**QUARK_WEIGHT, "is_dynamic": True}}
    assert scheme(explain(QWEN3, {**QUARK, "global_quant_config": dynamic})) == ("mxfp4", "quark", "mxfp4")
    apart = {**QUARK, "layer_quant_config": {"*layers.3.*": {"weight": None}}, "exclude": ["*layers.5.mlp*"]}
    found = explain(QWEN3, apart)
    assert found.unquantised == ("model.layers.3.mlp.experts", "model.layers.5.mlp.experts")
    assert found.method == "quark"


def test_auto_round(explain: Any) -> None:
    found = explain(QWEN3, AUTO_ROUND)
    assert scheme(found) == ("mxfp4", "auto-round", "mxfp4") and found.method == "inc"
    assert scheme(explain(QWEN3, {**AUTO_ROUND, "bits": 8})) == ("mxfp8", "auto-round", "mxfp8")
    apart = {
        **AUTO_ROUND,
        "extra_config": {"model.layers.2.mlp.experts": {"bits": 16}, r".*layers\.4\..*": {"bits": 16}},
    }
    assert explain(QWEN3, apart).unquantised == ("model.layers.2.mlp.experts", "model.layers.4.mlp.experts")


def test_auto_round_gives_modules_the_other_mx_format(explain: Any) -> None:
    entries = {r".*layers\.1\..*": {"bits": 8}, r".*layers\.2\..*": {"bits": 2}}
    found = explain(QWEN3, {**AUTO_ROUND, "extra_config": entries})
    stored = {problem.layer: problem.scheme for problem in found.problems}
    assert stored["model.layers.0.mlp.experts"].name == "mxfp4"
    other = stored["model.layers.1.mlp.experts"]
    assert (other.name, other.bits, other.activations) == ("mxfp8", 8, "mxfp8")
    assert found.foreign == {"model.layers.2.mlp.experts": "mx_fp of 2 bits"}


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
