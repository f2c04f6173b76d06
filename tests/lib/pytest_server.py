"""Runs pytest in copies of the tree, in processes that fork from this one, which has imported torch and vLLM.

A program, not a module: nothing of this tree may be imported before the fork. (`forked` is for processes that import
this tree itself.) Each line of standard input is a JSON object with the keys arguments, folder, environment, out and
err, the last two paths of files; each is answered by a line with the exit status. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from typing import Any

PRELOADED = (
    "pytest",
    "hypothesis",
    "msgspec",
    "typer",
    "torch.distributed",
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization",
)
"""Modules that are imported before; one whose own imports are missing is passed over."""


def main() -> None:
    """See the module."""
    sys.path.pop(0)  # this file's folder
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    import pytest

    for number, file in enumerate((os.devnull, out, err)):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    status: Any = 70
    try:
        # Plugins that are preloaded are not rewritten, and need not be.
        status = pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))


if __name__ == "__main__":
    main()
