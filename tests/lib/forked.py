"""Processes that fork from a server which has imported vLLM; each import of its own would take 8 s of a processor.

For tests of what is done after the import. The server has done nothing else and has no threads. Each process that runs
tests has one, which starts with the first fork.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PRELOADED = (
    "torch.distributed",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization",
    "vllm_moe_oracle.compat.standalone_layer",
    "vllm_moe_oracle.measuring.engine",
    "vllm_moe_oracle.methods.wna16",
    "tests.lib.gloo_ranks",
)
"""Modules that the server imports; it passes over one whose own imports are missing."""


def context() -> ForkServerContext:
    """Starts processes as `multiprocessing` does. They have the server's environment, not the test's."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(_PRELOADED))
    return made


def set_environment(variables: dict[str, str]) -> None:
    """For the beginning of a process: the server has the variables of the first test."""
    os.environ.clear()
    os.environ.update(variables)


def python(code: str, environment: dict[str, str], seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """What ``python -c CODE`` leaves in a process that has imported vLLM.

    Args:
        code: a program.
        environment: all its variables.
        seconds: time limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = context().Process(target=_execute, args=(code, environment, *map(str, files)))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, seconds)
        out, err = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(code, process.exitcode or 0, out, err)


def _execute(code: str, environment: dict[str, str], *files: str) -> None:
    set_environment(environment)
    for number, (name, file) in enumerate(zip(("stdout", "stderr"), files, strict=True), 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
