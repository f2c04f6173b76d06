"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_oracle import whole_files
from vllm_moe_oracle.cli.writable import why_unwritable
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.whole_files import append_whole, replacing, write_whole, writing


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes fail after half of the data."""

    def write_bytes(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, full_disk: None) -> None:
    file = tmp_path / "page.html"
    file.write_text("before")
    with pytest.raises(MeasurementError, match=r"page.html: cannot be written: .*No space left"), writing(file):
        write_whole(file, b"a long page")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "new", b"1234")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["page.html"]


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    file.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(file) as partial:
        assert partial.suffix == ".svg" and partial.parent == tmp_path
        partial.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["plot.svg"]


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"before")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, b"after")
    assert file.read_bytes() == b"after" and link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    write_whole(tmp_path / "new", b"")
    usual = tmp_path / "usual"
    usual.touch()
    assert (tmp_path / "new").stat().st_mode == usual.stat().st_mode


def test_a_link_that_leads_to_itself_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(link)
    for write in (write_whole, append_whole):
        with pytest.raises(OSError, match="symbolic links"):
            write(link, b"after")
    assert link.is_symlink() and len(os.listdir(tmp_path)) == 2


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 250 + ".html")
    write_whole(file, b"page")
    assert file.read_bytes() == b"page"


def test_what_is_no_file_is_written_itself(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), b"gone")
    assert not Path("/dev/null").is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    reader, writer = os.pipe()
    write_whole(Path(f"/proc/self/fd/{writer}"), b"unnamed")
    append_whole(Path(f"/proc/self/fd/{writer}"), b", twice")
    with replacing(Path(f"/proc/self/fd/{writer}")) as partial:
        partial.write_bytes(b"!")
    assert os.read(reader, 100) == b"unnamed, twice!"
    os.close(reader)
    os.close(writer)


WRITERS: dict[str, Callable[[Path, bytes], None]] = {"write": write_whole, "append": append_whole}


@pytest.mark.parametrize("how", WRITERS)
def test_a_pipe_that_nobody_reads_is_not_waited_for(how: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = threading.Event()
    found: list[OSError] = []

    def write() -> None:
        try:
            WRITERS[how](pipe, b"lost")
        except OSError as error:
            found.append(error)
        done.set()

    threading.Thread(target=write, daemon=True).start()
    in_time = done.wait(30)
    if not in_time:  # lets it go on
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    assert in_time and [error.strerror for error in found] == ["no process reads this pipe"]


@pytest.mark.parametrize("how", WRITERS)
def test_a_device_without_room_is_an_error(how: str) -> None:
    with pytest.raises(OSError, match="No space left"):
        WRITERS[how](Path("/dev/full"), b"1234")


@pytest.mark.parametrize("how", WRITERS)
def test_a_file_that_may_not_grow_is_as_it_was(how: str, tmp_path: Path) -> None:
    """As with a quota: the system writes a part, and refuses the rest."""
    file = tmp_path / "file"
    file.write_bytes(b"before")
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom vllm_moe_oracle import whole_files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"try:\n    whole_files.{how}_whole(Path(sys.argv[1]), bytes(9000))\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert done.stdout == "File too large\n"
    assert file.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_a_line_is_appended_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    append_whole(file, b"one\n")

    class Full:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.inner.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def write(self, data: bytes) -> int:
            if data == b"two\n":
                return int(self.inner.write(b"tw"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usual = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **kwargs: Full(usual(self, *args, **kwargs)))
    with pytest.raises(OSError, match="No space left"):
        append_whole(file, b"two\n")
    monkeypatch.undo()
    append_whole(file, b"three\n")
    assert file.read_bytes() == b"one\nthree\n" and whole_files.append_whole is append_whole


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_closed_folder_can_be_appended_to_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    tmp_path.chmod(0o500)
    try:
        assert why_unwritable(file) == "permission denied" and why_unwritable(file, appended=True) == ""
    finally:
        tmp_path.chmod(0o700)


def test_the_file_of_the_standard_output_keeps_what_is_around(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom vllm_moe_oracle.whole_files import append_whole, write_whole\n"
        "print('before')\nwrite_whole(Path(sys.argv[1]), b'page\\n')\nprint('then')\n"
        "append_whole(Path(sys.argv[1]), b'line\\n')\nprint('after')\n"
    )
    file = tmp_path / "log"
    for name in ("/dev/stdout", str(file)):
        with file.open("wb") as output:
            subprocess.run([sys.executable, "-c", code, name], stdout=output, check=True, cwd=Path(__file__).parents[1])
        assert file.read_text() == "before\npage\nthen\nline\nafter\n" and os.listdir(tmp_path) == ["log"]
