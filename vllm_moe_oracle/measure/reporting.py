"""What `report` shows: measurements and decisions from files, brought into one form; `pages` makes the page of them.

Three kinds of file are read: records of `bench` and decision records of servers (one JSON object a line), and profiles.
All may come from somebody else: they are checked field by field, and nothing of them reaches the page unescaped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..device import named, names
from ..errors import MeasurementError, NoBackendError, plain
from ..oracle.decision import Decision
from ..oracle.objectives import LARGEST
from ..oracle.oracle import comparable, decide
from ..oracle.problem import Device, Problem
from ..oracle.registry import default_registry
from ..settings import Settings
from . import floors, lookup, profile, shapes
from .benching import STOCK, choice_at
from .cells import MOST_MICROSECONDS, Cell, Sample, cell_of
from .environment import Environment

DEFAULT = f"{STOCK}auto"
"""The name of stock vLLM's default in records of `bench`."""

NEAR = 0.03
"""A choice within this part of the fastest is as good as it: what two runs of the same kernel differ by."""


@dataclass(frozen=True, slots=True)
class Point:
    """A median and its quartiles, in microseconds."""

    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """One layer on one machine.

    Attributes:
        name: the layer.
        words: its cell.
        place: where it was measured.
        times: by backend and number of tokens; stock vLLM's layers are among them, as ``stock:auto``.
        floors: microseconds below which nothing comes, by number of tokens.
        stock: vLLM's class by the name of a stock layer.
        chosen: the oracle's choice by number of tokens.
        why: what decided.
        because: the same in a sentence; "" when the file does not say.
        rejected: candidates that cannot run the layer, with every reason.
        failures: why a backend has no times, or not all.
        rivals: backends that the choice is held against: those that compute the same; all where it is not known.
        skewed: as `times`, of tokens that choose few experts often.
    """

    name: str
    words: str
    place: str
    times: Mapping[str, Mapping[int, Point]]
    floors: Mapping[int, float] = field(default_factory=dict)
    stock: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[int, str] = field(default_factory=dict)
    why: str = ""
    because: str = ""
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    skewed: Mapping[str, Mapping[int, Point]] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """Numbers of tokens at which anything was measured."""
        return sorted({count for points in self.times.values() for count in points})

    def behind(self, count: int) -> float | None:
        """By what part the choice takes longer than the fastest of its rivals; None where it was not measured."""
        own = self._chosen(count)
        against = self.rivals or tuple(name for name in self.times if name not in self.stock)
        times = [self.times[name][count].us for name in against if count in self.times.get(name, {})]
        return None if own is None else own / min([own, *times]) - 1

    def speedup(self, count: int) -> float | None:
        """Time of stock vLLM's default over that of the choice; None where one of them was not measured."""
        own, stock = self._chosen(count), self.times.get(DEFAULT, {}).get(count)
        return None if own is None or stock is None else stock.us / own

    def _chosen(self, count: int) -> float | None:
        point = self.times.get(self.chosen.get(count, ""), {}).get(count)
        return None if point is None else point.us

    def runs(self, count: int) -> str | None:
        """The choice at a number of tokens that need not have been measured; None where its neighbours differ."""
        below = [each for each in self.chosen if each <= count]
        above = [each for each in self.chosen if each >= count]
        found = {self.chosen[max(below)]} if below else set()
        found |= {self.chosen[min(above)]} if above else set()
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Server:
    """What one process of a server decided.

    Attributes:
        title: which process, of which releases.
        place: its device.
        served: how many of the model's MoE layers run through the oracle, in words.
        groups: one row for each group of layers: layers, format, backend, what decided, the reason, numerics.
        rejected: candidates that could not run a group, with every reason, by group.
    """

    title: str
    place: str
    served: str
    groups: tuple[tuple[str, ...], ...]
    rejected: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]


@dataclass(frozen=True)
class Content:
    """All that the page shows.

    Attributes:
        panels: layers that were measured.
        servers: what servers decided.
        conditions: how the measurements were taken: title, and names with values.
        notes: what could not be shown, and why.
    """

    panels: tuple[Panel, ...] = ()
    servers: tuple[Server, ...] = ()
    conditions: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Content) -> Content:
        return Content(
            self.panels + other.panels,
            self.servers + other.servers,
            self.conditions + other.conditions,
            self.notes + other.notes,
        )


