"""The command line tool where torch, vLLM or the packages of an extra are missing: one line says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.fresh_process import python
from tests.lib.missing_packages import BLOCKED, ENGINE, without
from tests.lib.tiers import sampled

PLOTS = ("matplotlib", "jinja2")


@pytest.mark.parametrize(
    "line",
    [
        ("explain", "CONFIG", "--device", "nvidia-h200"),
        ("status", "--json"),
        pytest.param(("explain", "CONFIG", "--device", "nvidia-h200", "--json"), marks=pytest.mark.full),
        pytest.param(("status",), marks=pytest.mark.full),
        pytest.param(("--help",), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_what_needs_neither_torch_nor_vllm_runs(line: tuple[str, ...], tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b-mxfp8.json"
    given = [config if word == "CONFIG" else word for word in line]
    ended = without(ENGINE + PLOTS, *given, cwd=tmp_path)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        *sampled([("tune", ENGINE), ("tune", ("torch",)), ("bench", ENGINE), ("bench", ("torch",))], 3),
        ("report", ("matplotlib",)),
    ],
    ids=["tune-engine", "tune-torch", "bench-engine", "bench-torch", "report-matplotlib"],
)
def test_one_line_says_what_a_command_needs(command: str, missing: tuple[str, ...], tmp_path: Path) -> None:
    layers, extra = ([], "plot") if command == "report" else (["mxfp8:qwen3-30b-a3b"], "vllm")
    ended = without(missing, command, *layers, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"pip install 'vllm-moe-oracle[{extra}]'" in ended.stderr
    assert "is not installed" in ended.stderr or extra == "plot"


def test_importing_measurements_needs_no_torch(tmp_path: Path) -> None:
    ended = without(ENGINE, "tune", "--import", "nothing.jsonl", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "nothing.jsonl: cannot be read" in ended.stderr


def test_a_module_of_nobody_is_a_defect_and_keeps_its_traceback(tmp_path: Path) -> None:
    code = BLOCKED.replace("main.main()", "main.app = lambda **_: __import__('no_such_module')\nmain.main()")
    ended = python("-c", code, "x")
    assert "Traceback" in ended.stderr and "no_such_module" in ended.stderr
