"""`explain`: which backend each MoE layer of a checkpoint gets on a machine, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ... import methods
from ...checkpoint.files import read_checkpoint
from ...checkpoint.layer_names import compact_layer_names
from ...checkpoint.moe_layers import MoeLayers
from ...checkpoint.ranks import Ranks
from ...checkpoint.served_layers import Server, decide_layers
from ...checkpoint.serving import is_round_robin
from ...compat import check_release, ignored_env_vars
from ...core.overrides import unused_override_errors
from ...core.problem import Device, Problem
from ...devices import catalog, detect
from ...devices.catalog import known_device_names
from ...errors import LeftToStockError, SettingError, StandDown
from ...measurements.lookup import cache_error, profile_error
from ...measurements.roofline import expert_bytes
from ...measurements.tune_command import tune_command
from ...oracle.backend_names import list_without_effect
from ...oracle.registry import default_registry, describe_load_error
from ...oracle.stock_choice import StockChoice
from ...releases.all2all import DEFAULT_ALL2ALL, all2all_names
from ...releases.models import unbalanced_model
from ...releases.supported import RELEASES, check_platform, packages_of, release_support
from ...settings import AUTO, Settings, env_var, excluded_by_vllm
from ...settings import batch_invariant as batch_invariant_variable
from .. import EXIT_NO_BACKEND, completion, explanation, output
from ..arguments import (
    AdditionalConfig,
    AsJson,
    Assignments,
    BatchInvariant,
    DataParallel,
    Dtype,
    ExpertParallel,
    Quantization,
    TensorParallel,
    command_settings,
    name_option,
)
from ..explanation import vllm_version
from ..layer_groups import LayerGroup, group_layers
from ..usage_hints import require_a_path
from ..writable import why_unwritable_cache, why_unwritable_report

_Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A checkpoint's folder, a bare config.json, or a Hub name in the local cache.", metavar="CHECKPOINT"
    ),
]
_DeviceName = Annotated[
    str,
    name_option(
        f"auto (this machine), {', '.join(known_device_names())}, or a JSON file with at least kind and name, as "
        "status --json prints it. A name, and a file without packages, stands for the newest tested vLLM; short forms "
        "such as h200 and 4090 are known. cpu stands for a machine with AVX2 and enough memory.",
        lambda: ["auto", *known_device_names()],
        "NAME|FILE",
    ),
]
_Release = Annotated[
    str, name_option("A supported release of vLLM instead of the device's own.", lambda: list(RELEASES), "VERSION")
]
_All2All = Annotated[
    str,
    name_option(
        "How data-parallel ranks exchange tokens, as vLLM's --all2all-backend; needs --ep and --dp. "
        f"[default: {DEFAULT_ALL2ALL}]",
        lambda: list(all2all_names(None)),
    ),
]
_Lora = Annotated[bool, typer.Option("--lora", help="LoRA adapters may be applied, as vLLM's --enable-lora.")]
_LoraModules = Annotated[
    list[str] | None,
    typer.Option(help="With --lora: a module that has adapters, as vLLM's option. Repeatable.", metavar="NAME"),
]
_Eplb = Annotated[
    bool, typer.Option("--eplb", help="Experts may move between ranks, as vLLM's --enable-eplb; needs --ep.")
]
_Placement = Annotated[
    str,
    name_option(
        "linear gives each rank consecutive experts, round_robin places them in turn; as vLLM's. Needs --ep.",
        lambda: ["linear", "round_robin"],
    ),
]
_Backend = Annotated[str | None, name_option("Short for --set backend=NAME.", completion.any_backends)]
_DraftBackend = Annotated[
    str,
    name_option(
        "For multi-token-prediction layers, as moe_backend of vLLM's --speculative-config. [default: --moe-backend]",
        completion.vllm_backends,
    ),
]
_Brief = Annotated[
    bool,
    typer.Option(
        "--brief", help="Only the winner of each group of layers, and why; with --json: without rejected candidates."
    ),
]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also name the backends for other kinds of devices.")]


HELP = f"""\
Say which backend each MoE layer of a checkpoint gets, and why.

