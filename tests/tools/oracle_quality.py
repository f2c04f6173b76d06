"""Compares the oracle's choices with benchmarks.

    python -m tests.tools.oracle_quality [--write | --left-out]

For each layer and number of tokens of a benchmark (``vllm-moe-oracle bench --jsonl``, kept in tests/golden/h200), the
oracle decides with the shipped profiles. Its choice is compared with the fastest accepted backend and with stock vLLM's
default in the benchmark. Choices by times of the same run are listed apart. ``--write`` writes the table
tests/golden/h200/choice.md. Without it the exit status is 1 if the table is stale, if fewer than 95 % of the choices
are within 3 % of the fastest backend, or if one is more than 8 % slower.

``--left-out`` takes each time of the shipped profiles out in turn, and each two of a backend, and says which choices
change and what that costs by the whole profile's times, with the times filled in and without.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.unlisted_layers import HELD_OUT, LAYERS, by_shape
from tests.lib.readme_sections import markdown_table
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.measurement_set import Latencies, MeasurementSet
from vllm_moe_oracle.core.objectives import parse_objective
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measurements import latency_model, lookup, model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment, same_kernel_code
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.missing_times import INTERPOLATION_ERROR, fill_missing
from vllm_moe_oracle.oracle.measured_choice import LatencyCurve, choose_fastest
from vllm_moe_oracle.oracle.selection import decide, equivalent_backends, evaluate_candidates

FOLDER = Path(__file__).parents[1] / "golden" / "h200"
TABLE = FOLDER / "choice.md"
PATTERN = "choice-*.jsonl"
STOCK = "stock:auto"
WITHIN, SHARE, WORST = 0.03, 0.95, 0.08
UNCERTAIN = "uncertain"
MISSED = "awq:grok-2@ep4"
"""A held-out layer whose choice exceeds `WORST`: the limits are asserted of all other layers, uncertain ones too."""


@dataclass(frozen=True)
class Row:
    """The oracle's choice at one number of tokens, and other times of the benchmark.

    Attributes:
        layer: name of the layer.
        tokens: rows of the input.
        choice: the backend that the oracle runs there.
        why: what decided; `UNCERTAIN` where predictions left the static choice, and a server measures the layer at its
            first start; static where one backend alone can run the layer: no choice, and in no summary.
        us: its time in the benchmark.
        best: the fastest backend that computes the same.
        best_us: its time.
        stock_us: time of stock vLLM's default; None if it could not run.
        apart: whether the shipped profile's times come from another run.
    """

    layer: str
    tokens: int
    choice: str
    why: str
    us: float
    best: str
    best_us: float
    stock_us: float | None
    apart: bool = True

    @property
    def behind(self) -> float:
        """Time of the choice over that of the fastest backend, minus 1."""
        return self.us / self.best_us - 1


def rows(lines: Iterator[str], chosen: settings.Settings) -> list[Row]:
    """The choices of one benchmark.

    Args:
        lines: its records, conditions first.
        chosen: settings under which the oracle decides.
    """
    conditions = json.loads(next(lines))["conditions"]
    card = catalog.known_device("nvidia-h200")
    machine = Device(
        card.kind, conditions["gpu"], card.capability, card.sm_count, card.memory_gib,
        packages=conditions["packages"], driver=conditions["driver"],
    )  # fmt: skip
    return [row for line in lines for row in _row(json.loads(line), machine, chosen)]


def _row(record: Mapping[str, Any], machine: Device, chosen: settings.Settings) -> Iterator[Row]:
    name = record["layer"]["name"]
    layer = next((each for each in (*HELD_OUT, *LAYERS) if each.layer == name), None) or model_shapes.parse(name)
    # The first profile of the GPU and its Triton that has the shape is used alone.
    here = Environment.of(machine)
    own = (
        each
        for each in profile.shipped()
        if catalog.is_same_gpu(each.environment.gpu, machine.name) and same_kernel_code(each.environment, here)
    )
    answering = next((each for each in own if each.samples(kernel_shape_of(layer))), None)
    decision = decide(layer, machine, chosen, measurements=lookup.find_measurements(layer, machine, chosen))
    static = next(each for each in decision.candidates if each.accepted)
    names = equivalent_backends(static, decision.candidates)
    times = {name: record["us"][name] for name in names if name in record["us"]}
    apart = answering is None or not _is_shipped(times, answering, layer, record["tokens"])
    choice = decision.backend_for(record["tokens"])
    if choice not in times:
        raise SystemExit(f"{layer.layer}, {record['tokens']} tokens: {choice} was chosen and not timed")
    best = min(times, key=lambda name: times[name])
    stock = record["us"].get(STOCK)
    why = UNCERTAIN if decision.why == "predicted" and decision.tunable else decision.why
    yield Row(layer.layer, record["tokens"], choice, why, times[choice], best, times[best], stock, apart)


def _is_shipped(times: Mapping[str, float], answering: profile.Profile, layer: Problem, tokens: int) -> bool:
    """Whether a profile has a record's times, in microseconds to the hundredth. Times of one layer may be of several
    runs."""
    shipped = {each.backend: each.us for each in answering.samples(kernel_shape_of(layer)) if each.tokens == tokens}
    pairs = [(time, shipped[name]) for name, time in times.items() if name in shipped]
    return bool(pairs) and all(abs(one - other) < 0.006 for one, other in pairs)


def summary(found: list[Row]) -> list[str]:
    """The quality of the choices, in lines of Markdown."""
    near = sum(row.behind <= WITHIN for row in found)
    worst = max(found, key=lambda row: row.behind)
    against = [row.stock_us / row.us for row in found if row.stock_us]
    lines = [
        f"* {near} of {len(found)} choices ({near / len(found):.1%}) within {WITHIN:.0%} of the fastest accepted "
        "backend that computes the same numbers",
        f"* largest slowdown: {worst.behind:.1%}, {worst.layer} at {worst.tokens} tokens "
        f"({worst.choice} {worst.us:.1f} us, {worst.best} {worst.best_us:.1f} us)",
    ]
    if against:
        slower = sum(value < 1 / (1 + WITHIN) for value in against)
        lines.append(
            f"* against stock vLLM's default in the same run: {statistics.geometric_mean(against):.2f} times "
            f"as fast (geometric mean of {len(against)} times); slower by more than {WITHIN:.0%} in {slower}"
        )
    return lines


def table(found: list[Row], sources: list[str]) -> str:
    """The table, with its summaries first."""
    lines = [
        "# The oracle's choices on an H200",
        "",
        f"Made by `python -m tests.tools.oracle_quality --write` from {', '.join(f'`{name}`' for name in sources)} and",
        "the shipped profiles.",
    ]
    parts = {
        "Choices by shipped times of another run than these:": [
            row for row in found if row.apart and row.why == "measured"
        ],
        "Choices by predictions, for layers that neither a profile nor the latency model's fit has:": [
            row for row in found if row.why == "predicted"
        ],
        "Static choices where predictions are too uncertain to replace them. A server measures these layers at its\n"
        "first start; `MOE_ORACLE_MEASURE_AT_START=0` leaves them so:": [row for row in found if row.why == UNCERTAIN],
        "Choices by shipped times of the same run. This tests that one backend for all numbers of tokens\n"
        "loses little at each:": [row for row in found if not row.apart],
    }
    if all(parts.values()):
        parts["All of them:"] = [row for rows in parts.values() for row in rows]
    for words, rows in parts.items():
        if rows:
            lines += ["", words, "", *summary(rows)]
    cells = []
    for row in found:
        stock = "" if row.stock_us is None else f"{row.stock_us:.1f}"
        behind = f"{row.behind:.1%}" if row.behind > 0 else ""
        times = (f"{row.us:.1f}", row.best, f"{row.best_us:.1f}")
        cells.append((row.layer, row.tokens, row.choice, row.why, *times, behind, stock))
    heads = ("layer", "tokens", "choice", "why", "us", "best", "us", "slowdown", "stock us")
    return "\n".join([*lines, "", markdown_table(heads, cells), ""])


def good_enough(found: list[Row]) -> bool:
    """Whether the choices meet the limits, to be checked for all rows and for rows of other runs."""
    near = sum(row.behind <= WITHIN for row in found)
    return near >= SHARE * len(found) and all(row.behind <= WORST for row in found)


@dataclass(frozen=True)
class LeftOut:
    """One or two times of a backend that were taken out of a layer's.

    Attributes:
        gpu: the profile's.
        cells: number of times that were taken out.
        how: what they are filled in by: ``predicted`` or ``interpolated``. A time that the profile lacks before is
            filled in as a server does it, in what is compared, too.
        off: logarithms of filled over measured time, with the error that is claimed; empty if they are not filled in.
        lost: mean time over the objective of the choice, over that of the whole profile's choice, minus 1.
        lost_without: the same where nothing is filled in and the static choice stands.
    """

    gpu: str
    cells: int
    how: str
    off: tuple[tuple[float, float], ...]
    lost: float
    lost_without: float


def left_out(chosen: settings.Settings) -> Iterator[LeftOut]:
    """Every time of the shipped profiles, and every two of a backend, taken out in turn.

    Args:
        chosen: settings under which the oracle decides.
    """
    problems = by_shape()
    for shipped in profile.shipped():
        cards = map(catalog.known_device, ("nvidia-h100", "nvidia-h200"))
        card = next(each for each in cards if catalog.is_same_gpu(each.name, shipped.environment.gpu))
        card = dataclasses.replace(card, packages={**card.packages, **shipped.environment.packages})
        for entry in shipped.entries:
            candidates = evaluate_candidates(problems[entry.kernel_shape], card, chosen)
            static = next(each for each in candidates if each.accepted)
            names = [name for name in equivalent_backends(static, candidates) if name in entry.backends]
            if len(names) > 1 and names[0] == static.backend:
                yield from _left_out_of_layer(entry, names, card, chosen)


def _left_out_of_layer(
    entry: profile.Entry, names: Sequence[str], card: Device, chosen: settings.Settings
) -> Iterator[LeftOut]:
    objective = parse_objective(chosen.objective)
    times: dict[str, Latencies] = {
        name: {
            routing: {int(count): us for count, (us, *_) in counts.items()}
            for routing, counts in entry.backends[name].times.items()
        }
        for name in names
    }

    def lost(found: MeasurementSet) -> float:
        choices = [choose_fastest(each, names, objective, chosen.min_time_saving) for each in (found, whole)]
        now, before = (scores[each.backend] for each in choices)
        return math.exp(now - before) - 1

    def predict(asked: Sequence[str], counts: Sequence[int]) -> MeasurementSet:
        return latency_model.predict(entry.kernel_shape, card, asked, False, None, counts)

    whole = fill_missing(MeasurementSet(times, "a profile"), names, predict)
    scores = {name: LatencyCurve(whole.known_times(name)).score(objective, ["uniform"]) for name in names}
    for name, known in times.items():
        counts = sorted(known["uniform"])
        for taken in (*itertools.combinations(counts, 1), *itertools.combinations(counts, 2)):
            kept = {
                routing: {count: us for count, us in each.items() if count not in taken}
                for routing, each in known.items()
            }
            rest = MeasurementSet({**times, name: kept}, "a profile")
            without = lost(rest)
            for how, by in (("predicted", predict), ("interpolated", lambda asked, counts: MeasurementSet())):
                full = fill_missing(rest, names, by)
                filled = full.filled.get(name, {}).get("uniform", {})
                made = {count: us for count, us in filled.items() if count in taken}
                error = full.cell_errors.get(name, 0.0)
                whole_cells = len(made) == len(taken) and (how == "interpolated" or error != INTERPOLATION_ERROR)
                off = tuple((math.log(us / known["uniform"][count]), error) for count, us in made.items())
                yield LeftOut(card.name, len(taken), how, off if whole_cells else (), lost(full), without)


def left_out_table(found: Sequence[LeftOut]) -> str:
    """How far filled times are off, how often choices change and what it costs, in Markdown."""
    heads = ["GPU", "taken out", "filled in", "error (RMS)", "within the stated error"]
    heads += ["choices changed", "lost, at most", "choices changed without", "lost without, at most"]
    rows = []
    for gpu, cells, how in sorted({(each.gpu, each.cells, each.how) for each in found if each.off}):
        group = [each for each in found if (each.gpu, each.cells, each.how) == (gpu, cells, how)]
        own = [each for each in group if each.off]
        off = [pair for each in own for pair in each.off]
        rms = math.sqrt(math.fsum(value * value for value, _ in off) / len(off))
        within = sum(abs(value) <= error for value, error in off) / len(off)
        words = []
        for losses in ([each.lost for each in own], [each.lost_without for each in own]):
            changed = [each for each in losses if abs(each) > 1e-9]
            words += [f"{len(changed)} ({len(changed) / len(own):.1%})", f"{max(0.0, *losses):.1%}"]
        rows.append([gpu, cells, f"{len(own)} of {len(group)}, {how}", f"{rms:.1%}", f"{within:.0%}", *words])
    return markdown_table(heads, rows) + "\n"


def read(folder: Path = FOLDER) -> tuple[list[Row], list[str]]:
    """The choices of all benchmarks that are kept, and the names of their files."""
    chosen = settings.load({}, assignments={"cache": str(folder / "no cache")})
    paths = sorted(folder.glob(PATTERN))
    return [row for path in paths for row in rows(iter(path.read_text().splitlines()), chosen)], [p.name for p in paths]


def main() -> None:
    """Writes or checks the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    args = parser.parse_args()
    if args.left_out:
        print(left_out_table(list(left_out(settings.Settings(cache="none")))), end="")
        return
    found, sources = read()
    if not found:
        sys.exit(f"there is no {PATTERN} in {FOLDER}")
    text = table(found, sources)
    print(text.partition("\n| layer")[0])
    if args.write:
        TABLE.write_text(text)
    elif not TABLE.exists() or TABLE.read_text() != text:
        sys.exit(f"{TABLE.name} is stale")
    found = [row for row in found if row.layer != MISSED]
    apart = [row for row in found if row.apart]
    if not all(map(good_enough, (found, apart, [row for row in apart if row.why == "predicted"]))):
        sys.exit("the choices are not good enough")


if __name__ == "__main__":
    main()
