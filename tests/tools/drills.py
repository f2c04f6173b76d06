"""Makes the changes that people make most often, each in a copy of the tree, and counts the files that each touches.

    python -m tests.tools.drills [NAME...] [--json FILE] [--keep FOLDER]

Each drill is done twice. Done properly, it may touch at most as many files as stated, and the tests that concern it
must pass without a line of theirs being edited. Done badly (a swapped half, a missing formula, a stale table), the same
tests must fail: a change that nobody checks is easy, and worth nothing.

Exit status: 0 every drill holds, 1 one does not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_moe_oracle.releases.supported import NEWEST

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_moe_oracle"

Change = Callable[[Path], None]
"""Edits files below the root of a copy of the tree."""


@dataclass(frozen=True)
class Drill:
    """One kind of change.

    Attributes:
        what: the change, in a phrase.
        most_files: how many files it may touch, generated ones not counted.
        change: makes it.
        spoil: makes a change that was made properly a bad one.
        tests: what must notice: arguments of pytest.
        generate: run ``python -m tests.tools.generate --write`` after it; what that writes is counted apart.
        prepare: makes the tree in which the change is missing, where it is in the tree already.
    """

    what: str
    most_files: int
    change: Change
    spoil: Change
    tests: tuple[str, ...]
    generate: bool = False
    prepare: Change | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a drill.

    Attributes:
        what: the change, in a phrase.
        touched: files that were edited or added, by path.
        generated: files that the command wrote.
        most_files: how many may be touched.
        passed: the tests pass with the proper change.
        noticed: the tests fail with the bad one.
        seconds: of both runs.
    """

    what: str
    touched: tuple[str, ...]
    generated: tuple[str, ...]
    most_files: int
    passed: bool
    noticed: bool
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the drill is as it should be."""
        return self.passed and self.noticed and len(self.touched) <= self.most_files


def replace(path: Path, pattern: str, new: str) -> None:
    """Replaces the one match of a regular expression in a file.

    Raises:
        ValueError: the file has none, or several: the drill itself is out of date.
    """
    text, count = re.subn(pattern, new, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{path} has {count} matches of {pattern!r}, not one")
    path.write_text(text, encoding="utf-8")


# --- A GPU -----------------------------------------------------------------------------------------------------------


def _add_gpu(tree: Path) -> None:
    folder = tree / PACKAGE / "devices"
    spec = json.loads((folder / "nvidia-h200.json").read_text(encoding="utf-8"))
    spec |= {"name": "NVIDIA H20", "aliases": ["h20"], "sm_count": 78, "memory_gib": 96}
    (folder / "nvidia-h20.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")


def _gpu_with_a_used_alias(tree: Path) -> None:
    replace(tree / PACKAGE / "devices" / "nvidia-h20.json", r'"h20"', '"h200"')


# --- A release of vLLM -----------------------------------------------------------------------------------------------


def _newest_line() -> str:
    text = (ROOT / PACKAGE / "releases" / "supported.py").read_text(encoding="utf-8")
    return re.findall(r"^    Release\(.*\n", text, re.MULTILINE)[-1]


def _forget_newest_release(tree: Path) -> None:
    replace(tree / PACKAGE / "releases" / "supported.py", re.escape(_newest_line()), "")


def _add_release(tree: Path) -> None:
    end = r'^\)\n(?="""Oldest first\."""\n\nRELEASES)'
    replace(tree / PACKAGE / "releases" / "supported.py", end, f"{_newest_line()})\n")


def _stale_generated_table(tree: Path) -> None:
    replace(tree / "README.md", rf"^\| {re.escape(NEWEST)} .*\n", "")


# --- A backend of our own --------------------------------------------------------------------------------------------


def _add_backend(tree: Path) -> None:
    example = (tree / "examples" / "add_a_backend.py").read_text(encoding="utf-8")
    body = re.split(r"^(?:def main|if __name__)", example, maxsplit=1, flags=re.MULTILINE)[0]
    name = re.findall(r"^class (\w+)\(Backend\)", body, re.MULTILINE)[0]
    if "\nBACKEND = " not in body:
        body += f"\n\nBACKEND = {name}()\n"
    (tree / PACKAGE / "backends" / "dequantized_once.py").write_text(body, encoding="utf-8")


def _backend_that_changes_its_input(tree: Path) -> None:
    replace(
        tree / PACKAGE / "backends" / "dequantized_once.py",
        r"^        return \{name: dequantize\(",
        "        expert['w13'].view(torch.uint8).zero_()\n        return {name: dequantize(",
    )


# --- A wrapper of one of vLLM's classes ------------------------------------------------------------------------------


def _add_wrapper(tree: Path) -> None:
    folder = tree / PACKAGE / "backends"
    text = (folder / "marlin_mxfp8.py").read_text(encoding="utf-8")
    text = text.replace('"marlin_mxfp8"', '"marlin_mxfp8_other"').replace("priority = 30.0", "priority = 31.0")
    (folder / "marlin_mxfp8_other.py").write_text(text, encoding="utf-8")


def _wrapper_of_no_class(tree: Path) -> None:
    replace(tree / PACKAGE / "backends" / "marlin_mxfp8_other.py", ":MarlinExperts", ":MarlinExpertsOfOld")


# --- A checkpoint format of a known scheme ---------------------------------------------------------------------------

_FORMAT = (f"{PACKAGE}/quantization/quark.py", f"{PACKAGE}/methods/quark.py")
"""The reader and the method of one of the formats."""


def _forget_format(tree: Path) -> None:
    for name in _FORMAT:
        (tree / name).unlink()


def _add_format(tree: Path) -> None:
    for name in _FORMAT:
        (tree / name).write_bytes((ROOT / name).read_bytes())


def _format_that_nobody_serves(tree: Path) -> None:
    replace(tree / _FORMAT[1], r'^    "quantizations": \{"quark": ', '    "quantizations": {"quark_of_old": ')


DRILLS: Mapping[str, Drill] = {
    "backend": Drill(
        "a backend of our own, or a third party's: one file",
        1,
        _add_backend,
        _backend_that_changes_its_input,
        ("tests/conformance", "-k", "dequantized_once"),
    ),
    "wrapper": Drill(
        "a wrapper of a stock class: one file",
        1,
        _add_wrapper,
        _wrapper_of_no_class,
        ("tests/conformance", "tests/compat/test_surface.py", "-k", "marlin_mxfp8_other or bear_out"),
    ),
    "format": Drill(
        "a checkpoint format of a known scheme: a reader and a method",
        3,
        _add_format,
        _format_that_nobody_serves,
        ("tests/methods/test_quark.py", "tests/methods/test_declarations.py", "tests/checkpoint/test_mxfp4_configs.py"),
        prepare=_forget_format,
    ),
    "gpu": Drill(
        "a GPU: one data file",
        1,
        _add_gpu,
        _gpu_with_a_used_alias,
        ("tests/devices",),
    ),
    "release": Drill(
        "a vLLM release: one line and one command",
        1,
        _add_release,
        _stale_generated_table,
        ("tests/test_readme.py", "tests/releases/test_supported.py"),
        generate=True,
        prepare=_forget_newest_release,
    ),
}
"""By name."""


def _git(tree: Path, *words: str) -> str:
    identity = ["-c", "user.name=drill", "-c", "user.email=drill@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True, text=True).stdout


def _copy(tree: Path) -> None:
    """Copies the tracked files, as they are in the working tree, and commits them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name]
    subprocess.run(["cp", "--parents", "-t", str(tree), *names], cwd=ROOT, check=True)
    _git(tree, "init", "-q")
    _commit(tree)


