"""Whether a file or a folder could be written, without touching it: what takes long is not lost for a wrong path."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import typer

from ..errors import MeasurementError, SettingError
from ..measurements.bench_records import CONDITIONS_LINE
from ..settings import Settings, cache_dir, report_path
from ..whole_files import open_pipe, writing


def why_unwritable(path: Path, appended: bool = False) -> str:
    """Why a file could not be written; "" if it could.

    Args:
        path: the file.
        appended: it is written by itself. Other files are replaced (`whole_files`), for which their folder is written.
    """
    # `Path`'s methods raise where a name is too long, or a folder may not be entered.
    if not os.path.isdir(path.parent):
        return f"there is no directory {path.parent}"
    if os.path.isdir(path):
        return "it is a directory"
    real = os.path.realpath(path)  # a link stays, and the file that it leads to is written
    if os.path.islink(real):
        return "it is a link that leads to itself"
    if not os.path.isdir(os.path.dirname(real)):
        return f"it is a link into {os.path.dirname(real)}, which is no directory"
    try:
        exists = path.exists()
        kind = path.stat().st_mode if exists else 0
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if stat.S_ISBLK(kind) or stat.S_ISSOCK(kind):
        return f"it is a {'disk' if stat.S_ISBLK(kind) else 'socket'}"
    if appended and stat.S_ISCHR(kind) and not _is_terminal(path):
        return "it is a device, which keeps nothing"
    folder = Path(real).parent
    if (not exists or (path.is_file() and not appended)) and (reason := why_unwritable_folder(folder)):
        return "permission denied" if not os.access(folder, os.W_OK) else reason
    return "" if not exists or os.access(path, os.W_OK) else "permission denied"


def _is_terminal(path: Path) -> bool:
    """Whether what is written to a device is shown."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What a command writes.

    Attributes:
        noun: in words.
        pattern: what the first `_HEAD_BYTES` of such a file match.
    """

    noun: str
    pattern: re.Pattern[bytes]


PAGE = OutputKind("a page of report", re.compile(rb'<!doctype html>.*<meta name="generator" content="vllm-moe-', re.S))
RECORDS = OutputKind("records of bench --jsonl", CONDITIONS_LINE)
_PICTURES = (
    rb"\x89PNG", rb"\xff\xd8\xff", rb"%PDF", rb"%!PS", rb"RIFF....WEBP", rb"GIF8", rb"II\*\0", rb"MM\0\*", rb"....ftyp",
    rb"\x1f\x8b", rb"(<\?xml.*)?<svg\b",
)  # fmt: skip
"""How files begin that Matplotlib writes; a compressed SVG as any that gzip wrote."""

PICTURE = OutputKind("a picture", re.compile(b"|".join(_PICTURES), re.S))
_HEAD_BYTES = 4096


def check_output(
    context: typer.Context,
    path: Path,
    option: str,
    kind: OutputKind | None,
    others: Iterable[Path | str | None] = (),
) -> None:
    """Refuses a path of a command's output that could not be written, or whose file would be lost by it. A pipe is open
    from here to the command's end, so that its reader waits.

    Args:
        context: the command's.
        path: the path.
        option: the option's name, for the message.
        kind: what a file there may be that is replaced or appended to; None where the writer itself compares it with
            what it writes.
        others: paths of files that the command reads, and of its other outputs; None for no path.

    Raises:
        MeasurementError: it could not be written, is one of `others`, or holds something else than `kind`.
    """
    if any(_is_same_file(path, os.path.expanduser(each)) for each in others if each is not None):
        rule = f"{path} is named twice: what this command reads there, or writes, would be replaced"
        raise MeasurementError(rule, "Name another file", option)
    if kind is not None:
        check_kind(path, kind, option)
    reason, remedy = why_unwritable(path), "Name a file that you can write"
    if not reason and path.is_fifo() and not is_standard_output(path):
        try:
            context.call_on_close(functools.partial(os.close, open_pipe(path)))
        except OSError as error:
            reason, remedy = error.strerror or str(error), "Start its reader first"
    if reason:
        raise MeasurementError(f"{path} cannot be written: {reason}", remedy, option)


def check_kind(path: Path, kind: OutputKind, where: str) -> None:
    """Refuses a file that holds something else than what is to replace it, or to be appended to it.

    Raises:
        MeasurementError: it holds something else.
    """
    if not holds_data(path):
        return
    remedy = "Name another file, or remove this one"
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise MeasurementError(f"{path} is there, and cannot be read: {error.strerror}", remedy, where) from error
    if kind.pattern.match(head) is None:
        raise MeasurementError(f"{path} is there, and is not {kind.noun}", remedy, where)


def holds_data(path: Path) -> bool:
    """Whether something could be lost by writing: not where there is no file, an empty one, the standard output, or
    what is no file."""
    return os.path.isfile(path) and not is_standard_output(path) and os.path.getsize(path) > 0


def _is_same_file(one: Path, other: str | Path) -> bool:
    """Whether two paths lead to one file, also over links, or would if there were one."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)
    except ValueError:  # a path with a null byte leads nowhere
        return False


def is_standard_output(path: Path | None) -> bool:
    """Whether a path is the file or pipe that standard output is written to."""
    try:
        return path is not None and os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def why_unwritable_report(settings: Settings) -> str:
    """Why the file of the setting `report` could not be written; "" if it could, or none is set."""
    if (path := report_path(settings)) is None:
        return ""
    reason = why_unwritable(path, appended=True)
    return reason and f"{settings.source('report')}: {path} cannot be written: {reason}"


def why_unwritable_cache(settings: Settings) -> str:
    """Why measurements could not be kept; "" if they could."""
    try:
        return why_unwritable_folder(cache_dir(settings))
    except SettingError as error:
        return str(error)


def require_working_directory(command: str) -> None:
    """Refuses a working directory that is gone: torch's import would end the process in it, and no relative path leads
    anywhere.

    Raises:
        MeasurementError: it is.
    """
    try:
        os.getcwd()
    except OSError as error:
        rule = f"{command} needs the working directory, which cannot be used: {error.strerror}"
        raise MeasurementError(rule, "Change into another one, with cd") from error


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where there is none.

    Raises:
        MeasurementError: it cannot be made.
    """
    with writing(folder, "the folder cannot be made", ""):
        folder.mkdir(parents=True, exist_ok=True)


def why_unwritable_folder(folder: Path) -> str:
    """Why a folder could not be made or written in; "" if it could."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    # A file system like /proc says yes and takes nothing.
    can_hold = os.access(nearest, os.W_OK | os.X_OK) and os.statvfs(nearest).f_blocks > 0
    return "" if can_hold else f"nothing can be written in {nearest}"
