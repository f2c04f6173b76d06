"""Coverage by subpackage, from a report of coverage.py; and what tests/README.md says of the single tier."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools import coverage_table


def test_files_are_summed_by_subpackage() -> None:
    names = ("vllm_moe_oracle/core/a.py", "vllm_moe_oracle/core/b/c.py", "vllm_moe_oracle/d.py")
    files = {name: {"summary": dict.fromkeys(coverage_table.COUNTS, 10**at)} for at, name in enumerate(names)}
    files[names[0]]["summary"]["covered_branches"] = 0
    found = coverage_table.counts_of({"files": files})
    assert found == {"": [111, 111, 110, 111], "core": [11, 11, 10, 11], coverage_table.SINGLE: [100] * 4}


def test_what_is_said_of_the_single_tier() -> None:
    data = json.loads(coverage_table.FILE.read_text())["tiers"]
    lines, statements, branches, all_branches = data["one tier"][""]
    said = " ".join(Path(__file__).parents[1].joinpath("README.md").read_text().split())
    assert f"{lines / statements:.0%} of lines and {branches / all_branches:.0%} of branches of {statements:,}" in (
        said.replace(" %", "%")
    )
    for at in (0, 2):  # nothing was lost
        assert (
            data["default"][""][at] / data["default"][""][at + 1]
            > data["one tier"][""][at] / data["one tier"][""][at + 1]
        )
