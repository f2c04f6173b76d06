"""Worker processes: one that dies takes nothing with it, and none is left behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lib import pool_tasks
from tests.lib.fresh_process import has_ended
from vllm_moe_oracle import settings
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import MeasurementError, SettingError
from vllm_moe_oracle.measuring import worker_pool
from vllm_moe_oracle.measuring.broken_context import breaks_context, raise_if_broken


def test_each_process_sees_its_own_gpu_and_all_tasks_are_done(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.environ.get(settings.VISIBLE_GPUS_VAR)
    news = [*worker_pool.run_tasks(pool_tasks.work, [("where",)] * 5, ["7", "GPU-abc"])]
    assert os.environ.get(settings.VISIBLE_GPUS_VAR) == before
    assert {each.value for each in news if each.kind == "done"} == {"7", "GPU-abc"}
    assert [each.value for each in news if each.kind == "progress"] == ["here"] * 5
    written = capfd.readouterr()
    assert written.out == "" and "chatter" in written.err


def test_a_process_that_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    tasks = [("die once", str(tmp_path / "died")), ("die",), ("fine",), ("exit",), ("break",), ("fine",)]
    found = pool_tasks.ends(tasks, [None, None], attempts=2)
    assert found[0] == ("done", "die once") and found[2] == found[5] == ("done", "fine")
    assert found[1] == ("lost", "its process was ended by SIGKILL, by a user, or by the system for lack of memory")
    assert found[3] == ("lost", "its process ended with status 3")
    assert found[4][0] == "lost" and "CUDA error" in found[4][1]


def test_a_copy_that_a_task_forks_neither_holds_up_nor_answers(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    tasks = [("fork and exit", str(pid)), ("fork and go on",), ("fine",)]
    crashed: list[str] = []
    found = pool_tasks.ends(tasks, [None], 1, False, worker_pool.Limits(), lambda *what: crashed.append(what[1]))
    os.kill(int(pid.read_text()), signal.SIGKILL)  # it was alive, and nobody has waited for it
    assert found[0] == ("lost", "its process ended with status 3") and crashed == [found[0][1]]
    assert found[1] == ("done", "fork and go on") and found[2] == ("done", "fine")


def test_an_error_in_one_process_ends_all(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(MeasurementError, match=r"^/a/file: the disk is full. Make room$"):
        pool_tasks.ends([("sleep", str(pid)), ("refuse",)], [None, None])
    if pid.exists() and pid.read_text():  # it may not have begun
        assert has_ended(int(pid.read_text()), 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a defect"):
        pool_tasks.ends([("fail",)], [None])


def test_a_task_that_others_end_is_told_from_one_that_ends_itself(tmp_path: Path) -> None:
    """Also where it had ended itself in the attempt before."""
    tasks = [("exit once, then die", str(tmp_path / "exited")), ("exit",), ("die",), ("break",)]
    news = [*worker_pool.run_tasks(pool_tasks.work, tasks, [None, None], attempts=2)]
    assert {each.task: each.by_others for each in news if each.kind == "lost"} == {0: True, 1: False, 2: True, 3: False}


def test_workers_that_a_driver_holds_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[subprocess.Popen[bytes]] = []

    class Held(subprocess.Popen[bytes]):
        def kill(self) -> None:
            held.append(self)

    monkeypatch.setattr(worker_pool, "_KILL_SECONDS", 2.0)
    monkeypatch.setattr(worker_pool.subprocess, "Popen", Held)
    begin = time.monotonic()
    found = pool_tasks.ends([("hang",)] * 4, [None] * 4, 1, False, worker_pool.Limits(until=begin + 1.0))
    spent = time.monotonic() - begin
    for each in held:
        each.send_signal(signal.SIGKILL)
        each.wait()
    assert {*found.values()} == {("lost", worker_pool.TIME_SPENT)} and len({*held}) == 4
    assert 3.0 <= spent < 6.0  # 9 s, if it were one after the other


def test_a_silent_worker_is_killed_and_its_task_blamed() -> None:
    crashed: list[tuple[int, str, float]] = []
    limits = worker_pool.Limits(silence=1.0)
    tasks = [("hang",), ("exit",), ("die",), ("break",), ("fine",)]
    found = pool_tasks.ends(tasks, [None], 1, False, limits, lambda *what: crashed.append(what))
    assert found[0] == ("lost", "it did not come back within 1 s") and found[4] == ("done", "fine")
    # Whoever killed the third did so from outside, and the fourth said itself what happened.
    assert crashed == [(0, found[0][1], 1.0), (1, "its process ended with status 3", 0.0), (3, "", 0.0)]


def test_workers_start_meanwhile_and_then_get_tasks_as_they_are() -> None:
    tasks: list[tuple[str, ...]] = [("exit",), ("fine",)]
    limits = worker_pool.Limits(silence=1.0)

    def meanwhile() -> None:
        time.sleep(2.0)  # longer than a worker may be silent about a task
        tasks[0] = ("where",)

    news = worker_pool.run_tasks(pool_tasks.work, tasks, ["7", None], 1, False, limits, meanwhile=meanwhile)
    assert {each.task: each.value for each in news if each.kind != "progress"} == {0: "7", 1: "fine"}

    others = {*psutil.Process().children()}

    def fails() -> None:
        started.extend({*psutil.Process().children()} - others)
        raise MeasurementError("the disk is full", "Make room")

    started: list[psutil.Process] = []
    with pytest.raises(MeasurementError, match="the disk is full"):
        [*worker_pool.run_tasks(pool_tasks.work, [("hang",)], [None], meanwhile=fails)]
    assert started and all(has_ended(each.pid, 10) for each in started)


def test_workers_warm_up_before_their_tasks_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[float] = []

    def meanwhile() -> None:
        time.sleep(2.0)
        ready.append(time.monotonic())

    call = functools.partial(worker_pool.run_tasks, pool_tasks.work, warm_up=pool_tasks.warm_up)
    (news,) = call([("warm since",)], [None], meanwhile=meanwhile)
    assert news.kind == "done" and news.value < ready[0]
    monkeypatch.setenv(pool_tasks.WARM, "refuse")
    with pytest.raises(MeasurementError, match="vLLM cannot be imported"):
        [*call([("fine",)], [None])]


def test_a_worker_that_closed_its_pipe_and_lives_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_KILL_SECONDS", 0.5)
    crashed: list[tuple[int, str, float]] = []
    limits = worker_pool.Limits()
    found = pool_tasks.ends([("linger",), ("fine",)], [None], 1, False, limits, lambda *what: crashed.append(what))
    assert found == {0: ("lost", "it closed its pipe and did not end"), 1: ("done", "fine")}
    assert crashed == [(0, "it closed its pipe and did not end", 0.0)]


@pytest.mark.parametrize(
    ("failure", "broken"),
    [
        ("RuntimeError: Triton Error [CUDA]: misaligned address", True),
        ("RuntimeError: Triton Error [CUDA]: an illegal instruction was encountered", True),
        ("RuntimeError: CUDA driver error: the launch timed out and was terminated", True),
        ("AcceleratorError: CUDA error: unspecified launch failure", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", False),
        ("OutOfResources: out of resource: shared memory, Required: 300000, Hardware limit: 232448", False),
        ("relative error 3.0e-01", False),
    ],
)
def test_what_ends_a_context_is_told_by_its_words(failure: str, broken: bool) -> None:
    assert breaks_context(failure) == broken


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hopper_mxfp8", "MOE_ORACLE_DISABLE=hopper_mxfp8 leaves it out"),
        ("stock:auto", "A value of --stock other than auto leaves it out"),
        ("peer:tokenspeed", "A run without --peers leaves it out"),
    ],
)
def test_what_broke_the_context_can_be_left_out(name: str, remedy: str) -> None:
    with pytest.raises(MeasurementError, match=rf"^{name}: it broke the GPU's context: .* {remedy}$"):
        raise_if_broken(name, RuntimeError("CUDA error: misaligned address"))


def test_all_tasks_are_lost_when_the_time_is_spent() -> None:
    begin = time.monotonic()
    limits = worker_pool.Limits(until=begin + 2.0)
    found = pool_tasks.ends([("hang",), ("fine",)], [None], 3, False, limits)
    assert found == {0: ("lost", "the time was spent"), 1: ("lost", "the time was spent")}
    assert 2 <= time.monotonic() - begin < 20


def daemon_runs_tasks(results: Any) -> None:
    results.send(pool_tasks.ends([("fine",)], [None]))


def test_a_daemon_may_have_workers() -> None:
    """vLLM's workers are daemons, whose children `multiprocessing` refuses."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=daemon_runs_tasks, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60) and ours.recv() == {0: ("done", "fine")}
    process.join()


def test_processes_end_with_the_one_that_began_them(tmp_path: Path) -> None:
    """A kill -9 of the command: no GPU is kept busy for it, also in the middle of a task."""
    pid = tmp_path / "pid"
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[2])]!r}\n"
    code += "from tests.lib import pool_tasks\nif __name__ == '__main__':\n"
    code += f"    pool_tasks.ends([('where',), ('where',), ('sleep', {str(pid)!r})], [None, None])\n"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until and parent.poll() is None:
        time.sleep(0.2)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    assert pid.read_text() in children
    assert all(has_ended(int(each), 20) for each in children)


def test_gpus_are_named_as_this_process_sees_them() -> None:
    assert detect.select_gpus("all", "4, GPU-abc,6") == ("4", "GPU-abc", "6")
    assert detect.select_gpus("2,0", "4, GPU-abc,6") == ("6", "4")
    for wrong in ("3", "0,0", "x", "-1", "0;1"):
        with pytest.raises(SettingError, match="does not select GPUs; there are 3"):
            detect.select_gpus(wrong, "4, GPU-abc,6")
