"""`ab`: stock vLLM and the plugin by turns on this machine, under vLLM's own serving benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from ...decision_records import ServerRecord, last_of_each_load
from ...devices.detect import installed_packages
from ...errors import CheckpointError, MeasurementError, printable
from ...measurements.paired_turns import CONFIDENCE, PairedComparison, compare
from ...settings import excluded_by_vllm, server_environment
from ...untrusted import boundary, exists
from .. import EXIT_INCOMPLETE, EXIT_NO_BACKEND, output, served_benchmark
from ..arguments import AsJson, count_option, counts_option, file_option, seconds_option
from ..kept_turns import KeptTurns, ServedTurn
from ..layer_arguments import parse_counts, progress_bar
from ..served_benchmark import Load, ServingError
from ..writable import make_folder

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For typer: what is not an option here is vLLM's."""

STOCK, PLUGIN = "stock", "plugin"

# Name, unit, whether more is better: of each benchmark, and of a start.
_BENCH_METRICS = (
    ("output", "tokens/s", True),
    ("time to first token", "ms", False),
    ("time between tokens", "ms", False),
)
_START_METRIC = ("start", "s", False)


_FirstStarts = Annotated[
    bool,
    typer.Option(
        "--first-starts/--no-first-starts",
        help="Start each server once before the turns, and send it some requests. This is not counted, since first "
        "starts compile, and read weights from disk.",
    ),
]


NEEDS_WORKING_DIRECTORY = True

