"""The committed tables of backends for integer weights on an H200, as `tests/gpu/backend_table.py` printed them, and
what holds of them.

The run of 0.33.0 was the first. What it found was mended since; each row that did not pass says what, and that it was
not rerun. Numbers of Humming, Marlin and Triton on layers that `bench` timed later that day stand in
``choice-vllm-0.33.0.jsonl`` and ``choice-earlier-vllm-0.33.0.jsonl`` (the first four tokens of each call against a float32 reference).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "golden/h200"
FILES = sorted(FOLDER.glob("wna16-vllm-*.json"))
TOKENS = {"1", "7", "64", "513"}
LAYERS = {
    "qwen3_g128",
    "kimi_k2_tp8_g32",
    "qwen3_int8_g128",
    "qwen3_int8_channel",
    "qwen3_channel",
    "qwen3_awq_g128",
    "qwen3_zeros_g32",
    "qwen3_int8_zeros_g64",
    "qwen3_moe_wna16_g128",
    "qwen3_act_order",
    "qwen3_bias",
    "nemotron_relu2_g32",
    "narrow_g128",
    "ragged_g32",
}
RULES = {"conversion's peak", "self-check's time"}
"""Those that rows with numbers may have broken: mended since, see `mended_since`."""

FAILURES = {
    "humming_wna16": ("Forward context is not set",),
    "marlin_wna16": ("Current vLLM config is not set", "b_zeros is not"),
    "triton_wna16": ("Current vLLM config is not set",),
    "own_wna16": ("KeyError: 'w13_scale'",),
}
"""Rows without numbers, and why; of Triton's one, where the context of the failed layer before it was left."""

LATER = {
    "qwen3_g128": "int4_g128:qwen3-30b-a3b",
    "kimi_k2_tp8_g32": "int4_g32:kimi-k2@tp8",
    "qwen3_int8_g128": "int8_g128:qwen3-30b-a3b",
}
LATER_LIMIT = 7.5e-3
"""Four tokens of a call spread more than all; kernels are stock's own, unchanged."""


def rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_is_a_table() -> None:
    assert "wna16-vllm-0.33.0" in {file.stem for file in FILES}


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    kept = json.loads(file.read_text())["conditions"]
    assert kept["gpu"] == "NVIDIA H200" and f"wna16-vllm-{kept['packages']['vllm']}" == file.stem
    assert "backend_table.py --scheme wna16" in kept["command"]


@every_file
def test_every_layer_was_run(file: Path) -> None:
    ran = {(row["layer"], row["backend"]) for row in rows(file)}
    assert {layer for layer, _ in ran} == LAYERS
    for layer in LAYERS:
        assert (layer, "emulation") in ran
        assert ((layer, "own_wna16") in ran) == (layer != "qwen3_act_order")


@every_file
def test_numbers_keep_the_limits_and_every_fault_is_found(file: Path) -> None:
    for row in (row for row in rows(file) if "error" in row):
        where = (row["layer"], row["backend"])
        assert row["error"].keys() == TOKENS, where
        assert row["spread_error"] <= 6e-3, where
        for tokens, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"} and max(modes.values()) <= 6e-3, where
            if "stock_error" in row:
                assert max(modes.values()) <= 1.2 * row["stock_error"][tokens], where
        check = row["self_check"]
        assert check["passed"] and not check["missed"] and len(check["faults"]) >= 3, where
        # Ours are compiled at load.
        assert row["backend"] != "own_wna16" or "compiled" not in row, where


@every_file
def test_what_did_not_pass_says_why_and_that_it_was_not_rerun(file: Path) -> None:
    for row in rows(file):
        where = (row["layer"], row["backend"])
        assert row["pass"] == ("mended_since" not in row), where
        if row["pass"]:
            assert not row["broken"], where
            continue
        assert row["mended_since"].endswith("; not rerun"), where
        if "failure" in row:
            assert any(each in row["failure"] for each in FAILURES[row["backend"]]), where
        else:
            assert row["broken"] and set(row["broken"]) <= RULES, where


def test_the_benchmark_ran_mended_backends() -> None:
    files = (FOLDER / "choice-vllm-0.33.0.jsonl", FOLDER / "choice-earlier-vllm-0.33.0.jsonl")
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    for name in LATER.values():
        of_layer = [each for each in records if each.get("layer", {}).get("name") == name]
        assert of_layer
        for record in of_layer:
            assert not record["failures"]
            assert {"humming_wna16", "marlin_wna16", "triton_wna16", "own_wna16"} == record["errors"].keys()
            assert max(record["errors"].values()) <= LATER_LIMIT
