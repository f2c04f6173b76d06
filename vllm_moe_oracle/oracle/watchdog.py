"""Reports on code that does not return, since Python cannot stop it safely, and keeps third parties' code in bounds."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from ..errors import printable

WATCHED_LOGGER = "vllm.moe_oracle.third_parties"
"""Logger of what third parties' code is doing."""

logger = logging.getLogger(WATCHED_LOGGER)

FIRST_SECONDS = 10.0
"""Code that runs longer is reported, then again each time that its duration has doubled."""

Activity = tuple[str, str]
"""What runs, as the subject of a sentence, and what keeps it from running."""

Observer = Callable[[Sequence[Activity]], None]
"""Gets everything that runs, the outermost first."""


class _Activities:
    """What runs in this process that may end it, for an observer outside of the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: dict[object, Activity] = {}
        self._observer: Observer | None = None

    def observe(self, observer: Observer | None) -> None:
        """Has an observer called with what runs, each time that this changes: it must be quick, and may not raise. None
        for none."""
        self._observer = observer

    @contextlib.contextmanager
    def doing(self, what: str, remedy: str) -> Iterator[None]:
        """Tells the observer what the code inside is, in case that it ends the process.

        Args:
            what: as the subject of a sentence.
            remedy: what keeps it from running.
        """
        key = object()
        with self._lock:
            self._running[key] = what, remedy
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                del self._running[key]
                self._tell()

    def _tell(self) -> None:
        if self._observer is not None:
            self._observer([*self._running.values()])


_activities = _Activities()
observe, doing = _activities.observe, _activities.doing


class _OnStandardError(io.TextIOBase):
    """Standard output of third parties' code: it belongs to the tool's answer, which may be JSON."""

    def writable(self) -> bool:
        """It can be written."""
        return True

    def fileno(self) -> int:
        """That of standard error."""
        return sys.stderr.fileno()

    def write(self, text: str) -> int:
        """Writes the text, printable, to standard error; it is lost where nobody can read that."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(printable(text))
        return len(text)


class _StandardOutput:
    """Descriptor 1 of the process. While third parties' code runs in any thread, it leads to standard error.

    Libraries and other programs write to it below Python. What they write is not made printable: that would take a pipe
    and a thread that reads it. Lines that other threads print meanwhile go to standard error, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._kept: tuple[int, tuple[int, int]] | None = None

    @contextlib.contextmanager
    def on_standard_error(self) -> Iterator[None]:
        """Leads it to standard error, or nowhere if that is closed; it stays closed if it was."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._redirect()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._put_back()

    def _redirect(self) -> None:
        _flush_standard_output()
        with contextlib.suppress(OSError):  # it is closed, or no descriptor is left
            kept = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # not in the place of a closed standard error
            self._kept = kept, _file_of(kept)
            try:
                os.dup2(2, 1)
            except OSError:
                _lead_nowhere(os.O_WRONLY)

    def _put_back(self) -> None:
        _flush_standard_output()
        kept, self._kept = self._kept, None
        if kept is None:
            return
        descriptor, file = kept
        with contextlib.suppress(OSError):
            if _file_of(descriptor) == file:
                os.dup2(descriptor, 1)
                os.close(descriptor)
                return
        # The code has closed every descriptor. An answer must not go to standard error as if all were well: writing to
        # this fails.
        with contextlib.suppress(OSError):
            _lead_nowhere(os.O_RDONLY)


_standard_output = _StandardOutput()


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _lead_nowhere(mode: int) -> None:
    """Opens descriptor 1 on what takes everything, or with a mode for reading nothing."""
    nowhere = os.open(os.devnull, mode)
    if nowhere != 1:
        os.dup2(nowhere, 1)
        os.close(nowhere)


def _flush_standard_output() -> None:
    """Writes what Python and the C library hold back, which would follow the redirection otherwise."""
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()  # type: ignore[union-attr]
    _c_flush()()


@functools.cache
def _c_flush() -> Callable[[], object]:
    """What flushes the C library's standard output."""
    try:
        import ctypes  # 2 ms, only where there is a third party

        library = ctypes.CDLL(None)
        return functools.partial(library.fflush, ctypes.c_void_p.in_dll(library, "stdout"))
    except (ImportError, AttributeError, OSError, ValueError, TypeError):  # another system
        return lambda: None


@contextlib.contextmanager
def report_while_running(what: str, remedy: str) -> Iterator[None]:
    """Warns while the code inside runs for long.

    Args:
        what: what runs, as the subject of a sentence.
        remedy: what keeps it from running.
    """
    done = threading.Event()

    def watch() -> None:
        waited = pause = FIRST_SECONDS
        while not done.wait(pause):
            logger.warning("moe_oracle: %s for %.0f s; %s", what, waited, remedy)
            pause, waited = waited, 2 * waited

    thread = threading.Thread(target=watch, name="moe_oracle watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # it is waiting, or in the middle of a line of the log


@contextlib.contextmanager
def third_party_code(what: str, remedy: str) -> Iterator[None]:
    """As `doing` and `report_while_running`. What the code prints goes to standard error, below Python and by other
    programs, too. The recursion limit is put back. A process that the code has forked ends where it leaves the code."""
    limit, process = sys.getrecursionlimit(), os.getpid()
    try:
        with (
            doing(what, remedy),
            report_while_running(f"{what} has been running", remedy),
            _standard_output.on_standard_error(),
            contextlib.redirect_stdout(_OnStandardError()),
        ):
            try:
                yield
            finally:
                end_copy(process, what, remedy)
    finally:
        sys.setrecursionlimit(limit)


def end_copy(process: int, what: str, remedy: str) -> None:
    """Ends this process, at once, if it is a copy of another one: it would go on with all that the other one does, and
    answer a second time.

    Args:
        process: the other one's id.
        what: what has forked it, as the subject of a sentence.
        remedy: what keeps that from running.
    """
    if os.getpid() != process:
        logger.error("moe_oracle: %s forked process %d, and the copy went on: it ends here; %s", what, process, remedy)
        os._exit(1)
