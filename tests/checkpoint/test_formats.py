"""What configs of formats other than MXFP8 say about experts: integers of GPTQ, AWQ and compressed-tensors, MXFP4."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.configs import CT_INPUTS, CT_MXFP8, GPTQ, INT4, INT8, PACKED, compressed, config, group, quantized
from tests.lib.releases import every_release, sources
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import parse_config
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import NEWEST


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
    found = explain(quantized(quantization_config=quantization))
    assert {problem.scheme for problem in found.problems} == {scheme}


@pytest.mark.parametrize("name", ["kimi-k2-thinking", "gpt-oss-20b"])
def test_published_quantized_models(name: str, explain: Any) -> None:
    scheme = {
        "kimi-k2-thinking": Scheme("wna16", 4, 32, "compressed-tensors"),
        "gpt-oss-20b": Scheme("mxfp4", 4, 32, "gpt_oss"),
    }[name]
    assert {problem.scheme for problem in explain(config(name)).problems} == {scheme}


PARTS = {
    "gptq, other bits": (GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, "int8 symmetric"),
    "gptq, left out": (GPTQ | {"dynamic": {r"-:.*\.experts\..*\.up_proj": {}}}, "up_proj: not quantized"),
    "compressed-tensors, other bits": (
        compressed(
            group(INT4, targets=("re:.*(gate|up)_proj",)), group(INT8, targets=("re:.*down_proj",)), format=PACKED
        ),
        "int8 symmetric",
    ),
    "compressed-tensors, left out": (
        compressed(group(INT4), format=PACKED, ignore=[r"re:.*\.gate_proj"]), "gate_proj: not quantized",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_matrices_of_one_layer_in_different_formats_are_refused(explain: Any, case: str) -> None:
    quantization, words = PARTS[case]
    with pytest.raises(CheckpointError) as error:
        explain(quantized(quantization_config=quantization))
    message = str(error.value)
    assert "the matrices of one layer's experts are stored differently" in message
    assert words in message and "int4 symmetric, groups of 128" in message and "mlp.experts" in message


def test_entries_for_each_matrix_that_agree_are_one_format(explain: Any) -> None:
    by_name = {rf"+:.*\.{name}_proj": {"bits": 8} for name in ("gate", "up", "down")}
    targets = (group(INT8, targets=(rf"re:.*\.{name}_proj",)) for name in ("gate", "up", "down"))
    for quantization in (GPTQ | {"dynamic": by_name}, compressed(*targets, format=PACKED)):
        assert {each.scheme.bits for each in explain(quantized(quantization_config=quantization)).problems} == {8}
    # Says of one matrix what is true of all.
    same = GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 4}}}
    assert {each.scheme.bits for each in explain(quantized(quantization_config=same)).problems} == {4}


def test_a_router_called_gate_is_not_taken_for_a_mixtral_expert(explain: Any) -> None:
    for pattern in (r"-:.*gate.*", r"-:.*\.gate"):
        found = explain(quantized("mixtral-8x7b", quantization_config=GPTQ | {"dynamic": {pattern: {}}}))
        assert found.unquantized == () and len(found.problems) == 32


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
def test_a_router_called_gate_is_not_taken_for_a_numbered_projection(
    name: str, kind: str, layers: int, explain: Any
) -> None:
    def of(pattern: str) -> Any:
        data = quantized(name, quantization_config=GPTQ | {"dynamic": {pattern: {}}})
        data.get("text_config", data)["model_type"] = kind
        return explain(data)

    found = of(r"-:.*gate.*")
    assert found.unquantized == () and len(found.problems) == layers
    assert {problem.scheme.bits for problem in found.problems} == {4}
    with pytest.raises(CheckpointError, match="w1: not quantized; w3: int4"):
        of(r"-:.*\.w1")


def test_experts_without_a_gate_are_left_out_by_up_and_down_alone(explain: Any) -> None:
    pattern = r"-:.*layers\.3\.mixer\.experts\..*(up|down)_proj"
    everything = explain(quantized("nemotron-3-nano-30b-a3b", quantization_config=GPTQ))
    found = explain(quantized("nemotron-3-nano-30b-a3b", quantization_config=GPTQ | {"dynamic": {pattern: {}}}))
    layer = "model.layers.3.mixer.experts"
    assert (layer in found.unquantized) == (layer in {problem.layer for problem in everything.problems})


def _of_unknown(*projections: tuple[str, ...], own: tuple[str, ...] = ()) -> LayerNames:
    return LayerNames(("model.layers.3.mlp.experts",), projections, own)


def test_where_nobody_knows_the_convention_one_that_is_uniform_is_enough() -> None:
    router = parse_config(GPTQ | {"dynamic": {r"-:.*gate.*": {}}}, "config.json")
    assert str(router(_of_unknown(*GATED_PROJECTIONS))) == "int4 symmetric, groups of 128 (gptq)"
    with pytest.raises(CheckpointError, match="gate_proj: not quantized; up_proj: int4"):
        router(_of_unknown(*GATED_PROJECTIONS, own=GATED_PROJECTIONS[0]))
    # By neither convention are all matrices alike.
    both = parse_config(GPTQ | {"dynamic": {r"-:.*\.(gate_proj|w1)$": {}}}, "config.json")
    with pytest.raises(CheckpointError, match="gate_proj: not quantized; up_proj: int4"):
        both(_of_unknown(*GATED_PROJECTIONS))
    # Entries that name every matrix by one convention count, whichever it is.
    named = parse_config(GPTQ | {"dynamic": {r"+:.*\.w[123]$": {"bits": 8}}}, "config.json")
    assert str(named(_of_unknown(*GATED_PROJECTIONS))) == "int8 symmetric, groups of 128 (gptq)"


def test_gptq_may_leave_modules_out_and_give_others_another_group(explain: Any) -> None:
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "dynamic": {r"-:.*layers\.0\..*": {}, r"+:.*layers\.1\..*": {"group_size": 64}},
    }  # fmt: skip
    found = explain(quantized(quantization_config=quantization))
    assert found.unquantized == ("model.layers.0.mlp.experts",)
    assert [problem.scheme.group_size for problem in found.problems[:2]] == [64, 128]


def test_lists_of_modules_may_be_lists_of_lists(explain: Any) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    matrices = [f"{expert}.{name}_proj" for expert in range(128) for name in ("gate", "up", "down")]
    experts = [[f"mlp.experts.{matrix}"] for matrix in matrices]
    found = explain(quantized(quantization_config=gptq | {"modules_in_block_to_quantize": [["self_attn.q"], *experts]}))
    assert len(found.problems) == 48 and not found.unquantized
    found = explain(quantized(quantization_config=gptq | {"modules_in_block_to_quantize": [["self_attn.q"]]}))
    assert len(found.unquantized) == 48 and not found.problems
    names = [f"model.layers.{index}.mlp.experts.{matrix}" for index in (1, 3) for matrix in matrices]
    found = explain(quantized(quantization_config=gptq | {"modules_in_block_to_quantize": names}))
    assert [problem.layer for problem in found.problems] == ["model.layers.1.mlp.experts", "model.layers.3.mlp.experts"]
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    found = explain(quantized(quantization_config=awq | {"modules_to_not_convert": [["gate"], [["layers.0."]]]}))
    assert found.unquantized == ("model.layers.0.mlp.experts",)


def test_groups_that_a_shard_boundary_splits_are_halved_if_in_order(explain: Any) -> None:
    from vllm_moe_oracle.core.sharding import loaded_group_size, split_reasons

    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    for each in (gptq, compressed(group(INT4), format=PACKED)):
        halved = explain(quantized(quantization_config=each), tp=4).problems[0]
        assert loaded_group_size(halved) == 64 and not split_reasons(halved)
    ordered = explain(quantized(quantization_config=gptq | {"desc_act": True}), tp=4).problems[0]
    assert loaded_group_size(ordered) == 128 and not split_reasons(ordered)


def test_integers_of_gpt_oss_are_loaded_with_gate_and_up_apart(explain: Any) -> None:
    ints = compressed(group(INT4 | {"group_size": 32}), format=PACKED)
    found = explain({**config("gpt-oss-20b"), "quantization_config": ints})
    assert {problem.activation.interleaved for problem in found.problems} == {False}
    assert {problem.activation.name for problem in found.problems} == {"swigluoai"}
    assert [note for note in found.notes if "loader of gpt-oss skips experts under the names of GPTQ" in note]
    assert not any("gpt-oss" in note for note in explain(quantized(quantization_config=ints)).notes)


def test_explain_notes_refused_act_order_in_linear_layers(explain: Any) -> None:
    def notes(vllm: str | None, **changes: Any) -> str:
        ordered = GPTQ | {"desc_act": True} | changes
        return " ".join(explain(quantized(quantization_config=ordered), vllm=vllm).notes)

    for vllm in (None, "0.30.0", NEWEST, f"{NEWEST}+cu130"):
        assert "vLLM refuses linear layers with act order in groups" in notes(vllm)
    assert "act order" not in notes("0.29.0")
    for other in ({"desc_act": False}, {"group_size": -1}, {"static_groups": True}):
        assert "refuses linear layers" not in notes(None, **other)


@every_release
def test_the_release_from_which_linear_layers_have_no_act_order(release: str) -> None:
    folder = sources(release)
    text = (folder / "vllm/model_executor/layers/quantization/utils/gptq_utils.py").read_text()
    refuses = "is no longer supported" in " ".join(text.replace('"', " ").split())
    assert refuses is (release >= min_versions.LINEAR_WITHOUT_ACT_ORDER)
