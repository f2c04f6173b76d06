"""Files and folders that the user may not read, enter or write in: one line that names the place, and status 2."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib import permissions
from tests.lib.cli import CONFIGS, Run

CONFIG = CONFIGS / "gpt-oss-20b.json"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint's folder, whose modes are given back at the end."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIG, folder / "config.json")
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    yield folder
    folder.chmod(0o700)


CLOSED = {
    "explain, a config": ("config.json", 0o000, ["explain", "{model}", "--device", "h200"], "config.json"),
    "explain, a folder": (".", 0o000, ["explain", "{model}", "--device", "h200"], ""),
    "explain, not to be entered": (".", 0o600, ["explain", "{model}", "--device", "h200"], ""),
    "verify, a config": ("config.json", 0o000, ["verify", "{model}"], "config.json"),
    "verify, a folder": (".", 0o600, ["verify", "{model}"], ""),
    "verify, a shard": ("model.safetensors", 0o000, ["verify", "{model}"], "model.safetensors"),
    "verify, an index": (
        "model.safetensors.index.json", 0o000, ["verify", "{model}"], "model.safetensors.index.json"
    ),
    "verify, not to be listed": (".", 0o300, ["verify", "{model}"], ""),
    "ab": (".", 0o600, ["ab", "{model}/x"], "x"),
    "report": ("config.json", 0o000, ["report", "{model}/config.json"], "config.json"),
    "tune --import": ("config.json", 0o000, ["tune", "--import", "{model}/config.json"], "config.json"),
    "a device": ("config.json", 0o000, ["explain", str(CONFIG), "--device", "{model}/config.json"], "config.json"),
}  # fmt: skip
"""By case: what is closed and its mode, the command line, and what the error names."""


@pytest.mark.parametrize("case", CLOSED)
def test_what_may_not_be_read_is_named(run: Run, place: Path, case: str) -> None:
    closed, mode, command, named = CLOSED[case]
    (place / closed).touch()
    (place / closed).chmod(mode)
    with permissions.enforced():
        result = run(*(word.format(model=place) for word in command))
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"{place / named}: cannot be read: Permission denied" in result.err


@pytest.mark.parametrize("kind", ["closed", "removed"])
def test_the_current_folder_is_not_needed(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A name of a GPU is no file there, and a path from the root does not go through it."""
    before = Path.cwd()
    monkeypatch.chdir(place)
    if kind == "removed":
        shutil.rmtree(place)
        place.parent.joinpath("model").mkdir()  # for the fixture; the process is in the old one
    else:
        place.chmod(0o000)
    try:
        with permissions.enforced():
            assert run("explain", str(CONFIG), "--device", "h200", "--brief").status == 0
            result = run("explain", ".", "--device", "h200")
    finally:
        os.chdir(before)
    remedy = "Give the folder that config.json and the tensors are in"
    words = {
        "closed": "cannot be read: Permission denied",
        "removed": f"the folder has no config.json: it is empty. {remedy}",
    }
    assert (result.status, result.err) == (2, f"error: .: {words[kind]}\n")


def test_modes_hold_for_the_test_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o000)
    with permissions.enforced(), pytest.raises(PermissionError):
        file.read_bytes()
    with permissions.enforced():
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            (tmp_path / "new").touch()
    tmp_path.chmod(0o700)
    if os.geteuid() == 0:
        assert file.read_bytes() == b""
