"""The committed tables of layers with activations in fp8 that the checkpoint does not declare, on an H200, as
`tests/gpu/backend_table.py` printed them, and what holds of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.lib.backend_tables import FOLDER, assert_conditions, assert_row, read

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


@pytest.mark.parametrize("file", EXPECTED)
def test_the_conditions_and_every_layer_are_there(file: str) -> None:
    expected, (kept, rows) = EXPECTED[file], read(FOLDER / file)
    assert_conditions(FOLDER / file, expected.scheme)
    # Nobody gets fewer bits than the checkpoint declares without asking for it.
    assert kept["command"].startswith("MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1 ")
    assert sorted(row["layer"] for row in rows) == sorted(expected.layers)
    assert {(row["backend"], row["activations"]) for row in rows} == {(expected.backend, "fp8_token")}


@pytest.mark.parametrize("file", EXPECTED)
def test_every_row_keeps_every_rule_and_finds_every_fault(file: str) -> None:
    """Against a reference whose activations are rounded as the backend rounds them."""
    for row in read(FOLDER / file)[1]:
        assert row["limit"] == pytest.approx(EXPECTED[file].limit)
        assert_row(row, EXPECTED[file].scheme)
        # Beside other processes a self-check takes longer: what passes there, passes alone.
        assert "compiled" not in row["self_check"]
