"""MXFP8 backends over vLLM's kernels on a GPU: conversions as stock's byte for byte, outputs as a reference's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import mxfp8_table as table
from mxfp8_table import Case

from vllm_moe_oracle import device
from vllm_moe_oracle.oracle.problem import Activation, Problem, Scheme
from vllm_moe_oracle.oracle.registry import default_registry

CASES = (
    Case("padded_silu", 8, 2, 256, 96, "silu"),
    Case("whole_silu", 8, 2, 512, 256, "silu"),
    Case("whole_relu2", 8, 2, 256, 128, "relu2_no_mul"),
    Case("padded_relu2", 8, 2, 384, 160, "relu2_no_mul"),
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    table.join_alone("cuda")
    yield


def problem(case: Case) -> Problem:
    name = case.activation.removesuffix("_no_mul")
    return Problem(
        layer="model.layers.0.mlp.experts",
        scheme=Scheme("mxfp8", bits=8, group_size=32, packing="modelopt", activations="mxfp8"),
        num_experts=case.experts,
        local_experts=case.experts,
        top_k=case.top_k,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        activation=Activation(name, case.gated),
        has_bias=case.bias,
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
    raw = table.checkpoint(case, "cuda")
    try:
        built = table.build(case, raw, "cuda", table.STOCK[name])
    except (RuntimeError, ValueError, AssertionError) as error:
        pytest.skip(f"stock cannot convert it: {error}")
    stored = {own: getattr(built.layer, parameter).data for own, parameter in NAMES.items()}
    expected = {own: tensor.clone() for own, tensor in stored.items()}
    built.close()
    backend = default_registry()[name]
    chosen = problem(case)
    plan = backend.plan(chosen, device.detect())
    canonical = {own: raw[parameter] for own, parameter in NAMES.items()}
    for expert in range(case.experts):
        found = backend.convert({own: tensor[expert] for own, tensor in canonical.items()}, chosen, plan)
        for own, tensor in found.items():
            theirs = expected[own][expert]
            assert tensor.dtype == theirs.dtype and tensor.shape == theirs.shape, own
            assert torch.equal(tensor.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), own


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backends_over_vllms_kernels_agree_with_the_reference(case: Case) -> None:
    rows = table.rows_of(case, "cuda", {*table.STOCK, "emulation"}, (1, 7, 64))
    assert len(rows) == 3 and not [row["failure"] for row in rows if "failure" in row]
    for row in rows:
        for count, modes in row["error"].items():
            # Small layers have few values to average over: one token's error is up to a third above the mean.
            assert max(modes.values()) <= 4 / 3 * table.LIMIT, (row["backend"], count, modes)
            assert modes["graph"] <= 1.01 * modes["eager"], (row["backend"], count, modes)
        for count, error in row.get("stock_error", {}).items():
            assert max(row["error"][count].values()) <= table.RATIO * error, (row["backend"], count)
