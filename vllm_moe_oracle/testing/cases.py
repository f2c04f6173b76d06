"""The layers, machines and experts of the conformance tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend
from ..core.problem import Activation, Device, Parallel, Problem, Routing, Scheme, SchemeName
from ..devices.catalog import known_device, known_device_names
from ..measuring.random_weights import random_experts
from ..oracle.registry import Registry, default_registry
from ..releases.supported import RELEASES
from .bit_trace import bits_of

_PACKINGS = {"mxfp8": ("modelopt",), "mxfp4": ("gpt_oss", "compressed-tensors"), "wna16": ("compressed-tensors",)}

# One with a gate comes first, one without comes last.
_ACTIVATIONS = (
    Activation("silu"),
    Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
    Activation("relu2", gated=False),
)

_SIZES = ((256, 256), (320, 192))
"""Hidden and intermediate sizes: multiples of every tile, and multiples of 64 that most kernels must pad."""

EXPERTS, TOP_K = 16, 2


def registry() -> Registry:
    """The backends that are tested."""
    return default_registry()


def backend_names() -> list[str]:
    """Names of the backends that are tested, sorted."""
    return sorted(each.name for each in registry())


def schemes_of(name: SchemeName) -> list[Scheme]:
    """Variants of a weight format."""
    if name != "wna16":
        return [Scheme(name, 8 if name == "mxfp8" else 4, 32, packing) for packing in _PACKINGS[name]]
    variants = itertools.product(((4, 32), (4, 128), (4, -1), (8, 128)), (False, True))
    (packing,) = _PACKINGS[name]
    schemes = [Scheme(name, bits, group, packing, zeros) for (bits, group), zeros in variants]
    return [*schemes, Scheme(name, 4, 128, packing, act_order="group")]


def layers(backend: Backend, ranks: int) -> Iterator[Problem]:
    """Layers of the backend's weight formats, with the precision of activations that the backend uses."""
    able = backend.capabilities
    routing = Routing(able.routing_methods[0] if able.routing_methods else "renormalize")
    if routing.method == "deepseekv3":
        routing = dataclasses.replace(routing, num_groups=4, top_k_groups=2)
    parallel = Parallel(ep=ranks, format=able.formats[0])
    for name in backend.schemes:
        for scheme, activation, sizes, bias in itertools.product(schemes_of(name), _ACTIVATIONS, _SIZES, (False, True)):
            layer = Problem(
                "layer", scheme, EXPERTS, EXPERTS // ranks, TOP_K, *sizes, activation,
                has_bias=bias, routing=routing, parallel=parallel, dtype=able.dtypes[0],
            )  # fmt: skip
            # Precisions that a checkpoint does not declare are refused by the oracle, not by the backend.
            yield layer.with_activations(backend.activations(layer))


def machines(backend: Backend) -> list[Device]:
    """A device of each compute capability with all that the backend needs, first with the newest vLLM."""
    able = backend.capabilities
    devices = {(device.kind, device.capability): device for device in map(known_device, known_device_names())}
    needed = {package: lowest or "999" for package, lowest in able.packages.items()} | {"torch": "999"}
    return [
        dataclasses.replace(device, packages=needed | {"vllm": vllm}, features=device.features + able.features)
        for vllm in (RELEASES[-1], RELEASES[0])
        for device in devices.values()
        if device.kind in able.devices
    ]


@cache
def supported(backend: Backend) -> tuple[tuple[Problem, Device], ...]:
    """Layers that a backend supports, each with a machine on which it does; of two ranks if none on one."""
    devices, found = machines(backend), []
    for ranks in (1, 2):
        for layer in layers(backend, ranks):
            device = next((each for each in devices if not backend.check(layer, each).reasons), None)
            if device is not None:
                found.append((layer, device))
        if found:
            break
    return tuple(found)


@cache
def distinct(backend: Backend) -> tuple[tuple[Problem, Device], ...]:
    """Of the supported layers, one for each combination of what changes a conversion, and one for each layout of a
    scheme, which a machine may change."""
    kinds: dict[Any, tuple[Problem, Device]] = {}
    layouts: dict[Any, tuple[Problem, Device]] = {}
    for layer, first in supported(backend):
        kinds.setdefault(weights_kind(layer), (layer, first))
        for device in (first, *machines(backend)):
            if device is first or not backend.check(layer, device).reasons:
                layouts.setdefault((layer.scheme, backend.plan(layer, device).layout), (layer, device))
    return tuple(dict.fromkeys((*kinds.values(), *layouts.values())))


