"""Decision records: how the processes of one server report their decisions to its metrics endpoint.

Workers decide, and another process serves the endpoint. The first process of a server reserves a directory and passes
its name on in an environment variable. Each worker writes its record there as a file, and the first process removes the
directory when it exits. A process that is killed cannot: the directory's name says whose it is, and the next server
removes those of dead processes. Records are for display only, so file system errors never affect serving.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import settings

logger = logging.getLogger("vllm.moe_oracle")

_PREFIX = "vllm-moe-oracle-"
_NAME = re.compile(rf"{_PREFIX}(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+")
"""A directory's name: the owner's PID namespace, process ID and start time, and random digits."""

MAX_RECORD_BYTES = 1 << 24
"""Larger files are ignored: they are not the record of one process."""


def reserve_dir() -> None:
    """Reserves the directory's name in a server's first process; other processes inherit it.

    The first record creates the directory: most processes that load plugins have no model.
    """
    if settings.records_dir() is not None:
        return
    parent = tempfile.gettempdir()
    _remove_stale(parent)
    # The random digits make a name that nobody else can have created in advance.
    namespace, pid = _pid_namespace(), os.getpid()
    folder = os.path.join(parent, f"{_PREFIX}{namespace}-{pid}-{_start_time(pid) or 0}-{secrets.token_hex(8)}")
    settings.set_records_dir(folder)
    atexit.register(_remove_if_owner, folder, os.getpid())


def _pid_namespace() -> int:
    """Identifies the processes among which a process ID is unique; 0 where the system does not say it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])  # a zombie has ended
    except (OSError, ValueError, IndexError):
        return None


def _remove_stale(parent: str) -> None:
    """Removes the directories of this user's processes that have ended: killed ones, mostly.

    A process of another PID namespace, as of a container that shares the directory, may be alive: its own are left.
    """
    namespace = _pid_namespace()
    try:
        found = [entry for entry in os.scandir(parent) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for entry in found:
        owner = _NAME.fullmatch(entry.name)
        if not namespace or owner is None or int(owner["namespace"]) != namespace:
            continue
        try:
            mine = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        except OSError:
            continue
        if mine and _start_time(int(owner["pid"])) != int(owner["start"]):
            shutil.rmtree(entry.path, ignore_errors=True)


def remove_dir() -> None:
    """Removes the directory and forgets its name."""
    folder = settings.records_dir()
    if folder is not None:
        settings.set_records_dir(None)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_owner(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits the exit handlers
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
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=folder, suffix=".part")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(beside, Path(folder) / f"{name}.json")
    except OSError as error:
        logger.warning("moe_oracle: the metrics endpoint will not have these decisions: %s", error)


def read_records() -> Iterator[dict[str, Any]]:
    """The records of all processes, in the order of file names. Invalid files are skipped with a warning."""
    folder = settings.records_dir()
    if folder is None:
        return
    for path in sorted(Path(folder).glob("*.json")):
        try:
            size = path.stat().st_size
            if size > MAX_RECORD_BYTES:
                raise ValueError(f"it has {size} bytes; the limit is {MAX_RECORD_BYTES}")
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found.get("groups"), list):
                raise ValueError("it is not an object with a list `groups`")
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("moe_oracle: %s is not a decision record: %s", path, error)
            continue
        yield found
