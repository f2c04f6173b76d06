"""`explain` for a server's options of parallelism, in brief, and the command with which a static choice ends."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib.cli import CONFIGS, Run, Write
from tests.lib.configs import GPTQ, INT4, PACKED, compressed, config, group, quantized
from vllm_moe_oracle.cli import layer_arguments
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.store import FILE_NAME, SCHEMA_VERSION, Store
from vllm_moe_oracle.releases.supported import NEWEST

A100 = ("--device", "nvidia-a100")
"""A GPU for which there are neither measurements nor predictions: choices are static."""
H200 = ("--device", "nvidia-h200", "--set", "use_measurements=0")


def words(text: str) -> str:
    return " ".join(text.split())


# --- data-parallel ranks and all-to-alls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "header", "parallel"),
    [
        (("--dp", 2), "tensor parallelism over 2 ranks (TP 1 x DP 2)", {"tp": 2, "ep": 1, "dp": 2}),
        (("--dp", 2, "--tp", 4), "tensor parallelism over 8 ranks (TP 4 x DP 2)", {"tp": 8, "ep": 1, "dp": 2}),
        (
            ("--dp", 2, "--tp", 1, "--ep"),
            "expert parallelism over 2 ranks (TP 1 x DP 2), all-to-all allgather_reducescatter",
            {"tp": 1, "ep": 2, "dp": 2},
        ),
        (("--dp", 3, "--ep"), "expert parallelism over 3 ranks", {"tp": 1, "ep": 3, "dp": 3}),
        (("--tp", 2, "--ep"), "expert parallelism over 2 ranks", {"tp": 1, "ep": 2, "dp": 1}),
        (
            ("--dp", 4, "--ep", "--all2all-backend", "nixl_ep"),
            "(TP 1 x DP 4), all-to-all nixl_ep",
            {"tp": 1, "ep": 4, "dp": 4, "format": "batched"},
        ),
    ],
)
def test_ranks_are_those_of_a_server(
    options: tuple[Any, ...], header: str, parallel: dict[str, Any], run: Run, write: Write
) -> None:
    shown = run("explain", write(), *H200, *options)
    assert header in words(shown.out.partition("layers:")[0])
    problem = run("explain", write(), *H200, *options, "--json").json["groups"][0]["problem"]
    assert problem["parallel"] == {"format": "standard", "placement": "linear"} | parallel


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (("--all2all-backend", "nixl_ep"), "--all2all-backend nixl_ep changes nothing here: vLLM uses it only with"),
        (("--all2all-backend", "nixl_ep", "--dp", 2), "--all2all-backend nixl_ep changes nothing here"),
        (("--all2all-backend", "nixl_ep", "--tp", 2, "--ep"), "--all2all-backend nixl_ep changes nothing here"),
        (("--all2all-backend", "naive"), "--all2all-backend naive changes nothing here"),
        (("--all2all-backend", "pplx", "--dp", 2, "--ep"), "was removed; vLLM takes allgather_reducescatter instead"),
        (("--ep",), "--ep changes nothing here: there is one rank (--tp and --dp are 1)"),
        (("--lora-target-modules", "q_proj"), "--lora-target-modules changes nothing here without --lora"),
        (
            ("--ep", "--dp", 2, "--all2all-backend", "deepep_v2"),
            "a server asks vLLM's HummingGroupedExperts whether it runs with deepep_v2; if not, the next accepted",
        ),
    ],
)
def test_options_without_effect_are_notes(options: tuple[Any, ...], note: str, run: Run, write: Write) -> None:
    assert note in run("explain", write(), *H200, *options).text
    noted = run("explain", write(), *H200, *options, "--json")
    assert any(note in each for each in noted.json["notes"]) and note in noted.err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            ("--ep", "--dp", 2, "--all2all-backend", "mori_low_latency"),
            "vLLM runs the all-to-all mori_low_latency on AMD",
        ),
        (("--all2all-backend", "moonep"), "vLLM serves only models in 16 bits with the all-to-all moonep"),
        (("--device", "cpu", "--dp", 2), "vLLM cannot exchange tokens between data-parallel ranks on a CPU"),
        (("--device", "cpu", "--dp", 2, "--ep"), "vLLM cannot exchange tokens between data-parallel ranks on a CPU"),
        (
            ("--device", "cpu", "--dp", 2, "--quantization", "mxfp8"),
            "vLLM cannot exchange tokens between data-parallel",
        ),
        (("--device", "cpu", "--tp", 2, "--ep", "--eplb"), "vLLM moves experts between ranks (EPLB) on GPUs only"),
        (("--dp", 3, "--ep", "--eplb"), "128 over 3 ranks leave 2, unless --eplb-config adds redundant ones"),
    ],
)
def test_options_that_vllm_refuses_leave_no_backend(
    options: tuple[Any, ...], rule: str, run: Run, write: Write
) -> None:
    """Nothing that would not run is shown as chosen."""
    path = write(**({"quantization_config": None} if "mxfp8" in options else {}))
    found = run("explain", path, *H200, *options, "--json")
    (group,) = found.json["groups"]
    assert found.status == 3 and group["decision"] is None and group["left_to_stock"] is None
    assert rule in group["failure"] and not group["measure"]
    assert any(rule in note and "a server would not start" in note for note in found.json["notes"])
    shown = run("explain", path, *H200, *options)
    assert shown.status == 3 and rule in shown.text and " chosen " not in shown.text


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--device", "cpu", "--dp", 2), 3),  # experts in 16 bits exchange tokens, too
        (("--device", "cpu", "--tp", 2, "--ep"), 0),
        (("--all2all-backend", "moonep", "--ep", "--dp", 2), 0),
        (("--all2all-backend", "mori_low_latency", "--ep", "--dp", 2), 3),
        (("--all2all-backend", "mori_low_latency"), 0),
    ],
)
def test_models_left_to_stock_are_refused_as_far_as_vllm_refuses_them(
    options: tuple[Any, ...], status: int, run: Run, write: Write
) -> None:
    found = run("explain", write(quantization_config=None), *H200, *options, "--json")
    assert (found.status, any("would not start" in each for each in found.json["notes"])) == (status, status == 3)
    dense = run("explain", write(quantization_config=None, num_experts=0), *H200, *options, "--json")
    assert (dense.status, any("would not start" in each for each in dense.json["notes"])) == (0, False)


def test_the_gain_of_a_named_backend_is_not_predicted(run: Run, write: Write) -> None:
    found = run("explain", write(), *H200, "--backend", "emulation").text
    assert "it was not measured beside stock vLLM on such a machine, and a named backend is not predicted" in found


def test_stages_of_pipeline_parallelism_have_a_hint(run: Run, write: Write) -> None:
    for option in ("--pipeline-parallel-size", "-pp"):
        found = run("explain", write(), option, 2)
        assert found.status == 2 and "the answer for each is the same" in found.err
    for option in ("--eplb-config", "--speculative-config", "--max-model-len"):
        found = run("explain", write(), option, 2)
        assert found.status == 2 and "explain reads no such option of vLLM" in found.err


@pytest.mark.parametrize(
    ("name", "release", "told"),
    [
        ("gpt-oss-20b", NEWEST, "GptOssForCausalLM"),
        ("gpt-oss-20b", "0.22.1", "GptOssForCausalLM"),
        ("minimax-m2", NEWEST, "MiniMaxM2ForCausalLM"),
        ("qwen3-30b-a3b", NEWEST, ""),
        ("deepseek-v3", "0.22.1", ""),
    ],
)
def test_that_vllm_does_not_balance_a_models_experts_is_noted(name: str, release: str, told: str, run: Run) -> None:
    words, line = "vLLM does not balance the experts of ", ("explain", CONFIGS / f"{name}.json", *H200)
    options = ("--vllm", release, "--tp", 2, "--ep", "--json")
    notes = [each for each in run(*line, *options, "--eplb").json["notes"] if each.startswith(words)]
    expected = f"{words}{told}, a class that is no MixtureOfExperts: --eplb moves none"
    assert notes == ([expected] if told else [])
    assert not any(each.startswith(words) for each in run(*line, *options).json["notes"])


def test_experts_that_do_not_fit_a_cpus_memory_are_noted(run: Run, write: Write, tmp_path: Path) -> None:
    told = "and A CPU has {} GiB: a server does not fit"
    for memory, expected in ((8, True), (512, False)):
        machine = {"kind": "cpu", "name": "A CPU", "memory_gib": memory, "features": ["avx2"]}
        (tmp_path / "cpu.json").write_text(json.dumps(machine))
        notes = run("explain", write(), "--device", tmp_path / "cpu.json", "--json").json["notes"]
        assert any(told.format(memory) in each for each in notes) == expected


def test_a_machine_without_a_gpu_is_noted_unless_it_was_named(run: Run, write: Write) -> None:
    words = "this machine has no GPU"
    noted = any(words in each for each in run("explain", write(), "--json").json["notes"])
    assert noted == (detect.detect().kind == "cpu")
    for device in ("cpu", "h200"):
        assert not any(words in each for each in run("explain", write(), "--device", device, "--json").json["notes"])


def test_experts_that_do_not_fit_a_rank_are_noted(run: Run) -> None:
    config = CONFIGS / "kimi-k2-thinking.json"
    for options, noted in (((), True), (("--tp", 2), True), (("--tp", 8), False), (("--tp", 8, "--ep"), False)):
        said = run("explain", config, *H200, *options).text
        assert ("GiB of each rank, and NVIDIA H200 has 141 GiB: a server needs more ranks" in said) == noted, options


def test_usual_options_need_no_note(run: Run, write: Write) -> None:
    for options in (
        ("--dp", 2),
        ("--dp", 2, "--ep"),
        ("--dp", 2, "--ep", "--all2all-backend", "allgather_reducescatter"),
    ):
        assert run("explain", write(), *H200, *options, "--json").json["notes"] == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--dp", 0), "--dp: 0 ranks are not possible. Give 1 or more"),
        (("--dp", -1, "--ep"), "--dp: -1 ranks are not possible"),
        (
            ("--all2all-backend", "nixlep"),
            "--all2all-backend: 'nixlep' is not an all-to-all of vLLM. Did you mean nixl_ep?",
        ),
        (("--all2all-backend", "mori"), f"'mori': vLLM {NEWEST} no longer has it: 0.23.0 has others"),
        (("--all2all-backend", "moonep", "--vllm", "0.30.0"), "vLLM 0.30.0 does not have it: it came with 0.31.0"),
        (("--eplb", "--dp", 2), "--eplb: this needs expert parallelism over 2 ranks or more. Add --ep --tp N or"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[Any, ...], error: str, run: Run, write: Write) -> None:
    result = run("explain", write(), *H200, *options)
    assert (result.status, result.out) == (2, "") and error in result.err and result.err.count("\n") == 1


def test_data_parallel_ranks_can_move_and_place_experts(run: Run, write: Write) -> None:
    spread = ("explain", write("deepseek-v3"), "--device", "nvidia-b200", "--json", "--ep", "--dp", "8")
    assert run(*spread, "--eplb").json["groups"][0]["problem"]["eplb"]
    asked = (*spread, "--expert-placement-strategy", "round_robin")
    in_order = run(*asked)
    assert in_order.json["groups"][0]["problem"]["parallel"]["placement"] == "linear"
    assert "with an all-to-all, only if it is a batched one" in in_order.err
    batched = run(*asked, "--all2all-backend", "deepep_low_latency")
    assert batched.json["groups"][0]["problem"]["parallel"]["placement"] == "round_robin"


def test_a_layer_that_an_all_to_all_carries_rounded_up_is_left_to_stock(run: Run) -> None:
    options = ("explain", CONFIGS / "gpt-oss-20b.json", *H200, "--dp", 2, "--ep")
    assert run(*options).status == 0
    refused = run(*options, "--all2all-backend", "deepep_high_throughput")
    said = "does not carry hidden size 2880: vLLM rounds it up to 3072, and no backend here loads such a layer. Choose"
    assert refused.status == 0 and said in refused.text and "another --all2all-backend" in refused.text
    assert "left to stock vLLM, which runs OAITritonExperts here" in refused.text
    asked = ("--dp", 2, "--ep", "--all2all-backend", "deepep_high_throughput")
    on_cpu = run("explain", CONFIGS / "gpt-oss-20b.json", "--device", "cpu", *asked)
    assert on_cpu.status == 3 and "left to stock" not in on_cpu.text
    named = run(*options, "--all2all-backend", "deepep_high_throughput", "--backend", "hopper_mxfp4")
    assert named.status == 3 and said in named.text and "left to stock" not in named.text


# --- brief ------------------------------------------------------------------------------------------------------------


def test_brief_has_one_block_for_each_group(run: Run, write: Write) -> None:
    override = ("--set", r"overrides=re:layers\.[0-9]\.=emulation")
    result = run("explain", write(num_hidden_layers=20), *H200, *override, "--brief", "--ep")
    blocks = result.out.split("\n\n")
    assert result.status == 0 and len(blocks) == 4
    assert blocks[1].splitlines()[0] == "10 layers: model.layers.0-9.mlp.experts"
    rows = [line.split()[0] for line in blocks[1].splitlines()[1:] if line[2] != " "]
    assert rows == ["backend", "why", "stock", "gain", "numerics"]
    assert row(blocks[1], "why").startswith("override: re:layers") and row(blocks[1], "backend") == "emulation"
    assert blocks[2].splitlines()[0] == "10 layers: model.layers.10-19.mlp.experts"
    assert row(blocks[2], "why").startswith("static: first accepted backend")
    assert row(blocks[2], "numerics").startswith("activations bfloat16, sums float32")
    assert blocks[3].startswith("note: --ep changes nothing here")
    assert "rejected" not in result.out and "candidate" not in result.out


def row(block: str, name: str) -> str:
    """The value of a row, without its line breaks."""
    lines = block.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"  {name} "))
    more = next((index for index in range(first + 1, len(lines)) if lines[index][2] != " "), len(lines))
    return words(" ".join(lines[first:more])).removeprefix(f"{name} ")


def test_brief_has_sizes_only_where_they_are_padded(run: Run, write: Write) -> None:
    plain = run("explain", write(), *H200, "--brief").out
    padded = run("explain", write(moe_intermediate_size=1056), *H200, "--backend", "marlin_mxfp8", "--brief").out
    assert "  sizes " not in plain and "padded" in row(padded, "sizes")


def test_brief_says_what_fails(run: Run, write: Write) -> None:
    result = run("explain", write(), "--device", "cpu", "--set", "disable=emulation,cpu_dequantized", "--brief")
    assert result.status == 3
    assert row(result.out, "backend") == "none" and row(result.out, "why").startswith("no backend can run mxfp8")


def test_brief_json_is_the_same_without_rejected_candidates(run: Run, write: Write) -> None:
    command = ("explain", write(), *A100, "--tp", 2, "--json")
    full, brief = run(*command).json, run(*command, "--brief").json
    rejected = [each for each in full["groups"][0]["candidates"] if not each["accepted"]]
    assert rejected
    full["groups"][0]["candidates"] = [each for each in full["groups"][0]["candidates"] if each["accepted"]]
    assert brief == full


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_narrow_output_breaks_lines_but_no_command(
    columns: int, run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = write()
    lines = run("explain", path, *A100, "--dp", 2, "--ep", "--brief").out.splitlines()
    (command,) = (line for line in lines if line.startswith("  measure          "))
    assert shlex.split(command)[1:] == ["vllm-moe-oracle", "tune", str(path), "--dp", "2", "--ep"]
    assert all(len(line) <= columns and line == line.rstrip() for line in lines if line != command)


def test_narrow_output_lists_candidates_instead_of_a_table(
    run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run("explain", write(), *H200).out
    assert all(len(line) <= 40 for line in out.splitlines())
    assert "\n\nemulation: accepted\n" in out and "humming_mxfp8: chosen\n" in out
    below = words(out.partition("trtllm_mxfp8: rejected\n")[2])
    assert below.startswith("needs compute capability sm_100 to below sm_110; NVIDIA H200 has sm_90 ")


# --- the command that measures ----------------------------------------------------------------------------------------


def measured_by(command: str, run: Run, monkeypatch: pytest.MonkeyPatch, gpu: str = "nvidia-a100") -> set[Any]:
    """The kernel shapes that `tune` measures when a shell runs a command on a GPU."""
    pytest.importorskip("torch")
    from vllm_moe_oracle.measuring import tuning

    asked: list[Any] = []

    def tune(problems: list[Any], *arguments: Any) -> dict[Any, Any]:
        asked.extend(problems)
        return {}

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(layer_arguments, "require_gpu", lambda _: known_device(gpu))
    tool, *arguments = shlex.split(command)
    result = run(*arguments)
    assert (tool, result.status, result.err) == ("vllm-moe-oracle", 0, "")
    return {kernel_shape_of(each) for each in asked}


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("qwen3-30b-a3b", {}, ()),
        ("qwen3-30b-a3b", {}, ("--tp", 2)),
        ("qwen3-30b-a3b", {}, ("--tp", 2, "--dp", 3)),
        ("qwen3-30b-a3b", {}, ("--tp", 4, "--dp", 2, "--ep")),
        ("qwen3-30b-a3b", {}, ("--dp", 5, "--ep", "--no-batch-invariant")),
        ("qwen3-30b-a3b", {"quantization_config": None}, ("--quantization", "MXFP8", "--tp", 4)),
        ("qwen3-30b-a3b", {"quantization_config": None}, ("--quantization", "mxfp4", "--set", "activations=16bit")),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}, ("--tp", 4)),
        ("qwen3-30b-a3b", {"quantization_config": compressed(group(INT4), format=PACKED)}, ("--dtype", "half")),
        ("deepseek-v3", {"num_nextn_predict_layers": 1}, ("--tp", 2, "--dp", 4, "--ep", "--eplb")),
    ],
)
def test_the_command_measures_what_was_explained(
    name: str,
    changes: dict[str, Any],
    options: tuple[Any, ...],
    run: Run,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(tmp_path / "a cache"))
    path = write(name, **changes)
    explained = run("explain", path, *A100, *options, "--json").json["groups"]
    commands = {group["measure"] for group in explained}
    assert {group["decision"]["why"] for group in explained} == {"static"} and len(commands) == 1
    (command,) = commands
    assert f"--set 'cache={tmp_path / 'a cache'}'" in command
    assert run("explain", path, *A100, *options).out.count(f"  measure          {command}\n") == len(explained)
    shapes = {kernel_shape_of(msgspec.convert(group["problem"], Problem)) for group in explained}
    assert measured_by(command, run, monkeypatch) == shapes


def test_batch_invariance_is_given_on(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read vLLM's variable, so it is set while they are measured."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    command = f"vllm-moe-oracle tune {shlex.quote(str(write()))} --batch-invariant"
    (shape,) = measured_by(command, run, monkeypatch, "nvidia-h200")
    assert shape.batch_invariant and os.environ["VLLM_BATCH_INVARIANT"] == "1"


def test_ragged_shards_are_measured_as_they_are_served(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(
        moe_intermediate_size=1120, quantization_config=compressed(group(INT4 | {"group_size": 32}), format=PACKED)
    )
    (tmp_path / "config.json").write_text(json.dumps(data))
    (explained,) = run("explain", tmp_path, *A100, "--tp", 2, "--set", "ragged_shards=1", "--json").json["groups"]
    assert explained["problem"]["ragged_intermediate_size"] == 1120
    assert explained["measure"].endswith("--tp 2 --set ragged_shards=1")
    (shape,) = measured_by(explained["measure"], run, monkeypatch)
    assert shape.intermediate_size == 576


@pytest.mark.parametrize(
    "options",
    [("--backend", "marlin_mxfp8"), ("--set", "use_measurements=0"), ("--device", "cpu"), ("--device", "nvidia-h800")],
)
def test_no_command_where_measuring_changes_nothing(options: tuple[str, ...], run: Run, write: Write) -> None:
    """The user decides, measurements are off, there is no GPU, or predicted times decide already."""
    result = run("explain", write(), *A100, *options)
    assert result.status == 0 and "  measure " not in result.out


def test_a_path_that_looks_like_an_option_stays_a_path(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write().parents[1])
    write().parent.rename("-c")
    (group,) = run("explain", *A100, "--json", "--", "-c").json["groups"]
    assert group["measure"] == "vllm-moe-oracle tune ./-c"
    assert len(measured_by(group["measure"], run, monkeypatch)) == 1


# --- layers that only stock vLLM takes --------------------------------------------------------------------------------


def kimi(write: Write) -> Path:
    return write(model_type="kimi_linear", moe_intermediate_size=3072)


def kimi_int4(write: Write) -> Path:
    return write(model_type="kimi_linear", moe_intermediate_size=3072, quantization_config=GPTQ)


def gpt_oss(write: Write) -> Path:
    return CONFIGS / "gpt-oss-20b.json"


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (kimi, ("--tp", 16), "(3072 over 16 ranks: 192), which no backend here loads. To run marlin_mxfp8: TP 8 or"),
        (kimi, ("--tp", 16, "--dp", 2), "which no backend here loads. To run marlin_mxfp8: TP 8 x DP 2 or expert"),
        (kimi_int4, ("--tp", 16, "--device", "cpu"), "can run experts that the model's code pads with zeros"),
        (gpt_oss, ("--tp", 16), "2880 / 16 = 180 is not a multiple of the scale group 32"),
    ],
)
def test_a_layer_that_stock_takes_otherwise_is_left_to_it(
    model: Write, options: tuple[Any, ...], said: str, run: Run, write: Write
) -> None:
    path = model(write)
    found = run("explain", path, *A100, "--brief", *options)
    assert found.status == 0
    assert "backend stock vLLM's why left to stock vLLM" in found.text and said in found.text
    # A backend that the user names is never replaced.
    named = run("explain", path, *A100, "--brief", *options, "--backend", "emulation")
    assert named.status == 3 and "backend none" in named.text


@pytest.mark.parametrize("device", ["nvidia-a100", "nvidia-h200", "nvidia-b200", "cpu"])
@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (
            ("--dp", 3, "--ep"),
            "expert parallelism over 2 ranks, or the same ranks without --enable-expert-parallel",
        ),
        (("--tp", 2, "--dp", 3, "--ep"), "expert parallelism over 4 ranks, or the same ranks"),
        (("--dp", 3, "--ep", "--lora"), "expert parallelism over 2 ranks, or the same ranks"),
        (("--dp", 3, "--ep", "--all2all-backend", "nixl_ep"), ""),
    ],
)
def test_experts_that_vllms_loader_would_lose_are_not_left_to_stock(
    options: tuple[Any, ...], ways: str, device: str, run: Run
) -> None:
    """What runs the layer changes nothing in what gpt-oss's loader gives to a rank."""
    found = run("explain", CONFIGS / "gpt-oss-20b.json", "--device", device, "--json", *options)
    (group,) = found.json["groups"]
    total = 6 if "--tp" in options else 3
    assert found.status == 3 and group["left_to_stock"] is None
    assert f"gives each of {total} ranks {32 // total} of 32 experts, which leaves 2 without a rank" in group["failure"]
    assert ways in group["failure"] and not any("left to stock" in each for each in found.json["notes"])


