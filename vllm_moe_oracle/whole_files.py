"""Files that are written whole or not at all: a full disk and an interrupted process leave what was there before."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside a file, with its suffix. What is written there replaces the file at the end, in one step.

    A link stays, and the file that it leads to is replaced. What is no file, such as a pipe, is written itself, and so
    is the file that the standard output or error of this process goes to: what follows must reach it, too.

    Args:
        path: the file; its folder must exist.

    Raises:
        OSError: the file cannot be replaced. It is as it was, and nothing lies beside it.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a link to a pipe has no real path
        yield path
        return
    descriptor = _open_descriptor(path)
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".moe-oracle-{os.getpid()}{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
            if descriptor is not None:
                _write_all(descriptor, file.read())
                return
        if path.exists():
            partial.chmod(path.stat().st_mode & 0o7777)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _open_descriptor(path: Path) -> int | None:
    """The descriptor of the standard output or error, if it goes to this file."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file of the system
            stream.flush()
            if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                return stream.fileno()
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file; see `replacing`.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


def append_whole(path: Path, data: bytes) -> None:
    """Appends to a file that no other process writes, all or nothing.

    Raises:
        OSError: it cannot be written. A part that was written is cut off again.
    """
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:]) or 0
        except BaseException:
            if file.seekable():
                file.truncate(size)
            raise
