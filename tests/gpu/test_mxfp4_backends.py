"""Backends for MXFP4 over vLLM's kernels on a GPU: conversions as stock's byte for byte, kernels that the table of
backends does not reach."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import backend_table
from tests.gpu.backend_table import Case, Checkpoint
from tests.gpu.table_mxfp4 import _OAI, _SILU, GPT_OSS, OTHERS, TABLE
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.schemes import mxfp4

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = (
    Case("whole_oai", GPT_OSS, 8, 2, 512, 256, **_OAI),
    Case("whole_silu", OTHERS, 8, 2, 512, 256, **_SILU),
    Case("padded_oai", GPT_OSS, 8, 2, 320, 96, **_OAI),
    Case("padded_silu", OTHERS, 8, 2, 288, 96, **_SILU),
)


def canonical(case: Case, checkpoint: Checkpoint, expert: int) -> dict[str, torch.Tensor]:
    """One expert's tensors as conversions get them."""
    problem = case.problem()
    raw = mxfp4.read(checkpoint.raw, problem)
    return mxfp4.canonical_expert({name: tensor[expert] for name, tensor in raw.items()}, problem)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["marlin_mxfp4", "humming_mxfp4"])
def test_conversions_are_stocks_byte_for_byte(name: str, case: Case) -> None:
    """Of sizes that nobody pads."""
    backend, problem = default_registry()[name], case.problem()
    checkpoint = TABLE.checkpoint(case, "cuda")
    built = backend_table.build(TABLE, case, checkpoint, "cuda", TABLE.stock[name])
    built.convert()
    assert type(built.method.moe_kernel.fused_experts).__name__ == backend.stock_class_name
    expected = backend_table.stored(built)
    built.close()
    plan = backend.plan(problem, detect.detect())
    for expert in range(case.experts):
        found = backend.convert(canonical(case, checkpoint, expert), problem, plan)
        assert found.keys() == expected.keys()
        for own, tensor in found.items():
            backend_table.assert_same_bytes(tensor, expected[own][expert], own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batched_marlin_agrees_with_the_reference_and_faults_show(case: Case) -> None:
    backend_table.assert_faults_show(TABLE, case, "marlin_mxfp4_batched")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backends_over_vllms_kernels_agree_with_the_reference(case: Case) -> None:
    """Small layers, of which some are padded."""
    rows = backend_table.rows_of(TABLE, case, "cuda", {"marlin_mxfp4", "emulation", "hopper_mxfp4"}, (1, 7, 64))
    assert len(rows) == 3 and not [row["failure"] for row in rows if "failure" in row]
    for row in rows:
        for count, modes in row["error"].items():
            # Small layers have few values to average over: one token's error is up to a third above the mean.
            assert max(modes.values()) <= 4 / 3 * backend_table.LIMIT, (row["backend"], count, modes)
        assert row["self_check"]["passed"] and not row["self_check"]["missed"], row["backend"]