@pytest.mark.parametrize("device", [A100, H200, ("--device", "nvidia-b200")], ids=lambda device: device[1])
@pytest.mark.parametrize("format_", [quantized()["quantization_config"], GPTQ], ids=["mxfp8", "gptq"])
def test_what_vllms_lora_layer_does_not_do_ends_the_start(
    format_: dict[str, Any], device: tuple[str, ...], run: Run, write: Write
) -> None:
    path = write(quantization_config=format_)
    for options in (
        ("--tp", 2, "--ep", "--eplb"), ("--dp", 2), ("--dp", 2, "--ep"), ("--tp", 2, "--dp", 2, "--ep"),
        ("--tp", 2, "--ep", "--all2all-backend", "nixl_ep"), ("--dp", 2, "--backend", "emulation"),
    ):  # fmt: skip
        refused = run("explain", path, *device, "--brief", "--lora", *options)
        assert refused.status == 3 and "backend none" in refused.text and "stock vLLM cannot run it" in refused.text
        assert "left to stock" not in refused.text and "gain over stock" not in refused.text
    assert run("explain", path, *device, "--brief", "--lora", "--tp", 2, "--ep").status == 0


def test_a_size_that_no_stock_class_pads_has_no_backend(run: Run, write: Write) -> None:
    found = run("explain", write(), *A100, "--tp", 32, "--brief")
    assert found.status == 3 and "768 / 32 = 24 is not a multiple" in found.text


