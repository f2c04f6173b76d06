"""Names that several backends share: vLLM's kernels, and layouts of a layer's tensors. That backends with one layout
convert to the same bits is among the conformance tests."""

from __future__ import annotations

import pytest

from tests.lib.cases import H200, problem
from tests.lib.cases import backend as plain_backend
from tests.lib.stock_rules import CLASSES, TRITON, backend, gpu, home, machine, usual
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings


@pytest.mark.parametrize(
    ("layer_of", "name", "capability", "chosen"),
    [
        ("marlin_mxfp8", "marlin", 90, "marlin_mxfp8"),
        ("marlin_mxfp8", "humming", 90, "humming_mxfp8"),
        ("marlin_mxfp8", "emulation", 90, "emulation"),
        ("marlin_mxfp8", "flashinfer_trtllm", 100, "trtllm_mxfp8_monolithic"),
        ("marlin_mxfp8", "deep_gemm", 103, "deep_gemm_mxfp8"),
        ("marlin_mxfp8", "auto", 90, "humming_mxfp8"),
        ("marlin_mxfp4", "marlin", 90, "marlin_mxfp4"),
        ("marlin_mxfp4", "humming", 90, "humming_mxfp4"),
        ("marlin_mxfp4", "triton", 90, "triton_mxfp4_monolithic"),
        ("marlin_mxfp4", "triton_unfused", 100, "triton_mxfp4_unfused"),
        ("marlin_mxfp4", "emulation", 90, "emulation"),
        ("marlin_mxfp4", "cpu", 0, "cpu_mxfp4"),
        ("marlin_mxfp4", "auto", 0, "cpu_mxfp4"),
        ("marlin_mxfp4", "auto", 89, "marlin_mxfp4"),
        ("trtllm_mxint4", "marlin", 90, "marlin_wna16"),
        ("trtllm_mxint4", "humming", 90, "humming_wna16"),
        ("trtllm_mxint4", "triton", 90, "triton_wna16"),
        ("trtllm_mxint4", "emulation", 90, "emulation"),
        ("trtllm_mxint4", "flashinfer_trtllm", 100, "trtllm_mxint4"),
    ],
)
def test_vllms_names_choose_as_in_stock(layer_of: str, name: str, capability: int, chosen: str) -> None:
    decision = decide(usual(layer_of), machine(NEWEST, capability), Settings(), moe_backend=name)
    assert decision.backend == chosen
    assert decision.why == ("static" if name == "auto" else "user")


@pytest.mark.parametrize("names", [TRITON, [name for name in CLASSES if name.startswith("trtllm_mxfp4")]], ids=" ".join)
def test_backends_over_one_kernel_share_a_layout(names: tuple[str, ...]) -> None:
    layer = usual(names[0])
    plans = {name: backend(name).plan(layer, gpu(home(name))) for name in names}
    assert len({backend(name).layout(layer, plan) for name, plan in plans.items()}) == 1


def test_a_backend_that_says_nothing_of_its_layout_shares_none() -> None:
    layer = problem()
    one, other = plain_backend("one"), plain_backend("other")
    assert one.layout(layer, one.plan(layer, H200)) != other.layout(layer, other.plan(layer, H200))
