"""The storage of a layer's experts according to a quantization config, and the names under which it lists them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.problem import Scheme
from ..errors import CheckpointError

GATED_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's matrices in checkpoints, by convention: gate, up, down."""

UNGATED_PROJECTIONS = (("up_proj", "down_proj"), ("w1", "w2"))
"""Names of the matrices of an expert without a gate, by convention: up, down."""

LINEAR_LAYER = "model.layers.0.self_attn.o_proj"
"""A linear layer that nearly every model has, and vLLM fuses with no other."""

NUMBERED_PROJECTION_MODELS = frozenset(
    {"deepseek_v4", "deepseek_v41", "kimi_k3", "kimi_linear", "lfm2_moe", "minimax_m2", "minimax_m3",
     "minimax_m3_text", "mixtral", "phimoe"}
)  # fmt: skip
"""Models (``model_type``) whose checkpoints follow the second convention. vLLM's weight loaders of these models look
for these names."""


@dataclass(frozen=True, slots=True)
class UnsupportedFormat:
    """A format that this package does not read; vLLM may.

    Attributes:
        format: its name, as the checkpoint writes it.
        first_release: the first release of vLLM that loads experts in it; "" for every supported one.
    """

    format: str
    first_release: str = ""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of one layer's experts.

    Attributes:
        modules: names of the experts' module: vLLM's first, then those that checkpoints use.
        projections: names of one expert's matrices, one tuple for each convention.
        checkpoint_projections: the convention that the checkpoint follows; empty when unknown.
        requested_projections: names by which vLLM looks an expert's matrices up in a compressed-tensors config: those
            for integers, then those for other formats; empty when they are `checkpoint_projections`.
        file_modules: further names of the module in the checkpoint's files, which no quantization config uses, each
            with the number that the files give to the layer's first expert.
        num_experts: the number of experts; 0 where it is not known.
        transposed_router: the files hold the layer's router as `[hidden, experts]`, and vLLM's loader transposes it.
    """

    modules: tuple[str, ...]
    projections: tuple[tuple[str, ...], ...]
    checkpoint_projections: tuple[str, ...] = ()
    requested_projections: tuple[tuple[str, ...], ...] = ()
    file_modules: tuple[tuple[str, int], ...] = ()
    num_experts: int = 0
    transposed_router: bool = False

    def modules_in_files(self) -> tuple[tuple[str, int], ...]:
        """Names that the module may have in the checkpoint's files, and the number of its first expert there."""
        return tuple((module, 0) for module in self.modules) + self.file_modules

    def conventions(self) -> tuple[tuple[str, ...], ...]:
        """The conventions that the checkpoint may follow."""
        return (self.checkpoint_projections,) if self.checkpoint_projections else self.projections

    def with_projections(self, convention: tuple[str, ...]) -> LayerNames:
        """The same layer, with matrices of these names only."""
        return replace(self, projections=(convention,), checkpoint_projections=convention, requested_projections=())

    def matrix_names(self, convention: tuple[str, ...] = (), expert: int = 0) -> Iterable[tuple[str, ...]]:
        """The full names of an expert's matrices, for each name of the module.

        Args:
            convention: names of the matrices; empty for every convention, fused matrices included.
            expert: the expert's number.
        """
        for module in self.modules:
            if not convention:
                yield (f"{module}.gate_up_proj", f"{module}.down_proj")
            for names in (convention,) if convention else self.projections:
                yield tuple(f"{module}.{expert}.{name}" for name in names)

    def for_pattern(self, entry: str) -> LayerNames:
        """The names that an expression or wildcard is compared with: not those that begin otherwise than vLLM's, unless
        the entry begins as they do. vLLM's mapper replaces such a beginning, and compares with its own names.

        Args:
            entry: the expression or wildcard, in a field whose names vLLM maps.
        """
        roots = [module.partition("layers.")[0] for module in self.modules]
        same = [root == roots[0] or entry.startswith(root) for root in roots]
        return replace(self, modules=tuple(itertools.compress(self.modules, same)))

    def matches(self, predicate: Callable[[str], bool], expert: int = 0) -> bool:
        """Whether a predicate over names holds for the module, or for every matrix of an expert, given by number."""
        if any(map(predicate, self.modules)):
            return True
        return any(all(map(predicate, names)) for names in self.matrix_names(expert=expert))


