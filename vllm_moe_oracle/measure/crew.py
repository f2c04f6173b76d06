"""Processes that work on a list of tasks, each on one GPU: all GPUs of a machine measure, many processes compile.

Each process has a pipe of its own and shares nothing with the others: one that is killed, or that a kernel takes down,
holds no lock and blocks nobody. Its task is given to a fresh process, a few times; the others never notice. When this
process ends, by whatever signal, so do the others.
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
from ..settings import seeing
from .engine import BrokenContext

_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG: a signal for this process when the one that began it ends."""

Tell = Callable[[Any], None]
"""In a process: sends something to the one that began it."""

Work = Callable[[Any, Tell], Any]
"""What a process does with a task. A function of a module: it is looked up by its name there."""


@dataclass(frozen=True, slots=True)
class News:
    """What became of a task, or what is said about it.

    Attributes:
        task: its index.
        kind: ``said`` while it is worked on, then once ``done`` or ``lost``: its processes died.
        value: what was said, the result, or why it was lost, in words.
    """

    task: int
    kind: Literal["said", "done", "lost"]
    value: Any


@dataclass
class _Member:
    process: Any
    place: str | None
    task: int | None = None
    broken: str = ""


def run(
    work: Work, tasks: Sequence[Any], places: Sequence[str | None], attempts: int = 1, quiet: bool = False
) -> Generator[News, None, None]:
    """Has tasks done, in their order as far as there are processes.

    Args:
        work: what is done with each.
        tasks: what can be pickled.
        places: one process each: the GPU that it is to see, as `device.gpus` names it; None for what this process sees.
        attempts: processes that a task may take down before it is lost.
        quiet: log nothing below an error: the same remarks from sixteen processes help nobody.

    Yields:
        What is said and what is done, as it comes.

    Raises:
        OracleError: a task did.
        RuntimeError: a task raised what it should not; the message is its traceback.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(range(len(tasks)))
    deaths: Counter[int] = Counter()
    members: dict[Connection, _Member] = {}

    def begin(place: str | None) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work, quiet))
        with seeing(place):
            process.start()
        theirs.close()
        members[ours] = _Member(process, place)
        give(ours)

    def give(connection: Connection) -> None:
        member = members[connection]
        member.task = waiting.popleft() if waiting else None
        # One that is gone already is noticed where its pipe is read.
        with contextlib.suppress(OSError):
            connection.send(None if member.task is None else (member.task, tasks[member.task]))

    def bury(connection: Connection) -> Iterator[News]:
        member = members.pop(connection)
        connection.close()
        member.process.join()
        if member.task is not None:
            deaths[member.task] += 1
            if deaths[member.task] < attempts:
                waiting.appendleft(member.task)
            else:
                yield News(member.task, "lost", member.broken or _ended(member.process.exitcode))
        if waiting:
            begin(member.place)

    try:
        for place in places[: len(tasks)]:
            begin(place)
        while members:
            for connection in wait([*members]):
                assert isinstance(connection, Connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):
                    yield from bury(connection)
                    continue
                member = members[connection]
                assert member.task is not None
                if kind == "said":
                    yield News(member.task, "said", value)
                elif kind == "broken":  # it ends now
                    member.broken = value
                elif kind == "done":
                    finished = member.task
                    give(connection)
                    yield News(finished, "done", value)
                elif kind == "refused":
                    raise value
                else:
                    raise RuntimeError(f"in a process that measures:\n{value}")
    finally:
        for member in members.values():
            member.process.kill()
        for connection, member in members.items():
            member.process.join()
            connection.close()


def _ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"


def _serve(connection: Connection, work: Work, quiet: bool) -> None:
    """A process's life: a task after the other, until there is none or nobody is there who gives one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the process that began this one
    with contextlib.suppress(AttributeError):  # Linux: a GPU is not kept busy for a command that was killed
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)  # standard output belongs to the command: libraries print there
    if quiet:
        logging.disable(logging.WARNING)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (given := connection.recv()) is not None:
            ended = _done(work, given[1], lambda words: connection.send(("said", words)))
            connection.send(ended)
            if ended[0] == "broken":
                break
    connection.close()
    sys.stderr.flush()
    os._exit(0)  # nothing is worth what taking a CUDA context down in order costs


def _done(work: Work, task: Any, tell: Tell) -> tuple[str, Any]:
    try:
        return "done", work(task, tell)
    except BrokenContext as error:
        return "broken", error.rule
    except OracleError as error:
        return "refused", error
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:
        return "raised", traceback.format_exc()
