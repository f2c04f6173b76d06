"""`verify`: compares the decided kernels of a checkpoint with the float32 reference, on its own weights."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ...checkpoint.dtypes import read_dtype_option
from ...checkpoint.engagement import Engagement, read_engagement
from ...checkpoint.files import CheckpointFiles, read_checkpoint
from ...checkpoint.layer_names import compact_layer_names, short_layer_names
from ...checkpoint.moe_layers import find_moe_layers
from ...core.problem import Device
from ...devices import detect
from ...errors import DamagedCheckpointError, SettingError
from ...oracle.backend_names import check_backend_names
from ...settings import AUTO, Settings, env_var
from ...verification.layer_result import LayerResult
from .. import child_process, layer_arguments, output
from ..arguments import AdditionalConfig, AsJson, Assignments, Dtype, command_settings, file_option, name_option
from ..usage_hints import require_a_path

EXIT_FAILED = 1
"""Exit status when a layer is wrong, damaged or not engaged."""
EXIT_INTERRUPTED = 128 + signal.SIGINT

_WORDS = {
    "passed": "ok",
    "failed": "WRONG",
    "ended": "ENDED",
    "damaged": "DAMAGED",
    "no_backend": "NO BACKEND",
    "stock": "stock vLLM's",
}


_LEGEND = (
    "relative errors (L2): error is of all outputs together, worst of the worst block of 32 columns, column or token",
    "allowed: the largest error that the formats explain; beyond: blocks with a larger one",
)
"""What the columns of the table are."""

_NOT_READ = "not read: attention, dense layers, shared experts, the output layer, all but some rows of the embedding"
_NOT_FOUND = "not found: damage that leaves plausible numbers, such as a flipped bit; compare the files' checksums"

_GOOD = ("passed", "stock")
"""Of the statuses of a layer, those that are no failure."""

_KINDS = ("auto", "cpu", "cuda")


NEEDS_WORKING_DIRECTORY = True

HELP = """\
Check every decided kernel of a checkpoint against the float32 reference, on the checkpoint's own weights.

Layer by layer, on this machine: every expert by itself and in calls as a server makes them, on inputs from the
model's embeddings, norms and routers. Holds one layer's weights at a time, and one expert in float32.

\b
Examples:
  vllm-moe-oracle verify ~/models/Qwen3-30B-A3B-MXFP8
  vllm-moe-oracle verify ~/models/gpt-oss-20b --resume gpt-oss.jsonl --json
  vllm-moe-oracle verify ~/models/gpt-oss-20b --report FILE --report-only

\b
Exit status:
  0  every decided kernel agrees with the reference, and with --report every
     layer runs through the oracle
  1  a kernel is wrong or ended the process, the files of the weights are
     damaged, incomplete or do not fit the config, a layer has no backend, or
     the server does not run a layer through the oracle
  2  the input cannot be used: no checkpoint or a config that is not read, an
     option, a report of another model; one line on standard error says what
  3  this vLLM has the model no more
  130  interrupted: what was compared is printed, and --resume continues
  143  ended by SIGTERM: the same
