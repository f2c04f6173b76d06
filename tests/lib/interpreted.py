"""Kernels in Triton's interpreter, which is chosen when kernels are defined: in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.lib import fresh_process


def run_interpreted(file: str) -> list[str]:
    """The words that a file prints which runs as a script, with kernels interpreted."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    run = fresh_process.python(file, timeout=900, TRITON_INTERPRET="1", PYTHONPATH=paths)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()
