"""Slots without an expert on this rank: most slots of expert parallelism, of which a kernel may forget to take care."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.cases import MXFP8, SILU, problem

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from tests.lib import faulty_backends as lib
from tests.lib.faulty_backends import MXFP4_W4A4, OAI, Call, Compute, Faulty, check, reads, then, weights
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.verification import converted_layer, inputs

SIZES: dict[str, Any] = {"experts": 16, "hidden_size": 256, "intermediate_size": 128}
TOP_K = [1, 2, 3, 4, 6, 8]


def layer_of(top_k: int, ranks: int = 1) -> Problem:
    layer = problem(**SIZES, top_k=top_k, scheme=MXFP8, activation=SILU)
    return dataclasses.replace(layer, local_experts=16 // ranks, parallel=Parallel(ep=ranks))


def loaded(layer: Problem) -> dict[str, Tensor]:
    whole = dataclasses.replace(layer, local_experts=layer.num_experts, parallel=Parallel())
    return {name: tensor[: layer.local_experts] for name, tensor in weights(whole).items()}


def converted(backend: Faulty, layer: Problem, every: bool = True) -> converted_layer.InstalledLayer:
    return lib.converted(backend, layer, loaded(layer), every)


def here(call: Call) -> Tensor:
    """Which slots have an expert of this rank."""
    ids, places = call.ids, call.places
    return ids >= 0 if places is None else (ids >= 0) & (places[ids.long().clamp(min=0)] >= 0)


def scaled(rows: Callable[[Call], Tensor]) -> Compute:
    """The right output, of which some tokens are off by a half."""
    return then(lambda call: call.out.mul_(torch.where(rows(call), 1.5, 1.0).unsqueeze(-1)))


def skips(slot: int, remote: bool) -> Compute:
    """Takes a token for an empty one by one of its slots."""

    def ids(call: Call) -> Tensor:
        absent = ~here(call) if remote else call.ids < 0
        return call.ids.masked_fill(absent[:, slot, None], -1)

    return reads(ids=ids)


def unwritten(tensors: Any, layer: Problem, out: Tensor, *given: Any) -> None:
    """Returns early where no token has an expert here."""
    if here(Call(layer, out, *given)).any():
        forward(tensors, layer, out, *given)


def up_to_a_gap(call: Call) -> Tensor:
    """A token's ids up to the first one without an expert here."""
    return call.ids.masked_fill((~here(call)).cumsum(-1) > 0, -1)


def as_many_as_are_here(call: Call) -> Tensor:
    """As many of a token's first ids as it has experts here."""
    return call.ids.masked_fill(torch.arange(call.ids.shape[1]) >= here(call).sum(-1, keepdim=True), -1)


stops, counts = reads(ids=up_to_a_gap), reads(ids=as_many_as_are_here)
adds = then(lambda call: call.out.add_(((call.ids >= 0) & ~here(call)).all(-1, keepdim=True) * 3.0))
"""Adds something to a token all of whose experts other ranks have."""


def two_empty(call: Call) -> Tensor:
    return ((call.ids < 0).sum(-1) > 1) & here(call).any(-1)


