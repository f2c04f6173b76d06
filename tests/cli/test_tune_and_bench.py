"""`tune` and `bench` as their users meet them: wrong input, machines that cannot measure, and a whole run pretended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib import golden_files
from tests.lib.cli import CONFIGS, Run
from vllm_moe_oracle.checkpoint.files import QuantizationConfig, read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.cli import layer_arguments
from vllm_moe_oracle.cli.commands.tune import _time_rows
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import catalog, detect
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import bench_records, model_shapes, profile
from vllm_moe_oracle.measurements.bench_records import BenchRecord
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, tuning
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import load

CHOICES = golden_files.newest("choice")

GPT_OSS = CONFIGS / "gpt-oss-20b.json"


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_without_a_gpu_one_line_says_so(run: Run, command: str, tmp_path: Path) -> None:
    if detect.detect().kind == "cuda":
        pytest.skip("this machine has a GPU")
    result = run(command, GPT_OSS, "--set", f"cache={tmp_path}")
    assert result.status == 2 and result.out == ""
    assert result.err.startswith("error: there is no NVIDIA GPU here") and result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing is made where nothing can be measured


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "is named"),
        (("no/such/model",), "no such file"),
        (("mxfp8",), "is neither a checkpoint's folder"),
        (("mxfp9:gpt-oss-20b",), "unknown scheme 'mxfp9'"),
        (("mxfp8:gpt-oss-2b",), "Did you mean gpt-oss-20b"),
        (("mxfp8:qwen3-30b-a3b@tp16",), "48 mod 32 = 16"),
        (("mxfp8:qwen3-30b-a3b@tp7",), "768 features cannot be split over 7 ranks (768 mod 7 = 5). Give 6 or 8 ranks"),
        (("mxfp8:qwen3-30b-a3b@tp1000",), "(768 mod 1000 = 768). Give 24 ranks"),
        (("mxfp8:qwen3-30b-a3b", "--tp", "1000000"), "(768 mod 1000000 = 768). Give 24 ranks"),
        (("mxfp8:qwen3-30b-a3b@tp0",), "mxfp8:qwen3-30b-a3b@tp0: 0 ranks are not possible. Give 1 or more"),
        (("mxfp8:qwen3-30b-a3b@tp-3",), "-3 ranks are not possible. Give 1 or more"),
        (
            ("mxfp8:qwen3-30b-a3b@ep0",),
            "@ep0 is not a number of ranks. Write @tpN for N tensor-parallel ranks; for exp",
        ),
        (("mxfp8:qwen3-30b-a3b@",), "@ is not a number of ranks. Write @tpN"),
        (("mxfp8:qwen3-30b-a3b@tp" + "9" * 5000,), " is not a number of ranks. Write @tpN"),
        (("mxfp8:qwen3@tp2",), "unknown shape 'qwen3'"),
        (("qwen3@tp0",), "'qwen3@tp0' is neither a checkpoint's folder"),
        (("qwen3-30b-a3b@tp0",), "qwen3-30b-a3b@tp0: 0 ranks are not possible"),
        (("qwen3-30b-a3b@tp2",), "and no format. Write SCHEME:qwen3-30b-a3b@tp2, or qwen3-30b-a3b --tp 2 for all"),
        ((GPT_OSS, "--tokens", "1,x"), "is not a list of numbers from 1"),
        ((GPT_OSS, "--routing", "sideways"), "is not a kind of routing"),
        ((GPT_OSS, "--replays", "1"), "--replays: 1 replays are too few"),
        ((GPT_OSS, "--jobs", "-1"), "--jobs: -1 processes"),
        ((GPT_OSS, "--budget", "0"), "--budget: 0 seconds"),
        ((GPT_OSS, "--budget", "-1.5"), "--budget: -1.5 seconds"),
        ((GPT_OSS, "--set", "objective=fast"), "not an objective"),
        ((GPT_OSS, "--tp", "0"), "--tp: 0 ranks are not possible"),
        (("mxfp8:gpt-oss-20b", "--tp", "-2"), "--tp: -2 ranks"),
        ((" ",), "an empty word names no layer"),
        (("x" * 300,), "is neither a checkpoint's folder"),
        (("x" * 300 + ".json",), "File name too long"),
        # What would change nothing is said, and not ignored.
        (("mxfp8:qwen3-30b-a3b@tp2", "--tp", "4"), "--tp: 'mxfp8:qwen3-30b-a3b@tp2' names other ranks than 4"),
        (("mxfp8:qwen3-30b-a3b", "--tp", "2", "--ep"), "--ep: 'mxfp8:qwen3-30b-a3b' names a layer"),
        (("qwen3-30b-a3b", "--ep"), "--ep: 'qwen3-30b-a3b' names a layer"),
        (("qwen3-30b-a3b", "--tp", "3"), "list of served layers at 1, 2 ranks, not at 3"),
    ],
)
def test_wrong_input_is_one_line(run: Run, command: str, arguments: tuple[Any, ...], words: str) -> None:
    result = run(command, *arguments)
    assert result.status == 2 and result.out == ""
    assert words in result.err and result.err.count("\n") == 1


LEADS_NOWHERE: dict[str, list[tuple[tuple[Any, ...], str]]] = {
    "tune": [
        (("--shapes", "--tp", "2"), "--tp: the layers of --shapes have numbers of ranks, formats and dtypes of"),
        (("--shapes", "--dtype", "half"), "--dtype: the layers of --shapes"),
        (("--shapes", "--ep"), "--ep: the layers of --shapes"),
        (("--shapes", "--dp", "2"), "--dp: the layers of --shapes"),
        (("--shapes", "--quantization", "mxfp8"), "--quantization: the layers of --shapes"),
        (
            ("mxfp4:gpt-oss-20b", "--dp", "2", "--tp", "2"),
            "--dp: 'mxfp4:gpt-oss-20b' names a layer by the ranks that shard it. Give --tp 4",
        ),
        (
            ("mxfp4:gpt-oss-20b", "--quantization", "mxfp8"),
            "--quantization: 'mxfp4:gpt-oss-20b' names a layer with its format",
        ),
        ((GPT_OSS, "--dp", "0"), "--dp: 0 ranks are not possible"),
        ((GPT_OSS, "--tiles", "-3"), "--tiles: -3 tile configurations"),
        ((GPT_OSS, "--export", ""), ". cannot be written: it is a directory. Name a file that you can write"),
        ((GPT_OSS, "--export", "/"), "/ cannot be written: it is a directory. Name a file that you can write"),
        (
            (GPT_OSS, "--export", "/nope/x.json"),
            "--export: /nope/x.json cannot be written: there is no directory /nope",
        ),
        (("--import", CHOICES, "--export", "/tmp"), "--export: /tmp cannot be written: it is a directory"),
        (("--import", "b.jsonl", GPT_OSS), "MODEL would change nothing: with --import nothing is measured"),
        (("--import", "b.jsonl", "--shapes", "--tiles", "4"), "--shapes, --tiles would change nothing"),
        (("--import", "b.jsonl", "--profile", "p.json"), "--profile would change nothing"),
        ((GPT_OSS, "--tokens", "8192"), "1, 2, 4, 8, 16 missing"),
        ((GPT_OSS, "--profile", GPT_OSS), "is not a profile of measurements"),
    ],
    "bench": [
        ((GPT_OSS, "--scheme", "mxfp8"), "--scheme: it is for --shape"),
        ((GPT_OSS, "--plot", "times.foo"), "--plot: times.foo: unknown image format. Valid are ."),
        ((GPT_OSS, "--plot", "times"), "--plot: times: unknown image format"),
        (
            (GPT_OSS, "--plot", "no/such/folder/times.svg"),
            "times.svg cannot be written: there is no directory no/such/folder",
        ),
        ((GPT_OSS, "--backend", "marlin"), "there is no backend 'marlin'. "),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [(command, *each) for command, rows in LEADS_NOWHERE.items() for each in rows],
)
def test_what_leads_nowhere_is_refused_before_anything_is_measured(
    run: Run, command: str, arguments: tuple[Any, ...], words: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="the extra plot")
    result = run(command, *arguments)
    assert result.status == 2 and result.out == ""
    assert words in result.err and result.err.count("\n") == 1


def record(folder: Path, number: int, **changes: Any) -> Path:
    """A file with the first record of a benchmark, of which a line has other fields."""
    lines = CHOICES.read_text().splitlines()[:2]
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "b.jsonl"


def test_imports_say_what_was_kept(run: Run, tmp_path: Path) -> None:
    made = run("tune", "--import", CHOICES, "--export", tmp_path / "p.json", "--json").json
    assert made["measurements"] > 100 and made["kept"] == str(tmp_path / "p.json")
    assert made["environment"]["gpu"] == "NVIDIA H200" and (tmp_path / "p.json").exists()


def test_of_two_imported_measurements_the_later_one_is_kept(run: Run, tmp_path: Path) -> None:
    head, line = CHOICES.read_text().splitlines()[:2]
    first = json.loads(line)
    name = next(each for each in first["activations"] if each in first["us"])
    slow = first | {"us": first["us"] | {name: 3 * first["us"][name]}}
    slow["quartiles"] = first["quartiles"] | {name: [3 * each for each in first["quartiles"][name]]}
    failed = first | {"us": {key: us for key, us in first["us"].items() if key != name}, "failures": {name: "wrong"}}
    files = {"first": first | {"tiles": {name: "BLOCK_M=16"}}, "slow": slow, "failed": failed}
    for key, record in files.items():
        (tmp_path / key).write_text(f"{head}\n{json.dumps(record)}\n")
    out = tmp_path / "p.json"
    count = run("tune", "--import", tmp_path / "first", "--export", out, "--json").json["measurements"]
    for later in files:
        words = ("tune", "--import", tmp_path / "first", "--import", tmp_path / later, "--export", out, "--json")
        result = run(*words)
        assert result.json["measurements"] == count
        assert ("1 measurements replace earlier ones that differ" in result.err) == (later != "first"), result.err
        (entry,) = profile.read(out).entries
        (kept,) = [each for each in profile.read(out).samples(entry.kernel_shape) if each.backend == name]
        assert (kept.failure, kept.tile) == (
            "wrong" if later == "failed" else "",
            "BLOCK_M=16" if later == "first" else "",
        )
        assert later != "slow" or kept.us == pytest.approx(slow["us"][name], abs=0.01)


@pytest.mark.parametrize(
    ("rest", "words"), [("", "has no measurements"), ('{"layer": {"na\n', "line 2 is not a record")]
)
def test_an_import_without_complete_records_writes_nothing(run: Run, tmp_path: Path, rest: str, words: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(f"{CHOICES.read_text().splitlines()[0]}\n{rest}")
    result = run("tune", "--import", path, "--export", tmp_path / "p.json")
    assert result.status == 2 and words in result.err and not (tmp_path / "p.json").exists()


def without_humming(record: dict[str, Any]) -> dict[str, Any]:
    """A record as of a machine without this library."""
    kept = {name: each for name, each in record["activations"].items() if not name.startswith("humming")}
    return record | {"activations": kept}


def test_an_export_does_not_lose_what_a_file_has(run: Run, tmp_path: Path) -> None:
    path, part = tmp_path / "p.json", tmp_path / "part.jsonl"
    for _ in range(2):  # the same layers replace themselves
        assert run("tune", "--import", CHOICES, "--export", path).status == 0
    kept = path.read_bytes()
    head, first = CHOICES.read_text().splitlines()[:2]
    part.write_text(f"{head}\n{first}\n")
    result = run("tune", "--import", part, "--export", path)
    assert result.status == 2 and "layers, of which" in result.err and "would be lost" in result.err
    records = [json.loads(line) for line in CHOICES.read_text().splitlines()]
    fewer = [each for each in records if each.get("tokens") != 16]
    part.write_text("\n".join(map(json.dumps, fewer)))
    result = run("tune", "--import", part, "--export", path)
    assert result.status == 2 and " times that would be lost, the first " in result.err
    assert " at 16 tokens, uniform routing, of mx" in result.err
    part.write_text("\n".join(map(json.dumps, [records[0], *map(without_humming, records[1:])])))
    result = run("tune", "--import", part, "--export", path)
    assert result.status == 2 and " times that would be lost, the first humming_" in result.err
    records[0]["conditions"]["environment"]["gpu"] = "NVIDIA H100 80GB HBM3"
    part.write_text("\n".join(map(json.dumps, records)))
    result = run("tune", "--import", part, "--export", path)
    assert result.status == 2 and "is a profile of NVIDIA H200, not of NVIDIA H100 80GB HBM3" in result.err
    assert path.read_bytes() == kept
    path.write_text("notes of mine")
    result = run("tune", "--import", part, "--export", path)
    assert result.status == 2 and "would be replaced, and is not a profile of measurements" in result.err
    assert path.read_text() == "notes of mine"
    path.write_bytes(b"")
    assert run("tune", "--import", part, "--export", path).status == 0


def test_out_of_memory_in_a_benchmark_is_not_imported_as_a_failure(tmp_path: Path) -> None:
    head, first = CHOICES.read_text().splitlines()[:2]
    record = json.loads(first)
    name = next(iter(record["activations"]))
    failures = []
    for why in ("OutOfMemoryError: CUDA out of memory", "RuntimeError: no kernel"):
        del record["us"][name]
        (tmp_path / "b.jsonl").write_text(f"{head}\n{json.dumps(record | {'failures': {name: why}})}\n")
        record["us"][name] = 1.0
        (found,) = bench_records.read_samples(tmp_path / "b.jsonl")[2].values()
        failures.append([each.failure for each in found if each.backend == name])
    assert failures == [[], ["RuntimeError: no kernel"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tiles": "none"}, "line 2 is not a record: "),
        ({"activations": ["16bit"]}, "line 2 is not a record: "),
        ({"tokens": 1 << 40}, "invalid measurement"),
    ],
)
def test_what_is_no_record_is_not_imported(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        bench_records.read_samples(record(tmp_path, 2, **change))


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"x":' + "[" * 100_000, "RecursionError"), ("place", "invalid environment"), ("layer", "invalid layer")],
)
def test_a_place_that_cannot_be_shown_is_not_imported(tmp_path: Path, line: str, words: str) -> None:
    head, first = CHOICES.read_text().splitlines()[:2]
    if line == "place":
        data = json.loads(head)
        data["conditions"]["environment"]["driver"] = "1\x1b[2J"
        head, line = json.dumps(data), first
    elif line == "layer":
        data = json.loads(first)
        data["kernel_shape"]["activation"] = "silu\x1b[2J"
        line = json.dumps(data)
    (tmp_path / "b.jsonl").write_text(f"{head}\n{line}\n{first}\n")
    with pytest.raises(MeasurementError, match=words):
        bench_records.read_samples(tmp_path / "b.jsonl")


@pytest.mark.parametrize(("number", "field"), [(1, "conditions"), (2, "us")])
def test_records_with_a_field_twice_are_not_imported(tmp_path: Path, number: int, field: str) -> None:
    lines = CHOICES.read_text().splitlines()[:2]
    text = lines[number - 1]
    lines[number - 1] = f'{text[:-1]}, "{field}": {json.dumps(json.loads(text)[field])}}}'
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(MeasurementError, match=f"line {number}: has the field '{field}' more than once in an object"):
        bench_records.read_samples(tmp_path / "b.jsonl")


def test_a_profile_of_another_place_is_not_passed_over_in_silence() -> None:
    card = catalog.known_device("nvidia-h200")
    here = Environment.of(card)
    assert tuning.why_not_reusable(profile.make(here, {}, {}), card) == ""
    for changes, words in (({"gpu": "NVIDIA H100"}, "measured on NVIDIA H100"), ({"driver": "1"}, "is unknown")):
        there = msgspec.structs.replace(here, **changes)
        assert words in tuning.why_not_reusable(profile.make(there, {}, {}), card)


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_layers_are_named_as_they_are_served(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    found: list[Any] = []

    def seen(*arguments: Any) -> Any:
        named = resolve(*arguments)
        found.extend(named)
        return named

    resolve = layer_arguments.resolve_problems
    monkeypatch.setattr(layer_arguments, "resolve_problems", seen)
    served = ("--tp", 2, "--dp", 4, "--ep", "--quantization", "mxfp8", "--dtype", "half", "--batch-invariant")
    run(command, CONFIGS / "qwen3-30b-a3b.json", *served)  # ends where it asks for a GPU, or has measured
    assert (found[0].scheme.name, found[0].local_experts, found[0].parallel.dp) == ("mxfp8", 16, 4)
    run(command, "mxfp4:gpt-oss-20b", "--dtype", "half")
    assert {found[0].dtype, found[-1].dtype} == {"float16"} and found[-1].scheme.name == "mxfp4"
    assert layer_arguments.apply_settings(found[0], load({})).batch_invariant
    result = run(command, "mxfp8:gpt-oss-20b", "--dp", 2)
    assert result.status == 2 and "--dp: 'mxfp8:gpt-oss-20b' names a layer by the ranks that shard it" in result.err


def pretend_bench(
    monkeypatch: pytest.MonkeyPatch, times: int, error: Exception | None = None, gpu: Device | None = None
) -> None:
    """A GPU, and a benchmark that times this many layers at one token before the error."""
    card = gpu or catalog.known_device("nvidia-h200")

    def bench(problems: Any, *rest: Any) -> Iterator[BenchRecord]:
        for each in problems[:times]:
            shape = kernel_shape_of(each)
            yield BenchRecord(layer={"name": each.layer}, kernel_shape=shape, tokens=1, us={"hopper_mxfp4": 7.0})
        if error is not None:
            raise error

    monkeypatch.setattr(layer_arguments, "require_gpu", lambda _: card)
    monkeypatch.setattr(layer_arguments, "parse_gpus", lambda words: ())
    monkeypatch.setattr(benchmarks, "bench", bench)


@pytest.fixture
def two_models(tmp_path: Path) -> list[Path]:
    """Configs of gpt-oss-20b, and of one with 128 experts, whose layers have the same names."""
    other = tmp_path / "other" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps({**json.loads(GPT_OSS.read_text()), "num_local_experts": 128}))
    return [GPT_OSS, other]


def test_bench_tells_models_apart_whose_layers_have_one_name(
    run: Run, two_models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bench(monkeypatch, 2)
    result = run("bench", *two_models)
    assert result.status == 0, result.err
    for experts in (32, 128):
        assert f"experts: mxfp4 E{experts} k4" in result.out
    pretend_bench(monkeypatch, 1)
    result = run("bench", *two_models)
    assert result.status == 4 and "warning: 1 layers were not timed" in result.err
    result = run("bench", *two_models, "--budget", 5)
    assert result.status == 4 and "warning: 1 layers were not started within 5 s" in result.err


def test_bench_shows_what_it_has_before_it_ends(
    run: Run, two_models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bench(monkeypatch, 1, MeasurementError("a process died"))
    result = run("bench", *two_models)
    assert result.status == 4 and "hopper_mxfp4" in result.out and "error: a process died" in result.err
    pretend_bench(monkeypatch, 0, MeasurementError("a process died"))
    result = run("bench", *two_models)
    assert result.status == 2 and result.err == "error: a process died\n" and result.out == ""


def test_bench_appends_to_an_earlier_runs_records(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    command = ("bench", GPT_OSS, "--jsonl", file)
    pretend_bench(monkeypatch, 1)
    assert run(*command).status == 0
    first = file.read_text()
    pretend_bench(monkeypatch, 0, MeasurementError("another process uses the GPU"))
    assert run(*command).status == 2 and file.read_text() == first  # a run without a record leaves it alone
    with file.open("a") as opened:
        opened.write('{"layer": {"na')  # a run that was killed while it wrote
    pretend_bench(monkeypatch, 1, MeasurementError("another process uses the GPU"))
    assert run(*command, "--routing", "skewed").status == 4
    assert file.read_text().startswith(f'{first}{{"layer": {{"na\n{{"conditions":')
    heads = [json.loads(line)["conditions"] for line in file.read_text().splitlines() if "conditions" in line]
    assert [each["routing"] for each in heads] == ["uniform", "skewed"]


def test_bench_joins_no_records_of_another_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refused before anything is timed: an empty benchmark would end with another status."""
    file = tmp_path / "b.jsonl"
    pretend_bench(monkeypatch, 1)
    assert run("bench", GPT_OSS, "--jsonl", file).status == 0
    before = file.read_text()
    h200 = catalog.known_device("nvidia-h200")
    for gpu, said in (
        (catalog.known_device("nvidia-h100"), "(measured on NVIDIA H200, not NVIDIA H100)"),
        (dataclasses.replace(h200, packages=h200.packages | {"vllm": "0.1"}), f"(vllm {NEWEST}, not 0.1)"),
    ):
        pretend_bench(monkeypatch, 0, gpu=gpu)
        result = run("bench", GPT_OSS, "--jsonl", file)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and file.read_text() == before
        rule = f"{file}: has records of another environment, which a run here cannot join {said}. Name another file"
        assert rule in result.messages


