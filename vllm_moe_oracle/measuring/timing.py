"""Interleaved timing of functions, each replayed as a CUDA graph with a cold L2 cache: medians and quartiles.

Four rules make the times comparable. The L2 cache is overwritten before every replay. Small layers exist in several
copies that rotate. The order of the functions is shuffled in each round, so that none always follows the same other.
The host does not wait within a round, so that no launch is on the clock.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..measurements.kernel_shape import Timing

FLUSH_BYTES = 256 << 20
"""Bytes written before each replay: at least twice the L2 cache of every supported GPU."""

WARMUP_ROUNDS = 2
"""First rounds, which are not counted."""

Run = Callable[[], Any]
"""Runs what is timed and returns its output."""


class CudaClock:
    """Times CUDA graphs with CUDA events.

    Attributes:
        overwrites_output: whether a function that `prepare` returns writes the output that came with it.
    """

    overwrites_output = True

    @cached_property
    def _flush_buffer(self) -> Tensor:
        return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def prepare(self, run: Run) -> tuple[Run, Any]:
        """Captures a function as a CUDA graph.

        Args:
            run: the function. It must allocate device memory through torch only.

        Returns:
            A function that replays the graph, and the output, which every replay overwrites.
        """
        side = self._capture_stream  # one stream for all captures: the allocator pools memory by stream
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            run()  # allocates what stays allocated between calls
            torch.cuda.synchronize()
            # Not `torch.cuda.graph`, which empties the allocator's cache for each of hundreds of graphs.
            collecting = gc.isenabled()
            gc.disable()  # freeing CUDA objects during a capture may invalidate it
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
        """Microseconds of each function, run one after the other with a cold cache."""
        marks = []
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types here
            self._flush_buffer.zero_()
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


class HostClock:
    """Times on the CPU, without graphs or cold caches: for tests, not for results. Attributes as of `CudaClock`."""

    overwrites_output = False

    def prepare(self, run: Run) -> tuple[Run, Any]:
        """The function itself, and its output."""
        return run, run()

    def round(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds of each function, run one after the other."""
        times = []
        for run in runs:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
        return times


Clock = CudaClock | HostClock

Name = TypeVar("Name", bound=Hashable)


def time_interleaved(
    clock: Clock, runs: Mapping[Name, Sequence[Run]], replays: int, seconds: float
) -> dict[Name, Timing]:
    """Times functions in rounds, in shuffled order.

    Args:
        clock: the clock.
        runs: functions by name; several of one name do the same with different memory and rotate.
        replays: timed replays of each name, at most.
        seconds: time limit, after which no round starts once three were timed.
    """
    names = list(runs)
    times: dict[Name, list[float]] = {name: [] for name in names}
    shuffler = random.Random(0)
    begin = time.monotonic()
    for number in range(replays + WARMUP_ROUNDS):
        if number >= WARMUP_ROUNDS + 3 and time.monotonic() - begin > seconds:
            break
        shuffler.shuffle(names)
        found = clock.round([runs[name][number % len(runs[name])] for name in names])
        if number >= WARMUP_ROUNDS:
            for name, us in zip(names, found, strict=True):
                times[name].append(us)
    return {name: _summarize(values) for name, values in times.items()}


def _summarize(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(middle, low, high, len(values))
