"""Kernels in Triton's interpreter, which is chosen when kernels are defined: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: str) -> list[str]:
    """The words that a file prints which runs as a script, with kernels interpreted."""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()
