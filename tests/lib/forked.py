"""Processes that fork from a server which has imported vLLM; each import of its own would take 8 s of a processor.

For tests of what is done after the import. The server has run no test and has no threads. Each process that runs tests
has one. Where its test modules import vLLM, it is a copy of that process from before the first test (`copy_this`);
elsewhere it is a new interpreter, which starts with the first fork.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

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


def copy_this() -> None:
    """Starts the server as a copy of this process, which must have imported vLLM and run nothing that it would keep."""
    context()
    resource_tracker.ensure_running()
    new_interpreter = util.spawnv_passfds
    util.spawnv_passfds = _copy
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = new_interpreter


def _copy(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """In place of `util.spawnv_passfds`: a copy of this process runs the program of the new interpreter."""
    process = os.fork()
    if process:
        return process
    try:
        forkserver.ForkServer.__init__(forkserver._forkserver)  # its lock is held
        _leave_pytest(descriptors)
        _forget_answers()
        gc.freeze()
        exec(arguments[-1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # also where `forkserver.main` has ended


def _leave_pytest(descriptors: Sequence[int]) -> None:
    """Undoes in a copy what pytest has changed: open files, streams, handlers of logging, and warnings as errors."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in map(int, os.listdir("/proc/self/fd")):
        if name > 2 and name not in (null, *descriptors):
            os.dup2(null, name, inheritable=False)
    root = logging.getLogger()
    root.handlers.clear()
    others = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    for number, name in enumerate(("stdout", "stderr"), 1):
        captured, stream = getattr(sys, name), open(number, "w", 1, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        for handler in (handler for each in others for handler in each.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream is captured:
                handler.setStream(stream)
    sys.unraisablehook = sys.__unraisablehook__
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _forget_answers() -> None:
    """Clears what this project's functions have cached while tests were collected: a process that forks from the copy
    may have other entry points, variables and files."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "vllm_moe_oracle":
            for value in [*vars(module).values()]:
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


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
