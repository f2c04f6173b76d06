"""Checkpoints' configs that are damaged or hostile: each gets an answer, or one error that says what and where."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lib.configs import (
    AUTO_ROUND,
    CONFIGS,
    CT_MXFP8,
    INT4,
    MODELOPT,
    PACKED,
    compressed,
    config,
    group,
    mixed,
    quantized,
)
from vllm_moe_oracle.checkpoint.files import MAX_CONFIG_BYTES, read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.core import patterns
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import MAX_SIMILAR_NOTES


def test_a_field_that_a_config_has_twice_is_noted(tmp_path: Path) -> None:
    text = json.dumps(quantized(num_hidden_layers=2))
    (tmp_path / "config.json").write_text(text[:-1] + ', "num_experts": 64, "hidden_size": 1024, "num_experts": 32}')
    found = find_moe_layers(read_checkpoint(tmp_path))
    said = [note for note in found.notes if "more than once" in note]
    assert sorted(said) == [
        f"config.json has the field '{name}' more than once in an object: the last counts, as in vLLM"
        for name in ("hidden_size", "num_experts")
    ]
    assert found.problems[0].num_experts == json.loads((tmp_path / "config.json").read_text())["num_experts"] == 32


UNKNOWN = {"model_type": "other_moe"}
"""A model type whose defaults nobody knows."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            UNKNOWN | {"num_experts": None},
            "'other_moe' is a name of models with experts, and none of num_experts, .* is set",
        ),
        ({"model_type": None, "architectures": None, "num_hidden_layers": None}, "is not the config of a model: none"),
        ({"num_experts": 0}, "has no MoE layers"),
        ({"mlp_only_layers": list(range(48))}, "none of the 48 layers has experts"),
        ({"num_experts": -128}, "num_experts is -128, not between 1 and"),
        ({"num_experts": 1e30}, "num_experts is 1e\\+30, not an integer"),
        ({"num_experts": 10**30}, "num_experts is 1000.*, not between 1 and 65536"),
        ({"num_experts": "many"}, "num_experts is 'many', not an integer"),
        ({"num_experts": True}, "num_experts is True, not an integer"),
        ({"num_experts": [128]}, "num_experts is None, not an integer"),
        (UNKNOWN | {"num_experts_per_tok": None}, "none of num_experts_per_tok, .* is set"),
        ({"num_experts_per_tok": 129}, "129 experts for each token, of 128 in all"),
        ({"num_experts_per_tok": 8.5}, "num_experts_per_tok is 8.5"),
        ({"hidden_size": {}}, "hidden_size is {}, not an integer"),
        ({"hidden_size": 0}, "hidden_size is 0, not between"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not between 1 and 1024"),
        (UNKNOWN | {"num_hidden_layers": None}, "none of num_hidden_layers, "),
        (UNKNOWN | {"moe_intermediate_size": None}, "none of moe_intermediate_size, .* is set"),
        (UNKNOWN | {"hidden_size": None}, "none of .*, hidden_size, .* is set"),
        ({"decoder_sparse_step": "often"}, "decoder_sparse_step is 'often'"),
        ({"hidden_act": 3}, "the activation is 3, not a name"),
        ({"swiglu_limit": "high"}, "swiglu_limit is 'high', not a number"),
        *(
            ({name: value}, f"{name} is {value!r}, neither true nor false. Write true or false, without quotes")
            for name in ("norm_topk_prob", "route_norm", "use_routing_bias", "use_grouped_topk")
            for value in ("false", 0)
        ),
        ({"norm_topk_prob": True, "moe_renormalize": "yes"}, "moe_renormalize is 'yes', neither true nor false"),
        ({"scoring_func": 3}, "scoring_func is 3, not a word"),
        ({"topk_method": ["noaux_tc"]}, r"topk_method is \['noaux_tc'\], not a word"),
        *(
            ({name: value}, f"{name} is {value!r}, not a number. Write a finite number")
            for name in ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor", "route_scale")
            for value in (float("inf"), float("nan"), "2")
        ),
        *(
            ({"architectures": value}, f"architectures is {re.escape(repr(value))}, not a list of names: a server does")
            for value in ([1], {"a": 1}, "Qwen3MoeForCausalLM", ["Qwen3MoeForCausalLM", 3])
        ),
        ({"torch_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"text_config": [1]}, r"text_config is \[1\], not an object"),
        ({"block_configs": [{}]}, "block_configs .* does not read"),
        ({"hybrid_override_pattern": "E" * 5000}, "has 5000 layers, more than 1024"),
        (
            UNKNOWN | {"num_experts": None, "ffn_config": {"moe_num_experts": 16}},
            r"ffn_config.moe_num_experts describes its experts, .*; the experts are in mxfp8",
        ),
        ({"quantization_config": "MXFP8"}, "quantization_config is 'MXFP8', not an object"),
        ({"quantization_config": {}}, "there is no quant_method. Known are auto-round, inc, awq, "),
        (
            {"quantization_config": {"quant_method": "moe_wna16"}},
            "quant_method is moe_wna16, whose class in vLLM loads checkpoints of gptq and awq only. Known are auto-",
        ),
        *(
            (
                {"quantization_config": {"quant_method": word}},
                f"quant_method is '{word.lower()}', which vLLM does not know: .* Write {known}",
            )
            for word, known in (
                ("auto_round", "auto-round"),
                ("GPTQ ", "gptq"),
                ("gptq-marlin", "gptq_marlin"),
                (" awq", "awq"),
                ("gpt-oss-mxfp4", "gpt_oss_mxfp4"),
                ("experts-int8", "experts_int8"),
            )
        ),
        (
            {"quantization_config": {"producer": {"name": "modelopt"}, "quant_algo": "MXFP8", "ignore": []}},
            "there is no quant_method",
        ),
        ({"quantization_config": {"quantization": {"quant_algo": "MXFP8"}}}, "there is no quant_method"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "mxfp8"}}},
            "quantization has no kv_cache_quant_algo and no exclude_modules: vLLM refuses MXFP8 without",
        ),
        (
            {
                "quantization_config": compressed(group(INT4), format=PACKED)
                | {"sparsity_config": {"targets": ["Linear"]}}
            },
            r"sparsity_config is for \['Linear'\]: vLLM reads no sparse weights",
        ),
        ({"quantization_config": {"quant_method": 8}}, "quant_method is 8, not a word"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "there is no quant_algo"),
        (
            {"quantization_config": MODELOPT | {"quant_algo": "MXFP7"}},
            "unknown quant_algo 'MXFP7': vLLM refuses it. Quantize to one",
        ),
        ({"quantization_config": MODELOPT | {"ignore": "lm_head"}}, "ignore is 'lm_head', not a list of names"),
        ({"quantization_config": MODELOPT | {"ignore": [1]}}, r"ignore is \[1\], not a list of names"),
        ({"quantization_config": {"quant_method": "quark", "exclude": ["re:("]}}, "is not a regular expression"),
        ({"quantization_config": MODELOPT | {"config_groups": []}}, "config_groups is not an object of objects"),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": 1}}, "quantization is 1, not an object"),
        ({"quantization_config": MODELOPT | {"quant_algo": "MIXED_PRECISION"}}, "needs an object quantized_layers"),
        ({"quantization_config": mixed(a="")}, "quantized_layers.a has no quant_algo"),
        ({"quantization_config": compressed(group({"num_bits": "8e0"}))}, "num_bits is '8e0'"),
        ({"quantization_config": compressed(group(CT_MXFP8, [1]))}, r"input_activations is \[1\]"),
        ({"quantization_config": {"quant_method": "gptq", "group_size": 128}}, "bits is missing"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits is '4', neither a positive integer"),
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
            {"quantization_config": {"quant_method": "awq", "w_bit": 8, "q_group_size": 32, "zero_point": True}},
            "w_bit is 8; vLLM's classes for AWQ refuse any width but 4 bits. Quantize again with 4 bits",
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
        *(
            ({"quantization_config": compressed(group(INT4 | {"actorder": order}), format=PACKED)}, "unknown actorder")
            for order in ("best", [], {}, 1, 1.5)
        ),
    ],
)
def test_unusable_configs_say_what_and_where(
    changes: dict[str, Any], message: str, explain: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        explain(quantized(**changes))
    assert caught.value.where.startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: Expecting value"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00{", "begins with a byte order mark"),
        (b"\xff\x00{", "is not JSON"),
        (b"[1, 2]", r"holds \[1, 2\], not a JSON object"),
        (b"null", "holds None, not a JSON object"),
        (b"[" * 200_000, "is nested more than 50 levels deep"),
        (b'{"a":' * 200_000, "is nested more than 50 levels deep"),
        (b'{"num_experts": ' + b"9" * 10_000 + b"}", "is not JSON"),
        # Tools of Windows save so. vLLM's config class says that such a file is not JSON.
        *(
            ('{"author": "\N{LATIN SMALL LETTER E WITH ACUTE}"}'.encode(encoding), words)
            for encoding, words in (
                ("utf-8-sig", r"byte order mark, which vLLM does not read\. Save it as UTF-8"),
                ("utf-16", "byte order mark"),
                ("utf-32", "byte order mark"),
                ("utf-16-be", "is not JSON"),
                ("latin-1", "is not JSON"),
            )
        ),
    ],
)
def test_invalid_config_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        find_moe_layers(read_checkpoint(file))


