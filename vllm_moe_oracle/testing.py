"""Conformance tests of backends: ``pytest --pyargs vllm_moe_oracle.testing`` tests every registered backend.

Backends of installed packages (entry point ``vllm_moe_oracle.backends``) are included; ``-k NAME`` selects one. No test
needs a GPU or vLLM: machines are descriptions, and only conversion and functions for CPUs run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from .backends import Backend
from .backends.emulation import forward
from .core.decision import Reason, ShardPlan
from .core.problem import (
    DEVICE_KINDS,
    Activation,
    ActivationFormat,
    ActivationPrecision,
    ActOrder,
    Device,
    Parallel,
    Problem,
    Routing,
    Scheme,
    SchemeName,
)
from .devices.catalog import known_device, known_device_names
from .errors import OracleError
from .measuring.random_weights import convert_experts, random_experts, random_tokens
from .oracle.registry import default_registry
from .releases.supported import RELEASES

BACKENDS = sorted(each.name for each in default_registry())

_ENTRY_POINTS = sorted(default_registry().load_errors)
"""Entry points whose backend could not be loaded."""

_PACKINGS = {"mxfp8": ("modelopt",), "mxfp4": ("gpt_oss", "compressed-tensors"), "wna16": ("compressed-tensors",)}

_ACTIVATIONS = (
    Activation("silu"),
    Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
    Activation("relu2", gated=False),
)

_SIZES = ((256, 256), (320, 192))
"""Hidden and intermediate sizes: multiples of every tile, and multiples of 64 that most kernels must pad."""

_SAMPLES = 3
"""Elements of each canonical tensor whose influence is tested."""

_ORDERS = ("order", "group_index")
"""Tensors of the order of columns, which are no numbers of weights."""


def _schemes(name: SchemeName) -> list[Scheme]:
    """Variants of a weight format."""
    if name != "wna16":
        return [Scheme(name, 8 if name == "mxfp8" else 4, 32, packing) for packing in _PACKINGS[name]]
    variants = itertools.product(((4, 32), (4, 128), (4, -1), (8, 128)), (False, True))
    (packing,) = _PACKINGS[name]
    schemes = [Scheme(name, bits, group, packing, zeros) for (bits, group), zeros in variants]
    return [*schemes, Scheme(name, 4, 128, packing, act_order="group")]


def _layers(backend: Backend, ranks: int) -> Iterator[Problem]:
    """Layers of the backend's weight formats, with the precision of activations that the backend uses."""
    able = backend.capabilities
    routing = Routing(able.routing_methods[0] if able.routing_methods else "renormalize")
    if routing.method == "deepseekv3":
        routing = dataclasses.replace(routing, num_groups=4, top_k_groups=2)
    parallel = Parallel(ep=ranks, format=able.formats[0])
    for name in backend.schemes:
        for scheme, activation, sizes, bias in itertools.product(_schemes(name), _ACTIVATIONS, _SIZES, (False, True)):
            layer = Problem(
                "layer", scheme, 16, 16 // ranks, 2, *sizes, activation,
                has_bias=bias, routing=routing, parallel=parallel, dtype=able.dtypes[0],
            )  # fmt: skip
            # Precisions that a checkpoint does not declare are refused by the oracle, not by the backend.
            yield layer.with_activations(backend.activations(layer))


def _machines(backend: Backend) -> list[Device]:
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
def _supported(name: str) -> tuple[tuple[Problem, Device], ...]:
    """Layers that a backend supports, each with a machine on which it does; of two ranks if none on one."""
    backend = default_registry()[name]
    machines, found = _machines(backend), []
    for ranks in (1, 2):
        for layer in _layers(backend, ranks):
            device = next((each for each in machines if not backend.check(layer, each).reasons), None)
            if device is not None:
                found.append((layer, device))
        if found:
            break
    return tuple(found)


