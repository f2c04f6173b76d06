"""Starts the job runners of `tests/e2e`: vLLM in a process of its own, all jobs of a test file in one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.lib import forked

ROOT = Path(__file__).parents[2]
SECONDS = 900
PROGRAM = """
import os, runpy, sys

os.chdir({root!r})
sys.argv[1:] = {files!r}
sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def run(
    script: str,
    jobs: Mapping[Any, dict[str, Any]],
    folder: Path,
    log: list[str] | None = None,
    new_interpreters: bool = False,
    **environment: str,
) -> dict[Any, Any]:
    """Runs jobs one after the other in one process.

    Args:
        script: a file of `tests/e2e` that takes a file of jobs and one for results.
        jobs: by name.
        folder: where both files go.
        log: gets the lines that the process and its ranks print.
        new_interpreters: the process and its ranks import vLLM themselves, as where it is served, instead of being
            forked where it is imported: for plugins that act on one rank while it starts.
        environment: variables of the process, beside this one's.

    Returns:
        The result of each job, by name.
    """
    files = [str(folder / "jobs.json"), str(folder / "results.json")]
    Path(files[0]).write_text(json.dumps(list(jobs.values())))
    module = f"tests.e2e.{Path(script).stem}"
    # One core for each rank: on a CPU vLLM binds them to NUMA nodes of their own otherwise.
    ranks = max(_ranks(job.get("engine", {})) for job in jobs.values())
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}
    variables = {**os.environ, "VLLM_PLUGINS": "moe_oracle", **cores, **environment}
    if new_interpreters:
        done = subprocess.run(
            [sys.executable, "-m", module, *files],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=variables | {"SPAWN_RANKS": "1"},
            timeout=SECONDS,
        )
    else:
        done = forked.python(PROGRAM.format(root=str(ROOT), files=files, module=module), variables, SECONDS)
    if log is not None:
        log += (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(jobs, json.loads(Path(files[1]).read_text()), strict=True))


def _ranks(engine: Mapping[str, Any]) -> int:
    return int(engine.get("tensor_parallel_size", 1) * engine.get("data_parallel_size", 1))


def ranks_that_said(log: Iterable[str], *words: str) -> set[int]:
    """The tensor-parallel ranks that printed a line with all these words."""
    lines = [line for line in log if all(each in line for each in words)]
    return {int(rank) for line in lines for rank in re.findall(r"TP(\d+)", line)}
