"""llm-compressor's configs, as the library compressed-tensors writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..core.patterns import MatchBudget, PatternList
from ..core.problem import MX_BLOCK, ActivationPrecision, ActOrder, Scheme, mx_scheme
from ..errors import CheckpointError, DeploymentError, short_repr, shortened
from ..releases import min_versions
from .fields import read_boolean, read_config_groups, read_integer, read_names, read_string, reject_nulls
from .single_experts import ExpertEntries, same_for_all
from .types import (
    UNLISTED,
    ExpertFormat,
    FormatLookup,
    LayerNames,
    QuantConfigFormat,
    Unlisted,
    UnsupportedFormat,
    shared_format,
)


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """Groups of targets, each with the format of its weights and inputs.

    A name in ``ignore`` or ``targets`` is a module's full name, or a regular expression after ``re:`` that matches from
    the start. vLLM maps full names to its own, and matches expressions as they are with its own names. It looks up the
    names of an expert's matrices, and the first target that matches counts. So an entry that names the experts' module
    alone has no effect, and neither has one for names that vLLM does not look up (`LayerNames.requested_projections`).
    Where no name matches, the first target counts that means the class of the layer (`_target_of_class`); ``Linear``
    includes experts. A target in two groups belongs to the later one.
    """
    _reject_sparsity(config, where)
    reject_nulls(config, ("config_groups", "format"), where)
    budget = MatchBudget(where)
    left = read_names(config, ("ignore",), where)
    ignored = _first_match(left, budget)
    formats: dict[str, ExpertFormat] = {}
    for group in read_config_groups(config, where):
        _check_group(group, where)
        found = group_format(group, config.get("format"), where)
        formats |= dict.fromkeys(read_names(group, ("targets",), where), found)
    target_of = _first_match(formats, budget)
    transforms = online_transforms(config, where, budget)
    default = formats.get(_target_of_class(formats, target_of))

    meanings: dict[str, ExpertFormat] = dict.fromkeys(left)  # which go before
    meanings |= {target: found for target, found in formats.items() if target not in meanings}
    singles = ExpertEntries(
        {entry: found for entry, found in meanings.items() if not entry.startswith("re:")},
        {entry[3:]: found for entry, found in meanings.items() if entry.startswith("re:")},
        budget,
    )

    def stored(layer: LayerNames, expert: int) -> ExpertFormat:
        @cache
        def projection_format(projection: str) -> ExpertFormat | Unlisted:
            names = [f"{module}.{expert}.{projection}" for module in layer.modules]
            if ignored(names) is not None:
                return None
            target = target_of(names)
            return UNLISTED if target is None else formats[target]

        def matrix_format(name: str) -> ExpertFormat | Unlisted:
            parent, _, projection = name.rpartition(".")
            # vLLM never looks up a matrix of all experts together.
            return projection_format(projection) if parent.endswith(f".{expert}") else UNLISTED

        for names in layer.requested_projections[:-1]:
            try:
                found = shared_format(layer.with_projections(names), matrix_format, default, where, expert)
            except CheckpointError:
                continue  # integers are alike in all matrices of a layer
            if isinstance(found, Scheme) and found.name == "wna16":
                return found
        if layer.requested_projections:
            layer = layer.with_projections(layer.requested_projections[-1])
        return shared_format(layer, matrix_format, default, where, expert)

    def lookup(layer: LayerNames) -> ExpertFormat:
        found = same_for_all(layer, partial(stored, layer), singles, where, looks_up_first=True)
        if isinstance(found, Scheme) and transforms:
            projections = [name for names in layer.requested_projections or layer.conventions() for name in names]
            # vLLM maps no names in transforms.
            reject_transforms(transforms, [f"{layer.modules[0]}.0.{name}" for name in projections], where)
        return found

    return lookup


def _check_group(group: Mapping[str, Any], where: str) -> None:
    """Refuses a group at which vLLM's reader fails."""
    if missing := [name for name in ("targets", "weights") if group.get(name) is None]:
        rule = f"config_groups: a group has no {' and no '.join(missing)}: vLLM refuses that"
        raise CheckpointError(rule, "Take the group out; to leave modules as they are, add them to ignore", where)


