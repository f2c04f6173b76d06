"""Entries of a config that are for some experts of a layer only.

vLLM gives all experts of a layer one format: it looks up the experts' module, or the matrices of expert 0. So entries
must say the same of every expert. Tools write entries for each expert of a layer, tens of thousands in all: experts of
which the entries say the same are looked up once. Of ModelOpt's and Quark's exclusions the name of one expert excludes
the layer in vLLM: there all or none must be named (`reject_some_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from ..core.patterns import BoundedPattern, MatchBudget, literal_text
from ..errors import CheckpointError
from .types import ExpertFormat, LayerNames, describe_format

_MATRIX = re.compile(r"(.*experts)\.(\d{1,5})(?:\.(.*))?", re.ASCII)
"""What belongs to one expert, by its name or the end of it: the experts' module, the expert's number, the rest."""

_LAYER = re.compile(r"layers(?:\\\.|\[\.\]|\.)(?:\((?:\?:)?[^()]*\)|\\[dw]|\[[^\]]*\]|\{[\d,]*\}|[\d+*?])*", re.ASCII)
"""The number of a layer in an expression, or what stands for several."""

_ONE_LAYER = re.compile(r"layers\W+(\d+)", re.ASCII)

_ANY_EXPERT = re.compile(
    r"\bw[123]\b|(?:\\[dw]|\[0-9\]|\[\^\.\]|\[\^\\\.\]|\.)[+*]|\\\.|\[\.\]|(?<![.+*?])\.(?![.+*?{])", re.ASCII
)
"""Parts of an expression that match every expert if they match one: names, whole numbers, dots."""

_CHOICE = re.compile(r"\\[dDwWsS]|[\[{.?]|\d\)?[+*]")
"""Parts that may match numbers which the expression does not spell out."""


@dataclass(frozen=True, slots=True)
class _Expression:
    """An expression that may match some experts of a layer only.

    Attributes:
        position: its place among the expressions.
        pattern: the expression.
        numbers: numbers that it spells out.
        any: it may match others, too.
        meaning: what it says, and after how many expressions that match any expert.
    """

    position: int
    pattern: BoundedPattern
    numbers: frozenset[int]
    any: bool
    meaning: Hashable


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of what belongs to single experts, by the experts' module or the end of its name.

    Attributes:
        listed: the experts that names mean.
        kinds: of those of which the names say the same, one.
        others: numbers of experts that other parts of names may mean, whatever the module.
    """

    listed: Mapping[str, frozenset[int]]
    kinds: Mapping[str, frozenset[int]]
    others: frozenset[int]

    def modules_of(self, layer: LayerNames) -> list[str]:
        """Those of the modules that are a layer's."""
        ends = (module[at:] for module in layer.modules for at in range(len(module)))
        return [end for end in ends if end in self.listed]


@lru_cache(maxsize=4)  # a server reads the config for each layer
def _read_names(names: tuple[tuple[str, Hashable], ...]) -> _Names:
    said: dict[str, dict[int, set[Hashable]]] = {}
    others: set[int] = set()
    for name, meaning in names:
        if (found := _MATRIX.fullmatch(name)) is not None:
            said.setdefault(found[1], {}).setdefault(int(found[2]), set()).add((found[3], meaning))
        else:
            others.update(_numbers_of_parts(name))
    kinds = {
        module: {frozenset(each): number for number, each in sorted(experts.items(), reverse=True)}
        for module, experts in said.items()
    }
    return _Names(
        {module: frozenset(experts) for module, experts in said.items()},
        {module: frozenset(each.values()) for module, each in kinds.items()},
        frozenset(others),
    )


