"""Faults that show in some calls only, in some columns only, or in slots and experts that few calls have."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from tests.lib import faulty_backends as lib
from tests.lib.faulty_backends import MXFP4, MXFP4_W4A4, OAI, Faulty, after, check, weights
from tests.lib.tiers import each_once, sampled
from vllm_moe_oracle.backends.emulation import expert_outputs, forward, ieee_fp32_matmul
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Parallel, Problem, Scheme
from vllm_moe_oracle.schemes import _wna16_parameters
from vllm_moe_oracle.verification import bounds, inputs, process_state, self_check

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
    *((lib.FAULTS[name], FINE) for name in (
        "one token", "more than 8", "router weights clamped at 1", "scales of w13", "scales of w2",
        "smaller scales of w13", "smaller scales of w2", "many tokens, last columns",
    )),
    *((lib.FAULTS[name], ALL) for name in (
        "one token, zeros", "more than 64", "no multiple of 8", "last 16 columns", "last column", "one expert",
        "idle experts", "empty slots", "input changed", "last weight", "router weights normalized", "steps of 2 to 64",
        "bias of the last columns", "many tokens, one expert", "many tokens, blocks", "blocks of 16", "output left",
        "workspace read", "3 tokens", "10 to 15 tokens", "17 to 31 tokens", "torch's default dtype",
        "torch's random numbers", "torch's threads", "working directory", "handler of SIGTERM",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name"), each_once(FAULTS, lambda fault: fault.name))
def test_a_fault_is_caught(fault: Faulty, name: str) -> None:
    result = check(fault, LAYERS[name], weights(LAYERS[name]))
    print(result)
    assert not result.passed and result.fault and not result.skip_reason


@pytest.mark.parametrize("number", [2, 7, 20])
@pytest.mark.parametrize("name", FINE)
def test_a_later_call_that_is_wrong_is_caught(name: str, number: int) -> None:
    result = check(Faulty("nth", compute=lib.nth(number)), LAYERS[name], weights(LAYERS[name]))
    assert not result.passed and f"call {number}, " in result.fault


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("fault", "passes"), [(forward, True), (lib.ignores_map, False), (lib.empty_is_first, False)])
def test_experts_of_other_ranks(name: str, fault: Any, passes: bool) -> None:
    layer = dataclasses.replace(LAYERS[name], local_experts=8, parallel=Parallel(ep=2))
    loaded = {key: tensor[:8] for key, tensor in weights(LAYERS[name]).items()}
    assert check(Faulty("spread", compute=fault), layer, loaded).passed is passes


def test_every_small_number_of_tokens_is_tried() -> None:
    assert {*inputs.CHECKED_TOKEN_COUNTS, *inputs.REPEATED_COUNTS} >= {*range(1, inputs.NUM_TOKENS + 1)}
    # Hand-overs take no call of these away.
    seen: list[int] = []
    layer = LAYERS["16 bit"]
    backend = Faulty("right", compute=lib.after(lambda out: seen.append(len(out))), beyond=tuple(range(20, 200, 9)))
    assert check(backend, layer, weights(layer)).passed
    assert {*seen} >= {*range(1, inputs.NUM_TOKENS + 1), 20, 21, 191, 192}


SETTINGS = ("default dtype", "autocast", "CPU affinity", "seed of random numbers")
"""One of torch, one of the backend that is checked next, one of the process, and torch's random numbers."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_a_kernel_changes_is_named_and_put_back(name: str) -> None:
    kernel = Faulty("sets", compute=lib.sets(lib.SETTING_CHANGES[name]))
    with process_state.kept() as changed:
        found = check(kernel, LAYERS["16 bit"], weights(LAYERS["16 bit"]))
    assert not found.passed and f"the kernel has changed the process's {name}" in found.fault
    assert not changed


