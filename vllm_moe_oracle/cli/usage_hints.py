"""What users type out of habit: vLLM's names of options are taken, and other usage errors end with a hint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence

from ..devices import catalog
from ..errors import CheckpointError
from ..measurements import model_shapes

_VLLM_OPTIONS = {
    "--tp": ("--tensor-parallel-size", "-tp"),
    "--dp": ("--data-parallel-size", "-dp"),
    "--ep": ("--enable-expert-parallel", "-ep"),
    "--lora": ("--enable-lora",),
    "--eplb": ("--enable-eplb",),
}
"""vLLM's names of an option here."""


def with_own_names(arguments: Sequence[str], options: Collection[str], passes_on: bool) -> list[str]:
    """Arguments with the options' names of the command; those after ``--`` are left alone.

    Args:
        arguments: a command's.
        options: names of the command's options.
        passes_on: the command hands what it does not know to vLLM, which takes its own names only.
    """
    names = {
        other: (vllm[0] if passes_on else own)
        for own, vllm in _VLLM_OPTIONS.items()
        if passes_on or own in options
        for other in ((own,) if passes_on else vllm)
        if other not in options
    }
    found = list(arguments)
    for index, word in enumerate(found):
        if word == "--":
            break
        name, separator, value = word.partition("=")
        found[index] = f"{names.get(name, name)}{separator}{value}"
    return found


_COMMANDS = {
    **dict.fromkeys(("backends", "list", "ls", "patches", "settings"), "status --verbose lists backends and settings"),
    **dict.fromkeys(("devices", "gpus"), "explain --help lists the devices"),
    **dict.fromkeys(("check", "doctor", "health"), "status --check says whether a server would run the plugin"),
    **dict.fromkeys(("benchmark", "measure", "time"), "tune measures for serving, bench beside stock vLLM"),
    **dict.fromkeys(("serve", "run"), "vllm serve MODEL, with the plugin installed"),
    **dict.fromkeys(("compare", "diff"), "ab compares servers, bench kernels"),
    **dict.fromkeys(("show", "why", "plan", "info"), "explain CHECKPOINT says what would run, and why"),
    **dict.fromkeys(("help", "version"), "it is an option: --help, --version"),
}
_OF_ALL_DEVICES = "explain answers for any GPU; this command runs on this machine, without a name of one"
_OPTIONS = {
    **dict.fromkeys(("--device", "--gpu"), _OF_ALL_DEVICES),
    **dict.fromkeys(("--model", "--checkpoint", "--path", "-m"), "the model is given without an option's name"),
    **dict.fromkeys(("--tp", "--dp", "--ep"), "this command has one rank, and reads whole experts"),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "-p", "--pp"),
        "stages of pipeline parallelism hold whole layers: the answer for each is the same without the option",
    ),
    **dict.fromkeys(
        ("--eplb-config", "--speculative-config", "--max-model-len", "--gpu-memory-utilization", "--max-num-seqs"),
        "explain reads no such option of vLLM: leave it out, see --eplb and --draft-moe-backend",
    ),
    "--output": "give --jsonl FILE, --export FILE, or the shell's >",
    "-o": "give --jsonl FILE, --export FILE, or the shell's >",
    "--format": "--json prints JSON",
    "-V": "--version prints the version",
    "--list": "status --verbose lists what there is",
    "--settings": "--set KEY=VALUE, once for each setting",
}


def hint(message: str, command: str, options: Collection[str]) -> str:
    """What was probably meant, after an error of usage; "" where nothing is known.

    Args:
        message: click's.
        command: the command's name; "" before one is known.
        options: names of the command's options.
    """
    if found := re.search(r"No such command '([^']*)'", message):
        return _COMMANDS.get(found[1].lower(), "")
    if found := re.search(r"No such option: (-[\w-]*)", message):
        (name,) = with_own_names([found[1]], _VLLM_OPTIONS, False)
        if name == "--gpu" and "--device" in options:
            return "the option is --device"
        return _OPTIONS.get(name, "")
    if found := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        words = found[1].split()
        named = next((word for word in words if catalog.find_spec(word)), "")
        if named and "--device" in options:
            return f"write --device {shlex.quote(named)}"
        if any(os.path.exists(word) for word in words):
            return f"{command} takes one path; a GPU is named by --device" if "--device" in options else ""
    return ""


def require_a_path(word: str) -> None:
    """Refuses what names something else than a checkpoint.

    Raises:
        CheckpointError: nothing has this path, and it is the name of a layer or a GPU.
    """
    if os.path.exists(word):
        return
    remedy = ""
    if catalog.find_spec(word):
        remedy = "It is a GPU's name, for --device of explain: give a checkpoint"
    elif word.rpartition(":")[2].partition("@")[0] in model_shapes.names():
        remedy = "It names a layer, which tune and bench take: give the model's checkpoint or config.json"
    if remedy:
        raise CheckpointError("no such file or folder", remedy, word)
