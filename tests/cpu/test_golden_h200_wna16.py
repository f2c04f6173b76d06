"""The committed tables of backends for integer weights on an H200, as `tests/gpu/backend_table.py` printed them, and
what holds of them.

A row that breaks a rule of the table has `pass` false there, and stands in `EXCEPTIONS` here with what it breaks and
why; nothing else may break one, and these no other rule. Those that have no numbers stand in `LATE`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_oracle.oracle.problem import Device
from vllm_moe_oracle.oracle.registry import default_registry

_environment = dict(os.environ)
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
try:
    from table_wna16 import TABLE
finally:
    # The script sets vLLM's for its own process.
    sys.path.pop(0)
    os.environ.clear()
    os.environ.update(_environment)

FOLDER = Path(__file__).parents[1] / "golden/h200"
FILES = sorted(FOLDER.glob("wna16-vllm-*.json"))
TOKENS = {"1", "7", "64", "513"}
LAYERS = {name: case for name, case in TABLE.cases.items() if not name.startswith("tiny")}

BROKEN_AT_ONE = {"eager at 1", "graph at 1"}
MANY_PARTS = (
    "Humming adds up to ten parts of a product of few tokens, each rounded to bfloat16, as its numerics say; stock's "
    "own class does, and differs from run to run"
)
EXCEPTIONS: dict[tuple[str, str, str], dict[str, str]] = {
    ("0.33.0", "kimi_k2_tp8_g32", "humming_wna16"): dict.fromkeys(BROKEN_AT_ONE, MANY_PARTS),
    ("0.26.0", "kimi_k2_tp8_g32", "humming_wna16"): dict.fromkeys(BROKEN_AT_ONE, MANY_PARTS),
    ("0.26.0", "narrow_g128", "humming_wna16"): dict.fromkeys(BROKEN_AT_ONE, MANY_PARTS),
    ("0.26.0", "ragged_g32", "humming_wna16"): dict.fromkeys(BROKEN_AT_ONE, MANY_PARTS),
    ("0.26.0", "qwen3_g128_ep2", "humming_wna16"): dict.fromkeys(BROKEN_AT_ONE, MANY_PARTS),
}
"""Release, layer and backend of rows that do not pass: what they break, and why."""

LATE: dict[tuple[str, str, str], str] = {}
"""Rows without numbers: release, layer and backend, and where they were when their run ended."""

COMPILED_LATER = {"kimi_k2_tp8_g32": {"513"}}
"""Our kernels are compiled at load, but for those of calls whose scratch memory is more than loading may take: here
from 353 tokens on. vLLM's first full call, by which it learns what a step needs, compiles these."""

ROUNDING = 2.0**-8 / math.sqrt(3) * math.sqrt(0.75 / (2 * math.log(2)))
"""Relative error of a rounding to bfloat16, the root of the mean square over mantissas of Benford's law: 1.7e-3."""

PARTS = sum(part / 10 for part in range(2, 11))
"""Squared roundings of running sums of ten equal parts, which grow from two of them to all, in those of a whole sum;
the parts' own are together as large as that one: 5.4."""

FEW_LIMIT = math.sqrt(6e-3**2 + 3 * PARTS * ROUNDING**2)
"""The table's limit with the roundings of gate, up and down in so many parts: 9e-3."""

OTHER_COLUMNS = "scales of the first product are ordered by the columns of the second"
WRONG_STOCK = {
    ("0.26.0", "narrow_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.33.0", "narrow_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.26.0", "narrow_awq_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.33.0", "narrow_awq_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.26.0", "qwen3_bias", "marlin_wna16"): "until 0.26 the layer's loader drops biases of single experts",
}
"""Release, layer and backend whose stock class gives wrong numbers, and why: they say nothing of ours."""


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    table = json.loads(file.read_text())
    return table["conditions"], table["rows"]


def measured(file: Path) -> list[dict[str, Any]]:
    """The rows with numbers."""
    return [row for row in read(file)[1] if "failure" not in row]


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["vllm"], row["layer"], row["backend"]


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_both_releases_were_measured() -> None:
    assert [file.stem for file in FILES] == ["wna16-vllm-0.26.0", "wna16-vllm-0.33.0"]


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    kept, rows = read(file)
    assert kept["gpu"] == "NVIDIA H200" and f"wna16-vllm-{kept['packages']['vllm']}" == file.stem
    assert "backend_table.py --scheme wna16" in kept["command"]
    assert (kept["limit"], kept["ratio_to_stock"]) == (6e-3, 1.2)
    assert {row["vllm"] for row in measured(file)} == {kept["packages"]["vllm"]}
    assert {row["run"] for row in rows} == kept["runs"].keys()


