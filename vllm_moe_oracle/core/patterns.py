"""Regular expressions and wildcards from checkpoint configs and settings, matched in bounded time.

vLLM matches a config's fields with the package `regex`, and so does this module. A config may come from anywhere, and
an expression such as ``(a|aa)+$`` keeps a backtracking matcher busy for hours. Limits keep it harmless: on the length
of an expression, on the product of its repeat counts (`regex` unrolls counted repeats when it compiles), and on the
processor time of all expressions of a config together (`MatchBudget`). Expressions that cannot backtrack much, which
are nearly all, skip the clock of `regex` and use the faster `re`; names that are written as expressions are compared.
"""

from __future__ import annotations

import bisect
import math
import re
import time
from collections.abc import Iterable, Iterator
from fnmatch import translate
from typing import Any

from ..errors import CheckpointError, short_repr
from ..untrusted import describe

MAX_LENGTH = 20_000
"""Longest expression, in characters."""

MAX_WILDCARD_LENGTH = 1000
"""Longest name with wildcards, in characters."""

MAX_REPEATS = 10_000
"""Largest product of all repeat counts of an expression; ``{2,40}`` counts as 40."""

MAX_SECONDS = 1.0
"""Processor time from the first expression of a config to the last match. Published configs take a tenth of it."""

_CLOCK_PAUSE = 0.02
"""Seconds between two looks at the processor time, which costs as much as a match."""

_UNIT = r"(?:\\\.|\\d[*+]?|\[0-9\][*+]?|\.[*+]?|[\w-])*+"
_SIMPLE = re.compile(rf"\^?{_UNIT}(?:\((?:\?:)?\w+(?:\|\w+){{0,7}}\)\??{_UNIT}){{0,2}}\$?")
"""Names with wildcards and at most two groups of up to eight words."""

_SIMPLE_REPEATS = 2
"""Most repeats of a simple expression. Its time grows with this power of a name's length."""

_LITERAL = re.compile(r"\^?((?:[\w-]|\\[.\-])*+)(\$?)", re.ASCII)
"""A name as an expression: its escaped text, and whether it is the whole name."""

_PREFIX = re.compile(r"\^?((?:[\w-]|\\[.\-])*+)([*+?{]?)", re.ASCII)
"""What every match starts with, the last letter apart if it may be repeated."""

_PLAIN_GROUP = re.compile(r"\(\?(?![:=!<>])")
"""A group that changes the meaning of what stands before it, such as ``(?i)``."""

_RECURSION = re.compile(r"\(\?(?:R\)|[+-]?\d+\)|&|P>)")
"""A part that is matched by calling the expression or one of its groups. `regex` takes 500 MB for one in a second."""

_VERSION_1 = re.compile(r"\(\?[\w-]*V1")
"""The flag of `regex` for sets of sets. With ``(?i)``, 20,000 characters of them take 9 s and 370 MB to compile."""

_REPEAT_COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class InvalidPatternError(CheckpointError):
    """A text is not a regular expression."""


class MatchBudget:
    """The processor time that all expressions of a config may take. It runs from its creation, in the thread that
    created it, so an object must not outlive the reading of a config or the lookup of a layer.

    Args:
        where: the file and field, for messages.
        seconds: the time; None for `MAX_SECONDS`.
    """

    def __init__(self, where: str, seconds: float | None = None) -> None:
        self.where = where
        self._seconds = MAX_SECONDS if seconds is None else seconds
        self._end = time.thread_time() + self._seconds
        self._next_look = 0.0

    def check(self, pattern: str) -> None:
        """Must be called before each match or compilation.

        Args:
            pattern: the expression, for the message.

        Raises:
            CheckpointError: the time is spent.
        """
        now = time.perf_counter()
        if now > self._next_look:
            self._next_look = now + _CLOCK_PAUSE
            if self.seconds_left() <= 0:
                raise self.spent(pattern)

    def seconds_left(self) -> float:
        """What is left of the time."""
        return self._end - time.thread_time()

    def spent(self, pattern: str) -> CheckpointError:
        """The error of an expression for which no time is left."""
        rule = f"its expressions take more than {self._seconds} s to match names of layers"
        rule += f", so far to {short_repr(pattern)}"
        return CheckpointError(rule, "Write fewer of them, without nested repeats, or list the names", self.where)


