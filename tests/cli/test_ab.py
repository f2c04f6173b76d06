"""`ab`, with stand-ins for vLLM's server and benchmark; and once with both, on a CPU."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli import Run
from tests.lib.fresh_process import has_ended
from tests.lib.tiers import sampled
from vllm_moe_oracle.cli import kept_turns, served_benchmark
from vllm_moe_oracle.cli.commands import ab
from vllm_moe_oracle.cli.served_benchmark import Load
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.releases.supported import NEWEST

SERVER = r"""
import http.server, json, os, subprocess, sys
port, options = int(sys.argv[1]), sys.argv[2:]
plugin = os.environ["MOE_ORACLE_ENABLED"] == "1"
kind = "plugin" if plugin else "stock"
print("moe_oracle options:", options, flush=True)
if f"--fail-{kind}" in options:
    print("ValueError: the cause of it\n" + "more\n" * 30 + " Route: /health\nRuntimeError: another process failed")
    sys.exit(7)
if "--child" in options:  # as vLLM's engine, which must end with it
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(options[options.index("--child") + 1], "a").write(f"{child.pid}\n")
if "--never" in options:
    import time
    time.sleep(600)
if plugin != ("--wrong" in options):
    group = {"layers": ["a"], "count": 2, "decision": {"backend": "emulation"}}
    with open(os.environ["MOE_ORACLE_REPORT"], "a") as file:
        for count in (1, 2):  # a layer that drafts is loaded after the others; the last record has all
            record = {"host": "here", "process": os.getpid(), "moe_layers": count, "served": count}
            print(json.dumps(record | {"groups": [group | {"count": count, "layers": ["a", "b"][:count]}]}), file=file)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"data": [{"id": kind}]}).encode())
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

BENCH = r"""
import json, os, sys, time
kind, loads, gain, jitter = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
if gain < 0:
    print("no connection")
    sys.exit(5)
if gain > 100:
    time.sleep(600)
last, _, how = os.environ.get("MOE_AB_TEST_LAST", "99").partition(":")
for result, count in loads.items():
    _, turn, _, together = os.path.splitext(os.path.basename(result))[0].split("-")
    turn = int(turn)
    if turn > int(last):
        open(os.path.join(os.path.dirname(result), "reached"), "w").close()
        time.sleep(600 if how == "hang" else 0)
        print("no connection")
        sys.exit(5)
    factor = int(together) / 16 * (gain if kind == "plugin" else 1)
    speed = 1000 * factor * (1 + jitter * ((turn * 7 + (kind == "plugin") * 3) % 5 - 2))
    data = {"completed": count, "failed": int(gain == 0), "output_throughput": speed, "median_ttft_ms": 1e5 / speed,
            "median_itl_ms": 1e4 / speed}
    json.dump(data, open(result, "w"))
"""

GAIN, JITTER, LAST = "MOE_AB_TEST_GAIN", "MOE_AB_TEST_JITTER", "MOE_AB_TEST_LAST"


def server_command(model: str, port: int, options: Any) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), *options]


