"""Measurements as JSON: profiles that are shipped with this package, exported by `tune`, or given by the user.

Reading is strict: unknown fields, impossible numbers and oversized files are errors, and so is every exception of
reading one. One bad entry voids the file: it was edited or damaged after `write`, which checks what it writes, and its
other times would decide what servers run. A profile that is read is never changed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..devices.catalog import is_same_gpu
from ..errors import MeasurementError
from ..untrusted import boundary, check_fields_once, check_values, read_file
from ..whole_files import write_whole, writing
from .environment import Environment, differences, is_same_release, is_same_triton
from .kernel_shape import MAX_SAMPLES, KernelShape, Sample, is_displayable

FORMAT = "vllm-moe-oracle measurements"
VERSION = 1
MAX_BYTES = 32 << 20
"""Size of the largest file of measurements that is read. The largest shipped profile has 0.2 MiB."""

SHIPPED_FOLDER = Path(__file__).parents[1] / "profiles"
"""Directory of the shipped profiles. A GPU may have several files; all of them are searched."""


class BackendTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The samples of one backend for one kernel shape, packed. JSON keys are strings, so numbers of tokens are, too.

    Attributes:
        activations: see `Sample`.
        times: median, first and third quartile in microseconds, and number of replays, by routing and number of tokens.
        error: largest error of all samples.
        router: see `Sample`.
        failures: reasons by routing and number of tokens.
        tiles: tile configurations that were faster than the backend's own choice, by routing and number of tokens.
        stock_class: of a stock layer, vLLM's class that ran it.
    """

    activations: str
    times: dict[str, dict[str, tuple[float, float, float, int]]] = {}
    error: float = 0.0
    router: bool = False
    failures: dict[str, dict[str, str]] = {}
    tiles: dict[str, dict[str, str]] = {}
    stock_class: str = ""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of one kernel shape.

    Attributes:
        kernel_shape: the shape.
        backends: times by name of the backend.
    """

    kernel_shape: KernelShape
    backends: dict[str, BackendTimes]


class _Header(msgspec.Struct, frozen=True):
    """The fields that every version of the format has."""

    format: str = ""
    version: int = 0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of measurements from one environment.

    Attributes:
        format: `FORMAT`.
        version: version of the format.
        environment: where everything in the file was measured.
        entries: one per kernel shape.
        conditions: how it was measured, in words, and the command that repeats it.
    """

    format: str
    version: int
    environment: Environment
    entries: tuple[Entry, ...]
    conditions: dict[str, str] = {}

    def samples(self, shape: KernelShape) -> list[Sample]:
        """The samples of a kernel shape."""
        return [sample for entry in self.entries if entry.kernel_shape == shape for sample in _entry_samples(entry)]

    def stock_classes(self, shape: KernelShape) -> dict[str, str]:
        """vLLM's classes of the stock layers of a kernel shape, by name of the stock layer."""
        found = {
            name: each for entry in self.entries if entry.kernel_shape == shape for name, each in entry.backends.items()
        }
        return {name: each.stock_class for name, each in found.items() if each.stock_class}


def make(
    environment: Environment, samples: Mapping[KernelShape, Iterable[Sample]], conditions: Mapping[str, str]
) -> Profile:
    """Packs measurements into a profile.

    Args:
        environment: where they were taken.
        samples: samples by kernel shape.
        conditions: how they were taken.

    Raises:
        MeasurementError: samples of one backend differ in what a profile has once for each backend.
    """
    entries = [Entry(shape, _times_by_backend(found)) for shape, found in sorted(samples.items())]
    return Profile(FORMAT, VERSION, environment, tuple(entries), dict(conditions))


def _times_by_backend(samples: Iterable[Sample]) -> dict[str, BackendTimes]:
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
        for kinds, words in (
            ({each.activations for each in found}, "precisions of activations"),
            ({each.router for each in found if not each.failure}, "kinds of times, with the router and without it"),
        ):
            if len(kinds) > 1:
                rule = f"{backend} has measurements of {len(kinds)} {words}, and a profile has one for each backend"
                raise MeasurementError(rule, "Keep those of each kind in a profile of their own")
        router = any(each.router for each in found)
        error = float(f"{max(each.error for each in found):.3g}")
        timings[backend] = BackendTimes(found[0].activations, times, error, router, failures, tiles)
    return timings


def _entry_samples(entry: Entry) -> Iterable[Sample]:
    for backend, packed in entry.backends.items():
        for routing, counts in packed.times.items():
            for tokens, (us, low, high, replays) in counts.items():
                fields: dict[str, Any] = {"us": us, "low": low, "high": high, "replays": replays}
                fields |= {"error": packed.error, "router": packed.router}
                fields["tile"] = packed.tiles.get(routing, {}).get(tokens, "")
                yield _sample(backend, packed, routing, tokens, fields)
        for routing, reasons in packed.failures.items():
            for tokens, failure in reasons.items():
                yield _sample(backend, packed, routing, tokens, {"failure": failure})


