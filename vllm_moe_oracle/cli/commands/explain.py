"""`explain`: which backend each MoE layer of a checkpoint gets on a machine, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from ... import checkpoint, methods
from ...checkpoint import MoeLayers
from ...checkpoint.layer_names import compact_layer_names
from ...checkpoint.ranks import Ranks
from ...checkpoint.serving import as_served, is_round_robin
from ...compat import check_platform, check_release, ignored_env_vars
from ...core.lora import targets_experts
from ...core.overrides import unmatched_override_error, unmatched_overrides
from ...core.problem import Device, Problem
from ...devices import catalog, detect
from ...devices.catalog import known_device_names
from ...errors import LeftToStockError, SettingError, StandDown
from ...measurements.lookup import cache_error, profile_error
from ...measurements.roofline import expert_bytes
from ...measurements.tune_command import tune_command
from ...oracle.registry import default_registry
from ...oracle.selection import check_backend_names
from ...releases.all2all import DEFAULT_ALL2ALL, all2all_names, effective_all2all, why_vllm_refuses
from ...releases.supported import NEWEST, RELEASES
from ...settings import AUTO, Settings, excluded_by_vllm
from ...settings import batch_invariant as batch_invariant_variable
from .. import EXIT_NO_BACKEND, completion, explanation, output
from ..arguments import (
    AsJson,
    Assignments,
    BatchInvariant,
    DataParallel,
    ExpertParallel,
    Quantization,
    TensorParallel,
    command_settings,
)
from ..explanation import vllm_version
from ..layer_groups import STOCK_ITSELF, LayerGroup, group_layers
from ..usage_hints import require_a_path


# More than 80 lines: one parameter for each option, and the help text. The steps are functions below.
def command(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's folder, a bare config.json, or a Hub name in the local cache.", metavar="CHECKPOINT"
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help=f"auto (this machine), {', '.join(known_device_names())}, or a JSON file with at least "
            "kind and name: status --json prints one. A name stands for the newest tested vLLM; short forms such as "
            "h200 and 4090 are known. cpu stands for a machine with AVX2 and enough memory.",
            metavar="NAME|FILE",
            autocompletion=lambda: ["auto", *known_device_names()],
        ),
    ] = "auto",
    vllm: Annotated[
        str,
        typer.Option(
            "--vllm",
            help="A supported release of vLLM instead of the device's own.",
            metavar="VERSION",
            autocompletion=lambda: list(RELEASES),
        ),
    ] = "",
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    ep: ExpertParallel = False,
    all2all_backend: Annotated[
        str,
        typer.Option(
            help="How data-parallel ranks exchange tokens, as vLLM's --all2all-backend; needs --ep and --dp. "
            f"[default: {DEFAULT_ALL2ALL}]",
            metavar="NAME",
            autocompletion=lambda: list(all2all_names(None)),
        ),
    ] = "",
    batch_invariant: BatchInvariant = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="LoRA adapters may be applied, as vLLM's --enable-lora.")
    ] = False,
    lora_target_modules: Annotated[
        list[str] | None,
        typer.Option(help="With --lora: a module that adapters are for, as vLLM's; may be repeated.", metavar="NAME"),
    ] = None,
    eplb: Annotated[
        bool, typer.Option("--eplb", help="Experts may move between ranks, as vLLM's --enable-eplb; needs --ep.")
    ] = False,
    expert_placement_strategy: Annotated[
        str,
        typer.Option(
            help="linear gives each rank neighbors, round_robin places experts round-robin; as vLLM's. Needs --ep.",
            metavar="NAME",
            autocompletion=lambda: ["linear", "round_robin"],
        ),
    ] = "linear",
    backend: Annotated[
        str | None,
        typer.Option(
            help="As the setting backend: --set backend=NAME.", metavar="NAME", autocompletion=completion.any_backends
        ),
    ] = None,
    moe_backend: Annotated[
        str,
        typer.Option(help="As vLLM's --moe-backend.", metavar="NAME", autocompletion=completion.vllm_backends),
    ] = "auto",
    quantization: Quantization = "",
    assignments: Assignments = None,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="Only the winner of each group of layers, and why; with --json: without rejected candidates.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also name the backends for other kinds of devices.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which backend each MoE layer of a checkpoint gets, and why.

    Reads the checkpoint's config only; needs no GPU, no torch and no vLLM. The row "why" begins with what decided:
    user or override (you), measured or predicted times, or the static order. A static choice that measurements could
    improve ends with the command that takes them.

    \b
    Examples:
      vllm-moe-oracle explain ~/models/Qwen3-30B-A3B-MXFP8 --device nvidia-h200
      vllm-moe-oracle explain config.json --device h200 --vllm 0.29.0 --brief
      vllm-moe-oracle explain config.json --device h200 --dp 8 --ep --eplb
      vllm-moe-oracle explain ~/models/Qwen3-30B-A3B --quantization mxfp8
      vllm-moe-oracle explain config.json --set 'overrides=re:layers\\.0\\.=marlin'

    \b
    Exit status:
      0  every group of layers has a backend or is left to stock vLLM, or all of
         the model is: it has no experts, or is in a format that is not served
      3  a group has none, and a server would not start; the table is printed all
         the same
      2  the input cannot be used; one line on standard error says what and where
    """
    round_robin = _check_options(path, Ranks(tp, dp, ep), eplb, expert_placement_strategy)
    chosen = command_settings(assignments, ignore_bad_profile=True, backend=backend)
    moe_backend = moe_backend.lower().replace("-", "_")  # as vLLM reads it
    check_backend_names(chosen, moe_backend)
    machine = _with_vllm(_resolve_device(device), vllm)
    release = vllm_version(machine)
    ranks = Ranks(tp, dp, ep, effective_all2all(all2all_backend or DEFAULT_ALL2ALL, release))
    cached = []
    try:
        read = checkpoint.read_checkpoint(Path(path))
        if not os.path.exists(path):
            cached = [f"{path} is read from the local cache of the Hugging Face Hub: {read.path}"]
        layers = checkpoint.find_moe_layers(
            read, tp, ep, chosen.ragged_shards, quantization.lower(), release, dp, ranks.all2all
        )
    except LeftToStockError as error:
        note = f"the model is left to stock vLLM, unaffected by this plugin: {error.rule}. {error.remedy}"
        layers = MoeLayers((), (), {}, "", (note,))
    _check_overrides_match(chosen, layers)
    invariant = batch_invariant_variable() if batch_invariant is None else batch_invariant
    model, mtp = (
        [
            as_served(
                problem,
                chosen,
                lora and (not lora_target_modules or targets_experts(lora_target_modules, problem.layer)),
                eplb,
                invariant,
                round_robin,
            )
            for problem in problems
        ]
        for problems in (layers.problems, layers.mtp_problems)
    )
    measure = tune_command(
        path,
        chosen,
        tp=tp,
        dp=dp,
        ep=ep,
        quantization=quantization,
        batch_invariant=batch_invariant if batch_invariant is not None else invariant or None,
    )
    groups = group_layers(model, machine, chosen, moe_backend, ranks.all2all, measure)
    drafts = group_layers(mtp, machine, chosen, moe_backend, ranks.all2all, measure)
    groups += [dataclasses.replace(group, is_mtp=True) for group in drafts]
    if layers.refused:
        groups = [dataclasses.replace(group, gain=None, measure="", refused=layers.refused) for group in groups]
    if moe_backend != AUTO and layers.unquantized:
        rule = f"--moe-backend {moe_backend} is for quantized experts; vLLM chooses the kernel of unquantized ones"
        layers = dataclasses.replace(layers, notes=(*layers.notes, rule))
    placement = _placement_notes((*model, *mtp), round_robin)
    parallelism = _parallelism_notes(ranks, all2all_backend, groups, machine)
    server = _server_notes(chosen, layers.method, groups, machine)
    elsewhere = f"this machine has no GPU ({machine.name}): --device h100, or another name, answers for one that has"
    notes = [
        *([elsewhere] if device == "auto" and machine.kind == "cpu" else []),
        *cached,
        *layers.notes,
        *_activation_notes(layers, chosen),
        *parallelism,
        *placement,
        *server,
    ]
    unread = [each for each in [cache_error(chosen)] if each]
    if as_json:
        explanation.print_json(groups, layers, [*notes, *unread], machine, brief)
    else:
        for words in unread:
            output.print_message("note", words)
        assumed = bool(vllm) or catalog.find_spec(device) is not None
        explanation.print_groups(groups, notes, machine, ranks, brief, verbose, assumed)
    if any(group.decision is None and not group.left_to_stock for group in groups):
        raise typer.Exit(EXIT_NO_BACKEND)


