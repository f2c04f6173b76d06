"""Coverage by subpackage, from a report of coverage.py; and what tests/README.md says of two runs."""

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


def test_two_runs_are_named_with_their_conditions() -> None:
    read = json.loads(coverage_table.FILE.read_text())
    data, conditions = read["tiers"], read["conditions"]
    said = " ".join(Path(__file__).parents[1].joinpath("README.md").read_text().split())
    assert all(conditions[name] in said for name in ("default and full", "one tier", "python", "vllm", "machine"))
    for tier in ("one tier", "both"):
        lines, statements, branches, all_branches = data[tier][""]
        shares = (
            f"{lines / statements:.0%} of {statements:,} lines and {branches / all_branches:.0%} of {all_branches:,}"
        )
        assert shares in said.replace(" %", "%")
    for at in (0, 2):  # nothing was lost
        assert (
            data["default"][""][at] / data["default"][""][at + 1]
            > data["one tier"][""][at] / data["one tier"][""][at + 1]
        )
