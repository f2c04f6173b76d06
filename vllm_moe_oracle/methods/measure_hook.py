"""The function that measures a layer at a server's start, as `first_start` calls it.

Measuring builds layers with what this package has, so that the package `measuring` stands above this one, which must
not import it. The plugin, above both, sets the function here. This module imports nothing, so that registering the
plugin stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.problem import Problem
    from ..settings import Settings


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of a layer's measurement.

    Attributes:
        times: number of times of these backends in the cache, from this and earlier starts.
        unfinished: why times are missing; "" if none are.
        failures: why a backend could not be measured, by name, from this and earlier starts.
        slow: the same of backends that may only compile slowly, which `failures` does not have.
        cache: the file that holds them.
    """

    times: int
    unfinished: str
    failures: Mapping[str, str] = field(default_factory=dict)
    slow: Mapping[str, str] = field(default_factory=dict)
    cache: str = ""


Progress = Callable[[str, int, int], None]
"""Receives what is being done, the number of steps done, and the number of steps."""

Measure = Callable[["Problem", tuple[str, ...], "Settings", float, Progress], Measured]
"""Measures a layer with some backends, within a number of seconds, into the cache. Raises a `MeasurementError` where
that cannot be right here, or where the cache cannot be written."""

_measure: Measure | None = None


def set_measure(measure: Measure | None) -> None:
    """Sets the function; None removes it."""
    global _measure
    _measure = measure


def current_measure() -> Measure | None:
    """The function; None in a process without one."""
    return _measure