def _check_options(path: str, ranks: Ranks, eplb: bool, strategy: str) -> bool:
    """Whether vLLM is asked to place experts round-robin.

    Raises:
        SettingError: the path is empty, the ranks are not possible, or options contradict each other.
    """
    if not path.strip():
        raise SettingError("the path is empty", "Give a checkpoint's folder or its config.json", "CHECKPOINT")
    require_a_path(path)
    ranks.check()
    spread = ranks.spreads_experts
    try:
        return is_round_robin(strategy, eplb, spread)
    except SettingError as error:
        add = "Add --ep --tp N or --ep --dp N, with N of 2 or more"
        remedy = "" if spread or "not one of" in error.rule else add
        raise SettingError(error.rule, remedy, f"--{error.where.replace('_', '-')}") from None


def _resolve_device(word: str) -> Device:
    if word == "auto":
        return detect.detect()
    if word not in catalog.known_device_names() and (word.endswith(".json") or "/" in word or Path(word).is_file()):
        return catalog.load_device(Path(word))
    try:
        return catalog.known_device(word)
    except SettingError as error:
        others = "auto, or a JSON file with at least kind and name, as status --json prints it"
        raise SettingError(error.rule, f"{error.remedy}, {others}", "--device") from None


def _with_vllm(device: Device, version: str) -> Device:
    """The device with another release of vLLM; its other packages stay.

    Raises:
        SettingError: the release is not a supported one.
    """
    if not version:
        return device
    try:
        check_release(version)
    except StandDown as error:
        rule = f"{version!r} is not a supported release of vLLM: {error.rule}"
        raise SettingError(rule, f"Supported are {RELEASES[0]} to {NEWEST}", "--vllm") from error
    return dataclasses.replace(device, packages={**device.packages, "vllm": str(Version(version))})  # without a "v"


