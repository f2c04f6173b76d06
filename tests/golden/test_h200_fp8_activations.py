"""The committed tables of layers with activations in fp8 that the checkpoint does not declare, on an H200, as
`tests/gpu/backend_table.py` printed them, and what holds of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lib.faults import BIAS_FAULTS, FAULTS, PARAMETER_FAULTS

FOLDER = Path(__file__).parents[1] / "golden/h200"
CODES = (2.0**-3 * ((2880 / 3) ** 0.5 * 2.0**-13 + 2.0**-9)) ** 0.5
"""With one scale a token two right results may have other codes between the products; `table_mxfp8.by_token_limit`."""


@dataclass(frozen=True)
class Expected:
    """Of one table: its scheme and backend, its layers, and the largest error, which is CODES and 6e-3 where no
    activation makes errors between the products larger; a squared ReLU doubles them."""

    scheme: str
    backend: str
    layers: frozenset[str]
    limit: float


EXPECTED = {
    "mxfp4-w4a8-vllm-0.33.0.json": Expected(
        "mxfp4",
        "hopper_mxfp4_w4a8",
        frozenset({"gpt_oss_20b", "gpt_oss_120b", "gpt_oss_20b_tp4", "gpt_oss_120b_ep8", "qwen3_silu"}),
        6e-3 + CODES,
    ),
    "mxfp8-w8a8-token-vllm-0.33.0.json": Expected(
        "mxfp8_normal",
        "hopper_mxfp8_w8a8_token",
        frozenset({
            "qwen3_silu", "qwen3_silu_bias", "qwen3_swigluoai_bias", "qwen3_silu_ep2",
            "nemotron_relu2", "nemotron_relu2_bias", "nemotron_relu2_tp2",
        }),
        6e-3 + 2**0.5 * CODES,
    ),
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {file: json.loads((FOLDER / file).read_text()) for file in EXPECTED}


def faults_of(layer: str) -> set[str]:
    """What the self-check has to find: by what the layer has."""
    oai = layer.startswith("gpt_oss") or "swigluoai" in layer
    biases = BIAS_FAULTS if oai or layer.endswith("_bias") else set()
    return (
        FAULTS
        | ({"gate and up exchanged"} if "relu2" not in layer else set())
        | biases
        | (PARAMETER_FAULTS if oai else set())
    )


every_row = pytest.mark.parametrize(
    ("row", "limit"),
    [
        pytest.param(row, EXPECTED[file].limit, id=f"{row['backend']}-{row['layer']}")
        for file, table in TABLES.items()
        for row in table["rows"]
    ],
)


@pytest.mark.parametrize("file", EXPECTED)
def test_the_conditions_and_every_layer_are_there(file: str) -> None:
    table, expected = TABLES[file], EXPECTED[file]
    kept = table["conditions"]
    assert kept["gpu"] == "NVIDIA H200" and kept["packages"]["vllm"] == "0.33.0"
    # Nobody gets fewer bits than the checkpoint declares without asking for it.
    assert kept["command"].startswith("MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1 python tests/gpu/backend_table.py")
    assert f" --scheme {expected.scheme} " in kept["command"]
    assert sorted(row["layer"] for row in table["rows"]) == sorted(expected.layers)
    assert {row["run"] for row in table["rows"]} == kept["runs"].keys()
    for row in table["rows"]:
        assert row["backend"] == expected.backend and row["activations"] == "fp8_token" and "failure" not in row


@every_row
def test_errors_against_rounded_activations_are_within_the_limit(row: dict[str, Any], limit: float) -> None:
    assert row["limit"] == pytest.approx(limit)
    assert row["error"].keys() == {"1", "7", "64", "513"}
    for modes in row["error"].values():
        assert modes.keys() == {"eager", "graph"} and max(modes.values()) <= limit
    assert row["spread_error"] <= limit


@every_row
def test_the_conversion_takes_one_expert_and_64_mib(row: dict[str, Any], limit: float) -> None:
    assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64


@every_row
def test_the_self_check_finds_every_fault_and_keeps_nothing(row: dict[str, Any], limit: float) -> None:
    check = row["self_check"]
    assert check["passed"] and check["error"] <= check["tolerance"]
    assert not check["missed"] and not check["raised"] and not check["refused"]
    assert check["faults"].keys() == faults_of(row["layer"])
    assert min(check["faults"].values()) > check["tolerance"]
    assert check["kept_mib"] <= 0 and "compiled" not in check


@every_row
def test_the_self_check_takes_less_than_150_ms_alone_and_nothing_is_missed(row: dict[str, Any], limit: float) -> None:
    check = row["self_check"]
    assert check["alone"] and len(check["each"]) == 3 and check["seconds"] == max(check["each"])
    assert check["seconds"] <= 0.15 and row["broken"] == [] and row["pass"]
