"""Backends for integer weights over vLLM's kernels on a GPU: conversions as stock's byte for byte, kernels that the
table of backends does not reach."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

from tests.gpu import backend_table
from tests.gpu.backend_table import Case
from tests.gpu.table_wna16 import CT, TABLE
from tests.lib.cases import int_scheme
from tests.lib.wna16_canonical import to_canonical
from vllm_moe_oracle import plugin
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import default_registry

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = (
    Case("g32", int_scheme(CT, 4, 32), 8, 2, 256, 96),
    Case("g128", int_scheme(CT, 4, 128), 8, 2, 512, 256),
    Case("channel", int_scheme(CT, 8, -1), 8, 2, 256, 128),
    Case("zeros", int_scheme(CT, 4, 32, zeros=True), 8, 2, 256, 128),
    Case("awq", int_scheme("awq", 4, 64, zeros=True), 8, 2, 256, 128),
    Case("bytes", int_scheme("gptq", 8, 64), 8, 2, 256, 192),
    Case("bias", int_scheme("gptq", 4, 32), 8, 2, 256, 128, bias=True),
    Case("narrow", int_scheme(CT, 4, 128), 8, 2, 512, 128),
    Case("narrow_first", int_scheme(CT, 4, 128), 8, 2, 128, 256),
    Case("relu2", int_scheme(CT, 4, 32), 8, 2, 384, 192, "relu2_no_mul"),
)
STOCK_IS_WRONG = {
    # `convert_to_wna16_moe_kernel_format` hands on the intermediate size as the columns of w13.
    ("marlin_wna16", "narrow"): "w13_scale",
    ("marlin_wna16", "narrow_first"): "w13_scale",
}
"""Tensors that stock orders for another kernel than it runs."""
REFUSAL = (RuntimeError, ValueError, AssertionError, AttributeError, NotImplementedError)
NO_WORDS = "^$"
STOCK_REFUSES: dict[str, tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = {
    "marlin_wna16": (
        # 0.26: one scale a row has no group size.
        (TypeError, "'>' not supported between instances of 'NoneType' and 'int'"),
    ),
    "humming_wna16": (
        # 0.26: no file of compressed-tensors; of groups of 32, the words of the refusal fail on the type's name.
        (TypeError, "Humming WNA16 MoE requires AutoAWQConfig or AutoGPTQConfig, got QuantizationArgs"),
        (KeyError, r"ScalarType\.uint4(b8)?"),
        # 0.26: the layer has dropped them.
        (REFUSAL, "bias is required by humming"),
        # 0.33: one scale a row.
        (REFUSAL, NO_WORDS),
    ),
    "triton_wna16": (
        # 0.26
        (REFUSAL, "moe_backend='triton' is not supported for WNA16 MoE"),
        # 0.33: of GPTQ's and AWQ's layers, whose loaders may have a bias; and of one scale a row.
        (REFUSAL, "does not support the deployment configuration since expert bias is not supported"),
        (REFUSAL, NO_WORDS),
    ),
}
"""What stock vLLM refuses or fails on where it should run a backend's class: the error, and its words. A test with any
other error fails."""
STOCK_DROPS = {("0.26.0", "marlin_wna16", "bias"): {"w13_bias", "w2_bias"}}
"""Tensors of a case that a release's stock leaves out: until 0.26 the layer's loader drops biases of single experts."""


def refused(name: str, error: Exception) -> bool:
    """Whether an error is among those that stock is known to raise in a backend's place, and not raised by us."""
    where = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    if any(where.is_relative_to(folder) for folder in (Path(__file__).parent, Path(plugin.__file__).parent)):
        return False
    return any(isinstance(error, types) and re.search(words, str(error)) for types, words in STOCK_REFUSES[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["marlin_wna16", "humming_wna16", "triton_wna16"])
def test_conversions_are_stocks_byte_for_byte(name: str, case: Case) -> None:
    backend, problem = default_registry()[name], case.problem()
    if backend.check(problem, detect.detect()).reasons:
        pytest.skip("the backend does not take it")
    checkpoint = TABLE.checkpoint(case, "cuda")
    try:
        built = backend_table.build(TABLE, case, checkpoint, "cuda", TABLE.stock[name])
        built.convert()
        if type(built.method.moe_kernel.fused_experts).__name__ != backend.stock_class_name:
            pytest.skip("stock runs something else")
        expected = backend_table.stored(built)
    except Exception as error:
        if not refused(name, error):
            raise
        pytest.skip(f"stock cannot convert it: {type(error).__name__}: {error}")
    built.close()
    plan = backend.plan(problem, detect.detect())
    if name == "triton_wna16" and plan.pads(problem):
        pytest.skip("stock does not pad for Triton")
    canonical = to_canonical(checkpoint.raw, problem, is_transposed=case.scheme.packing != CT)
    dropped = STOCK_DROPS.get((detect.detect().packages["vllm"], name, case.name), set())
    for expert in range(case.experts):
        found = backend.convert({own: tensor[expert] for own, tensor in canonical.items()}, problem, plan)
        assert found.keys() - expected.keys() == dropped
        for own in found.keys() - dropped:
            same = STOCK_IS_WRONG.get((name, case.name)) != own
            backend_table.assert_same_bytes(found[own], expected[own][expert], own, same)
    if dropped:
        pytest.skip(f"stock drops {', '.join(sorted(dropped))}: not compared; the other tensors are as stock's")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batched_marlin_agrees_with_the_reference_and_faults_show(case: Case) -> None:
    backend_table.assert_faults_show(TABLE, case, "marlin_wna16_batched")
