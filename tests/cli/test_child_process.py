"""The exit status is the tool's own: what ends the process of its work, with whatever status, is no success."""

from __future__ import annotations

import os
import pickle
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lib.cli import Run
from tests.lib.fresh_process import environment, has_ended, python
from vllm_moe_oracle.cli import child_process
from vllm_moe_oracle.cli.commands import status
from vllm_moe_oracle.oracle import watchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels run on Linux alone")

TOOL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
import atexit, ctypes, os, signal, sys, time
from vllm_moe_oracle.cli import child_process
from vllm_moe_oracle.oracle.watchdog import doing

class Answer:
    def __init__(self, status):
        self.status = status

    def ended(self, why, was_asked):
        print("so far;" if was_asked else "so far, by its own fault;", why)
        return self.status

child_process.begin()
{work}
"""
FINISH = "child_process.finish({0}); sys.exit({0})"
IN_A_KERNEL = "with doing('the check of a layer', 'no remedy'), doing('a kernel', 'LEAVE=it does'): {}"
SAID = "error: the process of the command ended with {} before it was done"
PLACE = ", in a kernel, in the check of a layer; LEAVE=it does\n"


def work_in_child(work: str) -> tuple[int, str, str]:
    ended = python("-c", TOOL.format(work=work))
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("code", [0, 3, 130, 141])
def test_the_status_of_work_that_was_done(code: int) -> None:
    assert work_in_child(FINISH.format(code)) == (code, "", "")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os._exit(0)", "status 0"),
        ("os._exit(3)", "status 3"),
        ("os.abort()", "signal SIGABRT"),
        ("ctypes.string_at(0)", "signal SIGSEGV"),
        ("os.execv('/bin/true', ['true'])", "status 0"),
        ("os.closerange(3, 1000); os._exit(0)", "status 0"),
    ],
)
def test_what_ran_is_named_where_the_process_ends(act: str, words: str) -> None:
    ended, out, err = work_in_child(IN_A_KERNEL.format(act))
    assert (ended, out) == (1, "")
    assert err == SAID.format(words) + PLACE


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_what_has_ended_is_not_named(end: str) -> None:
    assert work_in_child(IN_A_KERNEL.format("pass") + f"\n{end}") == (1, "", SAID.format("status 0") + "\n")


def test_a_process_that_was_killed_has_no_remedy_of_a_backend() -> None:
    ended, _, err = work_in_child(IN_A_KERNEL.format("os.kill(os.getpid(), signal.SIGKILL)"))
    assert ended == 1 and "signal SIGKILL before it was done (by a user, or by the system for lack of memory)" in err
    assert "in a kernel" in err and "LEAVE" not in err


@pytest.mark.parametrize("wanted", [0, 6])
def test_the_parent_prints_what_is_known(wanted: int) -> None:
    """Never with the status 0, and nothing that was taken back."""
    keep = f"child_process.keep(Answer({wanted}))\n"
    ended, out, err = work_in_child(keep + IN_A_KERNEL.format("os._exit(0)"))
    assert ended == (wanted or 1)
    assert out == "so far, by its own fault; ended with status 0 before it was done" + PLACE and not err
    ended, out, err = work_in_child(keep + "child_process.keep(None)\nos._exit(0)")
    assert (ended, out, err) == (1, "", SAID.format("status 0") + "\n")


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        ("child_process.finish(0); os.abort()", 128 + signal.SIGABRT, "signal SIGABRT after its answer"),
        ("child_process.finish(0); os._exit(5)", 5, "status 5 after its answer"),
        ("atexit.register(os._exit, 0); child_process.finish(1); sys.exit(1)", 1, ""),
    ],
)
def test_an_end_that_differs_from_the_answer(work: str, code: int, words: str) -> None:
    """Neither of both may hide the other's failure."""
    ended, _, err = work_in_child(work)
    assert ended == code and words in err and bool(words) == bool(err)


COPIES = """
from vllm_moe_oracle.cli import output
copy = os.fork()
if copy:
    os.waitpid(copy, 0)
"""


def test_a_copy_prints_no_answer() -> None:
    ended, out, err = work_in_child(f"{COPIES}output.print_json([1])\n{FINISH.format(0)}")
    assert (ended, out) == (0, "[\n  1\n]\n")
    said = r"moe_oracle: code beside the backends' own methods forked process \d+, and the copy went on: it ends here; "
    assert re.fullmatch(f"{said}MOE_ORACLE_DISABLE leaves a backend out\n", err)


def test_what_a_copy_says_of_its_end_counts_for_nothing() -> None:
    work = f"{COPIES}else:\n    child_process.finish(0); os._exit(0)\n{IN_A_KERNEL.format('os._exit(0)')}"
    assert work_in_child(work) == (1, "", SAID.format("status 0") + PLACE)


def test_an_answer_that_is_too_large_is_not_kept() -> None:
    slot = child_process._Slot(100)
    assert slot.get() == b"" and slot.put(b"first") and slot.put(b"a second one") and slot.get() == b"a second one"
    assert not slot.put(bytes(97)) and slot.get() == b"a second one"
    child = child_process._Child()
    child.keep(pickle.loads(pickle.dumps("short")))  # type: ignore[arg-type]  # whatever can be pickled
    assert child.answer == "short"  # type: ignore[comparison-overlap]
    child.keep("x" * (9 << 20))  # type: ignore[arg-type]
    assert child.answer is None


