"""What `report` shows: measurements and decisions from files, in one form. `html_report` makes the page of it.

Three kinds of files are read: records of `bench` and decision records of servers, both with one JSON object per line,
and profiles. Files may come from anybody: every field is checked, and nothing reaches the page unescaped. A line that
cannot be read costs its record, and a note says which and why: nothing is decided by what the page shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..core.decision import Decision
from ..core.measurement_set import MeasurementSet
from ..core.objectives import MAX_TOKENS
from ..core.problem import Device, Problem
from ..decision_records import ServerRecord, last_of_each_load
from ..devices.catalog import find_spec, is_same_gpu, known_device
from ..errors import MeasurementError, NoBackendError, sanitize
from ..measurements import latency_model, lookup, model_shapes, profile, roofline
from ..measurements.bench_records import PEER_PREFIX, STOCK_DEFAULT, STOCK_PREFIX, BenchRecord
from ..measurements.environment import Environment
from ..measurements.kernel_shape import KernelShape, Sample, Timing, is_displayable, is_possible_time, kernel_shape_of
from ..oracle.selection import decide, equivalent_backends
from ..settings import Settings, env_var
from ..untrusted import boundary, check_fields_once

OTHER_FAMILY = "Other layers"
"""Heading of layers of no known model."""

EQUAL_MARGIN = 0.03
"""A choice at most this much slower than the fastest counts as equal: two runs of a kernel differ by as much."""


@dataclass(frozen=True)
class LayerPanel:
    """One layer on one machine.

    Attributes:
        name: name of the layer.
        shape: its kernel shape, in words.
        environment: where it was measured, in words.
        times: times by backend and number of tokens. Stock layers are among them, as ``stock:auto``.
        rooflines_us: roofline in microseconds by number of tokens.
        stock: vLLM's class by name of the stock layer.
        chosen: the oracle's choice by number of tokens.
        why: what decided.
        explanation: the same in a sentence; "" if the file does not say.
        rejected: backends that cannot run the layer, with every reason.
        failures: why a backend has no times, or not all.
        compared_with: backends that compute the same numbers as the choice; empty, meaning all, if that is unknown.
        skewed: as `times`, under skewed routing.
        circular: numbers of tokens whose times here are those that made the choice. They cannot judge it.
    """

    name: str
    shape: str
    environment: str
    times: Mapping[str, Mapping[int, Timing]]
    rooflines_us: Mapping[int, float] = field(default_factory=dict)
    stock: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[int, str] = field(default_factory=dict)
    why: str = ""
    explanation: str = ""
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    compared_with: tuple[str, ...] = ()
    skewed: Mapping[str, Mapping[int, Timing]] = field(default_factory=dict)
    circular: frozenset[int] = frozenset()

    @property
    def family(self) -> str:
        """The family of the model; `OTHER_FAMILY` for a layer of no known model."""
        shape = model_shapes.find(self.name)
        return OTHER_FAMILY if shape is None else shape.family

    @property
    def label(self) -> str:
        """The name in words: ``gpt-oss-20b mxfp4, TP 2`` for ``mxfp4:gpt-oss-20b@tp2``."""
        shape = model_shapes.find(self.name)
        if shape is None:
            return self.name
        ranks = self.name.partition("@tp")[2]
        return f"{shape.name} {self.name.partition(':')[0]}" + (f", TP {ranks}" if ranks else "")

    @property
    def counts(self) -> list[int]:
        """Measured numbers of tokens, ascending."""
        return sorted({count for points in self.times.values() for count in points})

    def slowdown(self, count: int) -> float | None:
        """Time of the choice over that of the fastest comparable backend, minus 1; None if it was not measured."""
        own, other = self._chosen(count), self._best_other(count)
        return None if own is None else own / min(own, other or own) - 1

    def speedup(self, count: int) -> float | None:
        """Time of stock vLLM's default over that of the choice; None if one of them was not measured."""
        own, stock = self._chosen(count), self.times.get(STOCK_DEFAULT, {}).get(count)
        return None if own is None or stock is None else stock.us / own

    def lead(self, count: int) -> float | None:
        """Time of the fastest other comparable backend over that of the choice; None if one was not measured."""
        own, other = self._chosen(count), self._best_other(count)
        return None if own is None or other is None else other / own

    def floor_share(self, count: int) -> float | None:
        """The roofline over the time of the choice; None if one of them is unknown."""
        own, floor = self._chosen(count), self.rooflines_us.get(count)
        return None if own is None or floor is None else floor / own

    def _best_other(self, count: int) -> float | None:
        not_chosen = (STOCK_PREFIX, PEER_PREFIX)
        against = self.compared_with or tuple(name for name in self.times if not name.startswith(not_chosen))
        others = [name for name in against if name != self.chosen.get(count) and count in self.times.get(name, {})]
        return min((self.times[name][count].us for name in others), default=None)

    def _chosen(self, count: int) -> float | None:
        point = self.times.get(self.chosen.get(count, ""), {}).get(count)
        return None if point is None else point.us


