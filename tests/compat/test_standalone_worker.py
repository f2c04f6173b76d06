"""A process that stands for a worker of one rank leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the worker is vLLM's")

CODE = """
import atexit, os, sys, torch
# Runs after what the worker registers: first in, last out.
atexit.register(lambda: print("groups", torch.distributed.is_initialized()))
from vllm_moe_oracle.compat.standalone_layer import single_rank_worker
with single_rank_worker("cpu", 16):
    print("entered", torch.distributed.get_world_size(), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.full
@pytest.mark.parametrize(("end", "said"), [("ended", "entered 1 groups False"), ("killed", "entered 1")])
def test_its_groups_and_files_go_with_the_process(end: str, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, end], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == {"ended": 0, "killed": -signal.SIGKILL}[end], done.stderr[-2000:]
    assert " ".join(done.stdout.split()[-len(said.split()) :]) == said
    assert not [each for each in tmp_path.iterdir() if "moe-oracle" in each.name]
