"""The store of measurements: nothing is lost to kills, crowds and full disks, and nothing foreign is believed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.lib.cases import H200, problem
from tests.lib.samples import HERE, SHAPE, kept, sample
from vllm_moe_oracle import settings
from vllm_moe_oracle.cli.commands import tune
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import environment, lookup
from vllm_moe_oracle.measurements import store as store_module
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.store import FILE_NAME, SCHEMA_VERSION, Store
from vllm_moe_oracle.releases.supported import NEWEST


@contextlib.contextmanager
def opened(store: Store) -> Iterator[sqlite3.Connection]:
    """The file as another program opens it; what that changes is kept."""
    with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
        yield connection


# --- Keeping ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_comes_back(store: Store) -> None:
    other = kernel_shape_of(problem(hidden_size=4096))
    store.add(HERE, SHAPE, [sample(1), sample(8)])
    store.add(HERE, other, [sample(4)])
    store.add(HERE, SHAPE, [sample(8, us=40.0)])
    assert store.samples(SHAPE) == [(HERE, [sample(8, us=40.0), sample(1)])]
    assert store.samples_by_kernel_shape(HERE)[other] == [sample(4)]
    assert store.summary() == {f"NVIDIA H200, vLLM {NEWEST}": 3}


def test_a_missing_file_holds_no_measurements(tmp_path: Path) -> None:
    assert Store(tmp_path / "nowhere").samples(SHAPE) == []
    assert not (tmp_path / "nowhere").exists()  # asking makes nothing


def test_places_are_kept_apart(store: Store) -> None:
    elsewhere = environment.Environment("NVIDIA H100", 90)
    store.add(HERE, SHAPE, [sample(us=50)])
    store.add(elsewhere, SHAPE, [sample(us=70)])
    assert [(each.gpu, samples[0].us) for each, samples in store.samples(SHAPE)] == [
        ("NVIDIA H100", 70),
        ("NVIDIA H200", 50),
    ]


# --- Several processes ------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.lib.samples import SHAPE, HERE, sample
from vllm_moe_oracle.measurements.store import Store
store = Store(Path(sys.argv[1]))
store.prepare()
first, step = int(sys.argv[2]), 0
print("ready", flush=True)
while step < {steps}:
    store.add(HERE, SHAPE, [sample(first + step, us=float(first + step)), sample(first + step, "hopper_mxfp8")])
    print(first + step, flush=True)
    step += 1
"""


