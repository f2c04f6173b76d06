"""Tuning and benchmarks on two GPUs, and `tune` without `--gpus`: workers die, and the results are complete.

The GPUs are pretended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cases import problem, registry
from tests.lib.cli import Run
from tests.lib.fake_backends import (
    FAST,
    HERE,
    INT4_G32,
    LAYERS,
    MODULES,
    SLOW,
    SMALL,
    TOKEN_COUNTS,
    Slowed,
    chosen,
    plan,
)  # fmt: skip
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.cli import EXIT_INCOMPLETE, layer_arguments
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import environment, lookup
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, tuning, worker_pool
from vllm_moe_oracle.oracle import selection as oracle_module

pytestmark = pytest.mark.full


class Killing(Slowed):
    """Takes its process down once, in the middle of a layer."""

    def __init__(self, mark: str) -> None:
        super().__init__("killing", 3.0)
        self.mark = Path(mark)

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        if problem.scheme.name == "wna16" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_experts(tensors, problem, plan, builder)


class Crashing(Slowed):
    """Breaks the GPU's context at 8 tokens, every time."""

    def __init__(self) -> None:
        super().__init__("crashing", 4.0, fault="crash")


class Ending(Slowed):
    """Ends its process at 4 tokens, every time, as if its work were done."""

    def __init__(self) -> None:
        super().__init__("ending", 4.0, fault="exit")


def pretend() -> None:
    others = [Ending()] if "TEST_ENDING" in os.environ else [Killing(os.environ["TEST_MARK"]), Crashing()]
    found = registry([SLOW, FAST, *others, Emulation()])
    for module in MODULES:
        module.default_registry = lambda: found
    environment.kernel_sources_hash = lambda: "pretended"


def measure_one(task: Any, tell: worker_pool.SendProgress) -> Any:
    pretend()
    return REAL_MEASURE_ONE(task, tell)


def bench_one(task: Any, tell: worker_pool.SendProgress) -> Any:
    pretend()
    return REAL_BENCH_ONE(task, tell)


REAL_MEASURE_ONE, REAL_BENCH_ONE = tuning._tune_one, benchmarks._bench_one


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_MARK", str(tmp_path / "mark"))
    for module in MODULES:
        monkeypatch.setattr(module, "default_registry", module.default_registry)
    monkeypatch.setattr(environment, "kernel_sources_hash", environment.kernel_sources_hash)
    pretend()
    monkeypatch.setattr(tuning, "_tune_one", measure_one)
    monkeypatch.setattr(benchmarks, "_bench_one", bench_one)


TWO = [LAYERS["mxfp8"], problem(**SMALL, scheme=INT4_G32)]


def test_tuning_on_two_gpus_survives_what_its_processes_do_not(
    pretended: None,
    store: Store,
    tmp_path: Path,
) -> None:
    asked = chosen(tmp_path)
    steps: list[tuple[str, int, int]] = []
    outcomes = tuning.tune(TWO, HERE, asked, store, plan(gpus=("0", "1")), (), lambda *words: steps.append(words))
    assert (tmp_path / "mark").exists()  # one was killed while it converted
    assert steps[-1] == ("done", 2 * len(TOKEN_COUNTS), 2 * len(TOKEN_COUNTS))
    for layer in TWO:
        outcome = outcomes[kernel_shape_of(layer)]
        assert outcome.unfinished == ""
        timed = {(each.backend, each.tokens) for each in outcome.samples if not each.failure}
        assert timed >= {(name, count) for name in ("slow", "fast", "killing") for count in TOKEN_COUNTS}
        assert {each.backend for each in outcome.samples if each.failure} == {"crashing"}
        kept = {
            (each.backend, each.tokens, each.us) for _, found in store.samples(kernel_shape_of(layer)) for each in found
        }
        assert kept == {(each.backend, each.tokens, each.us) for each in outcome.samples}
        decision = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
        assert decision.why == "measured" and "crashing: broke the GPU's context" in decision.explanation
    again = tuning.tune(TWO, HERE, asked, store, plan(gpus=("0", "1")))
    assert [each.measured for each in again.values()] == [0, 0]


def tune_in(cache: str) -> None:
    """A command of its own, which knows nothing of others."""
    found = registry([SLOW, FAST, Emulation()])
    for module in MODULES:
        module.default_registry = lambda: found
    tuning.tune(TWO, HERE, chosen(Path(cache)), Store(Path(cache)), plan())