def test_long_and_many_activities_fit() -> None:
    child = child_process._Child()
    child.note([(f"activity {index} " + "é" * 10_000, "remedy " * 1000) for index in range(100)])
    why = child.why(0)
    assert why.startswith("ended with status 0 before it was done, in activity 99 ")
    assert ", in activity 98 " in why and ", in activity 0 " in why and "activity 97" not in why


def test_the_observer_is_told_of_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(watchdog._activities, "_observer", lambda running: told.append([each for each, _ in running]))
    with watchdog.doing("outer", ""), pytest.raises(ZeroDivisionError), watchdog.third_party_code("inner", "no"):
        _ = 1 / 0
    assert told == [["outer"], ["outer", "inner"], ["outer"], []]


# --- SystemExit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [None, 0, 4, "words"])
def test_code_in_a_command_cannot_exit_as_the_tool(run: Run, code: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def exits() -> None:
        sys.exit(code)  # type: ignore[arg-type]  # whatever a third party exits with

    monkeypatch.setattr(status, "_discover", exits)
    found = run("status")
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith(f"error: {__file__}, line ") and "asked to end it (SystemExit" in found.err


@pytest.mark.parametrize(("code", "wanted"), [(None, 1), (143, 143)])
def test_a_handler_of_a_signal_may_end_the_tool(
    run: Run, code: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's raises SystemExit without a status, which is none of success."""

    def handler(*args: object) -> None:
        raise SystemExit(code)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        monkeypatch.setattr(status, "_discover", lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run("status").status == wanted
    finally:
        signal.signal(signal.SIGTERM, before)


# --- Signals ----------------------------------------------------------------------------------------------------------

WAITS = "print('begun', os.getpid(), flush=True)\ntime.sleep(600)"
HANGS = f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WAITS}"  # as where a kernel never returns to Python
ENDS = f"""
try:
    {WAITS.replace(chr(10), chr(10) + "    ")}
except KeyboardInterrupt:
    print("interrupted")
    {FINISH.format(130)}
"""


Begin = Callable[[str], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a process group whose leader waits for a child: the leader, and the child's id."""
    begun = []

    def start(work: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", TOOL.format(work=work)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # What a shell without job control starts in the background ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
        )
        begun.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline().split()[1])

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("whom", ["parent", "group"])
def test_ctrl_c_ends_both(begin: Begin, whom: str) -> None:
    process, child = begin(ENDS)
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "interrupted\n", "") and has_ended(child)


def test_ctrl_c_of_a_terminal_is_not_handed_on(tmp_path: Path) -> None:
    """The child gets it from the terminal, once."""
    file = tmp_path / "origins"
    counts = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
print("begun", flush=True)
found = [signal.sigwaitinfo({{signal.SIGINT}})]
found += filter(None, [signal.sigtimedwait({{signal.SIGINT}}, 1)])
open({str(file)!r}, "w").write(str([each.si_code for each in found]))
{FINISH.format(7)}
"""
    process, terminal = pty.fork()
    if not process:
        os.execve(sys.executable, [sys.executable, "-c", TOOL.format(work=counts)], environment())
    with open(terminal, "r+b", buffering=0) as opened:
        while b"begun" not in opened.read(1024):
            pass
        opened.write(b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert file.read_text() == f"[{child_process._SI_KERNEL}]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("keep", ["", "child_process.keep(Answer(1))\n"])
def test_a_signal_that_ends_the_child_ends_the_parent(begin: Begin, number: signal.Signals, keep: str) -> None:
    """After what is known, and what ran; no backend is blamed."""
    indented = WAITS.replace("\n", "\n    ")
    process, child = begin(f"{keep}{IN_A_KERNEL.format(chr(10) + '    ' + indented)}")
    os.kill(process.pid, number)
    words = f"ended with signal {number.name} before it was done, in a kernel, in the check of a layer"
    assert process.communicate(timeout=60) == (
        f"so far; {words}\n" if keep else "",
        f"error: the process of the command {words}\n",
    )
    assert process.returncode == -number and has_ended(child)


def test_a_signal_ends_the_tool_whose_streams_are_gone(begin: Begin) -> None:
    process, child = begin(f"child_process.keep(Answer(1))\n{WAITS}")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM and has_ended(child)


def test_the_child_ends_with_a_parent_that_is_killed(begin: Begin) -> None:
    process, child = begin(WAITS)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert has_ended(child)


def test_ctrl_c_three_times_kills_what_hangs(begin: Begin) -> None:
    process, child = begin(HANGS)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        assert not has_ended(process.pid, 2 * child_process._ONE_CTRL_C)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    note, line = err.splitlines()
    assert note == "note: the process is still running; Ctrl-C once more kills it"
    assert line.startswith("error: the process of the command ended with signal SIGKILL before it was done")
    assert process.returncode == -signal.SIGINT and has_ended(child)
