"""Per-layer overrides: a regular expression over layer names, and the backend of the layers that match.

There is one way to write them, whatever the source: ``re:PATTERN=BACKEND``, several with ``;`` between them. A pattern
may backtrack for hours, as one of a config; `patterns` bounds its time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..errors import CheckpointError, SettingError
from .patterns import MAX_LENGTH, BoundedPattern, MatchBudget

MAX_SECONDS = 0.1
"""Processor time of a search in one layer's name. Usual expressions take microseconds."""

OVERRIDES_REMEDY = r"Write re:layers\.[0-9]\.=marlin, several with ; between them"


@dataclass(frozen=True, slots=True)
class Override:
    """The layers whose name matches `pattern` get `backend`.

    Attributes:
        pattern: a regular expression, searched anywhere in the layer's name.
        backend: a backend's name.
    """

    pattern: str
    backend: str

    def matches(self, layer: str, where: str = "") -> bool:
        """Whether the pattern is found in the layer's name.

        Args:
            layer: the name.
            where: the setting's source, for messages.

        Raises:
            SettingError: the search takes more than `MAX_SECONDS`.
        """
        try:
            return _is_found(self.pattern, layer)
        except CheckpointError as error:
            rule = f"override re:{self.pattern} takes more than {MAX_SECONDS} s to match the name of one layer"
            raise SettingError(rule, "Write it without nested repeats", where) from error


@lru_cache(maxsize=256)
def _expression(pattern: str) -> BoundedPattern:
    return BoundedPattern(pattern, MatchBudget(""))


@lru_cache(maxsize=16384)
def _is_found(pattern: str, layer: str) -> bool:
    expression = _expression(pattern)  # not in the time of the search: the first one imports `regex`
    return expression.search(layer, MatchBudget("", MAX_SECONDS))


def parse_overrides(value: object, where: str) -> tuple[Override, ...]:
    """Overrides as they are written.

    Args:
        value: the text.
        where: the setting's name and source, for messages.

    Raises:
        SettingError: it is no text, or a part of it is no override.
    """
    if not isinstance(value, str):
        raise SettingError(f"{value!r} is not a text of overrides", OVERRIDES_REMEDY, where)
    return tuple(_parse_override(part.strip(), where) for part in value.split(";") if part.strip())


def _parse_override(text: str, where: str) -> Override:
    # The last "=" separates: a pattern may contain one, the name of a backend does not.
    before, _, backend = text.rpartition("=")
    pattern = before.strip().removeprefix("re:")
    if not pattern or not backend.strip():
        raise SettingError(f"{text!r}: an override needs a pattern and a backend", OVERRIDES_REMEDY, where)
    if pattern == before.strip():
        raise SettingError(f"{text!r}: the pattern of an override begins with re:", OVERRIDES_REMEDY, where)
    if len(pattern) > MAX_LENGTH:
        rule = f"re:{pattern} has {len(pattern)} characters, more than {MAX_LENGTH}"
        raise SettingError(rule, "Write several, with ; between them", where)
    try:
        re.compile(pattern)  # Python's own expressions, of which `regex` knows more
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingError(f"re:{pattern} is not a regular expression: {error}", where=where) from error
    try:
        _expression(pattern)
    except CheckpointError as error:
        raise SettingError(f"re:{error.rule}", "Write it without nested or counted repeats", where) from error
    return Override(pattern, backend.strip())


def first_match(overrides: Iterable[Override], layer: str, where: str = "") -> Override | None:
    """The first override that matches the layer.

    Args:
        overrides: the overrides, in order.
        layer: the layer's name.
        where: the setting's source, for messages.

    Raises:
        SettingError: a search takes too long (`Override.matches`).
    """
    return next((override for override in overrides if override.matches(layer, where)), None)


def unused_override_errors(
    overrides: Iterable[Override], layers: Iterable[str], where: str, own: Collection[str], named: str = ""
) -> Iterator[SettingError]:
    """An error for each override that decides no layer: it matches none, or others before it match all that it does.

    Args:
        overrides: the overrides, in order.
        layers: names of all layers that an override may be meant for.
        where: the setting's source.
        own: those of them that messages name.
        named: an abbreviation of these for messages; "" to list them all.

    Raises:
        SettingError: a search takes too long (`Override.matches`).
    """
    decided_by: dict[str, Override] = {}
    names = list(dict.fromkeys(layers))
    for override in overrides:
        matched = [name for name in names if override.matches(name, where)]
        before = dict.fromkeys(decided_by[name] for name in matched if name in decided_by)
        if not matched:
            rule = f"override re:{override.pattern} matches no layer: the model has {len(own)} quantized MoE layers"
            yield SettingError(rule, f"They are {named or ', '.join(own)}" if own else "", where)
        elif all(name in decided_by for name in matched):
            others = ", ".join(f"re:{each.pattern}={each.backend}" for each in before)
            rule = (
                f"override re:{override.pattern}={override.backend} decides no layer: all that it matches are decided "
            )
            rule += f"by {others} before it"
            yield SettingError(rule, "Put it first, or take it out", where)
        decided_by = {**dict.fromkeys(matched, override), **decided_by}
