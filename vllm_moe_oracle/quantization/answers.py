"""What the experts of a layer may be stored as, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from ..oracle.problem import Scheme

GATED_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
PLAIN_PROJECTIONS = (("up_proj", "down_proj"), ("w1", "w2"))
"""Names of an expert's matrices in checkpoints, by one convention or the other: gate, up, down; and without a gate."""

NUMBERED = frozenset(
    {"deepseek_v4", "deepseek_v41", "kimi_k3", "kimi_linear", "lfm2_moe", "minimax_m2", "minimax_m3",
     "minimax_m3_text", "mixtral", "phimoe"}
)  # fmt: skip
"""Kinds of model (``model_type``) whose checkpoints follow the second convention, by the names that vLLM's loaders of
their weights look for."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format that vLLM may know and this project does not.

    Attributes:
        format: its name as the checkpoint writes it.
    """

    format: str


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What the experts of one layer are called.

    Attributes:
        modules: names of the experts' module: vLLM's first, then those that checkpoints use for the same.
        projections: names of one expert's matrices; one tuple for each convention.
        own: the convention that the checkpoint follows; empty where nobody knows.
        asked: names by which vLLM asks a compressed-tensors config about an expert's matrices: those for integers, then
            those for everything else; empty where they are `own`.
    """

    modules: tuple[str, ...]
    projections: tuple[tuple[str, ...], ...]
    own: tuple[str, ...] = ()
    asked: tuple[tuple[str, ...], ...] = ()

    def only(self, convention: tuple[str, ...]) -> LayerNames:
        """The same layer, with matrices of these names alone."""
        return replace(self, projections=(convention,), own=convention, asked=())

    def matrices(self, convention: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
        """For every name, the full names of an expert's matrices, those of expert 0, by one convention; without one, by
        every convention, and fused."""
        for module in self.modules:
            if not convention:
                yield (f"{module}.gate_up_proj", f"{module}.down_proj")
            for names in (convention,) if convention else self.projections:
                yield tuple(f"{module}.0.{name}" for name in names)

    def match(self, matches: Callable[[str], bool]) -> bool:
        """Whether the predicate holds for the module, or for every matrix of an expert."""
        return any(map(matches, self.modules)) or any(all(map(matches, names)) for names in self.matrices())


Answer = Scheme | Foreign | None
SchemeOf = Callable[[LayerNames], Answer]
"""What a reader returns."""


class Unnamed:
    """That no entry of a config names a module: it is stored as modules usually are."""


UNNAMED = Unnamed()


def in_common(layer: LayerNames, of: Callable[[str], Answer | Unnamed], usual: Answer, where: str) -> Answer:
    """What all matrices of a layer's experts are stored as.

    Args:
        layer: the layer's names.
        of: what the config's entries say of a matrix.
        usual: what is true of a matrix that they do not name.
        where: file and field, for messages.

    Raises:
        CheckpointError: entries store matrices of one layer differently.
    """
    conventions = (layer.own,) if layer.own else layer.projections
    for alternatives in zip(*map(layer.matrices, conventions), strict=True):
        mixed = []
        for names in alternatives:
            said = [of(name) for name in names]
            answers = [usual if isinstance(each, Unnamed) else each for each in said]
            if any(each != answers[0] for each in answers):
                mixed.append(zip(names, answers, strict=True))
            elif not any(isinstance(each, Unnamed) for each in said):
                return answers[0]
        # Of conventions of which one may be the checkpoint's, an entry that hits names of another means nothing.
        if len(mixed) == len(alternatives):
            words = "; ".join(f"{name.rpartition('.')[2]}: {in_words(answer)}" for name, answer in mixed[0])
            rule = f"the matrices of one layer's experts are stored differently ({words})"
            raise CheckpointError(rule, "vLLM's kernels take one format for a layer", f"{where}, {layer.modules[0]}")
    for names in layer.matrices():
        said = [of(name) for name in names]
        if not isinstance(said[0], Unnamed) and all(each == said[0] for each in said):
            return said[0]
    return usual


def in_words(answer: Answer) -> str:
    """An answer for a message."""
    if answer is None:
        return "not quantised"
    return answer.format if isinstance(answer, Foreign) else str(answer)


def foreign_reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """The reader of a method of which nothing is ours."""
    method = Foreign(str(config["quant_method"]))
    return lambda layer: method
