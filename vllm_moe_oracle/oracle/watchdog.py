"""Runs other packages' code, and reports it while it does not return: Python cannot stop it safely."""

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
def third_party_code(what: str, remedy: str) -> Iterator[None]:
    """Warns while the code inside runs for long. What it prints goes to standard error, and Python's recursion limit is
    afterwards what it was.

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
    limit = sys.getrecursionlimit()
    try:
        with contextlib.redirect_stdout(_OnStandardError()):
            yield
    finally:
        sys.setrecursionlimit(limit)
        done.set()
        thread.join()  # it is waiting, or in the middle of a line of the log
