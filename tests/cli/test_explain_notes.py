"""What `explain` says beside its answer: of unaffected models, gains over stock, releases, files, the environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli import CONFIGS, Run, Write
from tests.lib.configs import CT_INPUTS, CT_MXFP8, MODELOPT, compressed, group, quantized
from tests.lib.samples import measured_h200
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES, TESTED_RELEASES


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
    ("changes", "noted"),
    [
        ({"hidden_act": "relu"}, True),
        ({"hidden_act": "gelu"}, True),
        ({"hidden_act": "swish"}, False),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, False),
        ({"model_type": "interns2_mobius", "hidden_act": "gelu"}, False),
    ],
    ids=str,
)
def test_an_activation_that_the_models_code_does_not_read_is_noted(
    changes: dict[str, str], noted: bool, run: Run, write: Write
) -> None:
    found = run("explain", write(**changes), "--device", "h200", "--json").json
    said = f"the config's hidden_act is {changes['hidden_act']!r}, and experts compute silu: vLLM's code for qwen3_moe"
    assert any(note.startswith(said) for note in found["notes"]) == noted
    computed = {"gpt_oss": "swigluoai", "interns2_mobius": "gelu"}.get(changes.get("model_type", ""), "silu")
    assert [group["problem"]["activation"]["name"] for group in found["groups"]] == [computed]


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
    path = write(model_type="interns2_mobius", hidden_act="gelu", swiglu_limit=7.0)
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
    monkeypatch.setenv("MOE_ORACLE_USE_MEASUREMENTS", "0")  # then nothing would read it
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 2 and "error: environment variable MOE_ORACLE_PROFILE: has no effect: " in result.err
    monkeypatch.setenv("MOE_ORACLE_STRICT", "0")
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 0 and said in result.err
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    monkeypatch.delenv("MOE_ORACLE_USE_MEASUREMENTS")
    monkeypatch.setenv("MOE_ORACLE_ENABLED", "0")
    result = run("explain", write(), "--device", "nvidia-h200", "--json")
    assert result.status == 0 and "strict server" not in result.err


def test_a_bad_variable_is_an_error_too(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_BAKEND", "emulation")
    result = run("explain", write(), "--device", "cpu")
    assert result.status == 2 and "Did you mean MOE_ORACLE_BACKEND?" in result.err


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