# --- Reading --------------------------------------------------------------------------------------------------------


class _Choice(msgspec.Struct, frozen=True):
    backend: str
    why: str = ""


class _Record(msgspec.Struct, frozen=True):
    """A record of `bench`, as far as it is shown."""

    layer: dict[str, Any]
    cell: Cell
    tokens: int
    us: dict[str, float]
    quartiles: dict[str, tuple[float, float]] = {}
    failures: dict[str, str] = {}
    stock: dict[str, str] = {}
    floor_us: float | None = None
    choice: _Choice | None = None


class _Reason(msgspec.Struct, frozen=True):
    detail: str
    remedy: str = ""


class _Candidate(msgspec.Struct, frozen=True):
    backend: str
    accepted: bool
    reasons: list[_Reason] = []


class _Decided(msgspec.Struct, frozen=True):
    backend: str
    why: str
    because: str
    numerics: str = ""


class _SchemeName(msgspec.Struct, frozen=True):
    name: str
    bits: int = 0


class _Problem(msgspec.Struct, frozen=True):
    scheme: _SchemeName


class _Group(msgspec.Struct, frozen=True):
    layers: list[str]
    count: int
    problem: _Problem
    decision: _Decided
    candidates: list[_Candidate] = []


class _Machine(msgspec.Struct, frozen=True):
    name: str


class _Server(msgspec.Struct, frozen=True):
    """A decision record of a server, as far as it is shown."""

    moe_oracle: str
    vllm: str | None
    device: _Machine
    groups: list[_Group]
    moe_layers: int = 0
    served: int = 0
    rank: int = 0
    ranks: int = 1
    host: str = ""
    process: int = 0


def read(path: Path, settings: Settings) -> Content:
    """What a file holds.

    Args:
        path: records of `bench`, decision records, or a profile.
        settings: by which the choice from a profile is made.

    Raises:
        MeasurementError: it is none of these, or cannot be read.
    """
    data = profile.contents(path)
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise MeasurementError("is empty", _KINDS, str(path))
    first = _object(lines[0])
    if first is None or "format" in first:  # over several lines as it is written, or on one
        return _of_profile(profile.read(path), dataclasses.replace(settings, profile=str(path)), str(path))
    if "conditions" in first or "us" in first:
        return _of_bench(lines, path, settings)
    if "moe_oracle" in first and "groups" in first:
        return Content(servers=tuple(_server(_typed(line, _Server, path, n)) for n, line in enumerate(lines, 1)))
    raise MeasurementError("is nothing that can be shown", _KINDS, str(path))


_MOST_NAME = 200
"""Characters of a layer's, a backend's or a class's name."""

_KINDS = "Give a file of bench --jsonl, of tune --export, or of the setting report"


def shipped(settings: Settings) -> Content:
    """The profiles in this package.

    Raises:
        MeasurementError: one is damaged.
    """
    content = Content()
    for each in profile.shipped():
        content += _of_profile(each, settings, "shipped with this package")
    return content


def kept(samples: Mapping[Cell, list[Sample]], environment: Environment, settings: Settings) -> Content:
    """What the cache holds of an environment.

    Args:
        samples: by cell.
        environment: where they were taken.
        settings: by which the choice is made.
    """
    return _of_profile(profile.make(environment, samples, {}), settings, "this machine's cache")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _typed(line: bytes, kind: type[Any], path: Path, number: int) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MeasurementError(f"line {number} is no record: {error}", _KINDS, str(path)) from error