def test_a_wrong_kind_of_path_is_refused_with_the_expected_kind(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_moe_layers(read_checkpoint(path))
        return str(caught.value)

    empty, gguf, cache = (tmp_path / name for name in ("empty", "gguf", "cache"))
    for folder in (empty, gguf, cache / "snapshots" / "abc"):
        folder.mkdir(parents=True)
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (cache / "snapshots" / "abc" / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(23))
    give = "Give the folder that config.json and the tensors are in"
    assert said(empty).endswith(f"the folder has no config.json: it is empty. {give}")
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert said(adapter).endswith("it holds a LoRA adapter. Give the folder of the adapter's base model")
    assert said(adapter / "adapter_config.json").endswith("Give the config.json of the adapter's base model")
    assert "the folder has no config.json, but GGUF files. This plugin serves no GGUF: give the" in said(gguf)
    assert "it is a GGUF file. This plugin serves no GGUF: give the" in said(next(gguf.iterdir()))
    assert said(cache).endswith(f"the folder has no config.json. There is one in {cache}/snapshots/abc")
    assert "holds tensors. Give the folder that it is in, or its config.json" in said(tmp_path / "model.safetensors")
    assert "hf download Qwen/Qwen3-30B-A3B --include '*config.json'" in said(Path("Qwen/Qwen3-30B-A3B"))
    assert "hf download" not in said(tmp_path / "Qwen/Qwen3-30B-A3B") + said(Path("./nowhere/at/all"))
    address = Path("https://huggingface.co/Qwen/Qwen3-30B-A3B")
    assert "Give the model's name, Qwen/Qwen3-30B-A3B, where the Hub's local cache has it" in said(address)
    dense = {"model_type": "llama", "num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq"}}
    (empty / "config.json").write_text(json.dumps(dense))
    assert "it has no MoE layers (none of num_experts" in said(empty)
    assert "Only experts are decided here; of all other layers vLLM chooses the kernels itself" in said(empty)


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such file or folder\. Give a checkpoint's folder"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/x+: cannot be read: File name too long"):
        read_checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match=r"the folder has no config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="is a directory"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_checkpoint(tmp_path / "pipe")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"has {MAX_CONFIG_BYTES + 1} bytes"):
        read_checkpoint(large)


