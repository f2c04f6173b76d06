"""The committed tables of MXFP4 backends on an H200, as `tests/gpu/backend_table.py` printed them, and what holds of
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "golden/h200"
FILES = sorted(FOLDER.glob("mxfp4-vllm-*.json"))
LAYERS = {"gpt_oss_20b", "gpt_oss_120b", "gpt_oss_20b_tp4", "gpt_oss_120b_ep8", "qwen3_silu"}
TINY = {
    "0.33.0": {
        ("tiny_oai", "cutlass_mxfp4"),
        ("tiny_oai_ep2", "humming_mxfp4_grouped"),
        ("tiny_oai_ep2", "triton_mxfp4_monolithic"),
        ("tiny_oai_ep2", "triton_mxfp4_unfused"),
    },
    "0.26.0": set(),
}
"""Rows of small layers, by release."""
TOKENS = {"1", "7", "64", "513"}
BACKENDS = {
    "hopper_mxfp4",
    "triton_mxfp4",
    "triton_mxfp4_monolithic",
    "triton_mxfp4_unfused",
    "marlin_mxfp4",
    "humming_mxfp4",
    "emulation",
}
NEIGHBORS = {"cutlass_mxfp4"}
"""Backends that take a rank's experts for neighbors; FlashInfer's, where it is installed."""
FAULTS = {
    "scales of rows moved",
    "rows of w2 moved",
    "gate and up exchanged",
    "scales of groups moved",
    "w13's biases left out",
    "w2's biases left out",
}
MORE = {
    "scales of w13 column by column",
    "scales of w2 column by column",
    "scales of w13 one exponent up",
    "scales of w2 one exponent down",
}
"""Further faults, of scales."""
IGNORED = {"alpha ignored", "beta ignored", "limit ignored"}
BUILT_IN = {
    "triton_mxfp4": IGNORED,
    "triton_mxfp4_monolithic": IGNORED,
    "triton_mxfp4_unfused": {"beta ignored"},
    "marlin_mxfp4": IGNORED,
    "humming_mxfp4": IGNORED,
    "humming_mxfp4_grouped": IGNORED,
}
"""What of gpt-oss's activation kernels have built in: their backends refuse layers with another value."""
ALONE = {
    ("0.33.0", "hopper_mxfp4"): LAYERS,
    ("0.33.0", "cutlass_mxfp4"): LAYERS | {"tiny_oai"},
    ("0.33.0", "triton_mxfp4"): {"gpt_oss_20b_tp4", "gpt_oss_120b_ep8"},
    ("0.33.0", "triton_mxfp4_monolithic"): {"gpt_oss_120b", "gpt_oss_120b_ep8", "tiny_oai_ep2"},
    ("0.33.0", "triton_mxfp4_unfused"): {"gpt_oss_20b_tp4"},
    ("0.33.0", "humming_mxfp4"): {"gpt_oss_20b_tp4"},
    ("0.33.0", "humming_mxfp4_grouped"): {"gpt_oss_120b_ep8", "tiny_oai_ep2"},
    ("0.26.0", "hopper_mxfp4"): LAYERS,
    ("0.26.0", "triton_mxfp4"): {"gpt_oss_20b", "gpt_oss_20b_tp4", "gpt_oss_120b_ep8"},
    ("0.26.0", "triton_mxfp4_monolithic"): {"gpt_oss_20b", "gpt_oss_120b_ep8"},
    ("0.26.0", "triton_mxfp4_unfused"): {"gpt_oss_20b_tp4", "qwen3_silu", "gpt_oss_120b_ep8"},
    ("0.26.0", "marlin_mxfp4"): {"gpt_oss_20b", "gpt_oss_120b", "qwen3_silu"},
    ("0.26.0", "humming_mxfp4"): {"gpt_oss_20b", "gpt_oss_120b", "gpt_oss_20b_tp4", "gpt_oss_120b_ep8", "qwen3_silu"},
    ("0.26.0", "emulation"): {"gpt_oss_20b", "gpt_oss_120b", "qwen3_silu"},
}
"""Layers whose self-checks were timed while every other process waited; the others' times were taken beside others."""

LAST_BITS = {"marlin_mxfp4", "humming_mxfp4", "humming_mxfp4_grouped"}
"""Kernels that may add the parts of a product in the order in which they are ready: two runs differ in last bits."""
STOCK_IS_WRONG = {("0.26.0", "qwen3_silu"): "stock's class for the tag mxfp4 is gpt-oss's, and clamps silu at 7"}
"""Layers that stock vLLM runs with an error of a third: the reference with that limit is as far off."""


def rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["vllm"], row["layer"], row["backend"]


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_there_is_a_table() -> None:
    assert "mxfp4-vllm-0.33.0" in {file.stem for file in FILES}


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    kept = json.loads(file.read_text())["conditions"]
    assert kept["gpu"] == "NVIDIA H200" and f"mxfp4-vllm-{kept['packages']['vllm']}" == file.stem
    assert "backend_table.py --scheme mxfp4" in kept["command"]


