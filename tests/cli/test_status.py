"""`status` as a health check: exit statuses, one screen, running servers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.lib import forked, fresh_process
from tests.lib.cli import Run
from tests.lib.tiers import sampled
from vllm_moe_oracle import __version__, decision_records, plugin, settings
from vllm_moe_oracle.cli import output
from vllm_moe_oracle.cli.commands import status
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.oracle.registry import Registry, default_registry
from vllm_moe_oracle.plugin import PluginState
from vllm_moe_oracle.releases.supported import NEWEST

REGISTER = status._register_plugin
NAMES = [backend.name for backend in default_registry()]


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An active plugin, no other servers, no cache; a process of its own would import vLLM for each test."""
    state = PluginState(True, "registered", NEWEST, ("gptq", "mxfp8"))
    monkeypatch.setattr(status, "_register_plugin", lambda: state)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_healthy_installation_passes(run: Run) -> None:
    result = run("status", "--check")
    assert (result.status, result.err) == (0, "") and "health    nothing is wrong" in result.out
    assert run("status", "--json").json["problems"] == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BACKEND", "marln", "MOE_ORACLE_BACKEND: 'marln' is not a backend. Did you mean marlin?"),
        ("BAKEND", "marlin", "unknown setting 'MOE_ORACLE_BAKEND'"),
        ("SELF_CHECK", "yes", "'yes' is not one of off"),
        ("OVERRIDES", "re:layers=nobackend", "'nobackend' is not a backend"),
        ("PROFILE", "/nope.json", "the profile of environment variable MOE_ORACLE_PROFILE is not used"),
        ("DISABLE", "foo", "environment variable MOE_ORACLE_DISABLE: 'foo' is not a backend."),
        ("REPORT", "/nope/x", "MOE_ORACLE_REPORT: /nope/x cannot be written: there is no directory /nope"),
        ("REPORT", f"/tmp/{'x' * 300}", "cannot be written: File name too long"),
        ("CACHE", "/dev/null", "the cache of measurements cannot be used"),
        ("CACHE", "/dev/null/x", "the cache of measurements cannot be used"),
        ("CACHE", "/proc/x", "the cache of measurements cannot be used: nothing can be written in /proc"),
    ],
)
def test_a_setting_that_a_server_cannot_follow_fails_the_check(
    variable: str, value: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MOE_ORACLE_{variable}", value)
    result = run("status", "--check")
    assert result.status == 1 and said in result.text
    data = run("status", "--json", "--check").json
    assert any(said in problem for problem in data["problems"])
    starts = variable in ("PROFILE", "REPORT", "CACHE")
    assert data["plugin"]["active"] is starts
    plain = run("status")
    assert plain.status == (0 if starts else 2) and (said in plain.err or variable == "CACHE")


def test_a_wrong_backend_is_not_called_active(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_BACKEND", "marln")
    result = run("status")
    assert "not active: the start of a server would end with: environment variable" in result.out
    assert result.out.count("'marln'") == 2 and "Valid are" not in result.out and "Valid are auto" in result.err


def test_an_inactive_plugin_and_a_patch_that_failed_fail_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_register_plugin", lambda: PluginState(False, "vLLM is not installed", None))
    result = run("status", "--check")
    assert result.status == 1 and "problem   the plugin is not active: vLLM is not installed" in result.out
    assert run("status").status == 0
    failed = PluginState(True, "registered", NEWEST, failed={"a patch": "no such name"})
    monkeypatch.setattr(status, "_register_plugin", lambda: failed)
    assert "the patch a patch failed: no such name" in run("status", "--check", "--json").json["problems"]


def test_a_backend_that_could_not_be_loaded_fails_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.load_errors["theirs"] = "ImportError: no"
    monkeypatch.setattr(status, "_discover", lambda: registry)
    result = run("status", "--check")
    said = result.text
    assert result.status == 1 and "entry point theirs could not be loaded: ImportError: no" in said


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BACKEND", "hopper_mxfp8", "hopper_mxfp8 cannot run on this machine: runs on cuda, this is A CPU (cpu)"),
        ("BACKEND", "marlin", "marlin cannot run on this machine: "),  # every backend of vLLM's name
        ("OVERRIDES", "re:layers=marlin_mxfp4", "marlin_mxfp4 cannot run on this machine: "),
        ("BACKEND", "emulation", ""),
        ("BACKEND", "auto", ""),
    ],
)
def test_a_named_backend_that_runs_nothing_here_fails_the_check(
    variable: str, value: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "detect", lambda: Device("cpu", "A CPU"))
    monkeypatch.setenv(f"MOE_ORACLE_{variable}", value)
    result = run("status", "--check")
    text = result.text
    assert result.status == (1 if said else 0)
    assert f"MOE_ORACLE_{variable}: {said}" in text if said else "nothing is wrong" in text
    assert run("status").status == 0  # a server may be elsewhere


