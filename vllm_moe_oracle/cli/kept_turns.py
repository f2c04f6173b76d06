"""The turns of `ab` in a file, so that a run that was ended goes on where it stopped."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeasurementError
from ..untrusted import boundary, complete_lines, parse_json
from ..whole_files import append_whole, write_whole, writing
from .served_benchmark import BenchResult

_NAME = "turns.jsonl"
_MAX_BYTES = 1 << 22


class ServedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server's turn.

    Attributes:
        turn: its number, from 1.
        kind: stock or plugin.
        start_seconds: from the start of the process until it was healthy.
        results: the benchmarks', by how many requests ran at the same time.
        backends: how many layers run by backend, over all its processes; empty for stock's.
        layers: MoE layers of its processes.
    """

    turn: int
    kind: str
    start_seconds: float
    results: dict[int, BenchResult]
    backends: dict[str, int]
    layers: int

    def figures(self) -> tuple[float, ...]:
        """Seconds of the start last; before it, for each benchmark, output tokens per second, and the median
        milliseconds to the first token and between tokens."""
        found = [
            figure
            for each in self.results.values()
            for figure in (each.output_throughput, each.median_ttft_ms, each.median_itl_ms)
        ]
        return (*found, self.start_seconds)


class KeptTurns:
    """What a run has measured so far, in memory and in a file of its folder.

    Args:
        folder: the run's folder.
        identity: all that the figures depend on, as JSON values.
        resume: go on with what the file holds; otherwise it starts empty.

    Raises:
        MeasurementError: the file cannot be written; or `resume`, and there is no such file, it is damaged, or is of
            another run; or not `resume`, and it holds what another run has measured.
    """

    def __init__(self, folder: Path, identity: Any, resume: bool) -> None:
        self._path = folder / _NAME
        self.first: dict[str, float] = {}
        self.served: dict[tuple[int, str], ServedTurn] = {}
        if resume:
            self._read(msgspec.json.decode(msgspec.json.encode(identity)))
            return
        # A run that ended before its first figures left one line, and loses nothing.
        if self._path.is_file() and complete_lines(self._path, _MAX_BYTES, MeasurementError)[0][1:]:
            rule = "holds the turns of an earlier run, which would be lost"
            remedy = "Continue it with --resume, or name another folder with --logs"
            raise MeasurementError(rule, remedy, str(self._path))
        with self._writing():
            self._path.unlink(missing_ok=True)
        self._append(identity)

    def _writing(self) -> AbstractContextManager[None]:
        """Says which file it is that cannot be written."""
        return writing(self._path, "the turns cannot be written", "Name another folder with --logs")

    def _read(self, identity: Any) -> None:
        where = str(self._path)
        lines, _ = complete_lines(self._path, _MAX_BYTES, MeasurementError)
        head, *rest = [parse_json(line, MeasurementError, where) for line in lines] or [None]
        if head != identity:
            raise MeasurementError(
                "holds the turns of another model, other options or other packages",
                "Repeat that run's command, or name another folder with --logs",
                where,
            )
        with boundary(MeasurementError, "does not hold the turns of a run", where=where):
            loads = {int(each["concurrency"]) for each in head["loads"]}
            for each in rest:
                if "first" in each:
                    self.first = msgspec.convert(each["first"], dict[str, float])
                else:
                    served = msgspec.convert(each, ServedTurn, strict=False)
                    if set(served.results) != loads or not all(0 < figure < math.inf for figure in served.figures()):
                        raise ValueError(f"turn {served.turn} of {served.kind} lacks figures, or they are not positive")
                    self.served[served.turn, served.kind] = served
        with self._writing():
            write_whole(self._path, b"".join(line + b"\n" for line in lines))

    def keep_first(self, seconds: dict[str, float]) -> None:
        """Keeps the seconds of the first starts."""
        self.first = seconds
        self._append({"first": seconds})

    def keep(self, served: ServedTurn) -> None:
        """Keeps one server's turn."""
        self.served[served.turn, served.kind] = served
        self._append(served)

    def _append(self, value: Any) -> None:
        with self._writing():
            append_whole(self._path, msgspec.json.encode(value) + b"\n")
