"""Which MoE layers of a checkpoint a server runs through the oracle, by the report that the server wrote.

The setting `report` names a file; each process of a server appends one line of JSON for each model that it loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..core.problem import Problem
from ..decision_records import ServerRecord
from ..errors import MeasurementError, short_repr
from ..settings import env_var
from ..untrusted import boundary, complete_lines, parse_json
from .moe_layers import MoeLayers

MAX_REPORT_BYTES = 64 << 20
_MAX_LINES = 10_000


@dataclass(frozen=True, slots=True)
class Engagement:
    """What a server's report says of a checkpoint's MoE layers.

    Attributes:
        backends: the backend by layer, of the layers that run through the oracle on every rank.
        missing: why a layer does not, by layer.
        ranks: ranks that reported.
        expected_ranks: ranks that the server has.
        written_by: host, process and vLLM's release.
        unfinished: the file ends within a line, which belongs to a later load or to another rank, and is not read.
    """

    backends: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    expected_ranks: int = 1
    written_by: str = ""
    unfinished: bool = False

    @property
    def complete(self) -> bool:
        """Whether every layer runs through the oracle, and every rank says so."""
        return not self.missing and self.ranks == self.expected_ranks and not self.unfinished

    def __str__(self) -> str:
        total = len(self.backends) + len(self.missing)
        words = f"{len(self.backends)} of {total} MoE layers run through the oracle ({self.written_by})"
        if self.ranks != self.expected_ranks:
            words += f"; {self.ranks} of {self.expected_ranks} ranks have reported"
        return words


def read_engagement(path: Path, layers: MoeLayers) -> Engagement:
    """Compares a report with a checkpoint's layers; of several loads the last one counts.

    A line that cannot be read voids the report: it may be a rank of the last load, or all of it, and an earlier load
    would be taken for that.

    Args:
        path: the file that the setting `report` named.
        layers: the checkpoint's, from `find_moe_layers`.

    Raises:
        MeasurementError: the file cannot be read, is no report, is of another version of records, reports no layer of
            this checkpoint, or has last a model with the same names of layers and other layers.
    """
    problems = {problem.layer: problem for problem in layers.problems}
    names = problems.keys()
    records, unfinished = _read_records(path)
    ours = [each for each in records if names & (each.backends.keys() | each.stock.keys())]
    if not ours:
        known = next((layer for each in records for layer in each.backends), "")
        remedy = f"It reports layers such as {short_repr(known)}" if known else "It reports no layers"
        raise MeasurementError("reports no layer of this checkpoint", remedy, str(path))
    ours = _of_this_model(ours, problems, path)
    ranks = _last_load(ours)
    missing = {name: "its experts are not quantized" for name in layers.unquantized}
    missing |= {name: f"its experts are in {kind}" for name, kind in layers.unsupported_formats.items()}
    backends = {}
    for name in sorted(names, key=_by_numbers):
        holders = {rank: each for rank, each in ranks.items() if each.may_hold(name)}
        found = {rank: each.backends.get(name, "") for rank, each in holders.items()}
        if all(found.values()) and len(set(found.values())) == 1:
            backends[name] = next(iter(found.values()))
        else:
            missing[name] = _why_missing(name, found, ranks)
    last = ours[-1].record
    written_by = f"{last.host}, process {last.process}, vLLM {last.vllm or ''}"
    return Engagement(backends, missing, len(ranks), last.ranks, written_by, unfinished)


def _read_records(path: Path) -> tuple[list[_Record], bool]:
    """The records of a report, and whether it ends within a line."""
    lines, rest = complete_lines(path, MAX_REPORT_BYTES, MeasurementError)
    if len(lines) > _MAX_LINES:
        raise MeasurementError(f"has {len(lines)} lines; a report of more than {_MAX_LINES} is not read", "", str(path))
    unfinished = bool(lines and rest.strip()) and not _is_json(rest)
    if not unfinished:
        lines.append(rest)
    numbered = enumerate(lines, 1)
    return [_Record.read(line, f"{path}, line {number}") for number, line in numbered if line.strip()], unfinished


def _of_this_model(records: Sequence[_Record], problems: Mapping[str, Problem], path: Path) -> list[_Record]:
    """The records whose layers are the checkpoint's, not only by name.

    Others may be of a draft model, whose process has loaded the model, too; or of an earlier start with another model.

    Raises:
        MeasurementError: the last record is of a process that has not loaded this model; the message names a layer and
            what differs.
    """
    differing = [each.difference(problems) for each in records]
    found = [each for each, words in zip(records, differing, strict=True) if not words]
    last = records[-1].record
    if (last.host, last.process) not in {(each.record.host, each.record.process) for each in found}:
        remedy = "Give the report of a server of this checkpoint, or the checkpoint that the server has loaded"
        raise MeasurementError(f"the model that it reports last is another one: {differing[-1]}", remedy, str(path))
    return found


def _why_missing(name: str, found: Mapping[int, str], ranks: Mapping[int, _Record]) -> str:
    """Why a layer does not run through the oracle on every rank; `found` has its backend by rank, or ""."""
    reasons = [each.stock[name] for each in ranks.values() if name in each.stock]
    if reasons:
        return f"left to stock vLLM: {reasons[0]}"
    if any(found.values()):
        words = ", ".join(f"rank {rank}: {backend or 'none'}" for rank, backend in sorted(found.items()))
        return f"ranks differ ({words})"
    return "the server has not reported it: it did not load the layer, or other code serves it"


def _last_load(records: Sequence[_Record]) -> dict[int, _Record]:
    """The records of the load that has written last, by rank. Its ranks may be on several hosts.

    Each rank is a process of its own, whose last line counts. Another load begins with a line of a process that takes
    the rank of another one, that has another number of ranks, or that began when a rank of the load before had ended.
    """
    found: dict[int, _Record] = {}
    for each in records:
        one = each.record
        known = found.get(one.rank, each).record
        is_same = (known.host, known.process) == (one.host, one.process)
        others = (other.record for other in found.values())
        if not is_same or any(one.ranks != other.ranks or not one.is_of_one_load_with(other) for other in others):
            found = {}
        found[one.rank] = each
    return found


def _is_json(line: bytes) -> bool:
    """Whether a line is complete: a report that was edited may lack the last line's end."""
    try:
        parse_json(line, MeasurementError, "")
    except MeasurementError:
        return False
    return True


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 9 else (-1, part) for part in name.split(".")]


