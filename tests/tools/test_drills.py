"""The drills that take less than a minute hold, and each edits what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.tree_copies import ROOT, Run, TreeCopy
from tests.tools import drills

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpu", "format"])
def test_a_drill_holds(name: str, tmp_path: Path) -> None:
    outcome = drills.run(drills.DRILLS[name], tmp_path)
    assert outcome.holds(drills.DRILLS[name]), outcome


@pytest.mark.parametrize("name", drills.DRILLS)
def test_every_change_can_be_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the proper change nor a bad one is out of date; no test and no generator runs."""
    monkeypatch.setattr(drills, "_generate", lambda tree: None)
    monkeypatch.setattr(TreeCopy, "test", lambda tree, *arguments: Run(True, "", ""))
    drill = drills.DRILLS[name]
    if name == "release":
        pytest.skip("its bad forms are of generated files")
    outcome = drills.run(drill, tmp_path)
    assert outcome.noticed == dict.fromkeys(drill.bad, "") and not outcome.holds(drill)
    assert len(outcome.touched) <= drill.most_files