class ExpertEntries:
    """Entries of a config, for which each layer's experts are compared.

    Args:
        names: full names, or parts of names, each with what it says.
        expressions: the same for expressions, of which the first counts that matches.
        budget: the time of all expressions of the config.
        searched: expressions are searched in every name of the experts' module; else vLLM's name has to begin so.
    """

    def __init__(
        self,
        names: Mapping[str, Hashable],
        expressions: Mapping[str, Hashable],
        budget: MatchBudget,
        searched: bool = False,
    ) -> None:
        self._searched = searched
        self._budget = budget
        self._expressions: dict[str, list[_Expression]] = {}
        plain = dict(names)
        self._common = 0
        for position, (text, meaning) in enumerate(expressions.items()):
            if (literal := literal_text(text)) is None:
                self._add_expression(position, text, meaning)
            else:
                plain.setdefault(literal, (meaning, self._common))
        self._names = _read_names(tuple(plain.items()))

    def _add_expression(self, position: int, text: str, meaning: Hashable) -> None:
        layers = {number[1] if (number := _ONE_LAYER.fullmatch(part)) else "" for part in _LAYER.findall(text)}
        rest = _ANY_EXPERT.sub(" ", _LAYER.sub(" ", text))
        numbers, choice = frozenset(map(int, re.findall(r"\d{1,5}", rest, re.ASCII))), _CHOICE.search(rest) is not None
        if numbers or choice:
            layer = layers.pop() if len(layers) == 1 else ""  # one of "layers.1.|layers.2." is for either
            pattern = BoundedPattern(text, self._budget)
            found = _Expression(position, pattern, numbers, choice, (meaning, self._common))
            self._expressions.setdefault(layer, []).append(found)
        else:
            self._common += 1

    def representatives(self, layer: LayerNames) -> list[int]:
        """Experts of which entries may say otherwise than of expert 0: one of each kind, ascending."""
        known = self._names
        modules = known.modules_of(layer)
        found = known.others.union(*(known.kinds[module] for module in modules))
        kinds: dict[tuple[Hashable, ...], int] = {}
        matched = [*self._matched(layer)]
        for number, said in matched:
            kinds.setdefault(said, number)
        found |= {*kinds.values()}
        listed = [frozenset(number for number, _ in matched), *(known.listed[module] for module in modules)]
        if layer.num_experts:  # one that no entry names, too
            for numbers in (*listed, frozenset(found).union(*listed)):
                found |= {next(number for number in range(len(numbers) + 1) if number not in numbers)}
        return sorted(number for number in found if 0 < number < (layer.num_experts or _MAX_EXPERTS))

    def _matched(self, layer: LayerNames) -> Iterator[tuple[int, tuple[Hashable, ...]]]:
        """Experts that expressions may tell from others, with what the first that matches says of each matrix."""
        index = layer.modules[0].partition("layers.")[2].partition(".")[0]
        own = self._expressions.get(index, []) if index else []
        expressions = sorted((*self._expressions.get("", ()), *own), key=lambda each: each.position)
        count = layer.num_experts or _UNKNOWN_EXPERTS
        if any(each.any for each in expressions):
            candidates: Iterable[int] = range(count)
        else:
            spelled = {number for each in expressions for number in each.numbers}
            candidates = sorted(number for number in spelled if number < (layer.num_experts or _MAX_EXPERTS))
        modules = layer.modules if self._searched else layer.modules[:1]
        conventions = (*layer.projections, *layer.requested_projections)
        projections = dict.fromkeys(name for names in conventions for name in names)
        matches = BoundedPattern.search if self._searched else BoundedPattern.match
        for number in candidates:
            possible = [each for each in expressions if each.any or number in each.numbers]
            names = (f"{module}.{number}.{projection}" for module in modules for projection in projections)
            matched = (next((each.meaning for each in possible if matches(each.pattern, name)), None) for name in names)
            yield number, tuple(matched)


_MAX_EXPERTS = 100_000
_UNKNOWN_EXPERTS = 8
"""Experts that are looked at where their number is not known."""


def _numbers_of_parts(name: str) -> Iterator[int]:
    """Numbers of experts that a part of a name may hold: ``experts.7``, ``7.down_proj``."""
    parts = name.split(".")
    for before, part in zip(["", *parts], parts, strict=False):
        if part.isascii() and part.isdecimal() and len(part) < 6 and "experts".endswith(before):
            yield int(part)


class OtherExpertsError(CheckpointError):
    """Entries say of another expert what they do not say of expert 0, which alone vLLM looks up. It loads files that
    hold all experts of the layer as expert 0.

    Attributes:
        first: the format of expert 0.
    """

    first: ExpertFormat = None


