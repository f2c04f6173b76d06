"""The comparison of vLLM's own tests with and without the plugin, on a small tree that stands for vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools import upstream_tests
from vllm_moe_oracle.devices.detect import installed_packages

TESTS = """
import os, sys, time

import pytest


def served():
    oracle = sys.modules.get("vllm_moe_oracle.plugin")
    return bool(oracle and oracle.state().active)


def test_passes(): ...

def test_exits_before(): os._exit(0)

@pytest.mark.parametrize("kind", ["a", "b"])
def test_expected(kind):
    assert not served(), "as foreseen"

def test_differs():
    assert not served(), "not foreseen"

def test_crashes_with_the_plugin():
    if served():
        os.abort()

def test_takes_long(): time.sleep(600)

def test_skips(): pytest.skip("no GPU")
"""


def test_outcomes_that_differ_are_reported_with_their_reasons() -> None:
    stock = (
        dict.fromkeys("ab", ("passed", ""))
        | dict.fromkeys("cf", ("failed", "x"))
        | dict.fromkeys("dg", ("skipped", ""))
    )
    plugin = {
        "a": ("passed", ""),
        "b": ("failed", "E why"),
        "c": ("passed", ""),
        "e": ("passed", ""),
        "f": ("crashed", ""),
        "g": ("crashed", ""),
    }
    found = upstream_tests.compare(stock, plugin, {"c*": "better"})
    assert [(each.test, each.stock, each.plugin, each.expected) for each in found] == [
        ("b", "passed", "failed", ""),
        ("c", "failed", "passed", "better"),
        ("e", "absent", "passed", ""),
        ("g", "skipped", "crashed", ""),
    ]
    assert found[0].message == "E why"


def test_every_expected_difference_has_a_reason() -> None:
    found = json.loads(upstream_tests.EXPECTED.read_text(encoding="utf-8"))
    assert found and all(pattern.startswith("tests/") and len(reason) > 20 for pattern, reason in found.items())


def tree(folder: Path, version: str) -> Path:
    """A source tree of a release, with the tests above."""
    made = folder / f"vllm-{version}"
    (made / "tests").mkdir(parents=True)
    (made / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (made / "tests" / "conftest.py").touch()
    (made / "tests" / "test_some.py").write_text(TESTS)
    (made / "tests" / "test_import_ends.py").write_text("import os\n\nos.abort()\n")
    return made


def test_sources_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sources, words in ((tmp_path, "has no tests/conftest.py"), (tree(tmp_path, "0.1.2"), "are of vLLM 0.1.2")):
        assert upstream_tests.main([str(sources)]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.full
def test_a_run_over_crashes_and_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = installed_packages().get("vllm")
    if version is None:
        pytest.skip("vLLM is not installed")
    monkeypatch.setattr(upstream_tests, "MODULES", {})
    expected = tmp_path / "expected.json"
    expected.write_text(json.dumps({"*::test_expected*": "foreseen, for the sake of this test"}))
    monkeypatch.setattr(upstream_tests, "EXPECTED", expected)
    output = tmp_path / "report.json"
    sources = tree(tmp_path, version.partition("+")[0])
    assert upstream_tests.main([str(sources), "--output", str(output), "--paths", "tests", "--seconds", "5"]) == 1
    report: dict[str, Any] = json.loads(output.read_text())
    assert report["stock"] == {"passed": 5, "crashed": 2, "failed": 1, "skipped": 1}
    assert report["plugin"] == {"passed": 1, "crashed": 3, "failed": 4, "skipped": 1}
    differences = {each["test"].partition("::")[2]: each for each in report["differences"]}
    assert {name: (each["plugin"], each["expected"][:8]) for name, each in differences.items()} == {
        "test_expected[a]": ("failed", "foreseen"),
        "test_expected[b]": ("failed", "foreseen"),
        "test_differs": ("failed", ""),
        "test_crashes_with_the_plugin": ("crashed", ""),
    }
    assert "not foreseen" in differences["test_differs"]["message"]
