"""Per-layer overrides: a regular expression over the layer's name, and the backend that its layers get."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..errors import SettingError


@dataclass(frozen=True, slots=True)
class Override:
    """Layers whose name holds a match of `pattern` get `backend`.

    Attributes:
        pattern: a regular expression, searched anywhere in the layer's name.
        backend: a backend's name.
    """

    pattern: str
    backend: str

    def matches(self, layer: str) -> bool:
        """Whether the layer's name holds a match."""
        return re.search(self.pattern, layer) is not None


def parse(pattern: str, backend: str, where: str) -> Override:
    """An override from its two halves.

    Args:
        pattern: the expression, with or without vLLM's ``re:`` before it.
        backend: the backend's name.
        where: the setting's name and source, for messages.

    Raises:
        SettingError: an empty half, or an expression that does not compile.
    """
    pattern = pattern.strip().removeprefix("re:")
    if not pattern or not backend.strip():
        raise SettingError("an override needs a pattern and a backend", r"Write re:layers\.[0-9]\.=marlin", where)
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingError(f"re:{pattern} is no regular expression: {error}", where=where) from error
    return Override(pattern, backend.strip())


def first_match(overrides: Iterable[Override], layer: str) -> Override | None:
    """The first override, in the order given, that matches the layer."""
    return next((override for override in overrides if override.matches(layer)), None)


def unmatched(overrides: Iterable[Override], layers: Iterable[str]) -> list[Override]:
    """The overrides that match none of the layers, which a misspelt name and a stale expression both do."""
    names = list(layers)
    return [override for override in overrides if not any(map(override.matches, names))]


def override_error(override: Override, layers: Collection[str], where: str, named: str = "") -> SettingError:
    """What is to be said about an override that matches nothing.

    Args:
        override: one of `unmatched`.
        layers: names of the layers that it could have matched.
        where: the setting's source.
        named: the layers' names in short; "" where all are written out.
    """
    rule = f"override re:{override.pattern} matches none of the {len(layers)} quantised MoE layers"
    return SettingError(rule, f"They are {named or ', '.join(layers)}" if layers else "", where)
