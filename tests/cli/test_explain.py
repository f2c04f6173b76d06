"""What `explain` answers for a checkpoint on a machine: decisions, refusals, releases; as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib.cli import CONFIGS, Run, Write
from tests.lib.configs import MODELOPT
from tests.lib.samples import measured_h200
from vllm_moe_oracle import methods
from vllm_moe_oracle.checkpoint import served_layers
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST


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
    found = run(
        "explain",
        write(model_type="interns2_mobius", hidden_act="no_such_activation"),
        "--device",
        "nvidia-h200",
        "--brief",
    )
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
