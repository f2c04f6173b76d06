"""`explain`: which backend each MoE layer of a checkpoint gets on a machine, with every candidate's every reason."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version

from ... import checkpoint, methods
from ...checkpoint import MoeLayers
from ...checkpoint.layer_names import compact_layer_names
from ...checkpoint.ranks import Ranks
from ...checkpoint.serving import as_served, check_all2all, is_round_robin
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
from ...errors import DenseModelError, NoBackendError, SettingError, StandDown
from ...measurements import lookup
from ...measurements.lookup import profile_error
from ...measurements.roofline import expert_bytes
from ...measurements.stock_gain import StockGain, is_stock_kernel, stock_gain, time_errors
from ...measurements.tune_command import tune_command
from ...oracle.registry import default_registry
from ...oracle.selection import check_backend_names, decide
from ...oracle.stock_kernels import stock_candidate
from ...releases.all2all import DEFAULT_ALL2ALL, all2all_names, effective_all2all, why_vllm_refuses
from ...releases.supported import NEWEST, RELEASES
from ...settings import AUTO, Settings, excluded_by_vllm
from ...settings import batch_invariant as batch_invariant_variable
from .. import EXIT_NO_BACKEND, output
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
        ),
    ] = "linear",
    backend: Annotated[
        str | None, typer.Option(help="As the setting backend: --set backend=NAME.", metavar="NAME")
    ] = None,
    moe_backend: Annotated[str, typer.Option(help="As vLLM's --moe-backend.", metavar="NAME")] = "auto",
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
      0  every group of layers has a backend or is left to stock vLLM, or the
         model has no experts
      3  a group has none, and a server would not start; the table is printed all
         the same
      2  the input cannot be used; one line on standard error says what and where
    """
    round_robin = _check_options(path, Ranks(tp, dp, ep), eplb, expert_placement_strategy)
    chosen = command_settings(assignments, ignore_bad_profile=True, backend=backend)
    moe_backend = moe_backend.lower().replace("-", "_")  # as vLLM reads it
    check_backend_names(chosen, moe_backend)
    machine = _with_vllm(_resolve_device(device), vllm)
    release = _vllm_version(machine)
    ranks = Ranks(tp, dp, ep, effective_all2all(all2all_backend or DEFAULT_ALL2ALL, release))
    read = checkpoint.read_checkpoint(Path(path))
    try:
        layers = checkpoint.find_moe_layers(
            read, tp, ep, chosen.ragged_shards, quantization.lower(), release, dp, ranks.all2all
        )
    except DenseModelError as error:
        note = f"no MoE layers; left to stock vLLM, unaffected by this plugin: {error.rule}. {error.remedy}"
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
    groups = _group_layers(model, machine, chosen, moe_backend, ranks.all2all, measure)
    drafts = _group_layers(mtp, machine, chosen, moe_backend, ranks.all2all, measure)
    groups += [dataclasses.replace(group, is_mtp=True) for group in drafts]
    if moe_backend != AUTO and layers.unquantized:
        rule = f"--moe-backend {moe_backend} is for quantized experts; vLLM chooses the kernel of unquantized ones"
        layers = dataclasses.replace(layers, notes=(*layers.notes, rule))
    placement = _placement_notes((*model, *mtp), round_robin)
    parallelism = _parallelism_notes(ranks, all2all_backend, groups, machine)
    server = _server_notes(chosen, layers.method, groups, machine)
    cached = f"{path} is read from the local cache of the Hugging Face Hub: {read.path}"
    notes = [
        *([] if os.path.exists(path) else [cached]),
        *layers.notes,
        *_activation_notes(layers, chosen),
        *parallelism,
        *placement,
        *server,
    ]
    if as_json:
        _print_json(groups, layers, notes, machine, brief)
    else:
        assumed = bool(vllm) or catalog.find_spec(device) is not None
        _print(groups, notes, machine, ranks, brief, verbose, assumed)
    if any(group.decision is None and not group.left_to_stock for group in groups):
        raise typer.Exit(EXIT_NO_BACKEND)