class NameParts:
    """Texts that may be a part of a name; lists of tens of thousands are usual.

    Args:
        parts: the texts. An empty one is a part of every name.
        budget: shared with the other expressions of the config.
    """

    def __init__(self, parts: Iterable[str], budget: MatchBudget) -> None:
        self._parts = frozenset(parts)
        self._sizes = sorted({len(part) for part in self._parts})
        self._budget = budget

    def within(self, name: str) -> Iterator[str]:
        """Those that are a part of a name.

        Raises:
            CheckpointError: the time is spent.
        """
        self._budget.check(name)
        sizes = self._sizes[: bisect.bisect_right(self._sizes, len(name))]
        if len(self._parts) <= sum(len(name) + 1 - size for size in sizes):
            return (part for part in self._parts if part in name)
        windows = (name[at : at + size] for size in sizes for at in range(len(name) + 1 - size))
        return (window for window in windows if window in self._parts)

    def any_within(self, name: str) -> bool:
        """Whether one of them is a part of a name."""
        return next(self.within(name), None) is not None


class BoundedPattern:
    """A regular expression whose matches take bounded time.

    Args:
        pattern: the expression.
        budget: the time of all expressions of the config.

    Raises:
        InvalidPatternError: the text is not a regular expression.
        CheckpointError: the expression is longer than `MAX_LENGTH`, its repeat counts exceed `MAX_REPEATS`, or the time
            is spent.
    """

    def __init__(self, pattern: str, budget: MatchBudget) -> None:
        if pattern.count("[") == pattern.count("[.]") and r"\[" not in pattern:  # another way to escape a dot
            pattern = pattern.replace("[.]", r"\.")
        self._text = pattern
        self._budget = budget
        self._literal = literal_text(pattern)
        self._whole = pattern.endswith("$")
        if self._literal is None:
            self._compiled = _compile(pattern, budget)

    def match(self, text: str) -> bool:
        """Whether the expression matches at the start of the text, as `re.match`.

        Raises:
            CheckpointError: the time of all expressions is spent.
        """
        if self._literal is not None:
            if self._whole:
                return text == self._literal or text == f"{self._literal}\n"
            return text.startswith(self._literal)
        return self._run(self._compiled.match, text, self._budget)

    def search(self, text: str, budget: MatchBudget | None = None) -> bool:
        """Whether the expression matches anywhere in the text, as `re.search`.

        Args:
            text: the text.
            budget: the time of this search; None for that of all expressions.

        Raises:
            CheckpointError: the time is spent.
        """
        if self._literal is not None:
            if self._text.startswith("^"):
                return self.match(text)
            if self._whole:
                return text.endswith((self._literal, f"{self._literal}\n"))
            return self._literal in text
        return self._run(self._compiled.search, text, budget or self._budget)

    def _run(self, match: Any, text: str, budget: MatchBudget) -> bool:
        budget.check(self._text)
        if isinstance(self._compiled, re.Pattern):
            return match(text) is not None
        try:
            return match(text, timeout=max(budget.seconds_left(), 0.001)) is not None
        except (TimeoutError, MemoryError, RecursionError):
            raise budget.spent(self._text) from None


class PatternList:
    """Regular expressions in order, of which the first counts that matches at the start of a name.

    A list may have an expression for each matrix of a checkpoint. So only expressions are tried that begin as the name.

    Args:
        patterns: the expressions.
        budget: the time of all expressions of the config.

    Raises:
        CheckpointError: as by `BoundedPattern`.
    """

    def __init__(self, patterns: Iterable[str], budget: MatchBudget) -> None:
        self._patterns = [BoundedPattern(pattern, budget) for pattern in patterns]
        self._by_prefix: dict[str, list[int]] = {}
        for position, pattern in enumerate(self._patterns):
            self._by_prefix.setdefault(_literal_prefix(pattern._text), []).append(position)
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix})

    def __len__(self) -> int:
        return len(self._patterns)

    def first(self, names: Iterable[str], before: int | None = None) -> int | None:
        """The position of the first expression that matches one of the names.

        Args:
            names: the names.
            before: only expressions before this position count; None for all.

        Returns:
            None where none matches.

        Raises:
            CheckpointError: the time of all expressions is spent.
        """
        found = len(self._patterns) if before is None else before
        for name in names:
            for length in self._lengths:
                if length > len(name):
                    break
                for position in self._by_prefix.get(name[:length], ()):
                    if position >= found:
                        break
                    if self._patterns[position].match(name):
                        found = position
                        break
        return None if found == (len(self._patterns) if before is None else before) else found


