"""llm-compressor's configs, as the library compressed-tensors writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..expressions import Expression
from ..oracle.problem import MX_BLOCK, ActivationPrecision, ActOrder, Scheme
from .answers import UNNAMED, Answer, Foreign, LayerNames, SchemeOf, Unnamed, in_common
from .fields import read_boolean, read_groups, read_integer, read_names, read_word, shown


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """Groups of targets, each with its weights' and inputs' format.

    A name in ``ignore`` or ``targets`` is a module's full name, or a regular expression after ``re:`` that matches from
    the start; a target may also be a class, and ``Linear`` means experts too. vLLM asks for the names of an expert's
    matrices, of which the first target that matches counts: an entry that names the experts' module alone says nothing,
    and neither does one over names that vLLM does not ask for (`LayerNames.asked`). A target that stands in two groups
    is the later one's.
    """
    ignored = _first(read_names(config, ("ignore",), where), where)
    groups: dict[str, Answer] = {}
    for group in read_groups(config, where):
        scheme = _scheme(group, config.get("format"), where)
        groups |= dict.fromkeys(read_names(group, ("targets",), where), scheme)
    if not groups:
        raise CheckpointError("there are no config_groups", where=where)

    target_of = _first(groups, where)
    transforms = online_transforms(config, where)
    usual = next((groups[name] for name in _CLASSES if name in groups), None)

    def of(layer: LayerNames) -> Answer:
        answer = stored(layer)
        if isinstance(answer, Scheme) and transforms:
            names = layer.asked or ((layer.own,) if layer.own else layer.projections)
            for module in layer.modules:
                refuse_transforms(transforms, [f"{module}.0.{name}" for each in names for name in each], where)
        return answer

    def stored(layer: LayerNames) -> Answer:
        def of_matrix(name: str) -> Answer | Unnamed:
            names = [f"{module}.0.{name.rpartition('.')[2]}" for module in layer.modules]
            if name not in names:
                return UNNAMED  # of all experts together, for which vLLM does not ask
            if ignored(names) is not None:
                return None
            target = target_of(names)
            return UNNAMED if target is None else groups[target]

        for names in layer.asked[:-1]:
            try:
                found = in_common(layer.only(names), of_matrix, usual, where)
            except CheckpointError:
                continue  # no integers, of which all matrices of a layer are alike
            if isinstance(found, Scheme) and found.name == "wna16":
                return found
        return in_common(layer.only(layer.asked[-1]) if layer.asked else layer, of_matrix, usual, where)

    return of


Transform = tuple[str, Callable[[Iterable[str]], bool]]
"""A transform's name, and whether it is for a matrix with one of some names."""


def online_transforms(config: Mapping[str, Any], where: str) -> list[Transform]:
    """What a checkpoint wants done to the inputs or outputs of linear layers while it runs (``transform_config``);
    what is done to weights alone is done when it is written.

    Raises:
        CheckpointError: it is not what compressed-tensors writes.
    """
    groups = _object(_object(config, "transform_config", where), "config_groups", where)
    found: list[Transform] = []
    for name in groups:
        parts = _object(groups, name, where).get("apply") or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            rule = f"transform_config: apply of {shown(name)} is {shown(parts)}, not a list of objects"
            raise CheckpointError(rule, where=where)
        for part in parts:
            if read_word(part, "location", where) in ("input", "output"):
                fields = {
                    field: [part[field]] if isinstance(part.get(field), str) else part.get(field) for field in _TO
                }
                targets, ignored = (read_names(fields, (field,), where) for field in _TO)
                found.append((name, _applies(targets, ignored, where)))
    return found


