"""The check of a whole layer: right kernels pass, and each fault is found and its expert named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends as lib
from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem
from tests.lib.faulty_backends import MXFP4, OAI, Faulty, after
from tests.lib.tiers import each_once
from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.verification import process_state, whole_layer
from vllm_moe_oracle.verification.layer_result import LayerResult

SMALL: dict[str, Any] = {"experts": 12, "top_k": 3, "hidden_size": 128, "intermediate_size": 64, "has_bias": True}
LAYERS = {
    "16 bit": problem(**SMALL, scheme=MXFP8, activation=OAI),
    "W8A8": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "4 bit": problem(**SMALL, scheme=MXFP4, activation=OAI),
}


def loaded(layer: Problem) -> dict[str, Tensor]:
    return lib.weights(layer, size=0.1, biases=0.3)


def layer_check(layer: Problem, weights: dict[str, Tensor], at_load: bool = False) -> whole_layer.LayerCheck:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, layer.hidden_size, generator=generator)
    x[:, ::37] *= 20  # channels that stand out, as in real models
    ids = torch.rand(24, layer.num_experts, generator=generator).argsort(-1)[:, : layer.top_k]
    router = torch.rand(24, layer.top_k, generator=generator) + 0.2
    tokens = x.to(getattr(torch, layer.dtype)), router / router.sum(-1, keepdim=True), ids

    def read_raw(index: int) -> dict[str, Tensor]:
        return {name: each[index : index + 1] for name, each in weights.items()}

    def read(index: int) -> dict[str, Tensor]:
        return {name: each[index] for name, each in weights.items()}

    return whole_layer.LayerCheck(layer, read, tokens, current_adapter(), "cpu", read_raw if at_load else None)


def run(backend: Any, layer: Problem, **more: Any) -> LayerResult:
    return layer_check(layer, loaded(layer), **more).run(backend, backend.plan(layer, CPU))


@pytest.mark.parametrize("name", LAYERS)
def test_a_right_kernel_passes(name: str) -> None:
    right, layer = Faulty("right"), LAYERS[name]
    check = layer_check(layer, loaded(layer), at_load=True)
    found = check.run(right, right.plan(layer, CPU))
    assert not found.fault and not found.faulty_experts and found.outliers == 0
    assert None not in (found.error, found.worst, found.allowed)
    assert 0 < found.error < found.worst < found.allowed  # type: ignore[operator]
    assert found.experts_checked == 12 and found.calls >= whole_layer.CALLS + 1 + len(whole_layer._RELOADED_CALLS)
    assert check.outputs.shape == (24, 128) and found.peak is not None and found.peak > 5


def test_the_reference_itself_makes_few_calls() -> None:
    assert run(Emulation(), LAYERS["16 bit"]).calls == 2


class Twentieth:
    """The right output, but in every twentieth call of the process."""

    calls = 0

    def __call__(self, tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
        forward(tensors, layer, out, *more)
        Twentieth.calls += 1
        if Twentieth.calls % 20 == 0:
            out.mul_(1.1)


class OnceOnly(Faulty):
    """Converts wrongly from the thirteenth expert on: the first load is right, no other is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.conversions = 0

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        self.conversions += 1
        return lib.swap_halves(dict(expert), problem) if self.conversions > 12 else dict(expert)


class OneExpert(Faulty):
    """A change in the conversion of one expert, told by its place in the order of conversions."""

    def __init__(self, name: str, change: Any, which: int) -> None:
        super().__init__(name)
        self.change, self.which, self.conversions = change, which, 0

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        found = dict(expert)
        if self.conversions % 12 == self.which:
            found = self.change(found, problem)
        self.conversions += 1
        return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "change",
    [
        lib.swap_halves,
        lib.shift("w13_scale", 1),
        lib.shift("w2_scale", -1),
        lambda expert, layer: expert | {"w13_bias": torch.zeros_like(expert["w13_bias"])},
        lambda expert, layer: expert | {"w2_bias": torch.zeros_like(expert["w2_bias"])},
    ],
    ids=["swapped halves", "scales one up", "scales one down", "no bias of w13", "no bias of w2"],
)
def test_a_fault_in_one_expert_is_found_and_the_expert_is_named(name: str, change: Any) -> None:
    found = run(OneExpert("one", change, 7), LAYERS[name])
    assert found.faulty_experts == (7,) and "expert 7 is wrong by itself" in found.fault, found.fault


def test_one_wrong_expert_of_64_is_named() -> None:
    layer = problem(**{**SMALL, "experts": 64, "top_k": 4}, scheme=MXFP8, activation=OAI)
    found = run(Faulty("one", compute=lib.wrong_experts(lambda index: index == 41)), layer)
    # Its place is wrong: before the reload it holds this expert, after it the one before.
    assert found.faulty_experts == (40, 41) and "experts 40, 41 are wrong by themselves" in found.fault


