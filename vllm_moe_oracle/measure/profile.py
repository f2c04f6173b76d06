"""Measurements as JSON: profiles that are shipped with this package, exported by `tune`, or given by the user.

A profile is read strictly (no unknown fields, no impossible number), never written to, and bounded in size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec

from ..errors import MeasurementError
from .cells import Cell, Sample
from .environment import Environment

FORMAT = "vllm-moe-oracle measurements"
VERSION = 1
MOST_BYTES = 64 << 20

SHIPPED = Path(__file__).parents[1] / "profiles"
"""The folder of the profiles in this package; one file a GPU, all of them are looked at."""


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One backend's times in a cell.

    Attributes:
        activations: see `Sample`.
        times: by routing and number of tokens (as JSON has it, a string): median, quartiles, replays.
        error: the largest of the samples'.
        router: see `Sample`.
        failures: by routing and number of tokens.
        tiles: by routing and number of tokens, where another tile configuration than the backend's own was the fastest.
    """

    activations: str
    times: dict[str, dict[str, tuple[float, float, float, int]]] = {}
    error: float = 0.0
    router: bool = False
    failures: dict[str, dict[str, str]] = {}
    tiles: dict[str, dict[str, str]] = {}


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell's measurements.

    Attributes:
        cell: the cell.
        backends: by name.
    """

    cell: Cell
    backends: dict[str, Timing]


class _Header(msgspec.Struct, frozen=True):
    """What every version of the format has."""

    format: str = ""
    version: int = 0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of measurements from one environment.

    Attributes:
        format: what the file is.
        version: of its structure.
        environment: where everything in it was measured.
        entries: one for each cell.
        conditions: how it was measured, in words, and the command.
    """

    format: str
    version: int
    environment: Environment
    entries: tuple[Entry, ...]
    conditions: dict[str, str] = {}

    def samples(self, cell: Cell) -> list[Sample]:
        """What was measured of a cell."""
        return [sample for entry in self.entries if entry.cell == cell for sample in _samples(entry)]


def make(environment: Environment, samples: Mapping[Cell, Iterable[Sample]], conditions: Mapping[str, str]) -> Profile:
    """A profile of measurements.

    Args:
        environment: where they were taken.
        samples: by cell.
        conditions: how.
    """
    entries = [Entry(cell, _timings(found)) for cell, found in sorted(samples.items())]
    return Profile(FORMAT, VERSION, environment, tuple(entries), dict(conditions))


def _timings(samples: Iterable[Sample]) -> dict[str, Timing]:
    by_backend: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda each: (each.backend, each.routing != "uniform", each.tokens)):
        by_backend.setdefault(sample.backend, []).append(sample)
    timings = {}
    for backend, found in by_backend.items():
        times: dict[str, dict[str, tuple[float, float, float, int]]] = {}
        failures: dict[str, dict[str, str]] = {}
        tiles: dict[str, dict[str, str]] = {}
        for each in found:
            if each.failure:
                failures.setdefault(each.routing, {})[str(each.tokens)] = each.failure
            else:
                numbers = (round(each.us, 2), round(each.low, 2), round(each.high, 2), each.replays)
                times.setdefault(each.routing, {})[str(each.tokens)] = numbers
            if each.tile:
                tiles.setdefault(each.routing, {})[str(each.tokens)] = each.tile
        error = float(f"{max(each.error for each in found):.3g}")
        timings[backend] = Timing(found[0].activations, times, error, found[0].router, failures, tiles)
    return timings


