"""The measurements in the user's cache: one SQLite file that several processes read and write.

Writers never lose data. Every change is one transaction with a rollback journal (which works on network file systems)
and full synchronization, so a killed process leaves the state before or after it. A file that is not a store of ours is
never changed. Only who measures (`tune`, and a server by `measure_at_start`) renames a damaged store and starts a new
one.

Readers change nothing, wait half a second at most for all layers of a model together, and trust nothing in the file:
every exception of reading it is a `MeasurementError`, and a file whose schema is not exactly ours is not used.

A row that cannot be read voids what is read with it: a layer's rows of all environments for a choice, every layer's for
`report`. It may be the failure that keeps a backend from being chosen, and the page shows what choices rest on. `add`
writes no such row. A server says so in the decision and goes on with the shipped profiles (`lookup`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ..errors import MeasurementError, sanitize
from ..settings import env_var
from ..untrusted import boundary
from ..whole_files import writing
from .environment import Environment
from .kernel_shape import MAX_SAMPLES, KernelShape, Sample
from .sqlite_errors import LOCKED, describe_operational, harmless, lock_holders

FILE_NAME = "measurements.sqlite"
SCHEMA_VERSION = 1
"""Version of the tables. A file of another version is not changed."""

_APPLICATION_ID = 0x4D6F654F
"""SQLite application id of our files ("MoeO"), which tells them from databases of other programs."""

_TABLES = {
    "environments": "CREATE TABLE environments (id INTEGER PRIMARY KEY, description TEXT NOT NULL UNIQUE)",
    "samples": (
        "CREATE TABLE samples (environment INTEGER NOT NULL, kernel_shape TEXT NOT NULL, backend TEXT NOT NULL, "
        "tokens INTEGER NOT NULL, routing TEXT NOT NULL, sample TEXT NOT NULL, taken REAL NOT NULL, "
        "PRIMARY KEY (environment, kernel_shape, backend, tokens, routing)) WITHOUT ROWID"
    ),
}

_READER_TIMEOUT = 0.5
"""Seconds that a store's reads wait for writers, all together, so that `tune` does not delay the start of a server."""
_READER_PAUSE = 60.0
"""Seconds without a read after which the next ones may wait again: they belong to another load."""
WRITER_SECONDS = 30.0
"""Seconds that a writer waits for others."""
_LOCK_PAUSE = 0.2
"""Seconds that one attempt of a writer takes."""
_MAX_ENVIRONMENTS = 256
"""Most environments that are read for a kernel shape, those with the newest samples."""
_MAX_ALL_ROWS = 16384
"""Most rows read for a kernel shape. An environment beyond them is not read at all."""
_MAX_TEXT_CHARS = 1 << 16
"""Longest text read from the file."""
_MAX_SHOWN_CHARS = 400
"""Characters of a measurement that a message shows."""
_MAX_VM_STEPS = 2_000_000
"""Most SQLite instructions of one query, some tens of milliseconds, so that a hostile file cannot delay a server."""
_MAX_SCHEMA_VM_STEPS = 1000
"""Most SQLite instructions until the schema is checked. SQLite reads all of a schema first, which takes eight
instructions for each row, and 2 ms for a table of 1500 columns; ours has two tables and an index."""
_MAX_TOOL_VM_STEPS = 50 * _MAX_VM_STEPS
"""Most SQLite instructions of one query of the command line tool, which reads all layers."""
_MAX_FILE_BYTES = 1 << 30
"""Size of the largest file that is opened."""
_BESIDE = ("-journal", "-wal", "-shm")
"""What follows a database's name in the names of the files that SQLite opens with it. A pipe among them would block the
process for good: SQLite waits for the pipe's writer, and starts again after a signal."""


def _say_nothing(words: str) -> None:
    """The usual `report` of a `Store`. Not a lambda: a store is sent to the worker processes of other GPUs."""