def test_runs_of_one_file_are_imported_with_their_routing(run: Run, tmp_path: Path) -> None:
    head, first, second = CHOICES.read_text().splitlines()[:3]
    skewed = json.loads(head)
    skewed["conditions"]["routing"] = "skewed"
    file, unfinished = tmp_path / "b.jsonl", '{"layer": {"na'
    file.write_text("\n".join([head, first, unfinished, json.dumps(skewed), second, ""]))
    notes: list[str] = []
    found = bench_records.read_samples(file, notes.append)[2]
    assert notes == [f"{file}: line 3 is unfinished and left out"]
    kinds = {(each.tokens, each.routing) for samples in found.values() for each in samples}
    assert kinds == {(json.loads(first)["tokens"], "uniform"), (json.loads(second)["tokens"], "skewed")}
    skewed["conditions"]["environment"]["driver"] = "1"
    file.write_text("\n".join([head, first, json.dumps(skewed), second, ""]))
    result = run("tune", "--import", file, "--export", tmp_path / "p.json")
    assert result.status == 2 and "line 3 begins records of another environment, NVIDIA H200" in result.err


@pytest.mark.parametrize("asked", ["--peers", "--peers-folder", ""])
def test_bench_says_once_which_kernels_of_others_are_skipped(
    run: Run, asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_bench(monkeypatch, 1)
    refused = run("bench", GPT_OSS, "--peers-folder", "/absent")
    assert refused.status == 2 and "/absent: is not a folder" in refused.err
    words = [asked, tmp_path] if asked == "--peers-folder" else [asked] if asked else []
    result = run("bench", GPT_OSS, *words, "--jsonl", tmp_path / "b.jsonl")
    assert result.status == 0, result.err
    head = json.loads((tmp_path / "b.jsonl").read_text().splitlines()[0])["conditions"]
    if not asked:
        assert "peers" not in head and "peer:" not in result.err
        return
    reason = head["peers"]["skipped"]["peer:tokenspeed"]
    assert result.err.count(f"note: peer:tokenspeed is skipped: {reason}") == 1
    assert head["peers"]["timed"] == {} and "QuACK" in {each["name"] for each in head["peers"]["listed"]}
    assert ("is not installed" if asked == "--peers" else f"is not in {tmp_path}") in reason
    assert "--peers" in run("bench", "--help").out


def test_some_backend_runs_every_listed_shape_on_an_h200() -> None:
    problems = model_shapes.served_problems()
    assert len(tuning.group_by_kernel_shape(problems)) == len(problems)  # no kernel shape twice
    for each in problems:
        assert model_shapes.parse(each.layer) == each
        backends = [name for name in default_registry() if name.schemes and each.scheme.name in name.schemes]
        accepted = [name for name in backends if name.check(each, catalog.known_device("nvidia-h200")).reasons == ()]
        assert accepted, each.layer
    assert load({}).objective == "balanced"


def test_gpt_oss_is_cut_between_blocks_as_its_loader_does() -> None:
    layer = model_shapes.parse("mxfp4:gpt-oss-120b@tp4")
    assert (layer.intermediate_size, layer.ragged_intermediate_size) == (736, 2880)
    with pytest.raises(MeasurementError, match="720"):
        model_shapes.parse("mxfp8:gpt-oss-120b@tp4")


def test_the_shapes_are_those_of_the_models() -> None:
    """By their config.json, as far as these are here."""
    files = {"kimi-k2": "kimi-k2-thinking", "nemotron-3-nano": "nemotron-3-nano-30b-a3b"}
    found = 0
    for name in model_shapes.names():
        path = CONFIGS / f"{files.get(name, name)}.json"
        if not path.exists():
            continue
        found += 1
        config = json.loads(path.read_text())
        if "quantization_config" not in config or name == "deepseek-v3":
            config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
        quantization = QuantizationConfig(config["quantization_config"], "a test")
        copy = dataclasses.replace(read_checkpoint(path), quantization=quantization)
        (theirs,) = {each.key() for each in find_moe_layers(copy).problems}
        ours = model_shapes.make_problem("mxfp4" if name.startswith("gpt") else "mxfp8", name)
        for field in ("num_experts", "top_k", "hidden_size", "intermediate_size", "has_bias", "activation"):
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
    assert found >= 9


def test_deepseek_v4_flash_has_the_shape_of_the_list(tmp_path: Path) -> None:
    """Its experts are MXFP4 within an FP8 checkpoint."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 6, "num_hidden_layers": 4,
        "swiglu_limit": 10.0, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for tp in (2, 4):
        found = find_moe_layers(read_checkpoint(path), Ranks(tp)).problems
        assert {kernel_shape_of(each) for each in found} == {
            kernel_shape_of(model_shapes.parse(f"mxfp4:deepseek-v4-flash@tp{tp}"))
        }


# --- What measurements change in other commands -----------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A cache in which Marlin is fast for few tokens and our kernels are for many, on an H200."""
    store = Store(tmp_path)
    store.prepare()
    layer = model_shapes.parse("mxfp8:qwen3-30b-a3b")
    times = {"humming_mxfp8": (60.0, 60.0), "marlin_mxfp8": (30.0, 90.0), "hopper_mxfp8": (50.0, 40.0)}
    samples = [
        Sample(name, "16bit", count, "uniform", us, us, us, 9, 1e-3)
        for name, both in times.items()
        for count in (1, 4, 16, 64, 256, 1024, 4096)
        for us in [both[count > 64]]
    ]
    store.add(Environment.of(catalog.known_device("nvidia-h200")), kernel_shape_of(layer), samples)
    return tmp_path


MXFP8 = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b-mxfp8.json"


def test_explain_shows_what_was_measured(run: Run, measured: Path) -> None:
    where = ("--device", "nvidia-h200", "--set", f"cache={measured}")
    result = run("explain", MXFP8, *where)
    words = result.text
    assert "why measured: " in words and "less time than humming_mxfp8" in words and "the cache (NVIDIA H200" in words
    data = run("explain", MXFP8, *where, "--json").json["groups"][0]["decision"]
    assert data["why"] == "measured" and data["comparison"]["comparison_base"] == "humming_mxfp8"
    decode = run("explain", MXFP8, *where, "--set", "objective=decode", "--json").json["groups"][0]["decision"]
    assert decode["backend"] == "marlin_mxfp8"
    lost = decode["comparison"]["slower_at"]
    assert list(lost) == ["256", "1024", "4096"] and {each["backend"] for each in lost.values()} == {"hopper_mxfp8"}
    turns = run("explain", MXFP8, *where, "--set", "allow_second_layout=1")
    words = turns.text
    said = (
        "token ranges marlin_mxfp8 up to 128 tokens, hopper_mxfp8 beyond; a second copy of the weights: about 594 MiB"
    )
    assert said in words
    verdicts = (" accepted", " chosen")
    lines = [line for line in result.out.splitlines() if any(verdict in line for verdict in verdicts)]
    rows = {line.split()[0]: " ".join(line.split()[2:]) for line in lines}
    assert rows["humming_mxfp8"] == "1: 60.0, 16: 60.0, 256: 60.0, 4096: 60.0"
    assert rows["hopper_mxfp8"] == "1: 50.0, 16: 50.0, 256: 40.0, 4096: 40.0"
    assert rows["emulation"].startswith("by name only: ")
    assert "microseconds" not in run("explain", MXFP8, *where, "--set", "use_measurements=0").out
    assert "reasons, or microseconds by tokens" in result.text
    off = run("explain", MXFP8, *where, "--set", "use_measurements=0", "--json").json["groups"][0]["decision"]
    assert off["why"] == "static"


@pytest.mark.parametrize("source", ["cache", "profile"])
def test_what_failed_is_shown_without_moving_the_cursor(run: Run, tmp_path: Path, source: str) -> None:
    layer, here = model_shapes.parse("mxfp8:qwen3-30b-a3b"), Environment.of(catalog.known_device("nvidia-h200"))
    samples = [Sample("marlin_mxfp8", "16bit", 4, "uniform", failure="no \x1b[2Jroom\nERROR: none of our lines")]
    if source == "cache":
        Store(tmp_path).prepare()
        Store(tmp_path).add(here, kernel_shape_of(layer), samples)
    else:
        profile.write(profile.make(here, {kernel_shape_of(layer): samples}, {}), tmp_path / "p.json")
    where = tmp_path if source == "cache" else tmp_path / "p.json"
    result = run("explain", MXFP8, "--device", "nvidia-h200", "--set", f"{source}={where}")
    assert result.status == 0 and "\x1b" not in result.out + result.err
    assert "marlin_mxfp8: no [2Jroom ERROR: none of our lines" in result.text
    assert not [line for line in result.out.splitlines() if line.startswith("ERROR")]


def test_explain_says_why_measurements_of_another_card_are_not_used(run: Run, measured: Path) -> None:
    result = run("explain", MXFP8, "--device", "nvidia-h800", "--set", f"cache={measured}")
    words = result.text
    assert "measurements in the cache are of NVIDIA H200, not of NVIDIA H800" in words


def test_status_says_what_is_kept(run: Run, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(measured))
    assert run("status", "--json").json["cache"]["measurements"] == {f"NVIDIA H200, vLLM {NEWEST}": 21}
    assert f"21 times on NVIDIA H200, vLLM {NEWEST}" in run("status").text
    (measured / "measurements.sqlite").write_bytes(b"rubbish")
    result = run("status")
    assert result.status == 0 and "not used:" in result.out


def test_the_table_of_times_has_an_empty_cell_where_one_is_missing() -> None:
    found = _time_rows({"a": {"1": 5.4, "16": 7.0}, "b": {"1": 6.0, "4": 6.6, "16": 9.0}})
    assert found == (("us by tokens", "1", "4", "16"), [["a", "5", "", "7"], ["b", "6", "7", "9"]])