def _of_bench(lines: Sequence[bytes], path: Path, settings: Settings) -> Content:
    conditions: list[tuple[str, tuple[tuple[str, str], ...]]] = []
    here, suffix = Environment("an unknown machine"), ""
    layers: dict[tuple[str, Cell, str], list[_Record]] = {}
    places: dict[str, Environment] = {}
    for number, line in enumerate(lines, 1):
        fields = _object(line)
        if fields is not None and isinstance(head := fields.get("conditions"), dict):
            conditions.append((str(path), tuple((_words(name), _words(value)) for name, value in head.items())))
            here = _environment(head)
            suffix = "" if head.get("routing", "uniform") == "uniform" else plain(f", {head['routing']} routing")
            continue
        record: _Record = _typed(line, _Record, path, number)
        times = [*record.us.values(), *(each for pair in record.quartiles.values() for each in pair)]
        if record.floor_us is not None:
            times.append(record.floor_us)
        if not 1 <= record.tokens <= LARGEST or not all(0 < each < MOST_MICROSECONDS for each in times):
            raise MeasurementError(f"line {number} has an impossible measurement", _KINDS, str(path))
        name = str(record.layer.get("name", "a layer"))
        texts = (name, str(record.cell), *record.us, *record.stock.values())
        if not all(len(each) <= _MOST_NAME and each.isprintable() for each in texts):
            raise MeasurementError(f"line {number} names what cannot be drawn", _KINDS, str(path))
        place = f"{here}{suffix}"
        places[place] = here
        layers.setdefault((name, record.cell, place), []).append(record)
    panels = []
    for (name, cell, place), found in layers.items():
        panel = _panel(name, str(cell), place, found)
        problem, machine = _layers().get(cell), _machine(places[place])
        if problem is not None and machine is not None:
            panel = _decided(panel, problem, machine, settings)
        panels.append(panel)
    return Content(tuple(panels), conditions=tuple(conditions))


def _environment(head: Mapping[str, Any]) -> Environment:
    """Where records were taken, as far as their conditions say."""
    packages = head.get("packages")
    try:
        found = msgspec.convert(
            head["environment"]
            if "environment" in head
            else {
                "gpu": head.get("gpu", "an unknown machine"),
                "packages": packages if isinstance(packages, dict) else {},
                "driver": head.get("driver", ""),
                "kernels": head.get("kernels", ""),
            },
            Environment,
        )
    except msgspec.ValidationError:
        return Environment("an unknown machine")
    return found if found.sound else Environment("an unknown machine")


def _panel(name: str, words: str, place: str, records: Sequence[_Record]) -> Panel:
    times: dict[str, dict[int, Point]] = {}
    for record in records:
        for backend, us in record.us.items():
            low, high = record.quartiles.get(backend, (us, us))
            times.setdefault(backend, {})[record.tokens] = Point(us, low, high)
    stock = {key: value for record in records for key, value in record.stock.items()}
    why = next((record.choice.why for record in records if record.choice is not None), "")
    return Panel(
        name=name,
        words=words,
        place=place,
        times=times,
        floors={record.tokens: record.floor_us for record in records if record.floor_us is not None},
        stock=stock | {each: "" for each in times if each.startswith(STOCK) and each not in stock},
        chosen={record.tokens: record.choice.backend for record in records if record.choice is not None},
        why=why,
        because="as it was recorded when this was measured; the layer is none of a known model" if why else "",
        failures={key: value for record in records for key, value in record.failures.items()},
    )


def _of_profile(found: profile.Profile, settings: Settings, source: str) -> Content:
    """Panels of a profile, each with the choice that the oracle makes of it on such a machine."""
    machine = _machine(found.environment)
    panels, notes = [], []
    for entry in found.entries:
        problem = _layers().get(entry.cell)
        panel = _measured(found, entry.cell, problem)
        if problem is None or machine is None:
            why = "no layer of a known model" if problem is None else "no GPU that is described here"
            notes.append(f"{panel.words}: {why}, so what the oracle chooses is not shown")
            panels.append(panel)
            continue
        panels.append(_decided(panel, problem, machine, settings))
    head = {**found.conditions, "environment": str(found.environment), "packages": _words(found.environment.packages)}
    return Content(tuple(panels), conditions=((source, tuple(head.items())),), notes=tuple(notes))


@cache
def _layers() -> dict[Cell, Problem]:
    """Layers of the known models by cell: those that are served, and the same in other formats and cuts."""
    found = {cell_of(problem): problem for problem in shapes.served()}
    for shape, scheme, tp in itertools.product(shapes.names(), shapes.SCHEMES, (1, 2, 4, 8, 16)):
        with contextlib.suppress(MeasurementError):  # not every model can be cut so, or is in every format
            problem = shapes.problem(scheme, shape, tp)
            found.setdefault(cell_of(problem), problem)
    return found


