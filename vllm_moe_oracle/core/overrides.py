"""Per-layer overrides: a regular expression over layer names, and the backend of the layers that match."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..errors import SettingError


@dataclass(frozen=True, slots=True)
class Override:
    """The layers whose name matches `pattern` get `backend`.

    Attributes:
        pattern: a regular expression, searched anywhere in the layer's name.
        backend: a backend's name.
    """

    pattern: str
    backend: str

    def matches(self, layer: str) -> bool:
        """Whether the pattern is found in the layer's name."""
        return re.search(self.pattern, layer) is not None


def parse_override(pattern: str, backend: str, where: str) -> Override:
    """An override from its two parts.

    Args:
        pattern: the regular expression, with or without vLLM's prefix ``re:``.
        backend: the backend's name.
        where: the setting's name and source, for messages.

    Raises:
        SettingError: a part is empty, or the pattern does not compile.
    """
    pattern = pattern.strip().removeprefix("re:")
    if not pattern or not backend.strip():
        raise SettingError("an override needs a pattern and a backend", r"Write re:layers\.[0-9]\.=marlin", where)
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingError(f"re:{pattern} is not a regular expression: {error}", where=where) from error
    return Override(pattern, backend.strip())


def first_match(overrides: Iterable[Override], layer: str) -> Override | None:
    """The first override that matches the layer."""
    return next((override for override in overrides if override.matches(layer)), None)


def unmatched_overrides(overrides: Iterable[Override], layers: Iterable[str]) -> list[Override]:
    """The overrides that match no layer: misspelled or out of date."""
    names = list(layers)
    return [override for override in overrides if not any(map(override.matches, names))]


def unmatched_override_error(override: Override, layers: Collection[str], where: str, named: str = "") -> SettingError:
    """The error for an override that matches no layer.

    Args:
        override: one of `unmatched_overrides`.
        layers: names of all layers.
        where: the setting's source.
        named: an abbreviation of these names for the message; "" to list them all.
    """
    rule = f"override re:{override.pattern} matches no layer: the model has {len(layers)} quantized MoE layers"
    return SettingError(rule, f"They are {named or ', '.join(layers)}" if layers else "", where)