Reads the checkpoint's config, and of a folder's tensors the headers; needs no GPU, no torch and no vLLM. The row
"why" begins with what decided: user or override (you), measured or predicted times, or the static order. A static
choice that measurements could improve ends with the command that takes the measurements. Layers for multi-token
prediction take the backend of --moe-backend, unless --draft-moe-backend names another.

\b
Examples:
  vllm-moe-oracle explain ~/models/Qwen3-30B-A3B-MXFP8 --device nvidia-h200
  vllm-moe-oracle explain config.json --device h200 --vllm {RELEASES[0]} --brief
  vllm-moe-oracle explain config.json --device h200 --dp 8 --ep --eplb
  vllm-moe-oracle explain ~/models/Qwen3-30B-A3B --quantization mxfp8
  vllm-moe-oracle explain config.json --set 'overrides=re:layers\\.0\\.=marlin'

\b
Exit status:
  0  every group of layers has a backend or is left to stock vLLM; or the whole
     model is left to stock vLLM, since it has no experts or is in a format
     that is not served; also where a note says under which condition a server
     would not start
  2  the input cannot be used; one line on standard error says what and where
  3  a server would not start: a group has no backend, vLLM refuses the
     options for the model, {env_var("strict")} refuses a profile, or the folder
     lacks files that its index names; the table is printed nevertheless, or
     one line on standard error where the ranks cannot share the layers, or
     vLLM refuses the quantization or has the model no more