def _reject_sparsity(config: Mapping[str, Any], where: str) -> None:
    """Refuses a config with sparse weights, for which every supported release of vLLM raises."""
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        rule = f"sparsity_config is for {short_repr(sparsity['targets'])}: vLLM reads no sparse weights"
        raise CheckpointError(rule, "Serve a checkpoint without sparsity_config", where)


Transform = tuple[str, Callable[[Iterable[str]], bool]]
"""A transform's name, and whether it is for a matrix with one of some names."""


def online_transforms(config: Mapping[str, Any], where: str, budget: MatchBudget | None = None) -> list[Transform]:
    """What a checkpoint wants done to the inputs or outputs of linear layers while it runs (``transform_config``);
    what is done to weights alone is done when it is written.

    Args:
        config: the quantization config.
        where: file and field, for messages.
        budget: the time of the config's expressions; None for one of these fields alone.

    Raises:
        CheckpointError: it is not what compressed-tensors writes.
    """
    budget = budget or MatchBudget(where)
    groups = _read_object(_read_object(config, "transform_config", where), "config_groups", where)
    found: list[Transform] = []
    for name in groups:
        parts = _read_object(groups, name, where).get("apply") or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            rule = f"transform_config: apply of {short_repr(name)} is {short_repr(parts)}, not a list of objects"
            raise CheckpointError(rule, where=where)
        for part in parts:
            if read_string(part, "location", where) in ("input", "output"):
                fields = {
                    field: [part[field]] if isinstance(part.get(field), str) else part.get(field)
                    for field in _TARGET_FIELDS
                }
                targets, ignored = (read_names(fields, (field,), where) for field in _TARGET_FIELDS)
                found.append((name, _transform_matcher(targets, ignored, budget)))
    return found


def _read_object(fields: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The object in a field; empty if the field is missing or empty."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"transform_config: {short_repr(name)} is {short_repr(value)}, not an object", where=where
        )
    return value


_TARGET_FIELDS = ("targets", "ignore")


def _transform_matcher(targets: list[str], ignored: list[str], budget: MatchBudget) -> Callable[[Iterable[str]], bool]:
    meant, left = _first_match(targets, budget), _first_match(ignored, budget)
    every = "Linear" in targets
    return lambda names: any((every or meant((name,))) and not left((name,)) for name in names)


def reject_transforms(transforms: list[Transform], names: Iterable[str], where: str) -> None:
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
            rule = f"the transform {short_repr(transform)} is for inputs or outputs of experts, where vLLM has none"
            raise CheckpointError(rule, "Serve a checkpoint without it", f"{where}.transform_config, {names[0]}")


_EXPERTS_CLASS = "RoutedExperts"
"""vLLM's class of a MoE layer."""


def _target_of_class(targets: Iterable[str], target_of: Callable[[Iterable[str]], str | None]) -> str:
    """The first target that vLLM finds for the class of a MoE layer: an expression that matches its name, or a part of
    it; else ``Linear``."""
    order = list(targets)
    parts = (each for each in order if not each.startswith("re:") and each.lower() in _EXPERTS_CLASS.lower())
    found = [each for each in (target_of((_EXPERTS_CLASS,)), next(parts, None)) if each is not None]
    return min(found, key=order.index, default="Linear")


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """Notes for the user about a config that `parse_config` accepted, one sentence each."""
    if not any(read_names(group, ("targets",), where) for group in read_config_groups(config, where)):
        yield f"{where}: config_groups is missing or empty: vLLM takes no layer for quantized"
    entries = {"ignore": read_names(config, ("ignore",), where)}
    entries["targets"] = [
        name for group in read_config_groups(config, where) for name in read_names(group, ("targets",), where)
    ]
    for field, names in entries.items():
        for name in names:
            if field == "targets" and name.lower() in _EXPERTS_CLASS.lower():
                continue
            if not name.startswith("re:") and name.rpartition(".")[2] == "experts":
                rule = "vLLM looks up the names of experts' matrices, not of their module"
                yield f"{where}.{field}: {short_repr(name)} has no effect: {rule}"


