"""The command line tool as a process: its imports, pipes, interrupts, locale, help; what its options may be."""

from __future__ import annotations

import io
import json
import logging
import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.lib import distributions
from tests.lib.cli import CONFIGS, Run, Write
from tests.lib.configs import MODELOPT, quantized
from tests.lib.fresh_process import TOOL, python
from tests.lib.tiers import sampled
from vllm_moe_oracle import __version__
from vllm_moe_oracle.cli import commands
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP, default_registry


@pytest.mark.parametrize("machine", ["nvidia-h200", "auto"])
def test_explain_imports_neither_torch_nor_vllm(machine: str, write: Write) -> None:
    if machine == "auto" and detect._gpu_is_visible():
        pytest.skip("a GPU's properties are asked of torch")
    code = (
        "import sys\n"
        "from vllm_moe_oracle.cli import main\n"
        f"sys.argv = ['vllm-moe-oracle', 'explain', {str(write())!r}, '--device', {machine!r}]\n"
        "try:\n    main.main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'triton', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr.strip()) == (0, "[]")


def test_a_closed_pipe_ends_quietly_with_the_shells_status(write: Write) -> None:
    """As before ``| head``: 141, which is 128 and SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    for line in (["--version"], ["explain", str(write()), "--device", "nvidia-h200", "--json"]):
        command = [sys.executable, *TOOL, *line]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
        assert ended.returncode == 141 and "BrokenPipe" not in ended.stderr, ended.stderr
    os.close(writer)


def test_output_that_cannot_be_written_is_one_line_and_status_2(write: Write) -> None:
    path = str(write())
    for line in (["--version"], ["explain", path, "--device", "nvidia-h200", "--json"]):
        command = [sys.executable, *TOOL, *line]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        said = "error: standard output cannot be written: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (2, said)
    for closed, said in ((">&-", "error: standard output is closed\n"), ("2>&-", ""), (">&- 2>&-", "")):
        shell = ["sh", "-c", f'"$@" {closed}', "sh", *command]
        ended = subprocess.run(shell, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0 if closed == "2>&-" else 2, said)


def beside_a_third_party(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the tool says where an installed package has an entry point whose module has this text."""
    site = distributions.install(folder / "site", "theirs", ENTRY_POINT_GROUP, ["theirs = theirs:x"], {"theirs": text})
    paths = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    command = [sys.executable, *TOOL, *arguments, "--device", "nvidia-h200"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": paths})


@pytest.mark.parametrize("close", ["sys.stdout.close()", "sys.__stdout__.close()"])
def test_output_closed_by_a_third_party_is_an_answer_or_one_line(close: str, write: Write, tmp_path: Path) -> None:
    text = f"import sys\n{close}\nraise ImportError('no')\n"
    ended = beside_a_third_party(text, tmp_path, "explain", str(write()), "--brief")
    assert "Traceback" not in ended.stderr and "entry point theirs could not be loaded" in ended.stderr
    if "__" in close:  # the stream itself
        assert ended.returncode == 2 and ended.stderr.splitlines()[-1] == "error: standard output was closed"
    else:
        assert ended.returncode == 0 and "hopper_mxfp8" in ended.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('HELLO \\x1b[31m')\nraise ImportError('no')\n", "HELLO  [31m"),
        ("import sys\nsys.setrecursionlimit(60)\nraise ImportError('no')\n", "theirs"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='theirs-1').start()\n",
            "note: ended while threads of a third party's backend were running: theirs-1",
        ),
    ],
    ids=["prints", "recursion", "thread"],
)
def test_what_a_third_partys_import_leaves_changes_no_answer(
    text: str, said: str, write: Write, tmp_path: Path
) -> None:
    ended = beside_a_third_party(text, tmp_path, "explain", str(write()), "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["groups"] and said in ended.stderr and "\x1b" not in ended.stderr


@pytest.mark.parametrize(
    "line", sampled([["CONFIG", "--bogus"], ["nope"], ["CONFIG", "--device", "cpu", "--ep", "--json"]], 3)
)
def test_a_standard_error_that_nobody_reads_changes_no_answer(line: list[str], write: Write) -> None:
    """A full disk behind the log, a reader that is gone: status and standard output are as with a reader."""
    command = [sys.executable, *TOOL, "explain", *(str(write()) if word == "CONFIG" else word for word in line)]
    read = subprocess.run(command, capture_output=True, timeout=120)
    assert read.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(writer, "w") as gone:
        for stream in (full, gone):
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, timeout=120)
            assert (ended.returncode, ended.stdout) == (read.returncode, read.stdout), stream.name


