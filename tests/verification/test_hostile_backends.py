"""Backends with faults that random inputs of one size, and one layer by itself, do not show."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends as lib
from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem
from tests.lib.faulty_backends import MXFP4, OAI, Call, Compute, Faulty, check, reads, then, weights
from tests.lib.tiers import each_once
from vllm_moe_oracle.backends.emulation import expert_outputs, forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem, Routing
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.verification import bounds, converted_layer, inputs, whole_layer

SMALL: dict[str, Any] = {"experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 128}
LAYERS = {
    "16 bit": problem(**SMALL, scheme=MXFP8, activation=SILU),
    "W8A8": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "FP8 by token": problem(**SMALL, scheme=dataclasses.replace(MXFP8_W8A8, activations="fp8_token"), activation=SILU),
    "gpt-oss": problem(**SMALL, scheme=MXFP4, activation=OAI, has_bias=True),
    "float16": problem(**SMALL, scheme=MXFP8, activation=SILU, dtype="float16"),
}
ALL = list(LAYERS)


def on_x(change: Callable[[Tensor], Tensor]) -> Compute:
    """The right kernel on other tokens."""
    return reads(x=lambda call: change(call.x).to(call.x.dtype))


def saturates(most: float) -> Compute:
    """Converts tokens to a type that ends there, with one scale for all of a call that a calibration chose."""
    return on_x(lambda x: x.clamp(-most, most))


def typical_scale(x: Tensor) -> Tensor:
    """E4M3 with a scale from the root mean square instead of the largest value."""
    scale = x.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9) * 6 / 448
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def in_float16(tensors: Any, layer: Problem, out: Tensor, x: Tensor, w: Tensor, ids: Tensor, *more: Any) -> None:
    """Sums that float16 holds."""
    total = torch.zeros_like(out, dtype=torch.float32)
    for part in expert_outputs(tensors, layer, x, w, ids, *more):
        rows = part.hidden.to(torch.float16).float() @ part.w2.T
        total.index_add_(0, part.token, (rows * part.weight).to(torch.float16).float())
    out.copy_(total)


def few_places(call: Call) -> Tensor:
    """Ids of which each takes 56 rows; further ones are dropped."""
    rank = torch.zeros_like(call.ids)
    for expert in call.ids.unique():
        mine = call.ids == expert
        rank[mine] = torch.arange(int(mine.sum()), dtype=rank.dtype)
    return call.ids.masked_fill(rank >= 56, -1)


def neighbors(call: Call) -> Tensor | None:
    """A map that takes a rank's experts for neighbors in ascending order."""
    if call.places is None:
        return None
    first, count = int((call.places >= 0).nonzero()[0]), int((call.places >= 0).sum())
    index = torch.arange(len(call.places), dtype=call.places.dtype) - first
    return index.masked_fill((index < 0) | (index >= count), -1)


def writes_beside(what: str, rows: int) -> Compute:
    """The right output, and zeros in a row of the memory of the output or of what the kernel gets, so many rows from
    their first one; where the memory is another's, nothing is written."""

    def change(call: Call) -> None:
        near: Tensor = getattr(call, what)
        width = near.shape[1]
        place = near.storage_offset() + (rows if rows < 0 else rows + len(near)) * width
        if 0 <= place <= near.untyped_storage().nbytes() // near.element_size() - width:
            torch.as_strided(near, (width,), (1,), place).zero_()

    return then(change)


def one_scale(x: Tensor) -> Tensor:
    """E4M3 with one scale for all tokens of a call, from their largest value."""
    scale = x.float().abs().amax().clamp(min=1e-9) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def spreads(rows: int, large: bool = False) -> Compute:
    """Adds 0 times the tokens in blocks of so many, as a product with a matrix of zeros and ones does; in large calls
    alone, or in small ones."""

    def change(call: Call) -> None:
        if (len(call.x) > 600) is large:
            for some in torch.arange(len(call.x)).split(rows):
                call.out[some] += (call.x[some].sum(0) * 0.0).to(call.out.dtype)

    return then(change)


def stale() -> Compute:
    """Remembers the experts of the first call of each size."""
    kept: dict[int, Tensor] = {}
    return reads(ids=lambda call: kept.setdefault(len(call.x), call.ids.clone()))