@every_file
def test_every_backend_is_in_the_table(file: Path) -> None:
    flashinfer = "flashinfer-python" in json.loads(file.read_text())["conditions"]["packages"]
    wanted = BACKENDS | NEIGHBORS if flashinfer else BACKENDS
    found = {layer: {row["backend"] for row in rows(file) if row["layer"] == layer} for layer in LAYERS}
    for layer in ("gpt_oss_20b", "gpt_oss_120b", "gpt_oss_20b_tp4"):
        assert found[layer] == wanted, layer
    # Humming's for a rank of several has another name in some releases.
    assert {name.removesuffix("_grouped") for name in found["gpt_oss_120b_ep8"]} == wanted
    assert found["qwen3_silu"] == wanted - {"triton_mxfp4", "triton_mxfp4_monolithic"}
    tiny = {(row["layer"], row["backend"]) for row in rows(file) if row["layer"] not in LAYERS}
    assert tiny == TINY[file.stem.removeprefix("mxfp4-vllm-")]


@every_file
def test_errors_are_within_the_rules(file: Path) -> None:
    """6e-3 from float32; that far apart, two vectors have a cosine above 0.99998."""
    for row in rows(file):
        assert row["error"].keys() == TOKENS
        for count, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"}
            for error in modes.values():
                assert error <= 6e-3, (key(row), count)
                assert 1 - error**2 / 2 >= 0.999
                if "stock_error" in row:
                    assert error <= 1.2 * row["stock_error"][count], (key(row), count)
        assert ("spread_error" in row) == (row["backend"] not in NEIGHBORS), key(row)
        assert row.get("spread_error", 0.0) <= 6e-3, key(row)


@every_file
def test_the_self_check_finds_every_fault_and_nothing_else(file: Path) -> None:
    for row in rows(file):
        check = row["self_check"]
        assert check["passed"] and check["error"] <= check["tolerance"], key(row)
        assert not check["missed"] and not check.get("raised"), key(row)
        gpt_oss, wanted = row["layer"].startswith(("gpt_oss", "tiny_oai")), set(FAULTS)
        wanted |= MORE | (IGNORED if gpt_oss else set())
        refused = BUILT_IN.get(row["backend"], set()) if gpt_oss else set()
        assert check["refused"].keys() == refused, key(row)
        wanted -= refused
        assert check["faults"].keys() == {each for each in wanted if gpt_oss or "bias" not in each}, key(row)
        assert min(check["faults"].values()) > 5 * check["tolerance"]


@every_file
def test_nothing_is_broken(file: Path) -> None:
    """Conversion's peak, the self-check's time, and whatever else the table asks."""
    runs = json.loads(file.read_text())["conditions"]["runs"]
    assert {row["run"] for row in rows(file)} == runs.keys()
    for row in rows(file):
        assert "failure" not in row and row["pass"] and row["broken"] == [], key(row)
        assert row["self_check"]["seconds"] <= 0.15, key(row)
        assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64, key(row)


def test_on_an_idle_card_no_self_check_is_late() -> None:
    """Those that were timed while every other process waited: our own kernels' in both releases, among others."""
    alone = [row for file in FILES for row in rows(file) if row.get("self_check", {}).get("alone")]
    assert {key(row) for row in alone} == {
        (vllm, layer, name) for (vllm, name), each in ALONE.items() for layer in each
    }
    for row in alone:
        assert max(row["self_check"]["each"]) == row["self_check"]["seconds"] <= 0.15, key(row)
        assert row["self_check"]["kept_mib"] <= 0, key(row)


@every_file
def test_a_self_check_after_the_first_compiles_nothing(file: Path) -> None:
    """However long it took."""
    assert not [key(row) for row in rows(file) if "compiled" in row.get("self_check", {})]


@every_file
def test_where_stock_ran_our_layer_has_its_error(file: Path) -> None:
    """The same kernel on the same weights: converted by us, or by stock."""
    compared = [row for row in rows(file) if "stock_error" in row]
    assert {"marlin_mxfp4", "triton_mxfp4_monolithic", "triton_mxfp4_unfused"} <= {row["backend"] for row in compared}
    wrong = set()
    for row in compared:
        if min(row["stock_error"].values()) > 0.1:
            wrong.add((row["vllm"], row["layer"]))
            continue
        for count, modes in row["error"].items():
            stock = row["stock_error"][count]
            differ = modes["eager"] / stock - 1
            if not (row["backend"].startswith("humming") and count == "1"):  # sums of fewer parts than stock's
                differ = abs(differ)
            assert differ <= (0.01 if row["backend"] in LAST_BITS else 0), (key(row), count)
    assert wrong == {each for each in STOCK_IS_WRONG if f"mxfp4-vllm-{each[0]}" == file.stem}
