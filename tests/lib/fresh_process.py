"""Python in a process of its own, without the caller's settings of this project."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TOOL = ("-m", "vllm_moe_oracle.cli")
"""The command line tool, as arguments of Python."""


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without those settings, and with other variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MOE_ORACLE_")} | changes


def python(
    *arguments: object, cwd: Path | None = None, timeout: float = 120, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end; variables as of `environment`."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment(**changes), cwd=cwd, capture_output=True, text=True, timeout=timeout)


def has_ended(process: int, seconds: float = 60.0) -> bool:
    """Whether a process ends within that time; one that waits to be reaped has ended."""
    until = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z" or time.monotonic() > until:
            return state == "Z"
        time.sleep(0.02)
