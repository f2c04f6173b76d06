"""Conversions lose nothing: through the inverses of the layouts, kernel tensors give the canonical ones back.

That conversions leave their inputs alone and give the same bits twice is among the conformance tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lib.cases import H200, RELU2, SILU, problem
from tests.lib.cases import backend as plain_backend
from tests.lib.inverses import restored
from tests.lib.releases import DEFAULT_RELEASE
from tests.lib.stock_rules import (
    CLASSES,
    GPT_OSS,
    HALVES,
    TRITON,
    backend,
    expert,
    gpu,
    home,
    machine,
    usual,
    wna16_scheme,
)
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.backends._humming import HummingBackend
from vllm_moe_oracle.backends._triton_kernels import TritonKernelsBackend
from vllm_moe_oracle.backends.cutlass_mxfp4 import CutlassMxfp4Bf16
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.oracle.checked_backend import unchecked

NAMES = [*CLASSES, "cpu_mxfp4", "hopper_wna16"]
SEVERAL_LAYOUTS: dict[type[Backend], int] = {HummingBackend: 2, TritonKernelsBackend: 2, CutlassMxfp4Bf16: 2}
"""Classes of backends whose layout depends on the device or on a package's version, and how many they have."""


def machines(name: str) -> list[Device]:
    """Machines on which a backend converts into all layouts that it has."""
    if name.startswith("cpu"):
        return [machine(DEFAULT_RELEASE, 0)]
    others = {
        "humming": gpu(90, **{"humming-kernels": "0.1.10"}),
        "marlin": gpu(90, vllm="0.29.0"),
        "triton": gpu(100),
        "cutlass": gpu(home(name), **{"flashinfer-python": "0.6.14"}),
    }
    library = name.partition("_")[0]
    return [gpu(home(name)), *([others[library]] if library in others else [])]


def layer_of(name: str, draw: random.Random) -> Problem:
    """A layer of the backend's scheme, whether it takes it or not."""
    activations = [SILU, RELU2, HALVES, *([GPT_OSS] if "mxfp4" in name else [])]
    changes: dict[str, Any] = {
        "activation": draw.choice(activations), "has_bias": draw.random() < 0.5,
        "hidden_size": draw.choice((64, 128, 192, 256, 288, 320, 384)),
        "intermediate_size": draw.choice((32, 64, 96, 160, 192, 256)),
    }  # fmt: skip
    if backend(name).schemes == ("wna16",):
        group = draw.choice((-1, 32, 64, 128))
        zeros, order = draw.random() < 0.5, draw.choice(("none", "group"))
        changes |= {
            "scheme": wna16_scheme(draw.choice((4, 8)), group, zeros, order, "compressed-tensors"),
            "intermediate_size": max(group, 32) * draw.randint(1, 5), "tp": draw.choice((1, 2)),
            "dtype": draw.choice(("bfloat16", "float16")), "hidden_size": draw.choice((128, 256, 384)),
        }  # fmt: skip
    return usual(name, **changes)


def accepted(name: str, count: int) -> Iterator[tuple[Problem, Device]]:
    """Layers that a backend takes, each with a machine."""
    draw, found = random.Random(0), 0
    while found < count:
        layer, device = layer_of(name, draw), draw.choice(machines(name))
        if not backend(name).check(layer, device).reasons:
            found += 1
            yield layer, device


@pytest.mark.parametrize("name", NAMES)
def test_kernel_tensors_give_the_canonical_ones_back(name: str) -> None:
    layouts = set()
    for index, (layer, device) in enumerate(accepted(name, 30)):
        plan = backend(name).plan(layer, device)
        layouts.add(plan.layout)
        original = expert(layer, seed=index)
        found = restored(name, backend(name).convert(original, layer, plan), layer, plan)
        assert found.keys() == original.keys(), layer
        for key, tensor in original.items():
            again = found[key].view(tensor.dtype) if tensor.element_size() == 1 else found[key].to(tensor.dtype)
            one, other = (each.contiguous().flatten().view(torch.uint8) for each in (again, tensor))
            assert again.shape == tensor.shape and torch.equal(one, other), f"{key} of {layer} on {device.name}"
    own = unchecked(backend(name))
    assert len(layouts) == next((count for kind, count in SEVERAL_LAYOUTS.items() if isinstance(own, kind)), 1)


@pytest.mark.parametrize("names", [TRITON, [name for name in CLASSES if name.startswith("trtllm_mxfp4")]], ids=" ".join)
def test_backends_over_one_kernel_share_a_layout(names: tuple[str, ...]) -> None:
    """That they then convert to the same bits is among the conformance tests."""
    layer = usual(names[0])
    plans = {name: backend(name).plan(layer, gpu(home(name))) for name in names}
    assert len({backend(name).layout(layer, plan) for name, plan in plans.items()}) == 1


def test_a_backend_that_says_nothing_of_its_layout_shares_none() -> None:
    layer = problem()
    one, other = plain_backend("one"), plain_backend("other")
    assert one.layout(layer, one.plan(layer, H200)) != other.layout(layer, other.plan(layer, H200))