"""


def command(
    path: _Checkpoint,
    device: _DeviceName = "auto",
    vllm: _Release = "",
    tp: TensorParallel = 1,
    dp: DataParallel = 1,
    ep: ExpertParallel = False,
    all2all_backend: _All2All = "",
    batch_invariant: BatchInvariant = None,
    lora: _Lora = False,
    lora_target_modules: _LoraModules = None,
    eplb: _Eplb = False,
    expert_placement_strategy: _Placement = "linear",
    backend: _Backend = None,
    moe_backend: Annotated[str, name_option("As vLLM's --moe-backend.", completion.vllm_backends)] = AUTO,
    draft_moe_backend: _DraftBackend = "",
    quantization: Quantization = "",
    dtype: Dtype = AUTO,
    additional_config: AdditionalConfig = "",
    assignments: Assignments = None,
    brief: _Brief = False,
    verbose: _Verbose = False,
    as_json: AsJson = False,
) -> None:
    """What `HELP` says."""
    ranks = Ranks(tp, dp, ep, all2all_backend or DEFAULT_ALL2ALL)
    _check_options(path, ranks, eplb, expert_placement_strategy)
    chosen = command_settings(assignments, additional_config, ignore_bad_profile=True, backend=backend)
    machine = _with_vllm(_resolve_device(device), vllm)
    invariant = batch_invariant_variable() if batch_invariant is None else batch_invariant
    server = Server(
        machine,
        chosen,
        ranks,
        moe_backend=moe_backend,
        draft_moe_backend=draft_moe_backend,
        dtype=dtype,
        batch_invariant=invariant,
        lora=lora,
        lora_target_modules=tuple(lora_target_modules or ()),
        eplb=eplb,
        expert_placement_strategy=expert_placement_strategy,
    )
    layers = _find_layers(path, quantization, server)
    notes = [*_device_notes(device, machine), *_check_overrides(chosen, layers)]
    asked = batch_invariant if batch_invariant is not None else invariant or None
    options = {"quantization": quantization, "dtype": dtype}
    measure = tune_command(path, chosen, tp=tp, dp=dp, ep=ep, batch_invariant=asked, **options)
    groups = _group(server, layers, measure)
    notes += _notes(server, layers, groups, all2all_backend)
    unread = [*filter(None, [cache_error(chosen)])]
    if as_json:
        explanation.print_json(groups, layers, [*notes, *unread], machine, brief)
    else:
        for words in unread:
            output.print_message("note", words)
        assumed = bool(vllm) or machine.packages == catalog.default_packages(machine.kind)
        explanation.print_groups(groups, notes, machine, server.ranks, brief, verbose, assumed)
    does_not_start = server.refusal(layers) or server.refused_profile or layers.lacks_files
    if does_not_start or any(group.is_refused for group in groups):
        raise typer.Exit(EXIT_NO_BACKEND)


def _device_notes(word: str, machine: Device) -> Iterator[str]:
    """Says that the answer is for a CPU, where the command line (`word`) does not name one."""
    if word == "auto" and machine.kind == "cpu":
        yield f"this machine has no GPU ({machine.name}): --device h100, or another name, answers for one with a GPU"


def _group(server: Server, layers: MoeLayers, measure: str) -> list[LayerGroup]:
    """The layers by equal decision, those for multi-token prediction last; `measure` is the command that measures
    them."""
    groups = group_layers(decide_layers(server, layers), server, measure)
    if refusal := server.refusal(layers):
        groups = [dataclasses.replace(group, stock=StockChoice(refusal=refusal)) for group in groups]
    if layers.refused:
        groups = [dataclasses.replace(group, gain=None, measure="", refused=layers.refused) for group in groups]
    if not server.settings.enabled or excluded_by_vllm():
        groups = [dataclasses.replace(group, gain=None, measure="", switched_off=True) for group in groups]
    return groups


def _find_layers(path: str, quantization: str, server: Server) -> MoeLayers:
    """The layers of the checkpoint; a note instead of them where all of the model is left to stock vLLM.

    Raises:
        OracleError: the checkpoint cannot be read.
    """
    notes: tuple[str, ...] = ()
    try:
        read = read_checkpoint(Path(path))
        if not os.path.exists(path):
            notes = (f"{path} is read from the local cache of the Hugging Face Hub: {read.path}",)
        layers = server.find_layers(read, quantization)
    except LeftToStockError as error:
        note = f"the model is left to stock vLLM, unaffected by this plugin: {error.rule}. {error.remedy}"
        layers = MoeLayers((), (), {}, "", (note,))
    return dataclasses.replace(layers, notes=(*notes, *layers.notes))


def _notes(server: Server, layers: MoeLayers, groups: list[LayerGroup], all2all_backend: str) -> Iterator[str]:
    """What else is to be known, a paragraph each; `all2all_backend` is the word of the command line, "" without one."""
    yield from layers.notes
    if server.moe_backend != AUTO and layers.unquantized:
        rule = "is for quantized experts; vLLM chooses the kernel of unquantized ones"
        yield f"--moe-backend {server.moe_backend} {rule}"
    if server.draft_moe_backend != server.moe_backend and not layers.mtp_problems:
        rule = "changes nothing here: no quantized experts are for multi-token prediction"
        yield f"--draft-moe-backend {server.draft_moe_backend} {rule}"
    if server.lora_target_modules and not server.lora:
        yield "--lora-target-modules changes nothing here without --lora, as in vLLM without --enable-lora"
    yield from _activation_notes(layers, server.settings)
    if refusal := server.refusal(layers):
        yield f"{refusal}: a server would not start"
    else:
        yield from _parallelism_notes(server.ranks, all2all_backend, groups)
    if server.eplb and (model := unbalanced_model(layers.architectures, vllm_version(server.device))):
        yield f"vLLM does not balance the experts of {model}, a class that is no MixtureOfExperts: --eplb moves none"
    served = [server.serve(each) for each in (*layers.problems, *layers.mtp_problems)]
    yield from _placement_notes(served, server.round_robin)
    yield from _server_notes(server, layers.method, groups)


def _check_options(path: str, ranks: Ranks, eplb: bool, strategy: str) -> None:
    """Refuses options by the names that this command has for them.

    Raises:
        SettingError: the path is empty, the ranks are not possible, or options contradict each other.
    """
    if not path.strip():
        raise SettingError("the path is empty", "Give a checkpoint's folder or its config.json", "CHECKPOINT")
    require_a_path(path)
    ranks.check()
    spread = ranks.spreads_experts
    try:
        is_round_robin(strategy, eplb, spread)
    except SettingError as error:
        add = "Add --ep --tp N or --ep --dp N, with N of 2 or more"
        remedy = "" if spread or "not one of" in error.rule else add
        raise SettingError(error.rule, remedy, f"--{error.where.replace('_', '-')}") from None


def _resolve_device(word: str) -> Device:
    if word == "auto":
        return detect.detect()
    # Not `Path.is_file`, which raises where the current folder may not be entered.
    is_path = word.endswith(".json") or "/" in word or os.path.isfile(word)
    if word not in catalog.known_device_names() and is_path:
        return catalog.load_device(Path(word))
    try:
        return catalog.known_device(word)
    except SettingError as error:
        others = "auto, or a JSON file with at least kind and name, as status --json prints it"
        raise SettingError(error.rule, f"{error.remedy}, {others}", "--device") from None


def _with_vllm(device: Device, version: str) -> Device:
    """The device with another release of vLLM and the packages that it requires.

    Raises:
        SettingError: the release is not a supported one.
    """
    if not version:
        return device
    try:
        check_release(version)
    except StandDown as error:
        raise SettingError(error.rule, "Give one of these releases", "--vllm") from error
    return dataclasses.replace(device, packages={**device.packages, **packages_of(device.kind, version)})


def _placement_notes(problems: Sequence[Problem], round_robin: bool) -> Iterator[str]:
    """Says which layers' experts vLLM places in linear order although round-robin was requested."""
    kept = [problem for problem in problems if problem.parallel.placement == "linear"]
    if round_robin and kept:
        rule = "vLLM places experts round-robin only if they are in several groups and without --eplb; with an "
        rule += "all-to-all, only if it is a batched one"
        yield f"the experts of {compact_layer_names(problem.layer for problem in kept)} stay in linear order: {rule}"