def _samples(entry: Entry) -> Iterable[Sample]:
    for backend, timing in entry.backends.items():
        for routing, counts in timing.times.items():
            for tokens, (us, low, high, replays) in counts.items():
                yield msgspec.convert(
                    {
                        "backend": backend,
                        "activations": timing.activations,
                        "tokens": int(tokens),
                        "routing": routing,
                        "us": us,
                        "low": low,
                        "high": high,
                        "replays": replays,
                        "error": timing.error,
                        "router": timing.router,
                        "tile": timing.tiles.get(routing, {}).get(tokens, ""),
                    },
                    Sample,
                )
        for routing, reasons in timing.failures.items():
            for tokens, failure in reasons.items():
                yield msgspec.convert(
                    {
                        "backend": backend,
                        "activations": timing.activations,
                        "tokens": int(tokens),
                        "routing": routing,
                        "failure": failure,
                    },
                    Sample,
                )


def contents(path: Path) -> bytes:
    """A file of measurements, whoever wrote it.

    Args:
        path: the file.

    Raises:
        MeasurementError: it cannot be read, is no regular file, or is larger than any of them.
    """
    where = str(path)
    try:
        # Not blocking: a pipe that nobody writes to must not stop a server.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MeasurementError("is no regular file", where=where)
            if status.st_size > MOST_BYTES:
                raise MeasurementError(f"has {status.st_size} bytes, more than {MOST_BYTES}", where=where)
            return file.read(MOST_BYTES + 1)
    except MeasurementError:
        raise
    except (OSError, ValueError) as error:
        raise MeasurementError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=where) from error


def read(path: Path) -> Profile:
    """Reads a profile.

    Args:
        path: the file.

    Raises:
        MeasurementError: it cannot be read, or is no profile.
    """
    where = str(path)
    remedy = "Make one with: vllm-moe-oracle tune MODEL --export FILE"
    data = contents(path)
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise MeasurementError("is no profile of measurements", remedy, where)
        if (version := header.version) != VERSION:
            raise MeasurementError(
                f"has version {version!r} of the format, this release reads {VERSION}", remedy, where
            )
        profile = msgspec.json.decode(data, type=Profile)
        if not profile.environment.sound:
            raise MeasurementError("was measured in an impossible place", remedy, where)
        for entry in profile.entries:
            if not entry.cell.sound:
                raise MeasurementError("has an impossible layer", remedy, where)
            for sample in _samples(entry):
                if not sample.sound:
                    rule = f"{entry.cell}: {sample.backend[:200]} has an impossible measurement"
                    raise MeasurementError(rule, where=where)
    except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, MeasurementError):
            raise
        raise MeasurementError(f"is no profile of measurements: {error}", remedy, where) from error
    return profile


def encode(profile: Profile) -> bytes:
    """A profile as JSON, one backend's times a line: a difference of two files can be read."""
    head = {"format": profile.format, "version": profile.version, "environment": profile.environment}
    lines = [f'"{name}": {_json(value)},' for name, value in {**head, "conditions": profile.conditions}.items()]
    lines.append('"entries": [')
    for number, entry in enumerate(profile.entries):
        lines.append(f'{{"cell": {_json(entry.cell)}, "backends": {{')
        backends = [f"  {_json(name)}: {_json(timing)}" for name, timing in entry.backends.items()]
        lines.append(",\n".join(backends))
        lines.append("}}" + ("," if number + 1 < len(profile.entries) else ""))
    return ("{\n" + "\n".join(lines) + "\n]}\n").encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def check_target(path: Path) -> None:
    """Whether a path can be a profile's: to be asked before minutes of measuring.

    Raises:
        MeasurementError: it names no file.
    """
    if not path.name or os.path.isdir(path):
        raise MeasurementError("is a folder", "Name a file", str(path))


def write(profile: Profile, path: Path) -> None:
    """Writes a profile, all of it or nothing.

    Raises:
        MeasurementError: the file cannot be written.
    """
    check_target(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(encode(profile))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise MeasurementError(f"cannot be written: {error.strerror}", where=str(path)) from error


@cache
def shipped() -> tuple[Profile, ...]:
    """The profiles in this package.

    Raises:
        MeasurementError: one is damaged; that is a defect of the installation.
    """
    return tuple(read(path) for path in sorted(SHIPPED.glob("nvidia_*.json")))
