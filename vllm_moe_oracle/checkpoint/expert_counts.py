"""Compares how many experts a checkpoint's files hold of each layer with its config: `check_expert_counts`.

vLLM's loaders skip experts beyond the config's number, or end with an error that names none, and leave the memory of
experts that the files lack as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import DamagedCheckpointError, shortened
from .files import CheckpointFiles
from .layer_names import ExpertLayer, compact_layer_names, index_ranges
from .model_fields import NUM_EXPERTS_FIELDS
from .tensor_headers import INDEX_NAME, ExpertTensors, has_all_files, holds_no_experts, indexed_names, missing_files

_FETCH = "Fetch the files that belong to this config"


def check_expert_counts(
    config: CheckpointFiles, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> list[str]:
    """Refuses files that hold other experts than the config says.

    Files that may hold the model's experts under unknown names are not judged; see `absent_layers`. Where a file of the
    index is missing, the experts that the others lack may be in it.

    Args:
        config: the checkpoint's.
        layers: all layers with experts. Two kinds of experts may share a name in files (`LayerNames.file_modules`).
        found: what the files hold, by name of the module in files.

    Returns:
        A note for each kind of difference in layers for multi-token prediction.

    Raises:
        DamagedCheckpointError: of some other layers the files hold experts that the config does not count, or lack some
            of those that it counts.
    """
    if config.folder is None or not layers:
        return []
    absences = _check_absences(config, config.folder, layers, found)
    said = []
    for (rule, remedy), differing in _differences(config, config.folder, layers, found).items():
        if loaded := [layer.name for layer in differing if not layer.is_mtp]:
            raise DamagedCheckpointError(rule, remedy, f"{config.path}, {compact_layer_names(loaded)}")
        names = compact_layer_names(layer.name for layer in differing)
        said.append(f"{names}: {rule}, where speculative decoding uses these layers. {remedy}")
    return [*said, *absences]


def layer_errors(
    config: CheckpointFiles, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> dict[str, DamagedCheckpointError]:
    """What `check_expert_counts` refuses, of every layer, by vLLM's name; without multi-token prediction modules.

    Arguments are those of `check_expert_counts`.
    """
    if config.folder is None:
        return {}
    errors: dict[str, DamagedCheckpointError] = {}
    for (rule, remedy), differing in _differences(config, config.folder, layers, found).items():
        names = [layer.name for layer in differing if not layer.is_mtp]
        where = f"{config.path}, {compact_layer_names(names)}"
        errors |= dict.fromkeys(names, DamagedCheckpointError(rule, remedy, where))
    if absence := absence_error(config, layers, found):
        errors |= {layer.name: absence for layer in absent_layers(config, layers, found) if not layer.is_mtp}
    return errors


def _differences(
    config: CheckpointFiles, folder: Path, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> dict[tuple[str, str], list[ExpertLayer]]:
    """Layers of which the files hold other experts than the config says, by what is wrong and the remedy."""
    is_complete = has_all_files(folder)
    by_module: dict[str, dict[int, ExpertLayer]] = {}
    for layer in layers:
        for module, first in layer.names.modules_in_files():
            if module in found:
                by_module.setdefault(module, {})[first] = layer
    wrong: dict[str, tuple[str, str] | None] = {}
    judged: dict[ExpertLayer, list[str]] = {}
    for module, sharing in by_module.items():
        checked = next((layer for layer in sharing.values() if layer.is_quantized), None)
        if checked is None or not all(layer.num_experts for layer in sharing.values()):
            continue
        numbers = {first + index for first, layer in sharing.items() for index in range(layer.num_experts)}
        field = _field(config) if len(sharing) == 1 else ""
        wrong[module] = _difference(found[module], numbers, field, is_complete)
        judged.setdefault(checked, []).append(module)
    words: dict[tuple[str, str], list[ExpertLayer]] = {}
    apart: dict[tuple[int, str], list[tuple[ExpertLayer, str, str]]] = {}
    for layer, modules in judged.items():
        # A layer may be whole under several names; of those that lack experts, the fullest is its own.
        own = max(modules, key=lambda each: (wrong[each] is None, found[each].size) if found[each].size else (False, 0))
        if other := next((each for each in modules if each != own and wrong[each]), ""):
            held = _numbered(sorted(found[other].numbers)) if found[other].numbers else "others"
            apart.setdefault((found[own].size, held), []).append((layer, own, other))
        elif difference := wrong[own]:
            words.setdefault(difference, []).append(layer)
    for (size, held), differing in apart.items():
        its = shortened(compact_layer_names(name for _, name, _ in differing))
        others = shortened(compact_layer_names(name for _, _, name in differing))
        rule = f"the files hold {_experts(size)} under {its}, and {held} under {others}"
        rule += ": vLLM's loaders read a layer's experts under one name"
        words[rule, f"{_FETCH}, or leave a layer one name in them"] = [layer for layer, _, _ in differing]
    return words


def missing_files_note(config: CheckpointFiles) -> str:
    """Which files of its index a checkpoint's folder lacks, and what a server does then; "" where it has them all.

    Raises:
        CheckpointError: as by `indexed_names`.
    """
    if config.folder is None or not (missing := missing_files(config.folder)):
        return ""
    effect = "a server fetches them first" if config.is_cached else "a server does not start before they are"
    rule = f"{len(missing)} of {len(indexed_names(config.folder) or ())} files of {INDEX_NAME} are not here"
    return f"{rule}, such as {shortened(missing[0])}: {effect}. The answer is by the config"


def _check_absences(
    config: CheckpointFiles, folder: Path, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> list[str]:
    """Refuses layers of which the files hold no expert, and returns a note on those for multi-token prediction; nothing
    where files of the index are missing.

    Raises:
        DamagedCheckpointError: there are such layers.
    """
    if missing_files(folder):
        return []
    if error := absence_error(config, layers, found):
        raise error
    drafts = [layer.name for layer in absent_layers(config, layers, found) if layer.is_mtp]
    rule = "the files hold none of their experts: speculative decoding with these layers has nothing to load"
    return [f"{compact_layer_names(drafts)}: {rule}"] if drafts else []


def absent_layers(
    config: CheckpointFiles, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> list[ExpertLayer]:
    """The layers of which files hold no expert. Files that hold none of the model itself are not judged if a tensor may
    be an expert's: a folder may have its layers for multi-token prediction alone, and all names may be unknown.

    Arguments are those of `check_expert_counts`.
    """
    held = {layer: any(name in found for name, _ in layer.names.modules_in_files()) for layer in layers}
    if not any(is_held for layer, is_held in held.items() if not layer.is_mtp):
        is_judged = held and not found and config.folder is not None and holds_no_experts(config.folder)
        if not is_judged:
            return []
    return [layer for layer, is_held in held.items() if not is_held and layer.is_quantized]


def absence_error(
    config: CheckpointFiles, layers: Sequence[ExpertLayer], found: Mapping[str, ExpertTensors]
) -> DamagedCheckpointError | None:
    """Why the files cannot be served, if they hold no expert of a layer: vLLM may take it for an unquantized one, and
    serves what its memory holds. None if they hold some of each layer, but for multi-token prediction.

    Arguments are those of `check_expert_counts`.
    """
    absent = {layer.name for layer in absent_layers(config, layers, found) if not layer.is_mtp}
    if not absent or config.folder is None:
        return None
    names = [layer.name for layer in layers if not layer.is_mtp]
    held = [name for name in names if name not in absent]
    rule = f"the files hold no expert of {len(absent)} of {len(names)} MoE layers"
    rule += f", and those of {compact_layer_names(held)}" if held else ""
    where = f"{config.path}, {compact_layer_names([name for name in names if name in absent])}"
    return DamagedCheckpointError(rule, _remedy_of_absence(config.folder), where)


def _remedy_of_absence(folder: Path) -> str:
    """What to do about experts that no file which vLLM reads holds."""
    own = {path.name for path in folder.glob("*.safetensors")}
    indexed = indexed_names(folder)
    if missing := [name for name in indexed or () if name not in own]:
        return f"Fetch {shortened(', '.join(missing))}: {INDEX_NAME} names what the folder lacks"
    if indexed is not None and (others := sorted(own.difference(indexed))):
        rule = f"{INDEX_NAME} does not name {shortened(', '.join(others))}, which vLLM does not read then"
        return f"{rule}. Fetch it again, or remove it where all files of the folder belong to the model"
    return _FETCH if has_all_files(folder) else "Fetch the files that are missing"


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
        is_complete: all files are there. Where one is missing, experts may be in it.
    """
    expected, others = len(numbers), _FETCH
    if other := next((count for count in sorted(found.counts) if count != expected), None):
        rule = f"a tensor of the files holds {_experts(other)}, and the config says {expected}: vLLM would not load it"
        return rule, _or_set(others, field, other)
    if not found.numbers:
        return None
    if found.quantized and (plain := sorted(found.numbers - found.quantized)):
        rule = f"the files hold {_numbered(plain)} in 16 bits, and others of the layer quantized"
        return rule, "vLLM takes one format for all experts of a layer: quantize all of them, or none"
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
