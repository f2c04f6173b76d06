"""Conversion is pure, knows its shapes before weights are loaded, loses nothing, and keeps the promise of a layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ..backends import Backend
from ..core.decision import ShardPlan
from ..core.problem import Device, Problem
from .bit_trace import ORDERS, BitTrace, bits_of, random_inputs, trace_bits
from .cases import (
    about,
    backend_names,
    described,
    distinct,
    each_value_once,
    expert,
    first_difference,
    registry,
    same_bits,
    sharing,
)

BACKENDS = backend_names()

_TURNS = 7
_CODES = [code for code in range(1 << _TURNS) if code.bit_count() == 3]
"""In which of seven conversions an element changes: 35 codes, for four elements of each of eight tensors. Bytes that
change with several elements change in more than three conversions, which is the code of none."""

_PURE = "`convert` must compute its tensors from the expert's alone, and write to no tensor that it gets"
_LAYOUT = (
    "A layer's tensors are shared by backends of one layout: convert as the other one does, or let `layout` return "
    "another name"
)
_LOST = "look at what `convert` does with it: slices that end early, padding that overwrites, an index of a neighbor"


@pytest.mark.parametrize("name", BACKENDS)
def test_converts_meta_tensors_to_the_same_shapes(name: str) -> None:
    """Shapes and dtypes are known before weights are loaded, and are the same for every expert."""
    backend = registry()[name]
    for layer, device in distinct(backend):
        plan = backend.plan(layer, device)
        meta = {key: tensor.to("meta") for key, tensor in expert(layer).items()}
        expected = described(backend.convert(meta, layer, plan))
        missing = {"w13", "w2"} - expected.keys()
        assert not missing, f"{about(backend, layer, device)}: `convert` returns no {' and no '.join(sorted(missing))}"
        for index in range(2):
            found = described(backend.convert(expert(layer, index), layer, plan))
            different = [
                f"{key} is {found.get(key, 'missing')} for expert {index}, and {expected.get(key, 'missing')} for meta "
                "tensors"
                for key in sorted(found.keys() | expected.keys())
                if found.get(key) != expected.get(key)
            ]
            rule = "Storage is allocated by what `convert` makes of meta tensors: no shape may depend on values"
            assert not different, f"{about(backend, layer, device)}: {'; '.join(different)}. {rule}"


@pytest.mark.parametrize("name", BACKENDS)
def test_conversion_is_pure(name: str) -> None:
    """Converting twice gives the same bits and leaves the canonical tensors as they are."""
    backend = registry()[name]
    for layer, device in distinct(backend):
        plan, given = backend.plan(layer, device), expert(layer)
        before = {key: tensor.clone() for key, tensor in given.items()}
        first = {key: tensor.clone() for key, tensor in backend.convert(given, layer, plan).items()}
        modified = first_difference(before, given)
        assert not modified, f"{about(backend, layer, device)}: `convert` changes its input, {modified}. {_PURE}"
        different = first_difference(first, backend.convert(before, layer, plan))
        assert not different, f"{about(backend, layer, device)}: the second conversion differs, {different}. {_PURE}"


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_that_share_a_layout_convert_to_the_same_bits(name: str) -> None:
    """What `Backend.layout` calls the same is the same: backends of one layout may run one layer by turns, and those
    that get tokens in other ways, such as sorted by expert, are compared with each other.

    Each backend is compared with the first one by name, with weights that a checkpoint may have and with random bits.
    """
    backend = registry()[name]
    for layer, device in distinct(backend):
        first, its_layer, its_device = sharing(backend, layer, device)[0]
        if first is not backend:
            _compare(backend, layer, device, first, its_layer, its_device)


@pytest.mark.parametrize("name", BACKENDS)
def test_conversion_does_not_depend_on_how_tokens_come(name: str) -> None:
    """A backend that takes tokens as they are and sorted by expert (`Capabilities.formats`) makes the same bits for
    both, unless `layout` has two names."""
    backend = registry()[name]
    for layer, device in {layer.scheme: (layer, device) for layer, device in distinct(backend)}.values():
        for form in backend.capabilities.formats:
            other = dataclasses.replace(layer, parallel=dataclasses.replace(layer.parallel, format=form))
            layouts = {backend.layout(each, backend.plan(each, device)) for each in (layer, other)}
            if other != layer and len(layouts) == 1:
                _compare(backend, other, device, backend, layer, device)


def _compare(
    backend: Backend, layer: Problem, device: Device, other: Backend, its_layer: Problem, its_device: Device
) -> None:
    """Two conversions of the same layout, on the same weights."""
    plan, its_plan = backend.plan(layer, device), other.plan(its_layer, its_device)
    for given in (expert(layer), *random_inputs(layer, expert(layer), 1)):
        made, expected = backend.convert(given, layer, plan), other.convert(given, its_layer, its_plan)
        different = first_difference(expected, made)
        both = f"{other.name} on {its_layer} makes the layout {other.layout(its_layer, its_plan)}, too"
        assert not different, f"{about(backend, layer, device)}: {both}, but other bits: {different}. {_LAYOUT}"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_element_matters(name: str) -> None:
    """Every weight, scale, zero point and bias is in the kernel's tensors: nothing is dropped.

    `trace_bits` finds those whose bits are moved, in layers that together have every scheme, activation and size. Of
    the others, and of all other layers, some are changed one by one, which must change the kernel's tensors. Weights of
    a layout that another backend makes, too, are followed through the first one by name.
    """
    backend = registry()[name]
    generator = torch.Generator().manual_seed(0)
    traced = each_value_once(backend)
    for layer, device in distinct(backend):
        if sharing(backend, layer, device)[0][0] is not backend:
            continue
        plan, given = backend.plan(layer, device), expert(layer)

        def convert(expert: dict[str, Tensor], layer: Problem = layer, plan: ShardPlan = plan) -> Mapping[str, Tensor]:
            return backend.convert(expert, layer, plan)

        traces = trace_bits(convert, random_inputs(layer, given, 32)) if layer in traced else {}
        lost = _lost_elements(layer, given, convert, _samples(layer, given, traces, generator))
        words = ", ".join(f"bit {each.bit} of element {each.element} of {each.key}" for each in lost)
        rule = f"{'is' if len(lost) == 1 else 'are'} lost: changing it has no effect on the kernel's tensors; {_LOST}"
        assert not lost, f"{about(backend, layer, device)}: {words} {rule}"


class _Sample(NamedTuple):
    """One bit of a canonical tensor."""

    key: str
    element: int
    bit: int


def _samples(
    layer: Problem, given: Mapping[str, Tensor], traces: Mapping[str, BitTrace], generator: torch.Generator
) -> list[_Sample]:
    """Bits of different elements, of each tensor as many: of those that a trace has found nowhere, or of all."""
    keys = [key for key in given if not key.endswith(ORDERS)]
    count = len(_CODES) // len(keys)
    found: list[_Sample] = []
    for key in keys:
        width, changed = 8 * given[key].element_size(), given[key].clone()
        bits = _least_found(traces[key]) if traces else torch.arange(width * given[key].numel())
        if len(bits):
            # More than needed: some are of one element, or of a weight that is 0.
            chosen = torch.randint(len(bits), (8 * count,), generator=generator)
            elements = {index: bit for index, bit in (divmod(int(each), width) for each in bits[chosen])}
            samples = (_Sample(key, index, bit) for index, bit in elements.items())
            found += itertools.islice((each for each in samples if _change(layer, each, changed)), count)
    return found


def _least_found(trace: BitTrace) -> Tensor:
    """int64, indices of the bits that are nowhere, of the elements that have most of them."""
    nowhere = (trace.place < 0) & ~trace.constant
    counts = nowhere.sum(1, keepdim=True)
    return (nowhere & (counts == counts.max())).flatten().nonzero().flatten()


def _lost_elements(
    layer: Problem,
    given: dict[str, Tensor],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    samples: Sequence[_Sample],
) -> list[_Sample]:
    """Samples whose change changes nothing in the kernel's tensors.

    Each one changes in three of seven conversions, and some byte must change in these three and in no other. Those for
    which there is none, such as neighbors that one byte depends on, are changed alone.
    """

    def changed(some: Sequence[_Sample]) -> dict[str, Tensor]:
        tensors = given | {key: given[key].clone() for key in {each.key for each in some}}
        for each in some:
            _change(layer, each, tensors[each.key])
        return tensors

    if not samples:
        return []
    plain = {key: tensor.clone() for key, tensor in convert(given).items()}
    words = torch.cat([bits_of(each) for each in plain.values()])
    patterns = torch.zeros_like(words)
    coded = list(zip(samples, _CODES, strict=False))
    for turn in range(_TURNS):
        made = convert(changed([each for each, code in coded if code >> turn & 1]))
        patterns |= (torch.cat([bits_of(each) for each in made.values()]) != words).to(torch.uint8) << turn
    unseen = [each for each, code in coded if not (patterns == code).any()]
    return [each for each in unseen if same_bits(plain, convert(changed([each])))]


def _change(layer: Problem, sample: _Sample, tensor: Tensor) -> bool:
    """Changes the element of one bit so that the layer computes something else, in place; False for a weight that is 0,
    which stays."""
    part = sample.key.partition("_")[2]
    index = sample.element
    flat = tensor.view(-1).view(torch.uint8) if tensor.element_size() == 1 else tensor.view(-1)
    first = sample.bit // layer.scheme.bits * layer.scheme.bits  # of the code; two of 4 bits share a byte
    if part == "scale":
        flat[index] = flat[index] + 1 if tensor.element_size() == 1 else flat[index] * 2
    elif part == "zero_point":
        flat[index] ^= 1
    elif part == "bias":
        flat[index] += 1
    elif layer.scheme.name == "wna16":
        flat[index] ^= 1 << first
    else:
        sign = 1 << layer.scheme.bits - 1
        if not int(flat[index]) >> first & sign - 1:
            return False
        flat[index] ^= sign << first
    return True
