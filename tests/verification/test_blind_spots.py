"""Faults that show in some calls only, in some columns only, or in slots and experts that few calls have."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from tests.lib import faulty_backends as lib
from tests.lib.faulty_backends import MXFP4, MXFP4_W4A4, OAI, Faulty, after, check, weights
from vllm_moe_oracle.backends.emulation import expert_outputs, forward, ieee_fp32_matmul
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Parallel
from vllm_moe_oracle.verification import bounds, inputs, self_check

SMALL: dict[str, Any] = {"experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 128, "has_bias": True}
LAYERS = {
    "16 bit": problem(**SMALL, scheme=MXFP8, activation=OAI),
    "W8A8": problem(**SMALL, scheme=MXFP8_W8A8, activation=OAI),
    "4 bit": problem(**SMALL, scheme=MXFP4, activation=OAI),
    "W4A4": problem(**SMALL, scheme=MXFP4_W4A4, activation=OAI),
}
ALL = list(LAYERS)
FINE = [name for name in ALL if name != "W4A4"]
"""Under activations of 4 bits, faults of a fifth of the output are less than what rounding otherwise explains."""

FAULTS: list[tuple[Faulty, list[str]]] = [
    (lib.FAULTS["one token"], FINE),
    (lib.FAULTS["one token, zeros"], ALL),
    (lib.FAULTS["more than 8"], FINE),
    (lib.FAULTS["more than 64"], ALL),
    (lib.FAULTS["no multiple of 8"], ALL),
    (lib.FAULTS["last 16 columns"], ALL),
    (lib.FAULTS["last column"], ALL),
    (lib.FAULTS["one expert"], ALL),
    (lib.FAULTS["idle experts"], ALL),
    (lib.FAULTS["empty slots"], ALL),
    (lib.FAULTS["input changed"], ALL),
    (lib.FAULTS["last weight"], ALL),
    (lib.FAULTS["scales of w13"], FINE),
    (lib.FAULTS["scales of w2"], FINE),
    (lib.FAULTS["smaller scales of w13"], FINE),
    (lib.FAULTS["smaller scales of w2"], FINE),
    (lib.FAULTS["bias of the last columns"], ALL),
]
CASES = [(fault, name) for fault, names in FAULTS for name in names]


@pytest.mark.parametrize(("fault", "name"), CASES, ids=[f"{fault.name}-{name}" for fault, name in CASES])
def test_a_fault_is_caught(fault: Faulty, name: str) -> None:
    result = check(fault, LAYERS[name], weights(LAYERS[name]))
    print(result)
    assert not result.passed and result.fault and not result.skip_reason


@pytest.mark.parametrize("number", [2, 7, 20])
@pytest.mark.parametrize("name", FINE)
def test_a_later_call_that_is_wrong_is_caught(name: str, number: int) -> None:
    result = check(Faulty("nth", compute=lib.Nth(number)), LAYERS[name], weights(LAYERS[name]))
    assert not result.passed and f"call {number}, " in result.fault


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("fault", "passes"), [(forward, True), (lib.ignores_map, False), (lib.empty_is_first, False)])
def test_experts_of_other_ranks(name: str, fault: Any, passes: bool) -> None:
    layer = dataclasses.replace(LAYERS[name], local_experts=8, parallel=Parallel(ep=2))
    loaded = {key: tensor[:8] for key, tensor in weights(LAYERS[name]).items()}
    assert check(Faulty("spread", compute=fault), layer, loaded).passed is passes


@pytest.mark.parametrize("wrong", [100, 101])
def test_hand_overs_are_tried_on_both_sides(wrong: int) -> None:
    layer = LAYERS["16 bit"]
    backend = Faulty("edge", compute=after(lambda out: out[-1].zero_(), lambda tokens: tokens == wrong))
    arguments = (backend, layer, backend.plan(layer, CPU), weights(layer), lib.moe_config(layer), current_adapter())
    assert self_check.compare_with_reference(*arguments).passed
    assert not self_check.compare_with_reference(*arguments, hand_overs=[100]).passed
    tiled = ShardPlan(layer.hidden_size, layer.intermediate_size, tiles=((100, ""),))
    assert not self_check.compare_with_reference(*arguments[:2], tiled, *arguments[3:]).passed


def test_calls_are_no_larger_than_the_engines() -> None:
    assert inputs.call_counts([], 1 << 20) == [1, 7, 9, 16, 33, 65]
    assert inputs.call_counts([40, 4096], 40) == [1, 7, 9, 16, 33, 40]
    assert inputs.call_counts([], 0) == [1]


# --- Right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("activation", [OAI, SILU], ids=str)
def test_a_kernel_that_rounds_wherever_it_may_passes(name: str, dtype: str, rule: str, activation: Any) -> None:
    layer = dataclasses.replace(LAYERS[name], dtype=dtype, activation=activation)
    result = check(Faulty("rounds", compute=lib.every_rounding(rule)), layer, weights(layer))
    assert result.passed, result


@pytest.mark.parametrize("count", [2, 6, 16, 32, 64])
def test_the_bound_is_the_distributions(count: int) -> None:
    """The tail of the chi-squared distribution with an even number of degrees of freedom has a formula."""
    half = count * bounds.largest_mean_square(count) / 2
    tail = math.exp(-half) * sum(half**power / math.factorial(power) for power in range(count // 2))
    assert 1e-15 < tail < 1.5e-12


def test_a_sum_of_terms_with_independent_errors_is_within_the_bound() -> None:
    """What the size stands for: each weight off by a random sign times the rounding error."""
    layer = LAYERS["16 bit"]
    made = {name: tensor[:4] for name, tensor in weights(layer, biases=0.05).items()}
    small = dataclasses.replace(layer, num_experts=4, local_experts=4)
    x, router, ids = inputs.make_inputs(small, made)
    reference = bounds.reference_output(made, small, 0.02, x, router, ids)
    expected = torch.zeros_like(reference.expected)
    with ieee_fp32_matmul():
        for part in expert_outputs(made, small, x, router, ids):
            signs = torch.randn(part.w2.shape, generator=torch.Generator().manual_seed(1)).sign()
            off = part.hidden @ (part.w2 * 0.02 * signs).T
            expected.index_add_(0, part.token, off * part.weight + part.output)
    rows = torch.arange(len(x))
    assert 0.1 < float(bounds.excess(expected, reference, rows)) <= 1
    assert float(bounds.excess(reference.expected, reference, rows)) == 0
    assert "columns 64 to 95 of token 3" in bounds.describe_excess(
        expected.index_put((torch.tensor(3), torch.arange(64, 96)), torch.tensor(9.0)), reference, rows
    )