def _object(fields: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """What stands under a name; empty where that is nothing."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"transform_config: {shown(name)} is {shown(value)}, not an object", where=where)
    return value


_TO = ("targets", "ignore")


def _applies(targets: list[str], ignored: list[str], where: str) -> Callable[[Iterable[str]], bool]:
    meant, left = _first(targets, where), _first(ignored, where)
    every = "Linear" in targets
    return lambda names: any((every or meant((name,))) and not left((name,)) for name in names)


def refuse_transforms(transforms: list[Transform], names: Iterable[str], where: str) -> None:
    """Refuses experts whose inputs or outputs are to be transformed, which nothing in vLLM does.

    Args:
        transforms: from `online_transforms`.
        names: full names of an expert's matrices.
        where: file and field, for messages.

    Raises:
        CheckpointError: a transform is for one of the matrices.
    """
    names = tuple(names)
    for transform, applies in transforms:
        if applies(names):
            rule = f"the transform {shown(transform)} is for inputs or outputs of experts, where vLLM has none"
            raise CheckpointError(rule, "Serve a checkpoint without it", f"{where}.transform_config, {names[0]}")


_CLASSES = ("RoutedExperts", "Linear")
"""Classes that mean experts: vLLM's goes before torch's."""


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What to know of the answers for a config that `reader` took, one sentence each."""
    entries = {"ignore": read_names(config, ("ignore",), where)}
    entries["targets"] = [
        name for group in read_groups(config, where) for name in read_names(group, ("targets",), where)
    ]
    for field, names in entries.items():
        for name in names:
            if not name.startswith("re:") and name.rpartition(".")[2] == "experts":
                rule = "vLLM asks for the names of experts' matrices, not for their module's"
                yield f"{where}.{field}: {shown(name)} means nothing: {rule}"


def _first(entries: Iterable[str], where: str) -> Callable[[Iterable[str]], str | None]:
    """The first of the entries that one of the names of a matrix matches."""
    places = {entry: place for place, entry in enumerate(dict.fromkeys(entries))}
    expressions = [(Expression(entry[3:], where), entry) for entry in places if entry.startswith("re:")]

    def first(names: Iterable[str]) -> str | None:
        names = tuple(names)
        found = [name for name in names if name in places]
        found += [entry for expression, entry in expressions if any(map(expression.match, names))][:1]
        return min(found, key=places.__getitem__, default=None)

    return first


def _scheme(group: Mapping[str, Any], common_format: object, where: str) -> Answer:
    """What a group of the config stores; where it leaves something out, the defaults are those of the library's
    `QuantizationArgs`, and so is what contradicts itself."""
    weights, inputs = group.get("weights"), group.get("input_activations") or None
    if weights is None:
        return None
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if part is not None and not isinstance(part, Mapping):
            raise CheckpointError(f"config_groups: {name} is {shown(part)}, not an object", where=where)
    kind, bits = read_word(weights, "type", where) or "int", read_integer(weights, "num_bits", where, default=8)
    strategy, size = read_word(weights, "strategy", where), weights.get("group_size")
    if size == 0 and strategy == "channel":  # which the library takes for none
        size = None
    elif size is not None:
        size = read_integer(weights, "group_size", where)
    usual = {None: "tensor", -1: "channel"}.get(size, "group")
    strategy = strategy or usual
    layout = str(group.get("format") or common_format or "")
    symmetric = read_boolean(weights, "symmetric", where, default=True)
    # A float8 of groups of 32 whose scales are no e8m0 is not MX; 4-bit scales have no other type in vLLM.
    mx = bits == 4 or (bits == 8 and _is_e8m0(weights.get("scale_dtype"), layout))
    if kind == "float" and strategy == "group" and size == MX_BLOCK and symmetric and mx:
        activations = compressed_activations(inputs)
        if activations is None:
            declared = inputs_in_words(inputs or {})
            return Foreign(f"{layout or 'compressed-tensors'} {bits}-bit float with inputs in {declared}")
        return Scheme("mxfp4" if bits == 4 else "mxfp8", bits, MX_BLOCK, "compressed-tensors", activations=activations)
    served = inputs is None and not weights.get("dynamic") and bits in (4, 8) and layout in COMPRESSED_PACKINGS
    if kind == "int" and served and strategy in ("group", "channel"):
        order = compressed_order(weights.get("actorder"), where)
        if usual not in (strategy, "tensor") or (usual == "tensor" and strategy == "group"):
            raise CheckpointError(f"config_groups: strategy {strategy} with group_size {size}", where=where)
        if order == "group" and strategy == "channel":
            raise CheckpointError(f"config_groups: strategy channel with actorder {weights['actorder']}", where=where)
        return Scheme("wna16", bits, size or -1, COMPRESSED_PACKINGS[layout], not symmetric, order)
    words = (layout or "compressed-tensors", f"{bits}-bit {kind}", f"strategy {strategy}")
    return Foreign(" ".join(words))


COMPRESSED_PACKINGS = {
    "pack-quantized": "compressed-tensors",
    "int-quantized": "compressed-tensors-int",
    "naive-quantized": "compressed-tensors-int",
}
"""The scheme's word for how integers are packed, by the format that compressed-tensors names."""


def compressed_order(actorder: object, where: str) -> ActOrder:
    """The order of input features that a compressed-tensors config declares (its `ActivationOrdering`).

    Raises:
        CheckpointError: a word that is none of its.
    """
    orders: dict[object, ActOrder] = {None: "none", False: "none", "group": "group", "dynamic": "group", True: "group"}
    orders |= {"static": "static", "weight": "static"}
    word = actorder.lower() if isinstance(actorder, str) else actorder
    found = orders.get(word) if word is None or isinstance(word, str | bool) else None
    if found is None:
        raise CheckpointError(f"config_groups: unknown actorder {shown(actorder)}", where=where)
    return found


def _is_e8m0(scale_dtype: object, layout: str) -> bool:
    # Either "torch.uint8" or "uint8"; the format's name is enough where a release left the type out.
    return str(scale_dtype).removeprefix("torch.") == "uint8" or (scale_dtype is None and layout == "mxfp8-quantized")


def compressed_activations(inputs: Mapping[str, Any] | None) -> ActivationPrecision | None:
    """Precision of activations that a group of a compressed-tensors config declares beside weights in MX formats.

    Known are floats, symmetric and quantised while the model runs: 8 bits with a scale for each token, or for 128
    features of it; MXFP8 and MXFP4, whose scales for 32 features are e8m0, which a config may leave unsaid.

    Args:
        inputs: its ``input_activations``; None for weights alone.

    Returns:
        None for anything else, of which nothing here computes the very numbers.
    """
    if inputs is None:
        return "16bit"
    kind, bits, strategy, size = _declared(inputs)
    scales = inputs.get("scale_dtype")
    mx = scales is None or _is_e8m0(scales, "")
    if kind != "float" or inputs.get("dynamic") is not True or inputs.get("symmetric", True) is not True:
        return None
    if strategy == "group" and size == MX_BLOCK and mx:
        return "mxfp4" if bits == 4 else "mxfp8" if bits == 8 else None
    if bits != 8 or (scales is not None and mx):
        return None
    return "fp8_token" if strategy == "token" else "fp8" if (strategy, size) == ("group", 128) else None


def inputs_in_words(inputs: Mapping[str, Any]) -> str:
    """What a group's ``input_activations`` declare, for a message."""
    kind, bits, strategy, size = _declared(inputs)
    how = "static" if inputs.get("dynamic", False) is False else f"dynamic {shown(inputs['dynamic'])}"
    scales = str(inputs.get("scale_dtype")).removeprefix("torch.")
    sign = "" if inputs.get("symmetric", True) is True else "asymmetric "
    return f"{sign}{bits}-bit {kind}, strategy {strategy}, group_size {size}, {how}, scale_dtype {scales}"


def _declared(inputs: Mapping[str, Any]) -> tuple[object, object, object, object]:
    """Type, bits, strategy and group size; what is left out is the library's default."""
    kind, bits, strategy, size = (
        getattr(each, "value", each) for each in map(inputs.get, ("type", "num_bits", "strategy", "group_size"))
    )
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    words = (str(kind or "int").lower(), str(strategy or usual).lower())
    return words[0], 8 if bits is None else bits, words[1], size
