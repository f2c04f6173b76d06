"""Reports on code that does not return, since Python cannot stop it safely, and keeps third parties' code in bounds."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator

from ..errors import printable

WATCHED_LOGGER = "vllm.moe_oracle.third_parties"
"""Logger of what third parties' code is doing."""

logger = logging.getLogger(WATCHED_LOGGER)

FIRST_SECONDS = 10.0
"""Code that runs longer is reported, then again each time that its duration has doubled."""


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
    """As `report_while_running`. What the code prints goes to standard error, and the recursion limit is put back."""
    limit = sys.getrecursionlimit()
    try:
        with report_while_running(what, remedy), contextlib.redirect_stdout(_OnStandardError()):
            yield
    finally:
        sys.setrecursionlimit(limit)