@every_file
def test_every_backend_that_the_oracle_accepts_was_run_on_every_layer(file: Path) -> None:
    kept, rows = read(file)
    machine = Device("cuda", kept["gpu"], kept["capability"], packages=kept["packages"])
    for name, case in LAYERS.items():
        accepted = {
            backend.name
            for backend in default_registry().for_scheme("wna16")
            if not backend.check(case.problem(), machine).reasons
        }
        ran = [row["backend"] for row in rows if row["layer"] == name]
        assert len(ran) == len(set(ran)) and set(ran) == accepted, name


@every_file
def test_rows_without_numbers_are_those_of_a_run_that_ended(file: Path) -> None:
    release, rows = read(file)[0]["packages"]["vllm"], json.loads(file.read_text())["rows"]
    failed = {(release, row["layer"], row["backend"]): row for row in rows if "failure" in row}
    assert failed.keys() == {each for each in LATE if each[0] == release}
    for row in failed.values():
        assert row["failure"].startswith("ended, being late") and not row["pass"] and "error" not in row


@every_file
def test_every_rule_is_kept_but_for_what_is_excepted_with_its_reason(file: Path) -> None:
    for row in measured(file):
        breaks = EXCEPTIONS.get(key(row), {})
        assert row["pass"] is (not breaks) and set(row.get("broken", [])) == breaks.keys(), key(row)
        assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64, key(row)
        assert row["error"].keys() == TOKENS, key(row)
        assert row["spread_error"] <= 6e-3, key(row)
        for tokens, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"}, key(row)
            for mode, error in modes.items():
                why = breaks.get(f"{mode} at {tokens}")
                assert error <= 1.2 * row.get("stock_error", {}).get(tokens, 1.0), (key(row), tokens)
                assert error <= {None: 6e-3, MANY_PARTS: FEW_LIMIT}[why], (key(row), tokens)
    excepted = {each for each in EXCEPTIONS if each[0] in file.stem}
    assert excepted <= {key(row) for row in measured(file)}


@every_file
def test_every_fault_is_found_in_time(file: Path) -> None:
    for row in measured(file):
        check, case = row["self_check"], LAYERS[row["layer"]]
        assert check["passed"] and not check["missed"] and not check.get("raised"), key(row)
        expected = {"scales of rows moved", "rows of w2 moved"}
        expected |= {"gate and up exchanged"} if case.gated else set()
        expected |= {"scales of groups moved"} if -1 < case.scheme.group_size < case.hidden else set()
        expected |= {"zero points left out"} if case.scheme.zero_points else set()
        expected |= {"order left out"} if case.scheme.act_order == "group" else set()
        expected |= {"w13's biases left out", "w2's biases left out"} if case.bias else set()
        assert check["faults"].keys() == expected and min(check["faults"].values()) > check["tolerance"], key(row)
        assert check["seconds"] <= 0.15, key(row)
        if check.get("alone"):
            assert len(check["each"]) == 3 and check["seconds"] == max(check["each"]), key(row)
            assert check.get("kept_mib", 0.0) <= 0, key(row)
        if row["backend"].startswith("own_"):
            assert check["alone"], key(row)
            assert row.get("compiled", {}).keys() <= COMPILED_LATER.get(row["layer"], set()), key(row)


@every_file
def test_a_matrix_as_wide_as_its_group_is_right_with_every_kernel(file: Path) -> None:
    """As wide as one product or as both, with zero points and without."""
    narrow = [row for row in measured(file) if row["layer"].startswith("narrow_")]
    assert len(narrow) == 19
    for row in narrow:
        assert max(max(modes.values()) for tokens, modes in row["error"].items() if tokens != "1") <= 6e-3


@every_file
def test_act_order_ran_on_this_projects_kernels(file: Path) -> None:
    (row,) = [row for row in measured(file) if row["backend"] == "own_wna16_ordered"]
    assert row["pass"] and row["layer"] == "qwen3_act_order" and row["self_check"]["alone"]
    assert row["self_check"]["faults"]["order left out"] > 100 * row["self_check"]["error"]


@every_file
def test_stock_is_right_but_where_it_is_known_not_to_be(file: Path) -> None:
    for row in (row for row in measured(file) if "stock_error" in row):
        assert all((error > 0.5) == (key(row) in WRONG_STOCK) for error in row["stock_error"].values()), key(row)


@every_file
def test_gptqs_and_moe_wna16s_layers_ran_with_every_kernel(file: Path) -> None:
    """Those that stock vLLM chose for them, where it had a choice, and those that it forbade."""
    ran = {(row["layer"], row["backend"]): row["experts"] for row in measured(file)}
    assert ran["qwen3_moe_wna16_g128", "marlin_wna16"] == ran["qwen3_int8_g128", "marlin_wna16"] == "MarlinExperts"
    for layer in ("qwen3_moe_wna16_g128", "qwen3_int8_g128", "qwen3_bias"):
        assert ran[layer, "humming_wna16"] == "HummingIndexedExperts"
    for layer in ("qwen3_moe_wna16_g128", "qwen3_int8_zeros_g64", "qwen3_int8_g128"):
        assert ran[layer, "triton_wna16"] == "TritonWNA16Experts"
