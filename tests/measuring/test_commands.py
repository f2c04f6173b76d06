"""`tune` and `bench` from the command line to the cache, on a machine that is pretended."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cases import problem
from tests.lib.cli import Run
from tests.lib.configs import AUTO_ROUND, quantized
from tests.lib.fake_backends import FAST, HERE, LAYERS, SLOW, TOKEN_COUNTS, Slowed
from tests.lib.golden_decisions import device_of
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.cli import layer_arguments
from vllm_moe_oracle.cli.commands import bench as bench_command
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.measurements import model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import tuning, worker_pool


def run_tasks_here(function: Any, tasks: list[Any], *options: Any) -> Iterator[worker_pool.TaskEvent]:
    """`worker_pool.run_tasks` in this process, whose backends a worker would not know."""
    for index, task in enumerate(tasks):
        sent: list[Any] = []
        result = function(task, sent.append)
        yield from (worker_pool.TaskEvent(index, "progress", each) for each in sent)
        yield worker_pool.TaskEvent(index, "done", result)


@pytest.fixture
def pretended(
    own_time: None, backends: Callable[..., None], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Run:
    """Runs a command of the tool here, as if this were a GPU."""
    backends(SLOW, FAST, Slowed("wrong", 3.0, fault="numbers"))
    monkeypatch.setattr(worker_pool, "run_tasks", run_tasks_here)
    monkeypatch.setattr(layer_arguments, "require_gpu", lambda _: HERE)
    monkeypatch.setattr(bench_command, "default_registry", tuning.default_registry)
    monkeypatch.setattr(model_shapes, "parse", lambda word: dataclasses.replace(LAYERS["mxfp8"], layer=word))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MOE_ORACLE_OBJECTIVE", "1:1,160:1")
    return run


TOKENS = ",".join(map(str, TOKEN_COUNTS))


def test_tune_prints_keeps_exports_and_goes_on(pretended: Run, tmp_path: Path) -> None:
    words = ("tune", "mxfp8:a-layer", "--tokens", TOKENS, "--routing", "uniform", "--replays", "3")
    result = pretended(*words, "--export", tmp_path / "p.json")
    # One could not be measured.
    assert result.status == 4 and "wrong: MeasurementError: relative error" in result.text
    assert "backend fast" in result.text and "less time than slow" in result.text
    assert str(tmp_path / "cache") in result.out
    assert "starting 1 process\n" in result.err  # which a kernel may end
    assert f"[{len(TOKEN_COUNTS)}/{len(TOKEN_COUNTS)}] done" in result.err and result.err.count("] done") == 1
    (entry,) = profile.read(tmp_path / "p.json").entries
    assert set(entry.backends) == {"slow", "fast", "wrong"}
    result = pretended(*words, "--json")
    (group,) = result.json["groups"]
    assert result.status == 4 and group["measured"] == 0 and group["backend"] == "fast"
    assert set(group["times"]) == {"slow", "fast"}
    shutil.rmtree(tmp_path / "cache")
    result = pretended(*words, "--json", "--profile", tmp_path / "p.json", "--set", "disable=wrong")
    assert result.json["groups"][0]["measured"] == 0


def test_bench_prints_a_table_and_writes_records(pretended: Run, tmp_path: Path) -> None:
    options = ("--tokens", "1,16", "--replays", "3", "--stock", "none", "--backend", "slow,fast")
    words = ("bench", "mxfp8:a-layer", *options)
    result = pretended(*words, "--jsonl", tmp_path / "b.jsonl")
    assert result.status == 0, result.err
    assert "mxfp8:a-layer on NVIDIA Pretended" in result.out and "fast" in result.out
    conditions, first, second = map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines())
    assert conditions["conditions"]["command"].startswith("vllm-moe-oracle bench mxfp8:a-layer --tokens 1,16")
    assert (first["tokens"], second["tokens"]) == (1, 16) and set(first["us"]) == {"slow", "fast"}
    lines = pretended(*words, "--json").out.splitlines()
    assert [*map(json.loads, lines)][1]["layer"]["name"] == "mxfp8:a-layer"
    # The same figures as a profile, and in the cache.
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"layer": {"na')  # a run that was ended
    result = pretended("tune", "--import", tmp_path / "b.jsonl", "--export", tmp_path / "p.json")
    assert result.status == 0 and "4 measurements of 1 layers, NVIDIA Pretended" in result.out, result.err
    assert "line 4 is unfinished and left out" in result.err
    made = profile.read(tmp_path / "p.json")
    assert made.environment == Environment.of(HERE) and made.conditions["command"].startswith("vllm-moe-oracle bench")
    found = {(each.backend, each.tokens): each for each in made.samples(kernel_shape_of(LAYERS["mxfp8"]))}
    assert found["fast", 16].us == second["us"]["fast"] and found["fast", 16].replays == 3
    assert [found["slow", 1].low, found["slow", 1].high] == first["quartiles"]["slow"]
    assert pretended("tune", "--import", tmp_path / "b.jsonl").status == 0
    (kept,) = Store(tmp_path / "cache").samples(kernel_shape_of(LAYERS["mxfp8"]))
    assert kept[0] == Environment.of(HERE) and len(kept[1]) == 4
    result = pretended(*words[:-1], "wrong", "--json")
    assert result.status == 4 and "warning: mxfp8:a-layer: wrong" in result.err


@pytest.mark.full
def test_what_serving_would_run_invariant_is_measured_so(
    pretended: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(Slowed, "capabilities", dataclasses.replace(Emulation.capabilities, batch_invariant=True))
    words = ("bench", "mxfp8:a-layer", "--tokens", "1", "--replays", "3", "--stock", "none", "--backend", "fast")
    result = pretended(*words, "--json")
    shape = json.loads(result.out.splitlines()[1])["kernel_shape"]
    assert result.status == 0 and shape["invariant"] is True
    options = ("--tokens", TOKENS, "--routing", "uniform", "--replays", "3", "--json")
    result = pretended("tune", "mxfp8:a-layer", *options)
    assert result.json["groups"][0]["kernel_shape"].endswith("invariant"), result.err
    invariant = dataclasses.replace(LAYERS["mxfp8"], batch_invariant=True)
    kept = Store(tmp_path / "cache").samples(kernel_shape_of(invariant))
    assert len(kept) == 1 and len(kept[0][1]) == 3 * len(TOKEN_COUNTS), (result.out, result.err)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    result = pretended(*words)
    assert result.status == 2 and "VLLM_BATCH_INVARIANT: 'yes' is not an integer" in result.err


@pytest.fixture
def tuned(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, list[str]]]:
    """Runs `tune` as if on a data-center Blackwell GPU for some layers; its result, and the layers that it measures."""
    measured: list[str] = []

    def tune(problems: list[Problem], *rest: Any) -> dict[Any, tuning.TuneOutcome]:
        measured.extend(each.layer for each in problems)
        return {kernel_shape_of(each): tuning.TuneOutcome(each) for each in problems}

    def use(layers: list[Problem], *words: Any) -> tuple[Any, list[str]]:
        measured.clear()
        monkeypatch.setattr(layer_arguments, "resolve_problems", lambda *arguments: {each: {""} for each in layers})
        return run("tune", "a/model", *words, "--set", f"cache={tmp_path}"), measured

    monkeypatch.setattr(layer_arguments, "require_gpu", lambda _: device_of(100))
    monkeypatch.setattr(tuning, "tune", tune)
    return use


def test_what_is_left_to_stock_is_not_tuned(tuned: Callable[..., tuple[Any, list[str]]], tmp_path: Path) -> None:
    """Backends that run by name only are no choice of the server's."""
    scheme = Scheme("mxfp4", 4, 32, "compressed-tensors", activations="mxfp4")
    declared = [problem(scheme=scheme, layer=f"model.layers.{index}.mlp.experts") for index in (1, 2)]
    words = "note: model.layers.1-2.mlp.experts: not measured, left to stock vLLM, which runs CutlassExpertsMxfp4"
    result, measured = tuned(declared)
    assert result.status == 0 and measured == [] and words in result.err and result.err.count("note") == 1
    result, measured = tuned(declared, "--export", tmp_path / "p.json", "--json")
    assert result.status == 0 and result.json["groups"] == [] and words in result.err
    usual = problem(layer="model.layers.3.mlp.experts")
    result, measured = tuned([*declared, usual])
    assert result.status == 0 and measured == [usual.layer] and words in result.err
    named = ("--set", "backend=marlin_mxfp4", "--set", "allow_activation_quantization=1")
    result, measured = tuned(declared, *named)
    assert result.status == 0 and measured == [each.layer for each in declared] and "stock" not in result.err