def two_remote(call: Call) -> Tensor:
    return (((call.ids >= 0) & ~here(call)).sum(-1) > 1) & here(call).any(-1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("top_k", TOP_K)
def test_the_output_is_written_where_no_token_has_an_expert(top_k: int, ranks: int) -> None:
    layer = layer_of(top_k, ranks)
    assert not check(Faulty("unwritten", compute=unwritten), layer, loaded(layer)).passed


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("top_k", TOP_K[1:])
def test_every_slot_is_empty_or_another_ranks_beside_experts(top_k: int, remote: bool) -> None:
    layer = layer_of(top_k, 1 + remote)
    for slot in range(top_k):
        wrong = Faulty("skips", compute=skips(slot, remote))
        assert not check(wrong, layer, loaded(layer)).passed, slot
        assert not remote or not converted(wrong, layer).compare().passed, slot


@pytest.mark.parametrize(
    ("compute", "ranks", "least"),
    [
        (scaled(two_empty), 1, 3), (scaled(two_empty), 2, 3), (scaled(two_remote), 2, 3), (adds, 2, 1),
        (stops, 1, 2), (stops, 2, 2), (counts, 1, 2), (counts, 2, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("top_k", TOP_K)
def test_absent_experts_change_nothing_else(compute: Compute, ranks: int, least: int, top_k: int) -> None:
    layer = layer_of(top_k, ranks)
    assert check(Faulty("wrong", compute=compute), layer, loaded(layer)).passed is (top_k < least)


@pytest.mark.parametrize("compute", [unwritten, adds, scaled(two_remote), stops, counts])
@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_a_converted_layer_has_experts_of_other_ranks(compute: Compute, top_k: int) -> None:
    found = converted(Faulty("wrong", compute=compute), layer_of(top_k, 2)).compare()
    assert not found.skip_reason and found.passed is (top_k == 2 and compute not in (unwritten, adds, stops, counts))


@pytest.mark.parametrize("away", [1, 2, 5, 40])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 33])
def test_slots_of_other_ranks_leave_every_expert_a_token(tokens: int, top_k: int, away: int) -> None:
    other = converted_layer._other_ranks(tokens, top_k, max(away, top_k - tokens), torch.device("cpu"))
    assert other.shape == (tokens, top_k) and other.sum(-1).max() <= max(away, top_k - tokens)
    token, slot = (~other).nonzero().unbind(-1)
    assert {*((token + slot) % tokens).tolist()} == {*range(tokens)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("top_k", [1, 2, 3, 7, 8])
def test_one_call_more_and_no_token_names_an_expert_twice(top_k: int, ranks: int) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    looks = then(lambda call: seen.append((call.ids.clone(), here(call))))
    layer = layer_of(top_k, ranks)
    assert check(Faulty("right", compute=looks), layer, loaded(layer)).passed
    assert len(seen) == 28 and [len(ids) for ids, found in seen if not found.any()] == [1]
    # The first call, the only one on fresh memory with one token and experts, lacks none.
    assert seen[0][1].all()
    if ranks > 1:
        assert converted(Faulty("right", compute=looks), layer).compare().passed
    for ids, _ in seen:
        in_order = ids.sort(-1).values
        assert not ((in_order.diff(dim=-1) == 0) & (in_order[:, 1:] >= 0)).any()


def test_last_tokens_have_an_expert_on_this_rank() -> None:
    hidden = {0, inputs.EXPERTLESS_TOKEN, inputs.ELSEWHERE_TOKEN, inputs.NUM_TOKENS - 1}
    assert {*inputs.LAST_TOKENS} == {*range(inputs.NUM_TOKENS)} - hidden
    assert inputs.LAST_TOKENS[0] not in {*inputs._EMPTY_SLOTS, *inputs._REMOTE_SLOTS}
    assert not hidden & {*inputs._EMPTY_SLOTS, *inputs._REMOTE_SLOTS}


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_rank_with_few_experts_is_checked_with_the_layers_top_k(ranks: int) -> None:
    """A kernel may have a variant for each number of slots, and where data is parallel no other check runs it."""
    wrong = then(lambda call: call.out.mul_(1.5 if call.ids.shape[1] == 8 else 1.0))
    for parallel in (Parallel(ep=ranks), Parallel(ep=ranks, dp=ranks)):
        layer = dataclasses.replace(layer_of(8, ranks), parallel=parallel)
        assert check(Faulty("right"), layer, loaded(layer)).passed
        assert not check(Faulty("wrong", compute=wrong), layer, loaded(layer)).passed


@pytest.mark.parametrize(
    ("local", "top_k", "count", "experts"),
    [
        (128, 8, 0, [0, 16, 32, 48, 64, 79, 95, 111, 127]), (16, 1, 0, [0, 5, 10, 15]), (3, 2, 0, [0, 1, 2]),
        (8, 8, 0, [*range(8)]), (1, 1, 0, [0]), (2, 8, 0, [0, 1, 0, 1, 0, 1, 0, 1, 0]), (1, 2, 0, [0, 0, 0]),
        (3, 2, 5, [0, 1, 2, 0, 1]), (128, 8, 3, [0, 64, 127]), (1, 8, 2, [0, 0]),
    ],
)  # fmt: skip
def test_which_experts_are_checked(local: int, top_k: int, count: int, experts: list[int]) -> None:
    layer = problem(**SIZES | {"experts": 128}, top_k=top_k, scheme=MXFP8, activation=SILU)
    assert inputs.sample_experts(dataclasses.replace(layer, local_experts=local), count) == experts


@pytest.mark.parametrize("value", [-2, 8])
def test_a_kernel_that_changes_the_expert_map_is_named(value: int) -> None:
    """It computes with what the map was, and the other layers' kernels with what it is."""

    def marks(tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, places: Any) -> None:
        forward(tensors, layer, out, x, weights, ids, places.clamp(min=-1).masked_fill(places == 8, -1))
        places.masked_fill_((places < 0) | (places == 8), value)

    layer = layer_of(4, 2)
    found = check(Faulty("marks", compute=marks), layer, loaded(layer))
    assert not found.passed and "the kernel has changed its expert map" in found.fault
    found = converted(Faulty("marks", compute=marks), layer).compare()
    assert not found.passed and "the kernel has changed its expert map" in found.fault


# --- Right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("top_k", TOP_K)
def test_a_kernel_that_rounds_wherever_it_may_passes(top_k: int, ranks: int) -> None:
    for change in ({}, {"dtype": "float16"}, {"scheme": MXFP4_W4A4, "activation": OAI, "has_bias": True}):
        layer = dataclasses.replace(layer_of(top_k, ranks), **change)
        found = check(Faulty("rounds", compute=rounds), layer, loaded(layer))
        assert found.passed, (change, found)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_a_right_converted_layer_passes(top_k: int, every: bool) -> None:
    found = converted(Faulty("rounds", compute=rounds), layer_of(top_k, 2), every)
    assert found.compare().passed and found.compare_again().passed and not found.skip_reason


def rounds(tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, *more: Any) -> None:
    """Every rounding that is allowed, of the experts that are here."""
    local = ids if more[0] is None else torch.where(ids < 0, -1, more[0][ids.long().clamp(min=0)])
    lib.every_rounding("ceil")(tensors, layer, out, x, weights, local, *more)
