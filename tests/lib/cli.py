"""The command line tool run in the test's process."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from vllm_moe_oracle.cli import main as cli

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"

Run = Callable[..., "Result"]
Write = Callable[..., Path]
"""Writes a model's config, with fields replaced, and returns its path."""

_click_command = functools.cache(typer.main.get_command)
"""Typer makes the commands of a tool from their functions each time that it is called, which takes longer than most
commands. They keep nothing of a call."""


class Result:
    """What a run left: exit status, standard output, standard error."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def text(self) -> str:
        """Standard output with single spaces, however its lines were wrapped."""
        return " ".join(self.out.split())

    @property
    def messages(self) -> str:
        """Standard error likewise."""
        return " ".join(self.err.split())

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs the tool without a terminal, 80 columns wide, and without settings of the caller."""
    for name in [*os.environ]:
        if name.startswith("MOE_ORACLE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(typer.main, "get_command", _click_command)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["vllm-moe-oracle", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return Result(int(ended.value.code or 0), written.out, written.err)

    return call