class Store:
    """The measurements of a cache directory. Creating the object neither opens nor creates the file.

    Attributes:
        path: path of the file.
    """

    def __init__(
        self,
        directory: Path,
        report: Callable[[str], None] = _say_nothing,
        writer_seconds: float = WRITER_SECONDS,
    ) -> None:
        """
        Args:
            directory: the cache directory.
            report: is told, once for each wait, that a writer waits for another process. A function of a module, so
                that the store can be pickled.
            writer_seconds: what each step of a writer waits for others.
        """
        self.path = directory / FILE_NAME
        self._report, self._writer_seconds = report, writer_seconds
        self._reader_seconds, self._last_read = _READER_TIMEOUT, 0.0

    # --- Reading ----------------------------------------------------------------------------------------------------

    def samples(self, shape: KernelShape) -> list[tuple[Environment, list[Sample]]]:
        """The samples of a kernel shape by environment, newest first.

        Raises:
            MeasurementError: the file exists and cannot be read, or is not a store of ours.
        """
        # A limit for all environments together would cut one of them off in its middle.
        newest = (
            "SELECT environment FROM samples WHERE kernel_shape = ? GROUP BY environment "
            f"ORDER BY MAX(taken) DESC LIMIT {_MAX_ENVIRONMENTS}"
        )
        query = (
            "SELECT sample FROM samples WHERE environment = ? AND kernel_shape = ? "
            f"ORDER BY taken DESC LIMIT {MAX_SAMPLES}"
        )
        described = "SELECT description FROM environments WHERE id = ?"
        found: list[tuple[Environment, list[Sample]]] = []
        left = _MAX_ALL_ROWS
        with self._read_connection() as connection:
            for (number,) in [] if connection is None else connection.execute(newest, (shape.key,)).fetchall():
                assert connection is not None
                rows = connection.execute(query, (number, shape.key)).fetchall()
                left -= len(rows)
                if left < 0:
                    break
                if (row := connection.execute(described, (number,)).fetchone()) is not None:
                    found.append((self._decode(row[0], Environment), [self._decode(each, Sample) for (each,) in rows]))
        return found

    def samples_by_kernel_shape(self, environment: Environment) -> dict[KernelShape, list[Sample]]:
        """All samples of one environment, by kernel shape.

        Raises:
            MeasurementError: the file exists and cannot be read, or is not a store of ours.
        """
        query = "SELECT kernel_shape, sample FROM samples JOIN environments ON environment = id WHERE description = ?"
        found: dict[KernelShape, list[Sample]] = {}
        for shape, sample in self._query(query, environment.key):
            found.setdefault(self._decode(shape, KernelShape), []).append(self._decode(sample, Sample))
        return found

    def summary(self) -> dict[str, int]:
        """The number of samples by environment, in words.

        Raises:
            MeasurementError: the file exists and cannot be read, or is not a store of ours.
        """
        query = "SELECT description, COUNT(*) FROM samples JOIN environments ON environment = id GROUP BY id"
        counts: dict[str, int] = {}
        for description, count in self._query(query):
            name = str(self._decode(description, Environment))
            counts[name] = counts.get(name, 0) + int(count)
        return counts

    def check_readable(self) -> None:
        """Nothing, if the file does not exist or can be read.

        Raises:
            MeasurementError: the file exists and cannot be read, or is not a store of ours.
        """
        with self._read_connection():
            pass

    def _query(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        with self._read_connection(_MAX_TOOL_VM_STEPS) as connection:
            if connection is not None:
                yield from connection.execute(query, values)

    @contextlib.contextmanager
    def _read_connection(self, steps: int = _MAX_VM_STEPS) -> Iterator[sqlite3.Connection | None]:
        """A connection for reading; None if there is no file.

        Args:
            steps: SQLite instructions after which a query is interrupted.
        """
        if not self.exists():
            yield None
            return
        begin = time.monotonic()
        if begin - self._last_read > _READER_PAUSE:
            self._reader_seconds = _READER_TIMEOUT
        if self._has_log():  # a reader would make the log's files, and one on a network file system breaks
            rule = "has a write-ahead log, which another program switched on"
            raise self._error(rule, "The next tune switches it off")
        with self._errors(), self._connect("rw", self._reader_seconds) as connection:
            # SQLite raises on longer texts: a small file could return the same long text in every row.
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_CHARS)
            connection.execute("PRAGMA query_only = ON")
            try:
                connection.execute("BEGIN")  # the lock that the first query takes is kept: no later one waits
                self._check(connection)
            finally:
                self._last_read = time.monotonic()
                self._reader_seconds = max(0.0, self._reader_seconds - (self._last_read - begin))
            connection.set_progress_handler(lambda: 1, steps)
            yield connection

    def exists(self) -> bool:
        """Whether the file exists.

        Raises:
            MeasurementError: it is not a regular file, or too large to be a store.
        """
        return self._is_regular_file(self.path)

    def _is_regular_file(self, path: Path) -> bool:
        """Whether the store, or a file beside it, exists; raises as `exists` does."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise self._error("its parent is not a directory", f"Set {env_var('cache')} to a directory") from error
        except (OSError, ValueError) as error:
            raise self._error(f"cannot be opened: {getattr(error, 'strerror', None) or error}") from error
        which = "" if path == self.path else f"{path.name} beside it "
        if not stat.S_ISREG(status.st_mode):
            raise self._error(f"{which}is not a regular file", "Move it away")
        if status.st_size > _MAX_FILE_BYTES:
            rule = f"{which}has {status.st_size} bytes, more than the limit of {_MAX_FILE_BYTES}"
            raise self._error(rule, "Move it away")
        return True

    # --- Writing ----------------------------------------------------------------------------------------------------

    def add(self, environment: Environment, shape: KernelShape, samples: Iterable[Sample]) -> None:
        """Stores samples of a kernel shape, in one transaction. They replace samples of the same environment, backend,
        routing and number of tokens.

        Raises:
            MeasurementError: the samples cannot be stored, or one of the arguments could not be read again. Earlier
                samples are unchanged.
        """
        place, key, taken = self._encode(environment), self._encode(shape), time.time()
        rows = [(key, each.backend, each.tokens, each.routing, self._encode(each), taken) for each in samples]
        with self._errors(), self._writing() as connection:
            try:
                self._check(connection)
                connection.execute("INSERT OR IGNORE INTO environments (description) VALUES (?)", (place,))
                (number,) = connection.execute("SELECT id FROM environments WHERE description = ?", (place,)).fetchone()
                for row in rows:
                    self._insert(connection, (number, *row))
                self._execute(connection, "COMMIT")
            except BaseException:
                # If this fails (a full disk), the next process that opens the file rolls the journal back.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _encode(self, value: Environment | KernelShape | Sample) -> str:
        """A struct as JSON that `_decode` reads: a row that cannot be read would cost all others of the layer.

        Raises:
            MeasurementError: it is invalid.
        """
        shown = sanitize(repr(value))[:_MAX_SHOWN_CHARS]
        with boundary(MeasurementError, f"cannot keep an invalid {_NOUNS[type(value)]}, {shown}"):
            text = value.key if not isinstance(value, Sample) else msgspec.json.encode(value).decode()
            read = msgspec.json.decode(text, type=type(value))
            if read != value or not read.is_valid or len(text) > _MAX_TEXT_CHARS:
                raise ValueError("it could not be read again")
        return text

    def _insert(self, connection: sqlite3.Connection, row: tuple[Any, ...]) -> None:
        """Writes a row of samples. What a table refuses is the row's fault, not the file's.

        Raises:
            MeasurementError: the row holds a value that the table does not take, such as NaN, which is NULL in SQLite.
        """
        try:
            connection.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError) as error:
            raise self._error(f"cannot keep the row {sanitize(repr(row))[:_MAX_SHOWN_CHARS]}: {error}") from error

    def prepare(self) -> str:
        """Creates the file if needed and renames a damaged one. Must be called before `add`.

        Returns:
            A sentence about a damaged file; "" if there was none.

        Raises:
            MeasurementError: the directory or the file cannot be written, or the file belongs to another program or has
                another version.
        """
        with writing(self.path, "its directory cannot be created", _OTHER_DIRECTORY_REMEDY):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._file_lock(f".{FILE_NAME}.lock", self._writer_seconds):
            remark = self._quarantine() if self.exists() and self._is_damaged() else ""
            if not self.exists():
                self._create()
        with self._errors(), self._writing() as connection:  # a file on a read-only disk opens, but cannot be written
            connection.execute("ROLLBACK")
        return remark

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction that writes; waits for other writers.

        Raises:
            sqlite3.OperationalError: they take longer than it waits.
        """
        with self._connect("rw", _LOCK_PAUSE) as connection:
            self._execute(connection, "PRAGMA synchronous = FULL")
            self._execute(connection, "PRAGMA journal_mode = DELETE")
            self._execute(connection, "BEGIN IMMEDIATE")
            yield connection

    def _execute(self, connection: sqlite3.Connection, statement: str) -> None:
        """Executes a statement that waits for other processes.

        Raises:
            sqlite3.OperationalError: they take longer than it waits.
        """

        def attempt() -> bool:
            try:
                connection.execute(statement)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                return False
            return True

        if not self._wait(attempt, self.path, self._writer_seconds):
            raise sqlite3.OperationalError(LOCKED)

    def _wait(self, attempt: Callable[[], bool], locked: Path, seconds: float, why: str = "") -> bool:
        """Repeats an attempt to lock a file until it succeeds; False when it has waited long enough. `why` says what
        its holder does."""
        end, told = time.monotonic() + seconds, False
        while not attempt():
            if time.monotonic() > end:
                return False
            if not told:
                told = True
                self._report(f"waiting up to {seconds:.0f} s: {locked} is locked by {lock_holders(locked)}{why}")
        return True

    def _create(self) -> None:
        """Creates the file under another name and renames it, so that no process sees a partial one."""
        partial = self.path.with_name(f".{FILE_NAME}.{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.unlink()
        try:
            with self._errors(), self._connect("rwc", _LOCK_PAUSE, partial) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.values():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.execute("COMMIT")
            os.replace(partial, self.path)
        except OSError as error:
            raise self._error(f"cannot be created: {error.strerror}", _OTHER_DIRECTORY_REMEDY) from error
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def _is_damaged(self) -> bool:
        """Whether the file is a broken or truncated store.

        Raises:
            MeasurementError: the file belongs to another program, has another version, or cannot be opened.
        """
        if self._has_impossible_header():  # SQLite takes such a file for a newer one's, or for read-only
            return True
        try:
            with self._writing() as connection:
                self._check(connection)
                rows = connection.execute("PRAGMA quick_check(1)").fetchall()
                return [tuple(row) for row in rows] != [("ok",)]
        except sqlite3.OperationalError as error:  # locked, read-only, no permission: the file is intact
            raise self._error(describe_operational(error, self.path), _OTHER_DIRECTORY_REMEDY) from error
        except MeasurementError:
            raise
        except Exception as error:  # SQLite's errors, and what Python makes of their messages: these need not be UTF-8
            if (reason := harmless(error)) is not None:
                raise self._error(reason, _MOVE_REMEDY) from error
            if self._begins_as_ours():
                return True
            raise self._error("is not a store of measurements", _MOVE_REMEDY) from None

    def _begins_as_ours(self) -> bool:
        """Whether the file is empty, or has our application id, or is truncated before it."""
        head = self._header()
        ours = head[68:72] == _APPLICATION_ID.to_bytes(4, "big")
        return ours or not head or (len(head) < _HEADER_BYTES and _MAGIC.startswith(head[:16]))

    def _has_impossible_header(self) -> bool:
        """Whether the file has our application id and a header that no release of SQLite writes."""
        try:
            head = self._header()
        except OSError:  # SQLite says why
            return False
        if len(head) < _HEADER_BYTES or not self._begins_as_ours():
            return False
        schema_format, encoding = (int.from_bytes(head[at : at + 4], "big") for at in (44, 56))
        return head[18] not in (1, 2) or head[18] != head[19] or schema_format > 4 or encoding > 3

    def _has_log(self) -> bool:
        try:
            head = self._header()
            return head.startswith(_MAGIC) and 2 in head[18:20] and self._begins_as_ours()
        except OSError:  # SQLite says why
            return False

    def _header(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_HEADER_BYTES)

    def _quarantine(self) -> str:
        aside = self.path.with_name(f"{FILE_NAME}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        with writing(self.path, "is damaged and cannot be renamed", _OTHER_DIRECTORY_REMEDY):
            os.replace(self.path, aside)
            journal = self.path.with_name(f"{FILE_NAME}-journal")
            if journal.exists():  # SQLite would apply it to the new file
                os.replace(journal, aside.with_name(f"{aside.name}-journal"))
        return f"{self.path} is damaged; it is kept as {aside.name}, and a new one is started"

    def measuring_alone(self, device: str, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes that come here with this cache from measuring on a device at the same time. A process
        that ends, however, keeps nobody waiting. The directory must exist.

        Args:
            device: a name of the device, which no other one has: a file's name without separators.
            seconds: what it waits for another process.

        Raises:
            MeasurementError: another process measures there for longer, or the file system has no locks.
        """
        remedy = "This start keeps its choice, and the next one reads what that process measures"
        return self._file_lock(f".measuring-{device}.lock", seconds, ", which measures on this device", remedy)

    @contextlib.contextmanager
    def _file_lock(
        self, name: str, seconds: float, why: str = "", remedy: str = "End that process, or wait for it"
    ) -> Iterator[None]:
        """A lock for one process at a time, released when the process ends, on a file beside the store, which stays.
        `why` says what a process does that has it, `remedy` what helps when it has it for too long.

        Raises:
            MeasurementError: another process keeps it for too long, or the file system has no locks.
        """
        lock = self.path.with_name(name)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except IsADirectoryError as error:
            rule = f"the folder {name} beside it is where its lock file belongs"
            raise self._error(rule, "Remove that folder") from error
        except OSError as error:
            raise self._error(f"its directory cannot be written: {error.strerror}", _OTHER_DIRECTORY_REMEDY) from error
        try:

            def attempt() -> bool:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_LOCK_PAUSE)
                    return False
                except OSError as error:  # network file systems may have no locks
                    rule = f"its directory has no locks: {error.strerror}"
                    raise self._error(rule, _OTHER_DIRECTORY_REMEDY) from error
                return True

            if not self._wait(attempt, lock, seconds, why):
                rule = f"{name} beside it is locked by {lock_holders(lock)}{why and f'{why},'}"
                rule += f" for more than {seconds:.0f} s"
                raise self._error(rule, remedy)
            yield
        finally:
            # A process that was forked meanwhile has the descriptor, too, and would keep the lock.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    # --- SQLite -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(self, mode: str, seconds: float, path: Path | None = None) -> Iterator[sqlite3.Connection]:
        path = path or self.path
        for ending in _BESIDE:
            self._is_regular_file(path.with_name(f"{path.name}{ending}"))
        name = f"file:{quote(str(path))}?mode={mode}"
        connection = sqlite3.connect(name, uri=True, timeout=seconds, isolation_level=None)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if mode == "rw":  # until `_check`
                connection.set_progress_handler(lambda: 1, _MAX_SCHEMA_VM_STEPS)
            yield connection
        finally:
            connection.close()

    def _check(self, connection: sqlite3.Connection) -> None:
        """Checks that a database has exactly our schema, row by row. A trigger would run in our transactions, and a row
        of the schema may have any name and type: only its SQL says what it makes.

        Raises:
            MeasurementError: the database belongs to another program, or has another version.
            sqlite3.DatabaseError: it is damaged, empty, or not a database.
        """
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION_ID:
            if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall() and not application:
                raise sqlite3.DatabaseError("it is empty")
            remedy = f"Move it away, or set {env_var('cache')} to another directory"
            raise self._error("is another program's database", remedy)
        if version != SCHEMA_VERSION:
            rule = f"has tables of version {version}, this release knows {SCHEMA_VERSION}"
            raise self._error(rule, f"Set {env_var('cache')} to another directory, or move it away")
        expected = _schema()
        found = connection.execute(f"{_SCHEMA_QUERY} LIMIT {len(expected) + 1}").fetchall()
        if sorted(found, key=repr) != expected:
            raise self._error("has other tables than a store of measurements", "Move it away")
        connection.set_progress_handler(None, 0)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns every exception of reading or writing the file into `MeasurementError`."""
        with boundary(MeasurementError, "is damaged", "The next tune renames it and starts a new one", str(self.path)):
            try:
                yield
            except sqlite3.OperationalError as error:
                if str(error).startswith("Could not decode to UTF-8"):
                    raise self._error("holds an invalid measurement: not a text", "Move it away") from error
                if self._has_impossible_header():
                    raise  # it is damaged
                raise self._error(describe_operational(error, self.path), _OTHER_DIRECTORY_REMEDY) from error
            except sqlite3.DataError as error:  # a text longer than the connection's limit
                raise self._error(f"holds an invalid measurement: {error}", "Move it away") from error
            except (sqlite3.Error, MemoryError) as error:
                if (reason := harmless(error)) is not None:
                    raise self._error(reason, _MOVE_REMEDY) from error
                if self._begins_as_ours():
                    raise
                raise self._error(f"is not a store of measurements: {error}", _MOVE_REMEDY) from error

    def _decode(self, text: object, kind: type[Any]) -> Any:
        """A struct of a kind in `_NOUNS` from untrusted JSON."""
        with boundary(MeasurementError, "holds an invalid measurement", "Move it away", str(self.path)):
            if not isinstance(text, str) or len(text) > _MAX_TEXT_CHARS:
                raise ValueError("not a short text")
            value = msgspec.json.decode(text, type=kind)
            if not value.is_valid:
                raise ValueError(f"not a possible {_NOUNS[kind]}")
        return value

    def _error(self, rule: str, remedy: str = "") -> MeasurementError:
        return MeasurementError(rule, remedy, str(self.path))


_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 72
"""The header of an SQLite file up to the application id. Bytes 18 and 19 are 2 for a write-ahead log, else 1; the
numbers at 44 and 56 are the schema format, up to 4, and the encoding of texts, up to 3
(https://www.sqlite.org/fileformat2.html#the_database_header)."""

_OTHER_DIRECTORY_REMEDY = f"Set {env_var('cache')} to a writable directory"
_MOVE_REMEDY = f"Move it away, or {_OTHER_DIRECTORY_REMEDY[0].lower()}{_OTHER_DIRECTORY_REMEDY[1:]}"

_NOUNS: dict[type[Any], str] = {Sample: "sample", Environment: "environment", KernelShape: "layer"}


_SCHEMA_QUERY = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@cache
def _schema() -> list[tuple[Any, ...]]:
    """The rows of a store's schema, indexes that SQLite makes by itself among them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in _TABLES.values():
            connection.execute(statement)
        return sorted(connection.execute(_SCHEMA_QUERY).fetchall(), key=repr)


@lru_cache(maxsize=4)
def shared_store(directory: Path) -> Store:
    """A process's one store of a directory for reading, so that the reads of all layers share what they wait."""
    return Store(directory)