def same_for_all(
    layer: LayerNames,
    format_of: Callable[[int], ExpertFormat],
    entries: ExpertEntries,
    where: str,
    looks_up_first: bool = False,
) -> ExpertFormat:
    """The format of all experts of a layer.

    Args:
        layer: the layer's names.
        format_of: the format of an expert, by its number.
        entries: the config's entries.
        where: file and field, for messages.
        looks_up_first: a server looks up expert 0 alone; elsewhere it refuses what is refused here.

    Raises:
        OtherExpertsError: entries give experts of the layer different formats, and a server looks up expert 0 alone.
        CheckpointError: entries give experts of the layer different formats.
    """
    found = format_of(0)

    def different(number: int, rule: str) -> CheckpointError:
        error = _different(layer, number, rule, where)
        if looks_up_first:
            error = OtherExpertsError(error.rule, error.remedy, error.where)
            error.first = found
        return error

    for number in entries.representatives(layer):
        try:
            other = format_of(number)
        except CheckpointError as error:
            raise different(number, error.rule) from error
        if other != found:
            words = f"{describe_format(other)}, and expert 0 as {describe_format(found)}"
            raise different(number, f"it is stored as {words}")
    return found


_PART = re.compile(r"(.*experts)\.([^.]+)(?:\..*)?", re.ASCII)
"""A name of something below the experts' module: the module's name, and what stands for the expert's number."""


def names_below_experts(entry: str) -> bool:
    """Whether an exclusion names something of an expert, or of several by a wildcard."""
    return _PART.fullmatch(entry) is not None


@lru_cache(maxsize=4)  # a server asks for each layer
def _numbers_by_module(entries: tuple[str, ...]) -> Mapping[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for entry in entries:
        if (part := _PART.fullmatch(entry)) is not None:
            # "experts.3*" is ModelOpt's way to write expert 3 with everything below it.
            number = part[2].removesuffix("*")
            found.setdefault(part[1], set()).add(number if number.isdecimal() else part[2])
    return {module: frozenset(numbers) for module, numbers in found.items()}


def reject_some_experts(entries: Iterable[str], layer: LayerNames, where: str) -> None:
    """Refuses a layer that vLLM leaves out by the names of some of its experts.

    Args:
        entries: exclusions, of which none names the experts' module or what it is in.
        layer: the layer's names.
        where: file and field, for messages.

    Raises:
        CheckpointError: entries name some experts of the layer, and others not.
    """
    known = _numbers_by_module(tuple(entries))
    words = frozenset[str]().union(*(known.get(module, ()) for module in layer.modules))
    plain = {int(word) for word in words if word.isdecimal() and len(word) < 6}
    patterns = [word for word in words if not word.isdecimal()]
    count = layer.num_experts or max(plain, default=0) + 1
    named = [number in plain or any(fnmatchcase(str(number), each) for each in patterns) for number in range(count)]
    if words and any(named) and not all(named):
        first, other = named.index(True), named.index(False)
        rule = f"it is not excluded by name, and expert {first} is, for which vLLM leaves all of the layer out"
        raise _different(layer, other, rule, where)


def check_exclusions(
    entries: tuple[str, ...], layer: LayerNames, where: str, matcher: Callable[[], Callable[[LayerNames], bool]]
) -> None:
    """Refuses what `reject_some_experts` refuses, on a server, which asks for each layer: the entries are taken apart
    once for all of them.

    Args:
        entries: all exclusions.
        layer: the layer's names.
        where: file and field, for messages.
        matcher: makes the format's predicate over layers, which knows what else excludes one. Its time runs from then
            on, so it is made for one layer only.

    Raises:
        CheckpointError: the names of some experts alone exclude the layer.
    """
    try:
        reject_some_experts(entries, layer, where)
    except CheckpointError:
        matcher()(layer)


def _different(layer: LayerNames, number: int, rule: str, where: str) -> CheckpointError:
    remedy = "vLLM's kernels take one format for all experts of a layer: write such an entry for each of them, or none"
    return CheckpointError(f"expert {number} differs from others: {rule}", remedy, f"{where}, {layer.modules[0]}")
