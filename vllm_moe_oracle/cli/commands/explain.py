"""`explain`: which backend each MoE layer of a checkpoint gets on a machine, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import checkpoint, methods
from ...checkpoint import MoeLayers
from ...checkpoint.layer_names import compact_layer_names
from ...checkpoint.serving import as_served, is_round_robin
from ...compat import check_release, ignored_env_vars
from ...core.decision import Candidate, Decision
from ...core.lora import targets_experts
from ...core.measurement_set import MeasurementSet
from ...core.overrides import unmatched_override_error, unmatched_overrides
from ...core.problem import Device, Problem
from ...core.sharding import describe_loaded_group
from ...devices import catalog, detect
from ...devices.catalog import known_device_names
from ...devices.detect import installed_packages
from ...errors import NoBackendError, SettingError, StandDown
from ...measurements import lookup
from ...measurements.lookup import profile_error
from ...measurements.roofline import expert_bytes
from ...oracle.registry import default_registry
from ...oracle.selection import check_backend_names, decide
from ...oracle.stock_kernels import stock_candidate
from ...releases.supported import NEWEST, RELEASES
from ...settings import AUTO, Settings, excluded_by_vllm
from ...settings import batch_invariant as batch_invariant_variable
from .. import EXIT_NO_BACKEND, output
from ..arguments import AsJson, Assignments, ExpertParallel, TensorParallel, command_settings


# More than 80 lines: one parameter for each option, and the help text. The steps are functions below.
def command(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's folder, a bare config.json, or a Hub name in the local cache.", metavar="PATH"
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help=f"auto (this machine), {', '.join(known_device_names())}, or a JSON file with at least "
            "kind and name: status --json prints one. A name stands for the newest tested vLLM.",
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
    ep: ExpertParallel = False,
    batch_invariant: Annotated[
        bool | None,
        typer.Option("--batch-invariant/--no-batch-invariant", help="By default VLLM_BATCH_INVARIANT as it is here."),
    ] = None,
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
        ),
    ] = "linear",
    backend: Annotated[
        str | None, typer.Option(help="As the setting backend: --set backend=NAME.", metavar="NAME")
    ] = None,
    moe_backend: Annotated[str, typer.Option(help="As vLLM's --moe-backend.", metavar="NAME")] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="As vLLM's --quantization, e.g. mxfp8 for a checkpoint in 16 bits, moe_wna16 for GPTQ or AWQ.",
            metavar="NAME",
        ),
    ] = "",
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Say which backend each MoE layer of a checkpoint gets, and why.

    Reads the checkpoint's config only; needs no GPU, no torch and no vLLM.

    \b
    Examples:
      vllm-moe-oracle explain ~/models/Qwen3-30B-A3B-MXFP8 --device nvidia-h200
      vllm-moe-oracle explain config.json --device nvidia-h200 --vllm 0.29.0 --tp 2
      vllm-moe-oracle explain ~/models/Qwen3-30B-A3B --quantization mxfp8 --device nvidia-h200
      vllm-moe-oracle explain config.json --set 'overrides=re:layers\\.[0-9]\\.=emulation' --json

    \b
    Exit status:
      0  every group of layers has a backend, or is left to stock vLLM
      3  a group has none; the table is printed all the same
      2  the input cannot be used; one line on standard error says what and where
    """
    round_robin = _check_options(path, tp, ep, eplb, expert_placement_strategy)
    chosen = command_settings(
        [*(assignments or []), *([] if backend is None else [f"backend={backend}"])], ignore_bad_profile=True
    )
    moe_backend = moe_backend.lower().replace("-", "_")  # as vLLM reads it
    check_backend_names(chosen, moe_backend)
    machine = _with_vllm(_resolve_device(device), vllm)
    read = checkpoint.read_checkpoint(Path(path))
    layers = checkpoint.find_moe_layers(
        read,
        tp,
        ep,
        chosen.ragged_shards,
        quantization.lower(),
        _vllm_version(machine),
    )
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
    groups = _group_layers(model, machine, chosen, moe_backend)
    drafts = _group_layers(mtp, machine, chosen, moe_backend)
    groups += [dataclasses.replace(group, is_mtp=True) for group in drafts]
    if moe_backend != AUTO and layers.unquantized:
        rule = f"--moe-backend {moe_backend} is for quantized experts; vLLM chooses the kernel of unquantized ones"
        layers = dataclasses.replace(layers, notes=(*layers.notes, rule))
    placement = _placement_notes((*model, *mtp), round_robin)
    server = _server_notes(chosen, layers.method, groups, machine)
    cached = f"{path} is read from the local cache of the Hugging Face Hub: {read.path}"
    notes = [
        *([] if os.path.exists(path) else [cached]),
        *layers.notes,
        *_activation_notes(layers, chosen),
        *placement,
        *server,
    ]
    if as_json:
        _print_json(groups, layers, notes, machine)
    else:
        _print(groups, notes, machine, tp, ep, assumed=bool(vllm) or device in known_device_names())
    if any(group.decision is None and not group.stock_class for group in groups):
        raise typer.Exit(EXIT_NO_BACKEND)


