"""The store of measurements in the user's cache: one SQLite file that several processes read and write.

What was written is never lost to an accident: every change is one transaction that reaches the disk (a rollback
journal, which network file systems can do too), so a process that is killed leaves the state before or after. A file
that is no store of ours is never touched; a damaged one is put aside under another name and a new one begun, by `tune`
alone. Readers change nothing, wait for little, and believe nothing: what they read was written by somebody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ..errors import MeasurementError
from .cells import Cell, Sample
from .environment import Environment

FILE = "measurements.sqlite"
SCHEMA = 1
"""Version of the tables; a file of another version is left alone."""

_APPLICATION = 0x4D6F654F
"""SQLite's application id of our files ("MoeO"): a database of another program is recognised before it is read."""

_TABLES = {
    "environments": "CREATE TABLE environments (id INTEGER PRIMARY KEY, description TEXT NOT NULL UNIQUE)",
    "samples": (
        "CREATE TABLE samples (environment INTEGER NOT NULL, cell TEXT NOT NULL, backend TEXT NOT NULL, "
        "tokens INTEGER NOT NULL, routing TEXT NOT NULL, sample TEXT NOT NULL, taken REAL NOT NULL, "
        "PRIMARY KEY (environment, cell, backend, tokens, routing)) WITHOUT ROWID"
    ),
}

_READER_WAITS = 0.5
"""Seconds that a reader waits for a writer: a start of a server is not held up by `tune`."""
_WRITER_WAITS = 30.0
_MOST_ROWS = 4096
"""Rows of one cell that are looked at: ten backends at twenty numbers of tokens, two routings, ten environments."""
_MOST_TEXT = 1 << 16
_MOST_STEPS = 2_000_000
"""SQLite's instructions for one question, some tens of milliseconds: a hostile file cannot hold a server up."""
_MOST_FILE = 1 << 30


