"""Checks that the fields of a dataclass have values which their annotations allow: one check for all of the vocabulary.

An annotation can state what types do not: ``Annotated[int, AtLeast(1)]``, ``Annotated[str, OneOf(("cuda", "cpu"))]``.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..errors import FieldError, short_repr


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The least value of a number."""

    least: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """The only values of a text."""

    values: tuple[str, ...]


class _Rule(NamedTuple):
    """What a field may be.

    Attributes:
        name: the field's name.
        kinds: types of its value.
        values: its only values; empty for any.
        least: its least value; None for any.
        parts: types of the items of a tuple, and of the keys and values of a dict; empty for any.
    """

    name: str
    kinds: tuple[type, ...]
    values: tuple[str, ...] = ()
    least: int | None = None
    parts: tuple[type, ...] = ()


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of a dataclass.

    Attributes:
        read: gives the values of all fields.
        rules: a rule for each field.
        limited: indices of the fields whose rule says more than types.
        usual: types of all fields that were found right, together: what is compared for most objects.
    """

    read: Callable[[Any], tuple[Any, ...]]
    rules: tuple[_Rule, ...]
    limited: tuple[int, ...]
    usual: set[tuple[type, ...]]


@functools.cache
def _checks(kind: type) -> _Checks:
    hints = get_type_hints(kind, include_extras=True)
    rules = tuple(_rule(field.name, hints[field.name]) for field in fields(kind))
    limited = tuple(n for n, each in enumerate(rules) if each.values or each.least is not None or each.parts)
    return _Checks(operator.attrgetter(*(each.name for each in rules)), rules, limited, set())


def _rule(name: str, hint: Any) -> _Rule:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limit = arguments[1]
        if isinstance(limit, OneOf):
            return _Rule(name, (str,), limit.values)
        return _Rule(name, _with_integers(arguments[:1]), least=limit.least)
    if origin is Literal:
        return _Rule(name, (str,), arguments)
    if origin in (Union, types.UnionType):
        return _Rule(name, _with_integers(arguments))
    if origin in (tuple, dict):
        return _Rule(name, (origin,), parts=tuple(each for each in arguments if each is not Ellipsis))
    return _Rule(name, _with_integers((hint,)))


def _with_integers(kinds: tuple[type, ...]) -> tuple[type, ...]:
    """Types with int where there is float, as type checkers take them."""
    return (*kinds, int) if float in kinds else kinds


def check_fields(case: Any, where: str = "") -> None:
    """Refuses a value that its field's annotation does not allow.

    Args:
        case: an object of a dataclass. Annotations may be classes, ``X | None``, literals, ``tuple[X, ...]``,
            ``dict[X, Y]``, and numbers and texts with `AtLeast` and `OneOf`.
        where: what it describes, for the message.

    Raises:
        FieldError: there is such a value.
    """
    kind: type = type(case)
    checks = _checks(kind)
    found = checks.read(case)
    if (kinds := tuple(map(type, found))) not in checks.usual:
        for rule, value in zip(checks.rules, found, strict=True):
            check_value(rule.name, value, rule.kinds, where)
        checks.usual.add(kinds)
    for index in checks.limited:
        name, _, values, least, parts = checks.rules[index]
        value = found[index]
        if values and value not in values:
            raise FieldError(f"{name} is {short_repr(value)}", f"Valid are {', '.join(values)}", where)
        if least is not None and value < least:
            raise FieldError(f"{name} is {value}; it must be at least {least}", where=where)
        if parts:
            _check_parts(name, value, parts, where)


def check_value(name: str, value: object, kinds: tuple[type, ...], where: str = "") -> None:
    """Refuses a value of another type: an argument of the public API, or a field.

    Args:
        name: the argument's or field's.
        value: the value. A bool is an int for Python, and none that is meant.
        kinds: the types that it may have.
        where: as for `check_fields`.

    Raises:
        FieldError: it has another type.
    """
    if type(value) not in kinds and (isinstance(value, bool) or not isinstance(value, kinds)):
        wanted = " or ".join("None" if each is types.NoneType else each.__name__ for each in kinds)
        raise FieldError(f"{name} is {short_repr(value)}; it must be {wanted}", where=where)


def _check_parts(name: str, value: Any, parts: tuple[type, ...], where: str) -> None:
    items = value.items() if isinstance(value, dict) else zip(value, strict=True)
    for item in items:
        for each, kind in zip(item, parts, strict=True):
            if not isinstance(each, kind):
                raise FieldError(f"{name} has {short_repr(each)}; it must be {kind.__name__}", where=where)
