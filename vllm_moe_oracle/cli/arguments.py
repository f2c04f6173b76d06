"""Arguments that several commands take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..checkpoint.dtypes import DTYPE_OPTIONS
from ..core.decimals import WHAT_IS_READ, parse_decimal
from ..errors import MeasurementError, SettingError, short_repr
from ..measurements import profile
from ..settings import Settings, load
from ..untrusted import parse_json
from . import completion

ModelNames = Annotated[
    list[str] | None,
    typer.Argument(
        help="A checkpoint's folder, a config.json, a Hub name in the local cache, SCHEME:SHAPE[@tpN] such as "
        "mxfp8:qwen3-30b-a3b@tp2, or a SHAPE in all its formats. An unknown name lists all.",
        metavar="MODEL",
        autocompletion=completion.models,
    ),
]
_Number = TypeVar("_Number", int, float)


def read_count(text: object) -> int:
    """The whole number in an option.

    Raises:
        typer.BadParameter: it is not written in decimal digits.
    """
    return _read_number(text, int, "integer")


def read_seconds(text: object) -> float:
    """The same for a number that may have a fraction."""
    return _read_number(text, float, "number")


def _read_number(text: Any, kind: Callable[[Any], _Number], word: str) -> _Number:
    number = parse_decimal(text) if isinstance(text, str) else float(text)  # a default is a number
    if not math.isfinite(number) or (word == "integer" and "." in str(text)):
        remedy = "Write digits from 0 to 9" if word == "integer" else WHAT_IS_READ
        raise typer.BadParameter(f"{text!r} is not a valid {word}. {remedy}")
    return kind(text)


def count_option(text: str) -> Any:
    """An option that is a whole number, with this help."""
    return typer.Option(help=text, metavar="N", parser=read_count)


def _refuse_empty(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """A value as it is. Nothing, which a script's empty variable gives, is no word.

    Raises:
        typer.BadParameter: the command line gives an empty one.
    """
    source = getattr(context.get_parameter_source(str(option.name)), "name", "")
    if isinstance(value, str) and not value.strip() and source == "COMMANDLINE":
        raise typer.BadParameter("the value is empty. Give one, or leave the option out")
    return value


def counts_option(text: str) -> Any:
    """The same for whole numbers with commas; `layer_arguments.parse_counts` reads them."""
    return typer.Option(help=text, metavar="N,...", callback=_refuse_empty)


def seconds_option(text: str) -> Any:
    """The same for seconds."""
    return typer.Option(help=text, metavar="SECONDS", parser=read_seconds)


def name_option(text: str, values: Callable[[], Sequence[str]], metavar: str = "NAME") -> Any:
    """The same for a word; shells complete these values."""
    return typer.Option(help=text, metavar=metavar, autocompletion=values, callback=_refuse_empty)


def names_option(text: str, values: Callable[[], Sequence[str]], metavar: str = "NAME,...") -> Any:
    """The same for words with commas."""
    return typer.Option(help=text, metavar=metavar, autocompletion=completion.several(values), callback=_refuse_empty)


def file_option(text: str, *names: str, metavar: str = "FILE") -> Any:
    """The same for a path; names of the option where its parameter has another one."""
    return typer.Option(*names, help=text, metavar=metavar)


def _output_path(text: object) -> Path:
    """A path that is written; ``-`` stands for standard output."""
    return Path("/dev/stdout" if text == "-" else str(text))


def output_option(text: str, *names: str, metavar: str = "FILE") -> Any:
    """The same for a file that is written."""
    return typer.Option(*names, help=f'{text} "-" is standard output.', metavar=metavar, parser=_output_path)


TensorParallel = Annotated[int, count_option("Tensor-parallel ranks, as vLLM's --tensor-parallel-size.")]
DataParallel = Annotated[
    int,
    count_option(
        "Data-parallel ranks, each of --tp ranks; as vLLM's --data-parallel-size. MoE layers are distributed over all "
        "of them."
    ),
]
ExpertParallel = Annotated[
    bool, typer.Option("--ep", help="Expert parallelism over all ranks (vLLM's --enable-expert-parallel).")
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant", help="As vLLM's VLLM_BATCH_INVARIANT. [default: the variable]"
    ),
]
Quantization = Annotated[
    str,
    name_option(
        "As vLLM's --quantization, e.g. mxfp8 for a checkpoint in 16 bits, moe_wna16 for GPTQ or AWQ.",
        completion.quantizations,
    ),
]
Dtype = Annotated[
    str,
    name_option(
        "As vLLM's --dtype; auto is the checkpoint's, or bfloat16 where that is float32.",
        lambda: DTYPE_OPTIONS,
        "DTYPE",
    ),
]
CompileJobs = Annotated[int, count_option("Processes that compile kernels before the measurements; 0 for none.")]
Replays = Annotated[int, count_option("Timed replays of each backend and number of tokens, at most.")]
Gpus = Annotated[str, name_option("Measure on several GPUs: all, or numbers like 0,1.", lambda: ["all"], "all|N,...")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the plugin, e.g. --set backend=emulation; status --verbose lists all. Repeatable.",
        metavar="KEY=VALUE",
        autocompletion=completion.assignments,
    ),
]
AdditionalConfig = Annotated[
    str,
    typer.Option(
        help='As vLLM\'s --additional-config, e.g. {"moe_oracle": {"backend": "emulation"}}; --set goes before it.',
        metavar="JSON",
        callback=_refuse_empty,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command_settings(
    words: list[str] | None, additional_config: str = "", ignore_bad_profile: bool = False, backend: str | None = None
) -> Settings:
    """The settings of a command: the environment's, over them those of ``--additional-config``, and over these those
    after ``--set`` and ``--backend``.

    Args:
        words: see `parse_assignments`; None for none.
        additional_config: the value of that option; "" without it.
        ignore_bad_profile: accept a profile that cannot be read, as a server does, unless ``--set`` names it.
        backend: the value of ``--backend``, in commands where that stands for the setting; None without it.

    Raises:
        SettingError: as by `settings.load` and `parse_assignments`, the profile cannot be read, ``--backend`` is given
            beside ``--set backend``, or ``--additional-config`` is not a JSON object.
    """
    assignments, options = parse_assignments(words or []), {}
    if backend is not None:
        if "backend" in assignments:
            raise SettingError("--set backend is given, too", "Leave one of them out", "--backend")
        assignments["backend"], options["backend"] = backend, "--backend"
    chosen = load(
        additional_config=_read_object(additional_config), assignments=assignments, options=options, prefix="--set "
    )
    source = chosen.source("profile")
    if chosen.profile and (source.startswith("--set") or not ignore_bad_profile):
        try:
            profile.read(Path(chosen.profile))
        except MeasurementError as error:
            rule = f"{error.where}: {error.rule}" if error.where else error.rule
            remedy = error.remedy or "Name a file that tune --export has written, or leave the setting out"
            raise SettingError(rule, remedy, source) from error
    return chosen


def _read_object(text: str) -> dict[str, Any]:
    """The value of ``--additional-config``; empty for no text."""
    where = "--additional-config"
    found = parse_json(text.encode(errors="surrogateescape"), SettingError, where) if text else {}
    if not isinstance(found, dict):
        remedy = 'Write {"moe_oracle": {"backend": "emulation"}}'
        raise SettingError(f"{short_repr(found)} is not a JSON object", remedy, where)
    return found


def parse_assignments(words: list[str]) -> dict[str, str]:
    """Settings by name, from the words after ``--set``.

    Raises:
        SettingError: a word without a value, or a name that is given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise SettingError(f"{word!r} has no =", "Write --set backend=emulation", "--set")
        if name in found:
            remedy = "Separate several overrides with ;" if name == "overrides" else "Leave one of them out"
            raise SettingError(f"{name} is given twice", remedy, "--set")
        found[name] = value
    return found
