"""The lines of ``bench --jsonl``, which `report` and ``tune --import`` read.

A run begins with a line ``{"conditions": {...}}``: the environment, the command, the routing and the method. Every
further line is a `BenchRecord`: the times of all backends of one layer at one number of tokens. Runs in one environment
may follow each other in a file; what a later one measured again replaces the earlier figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeasurementError, mentions_out_of_memory
from ..settings import Settings
from ..untrusted import boundary, check_fields_once
from .environment import Environment, differences
from .kernel_shape import KernelShape, Sample
from .profile import read_limited

STOCK_PREFIX = "stock:"
"""Prefix of a stock layer's name; the rest is the value of vLLM's ``--moe-backend``."""

STOCK_DEFAULT = f"{STOCK_PREFIX}auto"
"""Name of stock vLLM's default layer."""

PEER_PREFIX = "peer:"
"""Prefix of the name of another project's kernel, which the oracle never chooses; see `measuring.peers`."""

CONDITIONS_LINE = re.compile(rb'\s*\{\s*"conditions"\s*:')
"""Matches the line with which a run begins."""

_REMEDY = "Make them with: vllm-moe-oracle bench --jsonl FILE"


class _Conditions(msgspec.Struct, frozen=True):
    """Of a run's conditions, those that samples need."""

    environment: Environment
    command: str
    method: str
    routing: str


class _FirstLine(msgspec.Struct, frozen=True):
    """The line before a run's records."""

    conditions: _Conditions


class BenchChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the oracle chose when the benchmark ran.

    Attributes:
        backend: name of the chosen backend.
        why: what decided.
        behind_best: slowdown against the fastest backend of the record, e.g. 0.02; None if the choice was not timed.
        speedup: time of a stock layer over the choice's time, by name of the stock layer.
    """

    backend: str
    why: str = ""
    behind_best: float | None = None
    speedup: dict[str, float] = {}


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one layer at one number of tokens. All times are microseconds.

    Attributes:
        layer: fields of the layer, see `model_shapes.to_json`.
        kernel_shape: the layer's kernel shape.
        tokens: rows of the input.
        us: medians by backend; stock layers and peers are among them.
        quartiles: first and third quartiles by backend.
        replays: numbers of timed replays by backend.
        activations: precision to which each backend quantizes activations, without stock layers.
        errors: relative errors of the checked tokens, without stock layers.
        failures: why a backend or stock layer has no time.
        stock: vLLM's class by name of the stock layer.
        tiles: tile configurations by backend, where serving would use a measured one or another was faster.
        router_included: whether times include top-k over the router's logits.
        roofline_us: the roofline; None for an unknown GPU.
        fraction_of_roofline: roofline over time by backend; None for an unknown GPU.
        choice: the oracle's choice; None if no backend can run the layer.
    """

    layer: dict[str, Any]
    kernel_shape: KernelShape
    tokens: int
    us: dict[str, float]
    quartiles: dict[str, tuple[float, float]] = {}
    replays: dict[str, int] = {}
    activations: dict[str, str] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    stock: dict[str, str] = {}
    tiles: dict[str, str] = {}
    router_included: bool = False
    roofline_us: float | None = None
    fraction_of_roofline: dict[str, float] | None = None
    choice: BenchChoice | None = None

    @property
    def name(self) -> str:
        """Name of the layer."""
        return str(self.layer.get("name", "a layer"))

    def samples(self, routing: str) -> Iterator[Sample]:
        """The record as samples, without stock layers, peers, and failures for lack of memory.

        Args:
            routing: the routing of the benchmark's conditions.

        Raises:
            KeyError: the record lacks a number of a backend.
            msgspec.ValidationError: a number or the routing has the wrong type.
        """
        for name, precision in self.activations.items():
            if name.startswith(PEER_PREFIX):
                continue
            fields: dict[str, Any] = {"backend": name, "activations": precision, "tokens": self.tokens}
            fields["routing"] = routing
            if name in self.us:
                low, high = self.quartiles[name]
                fields |= {"us": self.us[name], "low": low, "high": high, "replays": self.replays[name]}
                fields |= {"error": self.errors[name], "router": self.router_included}
                fields["tile"] = self.tiles.get(name, "")
            elif mentions_out_of_memory(self.failures[name]):
                continue
            else:
                fields["failure"] = self.failures[name]
            yield msgspec.convert(fields, Sample)


def silence(seconds: float) -> str:
    """The failure of a backend that did not return in time."""
    return f"it did not come back within {seconds:.3g} s"


_SILENCE_SHARES = (1 / 3, 2 / 3)
_MIN_SILENCE = 10.0
"""Seconds that a compiler may take for one kernel."""


