"""Worker processes that take tasks from a list: one per GPU to measure, many to compile.

Every worker has its own pipe and shares nothing with the others. A worker that is killed, or that a kernel takes down,
holds no lock. Its task is given to a new worker, up to a limit. Workers end with this process, whatever ends it.

A worker is a command of its own and no `multiprocessing.Process`: vLLM's workers are daemons, which may have no such
children, and a child would run the user's script again where that has no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from ..errors import OracleError, exit_words
from ..measurements.bench_records import silence
from ..oracle import watchdog
from ..settings import env_var, visible_gpu
from .broken_context import BrokenContextError

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that this process gets when its parent ends."""

_COMMAND = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from vllm_moe_oracle.measuring.worker_pool import work
work(connection)
"""
"""What a worker runs. Its argument is the file descriptor of its end of the pipe."""

_KILLED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a worker that did not end by what it ran: a user killed it, or the system for lack of memory."""

SendProgress = Callable[[Any], None]
"""Sends a value from a worker to the parent, where it becomes an event of kind ``progress``."""

TaskFunction = Callable[[Any, SendProgress], Any]
"""What a worker does with a task. Must be a module-level function, because it is pickled by name."""

_KILL_SECONDS = 10.0
"""Seconds that a killed worker is waited for: a GPU that hangs may hold its process."""

TIME_SPENT = "the time was spent"
"""Why a task is lost that had not ended at `Limits.until`."""

OnCrash = Callable[[int, str, float], None]
"""Called with a task whose worker ended by what it ran, or was silent for too long, why ("" where the worker
reported a broken context, which it has stored), and the seconds of silence, 0 if it ended otherwise: before the task is
given to a new worker. Workers that others killed do not count."""


