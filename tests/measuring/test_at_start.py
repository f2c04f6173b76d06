"""Measuring while a server starts, with backends that crash and hang: it ends in time, and the next start goes on.

Layers are measured as in a server, in a process beside this one, on the CPU. Each such process imports vLLM.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.lib.cases import problem, registry
from tests.lib.fake_backends import FAST, LAYERS, MODULES, SLOW, SMALL, Slowed
from tests.lib.fresh_process import has_ended
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.objectives import parse_objective
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import bench_records
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import FILE_NAME, Store
from vllm_moe_oracle.measuring import at_start, precompile, tuning
from vllm_moe_oracle.methods import backend_selection, first_start, load_caches, measure_hook, rank_sync
from vllm_moe_oracle.oracle import measured_choice, selection

LAYER = LAYERS["mxfp8"]
COUNTS = (1, 4, 16, 64)
BACKENDS = {
    "slow": SLOW,
    "fast": FAST,
    "exiting": Slowed("exiting", 0.5, fault="exit"),
    "hanging": Slowed("hanging", 0.6, fault="hang"),
    "stuck": Slowed("stuck", 0.7, lambda tokens: 1e6),
    "compiled": Slowed("compiled", 0.8, lambda tokens: compile_once(15)),
}


def compile_once(seconds: float) -> float:
    """Seconds that the first call takes on this machine, by a file that is kept."""
    done = Path(os.environ["TEST_COMPILED"])
    return 0.0 if done.exists() else (time.sleep(seconds), done.touch(), 0.0)[-1]


BUDGET = 120
REAL_TUNE_ONE = tuning._tune_one
REAL_COMPILE = precompile._run_compile_job


def use_named() -> None:
    """Makes the backends that a variable names the only ones of this process."""
    found = registry([*(BACKENDS[name] for name in os.environ["TEST_BACKENDS"].split(",")), Emulation()])
    for module in MODULES:
        module.default_registry = lambda: found


def tune_one(task: Any, send: Any) -> Any:
    use_named()
    if mark := os.environ.get("TEST_MARK"):  # killed in its first attempt, once it has stored something
        return REAL_TUNE_ONE(task, KillAfter(mark, send))
    return REAL_TUNE_ONE(task, send)


def compile_job(job: Any, send: Any) -> Any:
    use_named()
    return REAL_COMPILE(job, send)


class KillAfter:
    """Sends on, and kills its process at the third step, once."""

    def __init__(self, mark: str, send: Callable[[Any], None]) -> None:
        self.mark, self.send = Path(mark), send

    def __call__(self, value: Any) -> None:
        self.send(value)
        if value.done == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these the only backends, here and in processes that measure."""

    def use(*names: str) -> None:
        monkeypatch.setenv("TEST_BACKENDS", ",".join(names))
        for module in MODULES:
            monkeypatch.setattr(module, "default_registry", module.default_registry)
        monkeypatch.setattr(tuning, "_tune_one", tune_one)
        use_named()

    return use


@pytest.fixture(autouse=True)
def _hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    of_the_plugin = measure_hook.current_measure()
    measure_hook.set_measure(at_start.measure)
    yield
    measure_hook.set_measure(of_the_plugin)
    first_start.forget_start()
    load_caches.end_load()


def asked(folder: Path, budget: float = BUDGET, **assignments: str) -> settings.Settings:
    values = {"objective": "1:1,64:1", "cache": str(folder), "measure_at_start": str(budget), **assignments}
    return settings.load({}, assignments=values)


def start(chosen: settings.Settings, layers: list[Problem] | None = None) -> list[Decision]:
    """What a new server decides, as its methods do."""
    first_start.forget_start()
    load_caches.end_load()
    found = []
    for layer in layers or [LAYER]:

        def decide(layer: Problem = layer) -> Decision:
            measurements = backend_selection.measurements_for(layer, chosen)
            return selection.decide(layer, detect.detect(), chosen, measurements=measurements)

        first_start.measure_if_undecided(rank_sync.RankGroup(), layer, chosen, decide)
        found.append(decide())
    first_start.log_summary({each.problem.layer: each for each in found}, lambda decision: "")
    return found


def kept(folder: Path, layer: Problem = LAYER) -> dict[tuple[str, int], str]:
    """Failures in the cache, "" for times, by backend and number of tokens."""
    found = Store(folder).samples(kernel_shape_of(layer))
    return {(each.backend, each.tokens): each.failure for _, samples in found for each in samples}