@pytest.mark.slow
def test_two_commands_tune_one_cache_and_one_is_killed(
    backends: Callable[..., None],
    store: Store,
    tmp_path: Path,
) -> None:
    backends(SLOW, FAST)
    asked = chosen(tmp_path)
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[2])]!r}\n"
    code += f"from tests.measuring import test_several_gpus\ntest_several_gpus.tune_in({str(tmp_path)!r})\n"
    logs = [(tmp_path / f"{number}.log").open("w+") for number in range(2)]
    commands = [subprocess.Popen([sys.executable, "-c", code], stderr=log) for log in logs]

    def kept() -> dict[tuple[str, int], Any]:
        return {
            (each.backend, each.tokens): each for _, found in store.samples(kernel_shape_of(TWO[0])) for each in found
        }

    before: dict[tuple[str, int], Any] = {}
    until = time.monotonic() + 400
    while commands[1].poll() is None and time.monotonic() < until:
        for layer in TWO:  # as a server that starts now
            oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
        if not before and len(kept()) >= 6:
            commands[0].kill()
            commands[0].wait()
            before = kept()
        time.sleep(0.05)
    for log in logs:
        log.seek(0)
    assert before and commands[0].returncode == -signal.SIGKILL, logs[0].read()[-2000:]
    assert commands[1].wait(10) == 0, logs[1].read()[-2000:]
    for log in logs:
        log.close()
    assert set(before) <= set(kept())
    for layer in TWO:
        timed = {(each.backend, each.tokens) for _, found in store.samples(kernel_shape_of(layer)) for each in found}
        assert timed == {(name, count) for name in ("slow", "fast") for count in TOKEN_COUNTS}
        assert (
            oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked)).backend
            == "fast"
        )


def test_a_budget_holds_for_all_gpus_together(pretended: None, store: Store, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    outcomes = tuning.tune(TWO, HERE, chosen(tmp_path), store, plan(gpus=("0", "1"), budget=0.5))
    assert all("spent" in each.unfinished and each.measured == 0 for each in outcomes.values())


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_budget_does_not_follow_a_clock_that_is_set(
    pretended: None, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    (tmp_path / "mark").touch()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)  # in this process; its workers' clocks are right
    budget = {-1: 300.0, 1: 0.5}[hours]
    options = benchmarks.BenchOptions((1,), replays=3, stock=(), gpus=("0",), budget=budget)
    assert len([*benchmarks.bench(TWO[:1], HERE, chosen(tmp_path), options)]) == (hours < 0)
    (outcome,) = tuning.tune(TWO[:1], HERE, chosen(tmp_path), store, plan(gpus=("0",), budget=budget)).values()
    assert bool(outcome.measured) == (outcome.unfinished == "") == (hours < 0)


def test_a_benchmark_on_two_gpus_has_every_record_and_names_what_died(pretended: None, tmp_path: Path) -> None:
    records = []
    with pytest.raises(MeasurementError, match=r"SIGKILL.*Measure their backends"):
        for record in benchmarks.bench(
            TWO, HERE, chosen(tmp_path), benchmarks.BenchOptions((1, 4), replays=3, stock=(), gpus=("0", "1"))
        ):
            records.append(record)
    assert [each.tokens for each in records] == [1, 4]
    assert {each.layer["scheme"] for each in records} == {"mxfp8"}
    again = [*benchmarks.bench(
        TWO, HERE, chosen(tmp_path), benchmarks.BenchOptions((1, 4), replays=3, stock=(), gpus=("0", "1"))
    )]  # fmt: skip
    assert len(again) == 4 and all(set(each.us) >= {"slow", "fast", "killing"} for each in again)


def test_measuring_again_does_without_what_crashes(pretended: None, store: Store, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()  # nothing is killed
    asked = chosen(tmp_path)
    tuning.tune(TWO[:1], HERE, asked, store, plan(gpus=("0", "1")))
    (outcome,) = tuning.tune(TWO[:1], HERE, asked, store, plan(gpus=("0", "1"), remeasure=True)).values()
    assert outcome.unfinished == "" and not outcome.no_backend
    timed = {(each.backend, each.tokens) for each in outcome.samples if not each.failure}
    assert timed == {(name, count) for name in ("slow", "fast", "killing") for count in TOKEN_COUNTS}
    assert {each.backend for each in outcome.samples if each.failure} == {"crashing"}


def test_without_gpus_what_ended_the_process_is_not_met_again(
    pretended: None,
    run: Run,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_ENDING", "1")
    pretend()
    monkeypatch.setattr(layer_arguments, "require_gpu", lambda elsewhere: HERE)
    monkeypatch.setattr(layer_arguments, "resolve_problems", lambda *arguments: {TWO[0]: {""}})
    options = ("--tokens", ",".join(map(str, TOKEN_COUNTS)), "--routing", "uniform", "--replays", 3, "--tiles", 0)
    chosen = ("--set", f"cache={tmp_path}", "--set", "objective=1:1,160:1")
    words = ("tune", "pretended", *options, *chosen, "--json")
    first = run(*words)
    assert first.status == EXIT_INCOMPLETE and "Traceback" not in first.err, first.err
    (group,) = first.json["groups"]
    assert group["failures"] == {"ending": "its process ended with status 3"} and group["unfinished"] == ""
    assert group["backend"] == "fast" and set(group["times"]) == {"slow", "fast"}
    kept = [each for _, samples in store.samples(kernel_shape_of(TWO[0])) for each in samples]
    assert {each.backend for each in kept if each.failure} == {"ending"}
    monkeypatch.setattr(worker_pool, "run_tasks", lambda *arguments: pytest.fail("measured again"))
    again = run(*words)
    assert again.status == EXIT_INCOMPLETE and again.json["groups"][0]["measured"] == 0