def test_what_the_first_calls_of_a_kernel_set_is_put_back_and_no_fault() -> None:
    """An import may do so, once."""
    calls: list[int] = []

    def sets_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            torch.set_default_dtype(torch.float16)
        torch.rand(1)  # drawing is no fault, either

    assert check(Faulty("sets", compute=lib.sets(sets_once)), LAYERS["16 bit"], weights(LAYERS["16 bit"])).passed
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("wrong", [100, 101])
def test_hand_overs_are_tried_on_both_sides(wrong: int) -> None:
    layer = LAYERS["16 bit"]
    backend = Faulty("edge", compute=after(lambda out: out[-1].zero_(), lambda tokens: tokens == wrong))
    arguments = (backend, layer, backend.plan(layer, CPU), weights(layer), lib.moe_config(layer), current_adapter())
    assert self_check.compare_with_reference(*arguments).passed
    assert not self_check.compare_with_reference(*arguments, hand_overs=[100]).passed
    tiled = ShardPlan(layer.hidden_size, layer.intermediate_size, tiles=((100, ""),))
    assert not self_check.compare_with_reference(*arguments[:2], tiled, *arguments[3:]).passed


@pytest.mark.parametrize("name", ["many tokens, one expert", "many tokens, last columns", "many tokens, blocks"])
def test_a_kernel_that_the_layer_never_runs_is_not_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_adapter()), "trial_tokens", lambda self, moe: 600)
    assert check(lib.FAULTS[name], LAYERS["16 bit"], weights(LAYERS["16 bit"])).passed


def test_the_large_call_is_beyond_every_hand_over() -> None:
    most = 4096
    # On a GPU there is one in any case.
    assert inputs.large_call((), (), [], most) == inputs.large_call((576,), (264,), [], most) == 2048
    assert inputs.large_call((), (), [], 1000) == inputs.large_call((576,), (264,), [], 1000) == 1000
    assert inputs.large_call((3000,), (264,), [], most) == inputs.large_call((), (), [3000, 9000], most) == 3001
    # Not with kernels that only the small layer runs, nor where smaller calls have as many tokens.
    assert inputs.large_call((), (264,), [], 512) == 264
    assert inputs.large_call((), (100,), [], 512) == inputs.large_call((), (), [], 256) == 0
    # On a CPU only where something hands over, and not for long.
    assert inputs.large_call((), (), [], most, 1) == inputs.large_call((100,), (90,), [], most, 1) == 0
    assert inputs.large_call((576,), (264,), [], most, 1) == inputs.large_call((), (), [576], most, 1) == 577
    assert inputs.large_call((576,), (264,), [], most, 1 << 24) == 0


@pytest.mark.parametrize(("tokens", "distinct"), [(33, 16), (65, 16), (600, 16), (600, 128), (2048, 16)])
def test_many_rows_are_all_tokens_in_an_order_without_a_period(tokens: int, distinct: int) -> None:
    rows = inputs.rows_of_call(tokens, distinct, 5)
    assert len(rows) == tokens and rows[-1] == 5 and set(rows.tolist()) == set(range(distinct))
    for shift in range(1, tokens - 8):
        assert (rows[shift:] != rows[:-shift]).float().mean() > 0.5, shift
    assert inputs.rows_of_call(7, 16, 5).tolist() == [15, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("exchange", "wide"), [("deepep_high_throughput", True), ("allgather_reducescatter", False)])
def test_ids_are_of_the_type_that_the_all_to_all_delivers(name: str, exchange: str, wide: bool) -> None:
    layer, seen = LAYERS[name], set()
    looks = lib.then(lambda call: seen.add(call.ids.dtype))
    moe = lib.moe_config(layer)
    own = moe.moe_parallel_config
    moe.moe_parallel_config = dataclasses.replace(own, use_ep=True, dp_size=2, ep_size=2, all2all_backend=exchange)
    for compute, passes in ((looks, True), (lib.narrow_ids, not wide)):
        backend = Faulty("ids", compute=compute)
        arguments = (backend, layer, backend.plan(layer, CPU), weights(layer), moe, current_adapter())
        assert self_check.compare_with_reference(*arguments).passed is passes
    assert seen == {torch.int64 if wide else torch.int32}