def silence_limits(seconds: float) -> tuple[float, float]:
    """Seconds after which a start kills a backend that does not come back: at first, and at the next start.

    A compiler may take longer than the first, and keeps what it has compiled; what is silent for the second counts as
    hanging.

    Args:
        seconds: the setting `measure_at_start`. Where it ends earlier, nothing is recorded of the backend.
    """
    first, last = (max(_MIN_SILENCE, share * seconds) for share in _SILENCE_SHARES)
    return first, last


def needs_longer(waited: float, seconds: float) -> bool:
    """Whether a backend did not return (`waited` > 0) and had clearly less than so many seconds: it may only compile
    slowly."""
    return 0 < waited < 0.9 * seconds


def may_be_slow(waited: float, measure_at_start: float) -> bool:
    """Whether a backend did not return, and has not failed: it had less time than a start's second attempt gives it. If
    starts measure nothing, that of the setting's default counts."""
    return needs_longer(waited, silence_limits(measure_at_start or Settings().measure_at_start)[-1])


def _read_conditions(line: bytes, where: str) -> _Conditions:
    found = msgspec.json.decode(line, type=_FirstLine).conditions
    check_fields_once(line, MeasurementError, where)
    return found


def check_joins(path: Path, here: Environment) -> None:
    """Checks, before minutes of measuring, that a run may follow those that a file has.

    Args:
        path: the file.
        here: where the run will be.

    Raises:
        MeasurementError: the file cannot be read, is not one of records, or has records of another environment, which
            no reader may take for those of this one.
    """
    where = str(path)
    with boundary(MeasurementError, "is not a file of bench records", "Name another file", where):
        for number, line in enumerate(read_limited(path).split(b"\n"), 1):
            if number > 1 and not CONDITIONS_LINE.match(line):
                continue
            there = _read_conditions(line, f"{where}, line {number}").environment
            if there != here:
                known = differences(there, here)
                words = "; ".join((*known.hard, *known.soft)) or "it is not known as well as this one"
                rule = f"has records of another environment, which a run here cannot join ({words})"
                raise MeasurementError(rule, "Name another file, or remove this one", where)


def read_samples(
    path: Path, note: Callable[[str], None] | None = None
) -> tuple[Environment, dict[str, str], dict[KernelShape, list[Sample]]]:
    """The samples of a file of records, without stock layers.

    A line that is no record voids the file: the times decide what servers run, and a file that was damaged or edited in
    one place cannot be trusted in others.

    Args:
        path: the file.
        note: is told that the last line of a run is no JSON, and is left out: its writer was interrupted. None makes it
            an error.

    Returns:
        Where the samples were taken, the first run's command and method, and the samples by kernel shape.

    Raises:
        MeasurementError: the file cannot be read, is not a file of records, has none, or has those of several
            environments.
    """
    where = str(path)
    with boundary(MeasurementError, "is not a file of bench records", _REMEDY, where):
        lines = read_limited(path).split(b"\n")
        begins = {number for number, line in enumerate(lines, 1) if number == 1 or CONDITIONS_LINE.match(line)}
        first = run = _read_conditions(lines[0], f"{where}, line 1")
        found: dict[KernelShape, list[Sample]] = {}
        for number, line in enumerate(lines[1:], 2):
            if number in begins:
                run = _read_conditions(line, f"{where}, line {number}")
                if run.environment != first.environment:
                    rule = f"line {number} begins records of another environment, {run.environment}"
                    raise MeasurementError(rule, "Import a file of one environment", where)
                continue
            if number == len(lines) and not line.strip():  # after a newline at the end
                break
            try:
                record = msgspec.json.decode(line, type=BenchRecord)
            except msgspec.DecodeError as error:
                may_be_unfinished = number == len(lines) or number + 1 in begins
                if note and may_be_unfinished and not isinstance(error, msgspec.ValidationError):
                    note(f"{path}: line {number} is unfinished and left out")
                    continue
                raise MeasurementError(f"line {number} is not a record: {error}", _REMEDY, where) from error
            check_fields_once(line, MeasurementError, f"{where}, line {number}")
            found.setdefault(record.kernel_shape, []).extend(record.samples(run.routing))
    if not first.environment.is_valid:
        raise MeasurementError("has an invalid environment", where=where)
    if not any(found.values()):
        raise MeasurementError("has no measurements", _REMEDY, where)
    if not all(shape.is_valid for shape in found):
        raise MeasurementError("has an invalid layer", where=where)
    if invalid := [each for samples in found.values() for each in samples if not each.is_valid]:
        raise MeasurementError(f"has an invalid measurement: {invalid[0]}", where=where)
    return first.environment, {"command": first.command, "method": first.method}, found