def bench_command(model: str, name: str, port: int, loads: dict[Path, Load]) -> list[str]:
    figures = os.environ.get(GAIN, "1.2"), os.environ.get(JITTER, "0.001")
    counts = json.dumps({str(result): load.prompts for result, load in loads.items()})
    return [sys.executable, "-c", BENCH, name, counts, *figures]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_benchmark, "server_command", server_command)
    monkeypatch.setattr(served_benchmark, "bench_command", bench_command)
    monkeypatch.setattr(served_benchmark, "_POLL_SECONDS", 0.02)  # stand-ins start in a tenth of a second
    monkeypatch.setattr(ab, "installed_packages", lambda: {"vllm": NEWEST})
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_an_error_that_a_warning_quotes_is_not_the_first(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = [
        "WARNING 11-29 [resource.py] limit, see `OSError: [Errno 24] Too many open files`",
        "ValueError: the cause",
    ]
    log.write_text("\n".join([*lines, *(f"line {number}" for number in range(40))]))
    assert served_benchmark.tail(log).splitlines()[:2] == ["ValueError: the cause", "..."]
    log.write_text("\n".join([f"INFO x\n(APIServer pid=1) {lines[0]}", *(f"line {number}" for number in range(40))]))
    assert "Errno" not in served_benchmark.tail(log)


def test_a_gain_is_said_with_its_interval(run: Run, tmp_path: Path) -> None:
    result = run("ab", "model", "--turns", 3, "--logs", tmp_path, "--tensor-parallel-size", 2)
    assert result.status == 0, result.err
    assert "A gain: output changed by +2" in result.out and "95% interval +1" in result.out
    assert "plugin: emulation x 2" in result.out and "first starts, uncounted" in result.out
    for name in ("output, tokens/s", "time to first token, ms", "time between tokens, ms", "start, s"):
        assert name in result.out
    # Which goes first alternates.
    assert [line.split("turn ")[1] for line in result.err.splitlines() if "turn" in line and "starts" in line] == [
        "1: stock vLLM starts", "1: plugin vLLM starts", "2: plugin vLLM starts", "2: stock vLLM starts",
        "3: stock vLLM starts", "3: plugin vLLM starts",
    ]  # fmt: skip
    assert "['--tensor-parallel-size', '2']" in (tmp_path / "plugin-1-server.log").read_text()


@pytest.mark.parametrize(
    ("gain", "jitter", "said", "verdict"),
    [
        ("1.0", "0.05", "No gain is shown: output changed by", "no difference shown"),
        ("1.01", "0.05", "No gain is shown: output changed by", "no difference shown"),
        ("0.8", "0.001", "A loss: output changed by -", "worse"),
        ("1.3", "0.001", "A gain: output changed by +", "better"),
    ],
)
def test_what_the_noise_covers_is_no_gain(
    gain: str, jitter: str, said: str, verdict: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GAIN, gain)
    monkeypatch.setenv(JITTER, jitter)
    result = run("ab", "model", "--json", "--no-first-starts")
    assert (result.status, result.json["turns"]) == (0, 3) and result.json["summary"][0].startswith(said)
    throughput, first, between, start = result.json["metrics"]
    assert throughput["verdict"] == first["verdict"] == between["verdict"] == verdict
    assert len(throughput["stock"]) == len(start["plugin"]) == 3 and throughput["low"] < throughput["ratio"]
    assert result.json["backends"] == {"emulation": 2} and result.json["loads"][0]["seed"] == 0
    assert result.json["first_starts"] == {}


def test_each_concurrency_is_a_benchmark_of_the_same_servers(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "140")  # one table for each, not split
    command = ("ab", "model", "--concurrency", "4,64", "--prompts", "20,400", "--logs", tmp_path)
    result = run(*command)
    assert result.status == 0, result.err
    assert "4 at a time: A gain: output changed by +2" in result.out and "64 at a time: A gain" in result.out
    assert result.out.count("time to first token, ms") == 2 and result.out.count("start, s") == 1
    assert result.err.count("vLLM starts") == 8 and result.err.count("benchmark of") == 8
    assert json.loads((tmp_path / "stock-0-bench-64.json").read_text())["completed"] == 64, "a few, uncounted"
    assert [json.loads((tmp_path / f"plugin-3-bench-{each}.json").read_text())["completed"] for each in (4, 64)] == [
        20, 400,
    ]  # fmt: skip
    found = run(*command, "--json", "--resume").json
    assert [(each["prompts"], each["concurrency"]) for each in found["loads"]] == [(20, 4), (400, 64)]
    assert [each["concurrency"] for each in found["metrics"]] == [4, 4, 4, 64, 64, 64, None]
    assert found["metrics"][3]["stock"][0] == 16 * found["metrics"][0]["stock"][0] and len(found["summary"]) == 2


def test_one_turn_says_nothing_about_noise(run: Run) -> None:
    result = run("ab", "model", "--turns", 1, "--no-first-starts")
    assert result.status == 0 and "One turn says nothing about noise" in result.out and "A gain" not in result.out


@pytest.mark.parametrize("kind", ["stock", "plugin"])
def test_a_server_that_does_not_start_shows_the_cause_and_its_status(kind: str, run: Run) -> None:
    result = run("ab", "model", f"--fail-{kind}")
    assert (result.status, result.out) == (4, "")
    assert "error: the server ended with status 7 before it was healthy" in result.err
    assert "  | ValueError: the cause of it" in result.err and "  | RuntimeError: another" in result.err
    assert "Route" not in result.err


def test_a_server_that_never_answers_is_given_up(run: Run, tmp_path: Path) -> None:
    result = run("ab", "model", "--start-timeout", 1, "--never", "--child", tmp_path / "children")
    assert result.status == 4 and "the server was not healthy within 1 s" in result.err
    assert all(has_ended(int(each)) for each in (tmp_path / "children").read_text().split())


@pytest.mark.parametrize(("gain", "said"), [("-1", "the benchmark ended with status 5"), ("0", "1 requests failed")])
def test_a_benchmark_that_fails_is_no_result(
    gain: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(GAIN, gain)
    result = run("ab", "model", "--child", tmp_path / "children")
    assert (result.status, result.out) == (4, "") and said in result.err
    assert all(has_ended(int(each)) for each in (tmp_path / "children").read_text().split())


def test_servers_that_are_not_what_they_are_called_are_not_compared(run: Run) -> None:
    result = run("ab", "model", "--wrong")
    assert result.status == 3 and "stock vLLM ran layers through the plugin: emulation x 2" in result.err


def test_a_plugin_that_runs_nothing_is_not_compared() -> None:
    for layers, said in ((48, "ran none of 48 MoE layers"), (0, "decided no layer")):
        with pytest.raises(ab._WrongServer, match=said):
            ab._check_server(ab.PLUGIN, {}, layers)
    ab._check_server(ab.STOCK, {}, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("model", "--turns", "0"), "--turns: 0 is not possible"),
        (("model", "--seed", "-1"), "--seed: -1 is no seed of NumPy. Give one from 0 to 4294967295"),
        (("model", "--seed", "4294967296"), "--seed: 4294967296 is no seed of NumPy"),
        (("model", "--prompts", "0"), "--prompts: '0' is not a list of numbers"),
        (("model", "--prompts", "1,2"), "--prompts: 2 numbers for a concurrency of 16"),
        (("model", "--prompts", "1_0"), "--prompts: '1_0' is not a list of numbers"),
        (("model", "--input-len", "0"), "--input-len: 0 is not possible"),
        (("model", "--concurrency", "-1"), "--concurrency: '-1' is not a list of numbers"),
        (("model", "--concurrency", "1,"), "--concurrency: '1,' is not a list of numbers"),
        (("model", "--concurrency", "4,4"), "--concurrency: 4,4 names a number twice"),
        (("model", "--concurrency", "9" * 5000), "is not a list of numbers"),
        (("model", "--output-len", "1"), "--output-len: 1 tokens have no time between them"),
        (("model", "--start-timeout", "-1"), "--start-timeout: -1 is not possible"),
        (("model", "--port", "70000"), "--port: 70000 is not a port"),
        (("model", "--logs", "/dev/null/x"), "the folder cannot be made"),
        # What is no model starts no server.
        (("",), "MODEL: the name is empty. Give a checkpoint's folder"),
        ((" ", "--turns", "1"), "MODEL: the name is empty"),
        (("--tp", "x"), "is an option, and the model comes first. Write vLLM's options after it"),
        (("--max-model-len", "256", "model"), "'--max-model-len' is an option, and the model comes first"),
        (("./no/such/model",), "./no/such/model: no such file or folder"),
    ],
)
def test_unusable_words_end_with_2_and_one_line(line: tuple[str, ...], said: str, run: Run) -> None:
    result = run("ab", *line)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and said in result.err