def _first_match(entries: Iterable[str], budget: MatchBudget) -> Callable[[Iterable[str]], str | None]:
    """A function that gives the first entry that matches one of a matrix's names, vLLM's before a checkpoint's; None
    when none does. Expressions are for vLLM's name alone."""
    positions = {entry: position for position, entry in enumerate(dict.fromkeys(entries))}
    expressions = [entry for entry in positions if entry.startswith("re:")]
    patterns = PatternList([entry[3:] for entry in expressions], budget)

    def first(names: Iterable[str]) -> str | None:
        names = tuple(names)
        budget.check(names[0] if names else "")
        found = [name for name in names if name in positions]
        if (matching := patterns.first(names[:1])) is not None:
            found.append(expressions[matching])
        return min(found, key=positions.__getitem__, default=None)

    return first


@dataclass(frozen=True, slots=True)
class _Args:
    """``weights`` or ``input_activations`` of a config group, with the defaults of the library's `QuantizationArgs`.

    Attributes:
        type: ``int`` or ``float``.
        bits: bits of a number.
        strategy: ``tensor``, ``channel``, ``group`` or another word of the library.
        implied_strategy: the strategy that the group size implies.
        group_size: numbers that share a scale; -1 for a whole row, None when not set.
        symmetric: there are no zero points.
        dynamic: as written: true for numbers that are quantized while the model runs.
        scale_dtype: as written, without ``torch.``; "" when not set.
    """

    type: str
    bits: int
    strategy: str
    implied_strategy: str
    group_size: int | None
    symmetric: bool
    dynamic: object
    scale_dtype: str

    @classmethod
    def read(cls, part: object, name: str, where: str) -> _Args:
        """Reads a part of a group.

        Args:
            part: the part.
            name: its name.
            where: file and field, for messages.

        Raises:
            CheckpointError: it is no object, a field has an invalid value or is null, or groups have no size.
        """
        if not isinstance(part, Mapping):
            raise CheckpointError(f"config_groups: {name} is {short_repr(part)}, not an object", where=where)
        place = f"{where}, config_groups, {name}"
        reject_nulls(part, ("num_bits", "type", "symmetric", "dynamic"), place)
        part = _as_validated(part)
        strategy, size = read_string(part, "strategy", where), part.get("group_size")
        if strategy == "group" and size is None:
            raise CheckpointError("strategy group has no group_size", "State how many weights share a scale", place)
        if size == 0 and strategy not in ("", "group", "tensor_group"):  # the library takes it for none
            size = None
        elif size is not None:
            size = read_integer(part, "group_size", where)
        implied = {None: "tensor", -1: "channel"}.get(size, "group")
        scales = part.get("scale_dtype")
        return cls(
            type=read_string(part, "type", where) or "int",
            bits=read_integer(part, "num_bits", where, default=8),
            strategy=strategy or implied,
            implied_strategy=implied,
            group_size=size,
            symmetric=read_boolean(part, "symmetric", where, default=True),
            dynamic=part.get("dynamic", False),
            scale_dtype="" if scales is None else str(scales).removeprefix("torch."),
        )

    def __str__(self) -> str:
        how = "static" if self.dynamic is False else f"dynamic {short_repr(self.dynamic)}"
        sign = "" if self.symmetric else "asymmetric "
        words = f"{sign}{self.bits}-bit {self.type}, strategy {self.strategy}, group_size {self.group_size}, {how}"
        return f"{words}, scale_dtype {self.scale_dtype or None}"


