"""Where commands write: standard output, pipes, devices, directories and disks without room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.lib import cli, golden_files
from tests.lib.cli import Run
from vllm_moe_oracle.cli import writable
from vllm_moe_oracle.measurements import profile

ROOT = Path(__file__).parents[2]
CHOICES = str(golden_files.newest("choice"))
EXPORT = ("tune", "--import", CHOICES, "--export")
PAGE = ("report", CHOICES, "--output")
RECORDS = ("bench", "mxfp8:qwen3-30b-a3b", "--jsonl")
COMMANDS = pytest.mark.parametrize("command", [EXPORT, PAGE], ids=["tune", "report"])


def start(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The tool in a process of its own, with pipes as standard output and error."""
    command = [sys.executable, "-m", "vllm_moe_oracle.cli", *arguments]
    return subprocess.run(command, capture_output=True, cwd=ROOT, timeout=120, **options)


@COMMANDS
def test_a_closed_standard_output_ends_as_of_every_command(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "vllm_moe_oracle.cli", *command, "-"]
    ended = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, timeout=120)
    os.close(writer)
    assert (ended.returncode, b"error" in ended.stderr) == (141, False), ended.stderr


@pytest.mark.parametrize(
    ("to", "reason"), [("page.html", "it is a link that leads to itself"), ("nowhere/page.html", "it is a link into ")]
)
@COMMANDS
def test_a_link_that_leads_to_no_file_stays(
    command: tuple[str, ...], to: str, reason: str, run: Run, tmp_path: Path
) -> None:
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / to)
    result = run(*command, link)
    assert result.status == 2 and f"{link} cannot be written: {reason}" in result.err
    assert os.readlink(link) == str(tmp_path / to) and os.listdir(tmp_path) == [link.name]


def is_whole(command: tuple[str, ...], data: bytes, folder: Path) -> bool:
    """Whether the bytes are what the command writes, and nothing else."""
    if command is PAGE:
        return data.startswith(b"<!doctype html>") and data.rstrip().endswith(b"</html>")
    file = folder / "copy.json"
    file.write_bytes(data)
    return len(profile.read(file).entries) > 1 and bool(json.loads(data))