def _parallelism_notes(ranks: Ranks, all2all_backend: str, groups: list[LayerGroup]) -> Iterator[str]:
    """Says which options of parallelism change nothing, and what an all-to-all changes.

    Args:
        ranks: the options.
        all2all_backend: the word of the command line; "" without one.
        groups: the layers.
    """
    if ranks.ep and not ranks.spreads_experts:
        yield "--ep changes nothing here: there is one rank (--tp and --dp are 1)"
    if all2all_backend and not ranks.exchanges_tokens:
        rule = "vLLM uses it only with expert parallelism over data-parallel ranks: --ep with --dp of 2 or more"
        yield f"--all2all-backend {all2all_backend} changes nothing here: {rule}"
        return
    if all2all_backend and all2all_backend != ranks.all2all:
        rule = f"this all-to-all was removed; vLLM takes {ranks.all2all} instead, with a warning"
        yield f"--all2all-backend {all2all_backend}: {rule}"
    if not ranks.exchanges_tokens:
        return
    if ranks.all2all != DEFAULT_ALL2ALL:
        chosen = [default_registry()[group.decision.backend] for group in groups if group.decision is not None]
        for name in sorted({each.stock_class_name for each in chosen if each.stock_class_name}):
            rule = f"a server asks vLLM's {name} whether it runs with {ranks.all2all}"
            yield f"{rule}; if not, the next accepted candidate that needs no name runs the layers, or stock vLLM"


def _activation_notes(layers: MoeLayers, settings: Settings) -> Iterator[str]:
    """Says that activations are not what the checkpoint declares, where a setting asks for others."""
    asked = settings.activations
    declared = sorted({problem.scheme.activations for problem in (*layers.problems, *layers.mtp_problems)} - {asked})
    if asked != "checkpoint" and declared:
        source = settings.source("activations")
        yield f"activations are {asked} by {source}, the checkpoint declares {' and '.join(declared)}"


def _check_overrides(settings: Settings, layers: MoeLayers) -> Iterator[str]:
    """Says which settings of the environment would change nothing, as a misspelled name and a stale expression do.

    Raises:
        SettingError: another place has such a setting, or a strict server would not start.
    """
    found = [problem.layer for problem in (*layers.problems, *layers.mtp_problems)]
    source = settings.source("overrides")
    for error in unused_override_errors(settings.overrides, found, source, found, compact_layer_names(found)):
        if settings.strict or not source.startswith("environment"):
            raise error
        yield f"{error}; a server warns, and starts"


