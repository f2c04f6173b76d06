"""Timing: several functions by turns, each replayed as a CUDA graph over a cold cache; medians and quartiles.

What the figures need in order to mean something: the second-level cache is overwritten before every replay; small
layers exist several times and take turns too; the order of the functions changes from round to round, so that none
always follows the same other; nothing is waited for inside a round, so that no launch is on the clock.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20
"""Written before each replay: more than four times the second-level cache of any GPU that this project knows."""

DROPPED = 2
"""First rounds, which are not counted."""

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one function.

    Attributes:
        us: the median.
        low: the first quartile.
        high: the third quartile.
        replays: how many were timed.
    """

    us: float
    low: float
    high: float
    replays: int


class CudaClock:
    """Times with CUDA events and graphs."""

    @cached_property
    def _flush(self) -> Tensor:
        return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def prepare(self, run: Run) -> tuple[Run, Any]:
        """A function as a graph.

        Args:
            run: allocates nothing that it was not given, or only through torch.

        Returns:
            What replays it, and what it returned: memory that every replay fills anew.
        """
        side = self._side  # always the same: the allocator keeps memory for each stream apart
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            run()  # allocates what is kept
            torch.cuda.synchronize()
            # Not torch's context manager, which empties the allocator's cache each time: there are hundreds of graphs.
            collecting = gc.isenabled()
            gc.disable()  # what is freed during a capture may end it
            graph.capture_begin()
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            else:
                graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        torch.cuda.synchronize()
        return graph.replay, result

    def round(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds of each, one after the other, each over a cold cache."""
        marks = []
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.zero_()
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


class HostClock:
    """Times on the CPU, without graphs and with whatever the caches hold: for trying things out, not for figures."""

    def prepare(self, run: Run) -> tuple[Run, Any]:
        """The function itself, and what it returns the first time."""
        return run, run()

    def round(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds of each, one after the other."""
        times = []
        for run in runs:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
        return times


Clock = CudaClock | HostClock

Name = TypeVar("Name", bound=Hashable)


def compare(clock: Clock, runs: Mapping[Name, Sequence[Run]], replays: int, seconds: float) -> dict[Name, Timing]:
    """Times functions by turns.

    Args:
        clock: the clock.
        runs: by name, one function or several that do the same over other memory, and take turns.
        replays: how often each is timed, at most.
        seconds: after which no further round is begun, once three have been timed.
    """
    names = list(runs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    begin = time.monotonic()
    for number in range(replays + DROPPED):
        if number >= DROPPED + 3 and time.monotonic() - begin > seconds:
            break
        order.shuffle(names)
        found = clock.round([runs[name][number % len(runs[name])] for name in names])
        if number >= DROPPED:
            for name, us in zip(names, found, strict=True):
                times[name].append(us)
    return {name: _timing(values) for name, values in times.items()}


def _timing(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(middle, low, high, len(values))