HELP = """\
Serve a model with stock vLLM and with the plugin by turns, and say whether there is a gain.

Every turn starts a server of each kind and runs vllm bench serve against it, with the same prompts, once for each
concurrency. Options that are not named here go to vllm serve; those after -- all do.

\b
Examples:
  vllm-moe-oracle ab openai/gpt-oss-20b --concurrency 1,64 --prompts 20,400
  vllm-moe-oracle ab ~/models/gpt-oss-120b --turns 5 --tensor-parallel-size 2
  vllm-moe-oracle ab MODEL --json -- --max-model-len 8192
  vllm-moe-oracle ab MODEL --turns 5 --logs ab/ --resume

\b
Exit status:
  0  both were measured, whichever is faster
  2  the input or this machine cannot be used; one line on standard error says
     what
  3  nothing is compared: the plugin's server ran no layer through the plugin,
     or stock's server did
  4  a server did not start, or a benchmark failed; its last lines are on
     standard error
  130  interrupted
After 3, 4 or a signal the completed turns are shown, and --resume continues.
"""


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As vllm serve takes it. Options after it are vLLM's.", metavar="MODEL")],
    turns: Annotated[int, count_option("Starts of each server. One start says nothing about noise.")] = 3,
    prompts: Annotated[
        str, counts_option("Requests of each benchmark: one number, or one for each concurrency.")
    ] = "200",
    input_len: Annotated[int, count_option("Tokens of each request.")] = 512,
    output_len: Annotated[int, count_option("Tokens of each answer.")] = 128,
    concurrency: Annotated[
        str, counts_option("Requests at the same time; each number is a benchmark of its own.")
    ] = "16",
    seed: Annotated[int, count_option("Seed of the prompts, which are the same in all turns.")] = 0,
    first_starts: _FirstStarts = True,
    port: Annotated[int, count_option("The servers' port; 0 for a free one.")] = 0,
    start_timeout: Annotated[float, seconds_option("Seconds in which a server must be healthy.")] = 1800.0,
    logs: Annotated[
        Path | None,
        file_option(
            "Keep turns, logs and results in this folder. One that has turns of an earlier run needs --resume.",
            metavar="DIR",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that ended, after the turns that it left in --logs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What `HELP` says."""
    loads = _loads(prompts, concurrency, input_len, output_len, seed)
    _check_model(model)
    _check(turns, start_timeout, port)
    if resume and logs is None:
        raise MeasurementError("there is nothing to resume", "Give the folder of the ended run: --logs", "--resume")
    run = _Run(model, tuple(each for each in context.args if each != "--"), loads, port, start_timeout)
    with contextlib.ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-oracle-ab-")))
        make_folder(folder)
        words = {"model": output.as_utf8(model), "options": [*map(output.as_utf8, run.options)]}
        identity = {**words, "loads": loads, "packages": installed_packages()}
        kept = KeptTurns(folder, identity, resume)
        stack.enter_context(_terminable())
        measured, status = _measure_all(run, turns, first_starts, folder, kept, as_json)
    if measured:
        if status:
            output.print_message("warning", f"ended after {len(measured)} of {turns} turns; their figures follow")
        metrics = _metrics(run.loads, measured)
        if as_json:
            _print_json(run, turns, kept.first, measured, metrics)
        else:
            _print(kept.first, metrics, measured)
    if status:
        raise typer.Exit(status)


class _WrongServer(MeasurementError):
    """A server ran what it should not, or did not run what it should."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What every turn does.

    Attributes:
        model: the model, as ``vllm serve`` takes it.
        options: vLLM's, for both servers.
        loads: the requests of each benchmark; they differ in their number and in the concurrency.
        port: the servers' port; 0 for a free one each time.
        start_timeout: seconds in which a server must be healthy.
    """

    model: str
    options: tuple[str, ...]
    loads: tuple[Load, ...]
    port: int
    start_timeout: float


def _loads(prompts: str, concurrency: str, input_len: int, output_len: int, seed: int) -> tuple[Load, ...]:
    """The requests of each benchmark.

    Raises:
        MeasurementError: an option is out of range, or the numbers of prompts do not fit those of the concurrency.
    """
    _check_at_least_1("input-len", input_len)
    if not 0 <= seed < 1 << 32:  # vllm bench serve gives it to NumPy
        raise MeasurementError(f"{seed} is no seed of NumPy", f"Give one from 0 to {(1 << 32) - 1}", "--seed")
    if output_len < 2:
        raise MeasurementError(f"{output_len} tokens have no time between them", "Give 2 or more", "--output-len")
    together = parse_counts(concurrency, "--concurrency", "1,16,64")
    if len(set(together)) < len(together):
        raise MeasurementError(f"{concurrency} names a number twice", "Leave one of them out", "--concurrency")
    counts = parse_counts(prompts, "--prompts", "200")
    counts *= len(together) if len(counts) == 1 else 1
    if len(counts) != len(together):
        rule = f"{len(counts)} numbers for a concurrency of {concurrency}"
        raise MeasurementError(rule, f"Give 1 number, or {len(together)}", "--prompts")
    return tuple(Load(count, input_len, output_len, each, seed) for count, each in zip(counts, together, strict=True))


def _check_model(model: str) -> None:
    """Refuses what is no model.

    Raises:
        CheckpointError: it is empty, an option, or a path where nothing is.
    """
    if not model.strip():
        raise CheckpointError("the name is empty", "Give a checkpoint's folder, or a name of the Hub", "MODEL")
    if model.startswith("-"):
        rule = f"{model[:60]!r} is an option, and the model comes first"
        raise CheckpointError(rule, "Write vLLM's options after it: ab MODEL --tensor-parallel-size 2", "MODEL")
    if model.startswith(("/", "./", "../", "~")):
        with boundary(CheckpointError, "cannot be read", where=model):
            found = exists(Path(model).expanduser())
        if not found:
            raise CheckpointError("no such file or folder", "Give a checkpoint's folder, or a name of the Hub", model)


def _check_at_least_1(name: str, value: float) -> None:
    if not value >= 1:  # nor is NaN
        raise MeasurementError(f"{value:g} is not possible", "Give 1 or more", f"--{name}")


def _check(turns: int, start_timeout: float, port: int) -> None:
    """Refuses what cannot be measured.

    Raises:
        MeasurementError: an option is out of range, vLLM is missing, or leaves this plugin out.
    """
    _check_at_least_1("turns", turns)
    _check_at_least_1("start-timeout", start_timeout)
    if not 0 <= port < 1 << 16:
        raise MeasurementError(f"{port} is not a port", "Give one from 1 to 65535, or 0", "--port")
    if "vllm" not in installed_packages():
        remedy = "Install it: pip install 'vllm-moe-oracle[vllm]'"
        raise MeasurementError("this needs vLLM, which is not installed", remedy)
    if reason := excluded_by_vllm():
        raise MeasurementError(f"the plugin's server would not run it: it is {reason}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A signal that ends this process ends the servers first."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kept = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _first_starts(run: _Run, folder: Path, report: Any) -> dict[str, float]:
    """Seconds of a start of each kind before the turns. Whichever comes first would bear what both leave in caches.

    Each server answers a few requests, too: some kernels compile only then.
    """
    found = {}
    short = tuple(dataclasses.replace(load, prompts=load.concurrency) for load in run.loads)
    for step, kind in enumerate((STOCK, PLUGIN)):
        say = functools.partial(report, done=step, total=2)
        served = _serve(dataclasses.replace(run, loads=short), kind, 0, folder, say)
        found[kind] = served.start_seconds
    return found


def _measure_all(
    run: _Run, turns: int, first_starts: bool, folder: Path, kept: KeptTurns, as_json: bool
) -> tuple[list[tuple[ServedTurn, ServedTurn]], int]:
    """The turns that could be measured, and the exit status: 0, or what ended the run before the last turn."""
    measured: list[tuple[ServedTurn, ServedTurn]] = []
    try:
        with progress_bar(as_json) as report:
            if first_starts and not kept.served and not kept.first:
                kept.keep_first(_first_starts(run, folder, report))
            for turn in _measure(run, turns, folder, kept, report):
                measured.append(turn)  # one by one: what is there is kept when the next one fails
    except ServingError as error:
        for line in printable(error.log).splitlines():
            output.write_error_text(f"  | {line}\n")
        output.print_message("error", str(error))
        return measured, EXIT_INCOMPLETE
    except _WrongServer as error:
        output.print_message("error", str(error))
        return measured, EXIT_NO_BACKEND
    except MeasurementError as error:
        if not measured:
            raise
        output.print_message("error", str(error))
        return measured, EXIT_INCOMPLETE
    except SystemExit as ended:  # by a signal: what was measured took minutes, and is shown
        return measured, ended.code if isinstance(ended.code, int) else EXIT_INCOMPLETE
    return measured, 0


def _measure(
    run: _Run, turns: int, folder: Path, kept: KeptTurns, report: Any
) -> Iterator[tuple[ServedTurn, ServedTurn]]:
    """Stock's and the plugin's figures, turn by turn. Which goes first alternates."""
    for turn in range(1, turns + 1):
        order = (STOCK, PLUGIN) if turn % 2 else (PLUGIN, STOCK)
        for place, kind in enumerate(order):
            if (turn, kind) not in kept.served:
                say = functools.partial(report, done=2 * turn - 2 + place, total=2 * turns)
                kept.keep(_serve(run, kind, turn, folder, say))
        yield kept.served[turn, STOCK], kept.served[turn, PLUGIN]


def _serve(run: _Run, kind: str, turn: int, folder: Path, report: Callable[[str], None]) -> ServedTurn:
    """One server, and every benchmark.

    Raises:
        _WrongServer: the server is not what it is called.
    """
    name = f"{kind}-{turn}"
    head = f"turn {turn}" if turn else "first start, uncounted"
    records, log = folder / f"{name}-decisions.jsonl", folder / f"{name}-server.log"
    loads = {(folder / f"{name}-bench-{load.concurrency}.json").resolve(): load for load in run.loads}
    for each in (records, log, *loads):
        each.unlink(missing_ok=True)
    environment = server_environment({"enabled": str(int(kind == PLUGIN)), "report": str(records.resolve())})
    port = run.port or served_benchmark.free_port()
    report(f"{head}: {kind} vLLM starts")
    command = served_benchmark.server_command(run.model, port, run.options)
    with served_benchmark.server(command, environment, port, log, run.start_timeout) as seconds:
        backends, layers = _read_records(records)
        _check_server(kind, backends, layers)
        report(f"{head}: benchmark of {kind} vLLM")
        bench = served_benchmark.bench_command(run.model, served_benchmark.served_name(port), port, loads)
        found = served_benchmark.run_benchmarks(bench, environment, folder / f"{name}-bench.log", loads)
    results = {load.concurrency: each for load, each in zip(run.loads, found, strict=True)}
    return ServedTurn(turn, kind, seconds, results, backends, layers)


def _read_records(path: Path) -> tuple[dict[str, int], int]:
    """How many layers run by backend, and how many MoE layers there are, by a server's decision records.

    Raises:
        MeasurementError: a line cannot be read: it may say that this is another server than it is called.
    """
    backends: dict[str, int] = {}
    layers = 0
    if path.exists():
        with boundary(MeasurementError, "does not hold a server's decisions", where=str(path)):
            records = [msgspec.json.decode(line, type=ServerRecord) for line in path.read_bytes().splitlines()]
            for record in last_of_each_load(records, ServerRecord.process_and_layers):
                layers += record.moe_layers
                for group in record.groups:
                    backend = group.decision.backend
                    backends[backend] = backends.get(backend, 0) + group.count
    return backends, layers


def _check_server(kind: str, backends: dict[str, int], layers: int) -> None:
    """Refuses to compare servers that are not what they are called.

    Raises:
        _WrongServer: the plugin's server runs none of its backends, or stock's does.
    """
    if kind == STOCK and backends:
        raise _WrongServer(f"stock vLLM ran layers through the plugin: {_describe_backends(backends)}")
    if kind == PLUGIN and not backends:
        rule = f"the plugin ran none of {layers} MoE layers" if layers else "the plugin decided no layer"
        remedy = "vllm-moe-oracle explain MODEL says what is left to stock vLLM and why, status --check what is wrong"
        raise _WrongServer(f"{rule}: both servers would be stock vLLM", remedy)


def _describe_backends(backends: dict[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in sorted(backends.items()))


@dataclass(frozen=True, slots=True)
class _Metric:
    """One figure of both servers.

    Attributes:
        name: what it is.
        unit: its unit.
        more_is_better: whether more of it is.
        concurrency: of the benchmark; None for a start.
        compared: the figures.
    """

    name: str
    unit: str
    more_is_better: bool
    concurrency: int | None
    compared: PairedComparison

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``no difference shown``."""
        if not self.compared.differs:
            return "no difference shown"
        return "better" if (self.compared.ratio > 1) == self.more_is_better else "worse"


def _metrics(loads: tuple[Load, ...], measured: list[tuple[ServedTurn, ServedTurn]]) -> list[_Metric]:
    """Every metric, in the order of `ServedTurn.figures`."""
    heads = [(*each, load.concurrency) for load in loads for each in _BENCH_METRICS]
    stock, plugin = zip(*((before.figures(), after.figures()) for before, after in measured), strict=True)
    return [
        _Metric(*head, compare(base, other))
        for head, base, other in zip(
            [*heads, (*_START_METRIC, None)], zip(*stock, strict=True), zip(*plugin, strict=True), strict=True
        )
    ]


def _print_json(
    run: _Run,
    turns: int,
    first: dict[str, float],
    measured: list[tuple[ServedTurn, ServedTurn]],
    metrics: list[_Metric],
) -> None:
    output.print_json(
        {
            "command": output.command_line(),
            "packages": installed_packages(),
            "model": run.model,
            "options": run.options,
            "loads": run.loads,
            "turns": turns,
            "turns_measured": len(measured),
            "first_starts": first,
            "confidence": CONFIDENCE,
            "backends": measured[-1][1].backends,
            "metrics": [
                {"name": each.name, "unit": each.unit, "concurrency": each.concurrency,
                 "more_is_better": each.more_is_better, STOCK: each.compared.base, PLUGIN: each.compared.other,
                 "ratio": each.compared.ratio, "low": each.compared.low, "high": each.compared.high,
                 "verdict": each.verdict}
                for each in metrics
            ],
            "summary": _summary(len(measured), metrics),
        }
    )  # fmt: skip


def _print(first: dict[str, float], metrics: list[_Metric], measured: list[tuple[ServedTurn, ServedTurn]]) -> None:
    def cell(values: tuple[float, ...]) -> str:
        spread = f" ({_figure(min(values))} to {_figure(max(values))})" if len(values) > 1 else ""
        return f"{_figure(statistics.median(values))}{spread}".replace(" ", output.GLUE)

    output.show(f"plugin: {_describe_backends(measured[-1][1].backends)}")
    # With one concurrency, one table; with several, one for each, and one for the start.
    several = len({each.concurrency for each in metrics}) > 2
    for count, group in itertools.groupby(metrics, lambda each: each.concurrency if several else None):
        rows = []
        for each in group:
            found = each.compared
            change = f"{found.ratio - 1:+.1%}"
            if found.low is not None and found.high is not None:
                change += f" ({found.low - 1:+.1%} to {found.high - 1:+.1%})"
            words = change.replace(" ", output.GLUE)
            rows.append((f"{each.name}, {each.unit}", cell(found.base), cell(found.other), f"{words} {each.verdict}"))
        output.show_table(
            (f"{count} at a time" if count else "", STOCK, PLUGIN, f"change ({CONFIDENCE:.0%} interval)"), rows
        )
    if first:
        words = ", ".join(f"{kind} {_figure(seconds)} s" for kind, seconds in first.items())
        output.show("", f"first starts, uncounted (stock's came first, to colder caches): {words}")
    output.show("", *_summary(len(measured), metrics))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _summary(turns: int, metrics: list[_Metric]) -> list[str]:
    """Whether there is a gain, in a sentence for each benchmark."""
    found = [each for each in metrics if (each.name, each.unit, each.more_is_better) == _BENCH_METRICS[0]]
    heads = [f"{each.concurrency} at a time: " if len(found) > 1 else "" for each in found]
    return [head + _sentence(turns, each.compared) for head, each in zip(heads, found, strict=True)]


def _sentence(turns: int, throughput: PairedComparison) -> str:
    change = f"{throughput.ratio - 1:+.1%}"
    if throughput.low is None or throughput.high is None:
        return f"One turn says nothing about noise: output changed by {change}. Measure with --turns 3 or more."
    interval = f"{CONFIDENCE:.0%} interval {throughput.low - 1:+.1%} to {throughput.high - 1:+.1%}, {turns} turns"
    if not throughput.differs:
        return f"No gain is shown: output changed by {change}, which is within the noise between turns ({interval})."
    word = "gain" if throughput.ratio > 1 else "loss"
    return f"A {word}: output changed by {change} ({interval})."
