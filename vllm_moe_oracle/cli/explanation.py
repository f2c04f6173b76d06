"""What `explain` prints: groups of layers with their decisions and candidates, as text or JSON."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..checkpoint.layer_names import compact_layer_names
from ..checkpoint.moe_layers import MoeLayers
from ..checkpoint.ranks import Ranks
from ..core.decision import Candidate, Decision
from ..core.problem import Device
from ..core.sharding import describe_loaded_group
from ..measurements.roofline import expert_bytes
from ..measurements.stock_gain import not_timed, time_errors
from . import output
from .layer_groups import LayerGroup


def vllm_version(device: Device) -> str | None:
    """The vLLM that the answer is for, the machine's; None where it has none."""
    return device.packages.get("vllm")


def print_json(groups: list[LayerGroup], layers: MoeLayers, notes: list[str], device: Device, brief: bool) -> None:
    """JSON to standard output; failures and notes, which it has too, to standard error."""
    left: list[tuple[str | None, tuple[str, ...]]] = [(None, layers.unquantized)] if layers.unquantized else []
    for format in dict.fromkeys(layers.unsupported_formats.values()):
        left.append((format, tuple(name for name, other in layers.unsupported_formats.items() if other == format)))
    output.print_json(
        {
            "vllm": vllm_version(device),
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
            output.print_message(
                "note" if group.outcome.left_to_stock else "error", f"{group.layers}: {group.outcome.failure}"
            )
    for note in notes:
        output.print_message("note", note)


def print_groups(
    groups: list[LayerGroup],
    notes: list[str],
    device: Device,
    ranks: Ranks,
    brief: bool,
    verbose: bool,
    assumed: bool,
) -> None:
    """Text to standard output.

    Args:
        groups: the layers.
        notes: what else is to be known, a paragraph each.
        device: the machine.
        ranks: how the model is spread over ranks.
        brief: only each group's winner.
        verbose: name backends for other kinds of devices, too.
        assumed: the device's packages are those of a release, not those that were found.
    """
    vllm = vllm_version(device)
    release = f"vLLM {vllm}" if vllm else "vLLM not installed"
    packages = " with its kernel packages (assumed)" if assumed and device.kind == "cuda" else ""
    output.show(f"{device}, {release}{packages}, {ranks}")
    for group in groups:
        count = "1 layer" if len(group.names) == 1 else f"{len(group.names)} layers"
        role = ", for multi-token prediction" if group.is_mtp else ""
        rows = _brief_rows(group, release) if brief else _decision_rows(group, release)
        output.show(f"\n{count}: {group.layers}{role}", output.key_value_table(rows))
        if group.measure:
            output.show_line(f"  {'measure':<{len(_GAIN_ROW)}}  {group.measure}")
        if group.outcome.candidates and not brief:
            _print_candidates(group, verbose)
    for note in notes:
        output.show(f"\nnote: {note}")


def _print_candidates(group: LayerGroup, verbose: bool) -> None:
    """Every candidate with its verdict, and every reason.

    Backends for other kinds of devices are one line, unless `verbose` asks for each.
    """
    times = _format_times(group.decision)
    last = "reasons, or microseconds by tokens" if times else "reasons"
    if times and group.decision is not None and group.decision.why == "predicted":
        last = "reasons, or predicted microseconds (± a standard deviation) by tokens"
    folded = [] if verbose else [each for each in group.outcome.candidates if _is_for_other_devices(each)]
    shown = [each for each in group.outcome.candidates if each not in folded]
    cells = _candidate_rows(group.decision, shown, times)
    if folded:
        count = "1 backend" if len(folded) == 1 else f"{len(folded)} backends"
        cells.append((count, "rejected", "for other kinds of devices; --verbose names them"))
    chosen = [index for index, row in enumerate(cells) if row[1] == _CHOSEN]
    output.show_table(("candidate", "verdict", last), cells, indent=2, marked=chosen)


def _decision_rows(group: LayerGroup, release: str) -> list[tuple[str, str]]:
    rows = [("layer", str(group.problem))]
    if group.decision is None:
        backend = "stock vLLM's" if group.outcome.left_to_stock else "none"
        return [*rows, ("backend", backend), ("why", group.outcome.failure), _stock_row(group, release)]
    decision = group.decision
    plan = decision.plan
    notes = [note for note in (*plan.notes, describe_loaded_group(group.problem)) if note]
    if tiles := sum(bool(tile) for _, tile in plan.tiles):
        notes.append(f"tile configurations that were measured, at {tiles} numbers of tokens")
    sizes = f"hidden {plan.hidden_size}, intermediate {plan.intermediate_size}"
    padding = ("sizes", f"{sizes}: {'; '.join(notes) or 'not padded'}")
    return [*rows, *_winner_rows(group, decision, str(decision.numerics), [padding], release)]


def _winner_rows(
    group: LayerGroup, decision: Decision, numerics: str, sizes: list[tuple[str, str]], release: str
) -> list[tuple[str, str]]:
    """The winner, why, and what it computes with."""
    rows = [("backend", decision.backend), ("why", decision.grounds), _stock_row(group, release)]
    rows += [(_GAIN_ROW, _describe_gain(group, decision))]
    rows += [("numerics", numerics), *sizes]
    if decision.token_ranges:
        rows.append(("token ranges", _describe_token_ranges(group, decision)))
    return rows


def _stock_row(group: LayerGroup, release: str) -> tuple[str, str]:
    """What stock vLLM would run; `release` is the vLLM that the answer is for."""
    if group.stock.unknown:
        kernel = group.gain.stock.partition(",")[0] if group.gain is not None else ""
        assumed = f"; the gain takes it for {kernel}" if kernel else ""
        return "stock vLLM", f"not known for {release}: {group.stock.unknown}{assumed}"
    return "stock vLLM", f"{group.stock}, {release}"


_GAIN_ROW = "gain over stock"


def _describe_gain(group: LayerGroup, decision: Decision) -> str:
    """The gain over stock vLLM, or why none is known."""
    if group.refused:
        return "unknown: a server starts only if the files leave other layers unquantized, see the note"
    if group.switched_off:
        return "none: the plugin is switched off, see the note"
    if group.gain is not None:
        return str(group.gain)
    if group.runs_stock_kernel:
        return "none: this is stock vLLM's own kernel" if group.stock.runs else "none, if stock vLLM takes it, too"
    if group.stock.refusal:
        return "none: stock vLLM cannot run it"
    if missing := not_timed(group.problem):
        return f"unknown: stock vLLM was timed without {missing}"
    if decision.is_explicit:
        return "unknown: it was not measured beside stock vLLM on such a machine, and a named backend is not predicted"
    return "unknown: this layer was not measured beside stock vLLM on such a machine, and nothing is predicted"


def _brief_rows(group: LayerGroup, release: str) -> list[tuple[str, str]]:
    """The winner, why, the precisions that it computes with, and sizes where they are padded."""
    decision = group.decision
    if decision is None:
        return _decision_rows(group, release)[1:]
    precision = decision.candidate(decision.backend).answers.activations
    inputs = group.problem.dtype if precision == "16bit" else precision
    sizes = [("sizes", "; ".join(decision.plan.notes))] if decision.plan.pads(group.problem) else []
    return _winner_rows(group, decision, f"activations {inputs}, sums {decision.numerics.accumulate}", sizes, release)


def _describe_token_ranges(group: LayerGroup, decision: Decision) -> str:
    """Which backend runs up to how many tokens, and what memory a second copy of the weights takes."""
    problem, steps = group.problem, decision.token_ranges
    words = ", ".join(map(str, steps))
    if len({decision.candidate(step.backend).answers.layout for step in steps}) == 1:
        return f"{words}; over the same weights"
    mib = expert_bytes(problem) * problem.local_experts / 2**20
    count = len(group.names)
    return f"{words}; a second copy of the weights: about {mib:.0f} MiB a layer, {mib * count / 1024:.1f} GiB"


def _format_times(decision: Decision | None) -> dict[str, str]:
    """What a decision by measurement compared, by candidate: times at a few numbers of tokens, the fewest and the most
    among them, with the error of those that are predicted."""
    if decision is None or decision.comparison is None:
        return {}
    found, errors = {}, time_errors(decision.comparison)
    for name, points in decision.comparison.times:
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


def _why_by_name(candidate: Candidate, winners: Collection[str]) -> str:
    """Why an accepted candidate is not chosen without its name; "" if it may be, or was named."""
    if not candidate.accepted or candidate.backend in winners or not candidate.answers.only_by_name:
        return ""
    return f"by name only: {candidate.answers.only_by_name}"


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
        reasons = candidate.sentences or (times.get(candidate.backend, "") or _why_by_name(candidate, winners),)
        rows.append((candidate.backend, verdict, reasons[0]))
        rows += [("", "", reason) for reason in reasons[1:]]
    return rows
