"""Copies of the tree, to change and to test: for drills and for injected faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.lib import fresh_process

ROOT = Path(__file__).resolve().parents[2]
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
        """Copies the tracked files, as they are in the working tree, into a new folder ``tree`` of this folder."""
        self.root = root = folder / "tree"
        self.root.mkdir()
        self.environment: dict[str, str] = {}
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
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
        environment = fresh_process.environment()
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **self.environment}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root), *self.environment.get("PYTHONPATH", "").split()])
        return subprocess.run([sys.executable, *words], cwd=self.root, env=environment, capture_output=True, text=True)

    def test(self, *arguments: str) -> Run:
        """Runs pytest, up to the first failure, with these arguments."""
        done = self.python("-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *arguments)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return Run(
            done.returncode == 0,
            found.group(1) if found and done.returncode else "",
            (done.stdout + done.stderr)[-3000:],
        )

    def _git(self, *words: str) -> str:
        command = ["git", *_IDENTITY, *words]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout


def replaced(text: str, old: str, new: str, name: str) -> str:
    """The text with `new` in place of `old`.

    Raises:
        ValueError: `old` is not there once.
    """
    if (count := text.count(old)) != 1:
        raise ValueError(f"{name} has {old!r} {count} times, not once")
    return text.replace(old, new)
