"""Which of a test's cases run in the default tier; the others run in the full one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], step: int, start: int = 0) -> list[Any]:
    """Parameters of a test: every `step`-th case runs in the default tier.

    Args:
        cases: a value, or a tuple of the values of several arguments.
        step: for cases that differ little from their neighbors.
        start: index of the first one.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if index % step == start else (pytest.mark.full,)
        )
        for index, case in enumerate(cases)
    ]


def each_once(groups: Iterable[tuple[Any, Sequence[str]]], name_of: Callable[[Any], str]) -> list[Any]:
    """Parameters of a test of things with the layers, or whatever it is, that each is tried with: in the default tier
    each has one of them, by turns the first, the second and so on.

    Args:
        groups: the things, each with the names of what it is tried with.
        name_of: a thing's name; a case's is ``THING-WITH``.
    """
    return [
        pytest.param(
            thing, name, id=f"{name_of(thing)}-{name}", marks=() if number == turn % len(names) else (pytest.mark.full,)
        )
        for turn, (thing, names) in enumerate(groups)
        for number, name in enumerate(names)
    ]
