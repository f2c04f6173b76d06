"""Decision records: how the processes of one server report their decisions to its metrics endpoint.

Workers decide, and another process serves the endpoint. The first process of a server reserves a directory and passes
its name on in an environment variable. Each worker writes its record there as a file, and the first process removes the
directory when it exits. A process that is killed cannot: the next server removes the directories whose writers have
all ended. Records are for display only, so file system errors never affect serving.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from . import settings
from .core.decision import Reason
from .core.problem import Activation, Problem
from .errors import MeasurementError, sanitize
from .untrusted import parse_json, read_file

logger = logging.getLogger("vllm.moe_oracle")

Record = TypeVar("Record")

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

_PREFIX = "vllm-moe-oracle-"
_LOCK = "writers.lock"
_HOLD_TRIES, _PROBE_TRIES, _LOCK_SECONDS = 20, 3, 0.01
"""How often a lock is tried to keep it, and to see whether anybody does, and the seconds between."""

_locks: dict[str, int] = {}
"""Descriptors of the locks that this process holds, by directory."""

_reserved: dict[str, int] = {}
"""The process that reserved a directory, by directory: a forked process has its parent's."""

RECORD_VERSION = 1
"""Version of ``decision_record.schema.json``, which every record carries as ``record_version``. Fields may be added
under the same version; one that goes or changes its meaning raises it."""

MAX_RECORD_BYTES = 1 << 24
"""Bytes of a server's records that are read. What is larger is not the record of its processes, and is ignored."""


class RecordedReason(msgspec.Struct, frozen=True):
    """Why a backend cannot run a group of layers; `str` is that of `core.decision.Reason`."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return str(Reason("", self.detail, self.remedy))


class RecordedCandidate(msgspec.Struct, frozen=True):
    """A backend's verdict on a group of layers."""

    backend: str
    accepted: bool
    reasons: list[RecordedReason] = []


class RecordedDecision(msgspec.Struct, frozen=True):
    """Which backend runs a group of layers, and what decided."""

    backend: str
    why: str = ""
    explanation: str = ""
    numerics: str = ""


class RecordedScheme(msgspec.Struct, frozen=True):
    """The format of a group of layers."""

    name: str = ""
    bits: _Count = 0
    group_size: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)] = 0
    zero_points: bool | None = None


class RecordedParallel(msgspec.Struct, frozen=True):
    """How a group of layers is distributed over ranks."""

    tp: _Count = 1


class RecordedProblem(msgspec.Struct, frozen=True):
    """What a group of layers is on one rank, in the fields of `core.problem.Problem`; 0, "" and None where the record
    lacks a field."""

    scheme: RecordedScheme = RecordedScheme()
    num_experts: _Count = 0
    top_k: _Count = 0
    hidden_size: _Count = 0
    intermediate_size: _Count = 0
    ragged_intermediate_size: _Count = 0
    unpadded_intermediate_size: _Count = 0
    activation: Activation | None = None
    parallel: RecordedParallel = RecordedParallel()
    eplb: bool = False

    def differences(self, problem: Problem) -> list[tuple[str, object, object]]:
        """What a layer of a checkpoint has otherwise: the field, the record's value and the layer's.

        Not compared is what vLLM's options change, such as the dtype. Fields that the record lacks differ in nothing.

        Args:
            problem: the layer with all of its experts, on one rank.
        """
        own, scheme = self.scheme, problem.scheme
        copies = self.eplb and self.num_experts > problem.num_experts  # EPLB counts redundant experts
        inner = self.unpadded_intermediate_size or self.ragged_intermediate_size
        inner = inner or self.intermediate_size * self.parallel.tp
        words = {None: "", False: "no", True: "yes"}
        fields: tuple[tuple[str, object, object], ...] = (
            ("format", own.name, scheme.name),
            ("bits", own.bits, scheme.bits),
            ("group size", own.group_size, scheme.group_size),
            ("zero points", words[own.zero_points], words[scheme.zero_points]),
            ("experts", 0 if copies else self.num_experts, problem.num_experts),
            ("top-k", self.top_k, problem.top_k),
            ("hidden size", self.hidden_size, problem.hidden_size),
            ("intermediate size", inner, problem.unsharded_intermediate_size),
            ("activation", "" if self.activation is None else str(self.activation), str(problem.activation)),
        )
        return [each for each in fields if each[1] and each[1] != each[2]]