def _distinct(name: str) -> list[tuple[Problem, Device]]:
    """Of the supported layers, one for each combination of what changes a conversion, and one for each layout of a
    scheme, which a machine may change."""
    backend = default_registry()[name]
    kinds: dict[Any, tuple[Problem, Device]] = {}
    layouts: dict[Any, tuple[Problem, Device]] = {}
    for layer, first in _supported(name):
        kinds.setdefault((layer.scheme, layer.activation, layer.hidden_size, layer.has_bias), (layer, first))
        for device in (first, *_machines(backend)):
            if device is first or not backend.check(layer, device).reasons:
                layouts.setdefault((layer.scheme, backend.plan(layer, device).layout), (layer, device))
    return list(dict.fromkeys((*kinds.values(), *layouts.values())))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are small: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _expert(layer: Problem, index: int = 0) -> dict[str, Tensor]:
    """Random canonical tensors of one expert, the same for layers that differ in other things than their weights."""
    scheme = dataclasses.replace(layer.scheme, activations="16bit")
    plain = dataclasses.replace(
        layer, scheme=scheme, routing=Routing(), parallel=Parallel(), local_experts=layer.num_experts
    )
    return {name: tensor[index].clone() for name, tensor in _two_experts(plain).items()}


@lru_cache(maxsize=256)
def _two_experts(layer: Problem) -> dict[str, Tensor]:
    return random_experts(layer, "cpu", 2)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(_bits(one[name]), _bits(other[name])) for name in one)


def _described(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}


def _codes(reasons: tuple[Reason, ...]) -> set[str]:
    return {reason.code for reason in reasons}


@pytest.mark.parametrize("name", sorted({*BACKENDS, *_ENTRY_POINTS}))
def test_can_be_loaded(name: str) -> None:
    """A backend that an entry point names is registered; one that cannot be loaded is left out with a warning only."""
    assert not default_registry().load_errors.get(name)


@pytest.mark.parametrize("name", BACKENDS)
def test_supports_some_layer(name: str) -> None:
    """At least one of the layers here runs on at least one known device; otherwise nothing below tests anything."""
    assert _supported(name)


@pytest.mark.parametrize("name", BACKENDS)
def test_declares_what_it_does(name: str) -> None:
    """Priority, precision, numerics, sizes and layout are complete and agree with each other."""
    backend = default_registry()[name]
    assert not (missing := backend.missing_attributes()), f"{name} does not set {', '.join(missing)}"
    written = f"stock_class is {backend.stock_class!r}: write module:Class, or nothing"
    assert backend.stock_class.count(":") == bool(backend.stock_class), written
    for layer, device in _distinct(name):
        precision, numerics, plan = backend.activations(layer), backend.numerics(layer), backend.plan(layer, device)
        known = get_args(ActivationPrecision)
        assert precision in known, f"{layer}: activations are {precision!r}. Known are {', '.join(known)}"
        words = (numerics.weights, numerics.activations, numerics.accumulate)
        assert all(words) and "{" not in "".join(words), f"{layer}: numerics are not all in words: {words}"
        said = f"{layer}: activations are {precision}, and its numerics say {numerics.activations!r}"
        assert ("quantized" in numerics.activations) == (precision != "16bit"), said
        assert isinstance(backend.priority(layer, device), float)
        fits = plan.hidden_size >= layer.hidden_size and plan.intermediate_size >= layer.intermediate_size
        assert fits, f"{layer}: its plan cuts it to {plan.hidden_size} and {plan.intermediate_size} features"
        assert bool(plan.notes) == plan.pads(layer), "padding is explained in the plan's notes"
        assert backend.layout(layer, plan).strip()