def _check_options(path: str, ranks: Ranks, eplb: bool, strategy: str) -> bool:
    """Whether vLLM is asked to place experts round-robin.

    Raises:
        SettingError: the path is empty, the ranks are not possible, or options contradict each other.
    """
    if not path.strip():
        raise SettingError("the path is empty", "Give a checkpoint's folder or its config.json", "PATH")
    ranks.check()
    spread = ranks.spreads_experts
    try:
        return is_round_robin(strategy, eplb, spread)
    except SettingError as error:
        add = "Add --ep --tp N or --ep --dp N, with N of 2 or more"
        remedy = "" if spread or "not one of" in error.rule else add
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
        left_to_stock: what of stock vLLM the layers are left to, its class where that is known; "" where a backend
            runs them, or nothing does.
        gain: the gain over stock vLLM, where it is known.
        measure: the command that measures the layers, if that could improve a static choice; else "".
        is_mtp: the layers are multi-token prediction modules, which vLLM loads as a model of their own for speculative
            decoding.
    """

    names: tuple[str, ...]
    problem: Problem
    decision: Decision | None
    failure: str
    candidates: tuple[Candidate, ...]
    left_to_stock: str = ""
    gain: StockGain | None = None
    measure: str = ""
    is_mtp: bool = False

    @property
    def layers(self) -> str:
        return compact_layer_names(self.names)

    def to_json(self, brief: bool) -> dict[str, Any]:
        candidates = [each for each in self.candidates if each.accepted or not brief]
        measured = None if self.decision is None else self.decision.measured
        return {
            "layers": self.layers,
            "count": len(self.names),
            "is_mtp": self.is_mtp,
            "problem": self.problem,
            "decision": None if self.decision is None else self.decision.to_record(),
            "failure": self.failure or None,
            "left_to_stock": self.left_to_stock or None,
            "gain_over_stock": self.gain,
            "time_errors": {} if measured is None else time_errors(measured),
            "measure": self.measure or None,
            "candidates": [candidate.to_record() for candidate in candidates],
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
    return dataclasses.replace(device, packages={**device.packages, "vllm": str(Version(version))})  # without a "v"


def _placement_notes(problems: Sequence[Problem], round_robin: bool) -> Iterator[str]:
    """Says which layers' experts vLLM places in linear order although round-robin was requested."""
    kept = [problem for problem in problems if problem.parallel.placement == "linear"]
    if round_robin and kept:
        rule = "vLLM places experts round-robin only if they are in several groups, without --eplb, and where an "
        rule += "all-to-all runs, only with a batched one"
        yield f"the experts of {compact_layer_names(problem.layer for problem in kept)} stay in order: {rule}"


def _parallelism_notes(ranks: Ranks, all2all_backend: str, groups: list[_LayerGroup], device: Device) -> Iterator[str]:
    """Says which options of parallelism change nothing, and what an all-to-all changes.

    Args:
        ranks: the options.
        all2all_backend: the word of the command line; "" without one.
        groups: the layers.
        device: the machine.
    """
    if ranks.ep and not ranks.spreads_experts:
        yield "--ep changes nothing here: there is one rank (--tp and --dp are 1)"
    if refusal := why_vllm_refuses(ranks.all2all, device.kind, ranks.exchanges_tokens):
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
        if (
            group.decision is None
            and group.problem.parallel.format == "batched"
            and group.left_to_stock == _STOCK_ITSELF
        ):
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


def _group_layers(
    problems: list[Problem], device: Device, settings: Settings, moe_backend: str, all2all: str, measure: str
) -> list[_LayerGroup]:
    """Layers by equal problem and equal outcome, in the order of their first layer."""
    groups: dict[object, _LayerGroup] = {}
    evidence: dict[Problem, MeasurementSet | None] = {}
    for problem in problems:
        decision, failure, left_to = None, "", ""
        if problem.key() not in evidence:
            evidence[problem.key()] = lookup.find_measurements(problem, device, settings)
        try:
            decision = decide(problem, device, settings, moe_backend, measurements=evidence[problem.key()])
            judged = decision.candidates
            check_all2all(problem, all2all)
        except NoBackendError as error:
            judged, refused_exchange = error.candidates, decision is not None
            if decision is not None:
                judged, decision = decision.candidates, None
            scheme = problem.scheme.name
            # The error's further lines are the table, which is printed anyway.
            failure = error.rule.split("\n")[0] if judged else f"this release has no backend for {scheme} experts yet"
            if judged and error.remedy:
                failure = f"{failure}. {error.remedy}"
            stock, features = None, _unsupported_features(problem)
            if not _names_backends(settings) and not refused_exchange:
                if moe_backend == AUTO:
                    stock = stock_candidate(judged, device, default_registry())
                left_to = _STOCK_ITSELF if features else ""
            if stock is not None:
                left_to = default_registry()[stock.backend].stock_class_name
                objections = "; ".join(map(str, stock.reasons))
                failure = f"left to stock vLLM, whose {left_to} does not ask what {stock.backend} does: {objections}"
            elif left_to:
                failure = f"left to stock vLLM, if that can run {' and '.join(features)}: {failure}"
        same = decision and dataclasses.replace(decision, problem=problem.key())
        key = (problem.key(), same, failure)
        command = measure if decision is not None and decision.tunable else ""
        if key not in groups:
            gain = None
            if decision is not None:
                gain = stock_gain(decision, device, default_registry(), settings.objective)
            groups[key] = _LayerGroup((), problem, decision, failure, judged, left_to, gain, command)
        before = groups[key]
        groups[key] = dataclasses.replace(before, names=(*before.names, problem.layer))
    return list(groups.values())