def writer(folder: Path, first: int, steps: int = 10**9) -> subprocess.Popen[str]:
    code = WRITER.format(path=[str(Path(__file__).parents[2])], steps=steps)
    command = [sys.executable, "-c", code, str(folder), str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Four processes make the file and fill it, and this one reads all the while."""
    writers = [writer(tmp_path, first, steps=20) for first in (1000, 2000, 3000, 4000)]
    reader = Store(tmp_path)
    while any(each.poll() is None for each in writers):
        with contextlib.suppress(MeasurementError):  # a reader waits for little; it says that it is being written
            reader.samples(SHAPE)
        time.sleep(0.01)
    assert [each.wait() for each in writers] == [0, 0, 0, 0]
    for each in writers:
        assert each.stdout is not None
        each.stdout.close()
    assert set(kept(reader)) == {first + step for first in (1000, 2000, 3000, 4000) for step in range(20)}


@pytest.mark.parametrize("after", [0, 3, 10])
def test_a_killed_writer_loses_nothing_that_it_had_kept(tmp_path: Path, after: int) -> None:
    process = writer(tmp_path, 1)
    assert process.stdout is not None
    done = 0
    for line in process.stdout:
        done = int(line) if line.strip().isdigit() else done
        if done >= after:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    process.stdout.close()
    done = int(rest[-1]) if rest and rest[-1].isdigit() else done
    store = Store(tmp_path)
    assert store.prepare() == ""  # it is not damaged
    found = store.samples(SHAPE)
    rows = [each for _, samples in found for each in samples]
    # Both rows of a transaction or none, and at most the one that was not reported yet is there in addition.
    assert {each.tokens for each in rows} - set(range(1, done + 1)) <= {done + 1}
    assert len(rows) == 2 * len({each.tokens for each in rows}) and len(rows) >= 2 * done
    store.add(HERE, SHAPE, [sample(9999)])
    assert 9999 in kept(store)


def test_a_hot_journal_is_rolled_back(store: Store) -> None:
    """A process that dies in the middle of a commit leaves a journal; the next who opens the file undoes half of it."""
    store.add(HERE, SHAPE, [sample(1)])
    code = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("DELETE FROM samples")
rows = [(str(number), "y" * 3000) for number in range(200)]
connection.executemany("INSERT INTO samples VALUES (1, ?, 'x', 1, 'uniform', ?, 0)", rows)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(store.path)]).returncode == 9
    assert store.path.with_name(f"{FILE_NAME}-journal").exists()
    assert kept(store) == {1: 50.0}


# --- Damaged and foreign files ----------------------------------------------------------------------------------------


_filled: list[bytes] = []


def fill(store: Store) -> None:
    """Puts 199 samples into a store. Each is a transaction, so the file is written once and then copied."""
    if not _filled:
        for tokens in range(1, 200):
            store.add(HERE, kernel_shape_of(problem(hidden_size=32 * tokens)), [sample(tokens)])
        _filled.append(store.path.read_bytes())
    store.path.write_bytes(_filled[0])


@pytest.mark.parametrize("length", [0, 10, 60, 100, 4096, 9000])
def test_a_truncated_file_is_put_aside_by_tune_and_left_by_serving(store: Store, length: int) -> None:
    fill(store)
    data = store.path.read_bytes()
    assert len(data) > 9000
    store.path.write_bytes(data[:length])
    with contextlib.suppress(MeasurementError):  # what can still be read of it is believed only as far as it is sound
        assert kept(store) in ({}, {64: 50.0})
    assert store.path.read_bytes() == data[:length]  # a reader changes nothing
    said = store.prepare()
    assert "is damaged; it is kept as" in said
    aside = [path for path in store.path.parent.iterdir() if ".damaged-" in path.name]
    assert [path.read_bytes() for path in aside] == [data[:length]]
    store.add(HERE, SHAPE, [sample(1)])
    assert kept(store) == {1: 50.0}


def test_damage_in_the_middle_is_noticed(store: Store) -> None:
    fill(store)
    data = bytearray(store.path.read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = os.urandom(64)
    store.path.write_bytes(data)
    with pytest.raises(MeasurementError, match="damaged"):
        store.samples_by_kernel_shape(HERE)
    assert "is damaged" in store.prepare()


def bookmarks(store: Store) -> None:
    store.path.unlink()
    with opened(store) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def newer(store: Store) -> None:
    with opened(store) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


NO_STORE = r"is not a store of measurements.*Move it away, or set MOE_ORACLE_"
FOREIGN: dict[str, tuple[Callable[[Store], object], str]] = {
    "word": (lambda store: store.path.write_bytes(b"hello"), NO_STORE),
    "script": (lambda store: store.path.write_bytes(b"#!/bin/sh\necho me\n" * 100), NO_STORE),
    "noise": (lambda store: store.path.write_bytes(os.urandom(20000)), NO_STORE),
    "database": (bookmarks, r"another program's database.*Move it away, or set MOE_ORACLE_"),
    "newer version": (newer, f"version {SCHEMA_VERSION + 1}, this release knows {SCHEMA_VERSION}"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_another_program_wrote_is_never_touched(store: Store, kind: str) -> None:
    """Nor is a new file promised."""
    write, words = FOREIGN[kind]
    write(store)
    before = store.path.read_bytes()
    for touch in (store.prepare, lambda: store.samples(SHAPE), lambda: store.add(HERE, SHAPE, [sample()])):
        with pytest.raises(MeasurementError, match=words):
            touch()
    assert store.path.read_bytes() == before


@pytest.mark.parametrize("value", [0, 2, 3, 5, 255])
def test_after_any_changed_byte_of_the_header_tune_measures(tmp_path: Path, value: int) -> None:
    """A header that SQLite takes for read-only, or for a newer release's, is damaged."""
    made = Store(tmp_path / "good")
    made.prepare()
    made.add(HERE, SHAPE, [sample()])
    content = made.path.read_bytes()
    for at in range(100):
        if content[at] == value:
            continue
        changed = Store(tmp_path / f"{at}")
        changed.path.parent.mkdir()
        changed.path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        try:
            changed.prepare()
        except MeasurementError as error:  # of the version or the program
            assert 60 <= at < 64 or 68 <= at < 72, at
            assert "move it away" in str(error).lower(), at
        else:
            changed.add(HERE, SHAPE, [sample()])
            assert changed.samples(SHAPE), at


def test_triggers_and_views_are_refused(store: Store) -> None:
    store.add(HERE, SHAPE, [sample()])
    with opened(store) as connection:
        connection.execute("CREATE TRIGGER t AFTER INSERT ON samples BEGIN DELETE FROM samples; END")
    for touch in (lambda: store.samples(SHAPE), lambda: store.add(HERE, SHAPE, [sample(2)])):
        with pytest.raises(MeasurementError, match="other tables"):
            touch()


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "{}",
        "[" * 50_000,
        '{"backend":"marlin_mxfp8","activations":"16bit","tokens":1,"routing":"uniform","us":-1,"replays":1}',
        '{"backend":"marlin_mxfp8","activations":"16bit","tokens":1,"routing":"uniform","us":1e300,"low":1,"high":1}',
        '{"backend":"marlin_mxfp8","activations":"16bit","tokens":99999999,"routing":"uniform","failure":"x"}',
        '{"backend":"marlin_mxfp8","activations":"16bit","tokens":1,"routing":"sideways","us":1}',
        '{"backend":"m","activations":"16bit","tokens":1,"routing":"uniform","us":1,"import":"os"}',
        '{"backend":"m\\u001b[2J","activations":"16bit","tokens":1,"routing":"uniform","failure":"x"}',
        '{"backend":"m","activations":"' + "x" * 300 + '","tokens":1,"routing":"uniform","failure":"x"}',
        b"\xff\xfe",
        12,
    ],
)
def test_impossible_contents_are_not_believed(store: Store, text: object) -> None:
    overwrite(store, "UPDATE samples SET sample = ?", text)
    with pytest.raises(MeasurementError, match="holds an invalid measurement"):
        store.samples(SHAPE)


