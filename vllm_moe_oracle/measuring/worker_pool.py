"""Worker processes that take tasks from a list: one per GPU to measure, many to compile.

Every worker has its own pipe and shares nothing with the others. A worker that is killed, or that a kernel takes down,
holds no lock. Its task is given to a new worker, up to a limit. Workers end with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from ..errors import OracleError
from ..settings import visible_gpu
from .broken_context import BrokenContextError

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that this process gets when its parent ends."""

SendProgress = Callable[[Any], None]
"""Sends a value from a worker to the parent, where it becomes an event of kind ``progress``."""

TaskFunction = Callable[[Any, SendProgress], Any]
"""What a worker does with a task. Must be a module-level function, because it is pickled by name."""


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Progress or outcome of a task.

    Attributes:
        task: index of the task.
        kind: any number of ``progress``, then one ``done`` or ``lost``. A lost task ended all its workers.
        value: the value sent, the result, or why the task is lost.
    """

    task: int
    kind: Literal["progress", "done", "lost"]
    value: Any


@dataclass
class _Worker:
    process: Any
    gpu: str | None
    task: int | None = None
    broken: str = ""


def run_tasks(
    function: TaskFunction, tasks: Sequence[Any], gpus: Sequence[str | None], attempts: int = 1, quiet: bool = False
) -> Generator[TaskEvent, None, None]:
    """Runs tasks in worker processes, in the order of the list.

    Args:
        function: what is done with each task.
        tasks: picklable arguments.
        gpus: the GPU that each worker sees, as `devices.detect.select_gpus` names it; None for all that this process
            sees. One worker per entry.
        attempts: number of workers that a task may take down before it is lost.
        quiet: whether workers log errors only. Sixteen workers would repeat the same warnings.

    Yields:
        Progress and outcomes, as they arrive.

    Raises:
        OracleError: a task raised it.
        RuntimeError: a task raised something else; the message is its traceback.
    """
    pool = _Pool(function, tasks, attempts, quiet)
    try:
        for gpu in gpus[: len(tasks)]:
            pool.start(gpu)
        while pool.workers:
            for connection in wait([*pool.workers]):
                assert isinstance(connection, Connection)
                yield from pool.receive(connection)
    finally:
        pool.kill()


class _Pool:
    """Workers by the parent's end of their pipes, and the tasks that wait."""

    def __init__(self, function: TaskFunction, tasks: Sequence[Any], attempts: int, quiet: bool) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.function, self.tasks, self.attempts, self.quiet = function, tasks, attempts, quiet
        self.waiting = deque(range(len(tasks)))
        self.deaths: Counter[int] = Counter()
        self.workers: dict[Connection, _Worker] = {}

    def start(self, gpu: str | None) -> None:
        """Starts a worker on a GPU and gives it a task."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_worker_main, args=(theirs, self.function, self.quiet))
        with visible_gpu(gpu):
            process.start()
        theirs.close()
        self.workers[ours] = _Worker(process, gpu)
        self.assign(ours)

    def assign(self, connection: Connection) -> None:
        """Sends the next task to a worker; None, which ends it, if no task waits."""
        worker = self.workers[connection]
        worker.task = self.waiting.popleft() if self.waiting else None
        with contextlib.suppress(OSError):  # a dead worker is found when its pipe is read
            connection.send(None if worker.task is None else (worker.task, self.tasks[worker.task]))

    def receive(self, connection: Connection) -> Iterator[TaskEvent]:
        """Handles one message of a worker, or its death.

        Raises:
            OracleError: the worker's task raised it.
            RuntimeError: the worker's task raised something else.
        """
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            yield from self.reap(connection)
            return
        worker = self.workers[connection]
        assert worker.task is not None
        if kind == "progress":
            yield TaskEvent(worker.task, "progress", value)
        elif kind == "broken":  # the worker ends itself; `reap` reports it
            worker.broken = value
        elif kind == "done":
            finished = worker.task
            self.assign(connection)
            yield TaskEvent(finished, "done", value)
        elif kind == "oracle_error":
            raise value
        else:
            raise RuntimeError(f"in a worker process:\n{value}")

    def reap(self, connection: Connection) -> Iterator[TaskEvent]:
        """Removes a dead worker, retries or gives up its task, and starts a new worker if tasks wait."""
        worker = self.workers.pop(connection)
        connection.close()
        worker.process.join()
        if worker.task is not None:
            self.deaths[worker.task] += 1
            if self.deaths[worker.task] < self.attempts:
                self.waiting.appendleft(worker.task)
            else:
                yield TaskEvent(worker.task, "lost", worker.broken or _exit_reason(worker.process.exitcode))
        if self.waiting:
            self.start(worker.gpu)

    def kill(self) -> None:
        """Ends all workers."""
        for worker in self.workers.values():
            worker.process.kill()
        for connection, worker in self.workers.items():
            worker.process.join()
            connection.close()


def _exit_reason(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"


def _worker_main(connection: Connection, function: TaskFunction, quiet: bool) -> None:
    """Runs tasks from the pipe until None arrives or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    with contextlib.suppress(AttributeError):  # Linux only: do not keep the GPU busy after the parent was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # libraries print to standard output, which belongs to the parent's command
    if quiet:
        logging.disable(logging.WARNING)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (received := connection.recv()) is not None:
            outcome = _run_task(function, received[1], lambda value: connection.send(("progress", value)))
            connection.send(outcome)
            if outcome[0] == "broken":
                break
    connection.close()
    sys.stderr.flush()
    os._exit(0)  # an orderly exit would take seconds to destroy the CUDA context


def _run_task(function: TaskFunction, task: Any, send: SendProgress) -> tuple[str, Any]:
    """The message about a task's outcome."""
    try:
        return "done", function(task, send)
    except BrokenContextError as error:
        return "broken", error.rule
    except OracleError as error:
        return "oracle_error", error
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:  # the parent raises whatever a task raised, with the traceback
        return "raised", traceback.format_exc()