def kept() -> Compute:
    """Adds what it left in a workspace of its own, beyond the rows of the last call."""
    held = torch.zeros(65, 256)

    def change(call: Call) -> None:
        if 1 < (tokens := len(call.x)) <= 65:
            call.out[0] += held[tokens - 2].to(call.out.dtype)
            held[:tokens] = call.out.float()

    return then(change)


def wrong_where(choose: Callable[[Call], Tensor]) -> Compute:
    """Rows of the output that `choose` selects are off by a half."""
    return then(lambda call: call.out.mul_(torch.where(choose(call), 1.5, 1.0)[:, None].to(call.out.dtype)))


def rows(call: Call) -> Tensor:
    return torch.arange(len(call.x))


BESIDE = {"output": "out", "tokens": "x", "routing weights": "weights", "expert ids": "ids"}

FAULTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "only a token's first id": (lambda: lib.neighbors_of_the_first, ALL),
    "ids by their address": (lib.kept_by_address, ALL),
    "tokens saturate at 100": (lambda: saturates(100.0), ["16 bit", "W8A8", "FP8 by token"]),
    "tokens saturate at 448": (lambda: saturates(448.0), ["16 bit", "W8A8", "FP8 by token"]),
    "tokens saturate at 8 times their mean": (
        lambda: on_x(lambda x: torch.minimum(x.abs(), 6 * x.abs().mean(-1, keepdim=True)) * x.sign()),
        ALL,
    ),
    "scale of the typical value": (lambda: on_x(typical_scale), ["W8A8", "FP8 by token"]),
    "float16 inside": (lambda: in_float16, ["16 bit", "W8A8", "FP8 by token"]),
    "small features lost": (
        lambda: on_x(lambda x: x.masked_fill(x.abs() < x.abs().amax(-1, keepdim=True) / 16, 0)),
        ALL,
    ),
    "routing weights changed": (lambda: then(lambda call: call.weights[-1, -1].add_(1)), ALL),
    "ids changed": (lambda: then(lambda call: call.ids[-1, -1].add_(1)), ALL),
    "places for 56 rows": (lambda: reads(ids=few_places), ALL),
    "storage from its start": (lambda: on_x(lambda x: torch.as_strided(x, x.shape, x.stride(), 0)), ALL),
    **{
        f"row {where} the {what}": (functools.partial(writes_beside, field, rows), ALL)
        for what, field in BESIDE.items()
        for where, rows in (("before", -1), ("after", 0))
    },
    "last guarded bytes after the ids": (lambda: writes_beside("ids", 60 // SMALL["top_k"]), ALL),
    "NaN of a token spreads": (lambda: spreads(65), ALL),
    "NaN of a token spreads in blocks of 4": (lambda: spreads(4), ALL),
    "one scale for all tokens": (lambda: on_x(one_scale), ["W8A8", "FP8 by token"]),
    "NaN without weights": (
        lambda: then(lambda call: call.out.masked_fill_((call.weights == 0).all(-1)[:, None], math.nan)),
        ALL,
    ),
    "stale experts": (stale, ALL),
    "own workspace": (kept, ALL),
    "last block of columns, last token": (lambda: lib.after(lambda out: out[-1, -32:].mul_(1.5)), ALL),
    "first column": (lambda: lib.after(lambda out: out[:, 0].zero_()), ALL),
    "every 32nd token": (lambda: wrong_where(lambda call: rows(call) % 32 == 31), ALL),
    "tokens 48 to 63": (lambda: wrong_where(lambda call: rows(call) // 16 == 3), ALL),
    "last expert": (lambda: wrong_where(lambda call: (call.ids == call.ids.max()).any(-1)), ALL),
    "expert 0 in the last slot": (lambda: wrong_where(lambda call: call.ids[:, -1] == 0), ALL),
    "weights above 1": (lambda: wrong_where(lambda call: (call.weights > 1).any(-1)), ALL),
    "small weights dropped": (lambda: reads(weights=lambda call: call.weights * (call.weights > 0.15)), ALL),
    "weights in 3 bits": (
        lambda: reads(weights=lambda call: call.weights.to(torch.float8_e5m2).float()),
        ["16 bit", "gpt-oss", "float16"],
    ),
    "experts sorted by id": (lambda: reads(ids=lambda call: call.ids.sort(-1).values), ALL),
    "all tokens alike are one": (
        lambda: wrong_where(lambda call: (call.x == call.x[:1]).all().expand(len(call.x))),
        ALL,
    ),
    "more than 64 in all experts": (lambda: wrong_where(lambda call: rows(call) * call.ids.shape[1] >= 250), ALL),
    "adds to what the output held": (
        lambda: lambda t, p, o, x, *m: (lambda before: (forward(t, p, o, x, *m), o.add_(before)))(o.clone()),
        ALL,
    ),
    "output in 5 bits": (
        lambda: lib.after(lambda out: out.copy_((out.float() * 1.0).to(torch.float8_e4m3fn).to(out.dtype))),
        ["16 bit", "float16"],
    ),
    "tokens in another order from 33 on": (
        lambda: lib.after(lambda out: out.copy_(out.flip(0)), lambda tokens: tokens > 32),
        ALL,
    ),
    "largest values cut off by a quarter": (lambda: on_x(lambda x: x.clamp(max=float(x.abs().max()) * 0.75)), ALL),
}


@pytest.mark.parametrize(("name", "layer"), each_once(((name, layers) for name, (_, layers) in FAULTS.items()), str))
def test_a_fault_is_caught(name: str, layer: str) -> None:
    result = check(Faulty("wrong", compute=FAULTS[name][0]()), LAYERS[layer], weights(LAYERS[layer]))
    print(result)
    assert not result.passed and result.fault
    words = {"routing weights changed": "has changed its routing weights", "ids changed": "has changed its expert ids"}
    beside = {
        f"row {where} the {what}": f"has written before or after its {what}"
        for where in ("before", "after")
        for what in BESIDE
    }
    assert (words | beside).get(name, "") in result.fault


@pytest.mark.parametrize("layer", ALL)
def test_a_token_of_nan_is_among_many(layer: str) -> None:
    loaded = weights(LAYERS[layer])
    for compute, passes in ((forward, True), (spreads(64, large=True), False)):
        result = check(Faulty("many", compute=compute, beyond=(600,)), LAYERS[layer], loaded)
        assert result.passed is passes, result
    assert "601 tokens, one of them of NaN and infinities: columns" in result.fault


def test_the_output_of_a_token_of_nan_may_be_anything() -> None:
    def forgives(call: Call) -> None:
        seen.append(len(call.x)) if call.x.isnan().any() else None
        call.out[call.x.isnan().any(-1)] = 7.0

    seen: list[int] = []
    assert check(Faulty("forgives", compute=then(forgives)), LAYERS["16 bit"], weights(LAYERS["16 bit"])).passed
    assert seen == [inputs.NUM_TOKENS]


@pytest.mark.parametrize("layer", ALL)
def test_experts_that_are_no_neighbors(layer: str) -> None:
    spread = dataclasses.replace(LAYERS[layer], local_experts=8, parallel=Parallel(ep=2))
    loaded = {key: tensor[:8] for key, tensor in weights(LAYERS[layer]).items()}
    for compute, passes in ((forward, True), (reads(places=neighbors), False)):
        assert check(Faulty("spread", compute=compute), spread, loaded).passed is passes


def test_the_places_of_experts_are_a_permutation_without_neighbors() -> None:
    for count in range(1, 9):
        here, away = inputs.place_experts(count)
        assert sorted([*here.tolist(), *away.tolist()]) == list(range(2 * count))
        assert 0 in here and (count == 1 or 2 * count - 1 in here)
        assert sorted(here.tolist(), reverse=True) == here.tolist()


# --- Router weights on the input --------------------------------------------------------------------------------------

ON_INPUT = dataclasses.replace(
    problem(**SMALL | {"top_k": 1}, scheme=MXFP8, activation=SILU),
    routing=Routing("llama4", "sigmoid", renormalize=False, apply_router_weight_on_input=True),
)


class OnInput(Faulty):
    """Does to router weights what `weight` says; vLLM's prepare step has multiplied the tokens."""

    def __init__(self, weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__("on_input")
        self._weight = weight

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        plain = dataclasses.replace(problem, routing=Routing())
        built = builder.from_function(lambda out, x, w, *more: forward(tensors, plain, out, x, w, *more))
        run = built.apply

        def apply(**arguments: Any) -> Any:
            assert arguments["apply_router_weight_on_input"]
            weights = self._weight(arguments["topk_weights"])
            return run(**arguments | {"topk_weights": weights, "apply_router_weight_on_input": False})

        built.apply = apply
        return built


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8, MXFP4], ids=str)
@pytest.mark.parametrize(
    ("weight", "passes"),
    [(torch.ones_like, True), (lambda w: w, False), (lambda w: 1 / w, False)],
    ids=["right", "twice", "taken back"],
)
def test_router_weights_are_on_the_input_once(scheme: Any, weight: Any, passes: bool) -> None:
    layer = dataclasses.replace(ON_INPUT, scheme=scheme)
    result = check(OnInput(weight), layer, weights(layer))
    assert result.passed is passes, result


def test_right_backends_apply_router_weights_on_the_input() -> None:
    loaded = weights(ON_INPUT)
    assert check(Faulty("right"), ON_INPUT, loaded).passed
    # A kernel that weights outputs for itself does not get the flag.
    late = Faulty("late", understand=lambda layer: dataclasses.replace(layer, routing=Routing()))
    assert check(late, ON_INPUT, loaded).passed is True


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
def test_the_other_checks_have_router_weights_on_the_input(
    scheme: Any, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted layer, and `verify`; the fault is a server that weights outputs."""
    layer, adapter = dataclasses.replace(ON_INPUT, scheme=scheme), current_adapter()
    backend = Faulty("right", understand=lambda layer: dataclasses.replace(layer, routing=Routing()))
    loaded = weights(layer)
    if ignored:
        run = type(adapter).run_single_rank
        late = {"weights_on_input": False}
        monkeypatch.setattr(type(adapter), "run_single_rank", lambda *args, **more: run(*args, **more | late))
    parts = converted_layer.WeightParts(layer)
    for index in range(layer.local_experts):
        parts.add({name: tensor[index] for name, tensor in loaded.items()})
    made = whole_layer.KernelTensors(backend, layer, backend.plan(layer, CPU))
    for index in range(layer.local_experts):
        assert not made.put({name: tensor[index] for name, tensor in loaded.items()}, index)
    experts = made.build(adapter, "cpu", 64)
    checked = converted_layer.InstalledLayer(backend, parts, experts, made.layer, made.tensors, adapter)
    assert checked.compare().passed is checked.compare_again().passed is not ignored
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, layer.hidden_size, generator=generator).to(torch.bfloat16)
    ids = torch.arange(24)[:, None] % layer.num_experts
    tokens = x, torch.rand(24, 1, generator=generator) + 0.2, ids
    read = lambda index: {name: tensor[index] for name, tensor in loaded.items()}  # noqa: E731
    found = whole_layer.LayerCheck(layer, read, tokens, adapter, "cpu").run(backend, backend.plan(layer, CPU))
    assert bool(found.fault) is ignored


# --- Inference mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "passes"),
    [
        (torch.is_inference_mode_enabled, False),
        (torch.is_grad_enabled, True),
        (lambda: not torch.is_inference_mode_enabled(), True),
    ],
)
def test_calls_are_made_in_inference_mode_as_a_servers(wrong: Callable[[], bool], passes: bool) -> None:
    layer = lib.LAYERS["silu, 16 bit"]
    backend = Faulty("mode", compute=lib.after(lambda out: out.mul_(1.5), lambda tokens: wrong()))
    assert check(backend, layer, weights(layer)).passed is passes
    found = lib.converted(backend, layer, weights(layer))
    assert found.compare().passed is found.compare_again().passed is passes
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, layer.hidden_size, generator=generator).to(torch.bfloat16)
    tokens = x, torch.rand(24, 2, generator=generator) + 0.2, torch.arange(48).view(24, 2) % layer.num_experts
    read = lambda index: {name: tensor[index] for name, tensor in weights(layer).items()}  # noqa: E731
    outcome = whole_layer.LayerCheck(layer, read, tokens, current_adapter(), "cpu").run(
        backend, backend.plan(layer, CPU)
    )
    assert bool(outcome.fault) is not passes


# --- No tokens --------------------------------------------------------------------------------------------------------


def test_vllm_never_calls_experts_without_tokens() -> None:
    """A data-parallel rank may have none. vLLM answers itself then; where it does not, the check needs such a call."""
    layer = LAYERS["16 bit"]
    called = []

    class Built(Faulty):
        def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
            called.append(builder.from_function(lambda out, x, *more: called.append(len(x))))
            return called[-1]

    check(Built("none"), layer, weights(layer))
    experts, module = called[0], torch.nn.Module()
    loaded = {name: tensor[:5] for name, tensor in weights(layer).items()}
    del called[1:]
    nothing = torch.empty(0, layer.hidden_size, dtype=torch.bfloat16)
    ids = torch.empty(0, layer.top_k, dtype=torch.int32)
    out = current_adapter().run_single_rank(experts, module, loaded, nothing, ids.float(), ids)
    assert out.shape == nothing.shape and len(called) == 1


# --- Right kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_outliers_refuse_no_kernel_that_rounds_wherever_it_may(layer: str, rule: str) -> None:
    result = check(Faulty("rounds", compute=lib.every_rounding(rule)), LAYERS[layer], weights(LAYERS[layer]))
    assert result.passed, result


def test_outliers_are_what_every_format_holds() -> None:
    layer = LAYERS["W8A8"]
    experts = {name: tensor[:5] for name, tensor in weights(layer).items()}
    x, router, ids = inputs.make_inputs(dataclasses.replace(layer, num_experts=5, local_experts=5), experts)
    assert len(x) == len(router) == len(ids) == 3 * inputs.NUM_TOKENS
    for group in x.float().split(inputs.NUM_TOKENS)[1:]:
        token = group[1]
        top = token.abs().sort(descending=True).values
        assert (top[:4] == top[0]).all() and top[0].log2() == top[0].log2().round()
        assert 40 < top[0] / top[4:].square().mean().sqrt() < 100
    huge = x[2 * inputs.NUM_TOKENS :].float()
    first = huge @ mxfp8_weights(experts).T
    assert first.abs().amax() > 2 * torch.finfo(torch.float16).max


def mxfp8_weights(experts: Any) -> Tensor:
    from vllm_moe_oracle.schemes import mxfp8

    return mxfp8.dequantize_expert({name: tensor[0] for name, tensor in experts.items()}, "w13")


def test_no_huge_tokens_where_float16_or_a_limit_forbids_them() -> None:
    for name in ("gpt-oss", "float16"):
        layer = dataclasses.replace(LAYERS[name], num_experts=5, local_experts=5)
        experts = {key: tensor[:5] for key, tensor in weights(LAYERS[name]).items()}
        assert len(inputs.make_inputs(layer, experts)[0]) == 2 * inputs.NUM_TOKENS


@pytest.mark.parametrize("size", [0.05, 0.2, 4.0])
@pytest.mark.parametrize("limit", [7.0, 100.0, 300.0, 1000.0])
@pytest.mark.parametrize("name", ["swigluoai", "swiglustep"])
def test_tokens_are_made_smaller_until_float16_holds_outputs(
    name: str, limit: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Activation(name, limit=limit) if name == "swiglustep" else dataclasses.replace(OAI, limit=limit)
    layer = dataclasses.replace(LAYERS["float16"], activation=gate)
    loaded, tried = weights(layer, size), []
    whole = bounds.reference_output

    def counts(*arguments: Any) -> bounds.Reference:
        tried.append(arguments[3])
        return whole(*arguments)

    monkeypatch.setattr(bounds, "reference_output", counts)
    result = check(Faulty("rounds", compute=lib.every_rounding("ceil")), layer, loaded)
    assert result.passed, result
    # One reference where nothing is beyond the dtype.
    assert len(tried) == 1 if limit == 7 and size < 1 else len(tried) <= 4
    assert tried[-1].isfinite().all() and tried[-1][1].any()
    assert not check(Faulty("half", compute=lib.after(lambda out: out.mul_(0.5))), layer, loaded).passed


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_weights_have_no_size_that_helps(bad: float) -> None:
    layer = LAYERS["float16"]
    loaded = weights(layer)
    loaded["w2_scale"] = torch.full_like(loaded["w2_scale"], 0xFF if math.isnan(bad) else 0xFE)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        check(Faulty("right"), layer, loaded)


@pytest.mark.parametrize("powers", [20, 30, 40])
def test_outputs_whose_squares_leave_float32_are_not_compared(powers: int) -> None:
    """Tokens with large first products have them where weights are large, too."""
    loaded = weights(lib.LAYERS["silu"])
    loaded["w2_scale"] = (loaded["w2_scale"].view(torch.uint8) + powers).view(loaded["w2_scale"].dtype)
    assert check(Faulty("right"), lib.LAYERS["silu"], loaded).passed
    assert not check(Faulty("half", compute=lib.after(lambda out: out.mul_(0.5))), lib.LAYERS["silu"], loaded).passed