def _commit(tree: Path) -> None:
    _git(tree, "add", "-A")
    _git(tree, "commit", "-q", "--allow-empty", "-m", "drill")


def _touched(tree: Path) -> tuple[str, ...]:
    _git(tree, "add", "-A")
    return tuple(_git(tree, "diff", "--cached", "--name-only").split())


def _python(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)


def _generate(tree: Path) -> None:
    made = _python(tree, "-m", "tests.tools.generate", "--write")
    if made.returncode:
        raise SystemExit(f"the command that generates fails\n{made.stdout[-2000:]}\n{made.stderr[-2000:]}")


def run(name: str, tree: Path) -> Outcome:
    """Does one drill in an empty folder."""
    drill = DRILLS[name]
    began = time.monotonic()
    _copy(tree)
    if drill.prepare:
        drill.prepare(tree)
        if drill.generate:
            _generate(tree)
        _commit(tree)
    drill.change(tree)
    touched = _touched(tree)
    _commit(tree)
    generated: tuple[str, ...] = ()
    if drill.generate:
        _generate(tree)
        generated = _touched(tree)
        _commit(tree)
    pytest = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *drill.tests)
    proper = _python(tree, *pytest)
    if proper.returncode:
        print(f"{name}: the tests fail with the proper change\n{proper.stdout[-4000:]}", file=sys.stderr)
    drill.spoil(tree)
    bad = _python(tree, *pytest)
    if bad.returncode == 0:
        print(f"{name}: the tests pass with the bad change", file=sys.stderr)
    seconds = round(time.monotonic() - began, 1)
    passed, noticed = proper.returncode == 0, bad.returncode == 1
    return Outcome(drill.what, touched, generated, drill.most_files, passed, noticed, seconds)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.drills", description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(DRILLS)}; all by default")
    parser.add_argument("--json", type=Path, help="write the outcomes to a file")
    parser.add_argument("--keep", type=Path, help="folder in which the copies are made and left")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.names) - set(DRILLS)):
        parser.error(f"unknown drill {', '.join(unknown)}; valid: {', '.join(DRILLS)}")
    outcomes = {}
    for name in chosen.names or DRILLS:
        print(f"{name}: {DRILLS[name].what} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            tree = (chosen.keep or Path(temporary)) / name
            tree.mkdir(parents=True)
            outcome = outcomes[name] = run(name, tree)
        said = f"{len(outcome.touched)} of at most {outcome.most_files} files: {', '.join(outcome.touched)}"
        print(f"{'holds' if outcome.holds else 'FAILS'}  {name}: {said} ({outcome.seconds} s)", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({name: asdict(each) for name, each in outcomes.items()}, indent=1) + "\n")
    return 0 if all(outcome.holds for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
