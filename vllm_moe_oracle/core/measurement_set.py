"""Measurements of one layer, as decisions read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

Latencies = Mapping[str, Mapping[int, float]]
"""Microseconds by routing (``uniform``, ``skewed``) and number of tokens."""


@dataclass(frozen=True, slots=True)
class MeasurementSet:
    """What was measured of one kind of layer on one machine.

    Attributes:
        times: microseconds by backend, routing and number of tokens.
        source: where the measurements come from, for a message.
        failures: why a backend could not be measured, by name.
        remarks: how that machine differs from this one, and which measurements were found and not used.
        tiles: the fastest tile configurations by backend, as in `ShardPlan.tiles`.
        errors: standard deviations of the logarithms of times that are predicted, by backend; a backend that is not
            named was measured.
        ratio_errors: standard deviations of the logarithm of the ratio of two predicted times, by their backends; of a
            pair that is not named the errors of both are independent.
        filled: predicted times of backends at the few numbers of tokens at which they were not measured, as in `times`.
        cell_errors: standard deviations of the logarithm of a single predicted time, by backend.
        slow: names among `failures` of backends that did not return, and may only compile slowly.
    """

    times: Mapping[str, Latencies] = field(default_factory=dict)
    source: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    tiles: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    ratio_errors: Mapping[frozenset[str], float] = field(default_factory=dict)
    filled: Mapping[str, Latencies] = field(default_factory=dict)
    cell_errors: Mapping[str, float] = field(default_factory=dict)
    slow: Set[str] = frozenset()

    def ratio_error(self, one: str, other: str) -> float:
        """Standard deviation of the logarithm of the ratio of two backends' times; 0 where both were measured."""
        known = self.ratio_errors.get(frozenset((one, other)))
        return known if known is not None else math.hypot(self.errors.get(one, 0.0), self.errors.get(other, 0.0))

    def known_times(self, name: str) -> Latencies:
        """The times of a backend: measured, and filled in where it was not."""
        times, filled = self.times.get(name, {}), self.filled.get(name, {})
        return {routing: {**counts, **filled.get(routing, {})} for routing, counts in times.items()}
