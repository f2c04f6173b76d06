"""Compares how many experts a checkpoint's files hold of each layer with its config: `check_expert_counts`.

vLLM's loaders skip experts beyond the config's number, or end with an error that names none, and leave the memory of
experts that the files lack as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import DamagedCheckpointError
from ..quantization.fields import shortened
from ..quantization.types import LayerNames
from .files import CheckpointFiles
from .layer_names import compact_layer_names, index_ranges
from .model_fields import NUM_EXPERTS_FIELDS
from .tensor_headers import ExpertTensors


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """A layer and its number of experts by the config.

    Attributes:
        names: the layer's names.
        experts: experts by the config; 0 where it does not say.
        is_checked: the layer's experts are quantized when they serve. Of all others only the names matter here.
        is_draft: the layer is one of a multi-token prediction module. A server that does not use it loads the rest.
    """

    names: LayerNames
    experts: int
    is_checked: bool
    is_draft: bool = False


def check_expert_counts(
    config: CheckpointFiles, layers: Iterable[CountedLayer], found: Mapping[str, ExpertTensors], is_complete: bool
) -> list[str]:
    """Refuses files that hold other experts than the config says.

    Layers of which the files hold no expert under a known name are not judged.

    Args:
        config: the checkpoint's.
        layers: all layers with experts. Two kinds of experts may share a name in files (`LayerNames.file_modules`).
        found: what the files hold, by name of the module in files.
        is_complete: all files are there. Where one is missing, experts may be in it.

    Returns:
        A note for each kind of difference in layers for multi-token prediction.

    Raises:
        DamagedCheckpointError: of some other layers the files hold experts that the config does not count, or lack some
            of those that it counts.
    """
    by_module: dict[str, dict[int, CountedLayer]] = {}
    for layer in layers:
        for module, first in layer.names.modules_in_files():
            if module in found:
                by_module.setdefault(module, {})[first] = layer
    errors: dict[tuple[str, str], list[str]] = {}
    notes: dict[tuple[str, str], list[str]] = {}
    for module, sharing in by_module.items():
        checked = next((layer for layer in sharing.values() if layer.is_checked), None)
        if checked is None or not all(layer.experts for layer in sharing.values()):
            continue
        numbers = {first + index for first, layer in sharing.items() for index in range(layer.experts)}
        field = _field(config) if len(sharing) == 1 else ""
        if words := _difference(found[module], numbers, field, is_complete):
            (notes if checked.is_draft else errors).setdefault(words, []).append(checked.names.modules[0])
    for (rule, remedy), names in errors.items():
        raise DamagedCheckpointError(rule, remedy, f"{config.path}, {compact_layer_names(names)}")
    return [
        f"{compact_layer_names(names)}: {rule}, where speculative decoding uses these layers. {remedy}"
        for (rule, remedy), names in notes.items()
    ]


def _field(config: CheckpointFiles) -> str:
    """The field with the number of experts of every layer; "" where it lists one for each."""
    name = next((name for name in NUM_EXPERTS_FIELDS if config.model_config.get(name) is not None), "")
    return "" if isinstance(config.model_config.get(name), list) else name


def _difference(found: ExpertTensors, numbers: set[int], field: str, is_complete: bool) -> tuple[str, str] | None:
    """What is wrong with a layer's experts, and the remedy; None where nothing is.

    Args:
        found: what the files hold.
        numbers: those that they hold by the config.
        field: see `_field`.
        is_complete: see `check_expert_counts`.
    """
    expected, others = len(numbers), "Fetch the files that belong to this config"
    if other := next((count for count in sorted(found.counts) if count != expected), None):
        rule = f"a tensor of the files holds {_experts(other)}, and the config says {expected}: vLLM would not load it"
        return rule, _or_set(others, field, other)
    if not found.numbers:
        return None
    held = f"the files hold {_experts(len(found.numbers))}, and the config says {expected}"
    more, fewer = sorted(found.numbers - numbers), sorted(numbers - found.numbers)
    if more:
        rule = f"{held}: vLLM would not load {_numbered(more)}"
        return rule, _or_set(others, "" if fewer else field, len(found.numbers))
    if fewer and is_complete:
        front = found.numbers == {*range(len(found.numbers))}
        return f"{held}: they lack {_numbered(fewer)}", _or_set(others, field if front else "", len(found.numbers))
    return None


def _or_set(remedy: str, field: str, count: int) -> str:
    return f"{remedy}, or set {field} to {count} where the routers have as many rows" if field else remedy


def _experts(count: int) -> str:
    return "1 expert" if count == 1 else f"{count} experts"


def _numbered(numbers: list[int]) -> str:
    return f"expert{'s' if len(numbers) > 1 else ''} {shortened(index_ranges(numbers))}"