@pytest.mark.parametrize(
    ("command", "word"), [(EXPORT, "/dev/stdout"), (EXPORT, "-"), (EXPORT, "/proc/self/fd/1"), (PAGE, "-")], ids=str
)
def test_what_is_written_goes_to_a_pipe_and_nothing_else_does(
    command: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    done = start(*command, word)
    assert done.returncode == 0 and is_whole(command, done.stdout, tmp_path)
    assert command is PAGE or (done.stderr.startswith(b"note: ") and b"kept in" in done.stderr)


@COMMANDS
def test_a_pipe_with_a_reader_gets_everything(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    while run(*command, str(pipe)).status:  # the reader may not have opened it yet
        pass
    reader.join(30)
    assert is_whole(command, read[0], tmp_path)


@pytest.mark.parametrize("command", [EXPORT, PAGE, RECORDS], ids=["tune", "report", "bench"])
def test_what_cannot_be_written_is_refused_before_the_work(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (pipe, "pipe cannot be written: no process reads this pipe. Start its reader first"),
        (tmp_path, "cannot be written: it is a directory. Name a file that you can write"),
        (tmp_path / "none" / "file", f"cannot be written: there is no directory {tmp_path}/none"),
    ):
        result = run(*command, path)
        assert result.status == 2 and result.out == ""
        assert result.err.startswith(f"error: {command[-1]}: ") and words in result.messages
    assert os.listdir(tmp_path) == ["pipe"]


def _link(how: str, file: Path, path: Path) -> Path:
    """Another path of a file, or its own."""
    if how == "itself":
        return file
    if how == "hard link":
        path.hardlink_to(file)
    elif how == "link":
        path.symlink_to(file)
    else:
        return Path(os.path.relpath(file))
    return path


LINKS = pytest.mark.parametrize("how", ["itself", "hard link", "link", "relative path"])


@LINKS
@pytest.mark.parametrize("command", ["report", "tune", "tune --profile", "bench"])
def test_what_a_command_reads_is_not_replaced(command: str, how: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / ("config.json" if command == "bench" else "input")
    source = cli.CONFIGS / "qwen3-30b-a3b.json" if command == "bench" else Path(CHOICES)
    if command == "tune --profile":
        source = profile.SHIPPED_FOLDER / "nvidia_h200.json"
    file.write_bytes(source.read_bytes())
    path = _link(how, file, tmp_path / "other")
    arguments = {
        "report": ("report", file, "-o", path),
        "tune": ("tune", "--import", CHOICES, "--import", file, "--export", path),
        "tune --profile": ("tune", "mxfp8:qwen3-30b-a3b", "--profile", file, "--export", path),
        "bench": ("bench", file, "--quantization", "mxfp8", "--jsonl", path),
    }[command]
    result = run(*arguments)
    assert result.status == 2 and result.out == "" and file.read_bytes() == source.read_bytes()
    option = {"report": "--output", "bench": "--jsonl"}.get(command, "--export")
    assert f"error: {option}: {path} is named twice: what this command reads there, or writes" in result.messages
    assert "Name another file" in result.messages


def test_two_outputs_of_a_command_are_two_files(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    result = run("bench", "mxfp8:qwen3-30b-a3b", "--plot", path, "--jsonl", path)
    assert result.status == 2 and "x.svg is named twice" in result.messages and not path.exists()


@pytest.mark.parametrize(
    ("arguments", "name", "noun"),
    [
        (PAGE, "page.html", "a page of report"),
        (RECORDS, "file", "records of bench --jsonl"),
        (("bench", "mxfp8:qwen3-30b-a3b", "--plot"), "plot.svg", "a picture"),
        (("report", CHOICES, "-o", "page.html", "--svg"), "speed-up.svg", "a picture"),
    ],
    ids=["report", "bench", "plot", "plots"],
)
def test_a_file_of_another_kind_is_not_replaced(
    arguments: tuple[str, ...], name: str, noun: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    file.write_text('{"precious": true}\n')
    is_folder = arguments[-1] == "--svg"
    result = run(*arguments, tmp_path if is_folder else file)
    assert result.status == 2 and file.read_text() == '{"precious": true}\n' and os.listdir(tmp_path) == [name]
    assert f"{file} is there, and is not {noun}. Name another file, or remove this one" in result.messages
    file.write_text("")
    if arguments[0] == "report":  # an empty file holds nothing, and a second call replaces what the first wrote
        for _ in range(2):
            assert run(*arguments, tmp_path if is_folder else file).status == 0
        assert file.stat().st_size > 1000


def test_disks_and_sockets_are_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        assert "socket cannot be written: it is a socket" in run(*EXPORT, "socket").messages
    disk = next((each for each in Path("/dev").iterdir() if each.is_block_device()), None)
    if disk is not None:
        assert f"{disk} cannot be written: it is a disk" in run(*EXPORT, disk).messages


@COMMANDS
def test_no_room_is_one_line_with_a_remedy(command: tuple[str, ...], run: Run) -> None:
    result = run(*command, "/dev/full")
    assert result.status == 2
    assert "error: /dev/full: cannot be written: No space left on device. Name a file on a disk with room" in (
        result.messages.replace("OSError: ", "").replace("[Errno 28] ", "")
    )


def test_a_file_that_may_not_grow_is_as_it_was(tmp_path: Path) -> None:
    import resource

    file = tmp_path / "profile.json"
    assert start(*EXPORT, str(file)).returncode == 0
    before = file.read_bytes()
    limit = (len(before) // 2, len(before) // 2)
    done = start(*EXPORT, str(file), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 2 and file.read_bytes() == before and os.listdir(tmp_path) == ["profile.json"]
    assert b"cannot be written: File too large. Name a file on a disk with room that you can write" in done.stderr


@pytest.mark.parametrize("suffix", ["svg", "svgz", "png", "pdf", "eps", "ps", "jpg", "webp", "tif", "gif", "avif"])
def test_a_picture_may_be_replaced_by_another(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    if suffix not in pyplot.figure().canvas.get_supported_filetypes():
        pytest.skip(f"this Matplotlib does not write {suffix}")
    path = tmp_path / f"plot.{suffix}"
    pyplot.figure().savefig(path)
    pyplot.close("all")
    writable.check_kind(path, writable.PICTURE, "--plot")


def test_records_may_be_replaced_by_others() -> None:
    writable.check_kind(Path(CHOICES), writable.RECORDS, "--jsonl")
