"""The tool's work in a child process, whose parent vouches for the exit status.

A backend can end the process that it runs in with any status, 0 included, and nothing in that process prevents it. So
the parent ends with 0 only where the child has said that its work is done. Otherwise it says what ran when the child
ended. The child is forked before torch is imported: nothing is imported twice, and CUDA is initialized in it alone.

A backend can fork the child, too. Nothing that such a copy does counts, and it ends where it comes back from the
backend (`watchdog.third_party_code`) or to print (`output.write`).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, Protocol

from ..errors import exit_words, sanitize
from ..oracle import watchdog
from . import EXIT_UNHEALTHY, output

_PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that this process gets when its parent ends."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the tool, which its child handles."""

_ONE_CTRL_C = 0.3
"""Seconds in which further SIGINTs are of the same Ctrl-C: a group's processes get it, and the child from its parent,
too."""

_SI_KERNEL = 0x80
"""Origin of a signal that a terminal has sent: to the child, too."""

_INTERRUPTIONS = 3
"""The Ctrl-C that ends a child which does not react: Python's handler does not run while a kernel hangs."""

_MOST_WORDS = 2000
"""Characters of one activity."""

_OTHERS = "by a user, or by the system for lack of memory"


class Unfinished(Protocol):
    """What a command can still say where its process ends: it is pickled by the child, and printed by the parent."""

    def ended(self, why: str, was_asked: bool) -> int:
        """Prints it.

        Args:
            why: how the process ended, and what ran, as a sentence without its subject and period.
            was_asked: a signal to this tool ended it, which speaks against nothing that ran. The parent says so.

        Returns:
            The exit status, which may not be 0; that of a signal is the signal's.
        """


class _Slot:
    """Bytes that the child leaves for its parent, in memory that no closed descriptor takes away.

    They replace those before as a whole: a process that ends while it writes leaves those before.
    """

    def __init__(self, size: int) -> None:
        self._memory, self._size = mmap.mmap(-1, 1 + 2 * size), size

    def put(self, data: bytes) -> bool:
        """Leaves bytes; False where they are too many, and those before stay."""
        whole = len(data).to_bytes(4, "little") + data
        if len(whole) > self._size:
            return False
        place = 1 - self._memory[0]
        start = 1 + place * self._size
        self._memory[start : start + len(whole)] = whole
        self._memory[0] = place
        return True

    def get(self) -> bytes:
        """What was left; empty before the first."""
        start = 1 + self._memory[0] * self._size
        size = int.from_bytes(self._memory[start : start + 4], "little")
        return self._memory[start + 4 : start + 4 + size]


class _Child:
    """What parent and child share. Memory is taken where something is written to it."""

    def __init__(self) -> None:
        self._activities, self._answer, self._status = _Slot(1 << 16), _Slot(8 << 20), _Slot(8)

    def note(self, running: Sequence[watchdog.Activity]) -> None:
        """Leaves what runs: the two innermost and the outermost activity where they are many."""
        found = [[text[:_MOST_WORDS] for text in each] for each in (*running[:1], *running[1:][-2:])]
        self._activities.put(json.dumps(found).encode())

    def keep(self, answer: Unfinished | None) -> None:
        """Leaves an answer; none where it is too large."""
        data = b"" if answer is None else pickle.dumps(answer)
        if not self._answer.put(data):
            self._answer.put(b"")

    def finish(self, status: int) -> None:
        """Leaves the exit status."""
        self._status.put(bytes([status & 0xFF]))

    @property
    def status(self) -> int | None:
        """The exit status that the work had; None where it did not end."""
        found = self._status.get()
        return found[0] if found else None

    @property
    def answer(self) -> Unfinished | None:
        """What `keep` got last."""
        data = self._answer.get()
        found: Unfinished | None = pickle.loads(data) if data else None
        return found

    def why(self, code: int) -> str:
        """How the process ended, and what ran, for `Unfinished.ended`.

        Args:
            code: its exit status, negative for a signal.
        """
        found = json.loads(self._activities.get() or b"[]")
        words = f"ended with {exit_words(code)} before it was done"
        if code == -signal.SIGKILL:
            words += f" ({_OTHERS})"
        if found:
            _, remedy = found[-1]
            words += f", in {', in '.join(each for each, _ in reversed(found))}"
            words += f"; {remedy}" if remedy and -code not in (signal.SIGKILL, *_FORWARDED) else ""
        return sanitize(words)


