"""Fields of a config, checked: each reader gives a value of the type that the field has, or an error that says what
stands there instead. ``where`` is the file and the field, for messages."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core.patterns import MatchBudget, PatternList, WildcardPattern
from ..errors import CheckpointError, short_repr


def reject_nulls(config: Mapping[str, Any], names: Iterable[str], where: str, remedy: str = "") -> None:
    """Refuses fields that are there and null, where vLLM takes a field that is not there and fails at null.

    Args:
        config: the object with the fields.
        names: those fields.
        where: file and field, for messages.
        remedy: what to write; "" for leaving the field out.

    Raises:
        CheckpointError: one of them is null.
    """
    for name in names:
        if name in config and config[name] is None:
            rule = f"{name} is null: vLLM refuses that, and a server does not start"
            raise CheckpointError(rule, remedy or "Leave the field out", where)


def read_string(config: Mapping[str, Any], name: str, where: str) -> str:
    """A word in lower case; "" where the field is not set."""
    value = config.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CheckpointError(f"{name} is {short_repr(value)}, not a word", where=where)
    return value.strip().lower()


def read_boolean(config: Mapping[str, Any], name: str, where: str, default: bool) -> bool:
    """True or false."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        rule = f"{name} is {short_repr(value)}, neither true nor false"
        raise CheckpointError(rule, "Write true or false, without quotes", where)
    return value


def read_integer(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A width or a group size, where -1 may stand for a whole row; required where there is no default."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise CheckpointError(f"{name} is missing", where=where)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 20):
        raise CheckpointError(f"{name} is {short_repr(value)}, neither a positive integer nor -1", where=where)
    return value


def read_names(config: Mapping[str, Any], fields: Iterable[str], where: str) -> list[str]:
    """The lists of names under any of the fields, joined; lists may be of lists."""
    names: list[str] = []
    for field in fields:
        value = flatten_names(config.get(field))
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise CheckpointError(f"{field} is {short_repr(value)}, not a list of names", where=where)
        names += value
    return names


def flatten_names(value: object) -> object:
    """A list of lists, as GPTQ's tools write the modules of a block, as one list; anything else as it is."""
    if not isinstance(value, list):
        return value
    names, pending = [], value[::-1]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item[::-1]
        else:
            names.append(item)
    return names


def read_config_groups(config: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The values of ``config_groups``; none where it is not set."""
    groups = config.get("config_groups")
    if groups is None:
        return []
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError("config_groups is not an object of objects", where=where)
    return list(groups.values())


def exclusion_matcher(patterns: Iterable[str], where: str) -> Callable[[str], bool]:
    """A predicate over names: a wildcard must match all of a name; a plain name, itself and everything below it.

    A plain name may be abbreviated from the left (``mlp.experts``). It never matches part of a component:
    ``model.layers.1`` excludes nothing of layer 10, and neither does ``model.layers.1*``, ModelOpt's way of writing a
    module with everything below it.
    """
    plain: set[str] = set()
    wildcards: list[WildcardPattern] = []
    expressions: list[str] = []
    budget = MatchBudget(where)
    for pattern in dict.fromkeys(patterns):
        stem = pattern.removesuffix("*")
        if pattern.startswith("re:"):
            expressions.append(pattern[3:])
        elif not has_wildcard(stem) and stem[-1:].isdigit():
            plain.add(stem)
        elif has_wildcard(pattern):
            wildcards.append(WildcardPattern(pattern, budget))
        else:
            plain.add(pattern)
    listed = PatternList(expressions, budget)

    def matches(name: str) -> bool:
        # Lists of tens of thousands of names are usual: every run of components is looked up, no name is scanned.
        parts = name.split(".")
        runs = (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
        if any(run in plain for run in runs) or listed.first((name,)) is not None:
            return True
        return any(wildcard.match(name, budget) for wildcard in wildcards)

    return matches


def names_below(names: Sequence[str], module: str) -> Sequence[str]:
    """The names of what is inside a module (``MODULE.*``). Lists of tens of thousands of names are usual.

    Args:
        names: sorted.
        module: the module's name.
    """
    first = bisect.bisect_left(names, f"{module}.")
    return names[first : bisect.bisect_left(names, f"{module}/", first)]  # "/" follows "."


def any_at_or_below(names: Sequence[str], module: str) -> bool:
    """Whether one of the sorted names is a module's or that of something inside it."""
    at = bisect.bisect_left(names, module)
    return (at < len(names) and names[at] == module) or bool(names_below(names, module))


def matches_number_prefix(pattern: str, name: str) -> bool:
    """Whether a pattern that ends with a number is found in a name only where the number goes on: ``layers.1``, or
    ``layers.1*``, in ``layers.10``."""
    stem = pattern.removesuffix("*")
    if not stem[-1:].isdigit() or stem not in name or has_wildcard(stem):
        return False
    return re.search(re.escape(stem) + r"(?!\d)", name) is None


_WILDCARDS = frozenset("*?[")


def has_wildcard(pattern: str) -> bool:
    """Whether a name contains a wildcard character."""
    return not _WILDCARDS.isdisjoint(pattern)
