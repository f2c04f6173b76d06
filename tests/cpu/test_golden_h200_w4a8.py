"""The committed table of MXFP4 weights with activations in fp8 on an H200, as `tests/gpu/backend_table.py` printed it,
and what holds of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "golden/h200/mxfp4-w4a8-vllm-0.33.0.json"
TABLE: dict[str, Any] = json.loads(FILE.read_text())
LAYERS = {"gpt_oss_20b", "gpt_oss_120b", "gpt_oss_20b_tp4", "gpt_oss_120b_ep8", "qwen3_silu"}
LIMIT = 6e-3 + (2.0**-3 * ((2880 / 3) ** 0.5 * 2.0**-13 + 2.0**-9)) ** 0.5
"""With one scale a token two right results may have other codes between the products; `table_mxfp8.by_token_limit`."""
BIASES = {"w13's biases left out", "w2's biases left out"}
IGNORED = {"alpha ignored", "beta ignored", "limit ignored"}
FAULTS = {
    "scales of rows moved",
    "rows of w2 moved",
    "gate and up exchanged",
    "scales of groups moved",
    "scales of w13 column by column",
    "scales of w2 column by column",
    "scales of w13 one exponent up",
    "scales of w2 one exponent down",
}

every_row = pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["layer"])


def test_the_conditions_and_every_layer_are_there() -> None:
    kept = TABLE["conditions"]
    assert kept["gpu"] == "NVIDIA H200" and kept["packages"]["vllm"] == "0.33.0"
    # Nobody gets fewer bits than the checkpoint declares without asking for it.
    assert kept["command"].startswith("MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1 python tests/gpu/backend_table.py")
    assert {row["layer"] for row in TABLE["rows"]} == LAYERS and len(TABLE["rows"]) == len(LAYERS)
    assert {row["run"] for row in TABLE["rows"]} == kept["runs"].keys()
    for row in TABLE["rows"]:
        assert row["backend"] == "own_mxfp4_w4a8" and row["activations"] == "fp8_token" and "failure" not in row


@every_row
def test_errors_against_rounded_activations_are_within_the_limit(row: dict[str, Any]) -> None:
    assert row["limit"] == pytest.approx(LIMIT)
    assert row["error"].keys() == {"1", "7", "64", "513"}
    for modes in row["error"].values():
        assert modes.keys() == {"eager", "graph"} and max(modes.values()) <= LIMIT
    assert row["spread_error"] <= LIMIT


@every_row
def test_the_conversion_takes_one_expert_and_64_mib(row: dict[str, Any]) -> None:
    assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64


@every_row
def test_the_self_check_finds_every_fault_and_keeps_nothing(row: dict[str, Any]) -> None:
    check, gpt_oss = row["self_check"], row["layer"].startswith("gpt_oss")
    assert check["passed"] and check["error"] <= check["tolerance"]
    assert not check["missed"] and not check["raised"] and not check["refused"]
    assert check["faults"].keys() == FAULTS | (BIASES | IGNORED if gpt_oss else set())
    assert min(check["faults"].values()) > check["tolerance"]
    assert check["kept_mib"] <= 0 and "compiled" not in check


@every_row
def test_the_self_check_takes_less_than_150_ms_alone_and_nothing_is_missed(row: dict[str, Any]) -> None:
    check = row["self_check"]
    assert check["alone"] and len(check["each"]) == 3 and check["seconds"] == max(check["each"])
    assert check["seconds"] <= 0.15 and row["broken"] == [] and row["pass"]
