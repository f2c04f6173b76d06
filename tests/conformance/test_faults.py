"""The conformance tests see one wrong number of one expert, in every scheme, and say where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.oracle.registry import Registry, default_registry
from vllm_moe_oracle.testing import cases, test_conversion, test_outputs
from vllm_moe_oracle.testing.bit_trace import ORDERS
from vllm_moe_oracle.testing.loud_experts import loud_case, small_layer

CPU = known_device("cpu")
SCHEMES = [each for name in ("mxfp8", "mxfp4", "wna16") for each in cases.schemes_of(name)]  # type: ignore[arg-type]
OAI = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)
Tensors = Mapping[str, Tensor]
Fault = Callable[[dict[str, Tensor], torch.Generator], None]


def layer_of(scheme: Scheme, activation: Activation = Activation("silu"), dtype: str = "bfloat16") -> Problem:  # noqa: B008  # frozen
    return Problem("layer", scheme, 16, 16, 2, 256, 256, activation, has_bias=True, dtype=dtype)


def one(key: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """One random element of one tensor of one expert becomes another."""

    def damage(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
        tensors[key] = tensors[key].clone()
        flat = tensors[key].view(-1)
        index = int(torch.randint(len(flat), (1,), generator=generator))
        flat[index] = change(flat[index])

    return damage


def doubled(scale: Tensor) -> Tensor:
    return scale + 1 if scale.dtype == torch.uint8 else scale * 2


def halved(scale: Tensor) -> Tensor:
    return scale - 1 if scale.dtype == torch.uint8 else scale / 2


def swapped(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    """Two experts stand in each other's place."""
    tensors |= {name: each[[0, 2, 1, 3]] for name, each in tensors.items()}


FAULTS: dict[str, Fault] = {
    "w13_scale doubled": one("w13_scale", doubled),
    "w13_scale halved": one("w13_scale", halved),
    "w2_scale doubled": one("w2_scale", doubled),
    "w2_scale halved": one("w2_scale", halved),
    "w13_bias dropped": one("w13_bias", torch.zeros_like),
    "w2_bias dropped": one("w2_bias", torch.zeros_like),
    "w13_zero_point": one("w13_zero_point", lambda each: each + 1),
    "w2_zero_point": one("w2_zero_point", lambda each: each - 1),
    "experts swapped": swapped,
}


class Faulty(Emulation):
    """The emulation, with a fault in the tensors that its function reads."""

    def __init__(self, fault: Fault | None = None, seed: int = 0) -> None:
        self.fault, self.seed = fault, seed

    def build_experts(self, tensors: Tensors, problem: Problem, plan: Any, builder: Any) -> Any:
        read = dict(tensors)
        if self.fault is not None:
            self.fault(read, torch.Generator().manual_seed(self.seed))
        return builder.from_function(lambda *call: forward(read, problem, *call))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_one_wrong_number_of_one_expert_is_seen(scheme: Scheme) -> None:
    layer = small_layer(Faulty(), layer_of(scheme), CPU, loud=True)
    case = loud_case(Faulty(), layer)
    test_outputs.compare_outputs(Faulty(), case, CPU)
    for seed, (name, fault) in enumerate(FAULTS.items()):
        if "zero_point" in name and not scheme.zero_points:
            continue
        with pytest.raises(AssertionError, match="the output is not the reference's"):
            test_outputs.compare_outputs(Faulty(fault, seed), case, CPU)
            pytest.fail(f"{name} is not seen")


@pytest.mark.parametrize("activation", [OAI, Activation("relu2", gated=False)], ids=str)
@pytest.mark.parametrize(
    "scheme", [SCHEMES[0], SCHEMES[1], Scheme("wna16", 8, 128, "compressed-tensors", True)], ids=str
)
def test_it_is_seen_behind_other_activations(activation: Activation, scheme: Scheme) -> None:
    layer = small_layer(Faulty(), layer_of(scheme, activation), CPU, loud=True)
    case = loud_case(Faulty(), layer)
    for name in ("w13_scale halved", "w13_bias dropped"):
        with pytest.raises(AssertionError, match="the output is not the reference's"):
            test_outputs.compare_outputs(Faulty(FAULTS[name]), case, CPU)
            pytest.fail(f"{name} is not seen")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_three_elements_or_more_of_each_tensor_are_changed(scheme: Scheme) -> None:
    layer = layer_of(scheme)  # with biases, and zero points where the scheme has them: as many tensors as any
    given = cases.expert(layer)
    samples = test_conversion._samples(layer, given, {}, torch.Generator().manual_seed(0))
    for key in (key for key in given if not key.endswith(ORDERS)):
        assert len({each.element for each in samples if each.key == key}) >= 3, key
    assert len(samples) <= len(test_conversion._CODES)  # others would never be changed


def test_a_failure_says_where_the_number_is() -> None:
    def damage(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
        tensors["w13_scale"] = tensors["w13_scale"].clone()
        tensors["w13_scale"][2, 5, 3] += 1
        assert generator is not None

    layer = small_layer(Faulty(), layer_of(SCHEMES[0]), CPU, loud=True)
    with pytest.raises(AssertionError) as caught:
        test_outputs.compare_outputs(Faulty(damage), loud_case(Faulty(), layer), CPU)
    found = str(caught.value)
    assert found.startswith(
        f"emulation, {layer}, on {CPU}: the output is not the reference's: of tokens of expert 2 with "
    )
    # Scale 3 of a row is that of columns 96 to 127, which two sets of tokens have.
    assert "features of columns 96 to 111 of w13" in found or "features of columns 112 to 127 of w13" in found
    assert " of 68 sets of tokens are. Look at w13 in these columns (weights, scales, zero points)" in found
    assert "times what rounding explains" in found and "(a relative error of 0.039 of a block at most)" in found


@pytest.mark.parametrize("name", ["marlin_wna16_batched", "marlin_mxfp4_batched", "humming_mxfp8_grouped"])
def test_a_conversion_for_batched_tokens_that_differs_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the same bits to other places, so that no element is lost."""
    faulty = _converting(name, lambda made: made | {"w2_scale": made["w2_scale"].roll(1, 0)}, monkeypatch)
    with pytest.raises(AssertionError, match=rf"^{faulty.name}, .* bytes of w2_scale, the first at \d+: .*`layout`"):
        test_conversion.test_backends_that_share_a_layout_convert_to_the_same_bits(name)


def test_a_conversion_that_depends_on_how_tokens_come_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hopper_mxfp4"
    _converting(name, lambda made: made | {"w2_scale": made["w2_scale"].roll(1, 0)}, monkeypatch, batched=True)
    with pytest.raises(AssertionError, match=r"batched activations, on .* of w2_scale, the first at"):
        test_conversion.test_conversion_does_not_depend_on_how_tokens_come(name)


def _converting(
    name: str,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    batched: bool | None = None,
) -> Any:
    """Replaces a backend of the registry by a copy of it, whose conversion is changed.

    Args:
        name: the backend's.
        change: what is done to converted tensors.
        batched: for which tokens; None for all.
    """
    own = default_registry()[name]
    faulty = copy.copy(own)

    def convert(expert: Tensors, layer: Problem, plan: Any) -> dict[str, Tensor]:
        made = dict(own.convert(expert, layer, plan))
        return made if batched is not None and layer.parallel.is_batched != batched else change(made)

    monkeypatch.setattr(faulty, "convert", convert)
    registry = Registry()
    for each in default_registry():
        registry.add(faulty if each.name == name else each, "a test")
    monkeypatch.setattr(cases, "default_registry", lambda: registry)
    return faulty