def _check_options(path: str, tp: int, ep: bool, eplb: bool, strategy: str) -> bool:
    """Whether vLLM is asked to place experts round-robin.

    Raises:
        SettingError: the path is empty, the ranks are not possible, or options contradict each other.
    """
    if not path.strip():
        raise SettingError("the path is empty", "Give a checkpoint's folder or its config.json", "PATH")
    if tp < 1:
        raise SettingError(f"{tp} ranks are not possible", "Give 1 or more", "--tp")
    try:
        return is_round_robin(strategy, eplb, ep and tp > 1)
    except SettingError as error:
        remedy = "" if (ep and tp > 1) or "not one of" in error.rule else "Add --ep --tp N with N of 2 or more"
        raise SettingError(error.rule, remedy, f"--{error.where.replace('_', '-')}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerGroup:
    """Equal layers with equal decisions.

    Attributes:
        names: the layers' names.
        problem: the first layer's.
        decision: the first layer's; None when no backend can run it.
        failure: why there is no decision; "" when there is one.
        candidates: every backend, with its verdict.
        stock_class: stock vLLM's class that the layers are left to; "" where a backend runs them, or nothing does.
        is_mtp: the layers are multi-token prediction modules, which vLLM loads as a model of their own for speculative
            decoding.
    """

    names: tuple[str, ...]
    problem: Problem
    decision: Decision | None
    failure: str
    candidates: tuple[Candidate, ...]
    stock_class: str = ""
    is_mtp: bool = False

    @property
    def layers(self) -> str:
        return compact_layer_names(self.names)

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "count": len(self.names),
            "is_mtp": self.is_mtp,
            "problem": self.problem,
            "decision": None if self.decision is None else self.decision.to_record(),
            "failure": self.failure or None,
            "left_to_stock": self.stock_class or None,
            "candidates": [candidate.to_record() for candidate in self.candidates],
        }


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
    return dataclasses.replace(device, packages={**device.packages, "vllm": version})


def _placement_notes(problems: Sequence[Problem], round_robin: bool) -> Iterator[str]:
    """Says which layers' experts vLLM places in linear order although round-robin was requested."""
    kept = [problem for problem in problems if problem.parallel.placement == "linear"]
    if round_robin and kept:
        rule = "vLLM places experts round-robin only if they are in several groups, without --eplb"
        yield f"the experts of {compact_layer_names(problem.layer for problem in kept)} stay in order: {rule}"


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