@pytest.mark.parametrize("name", BACKENDS)
def test_has_a_priority_of_its_own(name: str) -> None:
    """No other backend that supports a layer has the same priority for it: their names would decide."""
    backend = default_registry()[name]
    for layer, device in _distinct(name):
        own = backend.priority(layer, device)
        ties = [
            other.name
            for other in default_registry().for_scheme(layer.scheme.name)
            if other.name != name
            and other.priority(layer, device) == own
            and other.activations(layer) == backend.activations(layer)
            and not other.check(layer, device).reasons
        ]
        assert not ties, f"{layer}: priority {own:g} is also that of {', '.join(ties)}"


@pytest.mark.parametrize("name", BACKENDS)
def test_says_where_another_kernel_takes_over(name: str) -> None:
    """Hand-overs ascend, within the calls of the layer."""
    backend = default_registry()[name]
    for layer, _ in _supported(name):
        for most in (1, 2, 64, 4096):
            found = backend.hand_overs(layer, most)
            assert list(found) == sorted(set(found)), f"{layer}: hand-overs at {found}"
            assert all(1 <= each < most for each in found), f"{layer}: hand-overs at {found}, calls up to {most} tokens"


@pytest.mark.parametrize("name", BACKENDS)
def test_another_backend_for_few_tokens_shares_its_weights(name: str) -> None:
    """It loses no more of a number, either."""
    registry = default_registry()
    for layer, device in _supported(name):
        few = registry[name].few_tokens(layer)
        if few is None:
            continue
        other = registry[few.backend]
        layouts = {each.layout(layer, each.plan(layer, device)) for each in (registry[name], other)}
        assert len(layouts) == 1, f"{layer}: {name} and {few.backend} have the layouts {', '.join(layouts)}"
        assert other.activations(layer) in ("16bit", registry[name].activations(layer)), f"{layer}: {few.backend}"


def _all_local(layer: Problem, experts: int) -> dict[str, Any]:
    """Changes to a layer that give it this number of experts, all on one rank."""
    parallel = dataclasses.replace(layer.parallel, ep=1)
    return {"num_experts": experts, "local_experts": experts, "parallel": parallel}


@pytest.mark.parametrize("name", BACKENDS)
def test_refuses_with_code_and_words(name: str) -> None:
    """Everything that the capabilities exclude is refused, with the code of the capability and a sentence."""
    backend = default_registry()[name]
    able = backend.capabilities
    layer, device = _supported(name)[0]
    scheme, parallel = layer.scheme, layer.parallel
    other_format: ActivationFormat = "batched" if parallel.format == "standard" else "standard"
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        ("float32" in able.dtypes, "dtype", {"dtype": "float32"}),
        (False, "activation", {"activation": Activation("unknown")}),
        (able.bias, "bias", {"has_bias": True}),
        (able.lora, "lora", {"lora": True}),
        (able.eplb, "eplb", {"eplb": True}),
        (able.batch_invariant, "batch_invariant", {"batch_invariant": True}),
        (other_format in able.formats, "format", {"parallel": dataclasses.replace(parallel, format=other_format)}),
        (able.apply_router_weight_on_input, "apply_router_weight_on_input", {
            "routing": dataclasses.replace(layer.routing, apply_router_weight_on_input=True), "top_k": 1}),
        (able.expert_parallel, "expert_parallel", {
            "local_experts": 4, "parallel": dataclasses.replace(parallel, ep=4)}),
        (able.max_top_k is None, "top_k.max", _all_local(layer, 64) | {"top_k": (able.max_top_k or 0) + 1}),
        (able.max_experts is None, "experts.max", _all_local(layer, (able.max_experts or 0) + 4)),
        (able.experts_multiple == 1, "experts.multiple", _all_local(layer, 4 * able.experts_multiple + 1)),
        (able.routing_methods is None, "routing", {"routing": dataclasses.replace(layer.routing, method="unknown")}),
    ]  # fmt: skip
    if scheme.name == "wna16":
        fields: list[tuple[bool, str, dict[str, Any]]] = [
            (able.zero_points, "zero_points", {"zero_points": True}),
            (not able.bits or 3 in able.bits, "bits", {"bits": 3}),
            (not able.groups or 16 in able.groups, "group", {"group_size": 16}),
            *((order in able.act_orders, "act_order", {"act_order": order}) for order in get_args(ActOrder)),
        ]
        changes += [
            (allowed, code, {"scheme": dataclasses.replace(scheme, **field)}) for allowed, code, field in fields
        ]
    for allowed, code, change in changes:
        reasons = backend.check(dataclasses.replace(layer, **change), device).reasons
        assert allowed or code in _codes(reasons), f"{change} is not refused by {code}"
        assert all(reason.code and reason.detail.strip() for reason in reasons)
    for kind in set(DEVICE_KINDS).difference(able.devices):
        assert "device" in _codes(backend.check(layer, dataclasses.replace(device, kind=kind)).reasons)
    for other in map(known_device, known_device_names()):
        ranges = able.compute_capabilities
        fits = other.kind != "cuda" or not ranges or any(low <= other.capability < high for low, high in ranges)
        elsewhere = dataclasses.replace(device, kind=other.kind, capability=other.capability)
        found = _codes(backend.check(layer, elsewhere).reasons)
        assert (other.kind in able.devices and fits) or {"device", "capability"} & found, f"{other.name} is not refused"
    for package in able.packages:
        rest = {key: version for key, version in device.packages.items() if key != package}
        assert "package" in _codes(backend.check(layer, dataclasses.replace(device, packages=rest)).reasons)