@pytest.mark.parametrize("module", ["typer", "vllm_moe_oracle.cli.main", "vllm_moe_oracle.cli.commands.explain"])
def test_ctrl_c_while_the_tool_is_imported_ends_it_quietly(module: str) -> None:
    """The interruption comes when a module is looked up, whatever the machine's speed."""
    code = f"""
        import os, signal, sys

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["vllm-moe-oracle", "--version"]
        from vllm_moe_oracle.cli.__main__ import run
        run()
    """
    ended = python("-c", textwrap.dedent(code))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_status_130(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_moe_oracle.cli.commands.explain._find_layers", interrupted)
    ended = run("explain", write())
    assert (ended.status, ended.out, ended.err) == (130, "", "")


def test_a_locale_without_the_signs_of_a_table_gets_their_codes() -> None:
    """Predicted times have the sign of a deviation, which ASCII lacks."""
    line = (*TOOL, "explain", CONFIGS / "kimi-k2-thinking.json", "--device", "nvidia-h200")
    shown = python(*line, PYTHONIOENCODING="ascii:strict")
    assert shown.returncode == 0 and "\\xb1" in shown.stdout and not shown.stderr


def test_no_escape_code_reaches_the_terminal(
    run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From names of folders and files, words of configs, errors of entry points, and options."""
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202eafter"
    folder = tmp_path / evil
    folder.mkdir()
    monkeypatch.setattr(default_registry(), "load_errors", {evil: f"ValueError: {evil}"})
    path = write(**{"hidden_act": "silu"})
    words = quantized(hidden_act=evil, quantization_config={**MODELOPT, "ignore": [f"re:{evil}experts"]})
    (folder / "config.json").write_text(json.dumps(words))
    lines: list[tuple[object, ...]] = [
        ("explain", folder),
        ("explain", path, "--device", "nvidia-h200"),
        ("explain", path, "--device", "nvidia-h200", "--json"),
        ("explain", path, "--device", folder / "x.json"),
        ("explain", path, evil),
        ("explain", path, f"--{evil}"),
        ("explain", path, "--backend", evil),
        ("explain", path, "--set", f"{evil}=1"),
        ("explain", path, "--set", f"cache={folder}", "--device", "nvidia-h200", "--json"),
        (evil,),
        ("report", folder / "x"),
        ("tune", folder),
    ]
    for line in lines:
        result = run(*line)
        shown = (result.out + result.err).replace("\n", "")
        assert shown.isprintable(), (line, [each for each in shown if not each.isprintable()])
    logger, seen = logging.getLogger("vllm.moe_oracle"), io.StringIO()
    handler = logging.StreamHandler(seen)
    logger.addHandler(handler)
    try:
        raise ValueError(evil)
    except ValueError:
        logger.exception("moe_oracle: %s\n%s", evil, "second line")
    finally:
        logger.removeHandler(handler)
    assert "second line" in seen.getvalue() and seen.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "null", "home", "large"])
def test_files_of_options_are_regular_and_small(kind: str, run: Run, write: Write, tmp_path: Path) -> None:
    path: object = tmp_path / "x.json"
    if kind == "fifo":
        os.mkfifo(tmp_path / "x.json")
    elif kind == "folder":
        (tmp_path / "x.json").mkdir()
    elif kind == "large":
        with (tmp_path / "x.json").open("wb") as file:
            file.truncate(1 << 33)
    else:
        path = {"zero": "/dev/zero", "null": "/tmp/a\0b.json", "home": "~nobody-of-this-name/x.json"}[kind]
    for line in (
        ("explain", write(), "--device", path),
        ("report", path),
        ("explain", write(), "--device", "nvidia-h200", "--set", f"profile={path}"),
        ("tune", "--import", path),
        ("explain", path),
    ):
        result = run(*line)
        assert result.status == 2 and result.out == "", (line, result.err)
        lines = result.err.splitlines()
        # typer refuses a null byte itself, as it does a wrong option.
        assert len(lines) == 1 or (lines[0].startswith("Usage:") and lines[-1].startswith("Error:")), (line, lines)


def test_help_and_version(run: Run) -> None:
    assert run("--version").out == f"vllm-moe-oracle {__version__}\n"
    result = run("--help")
    assert result.status == 0 and "..." not in result.out.partition("Commands:")[2], "a summary is cut off"
    assert max(map(len, result.out.splitlines())) <= 80
    names = re.findall(r"^  (\w+)  ", result.out.partition("Commands:")[2], re.MULTILINE)
    assert names == sorted(each.name for each in pkgutil.iter_modules(commands.__path__))
    for name in names:
        text = run(name, "--help").out
        assert "Example" in text and "Exit status" in text
        assert max(map(len, text.splitlines())) <= 80, name
        # Types are Python's: a value is described by its metavar, in capitals or by its words.
        described = text.partition("Arguments:" if "Arguments:" in text else "Options:")[2]
        assert not re.search(r"<\w|\b(list|str|int|float|Path)\b(?! of)|TEXT|INTEGER|FLOAT", described), name
    assert run().status == 2


@pytest.mark.parametrize("word", ["1_0", "+2", " 2", "2 ", "\u0662", "\uff12", "0x2", "two", "2.0"])
def test_numbers_in_options_are_decimal_digits(word: str, run: Run) -> None:
    found = run("explain", "x.json", "--tp", word)
    assert found.status == 2 and "is not a valid integer. Write digits from 0 to 9" in found.messages
    found = run("tune", "--tokens", f"1,{word}", CONFIGS / "qwen3-30b-a3b.json", "--quantization", "mxfp8")
    assert found.status == 2 and "is not a list of numbers from 1 to" in found.err


@pytest.mark.parametrize("word", ["1_0", "inf", "nan", "1e3", "\uff12"])
def test_seconds_in_options_are_decimal_digits(word: str, run: Run) -> None:
    found = run("tune", "x.json", "--budget", word)
    told = found.messages
    assert found.status == 2 and f"{word!r} is not a valid number. Write digits from 0 to 9" in told