ExpertFormat = Scheme | UnsupportedFormat | None
"""How experts are stored; None: in the model's own dtype."""

FormatLookup = Callable[[LayerNames], ExpertFormat]
"""The format of a layer's experts, by the layer's names."""

Parser = Callable[[Mapping[str, Any], str], FormatLookup]
"""Parses a quantization config. Arguments: the config, and its file and field for messages."""


@dataclass(frozen=True, slots=True)
class QuantConfigFormat:
    """One family of quantization configs. A module of this package declares its own as `FORMAT`.

    Attributes:
        parsers: the parser of each ``quant_method``, as vLLM spells it.
        notes: what a user should know about a config that was parsed, one sentence each.
        vllm_method: vLLM's name for the quantization of a config, by the config and its ``quant_method``.
        aliases: names that vLLM's ``--quantization`` takes for a checkpoint besides vLLM's own name for it. Not every
            release takes all of them.
        refused_linear: why vLLM refuses a model's linear layers in the format, as far as a config that was parsed says;
            "" where it does not.
        module_list: the field of a config that names modules, and that vLLM fills by the types of the checkpoint's
            tensors where it names none; "" for no such field.
        expert_biases: experts may have biases that only the checkpoint's tensors declare.
        first_releases: the first release of vLLM that loads experts of a scheme, by vLLM's name for the quantization
            and the scheme's name. What is not listed every supported release loads.
    """

    parsers: Mapping[str, Parser]
    notes: Callable[[Mapping[str, Any], str], Iterable[str]] = lambda config, where: ()
    vllm_method: Callable[[Mapping[str, Any], str], str] = lambda config, method: method
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused_linear: Callable[[Mapping[str, Any], str], str] = lambda config, where: ""
    module_list: str = ""
    expert_biases: bool = False
    first_releases: Mapping[tuple[str, str], str] = field(default_factory=dict)


class Unlisted:
    """The result for a matrix that no entry of a config names."""


UNLISTED = Unlisted()


def shared_format(
    layer: LayerNames,
    lookup: Callable[[str], ExpertFormat | Unlisted],
    default: ExpertFormat,
    where: str,
    expert: int = 0,
) -> ExpertFormat:
    """The format of all matrices of an expert.

    Args:
        layer: the layer's names.
        lookup: the format that the config's entries give a matrix, by the matrix's full name.
        default: the format of matrices that no entry names.
        where: file and field, for messages.
        expert: the expert's number.

    Raises:
        CheckpointError: entries give matrices of the expert different formats.
    """
    named = (layer.matrix_names(convention, expert) for convention in layer.conventions())
    for alternatives in zip(*named, strict=True):
        conflicts = []
        for names in alternatives:
            listed = [lookup(name) for name in names]
            formats = [default if isinstance(each, Unlisted) else each for each in listed]
            if any(each != formats[0] for each in formats):
                conflicts.append(zip(names, formats, strict=True))
            elif not any(isinstance(each, Unlisted) for each in listed):
                return formats[0]
        # Where the convention is unknown, an entry that matches names of only one convention decides nothing.
        if len(conflicts) == len(alternatives):
            words = "; ".join(f"{name.rpartition('.')[2]}: {describe_format(each)}" for name, each in conflicts[0])
            rule = f"the matrices of one layer's experts are stored differently ({words})"
            raise CheckpointError(rule, "vLLM's kernels take one format for a layer", f"{where}, {layer.modules[0]}")
    for names in layer.matrix_names(expert=expert):
        listed = [lookup(name) for name in names]
        if not isinstance(listed[0], Unlisted) and all(each == listed[0] for each in listed):
            return listed[0]
    return default


def describe_format(found: ExpertFormat) -> str:
    """A format in words, for a message."""
    if found is None:
        return "not quantized"
    return found.format if isinstance(found, UnsupportedFormat) else str(found)
