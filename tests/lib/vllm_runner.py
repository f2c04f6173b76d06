"""Starts the job runners of `tests/e2e`: vLLM in a process of its own, all jobs of a test file in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 900


def run(
    script: str,
    jobs: Mapping[Any, dict[str, Any]],
    folder: Path,
    log: list[str] | None = None,
    **environment: str,
) -> dict[Any, Any]:
    """Runs jobs one after the other in one process: importing vLLM is most of the time.

    Args:
        script: a file of `tests/e2e` that takes a file of jobs and one for results.
        jobs: by name.
        folder: where both files go.
        log: gets the lines that the process and its ranks print.
        environment: variables of the process, beside this one's.

    Returns:
        The result of each job, by name.
    """
    files = [folder / "jobs.json", folder / "results.json"]
    files[0].write_text(json.dumps(list(jobs.values())))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.e2e.{Path(script).stem}", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_PLUGINS": "moe_oracle", **environment},
        timeout=SECONDS,
    )
    if log is not None:
        log += (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(jobs, json.loads(files[1].read_text()), strict=True))
