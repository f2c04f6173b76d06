"""The committed tables of MXFP4 backends on an H200, as `tests/gpu/backend_table.py` printed them, and what holds of
them."""

from __future__ import annotations

from pathlib import Path

from tests.lib.backend_tables import FOLDER, Row, assert_conditions, assert_row, every_table, key, read

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
IGNORED = frozenset({"alpha ignored", "beta ignored", "limit ignored"})
BUILT_IN = {
    "triton_mxfp4": IGNORED,
    "triton_mxfp4_monolithic": IGNORED,
    "triton_mxfp4_unfused": frozenset({"beta ignored"}),
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


every_file = every_table("mxfp4")


def rows(file: Path) -> list[Row]:
    return read(file)[1]


@every_file
def test_the_conditions_are_there(file: Path) -> None:
    assert_conditions(file, "mxfp4")


@every_file
def test_every_backend_is_in_the_table(file: Path) -> None:
    flashinfer = "flashinfer-python" in read(file)[0]["packages"]
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
def test_every_row_keeps_every_rule_and_finds_every_fault(file: Path) -> None:
    for row in rows(file):
        gpt_oss = row["layer"].startswith(("gpt_oss", "tiny_oai"))
        refused = BUILT_IN.get(row["backend"], frozenset()) if gpt_oss else frozenset()
        assert_row(row, "mxfp4", refused, margin=5, spread=row["backend"] not in NEIGHBORS)


def test_which_self_checks_were_timed_alone() -> None:
    """Those that were timed while every other process waited: our own kernels' in both releases, among others."""
    alone = [
        row for file in FOLDER.glob("mxfp4-vllm-*.json") for row in rows(file) if row.get("self_check", {}).get("alone")
    ]
    assert {key(row) for row in alone} == {
        (vllm, layer, name) for (vllm, name), each in ALONE.items() for layer in each
    }


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
