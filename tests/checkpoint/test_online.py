"""Checkpoints in 16 bits that vLLM's ``--quantization`` quantizes while they load, as `explain` reads them."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.lib import stock_code
from tests.lib.configs import CONFIGS, INT4, PACKED, compressed, config, group
from tests.lib.releases import every_release
from vllm_moe_oracle.cli.main import app
from vllm_moe_oracle.errors import CheckpointError, DeploymentError
from vllm_moe_oracle.quantization import _BY_METHOD, METHOD_ALIASES, ONLINE_SCHEMES, UNSUPPORTED_ONLINE

MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


@pytest.mark.parametrize("name", ONLINE_SCHEMES)
def test_every_layer_gets_the_requested_online_scheme(name: str, explain: Any) -> None:
    found = explain(config(), online=name)
    assert len(found.problems) == 48 and not found.unquantized and not found.unsupported_formats
    assert {problem.scheme for problem in found.problems} == {ONLINE_SCHEMES[name]}
    assert {problem.scheme.packing for problem in found.problems} == {"online"}
    assert found.method == name


@every_release
def test_a_release_has_the_schemes_that_are_read_for_it(release: str, explain: Any) -> None:
    (shorthands,) = (
        node.value
        for node in stock_code.tree(release, "vllm/config/quantization.py").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_ONLINE_SHORTHANDS"
    )
    assert isinstance(shorthands, ast.Dict)
    theirs = {key.value for key in shorthands.keys if isinstance(key, ast.Constant)}
    for name in ONLINE_SCHEMES:
        if name in theirs:
            assert explain(config(), online=name, vllm=release).problems
            continue
        rule = r"at loading from 0\.28\.0 on\. Serve it with vLLM 0\.28\.0 or newer, or say"
        with pytest.raises(DeploymentError, match=rule):
            explain(config(), online=name, vllm=release)


def test_they_are_what_the_methods_quantize_to() -> None:
    pytest.importorskip("vllm", reason="methods subclass vLLM's")
    from vllm_moe_oracle.methods.online import Mxfp8OnlineMoEMethod

    assert Mxfp8OnlineMoEMethod.scheme == ONLINE_SCHEMES["mxfp8"]


def test_the_layers_shapes_are_those_of_a_quantized_checkpoint(explain: Any) -> None:
    online = explain(config(), 4, online="mxfp8").problems[0]
    stored = explain(config(quantization_config=MXFP8), 4).problems[0]
    assert online.scheme != stored.scheme
    for field in ("num_experts", "top_k", "hidden_size", "intermediate_size", "activation", "routing", "parallel"):
        assert getattr(online, field) == getattr(stored, field)


GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 8}


@pytest.mark.parametrize(
    ("name", "quantization", "changes"),
    [
        ("modelopt", MXFP8, {}),
        ("modelopt_mxfp8", MXFP8, {}),
        ("gpt_oss_mxfp4", {"quant_method": "mxfp4"}, GPT_OSS),
        # A format may be named by its own method, as vLLM spells it.
        ("experts_int8", {"quant_method": "experts_int8"}, {}),
        ("compressed-tensors", compressed(group(INT4), format=PACKED), {}),
    ],
)
def test_names_of_what_a_checkpoint_is_change_nothing(
    name: str, quantization: dict[str, Any], changes: dict[str, Any], explain: Any
) -> None:
    data = config(quantization_config=quantization, **changes)
    assert explain(data, online=name) == explain(data)


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        (
            "mxfp4",
            {"quantization_config": MXFP8},
            "quantized already, as modelopt_mxfp8, and --quantization is 'mxfp4'",
        ),
        ("gpt_oss_mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized already, as mxfp4"),
        ("fp9", {}, "'fp9' is not supported.*valid are mxfp8, mxfp4"),
        # In a server it is an error while weights are loaded: nothing reaches the loader that quantizes.
        *(
            (name, GPT_OSS, "copies experts in 16 bits past the loader that would quantize them")
            for name in ONLINE_SCHEMES
        ),
    ],
)
def test_names_that_cannot_be_followed_are_refused(name: str, changes: dict[str, Any], rule: str, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=rule):
        explain(config(**changes), online=name)


def test_what_vllm_quantizes_to_other_formats_is_stocks(explain: Any) -> None:
    found = explain(config(), online="fp8")
    assert set(found.unsupported_formats.values()) == {"fp8"} and not found.problems
    assert found.notes[0].startswith("48 MoE layers have experts in fp8, which are left to stock vLLM, unaffected")


def test_every_online_name_of_the_installed_vllm_is_known() -> None:
    args = pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM's names")
    names = pytest.importorskip("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS
    shorthands = pytest.importorskip("vllm.config.quantization")._ONLINE_SHORTHANDS
    assert args and set(shorthands) - {*ONLINE_SCHEMES, *UNSUPPORTED_ONLINE} == set()
    aliases = {each for them in METHOD_ALIASES.values() for each in them}
    known = {*_BY_METHOD, *aliases, *METHOD_ALIASES, *UNSUPPORTED_ONLINE, *ONLINE_SCHEMES, "deepseek_v4_fp8", "inc"}
    assert set(names) - known == set(), "as vLLM spells them"


def test_without_the_option_the_experts_are_stocks_and_a_note_names_it(explain: Any) -> None:
    found = explain(config())
    assert len(found.unquantized) == 48 and not found.problems
    assert found.notes[1] == "--quantization mxfp8 or mxfp4 would quantize the experts at loading, for this plugin"


def test_a_gpt_oss_in_16_bits_is_not_offered_what_is_refused(explain: Any) -> None:
    found = explain(config(**GPT_OSS))
    assert not [note for note in found.notes if "--quantization" in note]
    assert "the plugin serves gpt-oss in MXFP4, as OpenAI publishes it" in " ".join(found.notes)


def test_explain_takes_it_and_says_why_sizes_do_not_do() -> None:
    file = str(CONFIGS / "qwen3-30b-a3b.json")
    told = CliRunner().invoke(app, ["explain", file, "--quantization", "MXFP8", "--device", "nvidia-h200"])
    assert told.exit_code == 0, told.output
    assert "mxfp8 (online, activations mxfp8)" in told.output and "hopper_mxfp8" in told.output
    # 768 / 16 = 48, which blocks of 32 do not divide.
    cut = CliRunner().invoke(app, ["explain", file, "--quantization", "mxfp8", "--device", "nvidia-h200", "--tp", "16"])
    assert cut.exit_code == 3
    assert "768 / 16 = 48 is not a multiple of the scale group 32" in " ".join(cut.output.split())


@pytest.mark.parametrize(
    ("quantization", "names"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ("gptq", "gptq_marlin", "auto_gptq")),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, ("awq", "awq_marlin", "auto_awq")),
    ],
)
def test_vllms_other_names_for_a_checkpoint_are_taken(
    quantization: dict[str, Any], names: tuple[str, ...], explain: Any
) -> None:
    data = config(quantization_config=quantization)
    for name in names:
        found = explain(data, online=name)
        assert found.problems == explain(data).problems and found.method == name
        stored = explain(config(quantization_config={**quantization, "quant_method": name}))
        assert dataclasses.replace(stored, notes=()) == dataclasses.replace(found, notes=())
    in_bytes = explain(data, online="moe_wna16")
    assert {problem.scheme.packing for problem in in_bytes.problems} == {"moe_wna16"}
    assert {problem.scheme.zero_points for problem in in_bytes.problems} == {quantization["quant_method"] == "awq"}
    with pytest.raises(CheckpointError, match=r"or say .*moe_wna16"):
        explain(data, online="mxfp8")
