"""Tasks of worker processes, and how they end. Imports neither torch nor vLLM, because every worker imports it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from vllm_moe_oracle import settings
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measuring import worker_pool
from vllm_moe_oracle.measuring.broken_context import BrokenContextError

WARM = "MOE_ORACLE_TEST_WARM"


def warm_up() -> None:
    """What every worker does first: leaves a word for its tasks, or refuses."""
    if os.environ.get(WARM) == "refuse":
        raise MeasurementError("vLLM cannot be imported", "Install it")
    os.environ[WARM] = str(time.monotonic())


def work(task: Any, send: worker_pool.SendProgress) -> Any:
    """What a task does, by its first word."""
    word, *rest = task
    if word == "where":
        print("a library's chatter")
        send("here")
        return os.environ.get(settings.VISIBLE_GPUS_VAR)
    if word == "warm since":
        return float(os.environ[WARM])
    if word == "die once" and not Path(rest[0]).exists():
        Path(rest[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit once, then die":
        if not Path(rest[0]).exists():
            Path(rest[0]).touch()
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        os._exit(3)
    if word in ("fork and exit", "fork and go on"):
        copied = os.fork()
        if not copied and word == "fork and exit":
            time.sleep(60)
            os._exit(0)
        if copied and word == "fork and exit":
            Path(rest[0]).write_text(str(copied))
            os._exit(3)
    if word == "break":
        raise BrokenContextError("hopper_mxfp8", "CUDA error")
    if word == "refuse":
        raise MeasurementError("the disk is full", "Make room", "/a/file")
    if word == "fail":
        raise ZeroDivisionError("a defect")
    if word == "hang":
        send("begins")
        time.sleep(60)
    if word == "linger":
        os.closerange(3, 1000)
        time.sleep(60)
    if word == "sleep":
        Path(rest[0]).write_text(str(os.getpid()))
        time.sleep(60)
    return word


def ends(tasks: list[Any], places: list[str | None], attempts: int = 1, *arguments: Any) -> dict[int, tuple[str, Any]]:
    """How each task ends; `arguments` are more of `run_tasks`."""
    news = [
        each for each in worker_pool.run_tasks(work, tasks, places, attempts, *arguments) if each.kind != "progress"
    ]
    assert sorted(each.task for each in news) == [*range(len(tasks))]  # each ends once
    return {each.task: (each.kind, each.value) for each in news}