"""


def command(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder, with its tensors.", metavar="CHECKPOINT")],
    device: Annotated[
        str, name_option("auto, cpu or cuda: an error if this machine is another kind.", lambda: _KINDS, "KIND")
    ] = "auto",
    report: Annotated[
        Path | None,
        file_option(f"A running server's report ({env_var('report')}): also say which layers run through the oracle."),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Only compare the report; read no weights.")
    ] = False,
    resume: Annotated[Path | None, file_option("Keep results in this file, and skip layers that it has.")] = None,
    dtype: Dtype = AUTO,
    additional_config: AdditionalConfig = "",
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """What `HELP` says."""
    chosen = command_settings(assignments, additional_config)
    asked = read_dtype_option(dtype)
    check_backend_names(chosen)
    if report_only and report is None:
        raise SettingError("there is no report to compare", "Name the file with --report", "--report-only")
    require_a_path(path)
    machine = _require_kind(device)
    answer = _Answer(machine, as_json)
    try:
        config = read_checkpoint(Path(path), needs_tensors=not report_only)
        if report is not None:
            layers = find_moe_layers(config, vllm=machine.packages.get("vllm"))
            answer.engagement = read_engagement(report, layers)
        if not report_only:
            _check(answer, config, chosen, asked, resume)
    except DamagedCheckpointError as error:
        child_process.keep(None)
        answer.damage = str(error)
    answer.print()
    if answer.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if answer.is_bad:
        raise typer.Exit(EXIT_FAILED)


def _check(answer: _Answer, config: CheckpointFiles, settings: Settings, dtype: str, resume: Path | None) -> None:
    """Adds the results of all layers to an answer, which the parent of this process has meanwhile."""
    from ...measuring import verifying

    with verifying.Verification(config, answer.machine, settings, dtype=dtype) as made, contextlib.ExitStack() as stack:
        kept = None
        if resume is not None:
            kept = verifying.ResumeFile(resume, made)
            answer.resume = str(resume)
            stack.callback(kept.close)
            if kept.results:
                output.print_message("note", f"{len(kept.results)} results are of an earlier run, from {resume}")
        progress = stack.enter_context(layer_arguments.progress_bar(answer.as_json))
        for note in made.layers.notes_on_files:
            output.print_message("note", note)
        answer.total = len(made.plans)
        answer.unquantized = made.layers.unquantized
        answer.unsupported_formats = dict(made.layers.unsupported_formats)

        def begin(layer: str, backend: str, done: int) -> None:
            progress(f"{layer}: {backend}", done, len(made.plans))
            child_process.keep(dataclasses.replace(answer, running=(layer, backend)))

        try:
            for result in made.run(kept, begin):
                answer.results.append(result)  # one by one: they are shown after an interruption, too
                child_process.keep(answer)
        except KeyboardInterrupt:
            answer.stopped = "interrupted"
    child_process.keep(None)  # it is printed now


def _require_kind(word: str) -> Device:
    """This machine, which must be of the kind that the option names.

    Raises:
        SettingError: the word is no kind, or this machine is another one.
    """
    machine = detect.detect()
    if word not in _KINDS:
        raise SettingError(f"{word!r} is not one of auto, cpu, cuda", "Kernels run on this machine only", "--device")
    if word not in ("auto", machine.kind):
        rule = f"this machine is {machine}: {'there is no GPU' if word == 'cuda' else 'its vLLM is built for GPUs'}"
        raise SettingError(rule, "Leave --device out, or run it on the machine that serves", "--device")
    return machine


@dataclass
class _Answer:
    """What the command says.

    Attributes:
        machine: this machine.
        as_json: print it as JSON.
        engagement: what the server's report says; None without one.
        total: number of layers to check; None where no weights are read.
        unquantized: names of layers that are not quantized.
        unsupported_formats: formats that are not read, by layer.
        results: results of the layers so far.
        running: the layer and the backend that are being compared.
        stopped: how the check stopped before its end; "" where it did not.
        resume: the file that keeps results; "" for none.
        command: the words that run this command again.
        damage: what is damaged in the files, which ended the check; "" where nothing is.
    """

    machine: Device
    as_json: bool
    engagement: Engagement | None = None
    total: int | None = None
    unquantized: tuple[str, ...] = ()
    unsupported_formats: Mapping[str, str] = field(default_factory=dict)
    results: list[LayerResult] = field(default_factory=list)
    running: tuple[str, ...] = ()
    stopped: str = ""
    resume: str = ""
    command: str = field(default_factory=output.command_line)
    damage: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a layer, or a file, is not as it should be."""
        wrong = bool(self.damage) or any(each.status not in _GOOD for each in self.results)
        return wrong or (self.engagement is not None and not self.engagement.complete)

    @property
    def remainder(self) -> tuple[str, str]:
        """Where a check that stopped did so and what is kept of it, and the command that goes on; "" where nothing is
        kept."""
        done = len({each.layer for each in self.results})
        words = f"{self.stopped} after {done} of {self.total} layers"
        if not self.resume:
            return f"{words}; --resume FILE keeps what is done", ""
        kept = len({each.layer for each in self.results if each.backend and each.status != "ended"})
        return f"{words}; the file of --resume keeps the results of {kept}. The same command goes on", self.command

    def ended(self, why: str, was_asked: bool) -> int:
        """See `child_process.Unfinished`."""
        self.stopped = "ended"
        if was_asked:
            self.print()
            return EXIT_FAILED
        if self.running:
            layer, backend = self.running
            self.results.append(LayerResult(layer, backend, "ended", fault=f"the process that checked it {why}"))
        self.print()
        if not self.running:
            output.print_message("error", f"the process that checked the layers {why}")
        return EXIT_FAILED

    def print(self) -> None:
        """Prints it, with errors and notes."""
        if self.as_json:
            output.print_json(
                {
                    "device": self.machine,
                    "layers": self.results,
                    "unquantized": self.unquantized,
                    "unsupported_formats": self.unsupported_formats,
                    "engagement": None if self.engagement is None else _engagement_json(self.engagement),
                    "interrupted": bool(self.stopped),
                    "damage": self.damage or None,
                }
            )
        elif self.total is not None and (self.results or not self.damage):
            self._print_tables()
        for each in self.results:
            if each.status not in _GOOD:
                output.print_message("error", f"{each.layer}: {each.backend or 'no backend'}: {each.fault}")
            elif each.fault:
                output.print_message("note", f"{each.layer}: {each.fault}")
        for layer, words in dict.fromkeys((each.layer, words) for each in self.results for words in each.warnings):
            output.print_message("warning", f"{layer}: {words}")
        if self.engagement is not None:
            _print_engagement(self.engagement, self.results, self.as_json)
        if self.damage:
            output.print_message("error", self.damage)
        if self.stopped and self.as_json:
            output.print_message("note", ": ".join(filter(None, self.remainder)))

    def _print_tables(self) -> None:
        output.show(f"{self.machine}, vLLM {self.machine.packages.get('vllm', 'unknown')}")
        head = ("layer", "verdict", "error", "worst", "allowed", "beyond", "experts", "seconds")
        for backend in dict.fromkeys(each.backend for each in self.results):
            own = [each for each in self.results if each.backend == backend]
            names = [each.layer for each in own]
            rows = [(label, *_row(each)) for label, each in zip(short_layer_names(names), own, strict=True)]
            title = f"{compact_layer_names(names)} with {backend or 'no backend'}"
            output.show("", title)
            output.show_table(head, rows, indent=2)
        if any(each.calls for each in self.results):
            output.show("", *_LEGEND)
        output.show("", *_summary(self))
        if self.stopped:
            words, command = self.remainder
            output.show(words)
            if command:
                output.show_line(command)