class Store:
    """The file at a path. Nothing is opened, or made, before it is asked or written to.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the cache folder.
        """
        self.path = folder / FILE

    # --- reading ----------------------------------------------------------------------------------------------------

    def samples(self, cell: Cell) -> list[tuple[Environment, list[Sample]]]:
        """What was measured of a cell, by environment, the newest first.

        Raises:
            MeasurementError: there is a file, and it cannot be read or is no store of ours.
        """
        # Environments are asked for one by one: beside each sample, one description would come thousands of times.
        which = f"SELECT environment, sample FROM samples WHERE cell = ? ORDER BY taken DESC LIMIT {_MOST_ROWS}"
        found: dict[int, list[Sample]] = {}
        places: dict[int, Environment] = {}
        with self._reading() as connection:
            for number, sample in [] if connection is None else connection.execute(which, (cell.key,)):
                found.setdefault(number, []).append(self._decode(sample, Sample))
            for number in found:
                assert connection is not None
                row = connection.execute("SELECT description FROM environments WHERE id = ?", (number,)).fetchone()
                if row is not None:
                    places[number] = self._decode(row[0], Environment)
        return [(places[number], samples) for number, samples in found.items() if number in places]

    def everything(self, environment: Environment) -> dict[Cell, list[Sample]]:
        """All that was measured in one environment, by cell.

        Raises:
            MeasurementError: there is a file, and it cannot be read or is no store of ours.
        """
        question = "SELECT cell, sample FROM samples JOIN environments ON environment = id WHERE description = ?"
        found: dict[Cell, list[Sample]] = {}
        for cell, sample in self._ask(question, environment.key):
            found.setdefault(self._decode(cell, Cell), []).append(self._decode(sample, Sample))
        return found

    def summary(self) -> dict[str, int]:
        """How many measurements there are, by environment in words.

        Raises:
            MeasurementError: there is a file, and it cannot be read or is no store of ours.
        """
        question = "SELECT description, COUNT(*) FROM samples JOIN environments ON environment = id GROUP BY id"
        counts: dict[str, int] = {}
        for description, count in self._ask(question):
            name = str(self._decode(description, Environment))
            counts[name] = counts.get(name, 0) + int(count)
        return counts

    def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading(bounded=False) as connection:
            return [] if connection is None else connection.execute(question, values).fetchall()

    @contextlib.contextmanager
    def _reading(self, bounded: bool = True) -> Iterator[sqlite3.Connection | None]:
        """A connection that changes nothing; None where there is no file."""
        if not self.exists():
            yield None
            return
        with self._errors(), self._opened("rw", _READER_WAITS) as connection:
            # Of longer texts SQLite gives none: a small file could name one of them in every row of an answer.
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
            self._check(connection)
            if bounded:
                connection.set_progress_handler(lambda: 1, _MOST_STEPS)
            yield connection

    def exists(self) -> bool:
        """Whether there is a file.

        Raises:
            MeasurementError: it is something else than a regular file, or too large to be a store.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise self._error("its folder is no folder", "Give a folder as the setting cache") from error
        except (OSError, ValueError) as error:
            raise self._error(f"cannot be looked at: {getattr(error, 'strerror', None) or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise self._error("is no regular file", "Move it away")
        if status.st_size > _MOST_FILE:
            raise self._error(f"has {status.st_size} bytes, more than a store of measurements has", "Move it away")
        return True

    # --- writing ----------------------------------------------------------------------------------------------------

    def add(self, environment: Environment, cell: Cell, samples: Iterable[Sample]) -> None:
        """Keeps measurements of a cell: all of them or, when that fails, none. They replace earlier ones of the same
        backend, number of tokens and routing in the same environment.

        Raises:
            MeasurementError: they cannot be kept. What was kept before is still there.
        """
        samples = list(samples)
        if wrong := [each for each in samples if not each.sound]:
            raise ValueError(f"no measurement can be like this: {wrong[0]}")
        rows = [
            (cell.key, each.backend, each.tokens, each.routing, msgspec.json.encode(each).decode(), time.time())
            for each in samples
        ]
        with self._errors(), self._opened("rw", _WRITER_WAITS) as connection:
            self._check(connection)
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute("INSERT OR IGNORE INTO environments (description) VALUES (?)", (environment.key,))
                (number,) = connection.execute(
                    "SELECT id FROM environments WHERE description = ?", (environment.key,)
                ).fetchone()
                connection.executemany(
                    "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?)", [(number, *row) for row in rows]
                )
                connection.execute("COMMIT")
            except BaseException:
                # The disk may be full: the journal is rolled back then, or by the next who opens the file.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def prepare(self) -> str:
        """Makes the file where there is none, and puts a damaged one aside; to be called before `add`.

        Returns:
            What was done about a damaged file, in a sentence; "" when there was none.

        Raises:
            MeasurementError: the folder or the file cannot be written, or the file is another program's, or of another
                version.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(f"its folder cannot be made: {error.strerror}", _ELSEWHERE) from error
        with self._locked():
            said = self._put_aside() if self.exists() and self._is_damaged() else ""
            if not self.exists():
                self._create()
        with self._errors(), self._opened("rw", _WRITER_WAITS) as connection:
            connection.execute("BEGIN IMMEDIATE")  # a store on a read-only disk opens, and cannot be written to
            connection.execute("ROLLBACK")
        return said

    def _create(self) -> None:
        """Makes the file beside its place and moves it there: nobody sees half of one."""
        beside = self.path.with_name(f".{FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            beside.unlink()
        try:
            with self._errors(), self._opened("rwc", _WRITER_WAITS, beside) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.values():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
                connection.execute("COMMIT")
            os.replace(beside, self.path)
        except OSError as error:
            raise self._error(f"cannot be made: {error.strerror}", _ELSEWHERE) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def _is_damaged(self) -> bool:
        """Whether the file was a store, or the beginning of one, and is broken.

        Raises:
            MeasurementError: it is another program's, or of another version, or cannot be opened.
        """
        try:
            with self._opened("rw", _WRITER_WAITS) as connection:
                self._check(connection)
                rows = connection.execute("PRAGMA quick_check(1)").fetchall()
                return [tuple(row) for row in rows] != [("ok",)]
        except sqlite3.OperationalError as error:  # locked, read-only, no rights: nothing is wrong with the file
            raise self._error(str(error), _ELSEWHERE) from error
        except sqlite3.DatabaseError:
            with self.path.open("rb") as file:
                head = file.read(72)
            # An empty file, ours by the id in its header (bytes 68 to 71), or cut off before that.
            ours = head[68:72] == _APPLICATION.to_bytes(4, "big")
            if ours or not head or (len(head) < 72 and b"SQLite format 3\x00".startswith(head[:16])):
                return True
            raise self._error(
                "is no store of measurements", f"Move it away, or {_ELSEWHERE[0].lower()}{_ELSEWHERE[1:]}"
            ) from None

    def _put_aside(self) -> str:
        aside = self.path.with_name(f"{FILE}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        try:
            os.replace(self.path, aside)
            journal = self.path.with_name(f"{FILE}-journal")
            if journal.exists():  # it belongs to the damaged file, and would spoil a new one
                os.replace(journal, aside.with_name(f"{aside.name}-journal"))
        except OSError as error:
            raise self._error(f"is damaged, and cannot be put aside: {error.strerror}", _ELSEWHERE) from error
        return f"{self.path} is damaged; it is kept as {aside.name}, and a new one is begun"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the lock is gone with its process."""
        try:
            descriptor = os.open(self.path.with_name(f".{FILE}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._error(f"its folder cannot be written to: {error.strerror}", _ELSEWHERE) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # --- SQLite -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, mode: str, seconds: float, path: Path | None = None) -> Iterator[sqlite3.Connection]:
        name = f"file:{quote(str(path or self.path))}?mode={mode}"
        connection = sqlite3.connect(name, uri=True, timeout=seconds, isolation_level=None)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if mode == "rwc" or seconds == _WRITER_WAITS:
                connection.execute("PRAGMA synchronous = FULL")
            yield connection
        finally:
            connection.close()

    def _check(self, connection: sqlite3.Connection) -> None:
        """Whether a database is a store of ours, table for table: one with views or triggers would run others' code.

        Raises:
            MeasurementError: it is not.
            sqlite3.DatabaseError: it is damaged, or no database.
        """
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION:
            if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall() and not application:
                raise sqlite3.DatabaseError("it is empty")
            raise self._error(
                "is another program's database", "Move it away, or set MOE_ORACLE_CACHE to another folder"
            )
        if version != SCHEMA:
            rule = f"has tables of version {version}, this release knows {SCHEMA}"
            raise self._error(rule, "Set MOE_ORACLE_CACHE to another folder, or move it away")
        made = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100").fetchall()
        if dict(made) != _TABLES:
            raise self._error("has other tables than a store of measurements", "Move it away")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if str(error).startswith("Could not decode to UTF-8"):
                raise self._error("holds what no measurement is: not a text", "Move it away") from error
            raise self._error(_words(error), _ELSEWHERE) from error
        except sqlite3.DataError as error:  # longer than the connection takes
            raise self._error(f"holds what no measurement is: {error}", "Move it away") from error
        except (sqlite3.Error, OverflowError) as error:
            remedy = "The next tune puts it aside and begins a new one"
            raise self._error(f"is damaged: {error}", remedy) from error

    def _decode(self, text: object, kind: type[Any]) -> Any:
        try:
            if not isinstance(text, str) or len(text) > _MOST_TEXT:
                raise ValueError("not a short text")
            value = msgspec.json.decode(text, type=kind)
            if isinstance(value, Sample) and not value.sound:
                raise ValueError("an impossible measurement")
            if isinstance(value, Environment) and not value.sound:
                raise ValueError("an impossible place")
            if isinstance(value, Cell) and not value.sound:
                raise ValueError("an impossible layer")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._error(f"holds what no measurement is: {error}", "Move it away") from error
        return value

    def _error(self, rule: str, remedy: str = "") -> MeasurementError:
        return MeasurementError(rule, remedy, str(self.path))


_ELSEWHERE = "Set MOE_ORACLE_CACHE to a folder that can be written to"


def _words(error: sqlite3.OperationalError) -> str:
    """SQLite's messages in whole sentences."""
    text = str(error)
    known = {
        "database is locked": "is being written by another process",
        "interrupted": "takes too long to answer",
        "unable to open database file": "cannot be opened",
        "attempt to write a readonly database": "cannot be written to: the file or its folder is read-only",
        "database or disk is full": "cannot be written to: the disk is full",
        "disk I/O error": "cannot be written to: the disk reports an error, or is full",
    }
    return known.get(text, text)