EVERYWHERE: list[tuple[Faulty, list[str]]] = [
    (Faulty("swapped", lib.swap_halves), list(LAYERS)),
    (Faulty("swizzled", lib.swizzle("w2_scale")), list(LAYERS)),
    (Faulty("from 8 tokens on", compute=after(lambda out: out[7:].mul_(1.3), lambda tokens: tokens >= 8)), ["16 bit"]),
    (
        Faulty("many tokens", compute=lib.many_tokens(lib.wrong_experts(lambda index: index == 11)), beyond=(600,)),
        list(LAYERS),
    ),
    (Faulty("last block", compute=after(lambda out: out[:, -32:].mul_(1.1))), ["16 bit", "4 bit"]),
    (Faulty("last column", compute=after(lambda out: out[:, -1].zero_())), list(LAYERS)),
    (Faulty("twentieth", compute=Twentieth()), ["16 bit", "4 bit"]),
    (lib.Kept("kept"), list(LAYERS)),
    (OnceOnly("second load"), ["16 bit"]),
    (Faulty("input", compute=lib.writes_into_x), ["16 bit"]),
    (Faulty("weights", compute=lib.other_weights), ["16 bit"]),
    (Faulty("experts", compute=lib.other_experts), ["16 bit"]),
    (Faulty("nan", compute=lib.one_nan), ["16 bit"]),
    (Faulty("raises", compute=lib.raises), ["16 bit"]),
    (Faulty("zeros", compute=lib.nothing), ["16 bit"]),
    (Faulty("limit", understand=lib.ignore(limit=None)), ["16 bit", "4 bit"]),
]


@pytest.mark.parametrize(("fault", "name"), each_once(EVERYWHERE, lambda fault: fault.name))
def test_a_fault_is_found(fault: Faulty, name: str) -> None:
    Twentieth.calls = 0
    found = run(fault, LAYERS[name], at_load=True)
    print(found.fault)
    assert found.fault


def test_a_layer_of_which_nothing_was_compared_has_no_figures() -> None:
    found = run(Faulty("raises", compute=lib.raises), LAYERS["16 bit"])
    assert found.fault and (found.blocks, found.experts_checked, found.calls) == (0, 0, 1)
    assert (found.error, found.worst, found.allowed) == (None, None, None)


def test_the_words_say_when_and_where() -> None:
    layer = LAYERS["16 bit"]
    late = run(Faulty("late", compute=after(lambda out: out[7:].mul_(1.3), lambda tokens: 8 <= tokens < 20)), layer)
    assert "9 tokens" in late.fault and "a token of experts" in late.fault and not late.faulty_experts
    kept = run(lib.Kept("kept"), layer)
    assert "after a reload" in kept.fault
    every = run(Faulty("all", lib.swap_halves), layer)
    assert "all 12 experts are wrong by themselves" in every.fault


def test_a_tiny_expert_does_not_hide_behind_the_others() -> None:
    layer = LAYERS["16 bit"]
    weights = loaded(layer)
    for name in ("w13", "w2"):
        weights[f"{name}_bias"][5] = 0
        weights[f"{name}_scale"][5] -= 12
    wrong = Faulty("one", compute=lib.wrong_experts(lambda index: False))
    assert not layer_check(layer, weights).run(wrong, wrong.plan(layer, CPU)).fault
    shifted = OneExpert("one", lib.shift("w2_scale", 1), 5)
    found = layer_check(layer, weights).run(shifted, shifted.plan(layer, CPU))
    assert found.faulty_experts[:1] == (5,) and found.fault


def test_experts_of_zeros_pass() -> None:
    layer = dataclasses.replace(LAYERS["16 bit"], has_bias=False)
    weights = lib.weights(layer)
    for name in ("w13", "w2"):
        weights[name][3].view(torch.uint8).zero_()
    right = Faulty("right")
    assert not layer_check(layer, weights).run(right, right.plan(layer, CPU)).fault


@pytest.mark.parametrize("what", ["weights", "inputs"])
def test_a_layer_that_shows_nothing_does_not_pass(what: str) -> None:
    layer = dataclasses.replace(LAYERS["16 bit"], has_bias=False)
    weights = loaded(layer)
    if what == "weights":
        for name in ("w13", "w2"):
            weights[name].view(torch.uint8).zero_()
    check = layer_check(layer, weights)
    if what == "inputs":
        check._x.zero_()
    wrong = Faulty("wrong", compute=lib.nothing)
    with pytest.raises(CheckpointError, match="there is nothing to compare"):
        check.run(wrong, wrong.plan(layer, CPU))


def test_weights_without_a_finite_result_are_the_checkpoints_fault() -> None:
    layer = dataclasses.replace(LAYERS["16 bit"], dtype="float32", has_bias=False)
    weights = lib.weights(layer, size=1.0)
    for name in ("w13_scale", "w2_scale"):
        weights[name][4] = 250
    with pytest.raises(CheckpointError, match="expert 4: the float32 reference is NaN or infinite"):
        layer_check(layer, weights).run(Faulty("right"), Faulty("right").plan(layer, CPU))


def test_a_conversion_whose_shapes_depend_on_values_is_a_fault() -> None:
    def shorter(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        return {name: each for name, each in expert.items() if name != "w13_bias"}

    found = run(OneExpert("one", shorter, 4), LAYERS["16 bit"])
    assert "the conversion of expert 4" in found.fault


@pytest.mark.parametrize("method", ["convert", "validate_weights", "build_experts", "hand_overs"])
def test_settings_that_a_method_leaves_reach_no_reference(method: str) -> None:
    """Autocast would round the products of the reference, and of the backend that is checked next."""
    original, calls = getattr(Faulty, method), []

    def leaves(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        torch.set_autocast_enabled("cpu", True)
        calls.append(method)
        return found

    with process_state.kept() as changed:
        backend = type("Leaves", (Faulty,), {method: leaves})("leaves")
        found = run(backend, LAYERS["16 bit"])
    assert calls and not changed and (method == "hand_overs" or not found.fault), found.fault