def _placement_notes(problems: Sequence[Problem], round_robin: bool) -> Iterator[str]:
    """Says which layers' experts vLLM places in linear order although round-robin was requested."""
    kept = [problem for problem in problems if problem.parallel.placement == "linear"]
    if round_robin and kept:
        rule = "vLLM places experts round-robin only if they are in several groups, without --eplb, and where an "
        rule += "all-to-all runs, only with a batched one"
        yield f"the experts of {compact_layer_names(problem.layer for problem in kept)} stay in order: {rule}"


def _parallelism_notes(ranks: Ranks, all2all_backend: str, groups: list[LayerGroup], device: Device) -> Iterator[str]:
    """Says which options of parallelism change nothing, and what an all-to-all changes.

    Args:
        ranks: the options.
        all2all_backend: the word of the command line; "" without one.
        groups: the layers.
        device: the machine.
    """
    if ranks.ep and not ranks.spreads_experts:
        yield "--ep changes nothing here: there is one rank (--tp and --dp are 1)"
    if refusal := why_vllm_refuses(ranks.all2all, device.kind, ranks.exchanges_tokens, ranks.dp):
        yield f"{refusal}: a server would not start"
        return
    if all2all_backend and not ranks.exchanges_tokens:
        rule = "vLLM uses it with expert parallelism over data-parallel ranks: --ep with --dp of 2 or more"
        yield f"--all2all-backend {all2all_backend} changes nothing here: {rule}"
        return
    if all2all_backend and all2all_backend != ranks.all2all:
        rule = f"this all-to-all was removed; vLLM takes {ranks.all2all} instead, with a warning"
        yield f"--all2all-backend {all2all_backend}: {rule}"
    if not ranks.exchanges_tokens:
        return
    for group in groups:
        if group.decision is None and group.problem.parallel.is_batched and group.left_to_stock == STOCK_ITSELF:
            rule = f"{ranks.all2all} delivers tokens by expert, which few backends take"
            yield f"{group.layers}: {rule}; a server leaves layers that none runs to stock vLLM, if that can"
    if ranks.all2all != DEFAULT_ALL2ALL:
        chosen = [default_registry()[group.decision.backend] for group in groups if group.decision is not None]
        for name in sorted({each.stock_class_name for each in chosen if each.stock_class_name}):
            rule = f"a server asks vLLM's {name} whether it runs with {ranks.all2all}"
            yield f"{rule}; if not, the next accepted candidate runs the layers"