_STOCK_ITSELF = "stock vLLM's own choice"
"""What layers are left to where only a server can ask stock vLLM what it takes."""


def _unsupported_features(problem: Problem) -> list[str]:
    """What a layer needs that few backends here support, so that a server asks stock vLLM where none does: as
    `compat.layer_adapter` finds it."""
    batched = problem.parallel.format == "batched"
    return ["LoRA on experts"] * problem.lora + ["a batched all-to-all"] * batched


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


def _print_json(groups: list[_LayerGroup], layers: MoeLayers, notes: list[str], device: Device, brief: bool) -> None:
    """JSON to standard output; failures and notes, which it has too, to standard error."""
    left: list[tuple[str | None, tuple[str, ...]]] = [(None, layers.unquantized)] if layers.unquantized else []
    for format in dict.fromkeys(layers.unsupported_formats.values()):
        left.append((format, tuple(name for name, other in layers.unsupported_formats.items() if other == format)))
    output.print_json(
        {
            "vllm": _vllm_version(device),
            "device": device,
            "groups": [each.to_json(brief) for each in groups],
            "left_to_stock": [
                {"format": format, "layers": compact_layer_names(names), "count": len(names)} for format, names in left
            ],
            "notes": notes,
        }
    )
    for group in groups:
        if group.decision is None:
            output.print_message("note" if group.left_to_stock else "error", f"{group.layers}: {group.failure}")
    for note in notes:
        output.print_message("note", note)


def _print(
    groups: list[_LayerGroup],
    notes: list[str],
    device: Device,
    ranks: Ranks,
    brief: bool,
    verbose: bool,
    assumed: bool,
) -> None:
    vllm = _vllm_version(device)
    release = f"vLLM {vllm}" if vllm else "vLLM not installed"
    if assumed and device.kind == "cuda":
        release += " with its kernel packages (assumed)"
    output.show(f"{device}, {release}, {ranks}")
    for group in groups:
        count = "1 layer" if len(group.names) == 1 else f"{len(group.names)} layers"
        role = ", for multi-token prediction" if group.is_mtp else ""
        rows = _brief_rows(group) if brief else _decision_rows(group)
        output.show(f"\n{count}: {group.layers}{role}", output.key_value_table(rows))
        if group.measure:
            output.show_line(f"  {'measure':<{len(_GAIN_ROW)}}  {group.measure}")
        if group.candidates and not brief:
            _print_candidates(group, verbose)
    for note in notes:
        output.show(f"\nnote: {note}")


_TABLE_COLUMNS = 56
"""Columns below which a table has no room for reasons."""


def _print_candidates(group: _LayerGroup, verbose: bool) -> None:
    """Every candidate with its verdict, and every reason: as a table, or below each other where that is too wide.

    Backends for other kinds of devices are one line, unless `verbose` asks for each.
    """
    times = _format_times(group.decision)
    last = "reasons, or microseconds by tokens" if times else "reasons"
    if times and group.decision is not None and group.decision.why == "predicted":
        last = "reasons, or predicted microseconds (± a standard deviation) by tokens"
    folded = [] if verbose else [each for each in group.candidates if _is_for_other_devices(each)]
    shown = [each for each in group.candidates if each not in folded]
    cells = _candidate_rows(group.decision, shown, times)
    if folded:
        count = "1 backend" if len(folded) == 1 else f"{len(folded)} backends"
        cells.append((count, "rejected", "for other kinds of devices; --verbose names them"))
    if output.width() >= _TABLE_COLUMNS:
        chosen = [index for index, row in enumerate(cells) if row[1] == _CHOSEN]
        output.show("", output.table(("candidate", "verdict", last), cells, indent=2, marked=chosen))
        return
    for name, verdict, reason in cells:
        if name:
            output.show(f"\n{name}: {verdict}")
        if reason:
            output.show(output.key_value_table([("", reason)]))


