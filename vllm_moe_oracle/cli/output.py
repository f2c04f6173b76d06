"""Printing: JSON alone on standard output, or tables that stay readable without a terminal; messages go to stderr.

All text passes `errors.printable` or `errors.sanitize` here.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import printable, sanitize

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

# Functions import rich, which takes a quarter of the tool's start.

GLUE = "\N{OPEN BOX}"
"""Stands for a space at which no line is broken. rich breaks lines at every kind of space."""


def show(*parts: Any) -> None:
    """Prints texts, tables and paddings for people: no markup (names hold brackets), and no escape codes but rich's own
    on a terminal."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(printable(part) if isinstance(part, str) else part)
    # rich fills every line of a table up to the width; a log does not want that.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().replace(GLUE, " ").splitlines()))


def show_line(text: str) -> None:
    """Prints one line for people as it is, not wrapped: a command that they copy."""
    sys.stdout.write(f"{printable(text)}\n")


def print_json(data: object) -> None:
    """Writes data as JSON, indented, and nothing else, to standard output."""
    # In ASCII: a terminal takes some characters beyond it for commands, and names of files need not be UTF-8.
    sys.stdout.write(json.dumps(msgspec.to_builtins(data), indent=2) + "\n")


def print_message(kind: str, text: str) -> None:
    """One line to standard error: ``error: ...`` or ``note: ...``."""
    print(f"{kind}: {sanitize(text)}", file=sys.stderr)


def width() -> int:
    """Columns of the output."""
    from rich.console import Console

    return Console().width


def key_value_table(rows: Iterable[tuple[str, str]], indent: int = 2) -> Table:
    """Names and values in two columns; values are wrapped, never cut."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(" " * indent + printable(name), _cell(value))
    return table


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], indent: int = 0, marked: Collection[int] = ()
) -> Padding:
    """A table whose first column is never broken, and whose last one takes the room that is left; the others' cells are
    wrapped, never cut.

    Args:
        columns: the columns' names.
        rows: the cells of each row.
        indent: spaces before each line.
        marked: indices of rows that a terminal shows in bold.
    """
    from rich.box import SIMPLE_HEAD
    from rich.padding import Padding
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    names = list(columns)
    for index, name in enumerate(names[:-1]):
        made.add_column(name, overflow="fold", no_wrap=index == 0)
    made.add_column(names[-1], overflow="fold", ratio=1)
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
