"""The committed tables of MXFP8 backends on an H200, as `tests/gpu/backend_table.py` printed them, and what holds of
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.faults import BIAS_FAULTS, FAULTS, GATED_FAULTS, PARAMETER_FAULTS
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import evaluate_candidates

FOLDER = Path(__file__).parents[1] / "golden/h200"
FILES = sorted(FOLDER.glob("mxfp8-vllm-*.json"))
LAYERS = {
    "qwen3_silu",
    "qwen3_silu_bias",
    "qwen3_relu2",
    "qwen3_relu2_bias",
    "qwen3_swigluoai_bias",
    "nemotron_silu",
    "nemotron_relu2",
    "nemotron_relu2_bias",
    "nemotron_relu2_tp2",
    "qwen3_silu_ep2",
}
TINY = {"0.33.0": {("tiny_silu_ep2", "humming_mxfp8_grouped")}, "0.26.0": set()}
"""Rows of small layers, by release: of a backend whose kernels compile for minutes."""
TOKENS = {"1", "7", "64", "513"}
EVERYWHERE = {"marlin_mxfp8", "hopper_mxfp8", "hopper_mxfp8_w8a8", "emulation"}

STOCK_CANNOT = {("nemotron_relu2_tp2", "marlin_mxfp8"): "shape '[128, 2, 928, 2688]' is invalid"}
"""Layers that stock's own conversion fails on, with its words: it takes 928 rows without a gate for two halves."""


def table(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = json.loads(file.read_text())
    # A row without numbers does not say it.
    release = {"vllm": data["conditions"]["packages"]["vllm"]}
    return data["conditions"], [release | row for row in data["rows"]]


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["vllm"], row["layer"], row["backend"]


SIZES = {"qwen3": (128, 8, 2048, 768), "nemotron": (128, 6, 2688, 1856), "tiny": (8, 2, 256, 96)}


def problem(layer: str) -> Problem:
    """What `backend_table` made of a layer's name."""
    experts, top_k, hidden, inner = SIZES[layer.partition("_")[0]]
    inner = inner // 2 if layer.endswith("_tp2") else inner
    activation = Activation("relu2", gated=False) if "relu2" in layer else Activation("silu")
    if "swigluoai" in layer:
        activation = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)
    scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
    ep = 2 if layer.endswith("_ep2") else 1
    return Problem(
        layer, scheme, experts, experts // ep, top_k, hidden, inner, activation, has_bias=layer.endswith("_bias"),
        parallel=Parallel(ep=ep),
    )  # fmt: skip


def machine(conditions: dict[str, Any]) -> Device:
    packages = dict(conditions["packages"])
    return Device("cuda", conditions["gpu"], conditions["capability"], packages=packages)


every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def measured(file: Path) -> list[dict[str, Any]]:
    """The rows of what ran and is not refused since."""
    return [row for row in table(file)[1] if "refused" not in row]


def test_both_releases_were_measured() -> None:
    assert [file.stem for file in FILES] == ["mxfp8-vllm-0.26.0", "mxfp8-vllm-0.33.0"]


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    conditions, rows = table(file)
    assert conditions["gpu"] == "NVIDIA H200" and conditions["capability"] == 90
    assert conditions["packages"]["vllm"] == file.stem.removeprefix("mxfp8-vllm-")
    assert {"torch", "cuda", "command", "date", "limit", "ratio_to_stock"} <= conditions.keys()
    assert (conditions["limit"], conditions["ratio_to_stock"]) == (6e-3, 1.2)
    assert {row["run"] for row in rows} == conditions["runs"].keys()
    assert len({key(row) for row in rows}) == len(rows)


@every_file
def test_every_backend_that_the_oracle_accepts_was_run_on_every_layer(file: Path) -> None:
    conditions, rows = table(file)
    tiny = {(row["layer"], row["backend"]) for row in rows if row["layer"] not in LAYERS}
    assert tiny == TINY[conditions["packages"]["vllm"]]
    for layer in LAYERS:
        asked = evaluate_candidates(problem(layer), machine(conditions), settings.load({}))
        accepted = {each.backend for each in asked if each.accepted}
        ran = {row["backend"] for row in rows if row["layer"] == layer and "refused" not in row}
        assert ran == accepted >= EVERYWHERE, layer


@every_file
def test_every_row_has_numbers_and_breaks_no_rule(file: Path) -> None:
    for row in measured(file):
        assert row["pass"] is True and row["broken"] == [] and "failure" not in row, key(row)


@every_file
def test_errors_conversions_and_ranks_keep_the_rules(file: Path) -> None:
    for row in measured(file):
        assert row["error"].keys() == TOKENS, key(row)
        assert row["convert_peak_mib"] <= row["one_expert_mib"] + 64, key(row)
        assert row["spread_error"] <= 6e-3, key(row)
        for tokens, modes in row["error"].items():
            assert modes.keys() == {"eager", "graph"}, key(row)
            assert max(modes.values()) <= 6e-3, (key(row), tokens)
            if "stock_error" in row:
                assert max(modes.values()) <= 1.2 * row["stock_error"][tokens], (key(row), tokens)


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
def test_self_checks_pass_and_find_every_fault(file: Path) -> None:
    for row in measured(file):
        check, layer = row["self_check"], problem(row["layer"])
        assert check["passed"] and check["error"] <= check["tolerance"] and not check["missed"], key(row)
        wanted = FAULTS | (GATED_FAULTS if layer.activation.gated else set())
        wanted |= BIAS_FAULTS if layer.has_bias else set()
        wanted |= PARAMETER_FAULTS if layer.activation.alpha is not None else set()
        assert check["raised"] == {} and not check.get("refused"), key(row)
        assert check["faults"].keys() == wanted, key(row)
        assert min(check["faults"].values()) > check["tolerance"], key(row)


@every_file
def test_self_checks_take_less_than_150_ms_and_keep_nothing(file: Path) -> None:
    """With everything compiled; the longest of three where they ran alone, which is always so for this project's."""
    for row in measured(file):
        check = row["self_check"]
        assert check["seconds"] <= 0.15, key(row)
        assert check.get("alone") or not row["backend"].startswith("hopper"), key(row)
        if "alone" in check:
            assert len(check["each"]) == 3 and check["seconds"] == max(check["each"]), key(row)
            assert check["kept_mib"] == 0.0, key(row)


@every_file
def test_every_kind_of_backend_was_self_checked_in_time(file: Path) -> None:
    seen = {row["backend"] for row in measured(file)}
    grouped = {backend for _, backend in TINY[table(file)[0]["packages"]["vllm"]]}
    assert seen == {*EVERYWHERE, "humming_mxfp8"} | grouped


@every_file
def test_what_was_refused_afterwards_is_refused(file: Path) -> None:
    conditions, rows = table(file)
    refused = [row for row in rows if "refused" in row]
    assert len(refused) == (4 if conditions["packages"]["vllm"] == "0.26.0" else 0)
    for row in refused:
        backend = default_registry()[row["backend"]]
        codes = {reason.code for reason in backend.check(problem(row["layer"]), machine(conditions)).reasons}
        assert codes == {"activation.vllm_version"}, key(row)
    worst = max((max(modes.values()) for row in refused for modes in row["error"].values()), default=0.0)
    assert worst == 0.0 or 6.15e-3 < worst < 6.25e-3