def test_a_profile_of_another_gpu_fails_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Device("cuda", "NVIDIA H200", 90, 132)
    monkeypatch.setenv("MOE_ORACLE_PROFILE", str(Path(profile.SHIPPED_FOLDER) / "nvidia_h200.json"))
    for device, words in (
        (h200, ""),
        (Device("cpu", "A CPU"), "measured on NVIDIA H200, not A CPU"),
        (Device("cuda", "NVIDIA H100 80GB HBM3", 90, 132), "measured on NVIDIA H200, not NVIDIA H100 80GB HBM3"),
        (dataclasses.replace(h200, sm_count=60), "multiprocessors 132, not 60"),
    ):
        monkeypatch.setattr(detect, "detect", lambda device=device: device)
        result = run("status", "--check")
        said = "the profile of environment variable MOE_ORACLE_PROFILE has no effect on this machine: "
        assert result.status == (1 if words else 0), device
        assert f"{said}{words}" in result.text if words else said not in result.text
        assert run("status").status == 0
    monkeypatch.setenv("MOE_ORACLE_USE_MEASUREMENTS", "0")  # no profile is asked, of whichever GPU it is
    result = run("status", "--check")
    assert result.status == 1 and said not in result.text
    assert "environment variable MOE_ORACLE_PROFILE: has no effect: environment" in result.text


def test_numbers_have_their_units(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("status", "--verbose").out
    assert re.search(r"^measure_at_start +60 s ", said, re.MULTILINE)
    assert re.search(r"^rank_sync_timeout +600 s ", said, re.MULTILINE)
    monkeypatch.setenv("MOE_ORACLE_RANK_SYNC_TIMEOUT", "0.5")
    assert "rank_sync_timeout=0.5 s (environment variable" in run("status").text
    monkeypatch.setattr(Store, "summary", lambda self: {"A CPU": 68, "A GPU": 1})
    assert "cache 68 times on A CPU, 1 time on A GPU" in run("status").text


def test_where_bugs_are_reported_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]
    contents = "with status --json, explain CHECKPOINT --json and the server's log lines with moe_oracle"
    for words in ((), ("--verbose",)):
        assert run("status", *words).text.rstrip().endswith(f"report a bug: {urls['Issues']}, {contents}")
    code = "from vllm_moe_oracle.cli import main\ndef app(**_): raise KeyError('x')\nmain.app = app\nmain.run()"
    ended = fresh_process.python("-c", code)
    assert ended.returncode == 1 and "KeyError: 'x'\n" in ended.stderr
    assert f"Please report this: {urls['Issues']}" in ended.stderr

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", absent)
    assert "report a bug: to the maintainers of these sources, with" in run("status").text