def test_a_model_that_may_start_keeps_its_gain(run: Run, tmp_path: Path) -> None:
    """Act order in groups, and linear layers that the config leaves in 16 bits."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
    gptq["dynamic"] = {"-:.*self_attn.*": {}}
    (tmp_path / "config.json").write_text(json.dumps(quantized() | {"quantization_config": gptq}))
    found = run("explain", tmp_path, "--device", "h100", "--vllm", NEWEST)
    assert found.status == 0 and "a server does not start, unless" in found.text
    assert "gain over stock none" not in found.text


def test_a_model_that_vllm_refuses_gains_nothing(run: Run, tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps(quantized() | {"quantization_config": gptq}))
    told = "take 4- and 8-bit codes with sym true, the config says bits 4 and sym false"
    found = run("explain", tmp_path, "--device", "h100")
    assert found.status == 0 and told in found.text and "a server does not start, unless" in found.text
    assert "gain over stock unknown: a server starts only if the files leave other layers unquantized" in found.text
    found = run("explain", tmp_path, "--device", "h100", "--json")
    (group,) = found.json["groups"]
    assert group["gain_over_stock"] is None and group["measure"] is None and any(told in x for x in found.json["notes"])
    gptq["sym"] = True
    (tmp_path / "config.json").write_text(json.dumps(quantized() | {"quantization_config": gptq}))
    assert run("explain", tmp_path, "--device", "h100", "--json").json["groups"][0]["gain_over_stock"]


# --- a cache of measurements that cannot be used ----------------------------------------------------------------------


def not_sqlite(file: Path) -> None:
    file.write_text("hello")


def a_directory(file: Path) -> None:
    file.mkdir()


def newer(file: Path) -> None:
    Store(file.parent).prepare()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def another_programs(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE things (name)")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (not_sqlite, "is not a store of measurements"),
        (a_directory, "is not a regular file"),
        (newer, f"has tables of version {SCHEMA_VERSION + 1}, this release knows {SCHEMA_VERSION}"),
        (another_programs, "is another program's database"),
    ],
)
def test_a_cache_that_cannot_be_used_is_told(
    make: Callable[[Path], None], why: str, run: Run, write: Write, tmp_path: Path
) -> None:
    file = tmp_path / FILE_NAME
    make(file)
    options = ("explain", write(), "--device", "h100", "--brief", "--set", f"cache={tmp_path}")
    found = run(*options)
    (line,) = [each for each in found.err.splitlines() if "the cache" in each]
    assert line.startswith(f"note: the cache is not used: {file}: ") and why in line
    assert found.status == 0
    found = run(*options, "--json")
    assert found.status == 0 and [each for each in found.json["notes"] if why in each] == [line.removeprefix("note: ")]
    assert found.err.count(why) == 1
    assert why not in run(*options, "--set", "use_measurements=0").err, "it is not asked"


def test_a_cache_that_is_not_there_or_in_order_is_no_news(run: Run, write: Write, tmp_path: Path) -> None:
    for _ in range(2):
        assert "cache" not in run("explain", write(), "--device", "h100", "--set", f"cache={tmp_path}").err
        Store(tmp_path).prepare()


def test_a_cache_below_a_file_is_told(run: Run, write: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run("explain", write(), "--device", "h100", "--set", f"cache={tmp_path / 'file'}")
    assert found.status == 0 and "the cache is not used" in found.err and "parent is not a directory" in found.err
