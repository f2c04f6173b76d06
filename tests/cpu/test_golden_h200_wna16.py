"""The committed tables of backends for integer weights on an H200, as `tests/gpu/backend_table.py` printed them, and
what holds of them.

A row that breaks a rule of the table has `pass` false there, and stands in `EXCEPTIONS` here with the reason; nothing
else may break one, and these no other rule.
"""

from __future__ import annotations

import json
import math
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
FEW_TOKENS = (
    "Humming adds up parts of a product of few tokens in bfloat16, up to ten of them: see `Numerics`. Stock's own "
    "class is off by as much, and differs from run to run"
)
ONE_DRAW = (
    "the error of one token is one draw of a random quantity, here the very one of stock's class; 16 are drawn since"
)
MENDED_ORDER = (
    "scales of a matrix as wide as its group were in the order of other kernels. Mended before the table of 0.26.0 was "
    "made, which has this layer right; not run again here"
)
MENDED_LAUNCH = (
    "vLLM's configuration for few tokens of int4 experts is one of its CUDA kernel. Mended since by what vLLM 0.27 "
    "says there, with which the same kernel, source by source, ran on 0.33.0; not run again here"
)
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    ("0.33.0", "kimi_k2_tp8_g32", "humming_wna16"): FEW_TOKENS,
    ("0.33.0", "narrow_g128", "humming_wna16"): MENDED_ORDER,
    ("0.33.0", "ragged_g32", "marlin_wna16"): ONE_DRAW,
    ("0.26.0", "kimi_k2_tp8_g32", "humming_wna16"): FEW_TOKENS,
    ("0.26.0", "narrow_g128", "humming_wna16"): FEW_TOKENS,
    ("0.26.0", "ragged_g32", "humming_wna16"): FEW_TOKENS,
    ("0.26.0", "qwen3_g128", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "kimi_k2_tp8_g32", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "qwen3_awq_g128", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "qwen3_zeros_g32", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "qwen3_moe_wna16_g128", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "nemotron_relu2_g32", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "narrow_g128", "triton_wna16"): MENDED_LAUNCH,
    ("0.26.0", "ragged_g32", "triton_wna16"): MENDED_LAUNCH,
}
"""Release, layer and backend of rows that do not pass."""

ROUNDING = 2.0**-8 / math.sqrt(3) * math.sqrt(0.75 / (2 * math.log(2)))
"""Relative error of a rounding to bfloat16, the root of the mean square over mantissas of Benford's law: 1.7e-3."""

PARTS = sum(part / 10 for part in range(2, 11))
"""Squared roundings of running sums of ten equal parts, which grow from two of them to all, in those of a whole sum;
the parts' own are together as large as that one: 5.4."""

FEW_LIMIT = math.sqrt(6e-3**2 + 3 * PARTS * ROUNDING**2)
"""The table's limit with the roundings of gate, up and down in so many parts: 9e-3."""

WRONG_STOCK = {
    ("0.26.0", "narrow_g128", "marlin_wna16"): "scales of the first product are ordered by the columns of the second",
    ("0.33.0", "narrow_g128", "marlin_wna16"): "scales of the first product are ordered by the columns of the second",
    ("0.26.0", "qwen3_bias", "marlin_wna16"): "until 0.26 the layer's loader drops biases of single experts",
}
"""Release, layer and backend whose stock class gives wrong numbers, and why: they say nothing of ours."""


def rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_both_releases_were_measured() -> None:
    assert [file.stem for file in FILES] == ["wna16-vllm-0.26.0", "wna16-vllm-0.33.0"]


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
def test_every_rule_is_kept_but_for_what_is_excepted_with_its_reason(file: Path) -> None:
    excepted = set()
    for row in rows(file):
        where = (row["vllm"], row["layer"], row["backend"])
        why = EXCEPTIONS.get(where)
        assert row["pass"] == (why is None), where
        excepted |= {where} if why is not None else set()
        if why == MENDED_LAUNCH:
            assert "missing 1 required positional argument: 'GROUP_SIZE_M'" in row["failure"], where
            continue
        assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64, where
        if why == MENDED_ORDER:
            # Every number of tokens alike, and the self-check would not have let it start.
            assert min(min(modes.values()) for modes in row["error"].values()) > 0.5, where
            assert not row["self_check"]["passed"], where
            continue
        if why is not None:
            assert set(row["broken"]) == {"eager at 1", "graph at 1"}, where
        assert row["error"].keys() == TOKENS and row["spread_error"] <= 6e-3, where
        for tokens, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"}, where
            largest = max(modes.values())
            if why == ONE_DRAW and tokens == "1":
                assert largest == row["stock_error"][tokens], where
            else:
                assert largest <= (FEW_LIMIT if why == FEW_TOKENS and tokens == "1" else 6e-3), (where, tokens)
            if "stock_error" in row:
                assert largest <= 1.2 * row["stock_error"][tokens], (where, tokens)
    assert excepted == {each for each in EXCEPTIONS if each[0] in file.stem}


@every_file
def test_every_fault_is_found_in_time(file: Path) -> None:
    for row in (row for row in rows(file) if row["error"]):
        where, check = (row["layer"], row["backend"]), row["self_check"]
        wrong = EXCEPTIONS.get((row["vllm"], *where)) == MENDED_ORDER
        assert check["passed"] is not wrong and not check["missed"] and len(check["faults"]) >= 3, where
        assert check["seconds"] <= 0.15, where
        # Ours are compiled at load.
        assert row["backend"] != "own_wna16" or "compiled" not in row, where


def test_a_matrix_as_wide_as_its_group_is_right_with_every_kernel() -> None:
    """In the later table, which was made with the scales in the order that the kernels look for."""
    later = [row for row in rows(FOLDER / "wna16-vllm-0.26.0.json") if row["layer"] == "narrow_g128" and row["error"]]
    assert {row["backend"] for row in later} == {"emulation", "humming_wna16", "marlin_wna16", "own_wna16"}
    for row in later:
        assert max(max(modes.values()) for tokens, modes in row["error"].items() if tokens != "1") <= 6e-3


@every_file
def test_stock_is_right_but_where_it_is_known_not_to_be(file: Path) -> None:
    for row in (row for row in rows(file) if "stock_error" in row):
        wrong = (row["vllm"], row["layer"], row["backend"]) in WRONG_STOCK
        assert all((error > 0.5) == wrong for error in row["stock_error"].values()), row["layer"]


@every_file
def test_gptqs_and_moe_wna16s_layers_ran_with_every_kernel(file: Path) -> None:
    """Those that stock vLLM chose for them, where it had a choice, and those that it forbade."""
    ran = {(row["layer"], row["backend"]): row["experts"] for row in rows(file) if row.get("error")}
    assert ran["qwen3_moe_wna16_g128", "marlin_wna16"] == ran["qwen3_int8_g128", "marlin_wna16"] == "MarlinExperts"
    for layer in ("qwen3_moe_wna16_g128", "qwen3_int8_g128", "qwen3_bias"):
        assert ran[layer, "humming_wna16"] == "HummingIndexedExperts"
    for layer in ("qwen3_int8_zeros_g64", "qwen3_int8_g128"):
        assert ran[layer, "triton_wna16"] == "TritonWNA16Experts"