@dataclass(frozen=True)
class ReportContent:
    """Everything on the page.

    Attributes:
        panels: measured layers.
        servers: decision records of servers (the setting `report`).
        conditions: how the measurements were taken: title, and names with values.
        notes: what could not be shown, and why.
        about: what a reader has to know first, below the title; "" for nothing.
    """

    panels: tuple[LayerPanel, ...] = ()
    servers: tuple[ServerRecord, ...] = ()
    conditions: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    notes: tuple[str, ...] = ()
    about: str = ""

    def __add__(self, other: ReportContent) -> ReportContent:
        return ReportContent(
            self.panels + other.panels,
            self.servers + other.servers,
            self.conditions + other.conditions,
            self.notes + other.notes,
            self.about or other.about,
        )


# --- Reading --------------------------------------------------------------------------------------------------------


def read(path: Path, settings: Settings) -> ReportContent:
    """Reads a file.

    Args:
        path: records of `bench`, decision records, or a profile.
        settings: settings under which the oracle decides.

    Raises:
        MeasurementError: the file cannot be read, is not in one of these formats, or none of its records can be read.
    """
    with boundary(MeasurementError, "cannot be shown", _FILE_REMEDY, str(path)):
        return _read(path, settings)


def _read(path: Path, settings: Settings) -> ReportContent:
    data = profile.read_limited(path)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise MeasurementError("is empty", _FILE_REMEDY, str(path))
    objects = (each for _, line in lines if (each := _json_object(line)) is not None)
    first = next((each for each in objects if _is_bench(each) or _is_decision(each)), _json_object(lines[0][1]))
    if first is None or "format" in first:  # a profile, on several lines or on one
        try:
            found = profile.read(path)
        except MeasurementError as error:
            raise MeasurementError(error.rule, _FILE_REMEDY, error.where) from error
        return _from_profile(found, dataclasses.replace(settings, profile=str(path)), str(path))
    if _is_bench(first):
        return _from_bench(lines, path, settings)
    if _is_decision(first):
        return _from_server(lines, path)
    raise MeasurementError("is neither records nor a profile", _FILE_REMEDY, str(path))


def _is_bench(line: Mapping[str, Any]) -> bool:
    return "conditions" in line or "us" in line


def _is_decision(line: Mapping[str, Any]) -> bool:
    return "moe_oracle" in line and "groups" in line


_FILE_REMEDY = f"Give a file of bench --jsonl, of tune --export, or the one that {env_var('report')} names"


def from_shipped_profiles(settings: Settings) -> ReportContent:
    """The shipped measurements of the models that this package knows: profiles, and times beside stock vLLM's own
    layer, each layer once.

    Raises:
        MeasurementError: a file is damaged, which is a defect of the installation.
    """
    content = ReportContent()
    sources = [(each, "beside stock vLLM") for each in profile.shipped_comparisons()]
    sources += [(each, "for choices") for each in profile.shipped()]
    for found, purpose in sources:
        known = tuple(each for each in found.entries if each.kernel_shape in _known_layers())
        of_models = msgspec.structs.replace(found, entries=known)
        content += _from_profile(of_models, settings, f"shipped with this package, {purpose}")
    return dataclasses.replace(content, panels=_merge(content.panels)[0])


def from_cache(
    samples: Mapping[KernelShape, list[Sample]], environment: Environment, settings: Settings
) -> ReportContent:
    """The samples that the cache has of an environment.

    Args:
        samples: samples by kernel shape.
        environment: where they were taken.
        settings: settings under which the oracle decides.
    """
    content = _from_profile(profile.make(environment, samples, {}), settings, "this machine's cache")
    panels = tuple(
        _with_shipped_stock(panel, shape, environment)
        for panel, shape in zip(content.panels, sorted(samples), strict=True)
    )
    said = (_SHIPPED_STOCK_NOTE,) if panels != content.panels else ()
    return dataclasses.replace(content, panels=panels, notes=content.notes + said)