def test_memory_holds_nan_in_calls_of_new_sizes_and_without_experts() -> None:
    layer, found = LAYERS["16 bit"], []

    def looks(tensors: Any, layer: Any, out: Any, x: Any, weights: Any, ids: Any, places: Any, workspace: Any) -> None:
        found.append((len(x), bool(out.isnan().all()), bool((workspace == 255).all())))
        forward(tensors, layer, out, x, weights, ids, places)
        workspace.zero_()

    assert check(Faulty("looks", compute=looks, beyond=(600,), scratch=True), layer, weights(layer)).passed
    poisoned = [tokens for tokens, out, workspace in found if out and workspace]
    assert poisoned == [1, 7, 9, 16, 33, 65, 601, 1]
    assert [each[0] for each in found][:7] == poisoned[:7] and found[-1] == (1, True, True)


def test_calls_are_no_larger_than_the_engines() -> None:
    assert inputs.call_counts([], 1 << 20) == [1, 7, 9, 16, 33, 65]
    assert inputs.call_counts([40, 4096], 40) == [1, 7, 9, 16, 33, 40]
    assert inputs.call_counts([], 0) == [1]


# --- Right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "rule", "activation"),
    sampled(itertools.product(ALL, ["bfloat16", "float16"], ["ceil", "floor"], [OAI, SILU]), 5),
)
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


def test_a_column_counts_tokens_that_repeat_as_what_they_are() -> None:
    """A token that fills most rows: the mean of a column is all but its error, and the bound of one token holds."""
    expected = torch.zeros(16, 64)
    reference = bounds.Reference(expected, torch.ones(16, 64), torch.full((16,), 10.0), torch.tensor(1.0))

    def column(rows: list[int]) -> float:
        actual = expected[rows]
        actual[torch.tensor(rows) == 3] = 6.0
        return float(bounds.ratios(actual, reference, torch.tensor(rows))[1].amax())

    one = (36 / bounds.largest_mean_square(1)) ** 0.5
    assert column([3]) == pytest.approx(one) and column([3] * 1000 + [1]) == pytest.approx(one, rel=0.01)
    even = (36 / 16 / bounds.largest_mean_square(16)) ** 0.5
    assert column([*range(16)]) == pytest.approx(even) and column([*range(16)] * 40) == pytest.approx(even)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 60, 128, 384, 512])
def test_experts_are_ordered_by_near_and_far_distances(count: int) -> None:
    order = inputs.spread_order(count, torch.Generator().manual_seed(count))
    assert sorted(order) == list(range(count))
    apart = {(later - first) % count for first, later in itertools.pairwise(order)}
    assert {1 << bit for bit in range(count.bit_length()) if 1 << bit < count} <= apart or count < 60


@pytest.mark.parametrize(("count", "slots"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (5, 4), (9, 8), (12, 5)])
def test_strides_give_a_token_different_experts(count: int, slots: int) -> None:
    found = inputs.distinct_strides(count, slots)
    assert found[0] == 1 and (count <= 2 or found[1] == count - 1)
    assert all(len({slot * stride % count for slot in range(slots)}) == slots for stride in found)


def test_outputs_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    expected, noise = torch.randn(16, 80, generator=generator), torch.rand(16, 80, generator=generator) + 0.1
    reference = bounds.Reference(expected, noise, noise.mean(-1), torch.tensor(1.0))
    rows = inputs.rows_of_call(600, 16, 5)
    actual = expected[rows] + torch.randn(600, 80, generator=generator) * 0.1
    parts = bounds.ratios(actual, reference, rows)
    monkeypatch.setattr(bounds, "_COMPARED_ROWS", 600)
    for found, whole in zip(parts, bounds.ratios(actual, reference, rows), strict=True):
        assert torch.allclose(found, whole, rtol=1e-5)


