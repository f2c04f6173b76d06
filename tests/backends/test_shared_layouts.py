"""Which backends share a layer's tensors. That they then convert to the same bits is among the conformance tests."""

from __future__ import annotations

import pytest

from tests.lib.cases import H200, problem
from tests.lib.cases import backend as plain_backend
from tests.lib.stock_rules import CLASSES, TRITON, backend, gpu, home, usual


@pytest.mark.parametrize("names", [TRITON, [name for name in CLASSES if name.startswith("trtllm_mxfp4")]], ids=" ".join)
def test_backends_over_one_kernel_share_a_layout(names: tuple[str, ...]) -> None:
    layer = usual(names[0])
    plans = {name: backend(name).plan(layer, gpu(home(name))) for name in names}
    assert len({backend(name).layout(layer, plan) for name, plan in plans.items()}) == 1


def test_a_backend_that_says_nothing_of_its_layout_shares_none() -> None:
    layer = problem()
    one, other = plain_backend("one"), plain_backend("other")
    assert one.layout(layer, one.plan(layer, H200)) != other.layout(layer, other.plan(layer, H200))