def test_named_models_are_tuned_before_the_shapes(tuned: Callable[..., tuple[Any, list[str]]]) -> None:
    """A budget may end before all of the shapes are measured."""
    shapes = [each.layer for each in model_shapes.served_problems()]
    own = problem(layer="model.layers.3.mlp.experts")
    _, measured = tuned([own, model_shapes.served_problems()[-1]], "--shapes")
    assert measured[:2] == [own.layer, shapes[-1]]
    assert len(measured) > 3 and measured[2:] == [each for each in shapes[:-1] if each in measured]


@pytest.mark.usefixtures("tuned")
def test_a_layer_of_two_models_is_left_to_stock_in_any_order(run: Run, tmp_path: Path) -> None:
    """vLLM reads AutoRound's integers by other rules than GPTQ's: here stock vLLM is known not to run the latter."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    models = [tmp_path / "gptq.json", tmp_path / "auto-round.json"]
    for path, quantization in zip(models, (gptq, AUTO_ROUND), strict=True):
        path.write_text(json.dumps(quantized(hidden_size=200, quantization_config=quantization)))
    resolved = layer_arguments.resolve_problems([str(each) for each in models], Ranks())
    assert {*map(frozenset, resolved.values())} == {frozenset(("gptq", "inc"))}
    cache = ("--set", f"cache={tmp_path}")
    one, other = (run("tune", *each, *cache) for each in (models, models[::-1]))
    assert (one.status, one.out, one.err) == (other.status, other.out, other.err)
    assert "not measured, left to stock vLLM, if stock vLLM can run it" in one.err


def test_tune_fails_where_no_one_runs_a_layer(tuned: Callable[..., tuple[Any, list[str]]]) -> None:
    layer = problem(hidden_size=2000)
    result, measured = tuned([layer])
    assert result.status == 4 and measured == [layer.layer] and "left to stock" not in result.err