@pytest.mark.parametrize("name", BACKENDS)
def test_converts_meta_tensors_to_the_same_shapes(name: str) -> None:
    """Shapes and dtypes are known before weights are loaded, and are the same for every expert."""
    backend = default_registry()[name]
    for layer, device in _distinct(name):
        plan = backend.plan(layer, device)
        meta = {key: tensor.to("meta") for key, tensor in _expert(layer).items()}
        expected = _described(backend.convert(meta, layer, plan))
        assert {"w13", "w2"} <= expected.keys()
        for index in range(2):
            assert _described(backend.convert(_expert(layer, index), layer, plan)) == expected, str(layer)


@pytest.mark.parametrize("name", BACKENDS)
def test_conversion_is_pure(name: str) -> None:
    """Converting twice gives the same bits and leaves the canonical tensors as they are."""
    backend = default_registry()[name]
    for layer, device in _distinct(name):
        plan, expert = backend.plan(layer, device), _expert(layer)
        before = {key: tensor.clone() for key, tensor in expert.items()}
        first = {key: tensor.clone() for key, tensor in backend.convert(expert, layer, plan).items()}
        assert _same(expert, before), f"{layer}: the canonical tensors were modified"
        assert _same(first, dict(backend.convert(before, layer, plan))), f"{layer}: the second conversion differs"


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_that_share_a_layout_convert_to_the_same_bits(name: str) -> None:
    """What `Backend.layout` calls the same is the same: such backends may run one layer by turns."""
    backend = default_registry()[name]
    for layer, device in _distinct(name):
        plan = backend.plan(layer, device)
        for other in default_registry().for_scheme(layer.scheme.name):
            other_plan = other.plan(layer, device)
            same = other is not backend and other.layout(layer, other_plan) == backend.layout(layer, plan)
            if not same or other.check(layer, device).reasons:
                continue
            one, two = (dict(each.convert(_expert(layer), layer, plan)) for each in (backend, other))
            assert _described(one) == _described(two), f"{layer}: {other.name} makes other shapes"
            assert _same(one, two), f"{layer}: {other.name} makes other bits"


class BitTrace(NamedTuple):
    """Where the bits of a conversion's input are in its output; `[elements, bits of an element]`, lowest bit first.

    Attributes:
        place: int64, the index among the bits of all output tensors, one tensor after the other; -1 for nowhere.
        inverted: bool, the output has the bit's complement.
        constant: bool, no input had another bit there: nothing is known of it.
    """

    place: Tensor
    inverted: Tensor
    constant: Tensor