_SHIPPED_STOCK_NOTE = (
    "stock's times are those that this package ships, of another machine with the same GPU, vLLM and Triton; bench "
    "measures stock's layer on this one"
)


def _with_shipped_stock(panel: LayerPanel, shape: KernelShape, here: Environment) -> LayerPanel:
    """The panel with the shipped times of stock's layer, if they are of the same GPU, vLLM and Triton."""
    for found in profile.comparisons_for(here):
        stock = _panel_from_profile(found, shape, None)
        times = {name: points for name, points in stock.times.items() if name in stock.stock}
        failures = {name: each for name, each in stock.failures.items() if name == STOCK_DEFAULT}
        if times or failures:
            return dataclasses.replace(
                panel,
                times={**panel.times, **times},
                stock={name: f"{each}, shipped" for name, each in stock.stock.items()},
                failures={**panel.failures, **failures},
            )
    return panel


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _decode_line(line: bytes, kind: type[Any], path: Path, number: int) -> Any:
    with boundary(MeasurementError, f"line {number} is not a record", _FILE_REMEDY, str(path)):
        found = msgspec.json.decode(line, type=kind)
        check_fields_once(line, MeasurementError, f"{path}, line {number}")
        return found


_MOST_REMARKS = 5
"""Lines of a file that are named, of those that are left out."""


def _remarks(errors: Sequence[MeasurementError]) -> tuple[str, ...]:
    """What is said of lines that are left out."""
    said = [f"left out: {each.where}: {each.rule}" for each in errors[:_MOST_REMARKS]]
    more = len(errors) - len(said)
    return (*said, *([f"left out: {more} more lines of {errors[0].where}"] if more else []))


def _from_server(lines: Sequence[tuple[int, bytes]], path: Path) -> ReportContent:
    """Decisions of a server's processes. Where the last record of a process is left out, the one before is shown."""
    records: list[ServerRecord] = []
    errors: list[MeasurementError] = []
    for number, line in lines:
        try:
            records.append(_decode_line(line, ServerRecord, path, number))
        except MeasurementError as error:
            errors.append(error)
    if not records:
        raise errors[0]
    last = last_of_each_load(records, ServerRecord.process_and_layers)
    return ReportContent(servers=tuple(last), notes=_remarks(errors))


def _bench_line(line: bytes, path: Path, number: int) -> dict[str, Any] | BenchRecord:
    """The conditions of a run, or a record.

    Raises:
        MeasurementError: the line is neither.
    """
    fields = _json_object(line)
    if fields is not None and isinstance(head := fields.get("conditions"), dict):
        check_fields_once(line, MeasurementError, f"{path}, line {number}")
        return head
    record: BenchRecord = _decode_line(line, BenchRecord, path, number)
    _check_record(record, path, number)
    return record


def _from_bench(lines: Sequence[tuple[int, bytes]], path: Path, settings: Settings) -> ReportContent:
    """Times of the runs of a file. Where the conditions of one are left out, its records are of an unknown machine."""
    conditions: list[tuple[str, tuple[tuple[str, str], ...]]] = []
    here, suffix = _UNKNOWN, ""
    layers: dict[tuple[str, KernelShape, str], list[BenchRecord]] = {}
    environments: dict[str, Environment] = {}
    errors: list[MeasurementError] = []
    for number, line in lines:
        try:
            read = _bench_line(line, path, number)
        except MeasurementError as error:
            errors.append(error)
            if b'"conditions"' in line:
                here, suffix = _UNKNOWN, ""
            continue
        if isinstance(read, BenchRecord):
            where = f"{here}{suffix}"
            environments[where] = here
            layers.setdefault((read.name, read.kernel_shape, where), []).append(read)
            continue
        conditions.append((str(path), tuple((_to_text(name), _to_text(value)) for name, value in read.items())))
        here = _environment(read)
        suffix = "" if read.get("routing", "uniform") == "uniform" else sanitize(f", {read['routing']} routing")
    if errors and not layers:
        raise errors[0]
    panels = []
    for (_, shape, where), found in layers.items():
        panel = panel_of_records(found, where)
        problem, device = _known_layers().get(shape), _described_device(environments[where])
        if problem is not None and device is not None:
            panel = _with_decision(panel, problem, device, settings)
        panels.append(panel)
    return ReportContent(tuple(panels), conditions=tuple(conditions), notes=_remarks(errors))