def test_without_vllm_or_without_the_plugin_nothing_is_started(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "not selected by VLLM_PLUGINS" in run("ab", "model").err
    monkeypatch.setattr(ab, "installed_packages", dict)
    result = run("ab", "model")
    assert (result.status, result.err.count("\n")) == (2, 1) and "pip install 'vllm-moe-oracle[vllm]'" in result.err


def test_turns_before_a_failure_are_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAST, "2:fail")
    result = run("ab", "model", "--turns", 4)
    assert result.status == 4 and "the benchmark ended with status 5" in result.err
    assert "warning: ended after 2 of 4 turns; their figures follow" in result.err and "2 turns" in result.out
    found = run("ab", "model", "--turns", 3, "--json")
    assert found.status == 4 and (found.json["turns"], found.json["turns_measured"]) == (3, 2)


def test_turns_before_an_answer_that_says_nothing_are_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["model"] * 4)

    def served_name(port: int) -> str:
        if name := next(names, ""):
            return name
        raise MeasurementError("the server does not name its model: 401")

    monkeypatch.setattr(served_benchmark, "served_name", served_name)
    result = run("ab", "model", "--turns", 3, "--no-first-starts")
    assert result.status == 4 and "the server does not name its model: 401" in result.err
    assert "warning: ended after 2 of 3 turns; their figures follow" in result.err and "2 turns" in result.out