def trace_bits(
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], inputs: Sequence[dict[str, Tensor]]
) -> dict[str, BitTrace]:
    """Follows each bit through a conversion: its values in the inputs are those of its place in the outputs.

    Nothing is assumed of the order. Bits that are computed from several others are found nowhere. Two bits that have
    nothing to do with each other have the same values, or inverted ones, with a probability of 2 / 2**len(inputs).

    Args:
        convert: gets one of `inputs`, and returns tensors of the same names, shapes and dtypes each time.
        inputs: 32 or 64 of them, with tensors of the same names, shapes and dtypes.

    Returns:
        Of each tensor of the input.
    """
    outputs = [convert(each) for each in inputs]
    after = torch.cat([_values([run[key] for run in outputs]) for key in outputs[0]])
    ordered, order = _but_for_inversion(after).sort()
    found = {}
    for key, tensor in inputs[0].items():
        before = _values([run[key] for run in inputs])
        wanted = _but_for_inversion(before)
        index = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
        constant = wanted == 0
        place = torch.where((ordered[index] == wanted) & ~constant, order[index], -1)
        parts = (place, ((before ^ after[place]) & 1).bool(), constant)
        found[key] = BitTrace(*(each.view(-1, 8 * tensor.element_size()) for each in parts))
    return found


def _values(runs: Sequence[Tensor]) -> Tensor:
    """Of each bit of a tensor its values in 32 or 64 runs, as the bits of a number."""
    words = torch.stack([_bits(run) for run in runs], dim=-1).view(torch.int64)  # a word is one byte of eight runs
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        # The eight bytes of a word are transposed as 8 x 8 bits, in blocks of 1, 2 and 4.
        moved = (words ^ words >> shift) & mask
        words = words ^ moved ^ moved << shift
    values = words.view(torch.uint8).view(len(words), -1, 8).mT.contiguous()
    return values.view({32: torch.int32, 64: torch.int64}[len(runs)]).flatten()


def _but_for_inversion(values: Tensor) -> Tensor:
    """The same number for a bit and for its complement."""
    return values ^ -(values & 1)