class RecordedGroup(msgspec.Struct, frozen=True):
    """Layers that are decided alike."""

    layers: list[str]
    decision: RecordedDecision
    count: _Count = 0
    problem: RecordedProblem = RecordedProblem()
    candidates: list[RecordedCandidate] = []


class RecordedDevice(msgspec.Struct, frozen=True):
    """The device of a server's process."""

    name: str = ""


class ServerRecord(msgspec.Struct, frozen=True):
    """The fields of a decision record that are read from a report; `decision_record.schema.json` describes them.

    Others are ignored, and those that another release may lack have defaults.

    Raises:
        ValueError: the record has another version, or numbers that no process has.
    """

    groups: list[RecordedGroup]
    record_version: int = RECORD_VERSION
    moe_oracle: str = ""
    vllm: str | None = ""
    device: RecordedDevice = RecordedDevice()
    moe_layers: _Count = 0
    served: _Count = 0
    left_to_stock: dict[str, str] = {}
    rank: _Count = 0
    ranks: _Count = 1
    host: str = ""
    process: _Count = 0
    program: str = ""
    load_began: float = 0.0
    load_ended: float = math.inf

    def __post_init__(self) -> None:
        if self.record_version != RECORD_VERSION:
            raise ValueError(f"record_version is {self.record_version}; this release reads {RECORD_VERSION}")
        if not self.rank < self.ranks:
            raise ValueError(f"rank is {self.rank}, ranks is {self.ranks}; ranks count from 0")
        if not self.served <= self.moe_layers:
            raise ValueError(f"served is {self.served}, more than the moe_layers, which are {self.moe_layers}")
        if not 0 <= self.load_began <= self.load_ended:
            raise ValueError("the load ends before it begins")

    def is_of_one_load_with(self, other: ServerRecord) -> bool:
        """Whether ranks of one load can have written both: each has begun before any has ended, as ranks wait for each
        other before they load."""
        return max(self.load_began, other.load_began) <= min(self.load_ended, other.load_ended)

    def process_and_layers(self) -> tuple[object, set[str]]:
        """What `last_of_each_load` asks of a record: the process, and names of the layers that run through the
        oracle."""
        return (self.host, self.process), {layer for group in self.groups for layer in group.layers}


def last_of_each_load(
    records: Iterable[Record], described: Callable[[Record], tuple[object, set[str]]]
) -> list[Record]:
    """The records that count among those of a report, a file to which each load of a model adds one.

    A model with a layer that drafts is two loads of one process, and the second record has the layers of both. Other
    models of a process, and other processes with its number, have other layers or the same ones again.

    Args:
        records: in the file's order.
        described: a record's process, and the names of its layers.
    """
    found: dict[int, Record] = {}
    last: dict[object, tuple[int, set[str]]] = {}
    for index, record in enumerate(records):
        process, layers = described(record)
        before, loaded = last.get(process, (-1, set()))
        if loaded < layers:  # and not equal: that is another load
            found.pop(before, None)
        last[process] = index, layers
        found[index] = record
    return list(found.values())


def reserve_dir() -> None:
    """Reserves the directory's name in a server's first process; other processes inherit it.

    The first record creates the directory: most processes that load plugins have no model.
    """
    if settings.records_dir() is not None:
        return
    parent = tempfile.gettempdir()
    _remove_stale(parent)
    # A name that no other process can have created before.
    folder = os.path.join(parent, f"{_PREFIX}{secrets.token_hex(8)}")
    settings.set_records_dir(folder)
    _reserved[folder] = os.getpid()
    atexit.register(_remove_if_owner, folder)