PUBLISHED = sorted(path.stem for path in CONFIGS.glob("*.json"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = [("top", name) for name in sorted({key for name in PUBLISHED for key in config(name)})] + [
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
    made = copy.deepcopy(quantized(data.draw(st.sampled_from(PUBLISHED))))
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
        ranks = Ranks(data.draw(st.sampled_from([1, 2, 3])), ep=data.draw(st.booleans()))
        found = find_moe_layers(read_checkpoint(tmp_path), ranks)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(problem, Problem) for problem in found.problems)


@pytest.mark.parametrize(("method", "hint"), [("fancy8", ""), ("mxpf8", ". Did you mean mxfp8?")])
def test_an_unknown_format_is_left_to_stock_with_a_note(method: str, hint: str, explain: Any) -> None:
    found = explain(quantized(quantization_config={"quant_method": method}))
    assert set(found.unsupported_formats.values()) == {method} and not found.problems
    assert (
        found.notes[-1]
        == f"quant_method {method!r} is unknown here: a server needs a vLLM, or a plugin, that has it{hint}"
    )


def test_a_long_name_of_a_format_is_shortened(explain: Any) -> None:
    found = explain(quantized(quantization_config={"quant_method": "x" * 5000}))
    assert all(len(note) < 400 for note in found.notes)


@pytest.mark.parametrize("count", [4, 5, 6, 20_000])
def test_notes_that_differ_in_a_name_are_counted(explain: Any, count: int) -> None:
    names = [f"a.{number}.experts" for number in range(count)]
    content = quantized(quantization_config=compressed(group(INT4), format=PACKED, ignore=names))
    notes = [each for each in explain(content).notes if "has no effect" in each]
    assert len(notes) == min(count, MAX_SIMILAR_NOTES + 1) and "'a.0.experts' has no effect" in notes[0]
    if count > MAX_SIMILAR_NOTES:
        more = "9995 or more" if count == 20_000 else "1"
        assert notes[-1].startswith(f"{more} other names: ") and "'a." not in notes[-1]


QUARK = {"quant_method": "quark", "global_quant_config": {"weight": None}}


@pytest.mark.parametrize(
    "content",
    [
        {**QUARK, "layer_quant_config": {f"q{number}": {"weight": None} for number in range(100)}},
        {**AUTO_ROUND, "extra_config": {rf"q{number}\.z": {"bits": 8} for number in range(100)}},
        {**MODELOPT, "ignore": [f"a.{number}.x" for number in range(100)]},
    ],
    ids=["quark", "auto-round", "modelopt"],
)
def test_lists_of_plain_names_count_against_the_time(
    content: dict[str, Any], explain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain(quantized(quantization_config=content))
    monkeypatch.setattr(patterns, "MAX_SECONDS", -1.0)
    with pytest.raises(CheckpointError, match="its expressions take more than"):
        explain(quantized(quantization_config=content))
