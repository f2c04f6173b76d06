"""The lines of ``bench --jsonl``, which `report` and ``tune --import`` read.

The first line is ``{"conditions": {...}}``: the environment, the command, the routing and the method. Every further
line is a `BenchRecord`: the times of all backends of one layer at one number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeasurementError, mentions_out_of_memory
from ..untrusted import boundary, check_fields_once
from .environment import Environment
from .kernel_shape import KernelShape, Sample
from .profile import read_limited

STOCK_PREFIX = "stock:"
"""Prefix of a stock layer's name; the rest is the value of vLLM's ``--moe-backend``."""

STOCK_DEFAULT = f"{STOCK_PREFIX}auto"
"""Name of stock vLLM's default layer."""

PEER_PREFIX = "peer:"
"""Prefix of the name of another project's kernel, which the oracle never chooses; see `measuring.peers`."""

_REMEDY = "Make them with: vllm-moe-oracle bench --jsonl FILE"


class _Conditions(msgspec.Struct, frozen=True):
    """Of the first line's conditions, those that samples need."""

    environment: Environment
    command: str
    method: str
    routing: str


class _FirstLine(msgspec.Struct, frozen=True):
    """The line before the records."""

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


def needs_longer(waited: float, seconds: float) -> bool:
    """Whether a backend did not return (`waited` > 0) and had clearly less than so many seconds: it may only compile
    slowly."""
    return 0 < waited < 0.9 * seconds


def read_samples(
    path: Path, note: Callable[[str], None] | None = None
) -> tuple[Environment, dict[str, str], dict[KernelShape, list[Sample]]]:
    """The samples of a file of records, without stock layers.

    Args:
        path: the file.
        note: is told that the last line is no JSON and has no newline, and is left out: its writer was interrupted.
            None makes it an error.

    Returns:
        Where the samples were taken, the command and the method, and the samples by kernel shape.

    Raises:
        MeasurementError: the file cannot be read, is not a file of records, or has none.
    """
    where = str(path)
    data = read_limited(path)
    with boundary(MeasurementError, "is not a file of bench records", _REMEDY, where):
        head, _, rest = data.partition(b"\n")
        conditions = msgspec.json.decode(head, type=_FirstLine).conditions
        check_fields_once(head, MeasurementError, f"{where}, line 1")
        environment, lines = conditions.environment, rest.split(b"\n")
        unfinished = len(lines) - 1  # "" after a newline at the end
        found: dict[KernelShape, list[Sample]] = {}
        for number, line in enumerate(lines):
            if number == unfinished and not line.strip():
                break
            try:
                record = msgspec.json.decode(line, type=BenchRecord)
            except msgspec.DecodeError as error:
                if note and number == unfinished and not isinstance(error, msgspec.ValidationError):
                    note(f"{path}: line {number + 2} is unfinished and left out")
                    break
                raise MeasurementError(f"line {number + 2} is not a record: {error}", _REMEDY, where) from error
            check_fields_once(line, MeasurementError, f"{where}, line {number + 2}")
            found.setdefault(record.kernel_shape, []).extend(record.samples(conditions.routing))
    if not environment.is_valid:
        raise MeasurementError("has an invalid environment", where=where)
    if not any(found.values()):
        raise MeasurementError("has no measurements", _REMEDY, where)
    if not all(shape.is_valid for shape in found):
        raise MeasurementError("has an invalid layer", where=where)
    if invalid := [each for samples in found.values() for each in samples if not each.is_valid]:
        raise MeasurementError(f"has an invalid measurement: {invalid[0]}", where=where)
    return environment, {"command": conditions.command, "method": conditions.method}, found
