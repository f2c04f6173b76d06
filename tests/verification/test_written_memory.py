"""Kernels that give right outputs and write into memory that is not theirs: the check at load names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends as lib
from tests.lib.cases import MXFP8, MXFP8_W8A8, SILU, problem
from tests.lib.faulty_backends import MXFP4, OAI, Compute, Faulty, check, weights
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.compat import kernel_memory
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.verification import self_check

SMALL: dict[str, Any] = {"experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 128}
LAYERS = {
    "16 bit": problem(**SMALL, scheme=MXFP8, activation=SILU),
    "W8A8": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "gpt-oss": problem(**SMALL, scheme=MXFP4, activation=OAI, has_bias=True),
}
ALL = list(LAYERS)


def at(tensor: Tensor, byte: int) -> Tensor:
    """A byte of the memory that a tensor lies in, counted from its first one; none where the memory ends before."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    place = tensor.storage_offset() * tensor.element_size() + byte
    return storage[place : place + 1] if place >= 0 else storage[:0]


def beside(choose: Callable[[Any], Tensor], after: bool, distance: int = 0) -> Compute:
    """The right output, and a byte that is changed so far before or after a tensor."""

    def compute(tensors: Any, layer: Problem, out: Tensor, *given: Any) -> None:
        forward(tensors, layer, out, *given[:4])
        named = dict(zip(("x", "weights", "ids", "places", "workspace"), given, strict=False))
        near = choose(SimpleNamespace(out=out, **named))
        at(near, near.nbytes + distance if after else -1 - distance).bitwise_or_(1)

    return compute


def spread(layer: Problem) -> tuple[Problem, dict[str, Tensor]]:
    """The layer on one of two ranks, whose kernel gets an expert map."""
    mine = dataclasses.replace(layer, local_experts=8, parallel=Parallel(ep=2))
    return mine, {name: tensor[:8] for name, tensor in weights(layer).items()}


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("distance", [0, 200])
def test_writing_beside_a_workspace_is_named(layer: str, after: bool, distance: int) -> None:
    wrong = beside(lambda call: call.workspace, after, distance)
    found = check(Faulty("wrong", compute=wrong, scratch=True), LAYERS[layer], weights(LAYERS[layer]))
    assert not found.passed and "the kernel has written before or after its workspace2" in found.fault


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("after", [False, True])
def test_writing_beside_the_expert_map_is_named(layer: str, after: bool) -> None:
    wrong = Faulty("wrong", compute=beside(lambda call: call.places, after))
    found = check(wrong, *spread(LAYERS[layer]))
    assert not found.passed and "the kernel has written before or after its expert map" in found.fault
    mine, loaded = spread(LAYERS[layer])
    found = lib.converted(wrong, mine, loaded).compare()
    assert not found.passed and "the kernel has written before or after its expert map" in found.fault


def changes(name: str, index: int) -> Compute:
    """The right output, and one bit of one of its own tensors that is changed."""

    def compute(tensors: Any, layer: Problem, *given: Any) -> None:
        forward(tensors, layer, *given)
        tensors[name].view(torch.uint8).flatten()[index].bitwise_xor_(1)

    return compute


@pytest.mark.parametrize("layer", ALL)
@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias"])
@pytest.mark.parametrize("index", [0, -1])
def test_changing_the_kernels_own_tensors_is_named(layer: str, name: str, index: int) -> None:
    if name.endswith("bias") and not LAYERS[layer].has_bias:
        return
    # In one call, the largest: taken back in the next one, it would be as it was.
    found = check(
        Faulty("wrong", compute=lib.many_tokens(changes(name, index)), beyond=(600,)),
        LAYERS[layer],
        weights(LAYERS[layer]),
    )
    assert not found.passed and f"the kernel has changed its {name}" in found.fault, found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layer", ALL)
def test_a_right_kernel_that_fills_its_workspace_passes(layer: str, ranks: int) -> None:
    def compute(tensors: Any, layer: Problem, out: Tensor, *given: Any) -> None:
        given[-1].fill_(3)
        forward(tensors, layer, out, *given[:4])

    mine, loaded = spread(LAYERS[layer]) if ranks > 1 else (LAYERS[layer], weights(LAYERS[layer]))
    found = check(Faulty("right", compute=compute, scratch=True), mine, loaded)
    assert found.passed, found


class Recorder:
    """Experts of vLLM's kind, that keep what they get and write one number into each tensor."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}

    def apply(self, **arguments: Any) -> str:
        """Keeps its arguments."""
        self.given = arguments
        for number, name in enumerate(("workspace13", "workspace2", "output")):
            if arguments[name] is not None:
                arguments[name].add_(number + 1)
        return "returned"


def test_experts_find_what_vllm_allocates_as_it_was_and_so_does_vllm() -> None:
    """The output may share the memory of the first workspace, which is larger."""
    shared, second = torch.arange(12.0), torch.arange(6.0).to(torch.bfloat16)
    experts, guards = Recorder(), kernel_memory.Guards(100)
    before = shared.clone()
    with kernel_memory.guarded(experts, guards):
        assert experts.apply(output=shared[:8].view(2, 4), workspace13=shared, workspace2=second) == "returned"
    assert "apply" not in vars(experts)
    given = experts.given
    assert all(given[name].data_ptr() % 2 == 0 for name in given) and given["output"].shape == (2, 4)
    assert len({each.untyped_storage().data_ptr() for each in given.values()}) == 1
    assert torch.equal(shared, torch.cat((before[:8] + 3, before[8:] + 1)))
    assert torch.equal(second, torch.arange(6.0).to(torch.bfloat16) + 2)
    assert guards.changed().tolist() == [False] * 3
    with kernel_memory.guarded(experts, guards):
        experts.apply(output=shared, workspace13=None, workspace2=torch.empty(0))
    assert [*experts.given] == ["output", "workspace13", "workspace2"] and experts.given["workspace13"] is None
    assert guards.changed().tolist() == [False] * 4 and len(guards.words()) == 4


@pytest.mark.parametrize("name", ["output", "workspace13", "workspace2"])
@pytest.mark.parametrize("byte", [-1, -256, 0, 255])
def test_every_byte_of_a_guard_counts(name: str, byte: int) -> None:
    experts, guards = Recorder(), kernel_memory.Guards(256)
    run = experts.apply

    def writes(**arguments: Any) -> str:
        near = arguments[name]
        at(near, byte if byte < 0 else near.nbytes + byte).zero_()
        return run(**arguments)

    experts.apply = writes  # type: ignore[method-assign]
    guards.when = "call 1"
    with kernel_memory.guarded(experts, guards):
        experts.apply(output=torch.zeros(3), workspace13=torch.zeros(5), workspace2=torch.zeros(7))
    found = dict(zip(guards.words(), guards.changed().tolist(), strict=True))
    assert [each for each, changed in found.items() if changed] == [
        f"call 1: the kernel has written before or after its {name}"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (1,), (2, 0)])
def test_a_checksum_has_every_bit(dtype: torch.dtype, step: int, shape: tuple[int, ...]) -> None:
    values = torch.zeros(*shape, step).to(dtype)
    before = self_check._checksums({"held": values[..., 0]})
    assert before.tolist() == [0]
    for byte in range(0, values.nbytes, step * values.element_size()):
        at(values, byte).bitwise_xor_(128)
        assert not torch.equal(before, self_check._checksums({"held": values[..., 0]}))
        at(values, byte).bitwise_xor_(128)