def _measured(found: profile.Profile, cell: Cell, problem: Problem | None) -> Panel:
    times: dict[str, dict[int, Point]] = {}
    skewed: dict[str, dict[int, Point]] = {}
    failures: dict[str, str] = {}
    for sample in found.samples(cell):
        if sample.failure:
            failures.setdefault(sample.backend, sample.failure)
            continue
        into = times if sample.routing == "uniform" else skewed
        into.setdefault(sample.backend, {})[sample.tokens] = Point(sample.us, sample.low, sample.high)
    panel = Panel(
        name=str(cell) if problem is None else problem.layer,
        words=str(cell),
        place=str(found.environment),
        times=times,
        failures=failures,
        skewed=skewed,
    )
    if problem is None:
        return panel
    least = {count: floors.floor_us(problem, count, found.environment.gpu) for count in panel.counts}
    return dataclasses.replace(panel, floors={count: us for count, us in least.items() if us is not None})


def _machine(environment: Environment) -> Device | None:
    """The described device of an environment, with the versions that were there; None when none is described."""
    described = [named(name) for name in names()]
    found = next((each for each in described if each.name == environment.gpu), None)
    if found is None:
        return None
    # A library that was not there when it was measured is no reason against a backend on such a machine.
    return dataclasses.replace(found, packages={**found.packages, **environment.packages})


def _decided(panel: Panel, problem: Problem, machine: Device, settings: Settings) -> Panel:
    try:
        decision: Decision = decide(problem, machine, settings, evidence=lookup.evidence(problem, machine, settings))
    except NoBackendError as error:
        return dataclasses.replace(panel, because=str(error))
    static = next(each for each in decision.candidates if each.accepted)
    return dataclasses.replace(
        panel,
        rivals=comparable(static, decision.candidates, problem, default_registry()),
        chosen={count: choice_at(decision, count) for count in panel.counts},
        why=decision.why,
        because=decision.because,
        rejected=tuple(
            (each.backend, tuple(map(str, each.reasons))) for each in decision.candidates if not each.accepted
        ),
    )


def _server(found: _Server) -> Server:
    rejected = []
    rows = []
    for group in found.groups:
        layers = group.layers[0] if group.layers else "?"
        more = f" and {group.count - 1} more" if group.count > 1 else ""
        scheme = (
            f"int{group.problem.scheme.bits}" if group.problem.scheme.name == "wna16" else group.problem.scheme.name
        )
        taken = group.decision
        rows.append((f"{layers}{more}", scheme, taken.backend, taken.why, taken.because, taken.numerics))
        rejected.append(
            tuple(
                (each.backend, tuple(f"{r.detail} ({r.remedy})" if r.remedy else r.detail for r in each.reasons))
                for each in group.candidates
                if not each.accepted
            )
        )
    return Server(
        title=f"rank {found.rank} of {found.ranks}, process {found.process} on {found.host or 'a machine'}: "
        f"vLLM {found.vllm}, vllm-moe-oracle {found.moe_oracle}",
        place=found.device.name,
        served=f"{found.served} of {found.moe_layers} MoE layers run through the oracle",
        groups=tuple(rows),
        rejected=tuple(rejected),
    )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return plain(", ".join(f"{name} {each}" for name, each in value.items()))
    return plain(str(value))


def distinct(content: Content) -> Content:
    """The content with each layer on each machine once: of several, the one with the most backends, and with another's
    times under skewed routing where it has none.

    Args:
        content: of several files.
    """
    best: dict[tuple[str, str], Panel] = {}
    twice: list[str] = []
    for panel in content.panels:
        key = (panel.words, panel.place)
        if key in best:
            twice.append(panel.name)
        before = best.get(key, panel)
        kept = panel if len(panel.times) > len(before.times) else before
        best[key] = dataclasses.replace(kept, skewed=kept.skewed or panel.skewed or before.skewed)
    said = f"in several of the files, shown once: {', '.join(dict.fromkeys(twice))}"
    return dataclasses.replace(content, panels=tuple(best.values()), notes=content.notes + ((said,) if twice else ()))
