"""The committed tables of MXFP8 backends on an H200, as `tests/gpu/backend_table.py` printed them, and what holds of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.lib.backend_tables import (
    FOLDER,
    assert_conditions,
    assert_row,
    backend_table,
    every_table,
    key,
    measured,
    read,
)
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import evaluate_candidates

CASES = backend_table.table_of("mxfp8").cases
LAYERS = [name for name in CASES if not name.startswith("tiny")]
TINY = {"0.33.0": {("tiny_silu_ep2", "humming_mxfp8_grouped")}, "0.26.0": set()}
"""Rows of small layers, by release: of a backend whose kernels compile for minutes."""
EVERYWHERE = {"marlin_mxfp8", "hopper_mxfp8", "hopper_mxfp8_w8a8", "emulation"}

STOCK_CANNOT = {("nemotron_relu2_tp2", "marlin_mxfp8"): "shape '[128, 2, 928, 2688]' is invalid"}
"""Layers that stock's own conversion fails on, with its words: it takes 928 rows without a gate for two halves."""


every_file = every_table("mxfp8")


def machine(conditions: dict[str, Any]) -> Device:
    packages = dict(conditions["packages"])
    return Device("cuda", conditions["gpu"], conditions["capability"], packages=packages)


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    assert_conditions(file, "mxfp8")


@every_file
def test_every_backend_that_the_oracle_accepts_was_run_on_every_layer(file: Path) -> None:
    conditions, rows = read(file)
    tiny = {(row["layer"], row["backend"]) for row in rows if row["layer"] not in LAYERS}
    assert tiny == TINY[conditions["packages"]["vllm"]]
    for layer in LAYERS:
        asked = evaluate_candidates(CASES[layer].problem(), machine(conditions), settings.load({}))
        accepted = {each.backend for each in asked if each.accepted}
        ran = {row["backend"] for row in rows if row["layer"] == layer and "refused" not in row}
        assert ran == accepted >= EVERYWHERE, layer


@every_file
def test_every_row_keeps_every_rule_and_finds_every_fault(file: Path) -> None:
    for row in measured(file):
        assert_row(row, "mxfp8")
        assert "alone" in row["self_check"] or not row["backend"].startswith("hopper"), key(row)


@every_file
def test_stock_was_measured_beside_the_kernels_that_are_its_own(file: Path) -> None:
    for row in measured(file):
        words = STOCK_CANNOT.get((row["layer"], row["backend"]))
        if words is not None:
            assert words in row["stock_failure"], key(row)
        elif row["backend"].startswith(("marlin", "humming")):
            assert "stock_error" in row, (key(row), row.get("stock_failure"))


def test_sums_that_stock_leaves_out_are_whole_here() -> None:
    """Humming 0.1.10 takes blocks of 56 rows for 513 tokens on a rank of two, in no other cell of this table, and
    leaves out parts of the sums of rows 40 to 55. Here such blocks are 64 rows high."""
    ((eager, graph), stock), *others = [
        (row["error"]["513"].values(), row["stock_error"]["513"])
        for row in measured(FOLDER / "mxfp8-vllm-0.26.0.json")
        if row["layer"] == "qwen3_silu_ep2" and row["backend"] == "humming_mxfp8"
    ]
    assert not others and max(eager, graph) <= 6e-3 and stock > 1e-2


@every_file
def test_every_kind_of_backend_was_self_checked_in_time(file: Path) -> None:
    seen = {row["backend"] for row in measured(file)}
    grouped = {backend for _, backend in TINY[read(file)[0]["packages"]["vllm"]]}
    assert seen == {*EVERYWHERE, "humming_mxfp8"} | grouped


@every_file
def test_what_was_refused_afterwards_is_refused(file: Path) -> None:
    conditions, rows = read(file)
    refused = [row for row in rows if "refused" in row]
    assert len(refused) == (4 if conditions["packages"]["vllm"] == "0.26.0" else 0)
    for row in refused:
        backend = default_registry()[row["backend"]]
        codes = {reason.code for reason in backend.check(CASES[row["layer"]].problem(), machine(conditions)).reasons}
        assert codes == {"activation.vllm_version"}, key(row)
    worst = max((max(modes.values()) for row in refused for modes in row["error"].values()), default=0.0)
    assert worst == 0.0 or 6.15e-3 < worst < 6.25e-3
