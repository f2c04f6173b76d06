"""The command line tool under ``PYTHONOPTIMIZE=2``, which drops docstrings: it prints what it prints otherwise."""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path

from tests.lib.cli import Run
from tests.lib.fresh_process import python
from vllm_moe_oracle.cli import commands

_CONFIG = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b-mxfp8.json"

_PRINT_ALL = """
import contextlib, io, json, sys

assert not True, "assertions run: the process does not optimize"
from vllm_moe_oracle.cli import main

found = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["vllm-moe-oracle", *line]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main.main()
    found.append(out.getvalue())
print(json.dumps([__doc__, main.__doc__, found]))
"""
"""Runs each line of a JSON list in one process, and prints what each printed."""


def test_help_and_reasons_do_not_need_docstrings(run: Run) -> None:
    """One process for all."""
    names = [each.name for each in pkgutil.iter_modules(commands.__path__)]
    lines = [["--help"], *([name, "--help"] for name in names)]
    lines.append(["explain", str(_CONFIG), "--device", "nvidia-h200", "--verbose"])
    ended = python("-B", "-c", _PRINT_ALL, json.dumps(lines), PYTHONOPTIMIZE="2")
    assert ended.returncode == 0, ended.stderr
    *docstrings, found = json.loads(ended.stdout)
    assert docstrings == [None, None]
    for line, text in zip(lines, found, strict=True):
        assert text and text == run(*line).out, line
