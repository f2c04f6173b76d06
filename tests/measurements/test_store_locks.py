"""The store of measurements while others hold it: locks, and the journal of another program."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.samples import HERE, SHAPE, kept, sample
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import store as store_module
from vllm_moe_oracle.measurements.store import FILE_NAME, Store

HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def locked(path: Path, code: str = HOLDER) -> Iterator[int]:
    """Another process holds a lock; its number."""
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_layers_of_a_load_wait_for_a_lock_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    connect = sqlite3.connect

    def recorded(*args: object, timeout: float, **others: object) -> sqlite3.Connection:
        waits.append(timeout)
        return connect(*args, timeout=timeout, **others)  # type: ignore[call-overload, no-any-return]

    with locked(store.path) as holder:
        monkeypatch.setattr(sqlite3, "connect", recorded)
        reader = store_module.shared_store(store.path.parent)
        assert store_module.shared_store(store.path.parent) is reader
        for _ in range(48):
            with pytest.raises(MeasurementError, match=rf"is being written by process {holder} \("):
                reader.samples(SHAPE)
    assert waits[0] == 0.5 and sum(waits) < 1.0


FLOCK = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["database", "lock file"])
def test_a_writer_waits_with_a_word_and_an_end(store: Store, kind: str) -> None:
    said: list[str] = []
    writer = Store(store.path.parent, said.append, writer_seconds=0.6)
    path, code = (store.path, HOLDER) if kind == "database" else (store.path.with_name(f".{FILE_NAME}.lock"), FLOCK)
    with locked(path, code) as holder:
        with pytest.raises(MeasurementError, match=rf"by process {holder} \("):
            writer.prepare()
        if kind == "database":
            with pytest.raises(MeasurementError, match=rf"by process {holder} \("):
                writer.add(HERE, SHAPE, [sample()])
    assert said and all(f"is locked by process {holder} (" in words for words in said)
    writer.prepare()
    writer.add(HERE, SHAPE, [sample()])
    assert kept(writer) == {1: sample().us}


def test_a_folder_in_place_of_the_lock_is_named(store: Store) -> None:
    lock = store.path.with_name(f".{FILE_NAME}.lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(MeasurementError, match=r"the folder \.measurements\.sqlite\.lock .* Remove that folder"):
        store.prepare()


def test_a_file_system_without_locks_is_an_error_of_the_cache(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(
        MeasurementError, match=r"its directory has no locks: No locks available\. Set MOE_ORACLE_CACHE"
    ):
        store.prepare()


def test_a_write_ahead_log_of_another_program_is_switched_off(store: Store) -> None:
    store.add(HERE, SHAPE, [sample()])
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE x (y)")
        connection.execute("DROP TABLE x")
    with pytest.raises(MeasurementError, match=r"has a write-ahead log.*The next tune switches it off"):
        store.samples(SHAPE)
    assert [each.name for each in store.path.parent.glob("*.sqlite-*")] == []
    store.prepare()
    assert kept(store) == {1: sample().us}
