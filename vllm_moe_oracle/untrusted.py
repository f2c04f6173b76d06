"""Reads files that come from anywhere: configs, measurements, devices, reports.

Three rules hold for all of them. Only a regular file of bounded size is read. JSON has bounded depth, strings and
number of values. Every exception that foreign data cause becomes one typed error (`boundary`): which ones a parser
raises, from `UnicodeDecodeError` to `MemoryError`, is not listed anywhere.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import FieldError, OracleError, describe_error, sanitize

MAX_DEPTH = 50
"""Most lists and objects around a value."""

MAX_STRING_CHARS = 1 << 16
"""Longest string."""

MAX_VALUES = 1_000_000
"""Most values of a file. A layer of a checkpoint with one entry for each matrix of each expert has some thousands."""

_PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def boundary(kind: type[OracleError], rule: str, remedy: str = "", where: str = "") -> Iterator[None]:
    """Turns every exception of reading foreign data into one of `kind`. Errors of this project pass, but for those that
    know no file: values that no field has.

    Args:
        kind: the error to raise.
        rule: what the data are not, in words that the cause can follow: ``is not a profile``.
        remedy: as for `OracleError`.
        where: the file, and the field if there is one.

    Raises:
        OracleError: of `kind`, with the exception's type and message.
    """
    try:
        yield
    except Exception as error:  # parsers of foreign text raise many types, not all of them listed
        if isinstance(error, OracleError) and not isinstance(error, FieldError):
            raise
        raise kind(f"{rule}: {describe(error)}", remedy, where) from error


def describe(error: Exception) -> str:
    """An exception as one short line. Messages of Python's own exceptions are often nothing without the type."""
    if isinstance(error, OSError) and error.strerror:
        return sanitize(error.strerror)
    words = describe_error(error)
    speaks = isinstance(error, OSError | ValueError) or type(error).__module__ != "builtins"
    return words.partition(": ")[2] if speaks and ": " in words else words


def exists(path: Path) -> bool:
    """Whether there is something at a path. `Path.exists` of newer Pythons says no where nobody may look.

    Raises:
        OSError: a permission is missing, or the name is too long.
        ValueError: the name holds a null byte.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_file(path: Path | str, most: int, kind: type[OracleError]) -> bytes:
    """The bytes of a regular file. A leading ``~`` is the user's home.

    Args:
        path: the file.
        most: bytes of the largest file that is read.
        kind: the error to raise.

    Raises:
        OracleError: of `kind`: the file cannot be opened or read, is not regular, or is larger.
    """
    where = str(path)
    with boundary(kind, "cannot be read", where=where):
        # Non-blocking: a pipe without a writer would hang. expanduser leaves an unknown user's name as it is.
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise kind(f"is {'a directory' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}", where=where)
            size, data = status.st_size, bytearray()
            # To its end, not to its size: files of /proc have none.
            while size <= most and (piece := os.read(descriptor, min(_PIECE_BYTES, most + 1 - len(data)))):
                data += piece
                size = max(size, len(data))
        finally:
            os.close(descriptor)
        if size > most:
            raise kind(f"has {size} bytes; a file of more than {most} is not read", where=where)
        return bytes(data)


def complete_lines(path: Path, most: int, kind: type[OracleError]) -> tuple[list[bytes], bytes]:
    """The lines of a file to which a process appends one after the other, and what it has begun of another one: it may
    have been killed.

    Args:
        path: the file.
        most: bytes of the largest file that is read.
        kind: the error to raise.

    Returns:
        Complete lines without their ends, and the unfinished one, which is empty where there is none.

    Raises:
        OracleError: see `read_file`.
    """
    # Not `str.splitlines`, which ends lines at characters that JSON strings may hold.
    *lines, unfinished = read_file(path, most, kind).split(b"\n")
    return lines, unfinished


def check_values(data: bytes, kind: type[OracleError], where: str) -> None:
    """Refuses JSON that has more than `MAX_VALUES` values, before it is parsed: parsed, a value of three bytes takes
    a hundred.

    Raises:
        OracleError: of `kind`.
    """
    count = sum(map(data.count, (b",", b"[", b"{")))  # at least the number of values, as signs in strings count too
    if count > MAX_VALUES:
        raise kind(f"has up to {count} values; a file of more than {MAX_VALUES} is not read", where=where)


def parse_json(data: bytes, kind: type[OracleError], where: str, repeated: list[str] | None = None) -> Any:
    """The value of a JSON text. Python's own parser: configs of models may hold Infinity, which is not JSON.

    Only UTF-8 is read. `json.loads` would guess other encodings from bytes, and skip a byte order mark; what vLLM and
    safetensors read the same files with does neither.

    Args:
        data: the text.
        kind: the error to raise.
        where: the file, for messages.
        repeated: gets the fields that an object has more than once, of which the last counts, for files that vLLM reads
            so. None to refuse them.

    Raises:
        OracleError: of `kind`: the text is not JSON in UTF-8, an object has a field more than once, or it exceeds a
            limit of this module.
    """
    check_values(data, kind, where)
    if data.startswith(_BYTE_ORDER_MARKS):
        rule = "begins with a byte order mark, which vLLM does not read"
        raise kind(rule, "Save it as UTF-8 without one", where)
    with boundary(kind, "is not JSON", where=where):
        try:
            found: list[str] = []
            value = json.loads(data.decode("utf-8"), object_pairs_hook=functools.partial(_object, found))
        except RecursionError:
            raise kind(_TOO_DEEP, where=where) from None
    _check_nesting_and_strings(value, kind, where)
    if repeated is not None:
        repeated += dict.fromkeys(found)
    elif found:
        raise kind(f"has the field {found[0]!r} more than once in an object", "Keep one of them", where)
    return value


def _object(repeated: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which the last of several values counts; adds the names that have several."""
    made = dict(pairs)
    if len(made) < len(pairs):
        repeated += [name[:_NAME_CHARS] for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    return made


_NAME_CHARS = 60
"""Characters of a field's name that are kept for messages."""


def check_fields_once(data: bytes, kind: type[OracleError], where: str) -> None:
    """Refuses a JSON text in which an object has a field more than once, as `parse_json` does: for readers with another
    parser, all of which take the last one and say nothing.

    Raises:
        OracleError: as by `parse_json`.
    """
    parse_json(data, kind, where)


_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"


def _check_nesting_and_strings(value: Any, kind: type[OracleError], where: str) -> None:
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str) and len(each) > MAX_STRING_CHARS:
                rule = f"has a string of {len(each)} characters; one of more than {MAX_STRING_CHARS} is not read"
                raise kind(f"{rule} ({each[:40]!r}...)", where=where)
        if below and depth == MAX_DEPTH:
            raise kind(_TOO_DEEP, where=where)
        level, depth = below, depth + 1