class SearchList:
    """Regular expressions in order, which are searched in names.

    A list may have expressions for each layer of a model. So only those are tried whose longest literal part is in the
    name.

    Args:
        patterns: the expressions.
        budget: the time of all expressions of the config.
    """

    def __init__(self, patterns: Iterable[BoundedPattern], budget: MatchBudget) -> None:
        self._by_part: dict[str, list[int]] = {}
        for position, pattern in enumerate(patterns):
            budget.check(pattern._text)
            self._by_part.setdefault(_longest_part(pattern), []).append(position)
        self._anywhere = self._by_part.pop("", [])
        self._parts = NameParts(self._by_part, budget)

    def possible(self, names: Iterable[str]) -> list[int]:
        """Positions of the expressions that may match one of the names, ascending; all that match are among them.

        Raises:
            CheckpointError: the time is spent.
        """
        parts = {part for name in names for part in self._parts.within(name)}
        return sorted({*self._anywhere, *(position for part in parts for position in self._by_part[part])})


_TOKEN = re.compile(r"\\\.|\\d[*+]?|\[0-9\][*+]?|\.[*+]?|[\w-]|\([^)]*\)\??")
"""The parts of a simple expression (`_SIMPLE`)."""


def _longest_part(pattern: BoundedPattern) -> str:
    """The longest text that is in every name that the expression matches; "" where none is known."""
    if pattern._literal is not None:
        return pattern._literal
    if not _SIMPLE.fullmatch(pattern._text):
        return ""
    tokens = ("." if each == r"\." else each if len(each) == 1 and each != "." else "\n"
              for each in _TOKEN.findall(pattern._text))  # fmt: skip
    return max("".join(tokens).split("\n"), key=len)


def literal_text(pattern: str) -> str | None:
    """The text that an expression is, without escapes; None for one that matches several texts."""
    found = _LITERAL.fullmatch(pattern)
    return None if found is None else found[1].replace("\\", "")


def _literal_prefix(pattern: str) -> str:
    """What every name starts with that the expression matches at the start."""
    if _PLAIN_GROUP.search(pattern) or "|" in re.sub(r"\((?:\?:)?[\w|]*\)", "", pattern):
        return ""
    found = _PREFIX.match(pattern)
    assert found is not None  # it may be empty
    text = found[1].replace("\\", "")
    return text[:-1] if found[2] else text


class WildcardPattern:
    """A name with wildcards, as `fnmatch` reads it, whose matches take bounded time; `text` is the name.

    Args:
        pattern: the name.
        budget: the time of all expressions of the config.

    Raises:
        CheckpointError: the time is spent, or the name is longer than `MAX_WILDCARD_LENGTH`.
    """

    def __init__(self, pattern: str, budget: MatchBudget) -> None:
        self.text = pattern
        _check_length(pattern, MAX_WILDCARD_LENGTH, budget.where)
        budget.check(pattern)
        self._expression = re.compile(translate(pattern))

    def match(self, text: str, budget: MatchBudget) -> bool:
        """Whether all of the text matches.

        Raises:
            CheckpointError: the time is spent.
        """
        budget.check(self.text)
        return self._expression.match(text) is not None


def _check_length(pattern: str, most: int, where: str) -> None:
    if len(pattern) > most:
        rule = f"{short_repr(pattern)} has {len(pattern)} characters, more than {most}"
        raise CheckpointError(rule, "List the names of modules instead", where)


def _compile(pattern: str, budget: MatchBudget) -> Any:
    """The compiled expression: an `re.Pattern` when it is simple, else a `regex.Pattern`."""
    where = budget.where
    _check_length(pattern, MAX_LENGTH, where)
    budget.check(pattern)
    # Counts side by side multiply as if they were nested: an upper bound. A count of ten digits exceeds the limit.
    repeats = math.prod(max(int(count[:10] or 1) for count in counts) or 1 for counts in _REPEAT_COUNT.findall(pattern))
    if repeats > MAX_REPEATS:
        rule = f"{short_repr(pattern)} repeats a part more than {MAX_REPEATS} times (the product of its repeat counts)"
        raise CheckpointError(rule, "Write it without counted repeats, or list the names", where)
    if _RECURSION.search(pattern):
        rule = f"{short_repr(pattern)} calls itself or one of its groups, which takes unbounded memory"
        raise CheckpointError(rule, "Write it without (?R), (?1) and (?&name), or list the names", where)
    if _VERSION_1.search(pattern):
        rule = f"{short_repr(pattern)} has the flag V1, with which sets of characters take unbounded time to compile"
        raise CheckpointError(rule, "Write it without (?V1), or list the names", where)
    import regex  # type: ignore[import-untyped, unused-ignore]  # types come with another package

    try:
        if pattern.count("*") + pattern.count("+") <= _SIMPLE_REPEATS and _SIMPLE.fullmatch(pattern):
            return re.compile(pattern)
        return regex.compile(pattern)
    except Exception as error:  # foreign text: what it raises is not listed
        raise InvalidPatternError(
            f"{short_repr(pattern)} is not a regular expression: {describe(error)}", where=where
        ) from error
