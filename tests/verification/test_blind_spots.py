"""Faults that show in some calls only, in some columns only, or in slots and experts that few calls have."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from tests.lib import faulty_backends as lib
from tests.lib.faulty_backends import MXFP4, MXFP4_W4A4, OAI, Faulty, after, check, weights
from vllm_moe_oracle.backends.emulation import expert_outputs, forward, ieee_fp32_matmul, round_inputs
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.kernels.activations import activate
from vllm_moe_oracle.schemes import mxfp4, mxfp8
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
    (Faulty("one token", compute=after(lambda out: out.mul_(1.2), lambda tokens: tokens == 1)), FINE),
    (Faulty("one token, zeros", compute=after(Tensor.zero_, lambda tokens: tokens == 1)), ALL),
    (Faulty("more than 8", compute=after(lambda out: out[-1].mul_(0.5), lambda tokens: tokens > 8)), FINE),
    (Faulty("more than 64", compute=after(lambda out: out[64].zero_(), lambda tokens: tokens > 64)), ALL),
    (Faulty("no multiple of 8", compute=after(lambda out: out[-1].zero_(), lambda tokens: tokens % 8)), ALL),
    (Faulty("last 16 columns", compute=after(lambda out: out[:, -16:].zero_())), ALL),
    (Faulty("last column", compute=after(lambda out: out[:, -1].zero_())), ALL),
    (Faulty("one expert", compute=lib.wrong_experts(lambda index: index == 2)), ALL),
    (Faulty("idle experts", compute=lib.nan_where_idle), ALL),
    (Faulty("empty slots", compute=lib.empty_is_first), ALL),
    (Faulty("input changed", compute=lib.writes_into_x), ALL),
    (Faulty("last weight", compute=lib.last_weight), ALL),
    (Faulty("scales of w13", lib.some_scales("w13_scale", 1)), FINE),
    (Faulty("scales of w2", lib.some_scales("w2_scale", 1)), FINE),
    (Faulty("smaller scales of w13", lib.some_scales("w13_scale", -1)), FINE),
    (Faulty("smaller scales of w2", lib.some_scales("w2_scale", -1)), FINE),
    (Faulty("bias of the last columns", lib.short_bias), ALL),
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


def every_rounding(rule: str) -> lib.Compute:
    """A right kernel with each rounding that the tolerance names, after each product and each sum; `rule` is the one
    for the scales of MX activations."""

    def compute(tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, *more: Any) -> None:
        scheme = {"mxfp8": mxfp8, "mxfp4": mxfp4}[layer.scheme.name]
        formats = {"mxfp8": mxfp8, "mxfp4": mxfp4}

        def rounded(values: Tensor) -> Tensor:
            if layer.scheme.activations not in formats:
                return round_inputs(values, x.dtype, layer)
            form = formats[layer.scheme.activations]
            return form.dequantize(*form.quantize(values, rule))  # type: ignore[attr-defined, no-any-return]

        total = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            part = torch.zeros_like(x)
            for index in range(layer.local_experts):
                mine = ids[:, slot] == index
                expert = {name: tensor[index] for name, tensor in tensors.items()}
                w13, w2 = (scheme.dequantize_expert(expert, which).to(x.dtype).float() for which in ("w13", "w2"))
                hidden = rounded(x[mine].float()) @ w13.T + (expert["w13_bias"].float() if layer.has_bias else 0.0)
                hidden = activate(hidden.to(x.dtype).float(), layer.activation).to(x.dtype).float()
                output = rounded(hidden) @ w2.T + (expert["w2_bias"].float() if layer.has_bias else 0.0)
                part[mine] = (output * weights[mine, slot, None]).to(x.dtype)
            total += part
        out.copy_(total)

    return compute


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("activation", [OAI, SILU], ids=str)
def test_a_kernel_that_rounds_wherever_it_may_passes(name: str, dtype: str, rule: str, activation: Any) -> None:
    layer = dataclasses.replace(LAYERS[name], dtype=dtype, activation=activation)
    result = check(Faulty("rounds", compute=every_rounding(rule)), layer, weights(layer))
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
