"""Copies of the tree, to change and to test: for drills and for injected faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lib import fresh_process

ROOT = Path(__file__).resolve().parents[2]
_servers = threading.local()
_IDENTITY = ("-c", "user.name=drill", "-c", "user.email=drill@example.org", "-c", "core.hooksPath=")


@dataclass(frozen=True)
class Run:
    """What became of the tests in a copy.

    Attributes:
        passed: all of them passed, and there was one at least.
        failure: where not: the first test that failed, or the file that could not be collected, as pytest names it.
            Empty where pytest did not even begin (no such file, no test selected): that notices nothing.
        output: the end of what pytest printed.
    """

    passed: bool
    failure: str
    output: str


class TreeCopy:
    """A copy of the tree in a git repository of its own.

    Attributes:
        root: its folder.
        environment: variables for what runs in it; ``PYTHONPATH`` is put behind the copy itself.
    """

    def __init__(self, folder: Path) -> None:
        """Copies the files of the working tree into a new folder ``tree`` of this folder: those that git tracks, and
        those that it neither tracks nor ignores."""
        self.root = root = folder / "tree"
        self.root.mkdir()
        self.environment: dict[str, str] = {}
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
        subprocess.run(["cp", "--parents", "-t", str(root), *names], cwd=ROOT, check=True)
        self._git("init", "-q")
        self.commit()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces a text that a file has once.

        Raises:
            ValueError: the file has none, or several: whoever asks is out of date.
        """
        path = self.root / name
        path.write_text(replaced(path.read_text(encoding="utf-8"), old, new, name), encoding="utf-8")

    def beside(self, name: str) -> Path:
        """A new empty folder beside the tree, in place of the one of that name."""
        folder = self.root.parent / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def write(self, name: str, text: str) -> None:
        """Writes a file, and its folder where there is none."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add(self, name: str, text: str) -> None:
        """Writes a new file.

        Raises:
            FileExistsError: the tree has it: the change would be another one.
        """
        if (self.root / name).exists():
            raise FileExistsError(name)
        self.write(name, text)

    def commit(self) -> None:
        """Makes the files as they are what `touched` and `restore` compare with."""
        self._git("add", "-A")
        self._git("commit", "-q", "--allow-empty", "-m", "drill")

    def touched(self) -> tuple[str, ...]:
        """Files that were edited, added or removed since the last commit."""
        self._git("add", "-A")
        return tuple(self._git("diff", "--cached", "--name-only").split())

    def restore(self) -> None:
        """Undoes everything since the last commit."""
        self._git("reset", "-q", "--hard")
        self._git("clean", "-fdq")

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the copy, which is what it imports; no setting of this project is passed on."""
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.root, env=self._variables(), capture_output=True, text=True)

    def test(self, *arguments: str) -> Run:
        """Runs pytest, up to the first failure, with these arguments."""
        words = ["-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *arguments]
        out, err = (self.root.parent / f"pytest.{name}" for name in ("out", "err"))
        for file in (out, err):
            file.unlink(missing_ok=True)
        request = {"arguments": words, "folder": str(self.root), "environment": self._variables()}
        status = _ask_server(request | {"out": str(out), "err": str(err)})
        printed = out.read_text(encoding="utf-8")
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
        said = (printed + err.read_text(encoding="utf-8"))[-3000:]
        return Run(status == 0, found.group(1) if found and status else "", said)

    def _variables(self) -> dict[str, str]:
        places = [str(self.root), *self.environment.get("PYTHONPATH", "").split()]
        variables = fresh_process.environment(OMP_NUM_THREADS="1", **self.environment)
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # a copy is tested several times
        return variables | {"PYTHONPATH": os.pathsep.join(places)}

    def _git(self, *words: str) -> str:
        command = ["git", *_IDENTITY, *words]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout


def _ask_server(request: dict[str, Any]) -> int:
    """The exit status of a run; each thread that asks has a server, which ends with this process."""
    server: subprocess.Popen[str] | None = getattr(_servers, "own", None)
    if server is None or server.poll() is not None:
        command = [sys.executable, str(ROOT / "tests" / "lib" / "pytest_server.py")]
        variables = fresh_process.environment(OMP_NUM_THREADS="1")
        variables.pop("PYTHONPATH", None)
        server = _servers.own = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables, text=True
        )
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def replaced(text: str, old: str, new: str, name: str) -> str:
    """The text with `new` in place of `old`.

    Raises:
        ValueError: `old` is not there once.
    """
    if (count := text.count(old)) != 1:
        raise ValueError(f"{name} has {old!r} {count} times, not once")
    return text.replace(old, new)