def overwrite(store: Store, statement: str, *values: object) -> None:
    """Changes what is kept of one sample."""
    store.add(HERE, SHAPE, [sample()])
    with opened(store) as connection:
        connection.execute(statement, values)


@pytest.mark.parametrize("text", ["silu\x1b[2J", "silu\nERROR no line of ours", "x" * 300])
def test_what_cannot_be_shown_is_refused(store: Store, text: str) -> None:
    overwrite(store, "UPDATE environments SET description = ?", msgspec.structs.replace(HERE, driver=text).key)
    with pytest.raises(MeasurementError, match="holds an invalid measurement: not a possible environment"):
        store.samples(SHAPE)
    overwrite(store, "UPDATE samples SET kernel_shape = ?", msgspec.structs.replace(SHAPE, activation=text).key)
    with pytest.raises(MeasurementError, match="holds an invalid measurement: not a possible layer"):
        store.samples_by_kernel_shape(HERE)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE environments SET description = '{\"gpu\": 1}'", ""),
        ("UPDATE samples SET sample = CAST(x'ff1b22' AS TEXT)", ": not a text"),
    ],
)
def test_what_is_no_description_is_refused(store: Store, statement: str, words: str) -> None:
    overwrite(store, statement)
    with pytest.raises(MeasurementError, match=f"holds an invalid measurement{words}"):
        store.samples(SHAPE)