def test_calls_are_compared_together_as_each_by_itself() -> None:
    """One with NaN, one that is off in a column and one with many rows do not change what is said of the others."""
    generator = torch.Generator().manual_seed(0)
    expected, noise = torch.randn(16, 80, generator=generator), torch.rand(16, 80, generator=generator) + 0.1
    reference = bounds.Reference(expected, noise, noise.mean(-1), torch.tensor(1.0))
    rows = [inputs.rows_of_call(tokens, 16, 5) for tokens in (1, 7, 65, 16, 200, 600, 9)]
    actual = [expected[each] + torch.randn(len(each), 80, generator=generator) * 0.1 for each in rows]
    actual[1][3, 7] = torch.nan
    actual[3][:, -1] += 9
    assert bounds.call_batches(rows) == [slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    found = bounds.excesses(actual, reference, rows)
    alone = torch.cat([bounds.excesses([one], reference, [each]) for one, each in zip(actual, rows, strict=True)])
    assert torch.allclose(found, alone, rtol=1e-5, equal_nan=True)
    assert found.isnan().tolist() == [False, True, *[False] * 5] and (found > 1).tolist().index(True) == 3


def test_the_host_waits_for_no_call() -> None:
    """A number that is read, or a size that depends on values, would wait for the device at each."""
    waits: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            waits.extend({"_local_scalar_dense", "nonzero", "unique", "equal"} & set(str(func).split(".")))
            return func(*args, **(kwargs or {}))

    expected = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    reference = bounds.Reference(expected, torch.ones(16, 64), torch.ones(16), torch.tensor(1.0))
    given = {"tokens": expected, "routing weights": torch.ones(16, 2), "expert ids": torch.zeros(16, 2)}
    calls = self_check.Calls(lambda x, weights, ids, **memory: x, reference, given)
    with Watch():
        for tokens in (1, 7, 65, 600):
            calls.make(inputs.rows_of_call(tokens, 16, 5), poisoned=tokens != 7)
        assert not waits
        assert bool(expected.sum()) and waits  # it is seen
    assert calls.result(0.0).passed


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
    assert 0.1 < float(bounds.excesses([expected], reference, [rows])[0]) <= 1
    assert float(bounds.excesses([reference.expected], reference, [rows])[0]) == 0
    assert "columns 64 to 95 of token 3" in bounds.describe_excess(
        expected.index_put((torch.tensor(3), torch.arange(64, 96)), torch.tensor(9.0)), reference, rows
    )


@pytest.mark.parametrize("fault", ["zero points ignored", "scales in another order", ""])
def test_equal_integer_scales_and_middle_zero_points_hide_nothing(fault: str) -> None:
    """As a model may have: a reload brings others."""
    scheme = Scheme("wna16", 4, 32, "compressed-tensors", zero_points=True)
    layer = problem(num_experts=8, local_experts=8, top_k=2, hidden_size=128, intermediate_size=64, scheme=scheme)
    generator = torch.Generator().manual_seed(0)
    raw: dict[str, Tensor] = {}
    for matrix, (rows, columns, groups) in _wna16_parameters.matrix_sizes(layer).items():
        codes = torch.randint(-(2**31), 2**31 - 1, (8, rows, columns // 8), generator=generator, dtype=torch.int64)
        raw[matrix] = codes.to(torch.int32)
        raw[f"{matrix}_scale"] = torch.full((8, rows, groups), 0.01, dtype=torch.bfloat16)
        middle = int.from_bytes(b"\x88" * 4, "little", signed=True)
        raw[f"{matrix}_zero_point"] = torch.full((8, rows // 8, groups), middle, dtype=torch.int32)

    def convert(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        if fault == "zero points ignored":
            return {name: torch.full_like(t, 8) if name.endswith("zero_point") else t for name, t in expert.items()}
        if fault:
            return {name: t.flip(0) if name == "w13_scale" else t for name, t in expert.items()}
        return expert

    assert check(Faulty("integers", convert=convert), layer, raw).passed == (not fault)