def _do_nothing() -> None:
    """What a worker usually does before its first task, and its parent meanwhile."""


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Progress or outcome of a task.

    Attributes:
        task: index of the task.
        kind: any number of ``progress``, then one ``done`` or ``lost``. A lost task ended all its workers.
        value: the value sent, the result, or why the task is lost.
        by_others: of a lost task, whether its last worker ended by nothing that it ran.
    """

    task: int
    kind: Literal["progress", "done", "lost"]
    value: Any
    by_others: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """When workers are killed.

    Attributes:
        silence: seconds that a worker may go without a message, once it sent one about its task; None for no limit.
        until: `time.monotonic` at which all workers are killed and all their tasks are lost; None for no limit.
    """

    silence: float | None = None
    until: float | None = None


_NO_LIMITS = Limits()


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    gpu: str | None
    task: int | None = None
    broken: str = ""
    last_message: float | None = None

    def has_ended(self) -> bool:
        """Whether the process ends by itself, as one that has closed its pipe should."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_SECONDS)
        return self.process.returncode is not None

    def end(self, seconds: float = _KILL_SECONDS) -> int:
        """Kills the process and returns its exit code. It may outlive its kill for as long as a driver holds it, of
        which no more than some seconds are waited for."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.process.returncode or -signal.SIGKILL

    def silent_for(self, seconds: float) -> bool:
        return self.last_message is not None and time.monotonic() - self.last_message >= seconds


def run_tasks(
    function: TaskFunction,
    tasks: Sequence[Any],
    gpus: Sequence[str | None],
    attempts: int = 1,
    quiet: bool = False,
    limits: Limits = _NO_LIMITS,
    on_crash: OnCrash = lambda task, why, silent: None,
    meanwhile: Callable[[], None] = _do_nothing,
    warm_up: Callable[[], None] = _do_nothing,
) -> Generator[TaskEvent, None, None]:
    """Runs tasks in worker processes, in the order of the list.

    Args:
        function: what is done with each task.
        tasks: picklable arguments.
        gpus: the GPU that each worker sees, as `devices.detect.select_gpus` names it; None for all that this process
            sees. One worker per entry.
        attempts: number of workers that a task may take down before it is lost.
        quiet: whether workers log errors only. Sixteen workers would repeat the same warnings.
        limits: when workers are killed.
        on_crash: called with each task that took its worker down, why ("" where the task has stored that itself), and
            the seconds of silence after which the worker was killed, 0 if it ended otherwise.
        meanwhile: called once here, while the workers start and warm up. They get their first tasks after it.
        warm_up: called in each worker before its first task, whose outcome it becomes if it fails. Must be a
            module-level function.

    Yields:
        Progress and outcomes, as they arrive.

    Raises:
        OracleError: a task raised it.
        RuntimeError: a task raised something else; the message is its traceback.
    """
    pool = _Pool(function, tasks, attempts, quiet, limits, on_crash, warm_up)
    try:
        idle = [pool.start(gpu) for gpu in gpus[: len(tasks)]]
        meanwhile()
        for worker in idle:
            pool.assign(worker)
        while pool.workers:
            for connection in wait([*pool.workers], pool.seconds_to_limit()):
                assert isinstance(connection, Connection)
                yield from pool.receive(connection)
            if limits.until is not None and time.monotonic() >= limits.until:
                for task in [*(each.task for each in pool.workers.values()), *pool.waiting]:
                    if task is not None:
                        yield TaskEvent(task, "lost", TIME_SPENT, True)
                return
            yield from pool.end_silent()
    finally:
        pool.kill()


@dataclass
class _Pool:
    """Workers by the parent's end of their pipes, and the tasks that wait. The first fields are `run_tasks`'s."""

    function: TaskFunction
    tasks: Sequence[Any]
    attempts: int
    quiet: bool
    limits: Limits
    on_crash: OnCrash
    warm_up: Callable[[], None]
    waiting: deque[int] = field(init=False)
    deaths: Counter[int] = field(default_factory=Counter)
    workers: dict[Connection, _Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.tasks)))

    def start(self, gpu: str | None) -> Connection:
        """Starts a worker on a GPU, without a task."""
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno())]
        with visible_gpu(gpu):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self.workers[ours] = _Worker(process, gpu)
        with contextlib.suppress(OSError):  # a dead worker is found when its pipe is read
            ours.send(sys.path)
            ours.send((self.function, self.quiet, self.warm_up))
        return ours

    def seconds_to_limit(self) -> float | None:
        """Seconds until the next worker may have to be killed; None where none ever has."""
        ends = [] if self.limits.until is None else [self.limits.until]
        if self.limits.silence is not None:
            last = [each.last_message for each in self.workers.values() if each.last_message is not None]
            ends += [each + self.limits.silence for each in last]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def end_silent(self) -> Iterator[TaskEvent]:
        """Kills workers that were silent for too long."""
        limit = self.limits.silence
        if limit is not None:
            for connection in [each for each, worker in self.workers.items() if worker.silent_for(limit)]:
                yield from self.reap(connection, limit)

    def assign(self, connection: Connection) -> None:
        """Sends the next task to a worker; None, which ends it, if no task waits."""
        worker = self.workers[connection]
        worker.last_message = None
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
        worker.last_message = time.monotonic()
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

    def reap(self, connection: Connection, silent: float = 0.0) -> Iterator[TaskEvent]:
        """Removes a dead worker, retries or gives up its task, and starts a new worker if tasks wait.

        Args:
            connection: the worker's pipe.
            silent: seconds of silence for which it was killed here; 0 if it ended otherwise.
        """
        worker = self.workers.pop(connection)
        connection.close()
        killed = silence(silent) if silent else ""
        if not (killed or worker.has_ended() or worker.broken):
            killed = "it closed its pipe and did not end"
        code = worker.end() if worker.process.returncode is None else worker.process.returncode
        if worker.task is not None:
            why = killed or worker.broken or _exit_reason(code)
            by_others = not killed and not worker.broken and code in _KILLED_BY_OTHERS
            if not by_others:
                self.on_crash(worker.task, "" if worker.broken and not killed else why, silent)
            self.deaths[worker.task] += 1
            if self.deaths[worker.task] < self.attempts:
                self.waiting.appendleft(worker.task)
            else:
                yield TaskEvent(worker.task, "lost", why, by_others)
        if self.waiting:
            self.assign(self.start(worker.gpu))

    def kill(self) -> None:
        """Ends all workers."""
        for worker in self.workers.values():
            worker.process.kill()
        until = time.monotonic() + _KILL_SECONDS
        for connection, worker in self.workers.items():
            worker.end(until - time.monotonic())
            connection.close()


def _exit_reason(code: int) -> str:
    if code < 0:
        others = ", by a user, or by the system for lack of memory" if code in _KILLED_BY_OTHERS else ""
        return f"its process was ended by {exit_words(code).removeprefix('signal ')}{others}"
    return f"its process ended with {exit_words(code)}"


def work(connection: Connection) -> None:
    """The life of a worker: runs tasks from the pipe until None arrives or the parent is gone.

    Args:
        connection: its end of the pipe. What is done with tasks arrives first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    with contextlib.suppress(AttributeError):  # Linux only: do not keep the GPU busy after the parent was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # libraries print to standard output, which belongs to the parent's command
    # A process that a backend forks must neither keep the pipe open after this one ended, nor answer for it.
    process = os.getpid()
    os.register_at_fork(after_in_child=connection.close)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        function, quiet, warm_up = connection.recv()
        if quiet:
            logging.disable(logging.WARNING)
        warmed_up = _outcome_of(warm_up)
        while (received := connection.recv()) is not None:
            task = functools.partial(function, received[1], lambda value: connection.send(("progress", value)))
            outcome = _outcome_of(task) if warmed_up[0] == "done" else warmed_up
            watchdog.end_copy(process, "what is measured", f"{env_var('disable')}=NAME leaves a backend out")
            connection.send(outcome)
            if outcome[0] == "broken":
                break
    connection.close()
    sys.stderr.flush()
    os._exit(0)  # an orderly exit would take seconds to destroy the CUDA context


def _outcome_of(task: Callable[[], Any]) -> tuple[str, Any]:
    """Runs a task; the message about its outcome."""
    try:
        return "done", task()
    except BrokenContextError as error:
        return "broken", error.rule
    except OracleError as error:
        return "oracle_error", error
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:  # the parent raises whatever a task raised, with the traceback
        return "raised", traceback.format_exc()