_REMEDY = f"Give the file that {env_var('report')} names, and use the vllm-moe-oracle of the server that wrote it"


@dataclass(frozen=True, slots=True)
class _Record:
    """One line of a report."""

    backends: Mapping[str, str]
    stock: Mapping[str, str]
    record: ServerRecord

    def difference(self, problems: Mapping[str, Problem]) -> str:
        """What the first layer that is not the checkpoint's has otherwise; "" where all are."""
        for group in self.record.groups:
            for layer in group.layers:
                if layer in problems and (found := group.problem.differences(problems[layer])):
                    words = (
                        f"{name} {theirs} in the report and {own} in the checkpoint" for name, theirs, own in found
                    )
                    return f"{layer} has {', '.join(words)}"
        return ""

    def may_hold(self, layer: str) -> bool:
        """Whether the process has the layer, as far as is known: not if it is one of another pipeline stage. Then the
        record does not name it, and counts no layer that it does not name."""
        named = self.backends.keys() | self.stock.keys()
        return layer in named or self.record.moe_layers != len(named)

    @classmethod
    def read(cls, line: bytes, where: str) -> _Record:
        """The record in a line.

        Raises:
            MeasurementError: it is none.
        """
        found = parse_json(line, MeasurementError, where)
        with boundary(MeasurementError, "is not a server's report", _REMEDY, where):
            record = msgspec.convert(found, ServerRecord)
        backends = {layer: group.decision.backend for group in record.groups for layer in group.layers}
        return cls(backends, record.left_to_stock, record)
