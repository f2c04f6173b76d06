"""Imports third parties' entry points in processes of their own, to find those that end the process or never return."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from ..errors import exit_words
from ..oracle.registry import ENTRY_POINT_GROUP

PROBE_SECONDS = 60.0
"""Time limit of all imports together: a backend may import torch and vLLM."""

# An exception is no finding: the entry point is imported again in this process, which reports it.
_CHILD = """
import os, sys
from importlib.metadata import entry_points
sys.path[:] = [each for each in sys.path if each]
try:
    for point in entry_points(group=sys.argv[1], name=sys.argv[2]):
        point.load()
except BaseException:
    pass
os.write(int(sys.argv[4]), sys.argv[3].encode())
os._exit(0)
"""


def find_unsafe(points: Iterable[EntryPoint], seconds: float = PROBE_SECONDS) -> dict[str, str]:
    """Why importing an entry point would end or block this process, by name; all are imported at the same time.

    Args:
        points: the entry points.
        seconds: the time limit.
    """
    children = {point.name: _Child(point.name) for point in points}
    deadline = time.monotonic() + seconds
    found = {name: child.finding(deadline, seconds) for name, child in children.items()}
    return {name: reason for name, reason in found.items() if reason}


class _Child:
    """A process that imports one entry point."""

    def __init__(self, name: str) -> None:
        self._token = secrets.token_hex(8)  # so that no exit status of the import looks like success
        self._reader, writer = os.pipe()
        command = [sys.executable, "-c", _CHILD, ENTRY_POINT_GROUP, name, self._token, str(writer)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)

    def finding(self, deadline: float, seconds: float) -> str:
        """Waits for the process; "" if it imported the entry point, or an exception came of it."""
        try:
            status = self._process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._reader)
            return f"its import did not end within {seconds:g} s; a server would wait for it"
        os.set_blocking(self._reader, False)
        try:
            if os.read(self._reader, 64) == self._token.encode():
                return ""
        except BlockingIOError:  # a child of the child holds the pipe open
            pass
        finally:
            os.close(self._reader)
        return f"its import ends the process with {exit_words(status)}; a server would end likewise"
