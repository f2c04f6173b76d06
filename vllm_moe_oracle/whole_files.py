"""Files that are written whole or not at all: a full disk and an interrupted process leave what was there before.

Pipes and devices can be named instead of files, and get what a file would get. So can the file or pipe that the
standard output or error of this process goes to, whose descriptor is written then: what follows must come after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import MeasurementError
from .untrusted import describe

_REMEDY = "Name a file on a disk with room that you can write"


@contextlib.contextmanager
def writing(path: Path, rule: str = "cannot be written", remedy: str = _REMEDY) -> Iterator[None]:
    """Says which file it is that cannot be written.

    Args:
        path: the file.
        rule: what cannot be done, in words that the cause can follow.
        remedy: as for `OracleError`.

    Raises:
        BrokenPipeError: the reader of a pipe is gone: `cli.main` ends as for every other output.
        MeasurementError: the code inside raised another `OSError`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MeasurementError(f"{rule}: {describe(error)}", remedy, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside a file, with its suffix. What is written there replaces the file at the end, in one step.

    A link stays, and the file that it leads to is replaced. A pipe or a device gets what was written, and the path is
    in the folder for temporary files.

    Args:
        path: the file; its folder must exist.

    Raises:
        OSError: the file cannot be replaced. It is as it was, and nothing lies beside it. Or it is a pipe that no
            process reads, which would be waited for without an end, or a link that leads to itself.
    """
    if _is_special(path):
        with tempfile.TemporaryDirectory() as folder:
            partial = Path(folder) / f"moe-oracle{path.suffix}"
            yield partial
            _write_special(path, partial.read_bytes())
        return
    descriptor = _open_descriptor(path)
    path = Path(os.path.realpath(path))
    if path.is_symlink():  # the real path of a link that leads to itself is a link
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
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


def open_pipe(path: Path) -> int:
    """A descriptor of a pipe, or of another special file, for writing. While it is open, the reader waits for more.

    Raises:
        OSError: it cannot be opened, or no process reads the pipe.
    """
    try:
        # Without O_NONBLOCK this would wait for a reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise OSError(errno.ENXIO, "no process reads this pipe", str(path)) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _is_special(path: Path) -> bool:
    """Whether a path is there, and is no file."""
    return os.path.exists(path) and not os.path.isfile(path)  # a link to a pipe has no real path


def _write_special(path: Path, data: bytes) -> None:
    """Writes to what is no file."""
    own = _open_descriptor(path)
    descriptor = open_pipe(path) if own is None else own
    try:
        _write_all(descriptor, data)
    finally:
        if own is None:
            os.close(descriptor)


def _open_descriptor(path: Path) -> int | None:
    """The descriptor of the standard output or error, if it goes to this file or pipe."""
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
    if _is_special(path):  # needs no temporary file
        _write_special(path, data)
        return
    with replacing(path) as partial:
        partial.write_bytes(data)


def append_whole(path: Path, data: bytes) -> None:
    """Appends to a file that no other process writes, all or nothing.

    Raises:
        OSError: it cannot be written. A part that was written is cut off again.
    """
    if _is_special(path) or _open_descriptor(path) is not None:
        _write_special(path, data)
        return
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:]) or 0
        except BaseException:
            file.truncate(size)
            raise
