"""Regular expressions that come with a checkpoint, matched in bounded time.

Python's own matcher tries one way after the other: an expression like ``(a+)+$`` in a file from anywhere takes it
longer than anyone waits. Here all ways are followed at once, as a set of places in the text that have been reached, so
that usual expressions take a time that grows with the text's length. What still multiplies, such as repeats of repeats,
spends a budget of steps, and is an error when that is gone. Python's parser reads it; only whether it matches is asked,
never what its groups hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from .errors import CheckpointError

MAX_NESTING = 50
"""Groups inside each other; real expressions have a handful."""

_FREE_STEPS = 10_000
"""Steps that every match may take: places looked at, parts by parts. Real expressions take hundreds."""

_STEPS = 1_000_000
"""Steps that all matches of one expression may take beyond that, together; about a second."""

Places = frozenset[int]


class _Run:
    """One match.

    Attributes:
        text: what is matched.
        left: steps that it may still take.
        held: what assertions have answered, by their part and the place, so that none is asked twice.
    """

    __slots__ = ("held", "left", "text")

    def __init__(self, text: str, left: int) -> None:
        self.text = text
        self.left = left
        self.held: dict[tuple[int, int], bool] = {}

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _Spent


Step = Callable[[_Run, Places], Places]
"""From places in a text to those that are reached from them."""


class Expression:
    """A regular expression, as far as saying whether it matches.

    Args:
        pattern: the expression.
        where: the file and field, for messages.

    Raises:
        CheckpointError: it is no expression, or has something that cannot be followed in bounded time (references to
            groups, conditions, atomic groups).
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._step = _parsed(pattern, where)
        self._pattern, self._where = pattern, where
        self._steps = _STEPS

    def match(self, text: str) -> bool:
        """Whether it matches from the start of the text on, as `re.match`.

        Raises:
            CheckpointError: finding out takes too many steps.
        """
        return self._matches(text, frozenset((0,)))

    def search(self, text: str) -> bool:
        """Whether it matches anywhere, as `re.search`.

        Raises:
            CheckpointError: as for `match`.
        """
        return self._matches(text, frozenset(range(len(text) + 1)))

    def _matches(self, text: str, places: Places) -> bool:
        run = _Run(text, self._steps + _FREE_STEPS)
        try:
            matched = bool(self._step(run, places))
        except _Spent:
            rule = f"{_short(self._pattern)} takes more than {_STEPS} steps to be matched against names of layers"
            remedy = "Write it without repeats inside repeats, or list the names"
            raise CheckpointError(rule, remedy, self._where) from None
        self._steps = min(self._steps, run.left)
        return matched


def _parsed(pattern: str, where: str) -> Step:
    try:
        parsed = parser.parse(pattern)
        return _sequence(parsed, parsed.state.flags, 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{_short(pattern)} is no regular expression: {error}", where=where) from error
    except _Beyond as error:
        rule = f"{_short(pattern)} has {error}, which cannot be matched in bounded time"
        raise CheckpointError(rule, "Write it without, or list the names", where) from error


class _Spent(Exception):
    """A match has taken all the steps that it may."""


class _Beyond(Exception):
    """Something that sets of places cannot follow."""


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else f"{pattern[:57]}...")


def _sequence(parts: Iterable[Any], flags: int, depth: int) -> Step:
    if depth > MAX_NESTING:
        raise _Beyond(f"more than {MAX_NESTING} groups inside each other")
    steps = [_part(code, argument, flags, depth + 1) for code, argument in parts]

    def follow(run: _Run, places: Places) -> Places:
        run.spend(1)
        for step in steps:
            if not places:
                break
            run.spend(len(places))
            places = step(run, places)
        return places

    return follow


def _part(code: Any, argument: Any, flags: int, depth: int) -> Step:
    if code in (op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY):
        return partial(_one, _accepts(code, argument, flags))
    if code is op.SUBPATTERN:
        _, added, removed, inner = argument
        return _sequence(inner, (flags | added) & ~removed, depth)
    if code is op.BRANCH:
        ways = [_sequence(way, flags, depth) for way in argument[1]]
        return lambda run, places: frozenset().union(*(way(run, places) for way in ways))
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, inner = argument
        step = _sequence(inner, flags, depth)
        return partial(_repeated, step, int(least), None if most is op.MAXREPEAT else int(most))
    if code is op.AT:
        # Python's own: a place has no ways to try.
        anchor = re.compile(_ANCHORS[argument], flags & re.MULTILINE)
        return lambda run, places: frozenset(place for place in places if anchor.match(run.text, place))
    if code in (op.ASSERT, op.ASSERT_NOT):
        # Behind a place, Python allows what is of one length only.
        back = 0 if argument[0] > 0 else int(argument[1].getwidth()[0])
        return partial(_asserted, _sequence(argument[1], flags, depth), back, code is op.ASSERT)
    raise _Beyond(str(code).lower().replace("_", " "))


_ANCHORS = {
    op.AT_BEGINNING: "^",
    op.AT_BEGINNING_STRING: r"\A",
    op.AT_BOUNDARY: r"\b",
    op.AT_NON_BOUNDARY: r"\B",
    op.AT_END: "$",
    op.AT_END_STRING: r"\Z",
}


def _accepts(code: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    """Whether a part that stands for one character stands for this one; asked once for each character."""
    expression = re.compile(_source(code, argument), flags & (re.IGNORECASE | re.DOTALL | re.ASCII))
    return lambda character: expression.fullmatch(character) is not None


def _source(code: Any, argument: Any) -> str:
    """The text of a part that stands for one character."""
    if code is op.ANY:
        return "."
    if code is op.LITERAL:
        return re.escape(chr(argument))
    if code is op.NOT_LITERAL:
        return f"[^{re.escape(chr(argument))}]"
    inside = []
    for kind, value in argument:
        if kind is op.NEGATE:
            inside.append("^")
        elif kind is op.LITERAL:
            inside.append(re.escape(chr(value)))
        elif kind is op.RANGE:
            inside.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
        else:
            inside.append(_CLASSES[value])
    return f"[{''.join(inside)}]"


_CLASSES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}


def _one(accepts: Callable[[str], bool], run: _Run, places: Places) -> Places:
    text = run.text
    return frozenset(place + 1 for place in places if place < len(text) and accepts(text[place]))


def _asserted(step: Step, back: int, wanted: bool, run: _Run, places: Places) -> Places:
    def holds(place: int) -> bool:
        key = (id(step), place)
        if key not in run.held:
            run.held[key] = place >= back and bool(step(run, frozenset((place - back,))))
        return run.held[key]

    return frozenset(place for place in places if holds(place) is wanted)


def _repeated(step: Step, least: int, most: int | None, run: _Run, places: Places) -> Places:
    for _ in range(min(least, len(run.text) + 1)):  # more rounds reach nothing new: each moves, or changes nothing
        before, places = places, step(run, places)
        if places == before:
            break
    reached, fresh, rounds = places, places, 0
    while fresh and (most is None or rounds < most - least):
        fresh = step(run, fresh) - reached
        run.spend(len(reached))
        reached |= fresh
        rounds += 1
    return reached