@pytest.mark.parametrize("length", [60_000, 1 << 20])
def test_a_small_file_does_not_fill_the_memory(store: Store, length: int) -> None:
    """One description for all samples: beside each of them it would be megabytes a thousand times."""
    with opened(store) as connection:
        description = msgspec.structs.replace(HERE, driver="x" * length).key
        connection.execute("INSERT INTO environments VALUES (1, ?)", (description,))
        text = msgspec.json.encode(sample()).decode()
        rows = [(SHAPE.key, str(number), text) for number in range(300)]
        connection.executemany("INSERT INTO samples VALUES (1, ?, ?, 1, 'uniform', ?, 0)", rows)
    tracemalloc.start()
    try:
        with pytest.raises(MeasurementError, match="holds an invalid measurement"):
            store.samples(SHAPE)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_unknown_environment_has_no_samples(store: Store) -> None:
    overwrite(store, "UPDATE samples SET environment = 7")
    assert store.samples(SHAPE) == []


def test_a_file_made_to_be_slow_does_not_hold_a_server_up(store: Store) -> None:
    with opened(store) as connection:
        connection.execute("INSERT INTO environments VALUES (1, ?)", (HERE.key,))
        rows = [(SHAPE.key, str(number), "x") for number in range(300_000)]
        connection.executemany("INSERT INTO samples VALUES (1, ?, ?, 1, 'uniform', ?, 0)", rows)
    begin = time.monotonic()
    with pytest.raises(MeasurementError, match=r"too long|invalid measurement"):
        store.samples(SHAPE)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    if kind == "folder":
        store.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(store.path)
    else:
        store.path.symlink_to(store.path)
    for touch in (store.prepare, lambda: store.samples(SHAPE)):
        with pytest.raises(MeasurementError, match=r"is not a regular file|cannot be opened"):
            touch()


# --- Disks ------------------------------------------------------------------------------------------------------------


def in_a_child(code: str, *arguments: object) -> str:
    """What code printed in a process of its own, which may give its rights away."""
    prelude = f"import sys\nsys.path[:0] = {[str(Path(__file__).parents[2])]!r}\n"
    prelude += "from pathlib import Path\nfrom tests.measurements.test_store import *\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("kind", ["pipe", "folder", "sparse"])
def test_a_journal_that_is_none_is_named_and_not_waited_for(store: Store, kind: str) -> None:
    """SQLite opens what lies beside the file, and waits for the writer of a pipe, whatever signals come."""
    code = """
    store, kind, ending = Store(Path(sys.argv[1])), *sys.argv[2:]
    beside = store.path.with_name(f"{FILE_NAME}{ending}")
    {"pipe": os.mkfifo, "folder": os.mkdir, "sparse": Path.touch}[kind](beside)
    if kind == "sparse":
        os.truncate(beside, 2 << 30)
    writes = (store.prepare, lambda: store.add(HERE, SHAPE, [sample(1)]))
    for touch in (lambda: store.samples(SHAPE), store.summary, *writes):
        try:
            touch()
        except MeasurementError as error:
            assert f"{beside.name} beside it " in error.rule and error.remedy == "Move it away", error
        else:
            raise AssertionError("not refused")
    # As a server does while it loads: a remark, and on.
    found = lookup.find_measurements(problem(), H200, settings.load({"MOE_ORACLE_CACHE": str(store.path.parent)}))
    assert found is not None and any(beside.name in remark for remark in found.remarks), found
    beside.rmdir() if kind == "folder" else beside.unlink()
    """
    for ending in ("-journal", "-wal"):
        in_a_child(code, store.path.parent, kind, ending)
    assert store.samples(SHAPE) == []