def _engagement_json(engagement: Engagement) -> dict[str, Any]:
    return {**dataclasses.asdict(engagement), "complete": engagement.complete}


def _row(result: LayerResult) -> tuple[str, ...]:
    figures: tuple[str, ...] = ("", "", "", "", "")
    if result.calls:
        numbers = (result.error, result.worst, result.allowed)
        figures = (
            *("nan" if number is None else f"{number:.1e}" for number in numbers),
            str(result.outliers),
            f"{result.experts_checked}/{result.experts}",
        )
    return (_WORDS[result.status], *figures, f"{result.seconds:.1f}")


def _summary(answer: _Answer) -> Iterator[str]:
    """What the table amounts to, in lines."""
    results, total = answer.results, answer.total
    compared = [each for each in results if each.calls]
    passed = {each.layer for each in results} - {each.layer for each in results if each.status != "passed"}
    yield f"{len(passed)} of {total} layers agree with the float32 reference on the checkpoint's weights"
    if compared:
        experts = sum(each.experts_checked for each in compared)
        calls, memory = sum(each.calls for each in compared), max(each.memory for each in compared)
        yield f"{experts} experts, {calls} calls; at most {memory / 2**20:.1f} MiB of weights at a time"
        sources = dict.fromkeys(each.inputs for each in compared)
        yield f"inputs: {'; '.join(sources)}"
        yield _NOT_READ
        yield _NOT_FOUND
    stock = [each.layer for each in results if each.status == "stock"]
    if stock:
        yield f"stock vLLM's, not compared: {compact_layer_names(stock)}"
    if answer.unquantized:
        yield f"not quantized, not compared: {compact_layer_names(answer.unquantized)}"
    if answer.unsupported_formats:
        yield f"in formats that are not read, not compared: {compact_layer_names(answer.unsupported_formats)}"


def _print_engagement(engagement: Engagement, results: list[LayerResult], as_json: bool) -> None:
    """What the server's report says, and where it runs another backend than the compared one."""
    if not as_json:
        output.show("", str(engagement))
        counts: dict[str, list[str]] = {}
        for layer, backend in engagement.backends.items():
            counts.setdefault(backend, []).append(layer)
        output.show(*(f"  {name}: {compact_layer_names(found)}" for name, found in counts.items()))
    for layer, reason in engagement.missing.items():
        output.print_message("error", f"{layer}: not run through the oracle: {reason}")
    if engagement.ranks != engagement.expected_ranks:
        rule = f"{engagement.ranks} of {engagement.expected_ranks} ranks have reported the last load"
        output.print_message("error", f"{rule}: a rank has not loaded the model, or writes another file")
    if engagement.unfinished:
        rule = "the report ends within a line: a process is writing it, or ended while it did, or the disk is full"
        output.print_message("error", rule)
    compared: dict[str, set[str]] = {}
    for each in results:
        compared.setdefault(each.layer, set()).add(each.backend)
    others: dict[tuple[str, str], list[str]] = {}
    for layer, backend in engagement.backends.items():
        if layer in compared and backend not in compared[layer]:
            others.setdefault((backend, ", ".join(filter(None, sorted(compared[layer])))), []).append(layer)
    for (backend, own), found in others.items():
        words = f"{compact_layer_names(found)}: the server runs {backend}, compared here was {own or 'nothing'}"
        output.print_message("note", f"{words}; verify --set backend={backend} compares that one, where it can run")