def _sample(backend: str, packed: BackendTimes, routing: str, tokens: str, fields: dict[str, Any]) -> Sample:
    """A sample from JSON fields, type-checked."""
    fields |= {"backend": backend, "activations": packed.activations, "routing": routing, "tokens": int(tokens)}
    return msgspec.convert(fields, Sample)


def read_limited(path: Path) -> bytes:
    """The bytes of an untrusted file of measurements, at most `MAX_BYTES`.

    Raises:
        MeasurementError: the file cannot be read, is not a regular file, is too large, or has too many values.
    """
    data = read_file(path, MAX_BYTES, MeasurementError)
    check_values(data, MeasurementError, str(path))
    return data


def read(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        MeasurementError: the file cannot be read, or is not a valid profile.
    """
    where = str(path)
    remedy = "Make one with: vllm-moe-oracle tune MODEL --export FILE"
    return _decode(read_limited(path), remedy, where)


def _decode(data: bytes, remedy: str, where: str) -> Profile:
    """A profile from its bytes; raises as `read` does."""
    with boundary(MeasurementError, "is not a profile of measurements", remedy, where):
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise MeasurementError("is not a profile of measurements", remedy, where)
        if (version := header.version) != VERSION:
            raise MeasurementError(
                f"has version {version!r} of the format, this release reads {VERSION}", remedy, where
            )
        profile = msgspec.json.decode(data, type=Profile)
        check_fields_once(data, MeasurementError, where)
        if not profile.environment.is_valid:
            raise MeasurementError("has an invalid environment", remedy, where)
        _check_entries(profile.entries, remedy, where)
    return profile


def _check_entries(entries: Iterable[Entry], remedy: str, where: str) -> None:
    """Refuses entries that cannot be, or contradict each other.

    Raises:
        MeasurementError: an entry has an invalid name or number, too many of them, or two that are for the same.
    """
    counts: Counter[KernelShape] = Counter()
    seen: Counter[KernelShape] = Counter()
    for entry in entries:
        shape = entry.kernel_shape
        if not shape.is_valid:
            raise MeasurementError("has an invalid layer", remedy, where)
        counts[shape] += len(entry.backends) + sum(
            len(times) for each in entry.backends.values() for times in each.times.values()
        )
        if (count := counts[shape]) > MAX_SAMPLES:
            rule = f"{shape}: has {count} measurements, more than {MAX_SAMPLES}"
            raise MeasurementError(rule, "Measure it at fewer numbers of tokens", where)
        if not is_displayable(*(each.stock_class for each in entry.backends.values())):
            raise MeasurementError(f"{shape}: has an invalid name of a class", remedy, where)
        for backend, packed in entry.backends.items():
            if words := _contradiction(packed):
                raise MeasurementError(f"{shape}: {backend[:200]} has {words}", remedy, where)
        for sample in _entry_samples(entry):
            if not sample.is_valid:
                rule = f"{shape}: {sample.backend[:200]} has an invalid measurement"
                raise MeasurementError(rule, where=where)
        seen[shape] += 1
    if twice := next((shape for shape, number in seen.items() if number > 1), None):
        raise MeasurementError(f"{twice}: has {seen[twice]} entries", "Keep one of them", where)


_TOKENS = re.compile("[1-9][0-9]{0,9}")


def _contradiction(packed: BackendTimes) -> str:
    """What of a backend's samples is written in two ways, or is for nothing; "" for none."""
    for kind in (packed.times, packed.failures, packed.tiles):
        for tokens in (tokens for counts in kind.values() for tokens in counts):
            if _TOKENS.fullmatch(tokens) is None:
                return f"the number of tokens {tokens[:40]!r}, which is not a number in digits"
    for routing, reasons in packed.failures.items():
        if both := reasons.keys() & packed.times.get(routing, {}).keys():
            return f"a time and a failure at {min(both, key=int)} tokens, {routing} routing"
    for routing, tiles in packed.tiles.items():
        if alone := tiles.keys() - packed.times.get(routing, {}).keys():
            return f"a tile configuration and no time at {min(alone, key=int)} tokens, {routing[:40]!r} routing"
    return ""


def encode(profile: Profile) -> bytes:
    """A profile as JSON, with one line per backend, so that a diff of two files is readable."""
    head = {"format": profile.format, "version": profile.version, "environment": profile.environment}
    lines = [f'"{name}": {_to_json(value)},' for name, value in {**head, "conditions": profile.conditions}.items()]
    lines.append('"entries": [')
    for number, entry in enumerate(profile.entries):
        lines.append(f'{{"kernel_shape": {_to_json(entry.kernel_shape)}, "backends": {{')
        backends = [f"  {_to_json(name)}: {_to_json(timing)}" for name, timing in entry.backends.items()]
        lines.append(",\n".join(backends))
        lines.append("}}" + ("," if number + 1 < len(profile.entries) else ""))
    return ("{\n" + "\n".join(lines) + "\n]}\n").encode()


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def check_writable(path: Path, gpu: str, shapes: Collection[KernelShape]) -> None:
    """Checks, before minutes of measuring, that a path can be written as a file, and that no layer is lost by it.

    Args:
        path: the file.
        gpu: the GPU that it is to be of.
        shapes: the layers that it is to have.

    Raises:
        MeasurementError: the path is a directory, or a file that is no profile, is of another GPU, or has other layers.
    """
    present = _present(path)
    if present is None:
        return
    if not is_same_gpu(present.environment.gpu, gpu):
        raise MeasurementError(f"is a profile of {present.environment.gpu}, not of {gpu}", _REPLACED, str(path))
    if lost := [str(each.kernel_shape) for each in present.entries if each.kernel_shape not in shapes]:
        rule = f"has {len(present.entries)} layers, of which {len(lost)} would be lost, the first {lost[0]}"
        raise MeasurementError(rule, _REPLACED, str(path))


def check_replaces(profile: Profile, path: Path) -> None:
    """Checks that a profile has what the file has that it replaces: each time, measured again or failed since.

    Raises:
        MeasurementError: as by `check_writable`, or some times would be lost.
    """
    check_writable(path, profile.environment.gpu, {each.kernel_shape for each in profile.entries})
    present = _present(path)
    if present is None:
        return
    times = {key for key, sample in _measured(present).items() if not sample.failure}
    if lost := times - _measured(profile).keys():
        shape, backend, routing, tokens = min(lost, key=str)
        first = f"{backend} at {tokens} tokens, {routing} routing, of {shape}"
        raise MeasurementError(f"has {len(lost)} times that would be lost, the first {first}", _REPLACED, str(path))


_REPLACED = "Name another file, or measure or import all that this one has in one call"


def _present(path: Path) -> Profile | None:
    """The profile that a file has; None where there is no file, or an empty one, or a pipe or a device.

    Raises:
        MeasurementError: the path is a directory, or the file is no profile.
    """
    if not path.name or os.path.isdir(path):
        raise MeasurementError("is a directory", "Name a file", str(path))
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return None
    try:
        return read(path)
    except MeasurementError as error:
        rule = f"would be replaced, and {error.rule}"
        raise MeasurementError(rule, "Name another file, or remove this one", str(path)) from error


def _measured(profile: Profile) -> dict[tuple[KernelShape, str, str, int], Sample]:
    """Every sample by layer, backend, kind of routing and number of tokens."""
    return {
        (entry.kernel_shape, each.backend, each.routing, each.tokens): each
        for entry in profile.entries
        for each in _entry_samples(entry)
    }


def write(profile: Profile, path: Path) -> None:
    """Writes a profile atomically, after it was read back: what could not be read replaces no file.

    Raises:
        MeasurementError: the profile is invalid, or the file cannot be written.
    """
    data = encode(profile)
    _decode(data, "Leave those measurements out", f"the profile for {path}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


@cache
def shipped() -> tuple[Profile, ...]:
    """The profiles in this package.

    Raises:
        MeasurementError: a file is damaged, which is a defect of the installation.
    """
    return tuple(read(path) for path in sorted(SHIPPED_FOLDER.glob("nvidia_*.json")))


@cache
def shipped_comparisons() -> tuple[Profile, ...]:
    """Times of backends beside stock vLLM's own layer, from runs other than those of `shipped` where there are any.

    No choice is made by them; `report` and `explain` show them.

    Raises:
        MeasurementError: a file is damaged, which is a defect of the installation.
    """
    return tuple(read(path) for path in sorted(SHIPPED_FOLDER.glob("stock_nvidia_*.json")))


def comparisons_for(here: Environment) -> list[Profile]:
    """The profiles of `shipped_comparisons` of the same GPU, not a part of it, vLLM and Triton, as far as known.

    Raises:
        MeasurementError: a file is damaged, which is a defect of the installation.
    """
    return [
        each
        for each in shipped_comparisons()
        if not differences(each.environment, here).hard
        and is_same_release("vllm", each.environment, here)
        and is_same_triton(each.environment, here)
    ]