def each_value_once(backend: Backend) -> list[Problem]:
    """Layers of `distinct` that together have every scheme, activation and size, and biases if any layer has them."""
    rest = {
        layer: {layer.scheme, layer.activation, layer.hidden_size, layer.has_bias} for layer, _ in distinct(backend)
    }
    found: list[Problem] = []
    while any(rest.values()):
        found.append(max(rest, key=lambda layer: len(rest[layer])))
        seen = rest[found[-1]].copy()
        for values in rest.values():
            values -= seen
    return found


def weights_kind(layer: Problem) -> Problem:
    """The layer by what its experts' weights depend on: equal for layers that differ in other things."""
    return dataclasses.replace(
        layer.with_activations("16bit"),
        routing=Routing(), parallel=Parallel(), num_experts=EXPERTS, local_experts=EXPERTS, top_k=TOP_K,
    )  # fmt: skip


def sharing(backend: Backend, layer: Problem, device: Device) -> list[tuple[Backend, Problem, Device]]:
    """Backends, by name, that make the same layout of such weights, each with a layer that it supports: of other
    activations, of another format of them, or of another number of ranks. The backend itself is among them."""
    name, kind = backend.layout(layer, backend.plan(layer, device)), weights_kind(layer)
    found = {backend.name: (backend, layer, device)}
    for other in registry().for_scheme(layer.scheme.name):
        if other.layout(layer, other.plan(layer, device)) != name:
            continue
        for its_layer, its_device in distinct(other):
            same = (
                weights_kind(its_layer) == kind and other.layout(its_layer, other.plan(its_layer, its_device)) == name
            )
            if same:
                found.setdefault(other.name, (other, its_layer, its_device))
    return [found[each] for each in sorted(found)]


def expert(layer: Problem, index: int = 0) -> dict[str, Tensor]:
    """Random canonical tensors of one expert, the same for layers that differ in other things than their weights."""
    return {name: tensor[index].clone() for name, tensor in few_experts(layer, 2).items()}


def few_experts(layer: Problem, count: int) -> dict[str, Tensor]:
    """Random canonical tensors of some experts, `[count, ...]` each, not to be modified; otherwise as `expert`."""
    activation = _ACTIVATIONS[0] if layer.activation.gated else _ACTIVATIONS[-1]
    kind = dataclasses.replace(weights_kind(layer), activation=activation, has_bias=True)
    made = _experts_with_biases(kind, count)
    return {name: tensor for name, tensor in made.items() if layer.has_bias or not name.endswith("_bias")}


@lru_cache(maxsize=256)
def _experts_with_biases(layer: Problem, count: int) -> Mapping[str, Tensor]:
    return random_experts(layer, "cpu", count)


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names, and the same bytes under each."""
    return one.keys() == other.keys() and all(torch.equal(bits_of(one[name]), bits_of(other[name])) for name in one)


def first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Where two conversions differ, in words, with numbers; "" where they do not."""
    if one.keys() != other.keys():
        return f"tensors {', '.join(sorted(one))} and {', '.join(sorted(other))}"
    shapes, others = described(one), described(other)
    for name in one:
        if shapes[name] != others[name]:
            return f"{name} is {shapes[name]} and {others[name]}"
        mine, its = bits_of(one[name]), bits_of(other[name])
        if not torch.equal(mine, its):
            places = (mine != its).nonzero().flatten()
            first = int(places[0])
            return (
                f"{len(places)} of {len(mine)} bytes of {name}, the first at {first}: {int(mine[first])} and "
                f"{int(its[first])}"
            )
    return ""


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and dtype of each tensor in words, by name."""
    return {name: f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for name, each in tensors.items()}


def about(backend: Backend, layer: Problem, device: Device | None = None) -> str:
    """Which backend and which layer a failure is of, to stand before what is wrong."""
    return f"{backend.name}, {layer}{f', on {device}' if device is not None else ''}"