def _server_notes(server: Server, method: str, groups: list[LayerGroup]) -> Iterator[str]:
    """Why a server would not do what this answer says, where that is known."""
    settings, device = server.settings, server.device
    yield from _group_notes(groups)
    yield from _memory_notes(groups, device)
    for name, reason in default_registry().load_errors.items():
        yield describe_load_error(name, reason)
    if unwritable := why_unwritable_report(settings):
        yield f"{unwritable}; a server warns, and starts"
    moe_backend = server.moe_backend if server.moe_backend != AUTO else server.draft_moe_backend
    for words in list_without_effect(settings, moe_backend, default_registry()):
        yield f"{words}; a server warns, and starts"
    if unused := profile_error(settings):
        yield f"{unused}{'; a strict server would not start' if server.refused_profile else ''}"
    if (
        settings.measure_at_start
        and device.kind == "cuda"
        and any(group.measure and not group.problem.batch_invariant for group in groups)
    ):
        if unwritable := why_unwritable_cache(settings):
            yield f"a server would not measure at its start, since the cache cannot be written: {unwritable}"
        elif server.ranks.total > 1 and (reason := settings.why_ranks_do_not_measure):
            yield f"a server would not measure at its start: {reason}"
        else:
            words = f"a server measures for up to {settings.measure_at_start:g} s, and keeps the times"
            off = f"{env_var('measure_at_start')}=0 switches it off"
            yield f"at its first start {words}: the choice may change then ({off})"
    if not settings.enabled:
        yield f"the plugin is switched off by {settings.source('enabled')}: vLLM would choose by itself"
        return
    yield from _registration_notes(settings, method, groups, device)


def _group_notes(groups: list[LayerGroup]) -> Iterator[str]:
    """What a server does with a group of layers that has a degraded decision, or none."""
    for group in groups:
        if group.decision is not None and group.decision.degraded:
            yield f"{group.layers}: {group.decision.explanation}"
        if group.outcome.left_to_stock and group.problem.lora:
            rule = "a server leaves layers with LoRA adapters that no backend here runs to stock vLLM, with a warning"
            yield f"{group.layers}: {rule}; with --lora-target-modules that name no experts, a backend runs them"


def _memory_notes(groups: list[LayerGroup], device: Device) -> Iterator[str]:
    """Whether the experts alone are larger than the device."""
    gib = (
        sum(
            expert_bytes(each.problem) * each.problem.local_experts * len(each.names)
            for each in groups
            if not each.is_mtp
        )
        / 2**30
    )
    if gib > device.memory_gib > 0:
        rule = f"the experts alone take {gib:.0f} GiB of each rank, and {device.name} has {device.memory_gib:.0f} GiB"
        if device.kind == "cpu":
            yield f"{rule}: a server does not fit, and kernels that compute in 16 bits take more"
            return
        ways = "--tp N or --dp N, or the stages of pipeline parallelism, of which this says nothing"
        yield f"{rule}: a server needs more ranks ({ways})"


def _registration_notes(settings: Settings, method: str, groups: list[LayerGroup], device: Device) -> Iterator[str]:
    """Why the plugin would not be registered, or not for these layers."""
    try:
        check_platform(device.kind, device.name)
        if (vllm := vllm_version(device)) is not None:
            check_release(vllm, settings.force)
            if not (support := release_support(vllm)).tested:
                yield str(support)
    except StandDown as error:
        if not groups or any(str(error) not in group.outcome.failure for group in groups):
            yield f"the plugin would stand down, and vLLM choose by itself: {error}"
    yield from ignored_env_vars.ignored_variables().values()
    if excluding := excluded_by_vllm():
        yield f"the plugin is {excluding}: vLLM would choose by itself"
    schemes = {group.problem.scheme.name for group in groups if group.decision}
    for scheme in sorted(schemes.difference(methods.served_schemes().get(method, ()))):
        yield f"the plugin does not serve {scheme} in vLLM's {method} checkpoints: vLLM would choose by itself"
    if method == "inc" and "wna16" in schemes and device.kind == "cpu":
        yield "on a CPU vLLM takes AutoRound's integer experts for unquantized ones, and does not load them"