def _remove_stale(parent: str) -> None:
    """Removes the directories whose writers have all ended: of servers that were killed.

    A lock says who is alive, also over containers that share the directory. Directories of other users cannot be
    opened, and are left.
    """
    for entry, lock in _folders(parent):
        if _try_lock(lock, fcntl.LOCK_EX, _PROBE_TRIES):  # not a live one's
            shutil.rmtree(entry.path, ignore_errors=True)


def _folders(parent: str) -> Iterator[tuple[os.DirEntry[str], int]]:
    """Servers' directories that can be opened, by name, each with the open file of its lock."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(parent), key=lambda each: each.name):
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
                try:
                    yield entry, lock
                finally:
                    os.close(lock)


def _hold_lock(folder: str) -> None:
    """Makes the directory, and keeps a lock on it until this process, and every process forked from it, has ended.

    Raises:
        OSError: it cannot be made, or another process keeps it locked.
    """
    path = os.path.join(folder, _LOCK)
    for _ in range(_HOLD_TRIES if folder not in _locks else 0):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        held = _try_lock(lock, fcntl.LOCK_SH, _HOLD_TRIES)
        # Who found nobody alive has removed the directory before the lock was taken.
        if held and os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
            _locks[folder] = lock
            return
        os.close(lock)
    if folder not in _locks:
        raise TimeoutError(f"{path} is locked by another process")


def _try_lock(lock: int, kind: int, tries: int) -> bool:
    """Whether a lock could be taken. Only writers hold one for longer than an instant."""
    for _ in range(tries):
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
        except OSError:  # a file system without locks: nothing is ever removed as stale
            return kind == fcntl.LOCK_SH
    return False


def remove_dir() -> None:
    """Forgets the directory's name, and removes the directory if this process has reserved it. One that another process
    has named stays: it has records of others, or is no directory of records at all."""
    folder = settings.records_dir()
    if folder is not None:
        settings.set_records_dir(None)
        if folder in _locks:
            os.close(_locks.pop(folder))
        _remove_if_owner(folder)


def _remove_if_owner(folder: str) -> None:
    if _reserved.get(folder) == os.getpid():  # a forked process inherits the exit handlers
        shutil.rmtree(folder, ignore_errors=True)


def write_record(record: dict[str, Any]) -> None:
    """Writes this process's record of one model, replacing an earlier one of the same layers.

    Args:
        record: JSON types only; ``groups`` has the layers.
    """
    folder = settings.records_dir()
    if folder is None:
        return
    first = next((layer for group in record["groups"] for layer in group["layers"]), "")
    name = f"{os.getpid()}-{first}".replace("/", "_")[:200]
    try:
        _hold_lock(folder)
        descriptor, beside = tempfile.mkstemp(dir=folder, suffix=".part")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(beside, Path(folder) / f"{name}.json")
    except OSError as error:
        logger.warning("moe_oracle: the metrics endpoint will not have these decisions: %s", error)


def running_servers() -> Iterator[list[dict[str, Any]]]:
    """The records of each server of this user that runs on this machine, a list for each."""
    for entry, lock in _folders(tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            # A writer is alive if the lock stays taken.
            if own and not _try_lock(lock, fcntl.LOCK_EX, _PROBE_TRIES) and (found := list(read_records(entry.path))):
                yield found


def read_records(folder: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of all processes of a server, in the order of file names. Invalid files are skipped with a warning.

    Args:
        folder: the server's directory; None for this process's.
    """
    folder = folder or settings.records_dir()
    if folder is None:
        return
    left = MAX_RECORD_BYTES
    for path in sorted(Path(folder).glob("*.json")):
        try:
            data = read_file(path, left, MeasurementError)
            left -= len(data)
            found = parse_json(data, MeasurementError, str(path))
            if not isinstance(found, dict) or not isinstance(found.get("groups"), list):
                raise MeasurementError("is not an object with a list `groups`", where=str(path))
        except MeasurementError as error:
            logger.warning("moe_oracle: not a decision record: %s", sanitize(str(error)))
            continue
        yield found