def test_a_full_disk_loses_nothing(store: Store) -> None:
    store.add(HERE, SHAPE, [sample(1)])
    code = """
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store(Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.path.stat().st_size, resource.RLIM_INFINITY))
    try:
        fill(store)
    except MeasurementError as error:
        print(error)
    """
    said = in_a_child(code, store.path.parent)
    assert "cannot be written to: the disk" in said and "MOE_ORACLE_CACHE" in said
    assert kept(store)[1] == 50.0
    assert store.prepare() == ""
    store.add(HERE, SHAPE, [sample(2)])
    assert set(kept(store)) >= {1, 2}


def test_a_read_only_disk_is_read_and_not_written(store: Store) -> None:
    store.add(HERE, SHAPE, [sample(1)])
    code = """
    if os.getuid() == 0:  # for whom nothing is read-only
        os.setgid(65534)
        os.setuid(65534)
    store = Store(Path(sys.argv[1]))
    print(kept(store))
    for touch in (store.prepare, lambda: store.add(HERE, SHAPE, [sample(2)])):
        try:
            touch()
        except MeasurementError as error:
            print(error)
    """
    folder = store.path.parent
    parents = [folder, *folder.parents][:-1]
    modes = {path: path.stat().st_mode for path in parents if path.stat().st_uid == os.getuid()}
    try:
        for path, mode in modes.items():
            path.chmod(mode | 0o055)
        folder.chmod(0o555)
        store.path.chmod(0o444)
        said = in_a_child(code, folder).splitlines()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert said[0] == "{1: 50.0}"
    assert len(said) == 3 and all("MOE_ORACLE_CACHE" in line for line in said[1:])
    assert kept(store) == {1: 50.0}


# --- What serving does with it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"rubbish", b"SQLite format 3\x00" + b"\x00" * 4000])
def test_serving_goes_on_without_a_store_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    chosen = settings.load({"MOE_ORACLE_CACHE": str(tmp_path)})
    found = lookup.find_measurements(problem(hidden_size=32), H200, chosen)
    assert found is not None and not found.times
    assert any(remark.startswith("the cache is not used") for remark in found.remarks), found.remarks


def test_a_warm_start_costs_less_than_a_tenth_of_a_second(store: Store) -> None:
    fill(store)
    for backend in ("marlin_mxfp8", "humming_mxfp8", "hopper_mxfp8"):
        store.add(HERE, SHAPE, [sample(1 << power, backend) for power in range(14)])
    chosen = settings.load({"MOE_ORACLE_CACHE": str(store.path.parent)})
    lookup.find_measurements(
        problem(hidden_size=32), H200, chosen
    )  # imports, the shipped profile, the hash of the kernels
    begin = time.perf_counter()
    found = lookup.find_measurements(problem(), H200, chosen)
    assert time.perf_counter() - begin < 0.1
    assert found is not None and set(found.times) == {"marlin_mxfp8", "humming_mxfp8", "hopper_mxfp8"}


# --- Hostile schemas, bytes and locks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["table", "index", "trigger"])
@pytest.mark.parametrize("name", ["samples", "environments", "t"])
def test_a_trigger_cannot_hide_behind_a_name_or_a_type(store: Store, name: str, kind: str) -> None:
    """SQLite runs the SQL of a row of the schema, whatever its other columns say."""
    store.add(HERE, SHAPE, [sample()])
    with opened(store) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        rows = connection.execute("SELECT * FROM sqlite_master").fetchall()
        trigger = "CREATE TRIGGER t AFTER INSERT ON samples BEGIN DELETE FROM samples; END"
        connection.execute("DELETE FROM sqlite_master")
        # Before the row with the same name, which a dictionary of names would keep instead.
        for row in [*rows[:1], (kind, name, "samples", 0, trigger), *rows[1:]]:
            connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
    before = store.path.read_bytes()
    for touch in (lambda: store.samples(SHAPE), lambda: store.add(HERE, SHAPE, [sample(2)]), store.prepare):
        with contextlib.suppress(MeasurementError):
            touch()
    aside = [path for path in store.path.parent.iterdir() if ".damaged-" in path.name]
    assert before in [path.read_bytes() for path in [store.path, *aside]]  # no sample is lost


