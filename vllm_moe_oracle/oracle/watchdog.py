"""Reports on other packages' code that does not return. Python cannot stop it safely, so the log says what it is."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

WATCHED_LOGGER = "vllm.moe_oracle.third_parties"
"""Logger of what third parties' code is doing."""

logger = logging.getLogger(WATCHED_LOGGER)

FIRST_SECONDS = 10.0
"""Code that runs longer is reported, then again each time that its duration has doubled."""


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
