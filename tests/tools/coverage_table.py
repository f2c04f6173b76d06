"""Line and branch coverage by tier, from coverage.py's JSON reports: `tests/golden/coverage.json`, and the table in
tests/README.md.

    bash tests/run.sh --cov --cov-report=json:default.json
    bash tests/run.sh --full --cov --cov-report=json:full.json
    python -m tests.tools.coverage_table default=default.json full=full.json both=both.json

The third is of both runs' data files, by `coverage combine`. Without reports it prints the table. What runs in
processes that a test starts, vLLM's engines among them, is not counted; neither are the tests that need a GPU. "one
tier" in the file is a run of all tests at an earlier commit, for comparison.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.lib.readme_sections import markdown_table, paragraph

FILE = Path(__file__).resolve().parents[1] / "golden" / "coverage.json"
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")
PACKAGE = "vllm_moe_oracle/"
SINGLE = "*.py"
"""Modules in no subpackage."""


def counts_of(report: dict[str, Any]) -> dict[str, list[int]]:
    """Covered and all lines, covered and all branches, by subpackage; "" for the whole package.

    Args:
        report: coverage.py's JSON report.

    Raises:
        KeyError: it has no branches.
    """
    found: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for name, file in report["files"].items():
        package, _, module = name.removeprefix(PACKAGE).partition("/")
        for key in ("", package if module else SINGLE):
            found[key] = [have + file["summary"][count] for have, count in zip(found[key], COUNTS, strict=True)]
    return dict(sorted(found.items()))


def table() -> str:
    """The percentages in the file, a line per subpackage, the lowest line coverage first; then the conditions of both
    runs, and what the earlier one covered."""
    data = json.loads(FILE.read_text())
    tiers, conditions = data["tiers"], data["conditions"]
    names = [name for name, counts in tiers["both"].items() if counts[1]]
    names.sort(key=lambda name: (name != "", _percent(*tiers["both"][name][:2])))
    rows = []
    for name in names:
        cells = [
            f"{_percent(*tiers[tier][name][:2]):.0f}, {_percent(*tiers[tier][name][2:]):.0f}"
            for tier in ("default", "full", "both")
        ]
        rows.append([f"`{name}`" if name else "all", *cells, f"{tiers['both'][name][1]:,}"])
    words = (
        f"Two runs with Python {conditions['python']}, vLLM {conditions['vllm']}, {conditions['machine']}.",
        f"Both tiers of commit {conditions['default and full']}: {_covered(*tiers['both'][''])}.",
        f"For comparison, commit {conditions['one tier']}: {_covered(*tiers['one tier'][''])}.",
    )
    heads = ["lines, branches in %", "default", "full", "both", "lines"]
    return f"{markdown_table(heads, rows)}\n\n{paragraph(*words)}"


def _covered(lines: int, all_lines: int, branches: int, all_branches: int) -> str:
    shares = f"{_percent(lines, all_lines):.0f} % of {all_lines:,} lines"
    return f"{shares} and {_percent(branches, all_branches):.0f} % of {all_branches:,} branches"


def _percent(covered: int, total: int) -> float:
    return 100.0 * covered / total if total else 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="TIER=FILE")
    chosen = parser.parse_args()
    data = json.loads(FILE.read_text()) if FILE.exists() else {"tiers": {}}
    for each in chosen.reports:
        tier, _, path = each.partition("=")
        data["tiers"][tier] = counts_of(json.loads(Path(path).read_text()))
    if chosen.reports:
        FILE.write_text(json.dumps(data, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
