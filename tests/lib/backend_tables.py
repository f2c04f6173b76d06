"""The committed tables of backends on an H200, as `tests/gpu/backend_table.py` wrote them, and what every row keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_environment = dict(os.environ)
try:
    from tests.gpu import backend_table
finally:
    # The script sets vLLM's variables for its own process.
    os.environ.clear()
    os.environ.update(_environment)

FOLDER = Path(__file__).parents[1] / "golden/h200"
TOKENS = {"1", "7", "64", "513"}

Row = dict[str, Any]


def every_table(scheme: str) -> pytest.MarkDecorator:
    """Parametrizes ``file``: the tables of a scheme, one for each measured release."""
    files = sorted(FOLDER.glob(f"{scheme}-vllm-*.json"))
    return pytest.mark.parametrize("file", files, ids=lambda file: file.stem)


def read(file: Path) -> tuple[dict[str, Any], list[Row]]:
    """Conditions and rows of a table; rows without numbers get the release of the table."""
    data = json.loads(file.read_text())
    conditions: dict[str, Any] = data["conditions"]
    return conditions, [{"vllm": conditions["packages"]["vllm"]} | row for row in data["rows"]]


def measured(file: Path) -> list[Row]:
    """The rows of a table whose backends do not refuse the layer since."""
    return [row for row in read(file)[1] if "refused" not in row]


def key(row: Row) -> tuple[str, str, str]:
    """Release, layer and backend of a row."""
    return row["vllm"], row["layer"], row["backend"]


def assert_conditions(file: Path, scheme: str) -> None:
    """Asserts that a table says where, how and under which limits it was made, and how each row was run."""
    kept, rows = read(file)
    assert (kept["gpu"], kept["capability"]) == ("NVIDIA H200", 90)
    assert file.stem.endswith(f"-vllm-{kept['packages']['vllm']}")
    assert f"python tests/gpu/backend_table.py --scheme {scheme} " in kept["command"]
    assert (kept["limit"], kept["ratio_to_stock"]) == (6e-3, 1.2)
    assert {"torch", "cuda", "date"} <= kept.keys()
    assert {row["run"] for row in rows} == kept["runs"].keys()
    assert len({key(row) for row in rows}) == len(rows)


def assert_row(
    row: Row, scheme: str, refused: frozenset[str] = frozenset(), margin: float = 1.0, spread: bool = True
) -> None:
    """Asserts that a row passed, that its numbers say so, and that its self-check found every fault of its layer.

    Args:
        row: from a table.
        scheme: whose table in `tests/gpu` describes the layer.
        refused: faults that the backend has no layer for, since it refuses such layers.
        margin: how many tolerances a fault must be away from the reference.
        spread: whether the backend runs experts of any places.
    """
    table = backend_table.table_of(scheme)
    case, check = table.cases[row["layer"]], {"raised": {}, "refused": {}} | row["self_check"]
    assert row["pass"] is True and "failure" not in row and row.get("broken", []) == [], key(row)
    assert backend_table.broken(row | {"self_check": check}) == [], key(row)
    assert row["error"].keys() == TOKENS and ("spread_error" in row) is spread, key(row)
    assert all(modes.keys() == {"eager", "graph"} for modes in row["error"].values()), key(row)
    assert check["passed"] and check["error"] <= check["tolerance"], key(row)
    faults = {*backend_table.faults(case), *table.faults(case), *table.ignored(case)}
    assert check["refused"].keys() == refused and check["faults"].keys() == faults - refused, key(row)
    assert min(check["faults"].values()) > margin * check["tolerance"], key(row)
    if "alone" in check:
        assert len(check["each"]) == 3 and check["seconds"] == max(check["each"]), key(row)