_BOOLEANS: dict[object, bool] = dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True)
_BOOLEANS |= dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False)
_WHOLE_NUMBER = re.compile(r"\s*\+?(\d{1,6})(?:\.0+)?\s*", re.ASCII)


def _as_validated(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part with integers and booleans as the library's model (pydantic) makes them of other values: 8 of 8.0 and
    "8", true of 1 and "yes". Sizes of groups it compares with -1 first, and fails at a string; a string in ``dynamic``
    is a word. What it refuses stays as it is."""
    found = dict(part)
    for name in ("num_bits", "group_size"):
        if isinstance(value := part.get(name), float) and value.is_integer():
            found[name] = int(value)
    bits, symmetric, dynamic = (part.get(name) for name in ("num_bits", "symmetric", "dynamic"))
    if isinstance(bits, str) and (match := _WHOLE_NUMBER.fullmatch(bits)):
        found["num_bits"] = int(match[1])
    if isinstance(symmetric, str | int | float):
        word = symmetric.lower() if isinstance(symmetric, str) else symmetric
        found["symmetric"] = _BOOLEANS.get(word, symmetric)
    if isinstance(dynamic, int | float):
        found["dynamic"] = _BOOLEANS.get(dynamic, dynamic)
    return found


def group_format(group: Mapping[str, Any], common_layout: object, where: str) -> ExpertFormat:
    """The format of a group's targets.

    Args:
        group: one of ``config_groups``: ``weights`` and ``input_activations`` are `QuantizationArgs` as JSON has them,
            or missing; ``format`` may be.
        common_layout: the config's ``format``, for a group without its own.
        where: file and field, for messages.

    Raises:
        CheckpointError: a field has an invalid value, or fields contradict each other.
    """
    if group.get("weights") is None:
        return None
    weights = _Args.read(group["weights"], "weights", where)
    declared = group.get("input_activations")
    inputs = _Args.read(declared, "input_activations", where) if declared else None
    layout = str(group.get("format") or common_layout or "")
    if _is_mx(weights, layout):
        return _mx_format(weights, inputs, layout)
    weight_only = inputs is None and not weights.dynamic
    integers = weights.type == "int" and weights.bits in (4, 8) and weights.strategy in ("group", "channel")
    if integers and weight_only and layout in COMPRESSED_PACKINGS:
        return _integer_format(weights, layout, group["weights"].get("actorder"), where)
    words = f"{layout or 'compressed-tensors'} {weights.bits}-bit {weights.type} strategy {weights.strategy}"
    if weight_only and weights.type == "int" and weights.strategy in ("group", "channel"):
        return UnsupportedFormat(shortened(words), _first_release_of_width(weights, layout, where))
    if inputs is not None:
        words += f" with inputs in {inputs.bits}-bit {inputs.type} strategy {inputs.strategy}"
    return UnsupportedFormat(shortened(words))


_PACKED = "pack-quantized"
_WIDTHS = range(2, 9)
"""Widths of integers for which vLLM has a type, from `min_versions.COMPRESSED_LOW_BITS` on."""


def _first_release_of_width(args: _Args, layout: str, where: str) -> str:
    """The first release of vLLM that has experts in integers of another width than 4 and 8 bits.

    Raises:
        DeploymentError: none has them so.
    """
    if layout != _PACKED or args.bits not in _WIDTHS:
        rule = f"experts in {args.bits}-bit integers in the format {layout or 'of no name'}: vLLM refuses them"
        remedy = f"Quantize again with {_WIDTHS[0]} to {_WIDTHS[-1]} bits in the format {_PACKED}"
        raise DeploymentError(rule, remedy, where)
    return min_versions.COMPRESSED_LOW_BITS if args.symmetric else min_versions.COMPRESSED_LOW_BITS_ZERO_POINTS


def _is_mx(args: _Args, layout: str) -> bool:
    """Whether weights are in an MX format: groups of 32 with e8m0 scales."""
    if (args.type, args.strategy, args.group_size, args.symmetric) != ("float", "group", MX_BLOCK, True):
        return False
    # float8 in groups of 32 with other scales is not MX. vLLM has no other scales for 4 bits. The format's name is
    # enough where a release left the type of the scales out.
    is_e8m0 = args.scale_dtype == _E8M0 or (not args.scale_dtype and layout == "mxfp8-quantized")
    return args.bits == 4 or (args.bits == 8 and is_e8m0)


_E8M0 = "uint8"


def _mx_format(args: _Args, inputs: _Args | None, layout: str) -> ExpertFormat:
    activations = _activation_precision(inputs)
    if activations is None:
        return UnsupportedFormat(f"{layout or 'compressed-tensors'} {args.bits}-bit float with inputs in {inputs}")
    return mx_scheme("mxfp4" if args.bits == 4 else "mxfp8", "compressed-tensors", activations)


def _integer_format(args: _Args, layout: str, actorder: object, where: str) -> Scheme:
    """The scheme of packed integers.

    Raises:
        CheckpointError: the strategy contradicts the group size or the act order.
    """
    act_order = compressed_act_order(actorder, where)
    needs_group = args.implied_strategy == "tensor" and args.strategy == "group"
    if args.implied_strategy not in (args.strategy, "tensor") or needs_group:
        rule = f"config_groups: strategy {args.strategy} with group_size {args.group_size}"
        raise CheckpointError(rule, where=where)
    if act_order == "group" and args.strategy == "channel":
        raise CheckpointError(f"config_groups: strategy channel with actorder {actorder}", where=where)
    packing = COMPRESSED_PACKINGS[layout]
    return Scheme("wna16", args.bits, args.group_size or -1, packing, not args.symmetric, act_order)


COMPRESSED_PACKINGS = {
    "pack-quantized": "compressed-tensors",
    "int-quantized": "compressed-tensors-int",
    "naive-quantized": "compressed-tensors-int",
}
"""The scheme's word for how integers are packed, by the format that compressed-tensors names."""


def compressed_act_order(actorder: object, where: str) -> ActOrder:
    """The order of input features that a compressed-tensors config declares (its `ActivationOrdering`).

    Raises:
        CheckpointError: the word is not one of compressed-tensors' orders.
    """
    orders: dict[object, ActOrder] = {None: "none", False: "none", "group": "group", "dynamic": "group", True: "group"}
    orders |= {"static": "static", "weight": "static"}
    word = actorder.lower() if isinstance(actorder, str) else actorder
    found = orders.get(word) if word is None or isinstance(word, str | bool) else None
    if found is None:
        raise CheckpointError(f"config_groups: unknown actorder {short_repr(actorder)}", where=where)
    return found


def _activation_precision(inputs: _Args | None) -> ActivationPrecision | None:
    """Precision of activations that a group declares beside weights in MX formats; None where no backend computes so.

    Known are floats, symmetric and quantized while the model runs: 8 bits with a scale for each token, or for 128
    features of it; MXFP8 and MXFP4, whose scales for 32 features are e8m0, which a config may leave unsaid.
    """
    if inputs is None:
        return "16bit"
    if inputs.type != "float" or inputs.dynamic is not True or not inputs.symmetric:
        return None
    if inputs.strategy == "group" and inputs.group_size == MX_BLOCK and inputs.scale_dtype in ("", _E8M0):
        return "mxfp4" if inputs.bits == 4 else "mxfp8" if inputs.bits == 8 else None
    if inputs.bits != 8 or inputs.scale_dtype == _E8M0:
        return None
    by_128 = (inputs.strategy, inputs.group_size) == ("group", 128)
    return "fp8_token" if inputs.strategy == "token" else "fp8" if by_128 else None


FORMAT = QuantConfigFormat({"compressed-tensors": parse_config}, notes)
