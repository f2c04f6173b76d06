"""The command line tool as its users meet it: answers, exit statuses, one-line errors, JSON for other tools."""

from __future__ import annotations

import io
import json
import logging
import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib import distributions, forked
from tests.lib.cli import CONFIGS, Run, Write
from tests.lib.configs import CT_INPUTS, CT_MXFP8, MODELOPT, compressed, group, quantized
from tests.lib.fresh_process import TOOL, environment, python
from tests.lib.samples import measured_card
from tests.lib.tiers import sampled
from vllm_moe_oracle import __version__, methods
from vllm_moe_oracle.checkpoint import served_layers
from vllm_moe_oracle.cli import commands
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP, default_registry
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES, TESTED_RELEASES


def measured_h200(folder: Path) -> Path:
    """The file of an H200 for which the shipped profile is valid, whatever vLLM release is the newest."""
    path = folder / "h200.json"
    path.write_bytes(msgspec.json.encode(measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")))
    return path


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_answers_for_a_machine_that_is_elsewhere(run: Run, write: Write) -> None:
    result = run("explain", write(), "--device", "nvidia-h200")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"NVIDIA H200 (sm_90), vLLM {NEWEST} with its kernel packages (assumed), one rank"
    for name in ("h200", "NVIDIA H200"):
        assert run("explain", write(), "--device", name).out == result.out
    assert lines[2] == "48 layers: model.layers.0-47.mlp.experts"
    for word in ("layer", "backend", "why", "numerics", "sizes"):
        assert any(line.startswith(f"  {word} ") for line in lines), word
    assert re.search(r"^  emulation +accepted +by name only: computes in float32", result.out, re.MULTILINE)


def test_a_gpu_without_measurements_is_told_how_to_take_them(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(tmp_path))

    def why(*arguments: object, command: bool = False) -> str:
        (group,) = run("explain", write(), *arguments, "--json").json["groups"]
        assert (group["measure"] is not None) is command
        return str(group["decision"]["explanation"])

    assert why("--device", "cpu") == "no other kernel here computes the same numbers"  # no GPU's times are news
    hint = "no measurements of this layer are valid here"
    here = why("--device", "nvidia-a100", command=True)
    assert here.endswith(hint) and "compute capability" not in here
    assert "the shipped profile are of NVIDIA H100 80GB HBM3 and NVIDIA H200, not of NVIDIA A100" in here
    assert "predicted for sm_90 only" in here
    h200 = measured_h200(tmp_path)
    assert hint not in why("--device", h200) + why("--device", "cpu")
    for others in (("--device", "nvidia-h800"), ("--device", h200, "--tp", 4, "--ep")):
        assert "takes about" in why(*others)


def test_a_misspelled_quantization_is_told_what_was_meant(run: Run, write: Write) -> None:
    asked = ("--device", "cpu", "--quantization", "mxpf8")
    assert "or say modelopt_mxfp8 or modelopt" in run("explain", write(), *asked).err
    assert "Did you mean mxfp8?" in run("explain", CONFIGS / "qwen3-30b-a3b.json", *asked).err


def test_tables_without_a_terminal_are_plain_and_fit_80_columns(run: Run, write: Write) -> None:
    result = run("explain", write(dtype="float16"), "--device", "cpu", "--set", "disable=emulation")
    assert "\x1b" not in result.out
    assert all(len(line) <= 80 and line == line.rstrip() for line in result.out.splitlines())
    # Wrapped, not cut: all words of a reason are there.
    assert "disabled by --set disable (take it out of MOE_ORACLE_DISABLE)" in result.text


def test_json_has_the_documented_fields_and_stands_alone(run: Run, write: Write) -> None:
    result = run("explain", write(), "--device", "nvidia-h200", "--tp", 2, "--json", "--set", "use_measurements=0")
    assert (result.status, result.err) == (0, "")
    data = result.json
    assert list(data) == ["vllm", "device", "groups", "left_to_stock", "notes"]
    assert (data["left_to_stock"], data["notes"]) == ([], [])
    assert data["vllm"] == NEWEST
    assert msgspec.convert(data["device"], Device) == known_device("nvidia-h200")
    (group,) = data["groups"]
    assert list(group) == [
        "layers", "count", "is_mtp", "problem", "decision", "failure", "left_to_stock", "stock_vllm",
        "gain_over_stock", "time_errors", "measure", "candidates",
    ]  # fmt: skip
    assert group["failure"] is group["left_to_stock"] is group["measure"] is None
    stock = {"stock_class": "HummingIndexedExperts", "backend": "humming_mxfp8", "refusal": ""}
    assert group["stock_vllm"] == stock
    # Of what stock runs itself, as it was timed beside its own kernel; under the one Triton that has this shard.
    gain = group["gain_over_stock"]
    assert (gain["kind"], gain["stock"]) == ("measured", "stock vLLM's HummingIndexedExperts")
    assert gain["source"].endswith("Triton 3.8)")
    assert group["time_errors"] == {}
    assert (group["layers"], group["count"]) == ("model.layers.0-47.mlp.experts", 48)
    problem = msgspec.convert(group["problem"], Problem)
    assert (problem.intermediate_size, problem.parallel.tp, problem.layer) == (384, 2, "model.layers.0.mlp.experts")
    fields = ["backend", "why", "explanation", "numerics", "plan", "comparison", "token_ranges"]
    assert list(group["decision"]) == fields
    assert group["decision"]["why"] == "static"
    assert (group["decision"]["comparison"], group["decision"]["token_ranges"]) == (None, [])
    assert isinstance(group["decision"]["numerics"], str)
    assert msgspec.convert(group["decision"]["plan"], ShardPlan).hidden_size == 2048
    names = [candidate["backend"] for candidate in group["candidates"]]
    assert "emulation" in names and group["decision"]["backend"] == names[0]
    for candidate in group["candidates"]:
        assert list(candidate) == ["backend", "accepted", "reasons"]
        assert candidate["accepted"] is (candidate["reasons"] == [])
        assert all(list(reason) == ["code", "detail", "remedy"] for reason in candidate["reasons"])


def test_a_group_without_a_backend_ends_with_3_and_still_prints_the_table(run: Run, write: Write) -> None:
    # 2880 / 60 = 48 is not a multiple of the 32 elements that share a scale.
    arguments = ("explain", write("gpt-oss-20b", num_attention_heads=60), "--device", "nvidia-h200", "--tp", 60)
    result = run(*arguments)
    assert result.status == 3
    text = result.text
    assert "backend none" in text and "no backend can run mxfp8 experts here" in text
    assert "2880 / 60 = 48 is not a multiple of the scale group 32 (48 mod 32 = 16)" in text
    assert "(TP 30 would work)" in text
    result = run(*arguments, "--json")
    assert result.status == 3
    (group,) = result.json["groups"]
    assert group["decision"] is None
    codes = {reason["code"] for candidate in group["candidates"] for reason in candidate["reasons"]}
    assert "group.intermediate" in codes
    assert result.err.startswith("error: model.layers.0-23.mlp.experts: no backend can run mxfp8 experts here")
    assert result.err.count("\n") == 2  # the second says that the config names no dtype


def test_every_checkpoint_that_is_served_gets_no_note_that_it_is_not(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "does not serve mxfp8 in vLLM's modelopt_mxfp8 checkpoints"
    assert said not in run("explain", write(), "--device", "cpu").text
    monkeypatch.setattr(methods, "served_schemes", dict)
    assert said in run("explain", write(), "--device", "cpu").text


def test_the_served_names_are_the_registered_ones_and_the_pages() -> None:
    from vllm_moe_oracle.methods import configs, served_schemes

    # Through methods alone: vLLM keeps its own config class.
    served = served_schemes()
    assert set(served) == {*configs(), "deepseek_v4_fp8", "inc", "quark"}
    page = Path(__file__).parents[2] / "vllm_moe_oracle" / "quantization" / "README.md"
    text = page.read_text(encoding="utf-8")
    assert [name for name in served if f"`{name}`" not in text] == []
    assert served["compressed-tensors"] == ("mxfp4", "mxfp8", "wna16")


def test_a_release_that_is_not_supported_is_noted(run: Run, write: Write, tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    file.write_text('{"kind": "cpu", "name": "there", "packages": {"vllm": "0.40.0"}}')
    result = run("explain", write(), "--device", file)
    assert "the plugin would stand down" in result.text
    assert "the plugin would stand down" not in run("explain", write(), "--device", file, "--set", "force=1").out


@pytest.mark.parametrize(("plugins", "selected"), [("", False), ("other", False), ("other,moe_oracle", True)])
def test_what_vllm_selects_is_said(
    plugins: str, selected: bool, run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    said = f"not selected by VLLM_PLUGINS={plugins!r} (add moe_oracle to it, or unset it)"
    assert (said in run("explain", write(), "--device", "cpu").text) is not selected
    if not selected:
        assert run("status", "--json").json["plugin"] | {"vllm": None} == {
            "active": False, "reason": said, "vllm": None, "methods": [], "patches": [], "deferred": [], "failed": {}
        }  # fmt: skip


@pytest.mark.parametrize("word", ["Marlin", "MARLIN", "marlin"])
def test_moe_backend_is_read_as_vllm_reads_it(word: str, run: Run, write: Write) -> None:
    result = run("explain", write(), "--device", "nvidia-h200", "--moe-backend", word, "--json")
    assert result.json["groups"][0]["decision"]["backend"] == "marlin_mxfp8"
    result = run("explain", write(), "--device", "nvidia-b200", "--moe-backend", "flashinfer-trtllm", "--json")
    assert result.json["groups"][0]["decision"]["backend"].startswith("trtllm_mxfp8")


def test_a_refusal_has_a_reason_in_short_answers(run: Run, write: Write) -> None:
    """Where backends refuse for different reasons, that of one."""
    found = run("explain", write(hidden_act="no_such_activation"), "--device", "nvidia-h200", "--brief")
    assert found.status == 3 and re.search(
        r"for example \w+: takes gated [\w, ]+ the layer has no_such_activation", found.text
    )


def test_moe_backends_of_other_layers_are_known(run: Run, write: Write) -> None:
    """vLLM takes them for layers that the plugin leaves alone; for its own they are refused, with those that exist."""
    for device in ("nvidia-h200", "cpu"):
        left = run("explain", CONFIGS / "deepseek-v3.json", "--device", device, "--moe-backend", "cutlass")
        assert left.status == 0 and "stock vLLM" in left.text
    refused = run("explain", write(), "--device", "nvidia-h200", "--moe-backend", "cutlass")
    assert refused.status == 3 and "is not a backend for mxfp8 experts. Valid are auto, " in refused.text


def test_the_remedy_of_a_refusal_is_kept(run: Run, write: Write) -> None:
    arguments = ("explain", write(), "--device", "cpu", "--set", "backend=marlin_mxfp8")
    remedy = "Choose an accepted one (cpu_dequantized, emulation), or auto, or set MOE_ORACLE_ON_UNAVAILABLE=fallback"
    assert remedy in run(*arguments).text
    assert remedy in run(*arguments, "--json").err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "hopper_mxfp4",
            "hopper_mxfp4 (--backend) is not a backend for mxfp8 experts but for mxfp4 experts. "
            "Did you mean hopper_mxfp8? Valid are auto,",
        ),
        ("trtllm_mxfp8", "needs compute capability sm_100 to below sm_110; NVIDIA H200 has sm_90. Choose an accepted"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_reason_and_remedy(
    name: str, said: str, run: Run, write: Write
) -> None:
    result = run("explain", write(), "--device", "nvidia-h200", "--backend", name)
    text = result.text
    assert result.status == 3 and said in text
    accepted = re.findall(r"^  (\w+) +accepted", result.out, re.MULTILINE)
    assert f"Choose an accepted one ({', '.join(accepted)}), or auto, or set MOE_ORACLE_ON_UNAVAILABLE=fallback" in text
    assert "humming_mxfp8" in accepted and "trtllm_mxfp8" not in accepted
    assert ("Did you mean" in text) == (name != "trtllm_mxfp8")


def test_the_option_backend_is_the_setting(run: Run, write: Write) -> None:
    path = write()
    result = run("explain", path, "--device", "nvidia-h200", "--backend", "marlin_mxfp8", "--json")
    assert result.json["groups"][0]["decision"]["backend"] == "marlin_mxfp8"
    # To vLLM's option only vLLM's names are known, and those are what would do instead.
    result = run("explain", path, "--device", "nvidia-h200", "--moe-backend", "marlim")
    assert result.status == 2 and "Did you mean marlin? Valid are " in result.err
    assert "hopper" not in result.err
    result = run("explain", path, "--device", "nvidia-h200", "--moe-backend", "hopper_mxfp8")
    text = result.text
    assert result.status == 3 and "this project's own names go into MOE_ORACLE_BACKEND" in text
    assert "Choose an accepted one (humming, marlin, emulation), or auto" in text
    result = run("explain", path, "--device", "nvidia-h200", "--set", "disable=hopper_mxpf8")
    assert result.status == 2 and "Did you mean hopper_mxfp8? Valid are" in result.err
    # A suggestion is for the format of the checkpoint's layers.
    assert "Did you mean hopper_mxfp8?" in run("explain", path, "--device", "nvidia-h200", "--backend", "hopper").err
    result = run("explain", path, "--device", "nvidia-h200", "--set", "disable=humming,emulation")
    assert (
        "humming_mxfp8 rejected disabled by --set disable, as every backend of humming (take humming out" in result.text
    )


def test_a_fallback_is_seen_in_json_and_on_standard_error(run: Run, write: Write) -> None:
    arguments = ("--set", "backend=marlin_mxfp8", "--set", "on_unavailable=fallback", "--json")
    result = run("explain", write(), "--device", "cpu", *arguments)
    assert "not what was asked for: marlin_mxfp8" in result.json["groups"][0]["decision"]["explanation"]
    assert result.err.startswith("note: ") and "not what was asked for" in result.err


def test_a_broken_backend_of_a_third_party_is_noted(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_registry().load_errors, "theirs", "ImportError: no")
    result = run("explain", write(), "--device", "cpu")
    assert "backend of the entry point theirs could not be loaded: ImportError: no" in result.text


def test_an_override_gives_its_layers_a_group_of_their_own(run: Run, write: Write) -> None:
    override = r"overrides=re:layers\.[0-9]\.=emulation"
    result = run("explain", write(), "--device", "cpu", "--set", override, "--json")
    groups = result.json["groups"]
    assert [(group["layers"], group["decision"]["why"]) for group in groups] == [
        ("model.layers.0-9.mlp.experts", "override"),
        ("model.layers.10-47.mlp.experts", "static"),
    ]


def test_equal_layers_are_decided_once(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those with an override of their own: a model has a hundred layers, and a decision takes a millisecond."""
    decided: list[str] = []

    def decide(problem: Problem, *args: Any, original: Any = served_layers.decide, **more: Any) -> Any:
        decided.append(problem.layer)
        return original(problem, *args, **more)

    monkeypatch.setattr(served_layers, "decide", decide)
    override = ("--set", r"overrides=re:layers\.[45]\.=emulation")
    for words, expected in (((), [0]), (override, [0, 4])):
        decided.clear()
        assert run("explain", write(), "--device", "cpu", *words).status == 0
        assert decided == [f"model.layers.{index}.mlp.experts" for index in expected]


def test_layers_that_are_left_out_are_counted(run: Run, write: Write) -> None:
    path = write(quantization_config=MODELOPT | {"ignore": ["model.layers.0*", "model.layers.47*"]})
    left = "which are left to stock vLLM, unaffected by this plugin: model.layers.0,47.mlp.experts"
    note = f"2 MoE layers have unquantized experts, {left}"
    result = run("explain", path, "--device", "cpu")
    assert result.status == 0 and f"note: {note}" in result.text
    result = run("explain", path, "--device", "cpu", "--json")
    assert result.json["groups"][0]["count"] == 46 and result.err == f"note: {note}\n"
    assert result.json["notes"] == [note]
    assert result.json["left_to_stock"] == [{"format": None, "layers": "model.layers.0,47.mlp.experts", "count": 2}]


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "humming"}, "humming"),
        ({"quant_method": "fancy8"}, "fancy8"),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 128}, "auto-round int of 2 bits"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "act_bits": 8},
            "auto-round int of 4 bits with inputs of 8 bits",
        ),
        (None, None),
    ],
    ids=str,
)
def test_what_this_package_does_not_serve_is_no_failure(
    config: dict[str, Any] | None, format: str | None, run: Run, write: Write
) -> None:
    path = write(quantization_config=config)
    result = run("explain", path, "--device", "nvidia-h200")
    said = f"experts{f' in {format}' if format else ''}, which are left to stock vLLM, unaffected by this plugin"
    assert (result.status, result.err) == (0, "") and said in result.text
    data = run("explain", path, "--device", "nvidia-h200", "--json").json
    layers = "model.layers.0-47.mlp.experts"
    assert data["groups"] == [] and data["left_to_stock"] == [{"format": format, "layers": layers, "count": 48}]
    for measuring in ("tune", "bench"):
        result = run(measuring, path)
        assert result.status == 2 and "there is nothing to measure: 48 MoE layers have" in result.err


def test_a_named_device_has_no_torch_of_its_own(run: Run, write: Write, tmp_path: Path) -> None:
    """What vLLM's release requires is no fact about the machine; a file of a real one has a driver."""
    named = run("explain", write(), "--device", "nvidia-h200", "--json").json
    real = {**named["device"], "driver": "580.1", "packages": {**named["device"]["packages"], "torch": "9.9"}}
    (tmp_path / "real.json").write_text(json.dumps(real))
    there = run("explain", write(), "--device", tmp_path / "real.json", "--json").json
    said = [each["groups"][0]["decision"]["explanation"] for each in (named, there)]
    assert "torch" not in said[0] and "not 9.9" in said[1]


def test_a_permission_that_changes_nothing_is_said(run: Run, write: Write) -> None:
    def why(*more: str) -> str:
        decided = run("explain", write(), "--device", "nvidia-h200", "--set", *more, "--json").json["groups"][0]
        return str(decided["decision"]["explanation"])

    said = "QUANTIZATION=1 changes nothing here: hopper_mxfp8_w8a8_token must be chosen by name"
    assert said in why("allow_activation_quantization=1")
    assert "changes nothing" not in why("use_measurements=1")
    assert "changes nothing" not in why("allow_activation_quantization=1", "--backend", "hopper_mxfp8_w8a8_token")


def test_a_model_of_the_local_hub_cache_is_read(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    missing = run("explain", "some/model", "--device", "cpu")
    assert missing.status == 2 and "hf download some/model --include" in missing.err
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    write().rename(snapshot / "config.json")
    (snapshot.parents[1] / "refs").mkdir()
    main = snapshot.parents[1] / "refs" / "main"
    for revision, status in (("abc123", 0), ("../snapshots/abc123", 2), ("def", 2), ("", 2)):
        main.write_text(revision)
        result = run("explain", "some/model", "--device", "cpu", "--json")
        assert result.status == status, result.err
    main.write_text("abc123")
    result = run("explain", "some/model", "--device", "cpu", "--json")
    (note,) = result.json["notes"]
    assert note == f"some/model is read from the local cache of the Hugging Face Hub: {snapshot / 'config.json'}"


def test_a_checkpoint_whose_experts_are_all_left_out_needs_no_backend(run: Run, write: Write) -> None:
    path = write(quantization_config=MODELOPT | {"ignore": ["*.experts"]})
    result = run("explain", path, "--device", "cpu")
    assert result.status == 0 and "48 MoE layers have unquantized experts" in result.out


def test_what_the_plugin_would_not_do_is_said(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_ENABLED", "0")
    result = run("explain", write(), "--device", "cpu")
    assert "the plugin is switched off by environment variable MOE_ORACLE_ENABLED" in result.text
    assert "gain over stock none: the plugin is switched off, see the note" in result.text


def test_activations_left_in_16_bits_change_the_problem(run: Run, write: Write) -> None:
    result = run("explain", write(), "--device", "cpu", "--set", "activations=16bit", "--json")
    assert result.json["groups"][0]["problem"]["scheme"]["activations"] == "16bit"
    said = "activations are 16bit by --set activations, the checkpoint declares mxfp8"
    assert said in result.messages
    assert "activations are" not in run("explain", write(), "--device", "cpu", "--json").err


@pytest.mark.parametrize("release", ["", "0.32.0"])
def test_a_file_that_names_a_gpu_gets_the_answer_for_its_name(
    release: str, run: Run, write: Write, tmp_path: Path
) -> None:
    """Also beside an installed vLLM of another release, which is no part of that machine."""
    file, config = tmp_path / "there.json", write()
    file.write_text('{"kind": "cuda", "name": "NVIDIA H200"}')
    asked = ("--vllm", release) if release else ()
    assert (
        run("explain", config, "--device", file, *asked).out == run("explain", config, "--device", "h200", *asked).out
    )
    file.write_text('{"kind": "cuda", "name": "Foo", "capability": 90}')
    found = run("explain", config, "--device", file, *asked)
    assert (
        "not installed" not in found.text
        and f"vLLM {release or NEWEST} with its kernel packages (assumed)" in found.out
    )
    file.write_text('{"kind": "cuda", "name": "NVIDIA H200", "packages": {"torch": "2.13.0"}}')
    found = run("explain", config, "--device", file)
    assert "vLLM not installed" in found.out and "(assumed)" not in found.out


@pytest.mark.parametrize(
    ("release", "nearest"), [("0.27.0", "0.27.1"), ("0.25", "0.25.1"), (NEWEST, ""), (NEWEST.removesuffix(".0"), "")]
)
def test_an_untested_release_is_said_to_be_so(release: str, nearest: str, run: Run, write: Write) -> None:
    asked = ("explain", write(), "--device", "h200", "--vllm", release)
    notes = [each for each in run(*asked, "--json").json["notes"] if "not tested itself" in each]
    assert len(notes) == bool(nearest) and all(f"nearest tested release is {nearest}" in each for each in notes)
    assert run(*asked).text.count("not tested itself") == len(notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("CONFIG", "--device", "nvidia-h30"),
            "--device: unknown device 'nvidia-h30'. Valid are cpu, nvidia-a10, nvidia-a100,",
        ),
        (("nowhere",), "nowhere: no such file or folder. Give a checkpoint's folder or its config.json"),
        (("",), "CHECKPOINT: the path is empty. Give a checkpoint's folder"),
        (("CONFIG", "--tp", "0"), "--tp: 0 ranks are not possible"),
        (("CONFIG", "--device", "h2000"), "'h2000'. Did you mean nvidia-h200? Valid are "),
        (("CONFIG", "--device", "missing.json"), "missing.json: cannot be read: No such file"),
        (("CONFIG", "--set", "backend"), "--set: 'backend' has no =. Write --set backend=emulation"),
        (("CONFIG", "--set", "bakend=emulation"), "--set: unknown setting 'bakend'. Did you mean backend?"),
        (("CONFIG", "--set", "enabled=perhaps"), "'perhaps' is not a boolean"),
        (("CONFIG", "--set", "backend=a", "--backend", "b"), "--backend: --set backend is given, too. Leave one"),
        (("CONFIG", "--set", r"overrides=re:rs\.99\.=emulation"), r"re:rs\.99\. matches no layer: the model has 48"),
        (("CONFIG", "--set", "overrides=re:rs=marlin;re:rs\\.1\\.=emulation"), "decides no layer: all that it"),
        (("CONFIG", "--set", "overrides=re:(.|..)+(?<=z)$=emulation"), "takes more than 0.1 s to"),
        (("CONFIG", "--set", "overrides=re:(=emulation"), "is not a regular expression"),
        (("CONFIG", "--set", "disable=nothing"), "'nothing'"),
        (("CONFIG", "--moe-backend", "marlni"), "--moe-backend: 'marlni' is not a backend. Did you mean marlin?"),
        (("CONFIG", "--set", "overrides=re:layers=nobackend"), "--set overrides: 'nobackend' is not a backend. Valid"),
        (("a" * 5000,), "cannot be read"),
        *(
            (
                ("CONFIG", "--device", "nvidia-h200", "--backend", name),
                f"error: --backend: {name!r} is not a backend. Did you mean {meant}? Valid are auto, ",
            )
            for name, meant in (
                ("hopper_mxpf8", "hopper_mxfp8"), ("hopper_mxpf4", "hopper_mxfp4"), ("hopper-mxfp8", "hopper_mxfp8"),
                ("EMULATION", "emulation"),
            )
        ),
    ],
)  # fmt: skip
def test_unusable_input_ends_with_2_and_one_line(
    arguments: tuple[str, ...], message: str, run: Run, write: Write
) -> None:
    path = write()
    given = [str(path) if word == "CONFIG" else word for word in arguments]
    if "--device" not in given:
        given += ["--device", "cpu"]
    for more in ([], ["--json"]):
        result = run("explain", *given, *more)
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("error: ") and result.err.count("\n") == 1
        assert message in result.err


@pytest.mark.parametrize("word", ["\ud800", "\x1b[31msilu", "si lu", ""])
def test_an_invalid_activation_name_is_refused_in_ascii(word: str, run: Run, write: Write) -> None:
    result = run("explain", write(hidden_act=word), "--device", "cpu")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and result.err.isascii()
    assert "\x1b" not in result.err


def test_a_dense_model_is_unaffected(run: Run, write: Write) -> None:
    dense = {
        "num_experts": None,
        "num_experts_per_tok": None,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
    }
    for changes, why in (
        ({"num_experts": 0}, "num_experts is 0"),
        (dense, "none of num_experts, "),
        ({**dense, "num_hidden_layers": None, "n_layer": 12}, "none of num_experts, "),
        ({**dense, "block_configs": [{"ffn": {"ffn_mult": 2.6}}]}, "none of num_experts, "),
    ):
        path = write(**changes)
        result = run("explain", path, "--device", "nvidia-h200")
        assert (result.status, result.err) == (0, "")
        said = f"the model is left to stock vLLM, unaffected by this plugin: it has no MoE layers ({why}"
        assert said in result.text
        data = run("explain", path, "--device", "nvidia-h200", "--json").json
        assert data["groups"] == data["left_to_stock"] == [] and data["notes"][0].startswith(said)
        assert run("tune", path).status == 2  # there is nothing to measure


OTHER = {"model_type": "other_moe"}
"""A model type whose defaults nobody knows."""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"block_configs": [{}]},
            "block_configs gives every layer a shape of its own, which this release does not read",
        ),
        (
            OTHER | {"num_experts": None, "ffn_config": {"moe_num_experts": 16}},
            "ffn_config.moe_num_experts describes its experts",
        ),
        (OTHER | {"num_experts": None, "parts": [{"n_routed_experts": 9}]}, "parts.0.n_routed_experts describes its"),
        (OTHER | {"num_experts": None}, "'other_moe' is a name of models with experts, and none of num_experts, "),
    ],
    ids=str,
)
def test_experts_that_are_not_read_are_unaffected_but_in_a_served_format(
    changes: dict[str, Any], why: str, run: Run, write: Write
) -> None:
    for config, stored in ((None, "not quantized"), ({"quant_method": "fp8"}, "in fp8")):
        result = run("explain", write(**changes, quantization_config=config), "--device", "nvidia-h200")
        text = result.text
        assert (result.status, result.err) == (0, "") and f"; the experts are {stored}. " in text
        assert f"the model is left to stock vLLM, unaffected by this plugin: {why}" in text
    for config, online in ((MODELOPT, ()), (None, ("--quantization", "mxfp8"))):
        result = run("explain", write(**changes, quantization_config=config), "--device", "nvidia-h200", *online)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and why in result.err
        assert "the experts are in mxfp8" in result.err and "its log says what runs them" in result.err


def test_gguf_is_unaffected(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    for path in (tmp_path, tmp_path / "model.gguf"):
        result = run("explain", path, "--device", "nvidia-h200")
        assert (result.status, result.err) == (0, "")
        assert "note: the model is left to stock vLLM, unaffected by this plugin: " in result.out
        assert "This plugin serves no GGUF" in result.text
        assert run("verify", path).status == 2


def test_the_gain_over_stock_is_shown_where_it_is_known(
    run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(tmp_path))

    def gain(*arguments: object) -> tuple[str, Any]:
        (group,) = run("explain", write(), *arguments, "--json").json["groups"]
        text = run("explain", write(), *arguments, "--brief").text
        return text.partition(" gain over stock ")[2].partition(" numerics ")[0], group["gain_over_stock"]

    # By times that this package ships, apart from the code that reads them.
    shipped = json.loads((profile.SHIPPED_FOLDER / "stock_nvidia_h200.json").read_text())
    file = measured_h200(tmp_path)
    measured = {"experts": 128, "hidden": 2048, "inner": 768, "scheme": "mxfp8", "dtype": "bfloat16"}
    (entry,) = (
        each for each in shipped["entries"] if measured.items() <= each["kernel_shape"].items()
    )  # fmt: skip
    chosen, stock = (entry["backends"][name]["times"]["uniform"] for name in ("hopper_mxfp8", "stock:auto"))
    text, found = gain("--device", file)
    assert (found["kind"], found["error"]) == ("measured", None)
    assert found["fastest"] == [1, pytest.approx(stock["1"][0] / chosen["1"][0])]
    assert found["slowest"][1] < found["speedup"] < found["fastest"][1]
    assert text.startswith(f"measured: {found['speedup']:.2f} times as fast as stock vLLM's HummingIndexedExperts")
    assert "as fast as stock vLLM's HummingIndexedExperts for the objective balanced (" in text
    assert f"({found['slowest'][1]:.2f} at {found['slowest'][0]} to {found['fastest'][1]:.2f} at 1 tokens)" in text
    alone, single = gain("--device", file, "--set", "objective=1:1")
    assert single["slowest"] == single["fastest"] == found["fastest"]
    assert "for the objective 1:1, by shipped times of one run of both (NVIDIA H200" in alone
    text, found = gain("--device", "nvidia-h800")
    assert found["kind"] == "predicted" and 0 < found["error"] < 0.3
    assert re.match(r"predicted: 1\.\d\d ±0\.\d\d times as fast as humming_mxfp8, stock vLLM's kernel,", text)
    # An older vLLM takes Marlin where the newest takes Humming.
    before = min_versions.release_before(min_versions.HUMMING_FIRST)
    text, older = gain("--device", "nvidia-h200", "--vllm", before)
    assert older["speedup"] > found["speedup"] and 0 < older["error"] < 0.3
    assert "as fast as marlin_mxfp8, stock vLLM's kernel," in text
    unknown = run("explain", write(), "--device", "nvidia-h200", "--vllm", "0.23.0", "--brief").text
    assert "not known for vLLM 0.23.0" in unknown and "; the gain takes it for marlin_mxfp8" in unknown
    assert "as fast as marlin_mxfp8, which stock vLLM is taken to run, for" in " ".join(unknown.split())
    assert gain("--device", "nvidia-a100") == ("none: this is stock vLLM's own kernel", None)
    # Neither measured nor predicted: a figure of other layers is not this one's.
    text, found = gain("--device", "nvidia-a100", "--backend", "emulation")
    assert text.startswith("unknown: ") and found is None
    assert gain("--device", "cpu") == ("none: stock vLLM cannot run it", None)
    (lora,) = run("explain", write(), "--device", file, "--lora", "--json").json["groups"]
    assert lora["decision"] is not None and lora["gain_over_stock"] is None
    assert gain("--device", file, "--ep", "--tp", "2", "--eplb") == ("none: stock vLLM cannot run it", None)
    # Of the numbers of tokens that the objective weighs.
    _, found = gain("--device", file, "--set", "objective=4:1,64:2")
    assert {found["slowest"][0], found["fastest"][0]} <= {4, 8, 16, 32, 64}


def test_stocks_times_are_of_the_kernel_that_stock_runs_for_the_packing(run: Run, write: Write) -> None:
    """Marlin for these packings of MXFP4; Humming for another of the same shape, which is what was timed."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    packed = {"format": "mxfp4-pack-quantized"}
    path = write(quantization_config=compressed(group(weights) | packed, **packed))
    (found,) = run("explain", path, "--device", "nvidia-h200", "--json").json["groups"]
    gain, decision = found["gain_over_stock"], found["decision"]
    assert gain["stock"].startswith("marlin_mxfp4") and decision["backend"] == "hopper_mxfp4"
    assert gain["speedup"] == pytest.approx(1 / (1 - decision["comparison"]["time_saved"]))


def test_predicted_times_have_their_error(run: Run, write: Write, tmp_path: Path) -> None:
    asked = ("explain", write(), "--device", "nvidia-h800", "--set", f"cache={tmp_path}")
    text = run(*asked).out
    assert re.search(r"^  hopper_mxfp8 +chosen +1: \d+ ±\d+,", text, re.MULTILINE)
    (group,) = run(*asked, "--json").json["groups"]
    # A single time is less certain than the mean that decides.
    means = group["decision"]["comparison"]["errors"]
    assert means and set(group["time_errors"]) == set(means)
    assert all(means[name] < error < 0.5 for name, error in group["time_errors"].items())
    assert "±" not in run("explain", write(), "--device", measured_h200(tmp_path)).out.partition("candidate")[2]


def test_backends_for_other_devices_are_one_line(run: Run, write: Write) -> None:
    said = "rejected   for other kinds of devices; --verbose names them"
    folded = run("explain", write(), "--device", "cpu").out
    count = int(re.findall(rf"^  (\d+) backends +{said}$", folded, re.MULTILINE)[0])
    every = run("explain", write(), "--device", "cpu", "--verbose").out
    assert "other kinds" not in every and every.count(" rejected ") == folded.count(" rejected ") - 1 + count
    assert "marlin_mxfp8" in every and "marlin_mxfp8" not in folded
    # What another generation of the same kind would run is no noise.
    assert "trtllm_mxfp8 " in run("explain", write(), "--device", "nvidia-h200").out


def test_layers_that_a_server_leaves_to_stock_are_no_failure(run: Run, write: Write) -> None:
    # On a CPU stock vLLM is asked about padded experts, and of integers only a server can say.
    integers = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    path = write(model_type="kimi_linear", moe_intermediate_size=3072, quantization_config=integers)
    padded = ("explain", path, "--device", "cpu", "--tp", 16)
    result = run(*padded, "--json")
    assert result.status == 0 and result.json["groups"][0]["left_to_stock"] == "stock vLLM's own choice"
    said = (
        "note: model.layers.0-47.block_sparse_moe.experts: left to stock vLLM, if stock vLLM can run experts that the"
    )
    assert result.err.startswith(said)
    # A server does not replace what the user names, and leaves nothing else to stock vLLM on a CPU.
    for named in (("--backend", "cpu_dequantized"), ("--set", "disable=emulation")):
        assert run(*padded, *named).status == 3
    assert run("explain", write(), "--device", "cpu", "--set", "disable=emulation,cpu_dequantized").status == 3
    batched = ("--ep", "--dp", 2, "--all2all-backend", "deepep_low_latency")
    assert run("explain", CONFIGS / "gpt-oss-20b.json", "--device", "nvidia-a100", *batched).status == 0


@pytest.mark.parametrize("kind", ["rocm", "xpu"])
def test_where_the_plugin_stands_down_is_said_once(kind: str, run: Run, write: Write, tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    file.write_text(json.dumps({"kind": kind, "name": "Some GPU"}))
    found = run("explain", write(), "--device", file)
    said = found.text
    assert found.status == 0 and re.search(r"backend +stock vLLM's why +left to stock vLLM: no backend knows", said)
    assert said.count("no backend knows Some GPU's own kernels") == 1


def test_files_that_a_server_could_not_write_are_noted(run: Run, write: Write) -> None:
    said = run("explain", write(), "--device", "l40s", "--set", "report=/nope/x").text
    assert "--set report: /nope/x cannot be written: there is no directory /nope; a server warns, and starts" in said
    measures = "at its first start a server measures for up to 60 s"
    assert measures in said
    for cache, reason in (("/proc/x", "nothing can be written in /proc"), ("~nobody-here/x", "is not a directory")):
        kept = run("explain", write(), "--device", "l40s", "--set", f"cache={cache}")
        assert kept.status == 0 and measures not in kept.text
        assert re.search(f"not measure at its start, since the cache cannot be written: .*{reason}", kept.text)


@pytest.mark.parametrize("options", [("--tp", 2), ("--dp", 2), ("--tp", 2, "--ep")], ids=str)
def test_a_start_that_measures_nothing_is_not_promised_to_measure(
    options: tuple[Any, ...], run: Run, write: Write
) -> None:
    here = ("explain", write(), "--device", "l40s")
    for seconds, measures in ((570, True), (571, False)):
        text = f"measures for up to {seconds} s"
        said = run(*here, *options, "--set", f"measure_at_start={seconds}").text
        assert (text in said) == measures
        needed = "do not fit into the 600 s that ranks wait; set MOE_ORACLE_RANK_SYNC_TIMEOUT to 601 or more"
        assert (needed in said) != measures
        assert text in run(*here, "--set", f"measure_at_start={seconds}").text  # one rank waits for none


@pytest.mark.parametrize(("activation", "noted"), [(..., False), (None, True), ("silu", False)])
def test_an_activation_that_is_null_is_noted(activation: Any, noted: bool, run: Run, tmp_path: Path) -> None:
    config = quantized(hidden_act=None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config if activation is ... else config | {"hidden_act": activation}))
    result = run("explain", path, "--device", "h200")
    assert result.status == 0 and ("the config's hidden_act is null: taken as silu" in result.text) == noted


@pytest.mark.parametrize(
    "line",
    [
        ("explain", "CONFIG", "--vllm"),
        ("explain", "CONFIG", "--quantization"),
        ("explain", "CONFIG", "--all2all-backend"),
        ("tune", "CONFIG", "--tokens"),
        ("bench", "--shape"),
    ],
)
def test_an_option_without_a_value_is_not_one_that_is_not_given(line: tuple[str, ...], run: Run, write: Write) -> None:
    """A script's empty variable gives it."""
    for value in ("", " "):
        result = run(*(write() if word == "CONFIG" else word for word in line), value)
        assert (result.status, result.out) == (2, "")
        assert f"Invalid value for '{line[-1]}': the value is empty" in result.err


def test_an_override_of_the_environment_without_effect_is_a_note(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a server, which starts unless it is strict."""
    asked = ("explain", write(), "--device", "nvidia-h200")
    monkeypatch.setenv("MOE_ORACLE_OVERRIDES", "re:nolayer=marlin")
    found = run(*asked)
    assert found.status == 0 and "override re:nolayer matches no layer" in found.text and "a server warns" in found.text
    assert run(*asked, "--set", "overrides=re:nolayer=marlin").status == 2
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    assert run(*asked).status == 2


def test_a_device_with_unprintable_words_is_refused(run: Run, write: Write, tmp_path: Path) -> None:
    file = tmp_path / "there.json"
    for more in ({"name": "\x1b[31mH200"}, {"name": "H200", "packages": {"vllm": "0.33\n"}}):
        file.write_text(json.dumps({"kind": "cuda", **more}))
        result = run("explain", write(), "--device", file)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert "is not printable" in result.err and "\x1b" not in result.err


def test_batch_invariance_comes_from_the_environment_or_the_option(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*more: str) -> bool:
        given = run("explain", write(), "--device", "nvidia-h200", "--json", *more).json["groups"][0]
        return bool(given["problem"]["batch_invariant"])

    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert (asked(), asked("--batch-invariant")) == (False, True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert (asked(), asked("--no-batch-invariant")) == (True, False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    result = run("explain", write(), "--device", "nvidia-h200")
    assert result.status == 2 and "VLLM_BATCH_INVARIANT: 'yes' is not an integer. Set it to 1 or 0" in result.err


def test_batch_invariance_without_a_backend_ends_with_3(run: Run, write: Write) -> None:
    left = "disable=hopper_mxfp8,hopper_mxfp8_w8a8,emulation"
    result = run("explain", write(), "--device", "nvidia-h200", "--batch-invariant", "--set", left)
    assert result.status == 3 and "batch invariance" in result.text


def test_a_layer_that_only_stock_takes_on_a_gpu_is_called_stocks(run: Run, write: Write) -> None:
    """Stock's kernels ignore a limit of gelu, those here refuse it; a GPU never gets the emulation unasked."""
    path = write(hidden_act="gelu", swiglu_limit=7.0)
    result = run("explain", path, "--device", "nvidia-a100")
    said = result.text
    assert result.status == 0 and "backend stock vLLM's" in said
    assert "left to stock vLLM, which runs MarlinExperts here: no kernel can run mxfp8 experts here" in said
    assert "passes no alpha, beta or limit" in said
    (group,) = run("explain", path, "--device", "nvidia-a100", "--json").json["groups"]
    assert group["decision"] is None and group["left_to_stock"] == "MarlinExperts"
    for named in (("--moe-backend", "marlin"), ("--set", "disable=humming_mxfp8"), ("--backend", "humming_mxfp8")):
        result = run("explain", path, "--device", "nvidia-a100", *named)
        assert result.status == 3 and "stock vLLM's" not in result.out, named
    assert run("explain", path, "--device", "nvidia-a100", "--moe-backend", "emulation").status == 0
    assert run("explain", path, "--device", "cpu").status == 0


def test_what_neither_runs_on_a_gpu_is_an_error_that_offers_the_emulation(run: Run, write: Write) -> None:
    quantization = compressed(group(CT_MXFP8, CT_INPUTS))
    result = run("explain", write(dtype="float16", quantization_config=quantization), "--device", "nvidia-a100")
    said = result.text
    assert (
        result.status == 3 and "marlin_mxfp8: --dtype bfloat16. emulation runs it slowly: MOE_ORACLE_BACKEND=" in said
    )


@pytest.mark.parametrize("line", [["explain"], ["tune"], ["bench"], ["report"]], ids=" ".join)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory. Name a file that tune --export has written"),
        ("{}", "is not a profile of measurements. Make one with: vllm-moe-oracle tune MODEL --export FILE"),
        ("no JSON", "is not a profile of measurements: JSON is malformed"),
        ("", "is a directory. Name a file that tune --export has written, or leave the setting out"),
    ],
    ids=["missing", "another", "no JSON", "folder"],
)
def test_an_invalid_profile_is_refused_before_any_work(
    line: list[str], content: str | None, said: str, run: Run, write: Write, tmp_path: Path
) -> None:
    checkpoint, cache, page = write(), tmp_path / "cache", tmp_path / "page.html"
    path = tmp_path / "profile.json"
    if content:
        path.write_text(content)
    elif content is not None:
        path.mkdir()
    more = ["-o", page] if line == ["report"] else [checkpoint]
    result = run(*line, *more, "--set", f"profile={path}", "--set", f"cache={cache}")
    assert result.status == 2 and result.out == "" and not cache.exists() and not page.exists()
    (only,) = result.err.splitlines()
    assert only.startswith(f"error: --set profile: {path}: {said}")


def test_an_invalid_profile_is_an_error_to_tune_and_a_note_to_explain(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server starts without it, and says so, unless it is strict."""
    monkeypatch.setenv("MOE_ORACLE_PROFILE", str(tmp_path / "nope"))
    result = run("tune", write())
    assert result.status == 2 and "error: environment variable MOE_ORACLE_PROFILE: " in result.err
    said = "note: the profile of environment variable MOE_ORACLE_PROFILE is not used: "
    assert said in run("explain", write(), "--device", "nvidia-h200").text
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 0 and said in result.err and "strict" not in result.err
    assert said in run("status", "--json").err
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 3 and "a strict server would not start" in result.err
    monkeypatch.setenv("MOE_ORACLE_USE_MEASUREMENTS", "0")  # then nothing reads it
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 0 and "is not used" not in result.err
    monkeypatch.delenv("MOE_ORACLE_USE_MEASUREMENTS")
    monkeypatch.setenv("MOE_ORACLE_ENABLED", "0")
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 0 and "strict server" not in result.err


def test_a_bad_variable_is_an_error_too(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_BAKEND", "emulation")
    result = run("explain", write(), "--device", "cpu")
    assert result.status == 2 and "Did you mean MOE_ORACLE_BACKEND?" in result.err


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["nvidia-h200", "auto"])
def test_explain_imports_neither_torch_nor_vllm(machine: str, write: Write) -> None:
    if machine == "auto" and detect._gpu_is_visible():
        pytest.skip("a GPU's properties are asked of torch")
    code = (
        "import sys\n"
        "from vllm_moe_oracle.cli import main\n"
        f"sys.argv = ['vllm-moe-oracle', 'explain', {str(write())!r}, '--device', {machine!r}]\n"
        "try:\n    main.main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'triton', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr.strip()) == (0, "[]")


def test_a_closed_pipe_ends_quietly_with_the_shells_status(write: Write) -> None:
    """As before ``| head``: 141, which is 128 and SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    for line in (["--version"], ["explain", str(write()), "--device", "nvidia-h200", "--json"]):
        command = [sys.executable, *TOOL, *line]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        assert ended.returncode == 141 and "BrokenPipe" not in ended.stderr, ended.stderr
    os.close(writer)


def test_output_that_cannot_be_written_is_one_line_and_status_2(write: Write) -> None:
    path = str(write())
    for line in (["--version"], ["explain", path, "--device", "nvidia-h200", "--json"]):
        command = [sys.executable, *TOOL, *line]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        said = "error: standard output cannot be written: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (2, said)
    for closed, said in ((">&-", "error: standard output is closed\n"), ("2>&-", ""), (">&- 2>&-", "")):
        shell = ["sh", "-c", f'"$@" {closed}', "sh", *command]
        ended = subprocess.run(shell, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0 if closed == "2>&-" else 2, said)


def beside_a_third_party(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the tool says where an installed package has an entry point whose module has this text."""
    site = distributions.install(folder / "site", "theirs", ENTRY_POINT_GROUP, ["theirs = theirs:x"], {"theirs": text})
    paths = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    command = [sys.executable, *TOOL, *arguments, "--device", "nvidia-h200"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": paths})


@pytest.mark.parametrize("close", ["sys.stdout.close()", "sys.__stdout__.close()"])
def test_output_closed_by_a_third_party_is_an_answer_or_one_line(close: str, write: Write, tmp_path: Path) -> None:
    text = f"import sys\n{close}\nraise ImportError('no')\n"
    ended = beside_a_third_party(text, tmp_path, "explain", str(write()), "--brief")
    assert "Traceback" not in ended.stderr and "entry point theirs could not be loaded" in ended.stderr
    if "__" in close:  # the stream itself
        assert ended.returncode == 2 and ended.stderr.splitlines()[-1] == "error: standard output was closed"
    else:
        assert ended.returncode == 0 and "hopper_mxfp8" in ended.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('HELLO \\x1b[31m')\nraise ImportError('no')\n", "HELLO  [31m"),
        ("import sys\nsys.setrecursionlimit(60)\nraise ImportError('no')\n", "theirs"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='theirs-1').start()\n",
            "note: ended while threads of a third party's backend were running: theirs-1",
        ),
    ],
    ids=["prints", "recursion", "thread"],
)
def test_what_a_third_partys_import_leaves_changes_no_answer(
    text: str, said: str, write: Write, tmp_path: Path
) -> None:
    ended = beside_a_third_party(text, tmp_path, "explain", str(write()), "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["groups"] and said in ended.stderr and "\x1b" not in ended.stderr


@pytest.mark.parametrize(
    "line", sampled([["CONFIG", "--bogus"], ["nope"], ["CONFIG", "--device", "cpu", "--ep", "--json"]], 3)
)
def test_a_standard_error_that_nobody_reads_changes_no_answer(line: list[str], write: Write) -> None:
    """A full disk behind the log, a reader that is gone: status and standard output are as with a reader."""
    command = [sys.executable, *TOOL, "explain", *(str(write()) if word == "CONFIG" else word for word in line)]
    read = subprocess.run(command, capture_output=True, timeout=120)
    assert read.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(writer, "w") as gone:
        for stream in (full, gone):
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, timeout=120)
            assert (ended.returncode, ended.stdout) == (read.returncode, read.stdout), stream.name


@pytest.mark.parametrize("module", ["typer", "vllm_moe_oracle.cli.main", "vllm_moe_oracle.cli.commands.explain"])
def test_ctrl_c_while_the_tool_is_imported_ends_it_quietly(module: str) -> None:
    """The interruption comes when a module is looked up, whatever the machine's speed."""
    code = f"""
        import os, signal, sys

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["vllm-moe-oracle", "--version"]
        from vllm_moe_oracle.cli.__main__ import run
        run()
    """
    ended = python("-c", textwrap.dedent(code))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_status_130(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_moe_oracle.cli.commands.explain._find_layers", interrupted)
    ended = run("explain", write())
    assert (ended.status, ended.out, ended.err) == (130, "", "")


def test_a_locale_without_the_signs_of_a_table_gets_their_codes() -> None:
    """Predicted times have the sign of a deviation, which ASCII lacks."""
    line = (*TOOL, "explain", CONFIGS / "kimi-k2-thinking.json", "--device", "nvidia-h200")
    shown = python(*line, PYTHONIOENCODING="ascii:strict")
    assert shown.returncode == 0 and "\\xb1" in shown.stdout and not shown.stderr


def test_no_escape_code_reaches_the_terminal(
    run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From names of folders and files, words of configs, errors of entry points, and options."""
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202eafter"
    folder = tmp_path / evil
    folder.mkdir()
    monkeypatch.setattr(default_registry(), "load_errors", {evil: f"ValueError: {evil}"})
    path = write(**{"hidden_act": "silu"})
    words = quantized(hidden_act=evil, quantization_config={**MODELOPT, "ignore": [f"re:{evil}experts"]})
    (folder / "config.json").write_text(json.dumps(words))
    lines: list[tuple[object, ...]] = [
        ("explain", folder),
        ("explain", path, "--device", "nvidia-h200"),
        ("explain", path, "--device", "nvidia-h200", "--json"),
        ("explain", path, "--device", folder / "x.json"),
        ("explain", path, evil),
        ("explain", path, f"--{evil}"),
        ("explain", path, "--backend", evil),
        ("explain", path, "--set", f"{evil}=1"),
        ("explain", path, "--set", f"cache={folder}", "--device", "nvidia-h200", "--json"),
        (evil,),
        ("report", folder / "x"),
        ("tune", folder),
    ]
    for line in lines:
        result = run(*line)
        shown = (result.out + result.err).replace("\n", "")
        assert shown.isprintable(), (line, [each for each in shown if not each.isprintable()])
    logger, seen = logging.getLogger("vllm.moe_oracle"), io.StringIO()
    handler = logging.StreamHandler(seen)
    logger.addHandler(handler)
    try:
        raise ValueError(evil)
    except ValueError:
        logger.exception("moe_oracle: %s\n%s", evil, "second line")
    finally:
        logger.removeHandler(handler)
    assert "second line" in seen.getvalue() and seen.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "null", "home", "large"])
def test_files_of_options_are_regular_and_small(kind: str, run: Run, write: Write, tmp_path: Path) -> None:
    path: object = tmp_path / "x.json"
    if kind == "fifo":
        os.mkfifo(tmp_path / "x.json")
    elif kind == "folder":
        (tmp_path / "x.json").mkdir()
    elif kind == "large":
        with (tmp_path / "x.json").open("wb") as file:
            file.truncate(1 << 33)
    else:
        path = {"zero": "/dev/zero", "null": "/tmp/a\0b.json", "home": "~nobody-of-this-name/x.json"}[kind]
    for line in (
        ("explain", write(), "--device", path),
        ("report", path),
        ("explain", write(), "--device", "nvidia-h200", "--set", f"profile={path}"),
        ("tune", "--import", path),
        ("explain", path),
    ):
        result = run(*line)
        assert result.status == 2 and result.out == "", (line, result.err)
        lines = result.err.splitlines()
        # typer refuses a null byte itself, as it does a wrong option.
        assert len(lines) == 1 or (lines[0].startswith("Usage:") and lines[-1].startswith("Error:")), (line, lines)


def test_help_and_version(run: Run) -> None:
    assert run("--version").out == f"vllm-moe-oracle {__version__}\n"
    result = run("--help")
    assert result.status == 0 and "..." not in result.out.partition("Commands:")[2], "a summary is cut off"
    assert max(map(len, result.out.splitlines())) <= 80
    names = re.findall(r"^  (\w+)  ", result.out.partition("Commands:")[2], re.MULTILINE)
    assert names == sorted(each.name for each in pkgutil.iter_modules(commands.__path__))
    for name in names:
        text = run(name, "--help").out
        assert "Example" in text and "Exit status" in text
        assert max(map(len, text.splitlines())) <= 80, name
        # Types are Python's: a value is described by its metavar, in capitals or by its words.
        described = text.partition("Arguments:" if "Arguments:" in text else "Options:")[2]
        assert not re.search(r"<\w|\b(list|str|int|float|Path)\b(?! of)|TEXT|INTEGER|FLOAT", described), name
    assert run().status == 2


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_status_reports_this_installation(tmp_path: Path) -> None:
    ended = python(*TOOL, "status", "--json", MOE_ORACLE_BACKEND="emulation")
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["versions"]["vllm-moe-oracle"] == __version__
    assert set(data["versions"]) == {"vllm-moe-oracle", "vllm", "torch", "triton", "python"}
    assert set(data["plugin"]) >= {"active", "reason", "vllm", "methods", "patches"}
    assert data["plugin"]["active"] is bool(data["plugin"]["methods"]) is (data["versions"]["vllm"] is not None)
    backend = data["settings"]["backend"]
    assert (backend["value"], backend["source"]) == ("emulation", "environment variable MOE_ORACLE_BACKEND")
    assert data["settings"]["strict"]["source"] == "default"
    assert {"name": "emulation", "schemes": ["mxfp8"]}.items() <= data["backends"][0].items() or len(
        data["backends"]
    ) > 1
    assert data["broken_backends"] == {}
    assert set(data["cache"]) == {"path", "measurements", "error"} and data["cache"]["error"] == ""
    # What it says of this machine can be asked about on another one.
    file = tmp_path / "here.json"
    file.write_text(ended.stdout)
    there = python(*TOOL, "explain", "nowhere", "--device", file)
    assert "nowhere: no such file" in there.stderr


def test_status_says_that_a_strict_server_would_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MOE_ORACLE_STRICT": "1", "MOE_ORACLE_SELF_CHECK": "yes", "COLUMNS": "300"}.items():
        monkeypatch.setenv(name, value)
    ended = run("status")
    assert ended.status == 2 and "stock vLLM serves" not in ended.out + ended.err
    assert re.search(r"not active: the start of a server would end with: .*'yes' is not one of off", ended.out)


def test_status_names_backends_and_counts_patches_in_words() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['vllm-moe-oracle', 'status', '--verbose']\n"
        "from vllm_moe_oracle.cli import main\n"
        "main.main()\n"
    )
    said = forked.python(code, environment(COLUMNS="200")).stdout
    assert re.search(r"^ *emulation .*built in$", said, re.MULTILINE) and "vllm_moe_oracle.backends" not in said
    assert "waiting" not in said


def test_status_without_vllm(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from vllm_moe_oracle import plugin\n"
        "from vllm_moe_oracle.devices import detect\n"
        "detect.installed_packages = lambda: {}\n"
        "plugin._vllm_version = lambda: None\n"
        "from vllm_moe_oracle.cli import main\n"
        "sys.argv = ['vllm-moe-oracle', 'status', '--json']\n"
        "main.main()\n"
    )
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["versions"]["vllm"] is None and data["plugin"]["active"] is False
    assert "not installed" in data["plugin"]["reason"] and data["device"]["kind"] == "cpu"


def test_explain_takes_lora_and_eplb_into_account(run: Run) -> None:
    here = ("explain", CONFIGS / "gpt-oss-20b.json", "--device", "nvidia-h200", "--json")
    plain = run(*here).json["groups"][0]
    lora = run(*here, "--lora").json["groups"][0]
    refused = {each["backend"]: str(each["reasons"]) for each in lora["candidates"] if not each["accepted"]}
    assert lora["problem"]["lora"] and not plain["problem"]["lora"]
    before = {each["backend"] for each in plain["candidates"] if each["accepted"]}
    assert any("lora" in refused.get(name, "").lower() for name in before)
    left = "a server leaves layers with LoRA adapters that no backend here runs to stock vLLM"
    assert lora["decision"] is None and left in run(*here, "--lora").err
    assert left not in run(*here, "--lora", "--backend", "marlin_mxfp4").err
    assert left not in run(*here).err
    spread = (*here, "--ep", "--tp", "2")
    moved = run(*spread, "--eplb").json["groups"][0]
    assert moved["problem"]["eplb"] and moved["decision"]["backend"]
    refused = {each["backend"]: str(each["reasons"]) for each in moved["candidates"] if not each["accepted"]}
    still = {each["backend"] for each in run(*spread).json["groups"][0]["candidates"] if each["accepted"]}
    assert any("eplb" in refused.get(name, "").lower() for name in still)
    for wrong in (("--eplb",), ("--eplb", "--ep"), ("--eplb", "--tp", "2")):
        result = run(*here, *wrong)
        assert (
            result.status == 2
            and result.out == ""
            and "--eplb: this needs expert parallelism over 2 ranks or more. Add --ep --tp N" in result.err
        )


def test_explain_places_experts_round_robin_where_vllm_does(run: Run, write: Write) -> None:
    option = "--expert-placement-strategy"
    asked = (option, "round_robin")
    grouped = ("explain", write("deepseek-v3", num_nextn_predict_layers=1), "--device", "nvidia-b200", "--json")
    spread = (*grouped, "--ep", "--tp", "8")
    in_order, round_robin, moving = run(*spread, option, "linear"), run(*spread, *asked), run(*spread, *asked, "--eplb")
    for result, placement in ((in_order, "linear"), (round_robin, "round_robin"), (moving, "linear")):
        assert {group["problem"]["parallel"]["placement"] for group in result.json["groups"]} == {placement}
        assert [group["is_mtp"] for group in result.json["groups"]] == [False, True]
    assert in_order.json == run(*spread).json
    accepted, refused = (
        {each["backend"]: each for each in result.json["groups"][0]["candidates"]} for result in (in_order, round_robin)
    )
    assert accepted["trtllm_mxfp8"]["accepted"] and "round-robin" in str(refused["trtllm_mxfp8"]["reasons"])
    said = "the experts of model.layers.3-61.mlp.experts stay in linear order: vLLM places experts round-robin only"
    assert said in moving.messages and "in order" not in round_robin.err + in_order.err
    alike = run("explain", write(), "--device", "cpu", "--json", "--ep", "--tp", "2", *asked)
    placement = alike.json["groups"][0]["problem"]["parallel"]["placement"]
    assert placement == "linear" and "stay in linear order" in alike.err
    for wrong in ((), ("--ep",), ("--tp", "8")):
        result = run(*grouped, *wrong, *asked)
        assert result.status == 2 and f"{option}: this needs expert parallelism over 2 ranks" in result.err
    result = run(*spread, option, "robin")
    assert result.status == 2 and f"{option}: 'robin' is not one of linear, round_robin" in result.err


def test_a_release_of_vllm_can_be_named(run: Run, write: Write, tmp_path: Path) -> None:
    def decided(*arguments: object) -> dict[str, Any]:
        printed = run("explain", write(), "--device", "nvidia-h200", "--set", "cache=none", *arguments, "--json").json
        return dict(printed["groups"][0])

    # Before 0.25 vLLM has no Humming for MXFP8: another static choice.
    for release in ("0.23.0", NEWEST):
        made = decided("--vllm", release)
        names = {each["backend"]: each["accepted"] for each in made["candidates"]}
        assert names["humming_mxfp8"] == (release == NEWEST)
        assert made["decision"]["why"] in ("measured", "predicted")
    for wrong, rule in (("0.11.0", "older than the oldest"), ("9.0", "newer than the newest"), ("newest", "cannot be")):
        refused = run("explain", write(), "--vllm", wrong)
        assert refused.status == 2 and wrong in refused.err and rule in refused.err
        assert refused.err.count(f"{RELEASES[0]} to {NEWEST}") == 1


def test_a_release_is_named_without_its_v(run: Run, write: Write) -> None:
    command = ("explain", write(), "--device", "nvidia-h200", "--vllm")
    assert run(*command, "v0.29.0").out == run(*command, "0.29.0").out
    assert run(*command, NEWEST.removesuffix(".0")).out == run(*command, NEWEST).out


def test_a_release_of_vllm_brings_what_it_requires(run: Run, write: Write) -> None:
    """Times of another Humming have its error."""
    command = ("explain", write(), "--device", "nvidia-h200", "--vllm")
    for release in TESTED_RELEASES[-5:-1]:
        packages = run(*command, release.version, "--json").json["device"]["packages"]
        assert packages == {"vllm": release.version, **release.requires}
        told = f", not {release.requires['humming-kernels']}"
        assert told in " ".join(run(*command, release.version).out.split())


@pytest.mark.parametrize("word", ["1_0", "+2", " 2", "2 ", "\u0662", "\uff12", "0x2", "two", "2.0"])
def test_numbers_in_options_are_decimal_digits(word: str, run: Run) -> None:
    found = run("explain", "x.json", "--tp", word)
    assert found.status == 2 and "is not a valid integer. Write digits from 0 to 9" in found.messages
    found = run("tune", "--tokens", f"1,{word}", CONFIGS / "qwen3-30b-a3b.json", "--quantization", "mxfp8")
    assert found.status == 2 and "is not a list of numbers from 1 to" in found.err


@pytest.mark.parametrize("word", ["1_0", "inf", "nan", "1e3", "\uff12"])
def test_seconds_in_options_are_decimal_digits(word: str, run: Run) -> None:
    found = run("tune", "x.json", "--budget", word)
    told = found.messages
    assert found.status == 2 and f"{word!r} is not a valid number. Write digits from 0 to 9" in told
