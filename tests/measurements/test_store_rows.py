"""Rows that cannot be kept, and SQLite's errors that are no damage: the store says which, and the file stays."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib.samples import HERE, SHAPE, sample
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import store as store_module
from vllm_moe_oracle.measurements.store import FILE_NAME, Store

GOOD = sample(1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path)
    made.prepare()
    made.add(HERE, SHAPE, [GOOD])
    return made


def is_untouched(store: Store) -> bool:
    """Whether the store has its row, is not put aside, and takes others."""
    assert store.prepare() == ""
    assert store.samples(SHAPE) == [(HERE, [GOOD])]
    assert {*os.listdir(store.path.parent)} == {FILE_NAME, f".{FILE_NAME}.lock"}
    store.add(HERE, SHAPE, [sample(2)])
    return len(store.samples(SHAPE)[0][1]) == 2


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"us": math.nan}, "us=nan"),
        ({"low": -math.inf}, "low=-inf"),
        ({"error": math.nan}, "error=nan"),
        ({"tokens": 1.5}, "tokens=1.5"),
        ({"tokens": True}, "tokens=True"),
        ({"tokens": 1 << 70}, f"tokens={1 << 70}"),
        ({"replays": math.inf}, "replays=inf"),
        ({"backend": "\ud800"}, "backend="),
        ({"backend": "a\nb"}, "backend='a\\\\nb'"),
        ({"backend": None}, "backend=None"),
        ({"routing": "sideways"}, "routing='sideways'"),
        ({"us": 0.0, "low": 0.0, "high": 0.0}, "us=0.0"),
        ({"failure": "x" * 3000}, "backend='marlin_mxfp8'"),
        ({"failure": "no", "silent_seconds": math.nan}, "silent_seconds=nan"),
    ],
)
def test_an_invalid_sample_is_named_and_nothing_is_kept(fields: dict[str, Any], shown: str, store: Store) -> None:
    with pytest.raises(MeasurementError) as caught:
        store.add(HERE, SHAPE, [sample(4), changed(GOOD, **fields)])
    text = str(caught.value)
    assert text.startswith("cannot keep an invalid sample, Sample(") and "damaged" not in text and len(text) < 600
    assert shown.replace("\\\\", "\\") in text or "failure" in fields
    assert is_untouched(store)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("environment", each)
        for each in ({"gpu": "x" * 300}, {"gpu": "a\0b"}, {"driver": math.nan}, {"capability": "90"})
    ]
    + [("layer", each) for each in ({"scheme": "a\rb"}, {"activation": "x" * 300}, {"top_k": math.nan})],
)
def test_an_invalid_place_or_layer_is_named_and_nothing_is_kept(kind: str, fields: Any, store: Store) -> None:
    here, shape = (changed(HERE, **fields), SHAPE) if kind == "environment" else (HERE, changed(SHAPE, **fields))
    shown = "Environment" if kind == "environment" else "KernelShape"
    with pytest.raises(MeasurementError, match=rf"^cannot keep an invalid {kind}, {shown}\("):
        store.add(here, shape, [sample(4)])
    assert is_untouched(store)


@pytest.mark.parametrize("clock", [math.nan, None, [1.0]])
def test_a_row_that_the_table_refuses_is_shown_and_is_no_damage(
    clock: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite takes NaN for NULL."""
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: clock)
        with pytest.raises(MeasurementError, match=rf"cannot keep the row .*'marlin_mxfp8'.*{clock}.*\)") as caught:
            store.add(HERE, SHAPE, [sample(4)])
    assert "damaged" not in str(caught.value) and caught.value.where == str(store.path)
    assert is_untouched(store)


# --- Errors of SQLite -------------------------------------------------------------------------------------------------


def with_code(kind: type[sqlite3.Error], code: int) -> sqlite3.Error:
    error = kind("what SQLite says")
    error.sqlite_errorcode = code
    return error


DAMAGE = [
    with_code(sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT),
    with_code(sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT | 2 << 8),
    with_code(sqlite3.DatabaseError, sqlite3.SQLITE_NOTADB),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
]
OTHERS = [
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_FULL),
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_READONLY),
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_IOERR | 3 << 8),
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_PROTOCOL),
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_CANTOPEN),
    with_code(sqlite3.OperationalError, sqlite3.SQLITE_LOCKED),
    with_code(sqlite3.DatabaseError, sqlite3.SQLITE_AUTH),
    with_code(sqlite3.DatabaseError, sqlite3.SQLITE_NOLFS),
    with_code(sqlite3.InternalError, sqlite3.SQLITE_INTERNAL),
    with_code(sqlite3.IntegrityError, sqlite3.SQLITE_CONSTRAINT),
    with_code(sqlite3.InterfaceError, sqlite3.SQLITE_MISUSE),
    MemoryError(),
]


def name(error: Exception) -> str:
    return f"{type(error).__name__}-{getattr(error, 'sqlite_errorcode', '')}"


def raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store_module.Store, "_check", fail)


@pytest.mark.parametrize("error", OTHERS, ids=name)
def test_an_error_that_is_no_damage_leaves_the_file(
    error: Exception, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        raises(error, patched)
        for touch in (store.prepare, store.check_readable, lambda: store.add(HERE, SHAPE, [sample(4)])):
            with pytest.raises(MeasurementError) as caught:
                touch()
            assert "damaged" not in str(caught.value) and caught.value.remedy and caught.value.where == str(store.path)
            assert "what SQLite says" in caught.value.rule or "memory" in caught.value.rule
    assert is_untouched(store)


@pytest.mark.parametrize("error", DAMAGE, ids=name)
def test_damage_puts_the_file_aside(error: Exception, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        raises(error, patched)
        with pytest.raises(MeasurementError, match=r"is damaged: .*The next tune renames it"):
            store.check_readable()
        assert "is damaged; it is kept as" in store.prepare()
    assert store.samples(SHAPE) == []