def _check_record(record: BenchRecord, path: Path, number: int) -> None:
    """Checks that the numbers of a record are possible and its names displayable.

    Raises:
        MeasurementError: they are not.
    """
    times = [*record.us.values(), *(each for pair in record.quartiles.values() for each in pair)]
    if record.roofline_us is not None:
        times.append(record.roofline_us)
    if not 1 <= record.tokens <= MAX_TOKENS or not all(map(is_possible_time, times)):
        raise MeasurementError(f"line {number} has an invalid measurement", _FILE_REMEDY, str(path))
    if not is_displayable(record.name, str(record.kernel_shape), *record.us, *record.stock.values()):
        raise MeasurementError(f"line {number} has an invalid name", _FILE_REMEDY, str(path))


_UNKNOWN = Environment("an unknown machine")


def _environment(head: Mapping[str, Any]) -> Environment:
    """The environment of a benchmark's conditions."""
    try:
        found = msgspec.convert(head.get("environment", _UNKNOWN), Environment)
    except msgspec.ValidationError:
        return _UNKNOWN
    return found if found.is_valid else _UNKNOWN


def panel_of_records(records: Sequence[BenchRecord], environment: str) -> LayerPanel:
    """The panel of one layer's records.

    Args:
        records: at least one, in the order of their runs: what a later one measured again replaces the earlier figure.
        environment: where they were taken, in words.
    """
    times: dict[str, dict[int, Timing]] = {}
    failed: dict[tuple[str, int], str] = {}
    for record in records:
        for backend, us in record.us.items():
            low, high = record.quartiles.get(backend, (us, us))
            times.setdefault(backend, {})[record.tokens] = Timing(us, low, high)
            failed.pop((backend, record.tokens), None)
        for backend, reason in record.failures.items():
            failed[backend, record.tokens] = reason
            times.get(backend, {}).pop(record.tokens, None)
    times = {backend: found for backend, found in times.items() if found}
    stock = {key: value for record in records for key, value in record.stock.items()}
    why = next((record.choice.why for record in reversed(records) if record.choice is not None), "")
    return LayerPanel(
        name=records[0].name,
        shape=str(records[0].kernel_shape),
        environment=environment,
        times=times,
        rooflines_us={record.tokens: record.roofline_us for record in records if record.roofline_us is not None},
        stock=stock | {each: "" for each in times if each.startswith(STOCK_PREFIX) and each not in stock},
        chosen={record.tokens: record.choice.backend for record in records if record.choice is not None},
        why=why,
        explanation="as recorded when this was measured; no known model has the layer" if why else "",
        failures={backend: reason for (backend, _), reason in failed.items()},
    )


def _from_profile(found: profile.Profile, settings: Settings, source: str) -> ReportContent:
    """Panels of a profile, each with the choice that the oracle makes from it on such a machine."""
    device = _described_device(found.environment)
    panels, notes = [], []
    for entry in found.entries:
        problem = _known_layers().get(entry.kernel_shape)
        panel = _panel_from_profile(found, entry.kernel_shape, problem)
        if problem is None or device is None:
            why = "no known model has the layer" if problem is None else "the GPU is not in the catalog"
            notes.append(f"{panel.shape}: {why}, so the oracle's choice is not shown")
            panels.append(panel)
            continue
        panels.append(_with_decision(panel, problem, device, settings))
    head = {**found.conditions, "environment": str(found.environment), "packages": _to_text(found.environment.packages)}
    return ReportContent(tuple(panels), conditions=((source, tuple(head.items())),), notes=tuple(notes))


@cache
def _known_layers() -> dict[KernelShape, Problem]:
    """Layers of known models by kernel shape: those that are served, and other formats and tensor-parallel sizes."""
    found = {kernel_shape_of(problem): problem for problem in model_shapes.served_problems()}
    for shape, scheme, tp in itertools.product(model_shapes.names(), model_shapes.SCHEME_NAMES, (1, 2, 4, 8, 16)):
        with contextlib.suppress(MeasurementError):  # not every model can be sharded so
            problem = model_shapes.make_problem(scheme, shape, tp)
            found.setdefault(kernel_shape_of(problem), problem)
    return found


