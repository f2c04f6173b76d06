"""MXFP8 backends over vLLM's kernels on a GPU: conversions as stock's byte for byte, outputs as a reference's."""

from __future__ import annotations

import pytest

from tests.gpu import backend_table
from tests.gpu.backend_table import Case
from tests.gpu.table_mxfp8 import SCHEME, TABLE
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import default_registry

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = (
    Case("padded_silu", SCHEME, 8, 2, 256, 96, "silu"),
    Case("whole_silu", SCHEME, 8, 2, 512, 256, "silu"),
    Case("whole_relu2", SCHEME, 8, 2, 256, 128, "relu2_no_mul"),
    Case("padded_relu2", SCHEME, 8, 2, 384, 160, "relu2_no_mul"),
)


NAMES = {
    "w13": "w13_weight",
    "w2": "w2_weight",
    "w13_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["marlin_mxfp8", "humming_mxfp8"])
def test_conversions_are_stocks_byte_for_byte(name: str, case: Case) -> None:
    backend, chosen = default_registry()[name], case.problem()
    if backend.check(chosen, detect.detect()).reasons:
        pytest.skip("the backend does not take it")
    checkpoint = TABLE.checkpoint(case, "cuda")
    try:
        built = backend_table.build(TABLE, case, checkpoint, "cuda", TABLE.stock[name])
        built.convert()
    except (RuntimeError, ValueError, AssertionError) as error:
        pytest.skip(f"stock cannot convert it: {error}")
    stored = {own: getattr(built.layer, parameter).data for own, parameter in NAMES.items()}
    expected = {own: tensor.clone() for own, tensor in stored.items()}
    built.close()
    plan = backend.plan(chosen, detect.detect())
    canonical = {own: checkpoint.raw[parameter] for own, parameter in NAMES.items()}
    for expert in range(case.experts):
        found = backend.convert({own: tensor[expert] for own, tensor in canonical.items()}, chosen, plan)
        for own, tensor in found.items():
            assert tensor.dtype == expected[own].dtype, own
            backend_table.assert_same_bytes(tensor, expected[own][expert], own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backends_over_vllms_kernels_agree_with_the_reference(case: Case) -> None:
    humming = not default_registry()["humming_mxfp8"].check(case.problem(), detect.detect()).reasons
    assert humming or not case.gated  # it takes experts without a gate in later releases only
    rows = backend_table.rows_of(TABLE, case, "cuda", {*TABLE.stock, "emulation"}, (1, 7, 64))
    assert not [row["failure"] for row in rows if "failure" in row]
    assert {row["backend"] for row in rows} == {"marlin_mxfp8", "emulation"} | ({"humming_mxfp8"} if humming else set())
    for row in rows:
        for count, modes in row["error"].items():
            # Small layers have few values to average over: one token's error is up to a third above the mean.
            assert max(modes.values()) <= 4 / 3 * backend_table.LIMIT, (row["backend"], count, modes)
            assert modes["graph"] <= 1.01 * modes["eager"], (row["backend"], count, modes)
        for count, error in row.get("stock_error", {}).items():
            assert max(row["error"][count].values()) <= backend_table.RATIO * error, (row["backend"], count)
