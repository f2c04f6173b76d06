"""Regular expressions from checkpoint configs, matched in bounded time.

vLLM matches these fields with the package `regex`, and so does this module. A config may come from anywhere, and an
expression such as ``(a|aa)+$`` keeps a backtracking matcher busy for hours. Limits keep it harmless: on the length of
an expression, on the product of its repeat counts (`regex` unrolls counted repeats when it compiles), and on the time
of its matches. Expressions that cannot backtrack much, which are nearly all, skip the clock and use the faster `re`.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

from ..errors import CheckpointError

MAX_LENGTH = 20_000
"""Longest expression, in characters."""

MAX_REPEATS = 10_000
"""Largest product of all repeat counts of an expression; ``{2,40}`` counts as 40."""

MAX_SECONDS = 1.0
"""Time that the slow matches of one expression may take together."""

FREE_SECONDS = 0.001
"""Time of each match that does not count. A match of a usual expression takes a few microseconds."""

_UNIT = r"(?:\\\.|\\d[*+]?|\.[*+]?|[\w-])*+"
_SIMPLE = re.compile(rf"{_UNIT}(?:\((?:\?:)?\w+(?:\|\w+){{0,7}}\))?+{_UNIT}\$?")
"""Names with wildcards and at most one group of up to eight words."""

_SIMPLE_REPEATS = 2
"""Most repeats of a simple expression. Its time grows with this power of a name's length."""

_REPEAT_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class InvalidPatternError(CheckpointError):
    """A text is not a regular expression."""


class BoundedPattern:
    """A regular expression whose matches take bounded time.

    Args:
        pattern: the expression.
        where: the file and field, for messages.

    Raises:
        InvalidPatternError: the text is not a regular expression.
        CheckpointError: the expression is longer than `MAX_LENGTH`, or its repeat counts exceed `MAX_REPEATS`.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._compiled = _compile(pattern, where)
        self._is_simple = isinstance(self._compiled, re.Pattern)
        self._where = where
        self._seconds_left = MAX_SECONDS

    def match(self, text: str) -> bool:
        """Whether the expression matches at the start of the text, as `re.match`.

        Raises:
            CheckpointError: the matches of this expression exceed `MAX_SECONDS`.
        """
        return self._run(self._compiled.match, text)

    def search(self, text: str) -> bool:
        """Whether the expression matches anywhere in the text, as `re.search`.

        Raises:
            CheckpointError: as for `match`.
        """
        return self._run(self._compiled.search, text)

    def _run(self, match: Any, text: str) -> bool:
        if self._is_simple:
            return match(text) is not None
        start = time.perf_counter()
        try:
            return match(text, timeout=self._seconds_left + FREE_SECONDS) is not None
        except (TimeoutError, MemoryError, RecursionError):
            rule = f"{_short(self._compiled.pattern)} takes more than {MAX_SECONDS} s to match names of layers"
            raise CheckpointError(rule, "Write it without nested repeats, or list the names", self._where) from None
        finally:
            spent = time.perf_counter() - start
            self._seconds_left = max(self._seconds_left - max(spent - FREE_SECONDS, 0.0), 0.0)


def _compile(pattern: str, where: str) -> Any:
    """The compiled expression: an `re.Pattern` when it is simple, else a `regex.Pattern`."""
    if len(pattern) > MAX_LENGTH:
        rule = f"{_short(pattern)} has {len(pattern)} characters, more than {MAX_LENGTH}"
        raise CheckpointError(rule, "List the names of modules instead", where)
    # Counts side by side multiply as if they were nested: an upper bound.
    repeats = math.prod(max(int(count or 1) for count in counts) or 1 for counts in _REPEAT_COUNT.findall(pattern))
    if repeats > MAX_REPEATS:
        rule = f"{_short(pattern)} repeats a part more than {MAX_REPEATS} times (the product of its repeat counts)"
        raise CheckpointError(rule, "Write it without counted repeats, or list the names", where)
    if pattern.count("*") + pattern.count("+") <= _SIMPLE_REPEATS and _SIMPLE.fullmatch(pattern):
        return re.compile(pattern)
    import regex  # type: ignore[import-untyped, unused-ignore]

    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise InvalidPatternError(f"{_short(pattern)} is not a regular expression: {error}", where=where) from error


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else f"{pattern[:57]}...")