def _decision_rows(group: _LayerGroup) -> list[tuple[str, str]]:
    rows = [("layer", str(group.problem))]
    if group.decision is None:
        return [*rows, ("backend", "stock vLLM's" if group.left_to_stock else "none"), ("why", group.failure)]
    decision = group.decision
    plan = decision.plan
    notes = [note for note in (*plan.notes, describe_loaded_group(group.problem)) if note]
    if tiles := sum(bool(tile) for _, tile in plan.tiles):
        notes.append(f"tile configurations that were measured, at {tiles} numbers of tokens")
    sizes = f"hidden {plan.hidden_size}, intermediate {plan.intermediate_size}"
    rows += [
        ("backend", decision.backend),
        ("why", decision.grounds),
        (_GAIN_ROW, _describe_gain(group)),
        ("numerics", str(decision.numerics)),
        ("sizes", f"{sizes}: {'; '.join(notes) or 'not padded'}"),
    ]
    if decision.token_ranges:
        rows.append(("token ranges", _describe_token_ranges(group)))
    return rows


_GAIN_ROW = "gain over stock"


def _describe_gain(group: _LayerGroup) -> str:
    """The gain over stock vLLM, or why none is known."""
    assert group.decision is not None
    if group.gain is not None:
        return str(group.gain)
    if is_stock_kernel(group.decision, default_registry()):
        return "none: this is stock vLLM's own kernel"
    return "unknown: this layer was not measured beside stock vLLM on such a machine, and nothing is predicted"


def _brief_rows(group: _LayerGroup) -> list[tuple[str, str]]:
    """The winner, why, the precisions that it computes with, and sizes where they are padded."""
    decision = group.decision
    if decision is None:
        return _decision_rows(group)[1:]
    precision = decision.candidate(decision.backend).answers.activations
    inputs = group.problem.dtype if precision == "16bit" else precision
    rows = [
        ("backend", decision.backend),
        ("why", decision.grounds),
        (_GAIN_ROW, _describe_gain(group)),
        ("numerics", f"activations {inputs}, sums {decision.numerics.accumulate}"),
    ]
    if decision.plan.pads(group.problem):
        rows.append(("sizes", "; ".join(decision.plan.notes)))
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
    among them, with the error of those that are predicted."""
    if decision is None or decision.measured is None:
        return {}
    found, errors = {}, time_errors(decision.measured)
    for name, points in decision.measured.times:
        shown = sorted({len(points) * part // 3 for part in range(3)} | {len(points) - 1})
        pairs = [points[index] for index in shown]
        found[name] = ", ".join(f"{count}:{output.GLUE}{_format_time(us, errors.get(name))}" for count, us in pairs)
    return found


def _format_time(us: float, error: float | None) -> str:
    """Microseconds, as many digits as are told apart; after ``±`` a standard deviation, where they are predicted."""
    digits = 1 if us < 100 else 0
    if error is None:
        return f"{us:.{digits}f}"
    deviation = us * math.expm1(error)
    digits = 1 if deviation < 2 else 0
    return f"{us:.{digits}f}{output.GLUE}±{deviation:.{digits}f}"


def _is_for_other_devices(candidate: Candidate) -> bool:
    return any(reason.code == "device" for reason in candidate.reasons)


_CHOSEN = "chosen"


def _candidate_rows(
    decision: Decision | None, candidates: Sequence[Candidate], times: dict[str, str]
) -> list[tuple[str, str, str]]:
    rows = []
    winners = set() if decision is None else {decision.backend, *(each.backend for each in decision.token_ranges)}
    for candidate in candidates:
        verdict = "accepted" if candidate.accepted else "rejected"
        if candidate.backend in winners:
            verdict = _CHOSEN
        reasons = candidate.sentences or (times.get(candidate.backend, ""),)
        rows.append((candidate.backend, verdict, reasons[0]))
        rows += [("", "", reason) for reason in reasons[1:]]
    return rows
