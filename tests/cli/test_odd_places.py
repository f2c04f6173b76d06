"""Paths that are not UTF-8, a working directory that is gone, and devices instead of files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.lib import fresh_process
from tests.lib.cli import CONFIGS, Run
from vllm_moe_oracle.cli.main import _IN_WORKING_DIRECTORY
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.verification.checkpoint_tensors import TensorFiles

ODD = os.fsdecode(b"x\xff.html")


def test_a_page_shows_a_command_with_a_path_that_is_not_utf8(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / ODD
    monkeypatch.setattr("sys.argv", ["vllm-moe-oracle", "report", "-o", str(page)])
    assert run("report", "-o", str(page)).status == 0
    assert r"x\xff.html" in page.read_bytes().decode()


def test_a_page_is_written_in_the_locale_c(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "ü.html"
    ended = fresh_process.python(
        *fresh_process.TOOL, "report", "-o", page, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert ended.returncode == 0, ended.stderr
    assert "ü.html" in page.read_text(encoding="utf-8")


def test_a_folder_that_safetensors_cannot_name_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=r"the path is not in UTF-8.*the file may be good. Rename") as caught:
        TensorFiles(folder)
    assert type(caught.value) is CheckpointError


COMMANDS = {
    "report": ["report"],
    "verify": ["verify", "x", "--json"],
    "tune": ["tune", "x"],
    "bench": ["bench", "x"],
    "ab": ["ab", "x"],
    "status": ["status", "--check"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_working_directory_that_is_gone_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gone, before = tmp_path / "gone", Path.cwd()
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        ended = run(*COMMANDS[name])
    finally:
        os.chdir(before)
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith(f"error: {name}")
    assert "needs the working directory, which cannot be used: No such file or directory. Change into" in ended.err


def test_every_command_that_imports_torch_is_tried_there() -> None:
    assert COMMANDS.keys() - {"status"} == _IN_WORKING_DIRECTORY


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/dev/full", "it is a device, which keeps nothing"),
        ("/dev/null", "it is a device, which keeps nothing"),
        ("/proc/x", "nothing can be written in /proc"),
        ("{folder}", "it is a directory"),
        ("{folder}/nowhere/x", "there is no directory"),
        ("{folder}/pipe", ""),
        ("{folder}/new", ""),
        ("{folder}/old", ""),
    ],
)
def test_a_report_that_nobody_could_read_is_a_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reason: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    shutil.copy(CONFIGS / "gpt-oss-20b.json", tmp_path / "old")
    monkeypatch.setenv("MOE_ORACLE_REPORT", place.format(folder=tmp_path))
    said = run("status").err
    assert (f"cannot be written: {reason}" in said) if reason else not said
