"""The committed tables of backends for integer weights on an H200, as `tests/gpu/backend_table.py` printed them, and
what holds of them: every row has numbers, and keeps every rule."""

from __future__ import annotations

from pathlib import Path

from tests.lib.backend_tables import assert_conditions, assert_row, backend_table, every_table, key, measured, read
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.oracle.registry import default_registry

LAYERS = {name: case for name, case in backend_table.table_of("wna16").cases.items() if not name.startswith("tiny")}

COMPILED_LATER = {"kimi_k2_tp8_g32": {"513"}}
"""Our kernels are compiled at load, but for those of calls whose scratch memory is more than loading may take: here
from 353 tokens on. vLLM's first full call, by which it learns what a step needs, compiles these."""

OTHER_COLUMNS = "scales of the first product are ordered by the columns of the second"
WRONG_STOCK = {
    ("0.26.0", "narrow_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.33.0", "narrow_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.26.0", "narrow_awq_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.33.0", "narrow_awq_g128", "marlin_wna16"): OTHER_COLUMNS,
    ("0.26.0", "qwen3_bias", "marlin_wna16"): "until 0.26 the layer's loader drops biases of single experts",
}
"""Release, layer and backend whose stock class gives wrong numbers, and why: they say nothing of ours."""


every_file = every_table("wna16")


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    assert_conditions(file, "wna16")


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
def test_every_row_keeps_every_rule_and_finds_every_fault(file: Path) -> None:
    for row in measured(file):
        assert_row(row, "wna16")
        if row["backend"].startswith("hopper_"):
            assert row["self_check"]["alone"], key(row)
            assert row.get("compiled", {}).keys() <= COMPILED_LATER.get(row["layer"], set()), key(row)


@every_file
def test_humming_does_not_split_a_narrow_product_for_one_token(file: Path) -> None:
    """Stock's own class is, and has 7.0e-3 there in 0.33.0."""
    (row,) = [
        each for each in measured(file) if (each["layer"], each["backend"]) == ("kimi_k2_tp8_g32", "humming_wna16")
    ]
    assert max(row["error"]["1"].values()) <= 6e-3
    if "stock_error" in row:
        assert row["stock_error"]["1"] > 6.5e-3


@every_file
def test_act_order_ran_on_this_projects_kernels(file: Path) -> None:
    (row,) = [row for row in measured(file) if row["backend"] == "hopper_wna16_act_order"]
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