def test_vllm_is_imported_only_where_registration_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[bool] = []
    state = PluginState(True, "registered", NEWEST, ("gptq",))

    def register() -> PluginState:
        registered.append(True)
        return state

    monkeypatch.setattr(status, "_register_plugin", register)
    monkeypatch.setattr(plugin, "_vllm_version", lambda: NEWEST)
    said = run("status").text
    assert not registered and "plugin active: a server would register it" in said
    assert "changes not tried: --check registers the plugin as vLLM would" in said
    for word in ("--check", "--verbose", "--json"):
        run("status", word)
    assert len(registered) == 3
    # What needs no import is judged all the same.
    for name, value, why in (
        ("MOE_ORACLE_ENABLED", "0", "not active: switched off by environment variable MOE_ORACLE_ENABLED"),
        ("VLLM_PLUGINS", "", "not active: not selected by VLLM_PLUGINS"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert why in run("status").text
    with monkeypatch.context() as patch:
        patch.setattr(detect, "detect", lambda: Device("rocm", "AMD"))
        assert "not active: no backend knows" in run("status").text
    for version, why in ((None, "vLLM is not installed"), ("0.1.0", "0.1.0")):
        with monkeypatch.context() as patch:
            patch.setattr(plugin, "_vllm_version", lambda version=version: version)
            assert re.search(f"plugin not active: .*{why}", run("status").text)


def test_the_quick_report_imports_neither_vllm_nor_torch() -> None:
    code = "import sys; from vllm_moe_oracle.cli import main; sys.argv[1:] = ['status']\n"
    code += "try: main.main()\nexcept SystemExit: print('vllm' in sys.modules, 'torch' in sys.modules)"
    ended = fresh_process.python("-c", code)
    assert ended.stdout.endswith("False False\n"), ended.stderr


def test_a_slow_step_is_named_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    deadline = time.monotonic() + 60
    with output.status_spinner("quick"):
        pass
    with output.status_spinner("slow"):
        said = ""
        while not said and time.monotonic() < deadline:
            time.sleep(0.1)
            said = capsys.readouterr().err
    assert said == "note: slow\n"


@pytest.mark.parametrize("width", [80, 100, 200])
def test_it_is_one_screen_without_split_names(width: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("status").out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= width for line in lines)
    words = run("status", "--verbose").out
    shown = set(words.split())
    assert set(NAMES) <= shown and {"allow_activation_quantization", "rank_sync_timeout"} <= shown
    assert all(len(line) <= width for line in words.splitlines())
    families = words.partition("family ")[2]
    assert re.search(r"^deep_gemm +deep_gemm_mxfp4, deep_gemm_mxfp8$", families, re.MULTILINE)


@pytest.mark.parametrize("columns", ["0", "1", "20", "-5", "wide", "", "100000"])
def test_no_width_ends_a_command(columns: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run("status", "--verbose").status == 0
    assert run("explain", Path("examples/qwen3-30b-a3b-mxfp8.json").resolve(), "--device", "nvidia-h200").status == 0


def record(folder: Path, **changes: Any) -> None:
    fields = {
        "process": 7, "program": "EngineCore", "vllm": NEWEST, "rank": 0, "ranks": 2, "moe_layers": 48, "served": 44,
        "left_to_stock": {f"model.layers.{index}.mlp.experts": "LoRA: no backend" for index in (3, 4, 5)},
        "groups": [],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"{changes.get('process', 7)}-x.json").write_text(json.dumps(fields | changes))


RUN = (("marlin_mxfp8", 1), ("hopper_mxfp8", 41), ("marlin_mxfp8", 2))


def test_layers_that_running_servers_leave_to_stock_are_listed(run: Run, tmp_path: Path) -> None:
    alive, dead, strange = (tmp_path / f"vllm-moe-oracle-{name}" for name in ("alive", "dead", "strange"))
    groups = [{"layers": [f"{name}{n}" for n in range(count)], "decision": {"backend": name}} for name, count in RUN]
    record(alive, groups=groups)
    record(alive, process=8, rank=1, groups=[])
    record(dead, process=9)
    record(strange, served="many")
    (dead / "writers.lock").touch()
    locks = [os.open(folder / "writers.lock", os.O_RDWR | os.O_CREAT, 0o600) for folder in (alive, strange)]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_SH)
        said = run("status").text
        (server,) = run("status", "--json").json["servers"]
        assert len(list(decision_records.running_servers())) == 2
    finally:
        for lock in locks:
            os.close(lock)
    assert server["process"] == 7 and len(server["left_to_stock"]) == 3
    assert f"process 7 (EngineCore), vLLM {NEWEST}: 44 of 48 MoE layers run through the oracle: " in said
    assert "the oracle: hopper_mxfp8 x 41, marlin_mxfp8 x 3 server model.layers" in said
    assert server["backends"] == {"hopper_mxfp8": 41, "marlin_mxfp8": 3}
    assert "server model.layers.3-5.mlp.experts left to stock vLLM: LoRA: no backend" in said
    assert "1 more are stock vLLM's" in said and "process 9" not in said


def test_records_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm-moe-oracle-other"
    record(folder)
    lock = os.open(folder / "writers.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert len(list(decision_records.running_servers())) == 1
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        assert list(decision_records.running_servers()) == []
    finally:
        os.close(lock)


def test_a_server_s_records_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in range(4):
        record(tmp_path, process=process)
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(decision_records, "MAX_RECORD_BYTES", 2 * size + size // 2)
    assert len(list(decision_records.read_records(str(tmp_path)))) == 2
    (tmp_path / "0-x.json").write_text('{"groups": [' + "[]," * 1_000_001 + "[]]}")
    monkeypatch.undo()
    assert len(list(decision_records.read_records(str(tmp_path)))) == 3


def test_a_writer_waits_until_nobody_looks_and_makes_its_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server's start, or `status`, locks the folder for an instant to see whether anybody is alive."""
    folder = tmp_path / "vllm-moe-oracle-mine"
    folder.mkdir()
    monkeypatch.setattr(decision_records, "_locks", {})
    monkeypatch.setattr(settings, "records_dir", lambda: str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for removed in (False, True):
        looking = os.open(folder / "writers.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(looking, fcntl.LOCK_EX)

        def end(seconds: float, descriptor: int = looking, removed: bool = removed) -> None:
            if removed and folder.exists():
                shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                os.close(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(decision_records.time, "sleep", end)
            decision_records.write_record({"groups": [{"layers": ["model.layers.0"]}]})
        assert len(list(decision_records.running_servers())) == 1
        decision_records._remove_stale(str(tmp_path))
        assert len(list(folder.glob("*.json"))) == 1
        os.close(decision_records._locks.pop(str(folder)))


# --- terminals and shells -------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Standard output of the tool on a terminal of 80 columns."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    given = fresh_process.environment(**{"TERM": "xterm", "COLUMNS": "80"} | environment)
    given.pop("NO_COLOR", None)
    command = [sys.executable, *fresh_process.TOOL, *arguments]
    process = subprocess.Popen(command, stdout=child, stderr=subprocess.DEVNULL, env=given)
    os.close(child)
    said = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(parent)
    assert process.wait(60) == 0
    return said.decode()


def test_colors_and_marks_on_a_terminal_and_without_color() -> None:
    line = ("explain", "examples/qwen3-30b-a3b-mxfp8.json", "--device", "nvidia-h200")
    assert re.search(r"\x1b\[1m *hopper_mxfp8 ", on_a_terminal(*line))
    # Colors of the foreground and background; bold is none.
    assert not re.search(r"\x1b\[[0-9;]*\b(3|4|9|10)[0-7]\b", on_a_terminal(*line, NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(*line, TERM="dumb")


def test_the_winner_is_marked_and_no_line_breaks_inside_a_pair(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (56, 60, 64, 68, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        result = run("explain", Path("examples/qwen3-30b-a3b-mxfp8.json").resolve(), "--device", "nvidia-h200")
        assert re.findall(r"^(?:  (?=\w+ ))?(\w+):? +chosen\b", result.out, re.MULTILINE) == ["hopper_mxfp8"]
        assert not re.search(r"\b\d+:$", result.out, re.MULTILINE), width


@pytest.mark.parametrize(
    ("words", "said"),
    sampled([
        ("ex", "explain"),
        ("explain x --device nvidia-h2", "nvidia-h200"),
        (f"explain x --vllm {NEWEST[:-1]}", NEWEST),
        ("tune x --set back", "backend="),
        ("tune x --set backend=hopper_mxfp8_w", "backend=hopper_mxfp8_w8a8"),
        ("tune x --set self_check=a", "self_check=all"),
        ("tune x --set disable=emulation,marlin_w", "disable=emulation,marlin_wna16"),
        ("tune x --routing uniform,s", "uniform,skewed"),
        ("tune gpt-oss-2", "gpt-oss-20b"),
        ("tune mxfp4:gpt-oss-2", "mxfp4:gpt-oss-20b"),
        ("tune x --gpus a", "all"),
        ("explain x --backend hopper_mxfp4_", "hopper_mxfp4_w4a8"),
        ("explain x --moe-backend marl", "marlin"),
        ("explain x --quantization mxfp", "mxfp8"),
        ("explain x --expert-placement-strategy r", "round_robin"),
        ("bench --backend emulation,hopper_mxfp4_", "emulation,hopper_mxfp4_w4a8"),
        ("bench --stock auto,marl", "auto,marlin"),
        ("bench --scheme mxfp8,int4_g1", "mxfp8,int4_g128"),
        ("bench --shape gpt-oss-20b,kim", "gpt-oss-20b,kimi-k2"),
        ("bench --routing s", "skewed"),
        ("verify x --device cu", "cuda"),
    ], 4),
)  # fmt: skip
def test_shells_complete_commands_and_values(words: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"vllm-moe-oracle {words}"
    monkeypatch.setenv("_VLLM_MOE_ORACLE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    ended = run()
    assert ended.status == 0 and said in ended.out.split(), ended.err


@pytest.mark.parametrize("shell", sampled(["bash", "zsh", "fish"], 3))
def test_scripts_for_completion_are_printed(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "vllm_moe_oracle.cli.main", "--show-completion", shell]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "_VLLM_MOE_ORACLE_COMPLETE" in ended.stdout


def test_vllm_is_imported_without_garbage_collection(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_register_plugin", REGISTER)
    monkeypatch.setattr(status, "excluded_by_vllm", lambda: "")
    collected: list[bool] = []
    monkeypatch.setattr(plugin, "register", lambda: collected.append(gc.isenabled()))
    run("status", "--check")
    assert collected == [False] and gc.isenabled()


@pytest.mark.parametrize(("torch", "printed"), [(True, "registered\n"), (False, "registered\ntaken down\n")])
def test_what_a_process_has_imported_is_not_taken_down(torch: bool, printed: str) -> None:
    """That takes a second where it is vLLM. What is registered for the end runs, and the exit status is kept."""
    code = """
import atexit, sys, types
from vllm_moe_oracle.cli import main
class Late:
    def __del__(self, say=print): say("taken down")
main.late = Late()
atexit.register(print, "registered")
sys.argv = ["vllm-moe-oracle", "status", "--nonsense"]
"""
    code += 'sys.modules["torch"] = types.ModuleType("torch")\n' if torch else ""
    ended = fresh_process.python("-c", f"{code}main.run()")
    assert (ended.returncode, ended.stdout) == (2, printed) and "No such option" in ended.stderr


@pytest.mark.full
def test_status_reports_this_installation(tmp_path: Path) -> None:
    ended = fresh_process.python(*fresh_process.TOOL, "status", "--json", MOE_ORACLE_BACKEND="emulation")
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["versions"]["vllm-moe-oracle"] == __version__
    assert set(data["versions"]) == {"vllm-moe-oracle", "vllm", "torch", "triton", "python"}
    assert set(data["plugin"]) >= {"active", "reason", "vllm", "methods", "patches"}
    assert data["plugin"]["active"] is bool(data["plugin"]["methods"]) is (data["versions"]["vllm"] is not None)
    backend = data["settings"]["backend"]
    assert (backend["value"], backend["source"]) == ("emulation", "environment variable MOE_ORACLE_BACKEND")
    assert data["settings"]["strict"]["source"] == "default"
    assert {"name": "emulation", "schemes": ["mxfp8"]}.items() <= data["backends"][0].items() or len(
        data["backends"]
    ) > 1
    assert data["broken_backends"] == {}
    assert set(data["cache"]) == {"path", "measurements", "error"} and data["cache"]["error"] == ""
    # What it says of this machine can be asked about on another one.
    file = tmp_path / "here.json"
    file.write_text(ended.stdout)
    there = fresh_process.python(*fresh_process.TOOL, "explain", "nowhere", "--device", file)
    assert "nowhere: no such file" in there.stderr


def test_status_says_that_a_strict_server_would_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MOE_ORACLE_STRICT": "1", "MOE_ORACLE_SELF_CHECK": "yes", "COLUMNS": "300"}.items():
        monkeypatch.setenv(name, value)
    ended = run("status")
    assert ended.status == 2 and "stock vLLM serves" not in ended.out + ended.err
    assert re.search(r"not active: the start of a server would end with: .*'yes' is not one of off", ended.out)


def test_status_names_backends_and_counts_patches_in_words() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['vllm-moe-oracle', 'status', '--verbose']\n"
        "from vllm_moe_oracle.cli import main\n"
        "main.main()\n"
    )
    said = forked.python(code, fresh_process.environment(COLUMNS="200")).stdout
    assert re.search(r"^ *emulation .*built in$", said, re.MULTILINE) and "vllm_moe_oracle.backends" not in said
    assert "waiting" not in said


def test_status_without_vllm() -> None:
    code = (
        "import sys\n"
        "sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from vllm_moe_oracle import plugin\n"
        "from vllm_moe_oracle.devices import detect\n"
        "detect.installed_packages = lambda: {}\n"
        "plugin._vllm_version = lambda: None\n"
        "from vllm_moe_oracle.cli import main\n"
        "sys.argv = ['vllm-moe-oracle', 'status', '--json']\n"
        "main.main()\n"
    )
    ended = fresh_process.python("-c", code)
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["versions"]["vllm"] is None and data["plugin"]["active"] is False
    assert "not installed" in data["plugin"]["reason"] and data["device"]["kind"] == "cpu"