def random_inputs(layer: Problem, expert: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Inputs for `trace_bits`: the expert with random codes, scales, zero points and biases, none of them NaN."""
    generator = torch.Generator().manual_seed(0)

    def drawn(key: str, tensor: Tensor) -> Tensor:
        part = key.partition("_")[2]
        if part in _ORDERS:
            return tensor
        size = tensor.element_size()
        most = {"zero_point": 1 << layer.scheme.bits, "scale": 255}.get(part, 256) if size == 1 else 256
        shape = (*tensor.shape[:-1], tensor.shape[-1] * size)
        found = torch.randint(most, shape, generator=generator, dtype=torch.uint8)
        if layer.scheme.name == "mxfp8" and not part:
            found = torch.where(found & 0x7F == 0x7F, found ^ 1, found)
        values = found.view(tensor.dtype)
        return values if size == 1 else torch.where(torch.isfinite(values), values, 1)

    return [{key: drawn(key, tensor) for key, tensor in expert.items()} for _ in range(count)]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_element_matters(name: str) -> None:
    """Every weight, scale, zero point and bias is in the kernel's tensors: nothing is dropped.

    `trace_bits` finds those whose bits are moved. Of the others some are changed one by one, which must change the
    kernel's tensors.
    """
    backend = default_registry()[name]
    generator = torch.Generator().manual_seed(0)
    traced = _each_value_once(name)
    for layer, device in _distinct(name):
        plan, expert = backend.plan(layer, device), _expert(layer)

        def convert(expert: dict[str, Tensor], layer: Problem = layer, plan: ShardPlan = plan) -> Mapping[str, Tensor]:
            return backend.convert(expert, layer, plan)

        converted = dict(convert(expert))
        traces = trace_bits(convert, random_inputs(layer, expert, 32)) if layer in traced else {}
        for key, tensor in expert.items():
            if key.endswith(_ORDERS):
                continue
            width = 8 * tensor.element_size()
            bits = _least_found(traces[key]) if traces else torch.arange(width * tensor.numel())
            chosen = torch.randint(max(len(bits), 1), (_SAMPLES,), generator=generator)
            for index, bit in (divmod(int(bits[each]), width) for each in chosen if len(bits)):
                changed = _changed(layer, key, tensor, index, bit)
                if changed is not None:
                    other = dict(convert({**expert, key: changed}))
                    assert not _same(converted, other), f"{layer}: bit {bit} of element {index} of {key} is lost"


def _each_value_once(name: str) -> list[Problem]:
    """Layers of `_distinct` that together have every scheme, activation and size, and biases if any layer has them."""
    rest = {layer: {layer.scheme, layer.activation, layer.hidden_size, layer.has_bias} for layer, _ in _distinct(name)}
    found: list[Problem] = []
    while any(rest.values()):
        found.append(max(rest, key=lambda layer: len(rest[layer])))
        seen = rest[found[-1]].copy()
        for values in rest.values():
            values -= seen
    return found


def _least_found(trace: BitTrace) -> Tensor:
    """int64, indices of the bits that are nowhere, of the elements that have most of them."""
    nowhere = (trace.place < 0) & ~trace.constant
    counts = nowhere.sum(1, keepdim=True)
    return (nowhere & (counts == counts.max())).flatten().nonzero().flatten()


def _changed(layer: Problem, key: str, tensor: Tensor, index: int, bit: int) -> Tensor | None:
    """The tensor with the element of one bit changed so that the layer computes something else; None for a weight that
    is 0."""
    changed = tensor.clone()
    part = key.partition("_")[2]
    flat = changed.view(-1).view(torch.uint8) if tensor.element_size() == 1 else changed.view(-1)
    first = bit // layer.scheme.bits * layer.scheme.bits  # of the code; two of 4 bits share a byte
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
            return None
        flat[index] ^= sign << first
    return changed


class _FunctionBuilder:
    """A builder whose experts are the function itself."""

    max_tokens = 64
    for_serving = False

    def register_buffer(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def from_function(self, function: Any) -> Any:
        """The function."""
        return function


@pytest.mark.parametrize("name", [name for name in BACKENDS if "cpu" in default_registry()[name].capabilities.devices])
def test_computes_what_the_emulation_computes(name: str) -> None:
    """A backend for CPUs over a function of routed tokens gives the emulation's output, with -1 for an expert too."""
    backend = default_registry()[name]
    if backend.stock_class:
        pytest.skip("vLLM's class runs only inside vLLM")
    for layer, device in _distinct(name):
        if device.kind != "cpu":
            continue
        canonical = random_experts(layer, "cpu", layer.local_experts)
        plan = backend.plan(layer, device)
        try:
            kernel = convert_experts(backend, canonical, layer, plan)
            experts = backend.build_experts(kernel, layer, plan, _FunctionBuilder())  # type: ignore[arg-type]  # part of one
        except (OracleError, ImportError) as error:
            pytest.skip(str(error))
        local = dataclasses.replace(layer, num_experts=layer.local_experts)
        batch = random_tokens(local, 7, "uniform", "cpu")
        ids = batch.ids.clone()
        ids[3] = -1
        found, expected = torch.empty_like(batch.x), torch.empty_like(batch.x)
        with torch.inference_mode():  # as in a server
            experts(found, batch.x, batch.weights, ids, None)
        forward(canonical, layer, expected, batch.x, batch.weights, ids)
        distance = float((found - expected).float().norm() / expected.float().norm())
        # Each side rounds to the model's dtype at most five times, by at most 2**-8 of a number.
        assert distance <= 5 * 2.0**-8, f"{layer}: relative error {distance:.1e}"
