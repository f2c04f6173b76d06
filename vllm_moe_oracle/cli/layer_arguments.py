"""Shared by `tune` and `bench`: the layers that arguments name, checks of options and machine, a progress bar."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import settings
from ..checkpoint.dtypes import dtype_refusal, read_dtype_option
from ..checkpoint.files import read_checkpoint
from ..checkpoint.moe_layers import find_moe_layers
from ..checkpoint.ranks import Ranks
from ..checkpoint.serving import with_activations
from ..core.decimals import parse_count
from ..core.objectives import MAX_TOKENS
from ..core.problem import Device, Problem
from ..devices import catalog, detect
from ..errors import MeasurementError, did_you_mean, sanitize
from ..measurements import model_shapes
from ..settings import AUTO, Settings, batch_invariant
from .output import write_error_text


def resolve_problems(
    models: Sequence[str], ranks: Ranks, quantization: str = "", dtype: str = AUTO, ragged_shards: bool = False
) -> dict[Problem, set[str]]:
    """The layers that arguments name: by a checkpoint's folder or config.json, ``SCHEME:SHAPE[@tpN]``, or a shape's
    name in all formats in which it is served. Each with vLLM's names of its checkpoints' quantization, of which two may
    have equal layers; "" for one that no checkpoint has.

    Args:
        models: the arguments.
        ranks: vLLM's options of parallelism.
        quantization: vLLM's ``--quantization``, for checkpoints; "" for none.
        dtype: vLLM's ``--dtype``; named layers are in bfloat16 without it.
        ragged_shards: the setting of that name.

    Raises:
        OracleError: an argument is unknown, an option is not for it, or vLLM refuses the options for a model.
    """
    ranks.check()
    asked, machine = read_dtype_option(dtype), detect.detect()
    tp, dp, ep = ranks.tp, ranks.dp, ranks.ep
    found: dict[Problem, set[str]] = {}
    for word in models:
        if not word.strip():
            raise MeasurementError(
                "an empty word names no layer", "Give a checkpoint's folder, or SCHEME:SHAPE", "MODEL"
            )
        # Not Path's: it raises where a name is too long for a file.
        if os.path.exists(word) or "/" in word or word.endswith(".json"):
            read = read_checkpoint(Path(word))
            layers = find_moe_layers(
                read,
                ranks,
                ragged_shards=ragged_shards,
                online=quantization.lower(),
                vllm=machine.packages.get("vllm"),
                dtype=asked,
                capability=machine.capability,
            )
            if not layers.problems:
                rule = f"there is nothing to measure: {'; '.join(layers.notes)}"
                raise MeasurementError(rule, where=str(read.path))
            for each in (*layers.problems, *layers.mtp_problems):
                if error := dtype_refusal(each, layers.method, machine):
                    raise error
                found.setdefault(each, set()).add(layers.method)
            continue
        if ep:
            rule = f"{word!r} names a layer whose experts are all on one rank"
            raise MeasurementError(rule, "Give the model's config.json, whose experts can be spread over ranks", "--ep")
        if dp != 1:
            rule = f"{word!r} names a layer by the ranks that shard it"
            raise MeasurementError(rule, f"Give --tp {tp * dp}, or the model's config.json", "--dp")
        if quantization:
            rule = f"{word!r} names a layer with its format"
            raise MeasurementError(rule, "Leave the option out, or give the model's config.json", "--quantization")
        if ":" in word:
            if "@" in word and tp != 1 and not word.endswith(f"@tp{tp}"):
                raise MeasurementError(f"{word!r} names other ranks than {tp}", "Leave one of them out", "--tp")
            named = [model_shapes.parse(word if "@" in word or tp == 1 else f"{word}@tp{tp}")]
        elif word in model_shapes.names():
            named = _served_formats(word, tp)
        else:
            raise _unknown_name(word)
        for each in named:
            found.setdefault(each if asked == AUTO else dataclasses.replace(each, dtype=asked), set()).add("")
    if not found:
        raise MeasurementError("there are no layers to measure")
    return found


def _unknown_name(word: str) -> MeasurementError:
    """What a word may have meant that is no name of a layer."""
    known = model_shapes.names()
    shape, at, ranks = word.partition("@")
    if at and shape in known:
        count = model_shapes.parse_ranks(ranks, word)
        rule = "a number of ranks is given, and no format"
        return MeasurementError(rule, f"Write SCHEME:{shape}@tp{count}, or {shape} --tp {count} for all formats", word)
    rule = f"{word!r} is neither a checkpoint's folder nor a config.json nor the name of a layer"
    remedy = f"{did_you_mean(shape, known)}Names are SCHEME:SHAPE[@tpN], with SHAPE one of {', '.join(known)}"
    here = "It is a GPU's name; leave it out, since this machine's GPU is measured"
    return MeasurementError(rule, here if catalog.find_spec(word) else remedy)


def _served_formats(shape: str, tp: int) -> list[Problem]:
    """The layers of a shape in the formats in which it is served; with 1 rank, at every number of ranks.

    Raises:
        MeasurementError: it is not served at that number of ranks.
    """
    known = [each for each in model_shapes.served_problems() if each.layer.split(":")[1].split("@")[0] == shape]
    found = [each for each in known if tp in (1, each.parallel.tp)]
    if not found:
        sizes = ", ".join(map(str, sorted({each.parallel.tp for each in known})))
        rule = f"{shape} is in the list of served layers at {sizes} ranks, not at {tp}"
        raise MeasurementError(rule, f"Name a format: SCHEME:{shape}@tp{tp}", "--tp")
    return found


def apply_settings(problem: Problem, settings: Settings) -> Problem:
    """The layer with activations as the settings want them, and invariant where ``VLLM_BATCH_INVARIANT`` asks for it.

    Raises:
        SettingError: that variable is not an integer.
    """
    if batch_invariant():
        problem = dataclasses.replace(problem, batch_invariant=True)
    return with_activations(problem, settings)


def require_gpu(elsewhere: str) -> Device:
    """This machine, which must be able to measure.

    Args:
        elsewhere: what to do on the machine that can.

    Raises:
        MeasurementError: it has no NVIDIA GPU, or no vLLM.
    """
    here = detect.detect()
    if here.kind != "cuda":
        rule = f"there is no NVIDIA GPU here (this is {here})"
        raise MeasurementError(rule, elsewhere)
    if "vllm" not in here.packages:
        raise MeasurementError("vLLM is not installed", "Install it: its kernels are measured, too")
    return here


def parse_gpus(words: str) -> tuple[str, ...]:
    """The GPUs of the option ``--gpus``; empty without it.

    Raises:
        SettingError: this machine does not have such GPUs.
    """
    return detect.select_gpus(words, settings.get_env(settings.VISIBLE_GPUS_VAR)) if words else ()


def check_options(replays: int, jobs: int, budget: float | None) -> None:
    """Whether the options of those names can be followed.

    Raises:
        MeasurementError: one cannot.
    """
    if replays < 3:
        raise MeasurementError(f"{replays} replays are too few for a median", "Give 3 or more", "--replays")
    if jobs < 0:
        raise MeasurementError(f"{jobs} processes are not possible", "Give 0 or more", "--jobs")
    if budget is not None and not budget > 0:
        raise MeasurementError(f"{budget:g} seconds are not possible", "Give more than 0", "--budget")


def parse_counts(words: str, option: str, example: str = "1,2,4,8,...") -> tuple[int, ...]:
    """Positive numbers from ``1,2,4``, in the order given.

    Args:
        words: the numbers.
        option: where they were given, for the error.
        example: what could be given.

    Raises:
        MeasurementError: an entry is no number of at least 1 and at most `MAX_TOKENS`.
    """
    found = tuple(parse_count(word) for word in words.split(","))
    if not all(1 <= each <= MAX_TOKENS for each in found):
        raise MeasurementError(f"{words!r} is not a list of numbers from 1 to {MAX_TOKENS}", f"Write {example}", option)
    return found


def parse_token_counts(words: str) -> tuple[int, ...]:
    """Numbers of tokens from ``1,2,4``, each once, in ascending order.

    Raises:
        MeasurementError: as by `parse_counts`.
    """
    return tuple(sorted(set(parse_counts(words, "--tokens"))))


@contextlib.contextmanager
def progress_bar(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error; without a terminal, a line for each new step, or nothing where a command prints JSON."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if as_json and not sys.stderr.isatty():
        yield lambda words, done, total: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        last = [""]

        def line(words: str, done: int, total: int) -> None:
            if words != last[0]:
                last[0] = words
                write_error_text(f"[{done}/{total}] {sanitize(words)}\n")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting")
        yield lambda words, done, total: bar.update(
            task, description=escape(sanitize(words)), completed=done, total=total
        )
