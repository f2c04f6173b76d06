"""What SQLite's errors say of a file: whether it is damaged, and what else keeps it from being used."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from ..errors import sanitize

LOCKED = "database is locked"
"""SQLite's message where another process has the lock."""

_KNOWN = {
    "interrupted": "takes too long to answer",
    "unable to open database file": "cannot be opened",
    "attempt to write a readonly database": "cannot be written to: the file or its folder is read-only",
    "database or disk is full": "cannot be written to: the disk is full",
    "disk I/O error": "cannot be written to: the disk reports an error, or is full",
    "locking protocol": "cannot be locked: other processes keep taking the lock",
}


def describe_operational(error: sqlite3.OperationalError, path: Path) -> str:
    """What an error of the operation says, as the rest of a sentence that starts with the file's name. The file may be
    as it should be.

    Args:
        error: SQLite's.
        path: the file.
    """
    text = str(error)
    return f"is being written by {lock_holders(path)}" if text == LOCKED else _KNOWN.get(text, text)


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def harmless(error: Exception) -> str | None:
    """Of an error that is no `sqlite3.OperationalError`, what it says of the file if it does not say that the file is
    damaged; None if it does."""
    if isinstance(error, MemoryError):
        return "cannot be read: the memory is not sufficient"
    code = getattr(error, "sqlite_errorcode", None)  # Python's own errors have none
    if not isinstance(error, sqlite3.Error) or code is None or code & 0xFF in _DAMAGE:
        return None
    return f"cannot be used: {error}"


def lock_holders(path: Path) -> str:
    """The processes that have a lock on a file, as far as Linux tells: not those of other machines."""
    holders = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        number = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # "1: POSIX ADVISORY WRITE 4711 08:01:131 0 EOF"; waiting ones have "->" before POSIX
            if fields[1] != "->" and fields[5].rpartition(":")[2] == number and int(fields[4]) not in (0, os.getpid()):
                name = Path(f"/proc/{int(fields[4])}/comm")
                words = sanitize(name.read_text(errors="replace")) if name.exists() else "?"
                holders.append(f"process {fields[4]} ({words})")
    return " and ".join(dict.fromkeys(holders)) or "another process"
