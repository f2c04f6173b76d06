"""The committed tables of MXFP8 backends on an H200, as `tests/gpu/backend_table.py` printed them, and what holds of
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_oracle.oracle.problem import Activation, Device, Problem, Scheme
from vllm_moe_oracle.oracle.registry import default_registry

FOLDER = Path(__file__).parents[1] / "golden/h200"
FILES = sorted(FOLDER.glob("mxfp8-vllm-*.json"))
LAYERS = {
    "qwen3_silu",
    "qwen3_silu_bias",
    "qwen3_relu2",
    "qwen3_relu2_bias",
    "nemotron_silu",
    "nemotron_relu2",
    "nemotron_relu2_bias",
    "qwen3_swigluoai_bias",
}
TOKENS = {"1", "7", "64", "513"}
EVERYWHERE = {"marlin_mxfp8", "own_mxfp8", "own_mxfp8_w8a8", "emulation"}

FAULTS = {"scales of rows moved", "rows of w2 moved", "scales of groups moved"}
GATED_FAULTS = {"gate and up exchanged"}
BIAS_FAULTS = {"w13's biases left out", "w2's biases left out"}

TIME = "self-check's time"
LATE = {
    ("0.33.0", "qwen3_relu2_bias", "own_mxfp8_w8a8"),
    ("0.33.0", "nemotron_silu", "own_mxfp8"),
    ("0.33.0", "nemotron_silu", "own_mxfp8_w8a8"),
    ("0.26.0", "qwen3_silu", "own_mxfp8"),
    ("0.26.0", "qwen3_silu", "own_mxfp8_w8a8"),
    ("0.26.0", "qwen3_silu_bias", "own_mxfp8"),
    ("0.26.0", "qwen3_relu2", "own_mxfp8_w8a8"),
    ("0.26.0", "qwen3_relu2_bias", "own_mxfp8"),
    ("0.26.0", "nemotron_silu", "own_mxfp8"),
    ("0.26.0", "nemotron_relu2", "own_mxfp8"),
    ("0.26.0", "nemotron_relu2_bias", "own_mxfp8_w8a8"),
    ("0.26.0", "qwen3_swigluoai_bias", "own_mxfp8"),
}
"""Self-checks that took more than 150 ms while their card and cores were shared with other processes, and that were not
timed again alone."""
EARLIER = "1"
"""The run whose rows have no self-check and no spread experts: its script had none."""


def table(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = json.loads(file.read_text())
    return data["conditions"], data["rows"]


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["vllm"], row["layer"], row["backend"]


def problem(layer: str) -> Problem:
    """What `backend_table` made of a layer's name."""
    hidden, inner, top_k = (2048, 768, 8) if layer.startswith("qwen3") else (2688, 1856, 6)
    activation = Activation("relu2", gated=False) if "relu2" in layer else Activation("silu")
    if "swigluoai" in layer:
        activation = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)
    scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
    return Problem(layer, scheme, 128, 128, top_k, hidden, inner, activation, has_bias=layer.endswith("_bias"))


def machine(conditions: dict[str, Any]) -> Device:
    packages = dict(conditions["packages"])
    return Device("cuda", conditions["gpu"], conditions["capability"], packages=packages)


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_both_releases_were_measured() -> None:
    assert [file.stem for file in FILES] == ["mxfp8-vllm-0.26.0", "mxfp8-vllm-0.33.0"]


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    conditions, rows = table(file)
    assert conditions["gpu"] == "NVIDIA H200" and conditions["capability"] == 90
    assert conditions["packages"]["vllm"] == file.stem.removeprefix("mxfp8-vllm-")
    assert {"torch", "cuda", "command", "date", "limit", "ratio_to_stock", "runs"} <= conditions.keys()
    assert (conditions["limit"], conditions["ratio_to_stock"]) == (6e-3, 1.2)
    assert {row["run"] for row in rows} <= conditions["runs"].keys()
    assert len({key(row) for row in rows}) == len(rows)


@every_file
def test_every_backend_that_the_oracle_accepts_was_run_on_every_layer(file: Path) -> None:
    conditions, rows = table(file)
    for layer in LAYERS:
        accepted = {
            backend.name
            for backend in default_registry().for_scheme("mxfp8")
            if not backend.check(problem(layer), machine(conditions)).reasons
        }
        ran = {row["backend"] for row in rows if row["layer"] == layer and "refused" not in row}
        assert ran == accepted >= EVERYWHERE, layer


@every_file
def test_errors_conversions_and_ranks_keep_the_rules(file: Path) -> None:
    for row in table(file)[1]:
        if "refused" in row:
            continue
        assert "failure" not in row, key(row)
        assert row["error"].keys() == TOKENS, key(row)
        assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64, key(row)
        assert row["run"] == EARLIER or row["spread_error"] <= 6e-3, key(row)
        for tokens, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"}, key(row)
            assert max(modes.values()) <= 6e-3, (key(row), tokens)
            if "stock_error" in row:
                assert max(modes.values()) <= 1.2 * row["stock_error"][tokens], (key(row), tokens)


@every_file
def test_stock_was_measured_beside_the_kernels_that_are_its_own(file: Path) -> None:
    for row in table(file)[1]:
        if row["backend"].startswith(("marlin", "humming")) and "refused" not in row:
            assert "stock_error" in row, (key(row), row.get("stock_failure"))


@every_file
def test_self_checks_pass_and_find_every_fault(file: Path) -> None:
    for row in table(file)[1]:
        if row["run"] == EARLIER:
            continue
        check, layer = row["self_check"], problem(row["layer"])
        assert check["passed"] and check["error"] <= check["tolerance"] and not check["missed"], key(row)
        wanted = FAULTS | (GATED_FAULTS if layer.activation.gated else set())
        wanted |= BIAS_FAULTS if layer.has_bias else set()
        assert check["faults"].keys() >= wanted, key(row)
        assert min(check["faults"].values()) > check["tolerance"], key(row)


@every_file
def test_nothing_is_broken_but_times_on_a_shared_card(file: Path) -> None:
    late = set()
    for row in table(file)[1]:
        if "refused" in row or row["run"] == EARLIER:
            assert "refused" in row or row["pass"], key(row)
            continue
        if row["self_check"]["seconds"] > 0.15:
            late.add(key(row))
        assert row["broken"] == [TIME] * (key(row) in late) and row["pass"] == (key(row) not in late), key(row)
    assert late == {each for each in LATE if each[0] in file.stem}


@every_file
def test_every_kind_of_backend_was_self_checked_in_time(file: Path) -> None:
    """Each at least once although the card was shared."""
    seen = {
        row["backend"]
        for row in table(file)[1]
        if "refused" not in row and row["run"] != EARLIER and row["self_check"]["seconds"] <= 0.15
    }
    assert seen == {*EVERYWHERE, "humming_mxfp8"}


@every_file
def test_what_was_refused_afterwards_is_refused(file: Path) -> None:
    conditions, rows = table(file)
    refused = [row for row in rows if "refused" in row]
    for row in refused:
        backend = default_registry()[row["backend"]]
        codes = {reason.code for reason in backend.check(problem(row["layer"]), machine(conditions)).reasons}
        assert codes == {"activation.since"}, key(row)
    worst = max((max(modes.values()) for row in refused for modes in row["error"].values()), default=0.0)
    # The number that stands in the reason.
    assert worst == 0.0 or 6.15e-3 < worst < 6.25e-3