_child: _Child | None = None
"""Of the child; None in a process that has no such parent."""


def begin() -> None:
    """Continues in a child; its parent waits for it, and ends with its exit status.

    On Linux, where alone kernels run; elsewhere the process goes on by itself.
    """
    global _child
    if sys.platform != "linux":
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that is closed is None
        stream.flush()
    shared = _Child()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no exit status is kept
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    parent = os.getpid()
    process = os.fork()
    if process:
        _end_as(process, shared)
    _end_with(parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once())
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _child = shared
    watchdog.observe(shared.note)
    os.register_at_fork(after_in_child=_leave_parent)
    output.answer_from_this_process()


def _leave_parent() -> None:
    """In a copy of the child: the parent waits for the child alone."""
    global _child
    _child = None
    watchdog.observe(None)


def _end_with(parent: int) -> None:
    """Has this process end with its parent, whatever ends that."""
    import ctypes  # 2 ms, while the parent waits

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(EXIT_UNHEALTHY)


def _interrupt_once() -> Callable[[int, FrameType | None], None]:
    """A handler of SIGINT as Python's own, which raises once for each Ctrl-C."""
    last = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > _ONE_CTRL_C:
            signal.default_int_handler(number, frame)

    return interrupt


def keep(answer: Unfinished | None) -> None:
    """Keeps what is to be printed if the process ends now; None for nothing, as while the whole answer is printed."""
    if _child is not None:
        _child.keep(answer)


def finish(status: int) -> None:
    """Says that the work has ended, and its answer is printed.

    Args:
        status: the exit status.
    """
    if _child is not None:
        _child.finish(status)


def _end_as(process: int, shared: _Child) -> NoReturn:
    """The parent: waits for the child, and ends this process."""
    status = EXIT_UNHEALTHY
    try:
        code, got = _wait(process)
        was_asked = -code in got
        if shared.status is None and was_asked:
            with contextlib.suppress(OSError):  # a terminal that has gone, which nobody reads
                _exit_status(code, shared, was_asked)
            _end_by(-code)
        status = _exit_status(code, shared, was_asked)
    except Exception:  # a fault of ours, or a closed standard output: it must not go on as the child does
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(process: int) -> tuple[int, set[int]]:
    """Waits for a process and hands it the signals of this one.

    Returns:
        Its exit status, negative for a signal, and the signals that this process got.
    """
    got: set[int] = set()
    for number in signal.sigpending() & {*_FORWARDED}:  # a terminal may have sent it before there was a child
        os.kill(process, number)
        got.add(number)
    interruptions, last = 0, -math.inf
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), got
        found = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if found.si_signo == signal.SIGCHLD:
            continue
        got.add(found.si_signo)
        if found.si_signo == signal.SIGINT:
            before, last = last, time.monotonic()
            if last - before <= _ONE_CTRL_C:
                continue
            interruptions += 1
            if interruptions == _INTERRUPTIONS - 1:
                output.print_message("note", "the process is still running; Ctrl-C once more kills it")
        if interruptions >= _INTERRUPTIONS:
            os.kill(process, signal.SIGKILL)
            got.add(signal.SIGKILL)
        elif found.si_code != _SI_KERNEL:
            os.kill(process, found.si_signo)


def _end_by(number: int) -> None:
    """Ends this process by the signal that has ended the child, as if there were none."""
    number = signal.SIGINT if number == signal.SIGKILL else number  # by Ctrl-C
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _exit_status(code: int, shared: _Child, was_asked: bool) -> int:
    """The exit status for a child that has ended, after what is to be said of it.

    Args:
        code: its exit status, negative for a signal.
        shared: what it left.
        was_asked: the signal came from here.
    """
    if shared.status is not None:
        if code not in (shared.status, 0) and not was_asked:
            output.print_message("warning", f"the process ended with {exit_words(code)} after its answer")
        return shared.status or (code if code >= 0 else 128 - code)
    if sys.stderr.isatty():
        output.write_error_text("\x1b[?25h\n")  # a progress bar hides the cursor
    why, answer, status = shared.why(code), shared.answer, EXIT_UNHEALTHY
    if answer is not None:
        status = answer.ended(why, was_asked) or EXIT_UNHEALTHY
        sys.stdout.flush()
    if answer is None or was_asked:
        output.print_message("error", f"the process of the command {why}")
    return status
