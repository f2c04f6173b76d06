"""Processes that work on tasks: one that dies takes nothing with it, and none is left behind."""

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

pytest.importorskip("vllm", reason="its processes build layers with vLLM")

from cases import problem, registry
from test_measuring import (  # noqa: F401
    BUCKETS,
    FAST,
    HERE,
    INT4_G32,
    LAYERS,
    SLOW,
    SMALL,
    Slowed,
    backends,
    chosen,
    plan,
    store,
)  # fmt: skip

from vllm_moe_oracle import device, settings
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import MeasurementError, SettingError
from vllm_moe_oracle.measure import benching, crew, engine, environment, lookup, tuning
from vllm_moe_oracle.measure.cells import cell_of
from vllm_moe_oracle.measure.store import Store
from vllm_moe_oracle.oracle import oracle as oracle_module


def work(task: Any, tell: crew.Tell) -> Any:
    """What the tests' tasks do, by their first word."""
    word, *rest = task
    if word == "where":
        print("a library's chatter")
        tell("here")
        return os.environ.get(settings.VISIBLE)
    if word == "die once" and not Path(rest[0]).exists():
        Path(rest[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        os._exit(3)
    if word == "break":
        raise engine.BrokenContext("own_mxfp8", "CUDA error")
    if word == "refuse":
        raise MeasurementError("the disk is full", "Make room", "/a/file")
    if word == "fail":
        raise ZeroDivisionError("a defect")
    if word == "sleep":
        Path(rest[0]).write_text(str(os.getpid()))
        time.sleep(60)
    return word


def ends(tasks: list[Any], places: list[str | None], attempts: int = 1) -> dict[int, tuple[str, Any]]:
    news = [each for each in crew.run(work, tasks, places, attempts) if each.kind != "said"]
    assert sorted(each.task for each in news) == [*range(len(tasks))]  # each ends once
    return {each.task: (each.kind, each.value) for each in news}


def test_each_process_sees_its_own_gpu_and_all_tasks_are_done(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.environ.get(settings.VISIBLE)
    news = [*crew.run(work, [("where",)] * 5, ["7", "GPU-abc"])]
    assert os.environ.get(settings.VISIBLE) == before
    assert {each.value for each in news if each.kind == "done"} == {"7", "GPU-abc"}
    assert [each.value for each in news if each.kind == "said"] == ["here"] * 5
    written = capfd.readouterr()
    assert written.out == "" and "chatter" in written.err


def test_a_process_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    tasks = [("die once", str(tmp_path / "died")), ("die",), ("fine",), ("exit",), ("break",), ("fine",)]
    found = ends(tasks, [None, None], attempts=2)
    assert found[0] == ("done", "die once") and found[2] == found[5] == ("done", "fine")
    assert found[1] == ("lost", "its process was ended by SIGKILL")
    assert found[3] == ("lost", "its process ended with status 3")
    assert found[4][0] == "lost" and "CUDA error" in found[4][1]


def test_errors_come_through_and_nobody_goes_on(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(MeasurementError, match=r"^/a/file: the disk is full. Make room$"):
        ends([("sleep", str(pid)), ("refuse",)], [None, None])
    if pid.exists() and pid.read_text():  # it may not have begun
        assert gone(int(pid.read_text()))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a defect"):
        ends([("fail",)], [None])


def gone(process: int, seconds: float = 0.0) -> bool:
    """Whether there is no such process, or only its remains."""
    until = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def test_processes_end_with_the_one_that_began_them(tmp_path: Path) -> None:
    """A kill -9 of the command: no GPU is kept busy for it, also in the middle of a task."""
    pid = tmp_path / "pid"
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
    code += "import test_crew\nif __name__ == '__main__':\n"
    code += f"    test_crew.ends([('where',), ('where',), ('sleep', {str(pid)!r})], [None, None])\n"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until and parent.poll() is None:
        time.sleep(0.2)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    assert pid.read_text() in children
    assert all(gone(int(each), 20) for each in children)


def test_gpus_are_named_as_this_process_sees_them() -> None:
    assert device.gpus("all", "4, GPU-abc,6") == ("4", "GPU-abc", "6")
    assert device.gpus("2,0", "4, GPU-abc,6") == ("6", "4")
    for wrong in ("3", "0,0", "x", "-1", "0;1"):
        with pytest.raises(SettingError, match="names no GPUs here; there are 3"):
            device.gpus(wrong, "4, GPU-abc,6")


# --- Tuning and benchmarks on several GPUs, which are pretended -------------------------------------------------------


class Killing(Slowed):
    """Takes its process down once, in the middle of a layer."""

    def __init__(self, mark: str) -> None:
        super().__init__("killing", 3.0)
        self.mark = Path(mark)

    def experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        if problem.scheme.name == "wna16" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().experts(tensors, problem, plan, builder)


class Crashing(Slowed):
    """Breaks the GPU's context at 8 tokens, every time."""

    def __init__(self) -> None:
        super().__init__("crashing", 4.0, fault="crash")


def pretend() -> None:
    found = registry([SLOW, FAST, Killing(os.environ["TEST_MARK"]), Crashing(), Emulation()])
    for module in (oracle_module, tuning, benching, lookup):
        module.default_registry = lambda: found
    environment.kernel_sources = lambda: "pretended"


def measure_one(task: Any, tell: crew.Tell) -> Any:
    pretend()
    return REAL_MEASURE_ONE(task, tell)


def bench_one(task: Any, tell: crew.Tell) -> Any:
    pretend()
    return REAL_BENCH_ONE(task, tell)


REAL_MEASURE_ONE, REAL_BENCH_ONE = tuning._measure_one, benching._bench_one


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_MARK", str(tmp_path / "mark"))
    for module in (oracle_module, tuning, benching, lookup):
        monkeypatch.setattr(module, "default_registry", module.default_registry)
    monkeypatch.setattr(environment, "kernel_sources", environment.kernel_sources)
    pretend()
    monkeypatch.setattr(tuning, "_measure_one", measure_one)
    monkeypatch.setattr(benching, "_bench_one", bench_one)


TWO = [LAYERS["mxfp8"], problem(**SMALL, scheme=INT4_G32)]


def test_tuning_on_two_gpus_survives_what_its_processes_do_not(
    pretended: None,
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked = chosen(tmp_path)
    steps: list[tuple[str, int, int]] = []
    outcomes = tuning.tune(TWO, HERE, asked, store, plan(gpus=("0", "1")), (), lambda *words: steps.append(words))
    assert (tmp_path / "mark").exists()  # one was killed while it converted
    assert steps[-1] == ("done", 2 * len(BUCKETS), 2 * len(BUCKETS))
    for layer in TWO:
        outcome = outcomes[cell_of(layer)]
        assert outcome.unfinished == ""
        timed = {(each.backend, each.tokens) for each in outcome.samples if not each.failure}
        assert timed >= {(name, count) for name in ("slow", "fast", "killing") for count in BUCKETS}
        assert {each.backend for each in outcome.samples if each.failure} == {"crashing"}
        kept = {(each.backend, each.tokens, each.us) for _, found in store.samples(cell_of(layer)) for each in found}
        assert kept == {(each.backend, each.tokens, each.us) for each in outcome.samples}
        decision = oracle_module.decide(layer, HERE, asked, evidence=lookup.evidence(layer, HERE, asked))
        assert decision.why == "measured" and "crashing: broke the GPU's context" in decision.because
    again = tuning.tune(TWO, HERE, asked, store, plan(gpus=("0", "1")))
    assert [each.measured for each in again.values()] == [0, 0]


def tune_in(cache: str) -> None:
    """A command of its own, which knows nothing of others."""
    found = registry([SLOW, FAST, Emulation()])
    for module in (oracle_module, tuning, benching, lookup):
        module.default_registry = lambda: found
    tuning.tune(TWO, HERE, chosen(Path(cache)), Store(Path(cache)), plan())


@pytest.mark.slow
def test_two_commands_tune_one_cache_while_a_server_reads_it_and_one_is_killed(
    backends: Callable[..., None],  # noqa: F811
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    backends(SLOW, FAST)
    asked = chosen(tmp_path)
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
    code += f"import test_crew\ntest_crew.tune_in({str(tmp_path)!r})\n"
    logs = [(tmp_path / f"{number}.log").open("w+") for number in range(2)]
    commands = [subprocess.Popen([sys.executable, "-c", code], stderr=log) for log in logs]

    def kept() -> dict[tuple[str, int], Any]:
        return {(each.backend, each.tokens): each for _, found in store.samples(cell_of(TWO[0])) for each in found}

    before: dict[tuple[str, int], Any] = {}
    until = time.monotonic() + 400
    while commands[1].poll() is None and time.monotonic() < until:
        for layer in TWO:  # as a server that starts now
            oracle_module.decide(layer, HERE, asked, evidence=lookup.evidence(layer, HERE, asked))
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
        timed = {(each.backend, each.tokens) for _, found in store.samples(cell_of(layer)) for each in found}
        assert timed == {(name, count) for name in ("slow", "fast") for count in BUCKETS}
        assert oracle_module.decide(layer, HERE, asked, evidence=lookup.evidence(layer, HERE, asked)).backend == "fast"


def test_a_budget_holds_for_all_gpus_together(pretended: None, store: Store, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mark").touch()
    outcomes = tuning.tune(TWO, HERE, chosen(tmp_path), store, plan(gpus=("0", "1"), budget=0.5))
    assert all("spent" in each.unfinished and each.measured == 0 for each in outcomes.values())


def test_a_benchmark_on_two_gpus_has_every_record_and_names_what_died(pretended: None, tmp_path: Path) -> None:
    records = []
    with pytest.raises(MeasurementError, match=r"SIGKILL.*Time them alone"):
        for record in benching.bench(
            TWO, HERE, chosen(tmp_path), benching.Plan((1, 4), replays=3, stock=(), gpus=("0", "1"))
        ):
            records.append(record)
    assert [each["tokens"] for each in records] == [1, 4]
    assert {each["layer"]["scheme"] for each in records} == {"mxfp8"}
    again = [*benching.bench(
        TWO, HERE, chosen(tmp_path), benching.Plan((1, 4), replays=3, stock=(), gpus=("0", "1"))
    )]  # fmt: skip
    assert len(again) == 4 and all(set(each["us"]) >= {"slow", "fast", "killing"} for each in again)
