"""Faults that nobody listed when the check's tokens were chosen: each is in routing weights, rows or calls that look
like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends as lib
from tests.lib.cases import MXFP8, MXFP8_W8A8, SILU, problem
from tests.lib.faulty_backends import MXFP4, OAI, Call, Compute, Faulty, check, reads, then, weights
from tests.lib.tiers import each_once
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Parallel
from vllm_moe_oracle.verification import inputs

SMALL: dict[str, Any] = {"experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 128}
LAYERS = {
    "16 bit": problem(**SMALL, scheme=MXFP8, activation=SILU),
    "W8A8": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "gpt-oss": problem(**SMALL, scheme=MXFP4, activation=OAI, has_bias=True),
    "top-2": problem(**SMALL | {"top_k": 2}, scheme=MXFP8, activation=SILU),
    "top-1": problem(**SMALL | {"top_k": 1}, scheme=MXFP8, activation=SILU),
}
ALL = list(LAYERS)
SEVERAL = [name for name in ALL if name != "top-1"]


def where(choose: Callable[[Call], Tensor]) -> Compute:
    """Rows of the output that `choose` selects are off by a half."""
    return then(lambda call: call.out.mul_(torch.where(choose(call), 1.5, 1.0)[:, None].to(call.out.dtype)))


def each_weight_once(call: Call) -> Tensor:
    """Weights of which a later slot's is lost that equals an earlier one's."""
    same = call.weights[:, :, None] == call.weights[:, None, :]
    return call.weights.masked_fill(same.tril(-1).any(-1), 0.0)


def all_equal(call: Call) -> Tensor:
    first = call.weights[:, :1]
    return (call.weights == first).all(-1) & (first[:, 0] > 0)


def up_to_a_zero(call: Call) -> Tensor:
    return call.weights.masked_fill((call.weights == 0).cumsum(-1) > 0, 0.0)


def with_a_zero(call: Call) -> Tensor:
    """A token with a weight of 0 is taken for padding."""
    return call.weights.masked_fill((call.weights == 0).any(-1, keepdim=True), 0.0)


def without_some_rows(drop: Callable[[int], bool]) -> Compute:
    """The last row is lost of an expert that has such a number of rows, in a call of several tokens."""

    def ids(call: Call) -> Tensor:
        found = call.ids.clone()
        for expert in found[found >= 0].unique() if len(found) > 1 else ():
            places = (found == expert).nonzero()
            if drop(len(places)):
                found[tuple(places[-1])] = -1
        return found

    return reads(ids=ids)


def after_other_calls(wrong: Callable[[int, int], slice]) -> Compute:
    """Rows are wrong that depend on the numbers of tokens of this call and of the one before."""
    last = [1 << 20]

    def change(call: Call) -> None:
        call.out[wrong(len(call.x), last[0])] *= 1.5
        last[0] = len(call.x)

    return then(change)


def like_the_row_before(of: str, like: str) -> Compute:
    """A token takes the ids or weights of the one before, if it is like it."""

    def change(call: Call) -> Tensor:
        key, value = getattr(call, like), getattr(call, of)
        same = torch.zeros(len(key), dtype=torch.bool)
        same[1:] = (key[1:] == key[:-1]).all(-1)
        return torch.where(same[:, None], value.roll(1, 0), value)

    return reads(**{of: change})


def computed_once(call: Call) -> None:
    """Equal tokens get the output of the first of them."""
    call.out.copy_(call.out[(call.x[:, None] == call.x[None]).all(-1).float().argmax(-1)])


def sum_at_most(most: float) -> Compute:
    return reads(weights=lambda call: call.weights * (most / call.weights.sum(-1, keepdim=True)).clamp(max=1.0))


def shares_all_experts(call: Call) -> Tensor:
    """A token with the same experts as an earlier one, in any order."""
    ordered = call.ids.sort(-1).values
    return (ordered[:, None] == ordered[None]).all(-1).tril(-1).any(-1) & (call.ids >= 0).all(-1)


FAULTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "of two equal weights one is lost": (lambda: reads(weights=each_weight_once), SEVERAL),
    "all weights equal": (lambda: where(all_equal), SEVERAL),
    "slots after a weight of 0": (lambda: reads(weights=up_to_a_zero), ["16 bit", "W8A8", "gpt-oss"]),
    "a weight of 0 is padding": (lambda: reads(weights=with_a_zero), SEVERAL),
    "sums of weights above 4": (lambda: sum_at_most(4.0), ALL),
    "single weights above 3": (lambda: reads(weights=lambda call: call.weights.clamp(max=3.0)), ALL),
    "weights below 0.01": (lambda: reads(weights=lambda call: call.weights * (call.weights > 0.01)), SEVERAL),
    "weights in steps of 1/64": (lambda: reads(weights=lambda call: (call.weights * 64).round() / 64), SEVERAL),
    "rows in whole blocks of 16": (lambda: without_some_rows(lambda rows: rows % 16 == 0), ALL),
    "rows in whole blocks of 64": (lambda: without_some_rows(lambda rows: rows % 64 == 0), ALL),
    "rows in whole blocks of 128": (lambda: without_some_rows(lambda rows: rows % 128 == 0), ALL),
    "an expert with one row": (lambda: without_some_rows(lambda rows: rows == 1), ALL),
    "rows beyond an eighth of the last call's": (
        lambda: after_other_calls(lambda now, last: slice(last if 8 * last < now else now, now)), ALL
    ),
    "the last row after a larger call": (
        lambda: after_other_calls(lambda now, last: slice(now - (last > 4 * now), now)), ALL
    ),
    "ids of an equal token": (lambda: like_the_row_before("ids", "x"), SEVERAL),
    "weights of a token with equal ids": (lambda: like_the_row_before("weights", "ids"), ALL),
    "equal tokens are computed once": (lambda: then(computed_once), SEVERAL),
    "tokens that share all experts": (lambda: where(shares_all_experts), SEVERAL),
    "negative zero": (
        lambda: reads(x=lambda call: torch.where((call.x == 0) & call.x.signbit(), 1.0, call.x).to(call.x.dtype)), ALL
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layer"), each_once(((name, layers) for name, (_, layers) in FAULTS.items()), str))
def test_a_fault_is_caught(name: str, layer: str) -> None:
    result = check(Faulty("wrong", compute=FAULTS[name][0]()), LAYERS[layer], weights(LAYERS[layer]))
    print(result)
    assert not result.passed and result.fault


@pytest.mark.parametrize("layer", ALL)
def test_tokens_have_what_these_faults_need(layer: str) -> None:
    small = dataclasses.replace(LAYERS[layer], num_experts=5, local_experts=5)
    experts = {name: tensor[:5] for name, tensor in weights(LAYERS[layer]).items()}
    x, router, ids = inputs.make_inputs(small, experts)
    first, second = inputs._TWINS
    for start in range(0, len(x), inputs.NUM_TOKENS):
        assert torch.equal(x[start + first], x[start + second]) and not torch.equal(ids[first], ids[second])
    even = router[inputs._EVEN_TOKEN]
    assert bool((even == even[0]).all()) and bool((router.sum(-1) > 0).all())
    assert int((router[inputs._ZERO_WEIGHT_TOKEN] == 0).sum()) == (small.top_k > 1)


@pytest.mark.parametrize("most", [*range(1, 20), 64, 100, 200])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_right_kernel_passes_in_an_engine_of_any_size(most: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no call is larger than the engine's."""
    layer, seen = LAYERS["16 bit"], []
    loaded = {name: tensor[: 16 // ranks] for name, tensor in weights(layer).items()}
    layer = dataclasses.replace(layer, local_experts=16 // ranks, parallel=Parallel(ep=ranks))
    monkeypatch.setattr(type(current_adapter()), "trial_tokens", lambda self, moe: most)
    looks = then(lambda call: seen.append(len(call.x)))
    found = check(Faulty("right", compute=looks), layer, loaded)
    assert found.passed and max(seen) <= most, found
    assert max(seen) == min(most, inputs.WHOLE_BLOCKS)


def test_the_call_of_one_token_is_of_whole_blocks() -> None:
    seen: list[int] = []
    for edge in (100, 128, 200):
        right = Faulty("right", compute=lib.after(lambda out: seen.append(len(out))), beyond=(edge,))
        assert check(right, LAYERS["16 bit"], weights(LAYERS["16 bit"])).passed
    assert {128, 256} <= {*seen}
