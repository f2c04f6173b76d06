"""How values of settings are read, as they stand in environment variables, in JSON and after ``--set``.

Each function takes a value and where it was given, and returns what the setting holds.

Raises:
    SettingError: the value cannot be taken. It says what can, and names the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..errors import SettingError
from . import objectives
from .decimals import parse_decimal

_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off"})


def read_boolean(value: object, where: str) -> bool:
    """True or False, also as a word or as 1 and 0."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE_WORDS or word in _FALSE_WORDS:
        return word in _TRUE_WORDS
    raise SettingError(
        f"{value!r} is not a boolean", f"Write one of {', '.join(sorted(_TRUE_WORDS | _FALSE_WORDS))}", where
    )


def _to_float(value: object) -> float:
    """A number as it is written in an environment variable or in JSON; NaN for anything else."""
    if isinstance(value, str):
        return parse_decimal(value)
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


MAX_SECONDS = 86400.0
"""A day. torch's time-outs have limits of their own, above which they overflow."""


def read_seconds(value: object, where: str) -> float:
    """Seconds from 0.1 to a day."""
    seconds = _to_float(value)
    if not 0.1 <= seconds <= MAX_SECONDS:
        remedy = f"Write a number of seconds from 0.1 to {MAX_SECONDS:.0f}, which is a day"
        raise SettingError(f"{value!r} is not a time in seconds", remedy, where)
    return seconds


def read_seconds_or_off(value: object, where: str) -> float:
    """Seconds from 1 to a day, or 0."""
    seconds = _to_float(value)
    if seconds != 0 and not 1 <= seconds <= MAX_SECONDS:
        remedy = f"Write a number of seconds from 1 to {MAX_SECONDS:.0f}, or 0 to switch it off"
        raise SettingError(f"{value!r} is not a time in seconds", remedy, where)
    return seconds


def read_fraction(value: object, where: str) -> float:
    """A fraction in [0, 1), also as a percentage."""
    if isinstance(value, str) and value.endswith("%"):
        fraction = _to_float(value.removesuffix("%")) / 100
    else:
        fraction = _to_float(value)
    if not 0 <= fraction < 1:
        raise SettingError(f"{value!r} is not in [0, 1)", "Write a number from 0 to 0.999, or a percentage: 3%", where)
    return fraction


def read_objective(value: object, where: str) -> str:
    """The name of an objective, also from an object of weights by number of tokens."""
    if isinstance(value, Mapping):
        value = ",".join(f"{tokens}:{_decimal_text(weight)}" for tokens, weight in value.items())
    return objectives.parse_objective(read_name(value, where), where).name


def _decimal_text(value: object) -> str:
    """A number of JSON without an exponent; anything else as it is."""
    if isinstance(value, float) and objectives.MIN_WEIGHT <= value <= objectives.MAX_WEIGHT:
        return f"{value:.12f}"
    return str(value)


def read_name(value: object, where: str) -> str:
    """A name, without the spaces around it."""
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"{value!r} is not a name", "Write a name, or leave the setting out", where)
    return value.strip()


def read_path(value: object, where: str) -> str:
    """A path; "" for none."""
    if not isinstance(value, str):
        raise SettingError(f"{value!r} is not a path", "Write a path as a text", where)
    return value


def read_name_list(value: object, where: str) -> tuple[str, ...]:
    """Names, also as a text with commas."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise SettingError(f"{value!r} is not a list of names", "Separate names with commas", where)
    return tuple(read_name(part, where) for part in value)


def read_one_of(words: tuple[str, ...]) -> Callable[[object, str], str]:
    """A reader of a value that is one of these words, in any case."""

    def read(value: object, where: str) -> str:
        word = str(value).strip().lower()
        if word in words:
            return word
        raise SettingError(f"{value!r} is not one of {', '.join(words)}", "Write one of them", where)

    return read