def test_a_schema_of_many_wide_tables_is_not_read_to_its_end(store: Store) -> None:
    """SQLite reads all of it before the first query: 2 ms for each of these rows, of which a file can hold 130,000."""
    store.add(HERE, SHAPE, [sample()])
    wide = ",".join(f"c{number}" for number in range(1500))
    with opened(store) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for number in range(800):
            row = ("table", f"t{number}", f"t{number}", 2, f"CREATE TABLE t{number}({wide})")
            connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
    before = store.path.read_bytes()
    other = Store(store.path.parent)
    for touch in (other.check_readable, other.summary, other.prepare, lambda: other.add(HERE, SHAPE, [sample(2)])):
        with pytest.raises(MeasurementError, match="takes too long to answer"):
            touch()
    assert store.path.read_bytes() == before


def test_any_changed_byte_of_the_first_page_is_an_error_or_harmless(store: Store) -> None:
    """The header and the schema: SQLite quotes names from it in messages, which then are not UTF-8."""
    store.add(HERE, SHAPE, [sample()])
    data = store.path.read_bytes()
    expected = store.samples(SHAPE)
    assert expected
    other = Store(store.path.parent)
    used = [at for at in range(4096) if data[at] or at < 112]
    for at in used[::7]:
        for value in (0x00, 0xFF, data[at] ^ 0x80):
            store.path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            with contextlib.suppress(MeasurementError):
                assert other.samples(SHAPE) == expected
            with contextlib.suppress(MeasurementError):
                other.summary()


@pytest.mark.parametrize(
    "error", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), MemoryError(), OverflowError("x"), KeyError("x")]
)
def test_every_exception_of_reading_is_one_error(
    store: Store, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(HERE, SHAPE, [sample()])

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(msgspec.json, "decode", fail)
    with pytest.raises(MeasurementError, match="holds an invalid measurement"):
        store.samples(SHAPE)
    remarks = lookup.find_measurements(problem(), H200, settings.load({"MOE_ORACLE_CACHE": str(store.path.parent)}))
    assert remarks is not None


def test_a_store_reaches_the_worker_processes_of_other_gpus(tmp_path: Path) -> None:
    for store in (Store(tmp_path), Store(tmp_path, tune._print_note)):
        assert pickle.loads(pickle.dumps(store)).path == store.path


def test_no_environments_rows_crowd_out_another_ones(store: Store) -> None:
    """A cache on a volume that machines with several drivers share."""
    counts = range(1, 281)
    for driver in range(17):
        store.add(msgspec.structs.replace(HERE, driver=str(driver)), SHAPE, map(sample, counts))
    found = store.samples(SHAPE)
    assert [there.driver for there, _ in found] == [str(driver) for driver in reversed(range(17))]
    assert {len(samples) for _, samples in found} == {len(counts)}


def test_no_backends_rows_crowd_out_another_ones(store: Store) -> None:
    names = [f"backend_{letter}" for letter in "abcdefgh"]
    for name in names:
        store.add(HERE, SHAPE, [msgspec.structs.replace(sample(count), backend=name) for count in range(1, 121)])
    ((_, samples),) = store.samples(SHAPE)
    assert Counter(each.backend for each in samples) == dict.fromkeys(names, 120)


def test_an_environment_that_is_still_measured_stays_beside_many_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_ENVIRONMENTS", 3)
    for driver in ("mine", *map(str, range(5)), "mine"):
        store.add(msgspec.structs.replace(HERE, driver=driver), SHAPE, [sample()])
    assert [there.driver for there, _ in store.samples(SHAPE)] == ["mine", "4", "3"]
