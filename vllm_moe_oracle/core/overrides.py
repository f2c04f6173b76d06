"""Per-layer overrides: a regular expression over layer names, and the backend of the layers that match.

There is one way to write them, whatever the source: ``re:PATTERN=BACKEND``, several with ``;`` between them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..errors import SettingError

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

    def matches(self, layer: str) -> bool:
        """Whether the pattern is found in the layer's name."""
        return re.search(self.pattern, layer) is not None


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
