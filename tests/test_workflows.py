"""The CI's workflows: YAML, actions pinned to commits, and only commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used and all(job["timeout-minutes"] for job in jobs.values())
    for each in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", each), f"{each} is not a commit"
        assert re.search(rf"{re.escape(each)} # v\d", text), f"the version of {each} is not told"
    commands = "\n".join(step.get("run", "") for step in steps)
    named = re.findall(r"(?:bash|python) ((?:examples|tests)/\S+)", commands)
    named += [f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m (tests\.\S+)", commands)]
    assert [name for name in named if not (ROOT / name).exists()] == []