def _group_layers(problems: list[Problem], device: Device, settings: Settings, moe_backend: str) -> list[_LayerGroup]:
    """Layers by equal problem and equal outcome, in the order of their first layer."""
    groups: dict[object, _LayerGroup] = {}
    evidence: dict[Problem, MeasurementSet | None] = {}
    for problem in problems:
        decision, failure, stock_class = None, "", ""
        if problem.key() not in evidence:
            evidence[problem.key()] = lookup.find_measurements(problem, device, settings)
        try:
            decision = decide(problem, device, settings, moe_backend, measurements=evidence[problem.key()])
            judged = decision.candidates
        except NoBackendError as error:
            judged = error.candidates
            scheme = problem.scheme.name
            # The error's further lines are the table, which is printed anyway.
            failure = error.rule.split("\n")[0] if judged else f"this release has no backend for {scheme} experts yet"
            if judged and error.remedy:
                failure = f"{failure}. {error.remedy}"
            stock = None
            if moe_backend == AUTO and not _names_backends(settings):
                stock = stock_candidate(judged, device, default_registry())
            if stock is not None:
                stock_class = default_registry()[stock.backend].stock_class_name
                objections = "; ".join(map(str, stock.reasons))
                failure = (
                    f"left to stock vLLM, whose {stock_class} does not ask what {stock.backend} does: {objections}"
                )
        same = decision and dataclasses.replace(decision, problem=problem.key())
        key = (problem.key(), same, failure)
        before = groups.get(key, _LayerGroup((), problem, decision, failure, judged, stock_class))
        groups[key] = dataclasses.replace(before, names=(*before.names, problem.layer))
    return list(groups.values())


def _names_backends(settings: Settings) -> bool:
    """Whether the user names backends to run or not to run; layers that they cannot run are not left to stock vLLM."""
    named = settings.backend != AUTO or settings.overrides or settings.disable
    return bool(named) and settings.on_unavailable != "fallback"


def _server_notes(settings: Settings, method: str, groups: list[_LayerGroup], device: Device) -> Iterator[str]:
    """Why a server would not do what this answer says, where that is known."""
    for group in groups:
        if group.decision is not None and group.decision.degraded:
            yield f"{group.layers}: {group.decision.explanation}"
        if group.decision is None and group.problem.lora and not _names_backends(settings):
            rule = "a server leaves layers with LoRA adapters that no backend here runs to stock vLLM, with a warning"
            remedy = "--lora-target-modules without experts in it lets these layers be served without LoRA"
            yield f"{group.layers}: {rule}; stock's class refuses what it cannot read; {remedy}"
    for name, reason in default_registry().load_errors.items():
        yield f"the backend of the entry point {name} could not be loaded: {reason}"
    if unused := profile_error(settings):
        yield f"{unused}{'; a strict server would not start' if settings.strict else ''}"
    if not settings.enabled:
        yield f"the plugin is switched off by {settings.source('enabled')}: vLLM would choose by itself"
        return
    if device.kind in ("rocm", "xpu"):
        rule = f"no backend knows {device.name}'s own kernels for these formats"
        yield f"the plugin would stand down, and vLLM choose by itself: {rule}"
    if (vllm := _vllm_version(device)) is not None:
        try:
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


def _vllm_version(device: Device) -> str | None:
    """The vLLM that the answer is for: the machine's, else the one that is installed here."""
    return device.packages.get("vllm") or installed_packages().get("vllm")


def _print_json(groups: list[_LayerGroup], layers: MoeLayers, notes: list[str], device: Device) -> None:
    """JSON to standard output; failures and notes, which it has too, to standard error."""
    left: list[tuple[str | None, tuple[str, ...]]] = [(None, layers.unquantized)] if layers.unquantized else []
    for format in dict.fromkeys(layers.unsupported_formats.values()):
        left.append((format, tuple(name for name, other in layers.unsupported_formats.items() if other == format)))
    output.print_json(
        {
            "vllm": _vllm_version(device),
            "device": device,
            "groups": [each.to_json() for each in groups],
            "left_to_stock": [
                {"format": format, "layers": compact_layer_names(names), "count": len(names)} for format, names in left
            ],
            "notes": notes,
        }
    )
    for group in groups:
        if group.decision is None:
            output.print_message("note" if group.stock_class else "error", f"{group.layers}: {group.failure}")
    for note in notes:
        output.print_message("note", note)