def _panel_from_profile(found: profile.Profile, shape: KernelShape, problem: Problem | None) -> LayerPanel:
    classes = found.stock_classes(shape)
    times: dict[str, dict[int, Timing]] = {}
    skewed: dict[str, dict[int, Timing]] = {}
    failures: dict[str, str] = {}
    for sample in found.samples(shape):
        if sample.failure:
            failures.setdefault(sample.backend, sample.failure)
            continue
        into = times if sample.routing == "uniform" else skewed
        into.setdefault(sample.backend, {})[sample.tokens] = Timing(sample.us, sample.low, sample.high)
    panel = LayerPanel(
        name=str(shape) if problem is None else problem.layer,
        shape=str(shape),
        environment=str(found.environment),
        times=times,
        stock={name: classes.get(name, "") for name in times if name.startswith(STOCK_PREFIX)},
        failures=failures,
        skewed=skewed,
    )
    if problem is None:
        return panel
    rooflines = {count: roofline.roofline_us(problem, count, found.environment.gpu) for count in panel.counts}
    return dataclasses.replace(panel, rooflines_us={count: us for count, us in rooflines.items() if us is not None})


def _described_device(environment: Environment) -> Device | None:
    """The device of an environment with its package versions; None if the catalog does not have the GPU."""
    if find_spec(environment.gpu) is None:
        return None
    found = known_device(environment.gpu)
    return dataclasses.replace(
        found,
        capability=environment.capability or found.capability,
        sm_count=environment.sm_count or found.sm_count,
        # A library that was missing when it was measured does not speak against a backend on such a machine.
        packages={**found.packages, **environment.packages},
    )


def _with_decision(panel: LayerPanel, problem: Problem, device: Device, settings: Settings) -> LayerPanel:
    measured = lookup.find_measurements(problem, device, settings)
    try:
        decision: Decision = decide(problem, device, settings, measurements=measured)
    except NoBackendError as error:
        return dataclasses.replace(panel, explanation=str(error))
    static = next(each for each in decision.candidates if each.accepted)
    comparable = equivalent_backends(static, decision.candidates)
    return dataclasses.replace(
        panel,
        compared_with=comparable,
        circular=_circular_counts(panel, decision.why, measured, comparable, device),
        chosen={count: decision.backend_for(count) for count in panel.counts},
        why=decision.why,
        explanation=decision.explanation,
        rejected=tuple(
            (each.backend, tuple(map(str, each.reasons))) for each in decision.candidates if not each.accepted
        ),
    )


def _circular_counts(
    panel: LayerPanel, why: str, measured: MeasurementSet | None, comparable: Sequence[str], device: Device
) -> frozenset[int]:
    """Numbers of tokens whose times made the choice: a choice by measurements is judged by other runs alone.

    Two runs do not agree to the hundredth of a microsecond in all backends. A predicted choice was made by this GPU's
    times where the model was fitted to them.
    """
    if measured is None or why not in ("measured", "predicted"):
        return frozenset()
    if why == "predicted":
        fitted = any(is_same_gpu(each, device.name) for each in latency_model.shipped().gpus)
        return frozenset(panel.counts if fitted else ())
    found = set()
    for count in panel.counts:
        pairs = [
            (panel.times[name][count].us, us)
            for name in comparable
            if count in panel.times.get(name, {})
            and (us := measured.times.get(name, {}).get("uniform", {}).get(count)) is not None
        ]
        if pairs and all(abs(one - other) < 0.006 for one, other in pairs):
            found.add(count)
    return frozenset(found)


def _to_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return sanitize(", ".join(f"{name} {each}" for name, each in value.items()))
    return sanitize(str(value))


def deduplicate(content: ReportContent) -> ReportContent:
    """The content with each layer on each device once.

    Args:
        content: of several files.
    """
    panels, twice = _merge(content.panels)
    said = f"in several of the files, shown once: {', '.join(dict.fromkeys(twice))}"
    return dataclasses.replace(content, panels=panels, notes=content.notes + ((said,) if twice else ()))


def _merge(panels: Iterable[LayerPanel]) -> tuple[tuple[LayerPanel, ...], list[str]]:
    """Each layer on each device once, and the names of those that came several times.

    Of several panels the one beside stock's layer is kept, then the one with the most backends; it gets another's times
    under skewed routing where it has none.
    """
    best: dict[tuple[str, str], LayerPanel] = {}
    twice: list[str] = []
    for panel in panels:
        key = (panel.shape, panel.environment)
        if key in best:
            twice.append(panel.name)
        before = best.get(key, panel)
        kept = max(before, panel, key=lambda each: (STOCK_DEFAULT in each.times, len(each.times)))
        best[key] = dataclasses.replace(kept, skewed=kept.skewed or panel.skewed or before.skewed)
    return tuple(best.values()), twice
