"""A process that stands for a worker of one rank leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the worker is vLLM's")

CODE = """
import atexit, torch
# Runs after what the worker registers: first in, last out.
atexit.register(lambda: print("groups", torch.distributed.is_initialized()))
from vllm_moe_oracle.compat.standalone_layer import single_rank_worker
with single_rank_worker("cpu", 16):
    import os
    print(len(os.listdir(os.environ["TMPDIR"])))
"""


@pytest.mark.full
def test_its_files_and_groups_go_with_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files, _, groups = done.stdout.split()[-3:]
    assert groups == "False"
    assert files != "0" and not [each for each in tmp_path.iterdir() if "moe-oracle" in each.name]
