"""Printing: JSON alone on standard output, or tables that stay readable without a terminal; messages go to stderr.

All text passes `errors.printable` or `errors.sanitize` here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import printable, sanitize
from ..oracle.watchdog import end_copy
from ..settings import env_var

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

# Functions import rich, which takes a quarter of the tool's start.

GLUE = "\N{OPEN BOX}"
"""Stands for a space at which no line is broken. rich breaks lines at every kind of space."""


_process: int | None = None
"""The process that answers; None for whichever asks."""


def answer_from_this_process() -> None:
    """Has a copy of this process that comes to print the answer, too, end instead."""
    global _process
    _process = os.getpid()


def write(text: str) -> None:
    """Writes a part of the answer to standard output, as it is."""
    if _process is not None:
        end_copy(_process, "code beside the backends' own methods", f"{env_var('disable')} leaves a backend out")
    sys.stdout.write(text)


def show(*parts: Any) -> None:
    """Prints texts, tables and paddings for people: no markup (names hold brackets), and no escape codes but rich's own
    on a terminal."""
    console = _console()
    with console.capture() as capture:
        for part in parts:
            console.print(printable(part) if isinstance(part, str) else part)
    # rich fills every line of a table up to the width; a log does not want that.
    write("".join(f"{line.rstrip()}\n" for line in capture.get().replace(GLUE, " ").splitlines()))


def show_line(text: str) -> None:
    """Prints one line for people as it is, not wrapped: a command that they copy."""
    write(f"{printable(text)}\n")


def as_utf8(argument: str) -> str:
    r"""A word of the command line as text that any file can hold: a byte that is not UTF-8 is written as ``\xff``.
    Python keeps such bytes, under the locale C also UTF-8, as surrogates."""
    return argument.encode(errors="surrogateescape").decode(errors="backslashreplace")


def command_line() -> str:
    """The command that this process runs, as a shell takes it; see `as_utf8`."""
    return "vllm-moe-oracle " + shlex.join(map(as_utf8, sys.argv[1:]))


def print_json(data: object) -> None:
    """Writes data as JSON, indented, and nothing else, to standard output."""
    # In ASCII: a terminal takes some characters beyond it for commands, and names of files need not be UTF-8.
    write(json.dumps(msgspec.to_builtins(data), indent=2) + "\n")


def print_message(kind: str, text: str) -> None:
    """One line to standard error: ``error: ...`` or ``note: ...``."""
    write_error_text(f"{kind}: {sanitize(text)}\n")


def write_error_text(text: str) -> None:
    """Writes to standard error. Where nobody can read it (a full disk, a pipe whose reader is gone), the text is lost:
    the answer and the exit status are as they would be."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


_USUAL_COLUMNS = 80
_LEAST_COLUMNS, _MOST_COLUMNS = 20, 1000


def _console() -> Console:
    """rich's console for people's text. Its width is that of the terminal or of the variable ``COLUMNS``, within limits
    in which the text can be read and written; 0 stands for an unknown one, as other programs take it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    console.width = min(max(console.width or _USUAL_COLUMNS, _LEAST_COLUMNS), _MOST_COLUMNS)
    return console


def width() -> int:
    """Columns of the output."""
    return _console().width


def key_value_table(rows: Iterable[tuple[str, str]], indent: int = 2) -> Table:
    """Names and values in two columns; values are wrapped, never cut."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(" " * indent + printable(name), _cell(value))
    return table


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0, marked: Collection[int] = ()
) -> None:
    """Prints a table whose last column takes the room that is left. No word is broken, and no cell of the first column.

    Where that has no room, the table is not indented. Where it has none then, a table of three columns becomes
    paragraphs, one for the names and one for each row; any other becomes several tables, each with the first column.

    Args:
        columns: the columns' names.
        rows: the cells of each row; of three columns, a row with an empty first cell continues the one before.
        indent: spaces before each line.
        marked: indices of rows that a terminal shows in bold.
    """
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = _column_widths(columns, lines, width() - indent)
    if widths is None:
        indent, widths = 0, _column_widths(columns, lines, width())
    if widths is not None:
        show("", _table(columns, lines, widths, indent, marked))
    elif len(columns) == 3:
        for index, (first, second, third) in enumerate([columns, *lines], -1):
            if first:
                title = _cell(f"{first}: {second}")
                title.stylize("bold" if index in marked else "")
                show("", title)
            if third:
                show(key_value_table([("", third)]))
    else:
        _show_in_parts(columns, lines, width(), indent, marked)


_BETWEEN = 3
"""Columns of the output between two columns of a table."""


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths at which no word is broken; None where there is no room for them."""
    cells = [list(column) for column in zip(columns, *rows, strict=True)]
    longest = [max(map(_length, column)) for column in cells]
    words = [max((_length(word) for cell in column for word in cell.split()), default=0) for column in cells]
    room -= _BETWEEN * (len(cells) - 1)
    for middle in (longest, words):
        fixed = [longest[0], *middle[1:-1]]
        left = room - sum(fixed)
        if left >= words[-1]:
            return [*fixed, left]
    return None


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _show_in_parts(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int, indent: int, marked: Collection[int]
) -> None:
    """Several tables, each of the first column and as many others as have room: at least one, whose words are broken
    where it has too little."""
    first = 1
    while first < len(columns):
        last = len(columns)
        while True:
            places = [0, *range(first, last)]
            part = [[row[place] for place in places] for row in rows]
            names = [columns[place] for place in places]
            widths = _column_widths(names, part, room)
            if widths is not None or last == first + 1:
                break
            last -= 1
        if widths is None:
            key = min(max(map(_length, (names[0], *(row[0] for row in part)))), room // 2)
            widths = [key, max(room - _BETWEEN - key, 1)]
        show("", _table(names, part, widths, indent, marked))
        first = last


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    indent: int,
    marked: Collection[int],
) -> Padding:
    from rich.box import SIMPLE_HEAD
    from rich.padding import Padding
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name, columns_wide in zip(columns, widths, strict=True):
        made.add_column(name, overflow="fold", width=columns_wide)
    for index, row in enumerate(rows):
        made.add_row(*map(_cell, row), style="bold" if index in marked else None)
    return Padding(made, (0, 0, 0, indent))


def _cell(words: str) -> Text:
    """A cell, of words that may come from a file: printable characters and line breaks."""
    from rich.text import Text

    return Text(printable(words))


@contextlib.contextmanager
def status_spinner(words: str) -> Iterator[None]:
    """Shows a status message on standard error while a slow step runs; without a terminal one line, after a second."""
    if not sys.stderr.isatty():
        timer = threading.Timer(1.0, print_message, ("note", words))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        yield