def complete(*names: str) -> dict[tuple[str, int], str]:
    return {(name, count): "" for name in names for count in COUNTS}


def refuse_to_measure(*arguments: Any) -> Any:
    pytest.fail("measured again")  # no Exception, which a start survives


# --- What is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "counts"),
    [
        ("balanced", (1, 4, 16, 64, 256, 1024, 4096)),
        ("decode", (1, 4, 16, 64, 256)),
        ("prefill", (256, 1024, 4096)),
        ("7:1", (4, 16)),
        ("1:1", (1,)),
        ("1:1,16000:1", (1, 4, 16, 64, 256, 1024, 4096)),
        ("1:1,20000:1", (1, 4, 16, 64, 256, 1024, 4096, 16384)),
    ],
)
def test_the_numbers_of_tokens_suffice_for_a_choice(objective: str, counts: tuple[int, ...]) -> None:
    found = at_start.token_counts(parse_objective(objective))
    assert found == counts
    curve = measured_choice.LatencyCurve({"uniform": dict.fromkeys(found, 1.0)})
    assert curve.coverage_gap(parse_objective(objective)) == ""


def test_memory_that_does_not_suffice_and_other_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    big = problem(experts=256, hidden_size=7168, intermediate_size=2048)
    needed = at_start.required_bytes(big, 3, 4096)
    weights = 256 * 3 * 7168 * 2048  # a byte each, without scales
    assert 3 * weights < needed < 5 * weights
    small = at_start.required_bytes(problem(**SMALL), 2, 64)
    assert at_start.CONTEXT_BYTES < small < at_start.CONTEXT_BYTES + (1 << 30)
    monkeypatch.setattr(detect, "gpu_memory", lambda: detect.GpuMemory(needed - 1, 1 << 30))
    with pytest.raises(MeasurementError, match=r"need \d+\.\d GiB of device memory, of which \d+\.\d GiB are free"):
        at_start._check_memory(needed)
    monkeypatch.setattr(detect, "gpu_memory", lambda: detect.GpuMemory(needed, 5 << 30))
    with pytest.raises(MeasurementError, match=r"another process uses the GPU: 5\.0 GiB are in use.*End it"):
        at_start._check_memory(needed)
    monkeypatch.setattr(detect, "gpu_memory", lambda: detect.GpuMemory(needed, 1 << 30))
    at_start._check_memory(needed)


# --- Starts -----------------------------------------------------------------------------------------------------------