def _print(
    groups: list[_LayerGroup], notes: list[str], device: Device, tp: int, ep: bool, assumed: bool = False
) -> None:
    vllm = _vllm_version(device)
    ranks = "one rank" if tp == 1 else f"{'expert' if ep else 'tensor'} parallelism over {tp} ranks"
    release = f"vLLM {vllm}" if vllm else "vLLM not installed"
    if assumed and device.kind == "cuda":
        release += " with its kernel packages (assumed)"
    output.show(f"{device}, {release}, {ranks}")
    for group in groups:
        count = "1 layer" if len(group.names) == 1 else f"{len(group.names)} layers"
        role = ", for multi-token prediction" if group.is_mtp else ""
        output.show(f"\n{count}: {group.layers}{role}", output.key_value_table(_decision_rows(group)))
        if group.candidates:
            times = _format_times(group.decision)
            last = "reasons, or microseconds by tokens" if times else "reasons"
            rows = _candidate_rows(group, times)
            chosen = [index for index, row in enumerate(rows) if row[1] == _CHOSEN]
            output.show("", output.table(("candidate", "verdict", last), rows, indent=2, marked=chosen))
    for note in notes:
        output.show(f"\nnote: {note}")


def _decision_rows(group: _LayerGroup) -> list[tuple[str, str]]:
    rows = [("layer", str(group.problem))]
    if group.decision is None:
        return [*rows, ("backend", "stock vLLM's" if group.stock_class else "none"), ("why", group.failure)]
    decision = group.decision
    plan = decision.plan
    notes = [note for note in (*plan.notes, describe_loaded_group(group.problem)) if note]
    if tiles := sum(bool(tile) for _, tile in plan.tiles):
        notes.append(f"tile configurations that were measured, at {tiles} numbers of tokens")
    sizes = f"hidden {plan.hidden_size}, intermediate {plan.intermediate_size}"
    rows += [
        ("backend", decision.backend),
        ("why", f"{decision.why}: {decision.explanation}"),
        ("numerics", str(decision.numerics)),
        ("sizes", f"{sizes}: {'; '.join(notes) or 'not padded'}"),
    ]
    if decision.token_ranges:
        rows.append(("token ranges", _describe_token_ranges(group)))
    return rows


def _describe_token_ranges(group: _LayerGroup) -> str:
    """Which backend runs up to how many tokens, and what memory a second copy of the weights takes."""
    assert group.decision is not None
    problem, steps = group.problem, group.decision.token_ranges
    words = [f"{step.backend} {f'up to {step.max_tokens} tokens' if step.max_tokens else 'beyond'}" for step in steps]
    if len({group.decision.candidate(step.backend).answers.layout for step in steps}) == 1:
        return f"{', '.join(words)}; over the same weights"
    mib = expert_bytes(problem) * problem.local_experts / 2**20
    count = len(group.names)
    return (
        f"{', '.join(words)}; a second copy of the weights: about {mib:.0f} MiB a layer, {mib * count / 1024:.1f} GiB"
    )


def _format_times(decision: Decision | None) -> dict[str, str]:
    """What a decision by measurement compared, by candidate: times at a few numbers of tokens, the fewest and the most
    among them."""
    if decision is None or decision.measured is None:
        return {}
    found = {}
    for name, points in decision.measured.times:
        shown = sorted({len(points) * part // 3 for part in range(3)} | {len(points) - 1})
        pairs = [points[index] for index in shown]
        shown_pairs = (f"{count}:{output.GLUE}{us:.{1 if us < 100 else 0}f}" for count, us in pairs)
        found[name] = ", ".join(shown_pairs)
    return found


_CHOSEN = "chosen"


def _candidate_rows(group: _LayerGroup, times: dict[str, str]) -> list[tuple[str, str, str]]:
    decision, rows = group.decision, []
    winners = set() if decision is None else {decision.backend, *(each.backend for each in decision.token_ranges)}
    for candidate in group.candidates:
        verdict = "accepted" if candidate.accepted else "rejected"
        if candidate.backend in winners:
            verdict = _CHOSEN
        reasons = candidate.sentences or (times.get(candidate.backend, ""),)
        rows.append((candidate.backend, verdict, reasons[0]))
        rows += [("", "", reason) for reason in reasons[1:]]
    return rows
