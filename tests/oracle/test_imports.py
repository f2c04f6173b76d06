"""Entry points that exit, raise anything or hang while they are imported: the log names them, `status` finds them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.lib import distributions
from tests.lib.cases import CPU
from tests.lib.cases import registry as backends
from tests.lib.fresh_process import TOOL, python
from tests.lib.strange_backends import LAYER, strange
from vllm_moe_oracle.cli import entry_point_probe
from vllm_moe_oracle.oracle import registry, watchdog
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP, discover
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

GOOD = """
from tests.lib.cases import Plain

class Theirs(Plain):
    name = "theirs"

BACKEND = Theirs()
"""
SIGNAL = "class Stop(BaseException): ...\n"
RAISED = {
    "signal": (f"{SIGNAL}raise Stop('now')", "Stop: now"),
    "exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "controls": ("raise ValueError('\\x1b[2J')", "ValueError: [2J"),
    "constructor": (f"{GOOD}\n{SIGNAL}class BACKEND(Theirs):\n    def __init__(self): raise Stop('new')", "Stop: new"),
}
UNSAFE = {
    "exits": ("import os; os._exit(0)", "its import ends the process with status 0"),
    "aborts": ("import os; os.abort()", "its import ends the process with signal SIGABRT"),
    "hangs": ("import time; time.sleep(600)", "its import did not end within"),
    "spins": ("while True: pass", "its import did not end within"),
}
SAFE = {
    "good": GOOD,
    "threads": f"import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n{GOOD}",
}

NAMED = threading.Event()
"""Set when the log has named the slow import."""


def install(folder: Path, modules: dict[str, str]) -> list[EntryPoint]:
    """A distribution whose entry points name these modules."""
    points = [f"{name} = third_party_{name}:BACKEND" for name in modules]
    texts = {f"third_party_{name}": text for name, text in modules.items()}
    distributions.install(folder, "theirs", ENTRY_POINT_GROUP, points, texts)
    return [EntryPoint(name, f"third_party_{name}:BACKEND", ENTRY_POINT_GROUP) for name in modules]


@contextlib.contextmanager
def listening(seen: list[str], words: str = "") -> Iterator[None]:
    """Collects what is logged of third parties, and sets `NAMED` at a warning with these words."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            if record.levelno == logging.WARNING and words in seen[-1]:
                NAMED.set()

    listener = Listener()
    watchdog.logger.addHandler(listener)
    try:
        yield
    finally:
        watchdog.logger.removeHandler(listener)


@pytest.mark.parametrize("name", RAISED)
def test_whatever_an_import_raises_harms_no_other(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text, reason = RAISED[name]
    found = discover(install(tmp_path, {name: text, f"good_{name}": GOOD}))
    assert "theirs" in found and list(found.load_errors) == [name]
    assert reason in found.load_errors[name] and found.load_errors[name].isprintable()


@pytest.mark.parametrize("text", [b"noequals", b"a = \xff\xfe:x"], ids=["words", "bytes"])
def test_a_package_with_damaged_metadata_is_left_out(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "damaged").mkdir()
    install(tmp_path / "sound", {"whole": GOOD})
    install(tmp_path / "damaged", {"half": GOOD})
    file = tmp_path / "damaged" / "theirs-1.0.dist-info" / "entry_points.txt"
    file.write_bytes(f"[{ENTRY_POINT_GROUP}]\n".encode() + text)
    for folder in ("sound", "damaged"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert [point.name for point in registry.installed_entry_points()] == ["whole"]
    assert f"the metadata of a package in {tmp_path / 'damaged'} cannot be read" in caplog.text


def test_the_log_names_an_entry_point_before_and_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    NAMED.clear()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.01)
    # The import itself waits until the log names it: nothing here depends on how fast the machine is.
    waiting = "import tests.oracle.test_imports as here\nhere.NAMED.wait(60)\n"
    caplog.set_level(logging.INFO, watchdog.WATCHED_LOGGER)
    with listening(seen := []):
        found = discover(install(tmp_path, {"slow": waiting + GOOD}))
    assert not found.load_errors and NAMED.is_set()
    assert "importing the backend of entry point 'slow' = third_party_slow:BACKEND" in seen[0]
    assert "the import of entry point 'slow' = third_party_slow:BACKEND has been running for" in seen[1]
    assert "MOE_ORACLE_DISABLE=slow leaves it out" in seen[1]


def test_the_log_names_a_method_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> float:
        NAMED.wait(60)
        return 1.0

    NAMED.clear()
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.01)
    with listening(seen := [], "its method priority"):  # under load others are slow, too
        assert decide(LAYER, CPU, load({}), registry=backends([strange("priority", wait)])).backend == "strange"
    (line,) = [each for each in seen if "its method priority" in each][:1]
    assert "backend strange: its method priority has been running for" in line
    assert "MOE_ORACLE_DISABLE=strange leaves it out" in line


def test_a_requirement_that_cannot_be_read_costs_no_backend() -> None:
    package = SimpleNamespace(
        name="theirs", version="1.2", requires=["no requirement !", "pytest>=1", "absent-package"]
    )
    found = registry._packages(cast(Any, SimpleNamespace(dist=package)))
    assert found == {"theirs": "1.2", "pytest": pytest.__version__}


def tool(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line tool with the entry points of a folder installed."""
    path = os.pathsep.join([str(folder), str(Path(registry.__file__).parents[2])])
    return python(*TOOL, *arguments, **{"PYTHONPATH": path, "VLLM_PLUGINS": ""} | environment)


def test_the_probe_finds_what_ends_or_blocks_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: text for name, (text, _) in UNSAFE.items()} | SAFE | {"raises": "raise RuntimeError"}
    points = install(tmp_path, modules)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(registry.__file__).parents[2])]))
    endless = [point for point in points if point.name in ("hangs", "spins")]
    found = entry_point_probe.find_unsafe([each for each in points if each not in endless], seconds=60.0)
    assert found.keys() == UNSAFE.keys() - {"hangs", "spins"}
    found |= entry_point_probe.find_unsafe(endless, seconds=1.0)
    for name, (_, reason) in UNSAFE.items():
        assert reason in found[name], name


def test_status_reports_it_and_other_commands_name_it_first(tmp_path: Path) -> None:
    install(tmp_path, {"exits": UNSAFE["exits"][0], "good": GOOD})
    ended = tool(tmp_path, "status", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert UNSAFE["exits"][1] in report["broken_backends"]["exits"]
    assert "theirs" in [each["name"] for each in report["backends"]]
    config = str(Path("examples/qwen3-30b-a3b-mxfp8.json").resolve())
    explained = tool(tmp_path, "explain", config, "--device", "nvidia-h200")
    assert "importing the backend of entry point 'exits' = third_party_exits:BACKEND of theirs 1.0" in explained.stderr
    assert (explained.returncode, explained.stdout) == (1, "")
    said = "ended with status 0 before it was done, in the import of entry point 'exits' = third_party_exits:BACKEND"
    assert f"error: the process of the command {said} of theirs 1.0; MOE_ORACLE_DISABLE=exits" in explained.stderr
    without = tool(tmp_path, "status", "--json", MOE_ORACLE_DISABLE="exits")
    assert (
        "not imported: disabled by environment variable MOE_ORACLE_DISABLE"
        in json.loads(without.stdout)["broken_backends"]["exits"]
    )
