"""What tests/run.sh makes of pytest's exit statuses, with programs that only say how they were called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "run.sh"


def run(folder: Path, arguments: list[str], statuses: list[int]) -> tuple[int, str, list[str]]:
    """Exit status and output of run.sh in a tree of its own, and its calls of pytest, which ends so each time."""
    (folder / "tests").mkdir()
    shutil.copy(RUN, folder / "tests")
    (folder / "examples").mkdir()
    (folder / "examples" / "setup.sh").write_text("")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    calls, left = folder / "calls", folder / "left"
    calls.touch()
    left.write_text("".join(f"{status}\n" for status in statuses))
    for name in ("ruff", "mypy"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "pytest").write_text(
        f'#!/bin/sh\necho "$*" >> "{calls}"\nstatus=$(head -n 1 "{left}")\nsed -i 1d "{left}"\nexit "$status"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    ended = subprocess.run(["bash", str(folder / "tests" / "run.sh"), *arguments], capture_output=True, text=True)
    assert not left.read_text(), "pytest was called less often"
    return ended.returncode, ended.stdout, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("tier", "statuses", "passes", "says"),
    [
        ("--full", [0], True, False),
        ("--full", [1, 0], True, True),
        ("--full", [1, 1], False, False),
        ("--full", [1, 2], False, False),
        ("--full", [2], False, False),
        ("--matrix", [1], False, False),
        ("", [0], True, False),
        ("", [1], False, False),
    ],
)
def test_what_failed_in_the_full_tier_gets_one_more_run(
    tmp_path: Path, tier: str, statuses: list[int], passes: bool, says: bool
) -> None:
    status, output, calls = run(tmp_path, [*filter(None, [tier]), "-k", "a word"], statuses)
    assert (status == 0) is passes and ("PASSED only alone" in output) is says
    assert len(calls) == len(statuses)
    assert all(each.endswith("-k a word") for each in calls)
    assert ["--last-failed" in each for each in calls] == [False, True][: len(calls)]