def _activation_notes(layers: MoeLayers, settings: Settings) -> Iterator[str]:
    """Says that activations are not what the checkpoint declares, where a setting asks for others."""
    asked = settings.activations
    declared = sorted({problem.scheme.activations for problem in (*layers.problems, *layers.mtp_problems)} - {asked})
    if asked != "checkpoint" and declared:
        source = settings.source("activations")
        yield f"activations are {asked} by {source}, the checkpoint declares {' and '.join(declared)}"


def _check_overrides_match(settings: Settings, layers: MoeLayers) -> None:
    """Refuses settings that would change nothing, which a misspelled name and a stale expression both do."""
    found = [problem.layer for problem in (*layers.problems, *layers.mtp_problems)]
    for override in unmatched_overrides(settings.overrides, found):
        raise unmatched_override_error(override, found, settings.source("overrides"), compact_layer_names(found))


def _server_notes(settings: Settings, method: str, groups: list[LayerGroup], device: Device) -> Iterator[str]:
    """Why a server would not do what this answer says, where that is known."""
    for group in groups:
        if group.decision is not None and group.decision.degraded:
            yield f"{group.layers}: {group.decision.explanation}"
        if group.left_to_stock and group.problem.lora:
            rule = "a server leaves layers with LoRA adapters that no backend here runs to stock vLLM, with a warning"
            remedy = "--lora-target-modules without experts in it lets these layers be served without LoRA"
            yield f"{group.layers}: {rule}; stock's class refuses what it cannot read; {remedy}"
    gib = (
        sum(
            expert_bytes(each.problem) * each.problem.local_experts * len(each.names)
            for each in groups
            if not each.is_mtp
        )
        / 2**30
    )
    if device.kind == "cuda" and gib > device.memory_gib > 0:
        rule = f"the experts alone take {gib:.0f} GiB of each rank, and {device.name} has {device.memory_gib:.0f} GiB"
        yield f"{rule}: a server needs more ranks (--tp, --ep, or pipeline parallelism)"
    for name, reason in default_registry().load_errors.items():
        yield f"the backend of the entry point {name} could not be loaded: {reason}"
    if unused := profile_error(settings):
        yield f"{unused}{'; a strict server would not start' if settings.strict else ''}"
    if (
        settings.measure_at_start
        and device.kind == "cuda"
        and any(group.measure and not group.problem.batch_invariant for group in groups)
    ):
        words = f"at its first start a server measures for up to {settings.measure_at_start:g} s, and keeps the times"
        yield f"{words}: the choice may change then (measure_at_start=0 switches it off)"
    if not settings.enabled:
        yield f"the plugin is switched off by {settings.source('enabled')}: vLLM would choose by itself"
        return
    try:
        check_platform(device.kind, device.name)
        if (vllm := vllm_version(device)) is not None:
            check_release(vllm, settings.force)
    except StandDown as error:
        yield f"the plugin would stand down, and vLLM choose by itself: {error}"
    yield from ignored_env_vars.ignored_variables().values()
    if excluding := excluded_by_vllm():
        yield f"the plugin is {excluding}: vLLM would choose by itself"
    schemes = {group.problem.scheme.name for group in groups if group.decision}
    for scheme in sorted(schemes.difference(methods.served_schemes().get(method, ()))):
        yield f"the plugin does not serve {scheme} in vLLM's {method} checkpoints yet: vLLM would choose by itself"
    if method == "inc" and "wna16" in schemes and device.kind == "cpu":
        yield "on a CPU vLLM takes AutoRound's integer experts for unquantized ones, and does not load them"