def test_the_first_start_measures_and_the_second_knows(
    only: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only("slow", "fast")
    chosen = asked(tmp_path)
    with caplog.at_level(logging.INFO, "vllm.moe_oracle"):
        alike = dataclasses.replace(LAYER, layer="model.layers.1.mlp.experts")
        first = start(chosen, [LAYER, alike])
    assert [(each.backend, each.why) for each in first] == [("fast", "measured")] * 2
    assert kept(tmp_path) == complete("slow", "fast")
    said = [each.getMessage() for each in caplog.records]
    steps = [each for each in said if "moe_oracle: measuring, " in each]
    assert "0 of 4, 0 of 120 s: starting 1 process" in steps[0]
    assert any("3 of 4" in each and f"of {BUDGET} s: model.layers.0.mlp.experts: 64 tokens" in each for each in steps)
    assert not any("model.layers.1" in each for each in said)  # the same shape
    assert "slow, fast" in said[0] and "up to 120 s" in said[0]
    assert "8 times in" in said[-1] and "fast (measured, in place of slow)" in said[-1]
    assert f"Kept in {tmp_path / FILE_NAME}" in said[-1]
    assert "vllm-moe-oracle tune MODEL --export FILE" in said[-1]
    assert "MOE_ORACLE_MEASURE_AT_START=0" in said[-1]
    measure_hook.set_measure(refuse_to_measure)
    assert [(each.backend, each.why) for each in start(chosen)] == [("fast", "measured")]


@pytest.mark.full
def test_crashing_and_hanging_backends_are_recorded_and_the_server_starts(
    only: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only("exiting", "hanging", "slow", "fast")
    chosen = asked(tmp_path, 90)
    begin = time.monotonic()
    (decision,) = start(chosen)
    assert time.monotonic() - begin < 100
    assert (decision.backend, decision.why) == ("fast", "measured")
    assert "exiting" in decision.explanation and "hanging" in decision.explanation
    failures = {name: why for (name, _), why in kept(tmp_path).items() if why}
    assert failures == {
        "exiting": "its process ended with status 3",
        "hanging": "it did not come back within 30 s",
    }
    assert {key for key, why in kept(tmp_path).items() if not why} >= {*complete("slow", "fast")}
    found = [each for _, samples in Store(tmp_path).samples(kernel_shape_of(LAYER)) for each in samples]
    assert {(each.backend, each.silent_seconds) for each in found if each.failure} == {("exiting", 0), ("hanging", 30)}
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any(
        "hanging could not be measured: it did not come back within 30 s. It may only compile slowly" in each
        for each in said
    )
    assert any("exiting could not be measured and is left out" in each for each in said)
    (decision,) = start(chosen)  # it might have been a compiler
    assert (decision.backend, decision.why) == ("fast", "measured")
    failures["hanging"] = "it did not come back within 60 s"
    assert {name: why for (name, _), why in kept(tmp_path).items() if why} == failures
    measure_hook.set_measure(refuse_to_measure)
    assert start(chosen)[0] == decision


@pytest.mark.parametrize(("gpu", "waited", "share"), [("", 30.0, 2 / 3), ("", 0.0, 1 / 3), ("another", 30.0, 1 / 3)])
def test_a_backend_that_was_killed_here_gets_more_time(
    only: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    waited: float,
    share: float,
) -> None:
    only("slow", "fast")
    here = Environment.of(detect.detect())
    there = msgspec.structs.replace(here, gpu=gpu or here.gpu)
    store = Store(tmp_path)
    store.prepare()
    sample = Sample("slow", "mxfp8", 1, "uniform", failure="in whatever words", silent_seconds=waited)
    store.add(there, kernel_shape_of(LAYER), [sample])
    asked_for: list[tuning.TuneOptions] = []

    def tune(layers: Any, device: Any, chosen: Any, store: Any, options: tuning.TuneOptions, *more: Any) -> Any:
        asked_for.append(options)
        return {kernel_shape_of(LAYER): tuning.TuneOutcome(LAYER)}

    monkeypatch.setattr(tuning, "tune", tune)
    at_start.measure(LAYER, ("slow", "fast"), asked(tmp_path, 90), 90.0, lambda *said: None)
    assert asked_for[0].silence == pytest.approx(share * 90)
    assert asked_for[0].compile_share == at_start.COMPILE_SHARES[share == 2 / 3]
    asked_for.clear()
    at_start.measure(LAYER, ("fast",), asked(tmp_path, 90), 90.0, lambda *said: None)  # it is disabled
    assert asked_for[0].silence == pytest.approx(30)


@pytest.mark.full
def test_slow_compilers_run_beside_each_other_and_a_hang_is_left_out(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With limits that kill a compiler where a layer is measured: it is not there that it compiles."""
    only("stuck", "compiled", "fast")
    monkeypatch.setenv("TEST_COMPILED", str(tmp_path / "compiled"))
    monkeypatch.setattr(precompile, "_run_compile_job", compile_job)
    monkeypatch.setattr(at_start, "compile_processes", lambda backends, layers: backends)
    monkeypatch.setattr(bench_records, "_SILENCE_SHARES", (5 / 150, 10 / 150))
    monkeypatch.setattr(bench_records, "_MIN_SILENCE", 1.0)
    monkeypatch.setattr(at_start, "COMPILE_SHARES", (0.6, 0.7))
    chosen = asked(tmp_path, 150)
    with caplog.at_level(logging.INFO, "vllm.moe_oracle"):
        start(chosen)
    times = {key for key, why in kept(tmp_path).items() if not why}
    assert times == {*complete("compiled", "fast")}
    found = [each for _, samples in Store(tmp_path).samples(kernel_shape_of(LAYER)) for each in samples]
    assert {(each.backend, each.silent_seconds) for each in found if each.failure} == {("stuck", 5.0)}
    said = [each.getMessage() for each in caplog.records]
    assert any("compiling in 3 processes" in each for each in said)
    assert any("stuck could not be measured: it did not come back within" in each for each in said)
    caplog.clear()
    start(chosen)  # with more time, which it does not use
    found = [each for _, samples in Store(tmp_path).samples(kernel_shape_of(LAYER)) for each in samples]
    assert {(each.backend, each.silent_seconds) for each in found if each.failure} == {("stuck", 10.0)}
    measure_hook.set_measure(refuse_to_measure)
    assert start(chosen)[0].backend != "stuck"


def test_processes_that_compile_are_few_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        (2, 99, 3, 0),
        (4, 99, 3, 2),
        (16, 99, 3, 6),
        (16, 99, 6, 8),
        (192, 99, 6, 12),
        (192, 25, 6, 4),
        (64, 8, 3, 0),
    )
    for cores, gib, backends, expected in cases:
        monkeypatch.setattr(detect, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(detect, "host_memory_gib", lambda gib=gib: gib)
        assert at_start.compile_processes(backends, 99) == expected
        assert at_start.compile_processes(backends, 1) == at_start.compile_processes(backends, 0) == 0
        assert at_start.compile_processes(backends, 3) == min(expected, 3)


@pytest.mark.full
def test_a_hang_at_the_end_of_the_budget_decides_nothing(only: Callable[..., None], tmp_path: Path) -> None:
    only("hanging", "fast")
    chosen = asked(tmp_path, 1000)
    begin = time.monotonic()
    found = at_start.measure(LAYER, ("hanging", "fast"), chosen, 30.0, lambda *said: None)
    assert found.unfinished == "the time was spent" and not found.failures
    assert time.monotonic() - begin < 50
    assert {count for _, count in kept(tmp_path)} <= {1}  # nobody is timed alone
    measure_hook.set_measure(None)
    (decision,) = start(chosen)
    assert (decision.backend, decision.why) == ("hanging", "static")


@pytest.mark.full
def test_a_killed_process_is_replaced_and_blames_nobody(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("slow", "fast")
    monkeypatch.setenv("TEST_MARK", str(tmp_path / "mark"))
    (decision,) = start(asked(tmp_path))
    assert (tmp_path / "mark").exists()
    assert (decision.backend, decision.why) == ("fast", "measured")
    assert kept(tmp_path) == complete("slow", "fast")


@pytest.mark.full
def test_an_unfinished_measurement_decides_nothing_and_is_continued(
    only: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only("slow", "fast")
    (decision,) = start(asked(tmp_path, 1))
    assert (decision.backend, decision.why) == ("slow", "static")
    assert any("not measured completely" in each.getMessage() for each in caplog.records)
    assert kept(tmp_path) == {}
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("fast", "measured")


@pytest.mark.full
def test_where_only_failures_are_left_the_next_start_measures_nothing(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only("slow", "exiting")
    monkeypatch.setattr(BACKENDS["exiting"], "rank", 5.0)
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("slow", "static") and "exiting" in decision.explanation
    caplog.clear()
    caplog.set_level(logging.INFO, "vllm.moe_oracle")
    monkeypatch.setattr(tuning.worker_pool, "run_tasks", refuse_to_measure)
    assert start(asked(tmp_path)) == [decision] and not caplog.messages


# --- The cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_cache_that_cannot_be_written_measures_nothing(
    only: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    only("slow", "fast")
    folder = tmp_path / "cache"
    if place == "a file":
        folder.write_text("")
    elif os.geteuid() == 0:
        folder = Path("/proc/moe-oracle")  # root writes into every folder of a disk
    else:
        folder.mkdir(mode=0o500)
    (decision,) = start(asked(folder))
    assert (decision.backend, decision.why) == ("slow", "static")
    (said,) = (each.getMessage() for each in caplog.records if "is not measured" in each.getMessage())
    assert "Set MOE_ORACLE_CACHE to a writable directory" in said and "\n" not in said


def full_disk_task(task: Any, send: Any) -> Any:
    """Its process cannot write more than a few KiB into a file, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return tune_one(task, send)


@pytest.mark.full
def test_a_full_disk_ends_measuring_and_not_the_start(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only("slow", "fast")
    monkeypatch.setattr(tuning, "_tune_one", full_disk_task)
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("slow", "static")
    (said,) = (each.getMessage() for each in caplog.records if "is not measured" in each.getMessage())
    assert "cannot be written to" in said
    assert kept(tmp_path) == {}  # and can be read
    monkeypatch.setattr(tuning, "_tune_one", tune_one)
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("fast", "measured")


# --- Servers ----------------------------------------------------------------------------------------------------------


def serve(cache: str) -> None:
    """A server's start in a process of its own; prints what it decides."""
    use_named()
    tuning._tune_one = tune_one
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    measure_hook.set_measure(at_start.measure)
    (decision,) = start(asked(Path(cache)))
    print(decision.backend, decision.why, flush=True)


def new_server(folder: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[:0] = [{root!r}]\n"
    code += f"from tests.measuring import test_at_start\ntest_at_start.serve({str(folder)!r})\n"
    log = folder / f"{name}.log"
    with log.open("w") as stderr:
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True), log


def descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(each) for each in children]


@pytest.mark.full
def test_the_cache_of_a_killed_server_is_completed_by_the_next_start(only: Callable[..., None], tmp_path: Path) -> None:
    only("slow", "fast")
    server, log = new_server(tmp_path, "killed")
    until = time.monotonic() + 200
    while len(kept(tmp_path)) < 4 and time.monotonic() < until and server.poll() is None:
        time.sleep(0.02)
    children = descendants(server.pid)
    server.kill()
    server.communicate()
    before = kept(tmp_path)
    assert children and 4 <= len(before) < 8, log.read_text()[-2000:]
    assert all(has_ended(each, max(until - time.monotonic(), 0)) for each in children)
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("fast", "measured")
    assert kept(tmp_path) == complete("slow", "fast")


@pytest.mark.full
def test_two_servers_at_once_share_one_cache(only: Callable[..., None], tmp_path: Path) -> None:
    only("slow", "fast")
    servers = [new_server(tmp_path, f"server{number}") for number in range(2)]
    for server, log in servers:
        said, _ = server.communicate(timeout=300)
        assert server.returncode == 0 and said.strip() == "fast measured", log.read_text()[-3000:]
    assert kept(tmp_path) == complete("slow", "fast")
    # Times that are taken beside each other are wrong.
    assert sum("is measured for up to" in log.read_text() for _, log in servers) == 1


@pytest.fixture
def other(
    only: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of a start that measures with the cache; beside it, this one must not measure."""
    only("slow", "fast")
    caplog.set_level(logging.INFO, "vllm.moe_oracle")
    monkeypatch.setattr(tuning.worker_pool, "run_tasks", refuse_to_measure)
    code = "import fcntl, os, sys, time\ndescriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
    code += "fcntl.flock(descriptor, fcntl.LOCK_EX)\nprint('locked', flush=True)\ntime.sleep(1000)\n"
    lock = tmp_path / f".measuring-{detect.device_id()}.lock"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_start_reads_what_it_has_waited_for(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is killed, which frees the lock."""

    def finish(words: str) -> None:
        times = {"slow": 200.0, "fast": 100.0}
        samples = [
            Sample(name, BACKENDS[name].activations(LAYER), count, "uniform", us, us, us, 20)
            for name, us in times.items()
            for count in COUNTS
        ]
        Store(tmp_path).add(Environment.of(detect.detect()), kernel_shape_of(LAYER), samples)
        other.kill()
        said.append(words)

    said: list[str] = []
    monkeypatch.setattr(at_start, "_log_wait", finish)
    (decision,) = start(asked(tmp_path))
    assert (decision.backend, decision.why) == ("fast", "measured") and not caplog.messages
    (words,) = said
    assert words.startswith(f"waiting up to {BUDGET} s: ") or words.startswith(f"waiting up to {BUDGET - 1} s: ")
    assert f"is locked by process {other.pid} (" in words and words.endswith("which measures on this device")


def test_a_start_that_has_waited_long_enough_keeps_its_choice(
    other: subprocess.Popen[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin = time.monotonic()
    (decision,) = start(asked(tmp_path, 1.0))
    assert time.monotonic() - begin < 20
    assert (decision.backend, decision.why) == ("slow", "static")
    waits, ends = caplog.messages
    assert waits.startswith("moe_oracle: waiting up to 1 s: ")
    assert f"locked by process {other.pid} (" in ends and ends.count("not measured") == 1
    assert "This start keeps its choice" in ends


def test_starts_that_share_no_device_or_no_cache_do_not_wait(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    for each in (here, there):
        each.prepare()
    with here.measuring_alone("gpu-1", 0.0), here.measuring_alone("gpu-2", 0.0), there.measuring_alone("gpu-1", 0.0):
        with pytest.raises(MeasurementError, match="measures on this device, for more than 0 s"):
            here.measuring_alone("gpu-1", 0.0).__enter__()
        if not (child := os.fork()):  # has the lock's descriptor, and lives on
            time.sleep(20)
            os._exit(0)
    try:
        with here.measuring_alone("gpu-1", 0.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_device_has_one_name_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    if detect.detect().kind == "cpu":
        assert detect.device_id() == f"cpu-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    properties = SimpleNamespace(uuid="6d/6f 65")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(detect, "detect", lambda: Device("cuda", "NVIDIA H200", 90))
    assert detect.device_id() == "gpu-6d6f65"
