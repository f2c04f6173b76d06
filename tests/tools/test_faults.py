"""The injected faults are those of the code, and tests/README.md says what catches each."""

from __future__ import annotations

import re

import pytest

from tests.lib import readme_sections
from tests.lib.tree_copies import ROOT, Run, TreeCopy, replaced
from tests.tools import faults


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_injected(fault: faults.Fault) -> None:
    text = (ROOT / faults.PACKAGE / fault.file).read_text(encoding="utf-8")
    assert replaced(text, fault.old, fault.new, fault.file) != text
    assert (ROOT / fault.tests).exists()


def test_the_page_has_every_fault_and_a_test_that_exists() -> None:
    table = readme_sections.part(faults.README.read_text(encoding="utf-8"), "faults")
    rows = re.findall(r"^\| (\w+) \| (.+) \| `(\S+)::(\w+)` \| (\w+) \|$", table, re.MULTILINE)
    assert [(area, what) for area, what, *_ in rows] == [(fault.area, fault.what) for fault in faults.FAULTS]
    for _, what, file, test, _ in rows:
        there = f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
        assert there, f"{what}: no {test} in {file}; run: python -m tests.tools.faults --write"


class Passing:
    """A copy whose tests pass but in one tier."""

    def __init__(self, failing: str) -> None:
        self.failing = failing

    def edit(self, name: str, old: str, new: str) -> None:
        pass

    def restore(self) -> None:
        pass

    def test(self, *arguments: str) -> Run:
        tier = "full" if len(arguments) > 1 else "default"
        return Run(tier != self.failing, "t.py::test_x[1]" if tier == self.failing else "", "")


@pytest.mark.parametrize("tier", ["default", "full", ""])
def test_the_tier_that_catches_a_fault_is_told(tier: str) -> None:
    tree = Passing(tier)
    caught = faults.catch(faults.FAULTS[0], tree)  # type: ignore[arg-type]
    assert caught == faults.Caught("t.py::test_x" if tier else "", tier)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> TreeCopy:
    return TreeCopy(tmp_path_factory.mktemp("faults"))


@pytest.mark.full
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_caught(fault: faults.Fault, tree: TreeCopy) -> None:
    assert faults.catch(fault, tree).tier