@pytest.mark.parametrize("kind", ["folder", "no room"])
def test_turns_that_cannot_be_kept_end_the_run_before_it_starts(
    kind: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "folder":
        (tmp_path / "turns.jsonl").mkdir()
    else:

        def full(path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(kept_turns, "append_whole", full)
    result = run("ab", "model", "--logs", tmp_path)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / 'turns.jsonl'}: the turns cannot be written: " in result.err and "--logs" in result.err


def test_an_ended_run_goes_on_where_it_stopped(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LAST, "2:fail")
    command = ("ab", "model", "--turns", 4, "--logs", tmp_path)
    assert run(*command).status == 4
    kept = (tmp_path / "turns.jsonl").read_text()
    monkeypatch.delenv(LAST)
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write('{"turn":3,"kind":"sto')  # a run that was killed while it wrote
    result = run(*command, "--resume")
    assert result.status == 0 and "4 turns" in result.out and "first starts, uncounted" in result.out
    begun = [line.split("turn ")[1] for line in result.err.splitlines() if "turn" in line and "starts" in line]
    assert begun == ["3: stock vLLM starts", "3: plugin vLLM starts", "4: plugin vLLM starts", "4: stock vLLM starts"]
    assert (tmp_path / "turns.jsonl").read_text().startswith(kept)
    again = run(*command, "--resume", "--json")
    assert again.json["turns_measured"] == 4 and set(again.json["first_starts"]) == {"stock", "plugin"}
    whole = (tmp_path / "turns.jsonl").read_text()
    anew = run("ab", "model", "--turns", 1, "--logs", tmp_path)
    assert (anew.status, anew.err.count("\n")) == (2, 1) and (tmp_path / "turns.jsonl").read_text() == whole
    said = "turns.jsonl: holds the turns of an earlier run, which would be lost. Continue it with --resume, or name"
    assert said in anew.err
    (tmp_path / "turns.jsonl").write_text(whole.splitlines(keepends=True)[0])  # it ended before its first figures
    assert run("ab", "model", "--turns", 1, "--logs", tmp_path).status == 0


def test_a_run_goes_on_whatever_characters_its_options_have(tmp_path: Path) -> None:
    """Some end a line of text, and stand in JSON as they are."""
    identity = {"model": "a\u2028b\x85c\nd", "loads": []}
    kept_turns.KeptTurns(tmp_path, identity, resume=False).keep_first({"stock": 2.0})
    assert kept_turns.KeptTurns(tmp_path, identity, resume=True).first == {"stock": 2.0}


FIGURES = '"16":{"completed":1,"failed":0,"output_throughput":8.5,"median_ttft_ms":1,"median_itl_ms":1}'


def turn_with(seconds: float, results: str) -> str:
    return f'{{"turn":1,"kind":"stock","start_seconds":{seconds},"results":{{{results}}},"backends":{{}},"layers":1}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "holds the turns of another model"),
        ("[]\n", "holds the turns of another model"),
        ("{", "holds the turns of another model"),
        ("{\n", "is not JSON"),
        ("\xff\n", "is not JSON"),
        ("SAME\n[1]\n", "does not hold the turns of a run"),
        ('SAME\n{"turn":1,"kind":"stock"}\n', "does not hold the turns of a run"),
        ('SAME\n{"first":{"stock":"x"}}\n', "does not hold the turns of a run"),
        (f"SAME\n{turn_with(0, FIGURES)}\n", "turn 1 of stock lacks figures, or they are not positive"),
        (f"SAME\n{turn_with(9, FIGURES.replace('8.5', '1e999'))}\n", "does not hold the turns of a run"),
        (f"SAME\n{turn_with(9, '')}\n", "turn 1 of stock lacks figures"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(text: str | None, said: str, run: Run, tmp_path: Path) -> None:
    command = ("ab", "model", "--turns", 1, "--no-first-starts", "--logs", tmp_path)
    path = tmp_path / "turns.jsonl"
    if text is not None:
        if "SAME" in text:
            assert run(*command).status == 0
            text = text.replace("SAME", path.read_text().splitlines()[0])
        path.write_bytes(text.encode("latin-1"))
    result = run(*command, "--resume")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and said in result.err, result.err
    assert "--logs" in run("ab", "model", "--resume").err
    other = run("ab", "model", "--turns", 1, "--logs", tmp_path, "--resume", "--prompts", 3)
    assert other.status == 2


@pytest.mark.parametrize(
    ("where", "number"),
    sampled(itertools.product(["start", "benchmark", "second turn"], [signal.SIGINT, signal.SIGTERM]), 3),
)
def test_an_interruption_leaves_no_server(number: signal.Signals, where: str, tmp_path: Path) -> None:
    children = tmp_path / "children"
    never = ", '--never'" if where == "start" else ""
    code = (
        "import sys\n"
        "from tests.cli import test_ab\n"
        "from vllm_moe_oracle.cli import main, served_benchmark\n"
        "from vllm_moe_oracle.cli.commands import ab\n"
        "served_benchmark.server_command = test_ab.server_command\n"
        "served_benchmark.bench_command = test_ab.bench_command\n"
        f"ab.installed_packages = lambda: {{'vllm': '{NEWEST}'}}\n"
        f"sys.argv = ['vllm-moe-oracle', 'ab', 'model', '--logs', {str(tmp_path)!r}, '--child', {str(children)!r}"
        f"{never}]\n"
        "main.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {LAST: "1:hang"} if where == "second turn" else {GAIN: "1000"}
    environment.pop("VLLM_PLUGINS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    reached = {"start": children, "benchmark": tmp_path / "stock-0-bench.log"}.get(where, tmp_path / "reached")
    for _ in range(1200):
        if reached.exists() and (where != "start" or children.read_text()):
            break
        time.sleep(0.05)
    process.send_signal(number)
    shown, said = process.communicate(timeout=60)
    assert ("output, tokens/s" in shown) == (where == "second turn")
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert [each for each in children.read_text().split() if not has_ended(int(each))] == []


def test_the_commands_are_vllms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    for known in (True, False):
        monkeypatch.setattr(served_benchmark, "has_vllm_command", lambda known=known: known)
        served = served_benchmark.server_command("model", 8123, ("--dtype", "auto"))
        assert served[-5:] == ["127.0.0.1", "--port", "8123", "--dtype", "auto"] and "model" in served
        assert ("serve" in served) is known


def test_the_benchmarks_options_are_vllms(tmp_path: Path) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve", reason="needs vLLM's benchmark", exc_type=ImportError)
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    pytest.MonkeyPatch().undo()
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    words = REAL_BENCH_COMMAND("model", "name", 8123, {tmp_path / "x.json": Load(8, 16, 4, 2, 3)})
    found = parser.parse_args(json.loads(words[-1])[0])
    assert (found.num_prompts, found.random_input_len, found.random_output_len, found.seed) == (8, 16, 4, 3)
    assert found.save_result and found.ignore_eos and found.temperature == 0 and found.max_concurrency == 2


REAL_BENCH_COMMAND = served_benchmark.bench_command
REAL_SERVER_COMMAND = served_benchmark.server_command


@pytest.mark.full
def test_with_vllm_itself(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, where stock vLLM serves MXFP8 experts not at all: its server gets the same model in 16 bits."""
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    for kind, how in (("stock", "bf16"), ("plugin", "mxfp8")):
        write = [sys.executable, "-m", "tests.lib.checkpoints", str(tmp_path / kind), "--format", how]
        subprocess.run([*write, "--experts-only"], check=True, capture_output=True)

    def served(model: str, port: int, options: Any) -> list[str]:
        command = REAL_SERVER_COMMAND("MODEL", port, options)
        code = (
            "import os, sys\n"
            "kind = 'plugin' if os.environ['MOE_ORACLE_ENABLED'] == '1' else 'stock'\n"
            f"words = [os.path.join({model!r}, kind) if each == 'MODEL' else each for each in {command!r}]\n"
            "os.execv(words[0], words)\n"
        )
        return [sys.executable, "-c", code]

    def measured(model: str, *rest: Any) -> list[str]:
        return REAL_BENCH_COMMAND(f"{model}/plugin", *rest)

    monkeypatch.setattr(served_benchmark, "server_command", served)
    monkeypatch.setattr(served_benchmark, "bench_command", measured)
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")):
        monkeypatch.setenv(name, value)
    options = {
        "--turns": 1,
        "--prompts": 4,
        "--input-len": 8,
        "--output-len": 4,
        "--concurrency": "2,1",
        "--logs": tmp_path,
    }
    load = [word for option in options.items() for word in option]
    result = run(
        "ab", tmp_path, *load, "--no-first-starts", "--json", "--", "--max-model-len", "256", "--enforce-eager"
    )
    assert result.status == 0, result.err
    assert result.json["backends"] == {"cpu_dequantized": 2}
    assert all(value > 0 for each in result.json["metrics"] for kind in ("stock", "plugin") for value in each[kind])
    for each in (1, 2):
        assert json.loads((tmp_path / f"stock-1-bench-{each}.json").read_text())["completed"] == 4
