"""The self-check catches backends with one fault each and passes faultless ones."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re

import pytest
import torch
from torch import Tensor

from tests.lib.cases import MXFP8_W8A8, problem

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from tests.lib import faulty_backends as lib
from tests.lib.faulty_backends import (
    LAYERS,
    SMALL,
    Faulty,
    check,
    shift,
    swap_halves,
    swizzle,
    weights,
)
from tests.lib.tiers import each_once, sampled
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.verification.tolerances import error_tolerance

GATED = [name for name, layer in LAYERS.items() if layer.activation.gated]
BIASED = [name for name, layer in LAYERS.items() if layer.has_bias]
SOME = ["silu", "silu, 16 bit", "gpt-oss", "relu2, biases"]
PARAMETERS = [name for name in LAYERS if name.startswith("gpt-oss")]

FAULTS: list[tuple[Faulty, list[str]]] = [
    (lib.FAULTS["swapped halves"], GATED),
    *((lib.FAULTS[name], SOME) for name in (
        "swizzled scales of w13", "swizzled scales of w2", "scales of w13 one up", "scales of w13 one down",
        "scales of w2 one up", "scales of w2 one down", "codes of w2 transposed", "other experts",
        "other router weights", "one NaN", "zeros", "one token", "one token, zeros", "more than 8", "more than 64",
    )),
    *((lib.FAULTS[name], BIASED) for name in ("no bias of w13", "no bias of w2")),
    *((lib.FAULTS[name], PARAMETERS) for name in ("alpha ignored", "beta ignored", "limit ignored")),
    *((lib.FAULTS[name], ["situ"]) for name in ("situ's bound of gate ignored", "situ's bound of up ignored")),
    (lib.FAULTS["swiglustep's limit ignored"], ["swiglustep"]),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name"), each_once(FAULTS, lambda fault: fault.name))
def test_a_fault_is_caught(fault: Faulty, name: str) -> None:
    result = check(fault, LAYERS[name], weights(LAYERS[name]))
    print(result)
    assert not result.passed, result
    assert not result.skip_reason


@pytest.mark.parametrize(
    ("name", "size", "biases"), sampled(itertools.product(LAYERS, [1e-4, 0.05, 30.0], [0.0, 1.0]), 5)
)
def test_a_faultless_backend_passes_whatever_the_weights_are_like(name: str, size: float, biases: float) -> None:
    layer = LAYERS[name]
    result = check(Faulty("none"), layer, weights(layer, size, biases))
    assert result.passed and not result.skip_reason, result
    # The emulation differs from the reference by one rounding of the output, of the five that the tolerance allows.
    assert result.error <= result.tolerance / 4


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (3, 3), (4, 4), (16, 8), (64, 6)])
def test_any_number_of_experts(experts: int, top_k: int) -> None:
    layer = problem(**{**SMALL, "experts": experts, "top_k": top_k}, scheme=MXFP8_W8A8)
    loaded = weights(layer)
    assert check(Faulty("none"), layer, loaded).passed
    assert not check(Faulty("shifted", shift("w13_scale", 1)), layer, loaded).passed


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("zeros", "dtype"), [((0,), "bfloat16"), ((0, 1), "float16"), (tuple(range(8)), "bfloat16")])
def test_experts_of_zeros_pass(name: str, zeros: tuple[int, ...], dtype: str) -> None:
    """As pruning leaves them."""
    layer = dataclasses.replace(LAYERS[name], dtype=dtype)
    loaded = weights(layer)
    for index in zeros:
        for each in ("w13", "w2"):
            loaded[each][index].view(torch.uint8).zero_()
    result = check(Faulty("none"), layer, loaded)
    assert result.passed and not result.skip_reason, result


ONCE = [(fault, names[0]) for fault, names in FAULTS]


@pytest.mark.parametrize(("fault", "name"), ONCE, ids=[fault.name for fault, _ in ONCE])
def test_an_expert_of_zeros_does_not_hide_faults_of_another(fault: Faulty, name: str) -> None:
    layer = LAYERS[name]
    loaded = weights(layer)
    for each in ("w13", "w2"):
        loaded[each][0].view(torch.uint8).zero_()
    assert not check(fault, layer, loaded).passed


def test_experts_of_very_different_magnitudes_pass() -> None:
    layer = dataclasses.replace(LAYERS["silu"], dtype="float16")
    loaded = weights(layer)
    loaded["w13_scale"][0] -= 12  # 4096 times smaller: inputs sized for this one would overflow in the others
    result = check(Faulty("none"), layer, loaded)
    assert result.passed, result


def test_scales_in_another_order_are_caught_even_where_all_are_alike() -> None:
    layer = LAYERS["silu"]
    loaded = weights(layer)
    for name in ("w13_scale", "w2_scale"):
        loaded[name] = torch.full_like(loaded[name], 120)
    assert not check(Faulty("swizzled", swizzle("w13_scale")), layer, loaded).passed
    assert not check(Faulty("swizzled", swizzle("w2_scale")), layer, loaded).passed


def test_the_loaded_weights_are_not_changed() -> None:
    layer = LAYERS["gpt-oss"]
    loaded = weights(layer, biases=1.0)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    check(Faulty("swapped", swap_halves), layer, loaded)
    for name, tensor in loaded.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_nothing_stays_in_memory() -> None:
    layer = LAYERS["gpt-oss"]
    loaded = weights(layer)

    check(Faulty("none"), layer, loaded)
    gc.collect()
    gc.freeze()  # what there is now is none of the objects below
    check(Faulty("none"), layer, loaded)
    gc.collect()
    assert [each for each in gc.get_objects() if issubclass(type(each), Tensor)] == []


def test_the_log_reports_error_and_time() -> None:
    said = str(check(Emulation(), LAYERS["silu"], weights(LAYERS["silu"])))
    assert re.fullmatch(r"relative error \d\.\d\de-\d\d, allowed \d\.\d\de-\d\d; took \d+\.\d\d s", said)


def test_the_tolerance_follows_from_the_formats() -> None:
    backend = Emulation()
    limits = {name: error_tolerance(backend, layer) for name, layer in LAYERS.items()}
    assert limits["silu, float32"] < 2e-4 < limits["silu, 16 bit"] < 0.03 < limits["silu"] < 0.1
