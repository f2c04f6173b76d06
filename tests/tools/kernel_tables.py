"""The kernels' result tables: ``python -m tests.tools.kernel_tables BENCH.jsonl...``.

Records of ``vllm-moe-oracle bench --jsonl`` become the newest tests/golden/h200/kernels-vllm-VERSION.json: this
project's kernels beside stock vLLM's by layer and number of tokens, for the layers with targets. Where several files
have a cell, the last one counts; cells that the last file lacks are marked as from another run. `tests.tools.generate`
makes the tables in vllm_moe_oracle/kernels/RESULTS.md of it, and of tests/golden/h200/fp8-layers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tests.lib import golden_files
from tests.lib.readme_sections import markdown_table
from vllm_moe_oracle.core.sharding import loaded_group_size
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import model_shapes

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = golden_files.newest("kernels")
FP8 = ROOT / "tests" / "golden" / "h200" / "fp8-layers.jsonl"
STOCK = "stock:auto"
OURS = ("hopper_mxfp8", "hopper_mxfp4", "hopper_wna16")
SPANS = {"1": (1, 1), "2 to 4": (2, 4), "8 to 64": (8, 64), "128 to 512": (128, 512), "from 1024": (1024, 1 << 30)}
NEVER_SLOWER = 0.98
JUDGED = {
    "gpt-oss-20b": 1, "gpt-oss-120b": 1, "qwen3-30b-a3b": 1, "kimi-k2": 8, "minimax-m2": 4, "nemotron-3-nano": 1,
}  # fmt: skip
"""Shapes, and tensor-parallel ranks."""
TOKEN_AIMS: dict[str, dict[int, float]] = {
    "1": {4: 2.0, 8: 2.0},
    "2 to 4": {4: 1.4, 8: 1.4},
    "8 to 64": {4: 1.25, 8: 1.08},
    "128 to 512": {4: 1.4, 8: 1.15},
    "from 1024": {4: 1.3, 8: 1.3},
}
"""How many times as fast as stock's default the kernels are to be, by number of tokens and bits of a weight."""
RATE_AIMS = {4: 0.65, 8: 0.75}
"""Part of the roofline's rate to be reached from 8 to 64 tokens."""
ROOFLINE_PART, ROOFLINE_US = 0.7, 8.0
"""At one token: the roofline over the first, and the second, in microseconds."""


def flops(cell: str) -> int:
    """Operations for a token: experts that it chooses, matrices of each, two for a weight."""
    layer = model_shapes.parse(cell)
    matrices = 3 if layer.activation.gated else 2
    return layer.top_k * matrices * 2 * layer.hidden_size * layer.intermediate_size


def judged() -> list[str]:
    """The layers that are held against the aims: every format on every shape whose scales it does not cut."""
    found = []
    for scheme in ("int4_g128", "int4_g32", "int8_g128", "mxfp8", "mxfp4"):
        for shape, tp in JUDGED.items():
            try:
                problem = model_shapes.make_problem(scheme, shape, tp)
            except MeasurementError:
                continue
            if loaded_group_size(problem) == problem.scheme.group_size:  # 2880, or 1856, are no whole groups of 128
                found.append(problem.layer)
    return found


def golden(files: Iterable[Iterable[str]]) -> dict[str, Any]:
    """The committed form of benchmarks' records, whose first lines are the conditions; `run` is the number of the
    command that measured a cell.

    Raises:
        ValueError: two benchmarks ran under other conditions.
    """
    names_judged = judged()
    conditions: dict[str, Any] = {}
    commands: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for lines in files:
        here, records = golden_files.records(lines)
        same = {key: here[key] for key in ("gpu", "driver", "packages", "method")}
        if conditions and conditions != same:
            raise ValueError(f"benchmarks under different conditions: {conditions} and {same}")
        conditions = same
        commands.append(re.sub(r"(--jsonl |profile=)\S*/", r"\1", here["command"]))
        for record in records:
            if record["layer"]["name"] not in names_judged:
                continue
            row = rows.setdefault(
                record["layer"]["name"], {"us": {}, "spread": {}, "roofline_us": {}, "run": {}, "failures": {}}
            )
            row["failures"] |= record["failures"]
            names = {name: "ours" if name in OURS else "auto" if name == STOCK else name for name in record["us"]}
            if "ours" in names.values():
                tokens = str(record["tokens"])
                row["us"][tokens] = {names[name]: us for name, us in record["us"].items()}
                row["spread"][tokens] = {names[name]: spread for name, spread in record["quartiles"].items()}
                row["roofline_us"][tokens] = record["roofline_us"]
                row["run"][tokens] = len(commands) - 1
    found = [{"layer": name, **rows[name]} for name in names_judged if name in rows and rows[name]["us"]]
    return {**conditions, "commands": commands, "rows": found}


def bits(cell: str) -> int:
    """Bits of a weight."""
    return 4 if cell.startswith(("int4", "mxfp4")) else 8


def ratios(data: dict[str, Any], span: tuple[int, int], of_bits: int, best: bool) -> list[tuple[float, str]]:
    """Stock's time over ours: the default's, or that of the fastest other backend that keeps activations in 16 bits."""
    found = []
    for row in data["rows"]:
        for tokens, us in row["us"].items():
            others = [time for name, time in us.items() if name not in ("ours", "emulation") and "w8a8" not in name]
            against = min(others, default=None) if best else us.get("auto")
            if span[0] <= int(tokens) <= span[1] and bits(row["layer"]) == of_bits and against is not None:
                found.append((against / us["ours"], f"{row['layer']} {tokens}"))
    return found


def against_stock(data: dict[str, Any]) -> str:
    """Geometric means by number of tokens, the worst cell in brackets."""
    heads = [f"{of}-bit, {whose}'s time / ours" for of in (4, 8) for whose in ("default", "best other")]
    rows = []
    for name, span in SPANS.items():
        cells = []
        for of in (4, 8):
            for best in (False, True):
                found = ratios(data, span, of, best)
                cells.append(f"{geometric_mean(r for r, _ in found):.2f} ({min(found)[0]:.2f})" if found else "")
        rows.append([name, *cells])
    below = [
        f"{where} {ratio:.2f}" for of in (4, 8) for ratio, where in sorted(ratios(data, (1, 512), of, True))
        if ratio < NEVER_SLOWER
    ]  # fmt: skip
    total = sum(len(ratios(data, (1, 512), of, True)) for of in (4, 8))
    said = f"Below {NEVER_SLOWER} of the best other backend up to 512 tokens: {len(below)} of {total}"
    said += f" ({'; '.join(below)})." if below else "."
    return f"{markdown_table(['tokens', *heads], rows)}\n\n{said}"


def cells(data: dict[str, Any]) -> str:
    """Microseconds and the share of the roofline's rate."""
    counts = [count for count in ("1", "4", "16", "64", "256", "512") if any(count in r["us"] for r in data["rows"])]
    rows = []
    for row in data["rows"]:
        parts = []
        for count in counts:
            us, roofline = row["us"].get(count), row["roofline_us"].get(count)
            share = "" if us is None or roofline is None else f", {roofline / us['ours']:.0%}"
            parts.append("" if us is None else f"{us['ours']:.1f}{share}{earlier(data, row, count)}")
        rows.append([row["layer"], *parts])
    return markdown_table(["layer", *counts], rows)


def earlier(data: dict[str, Any], row: dict[str, Any], tokens: str) -> str:
    """A mark for a cell that the last run did not reach."""
    return "" if row["run"][tokens] == len(data["commands"]) - 1 else "\\*"


def many(data: dict[str, Any]) -> str:
    """Microseconds, the default's time over ours, and useful TFLOP/s, for many tokens."""
    counts = ("1024", "4096", "16384")
    rows = []
    for row in data["rows"]:
        parts = []
        for count in counts:
            us = row["us"].get(count)
            if us is None:
                parts.append("")
                continue
            rate = int(count) * flops(row["layer"]) / us["ours"] / 1e6
            against = f"{us['auto'] / us['ours']:.2f}" if "auto" in us else "-"
            parts.append(f"{us['ours']:.0f}, {against}, {rate:.0f}{earlier(data, row, count)}")
        rows.append([row["layer"], *parts])
    return markdown_table(["layer", *counts], rows)


def _rooflines(data: dict[str, Any], span: tuple[int, int], of_bits: int) -> list[tuple[float, float]]:
    """Roofline and time of ours, in microseconds."""
    return [
        (row["roofline_us"][tokens], us["ours"])
        for row in data["rows"]
        for tokens, us in row["us"].items()
        if span[0] <= int(tokens) <= span[1]
        and bits(row["layer"]) == of_bits
        and row["roofline_us"][tokens] is not None
    ]


def _near_one(data: dict[str, Any]) -> str:
    """By how much the aim at one token is missed, by layer."""
    missed = [
        (row["us"]["1"]["ours"] - row["roofline_us"]["1"] / ROOFLINE_PART - ROOFLINE_US, row["layer"])
        for row in data["rows"]
        if "1" in row["us"] and row["roofline_us"]["1"] is not None
    ]
    over = [f"{cell} {us:.1f}" for us, cell in sorted(missed) if us > 0]
    return f"reached by {len(missed) - len(over)} of {len(missed)} layers" + (
        f"; missed, us: {', '.join(over)}" if over else ""
    )


def _token_rows(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Of targets for the speed-up over the default at few tokens."""
    for name, by_bits in TOKEN_AIMS.items():
        found = {of: [ratio for ratio, _ in ratios(data, SPANS[name], of, best=False)] for of in by_bits}
        both = [ratio for each in found.values() for ratio in each]
        parts = "; ".join(f"{of}-bit {geometric_mean(each):.2f}" for of, each in found.items() if each)
        asked = " and ".join(dict.fromkeys(f"{aim:g}" for aim in by_bits.values()))
        kind = " (4-bit, 8-bit)" if len(set(by_bits.values())) > 1 else ""
        if both:
            aim = f"{name} token{'s' * (name != '1')}: {asked} times the default{kind}"
            yield aim, f"{geometric_mean(both):.2f} ({parts})"


def aims(data: dict[str, Any]) -> str:
    """The targets, and what is reached."""
    rows = [*_token_rows(data)]
    rows.append((f"1 token: at most roofline / {ROOFLINE_PART} + {ROOFLINE_US:g} us", _near_one(data)))
    for of, aim in RATE_AIMS.items():
        found_rates = [roofline / us for roofline, us in _rooflines(data, (8, 64), of)]
        if found_rates:
            near = sum(rate >= aim for rate in found_rates)
            reached = f"{geometric_mean(found_rates):.0%} in the mean, {near} of {len(found_rates)} cells"
            rows.append((f"8 to 64 tokens, {of}-bit: {aim:.0%} of the roofline's rate", reached))
    for words, span in (("up to 512 tokens", (1, 512)), ("from 1024 tokens", (1024, 1 << 30))):
        every = [pair for of in (4, 8) for pair in ratios(data, span, of, best=True)]
        low = sorted(pair for pair in every if pair[0] < NEVER_SLOWER)
        said = f": {', '.join(f'{where} {ratio:.2f}' for ratio, where in low)}" if low else ""
        rows.append(
            (f"never below {NEVER_SLOWER} of the best other, {words}", f"{len(low)} of {len(every)} cells{said}")
        )
    rates = [
        (16384 * flops(row["layer"]) / row["us"]["16384"]["ours"] / 1e6, row["layer"])
        for row in data["rows"]
        if "16384" in row["us"]
    ]
    if rates:
        best = ", ".join(f"{cell} {rate:.0f}" for rate, cell in sorted(rates, reverse=True)[:4])
        reached = f"{sum(rate >= 600 for rate, _ in rates)} of {len(rates)}: {best}"
        rows.append(("16384 tokens: 600 TFLOP/s", reached))
    return markdown_table(("target", "reached"), rows)


def fp8_rows() -> list[dict[str, Any]]:
    """Layers with activations in fp8, as `tests/gpu/fp8_layer.py` measured them: shapes in turn, tokens ascending."""
    _, rows = golden_files.records(FP8.read_text().splitlines())
    shapes = list(dict.fromkeys(row["layer"] for row in rows))
    return sorted(rows, key=lambda row: (shapes.index(row["layer"]), row["tokens"]))


def fp8_times(data: dict[str, Any]) -> str:
    """Times with activations in fp8 beside those in 16 bits."""
    rows = []
    for row in fp8_rows():
        exact, fp8 = row["16-bit"], row["fp8"]
        figures = (f"{exact['us']:.0f}", f"{fp8['us']:.0f}", f"{row['ratio']:.2f}", f"{fp8['tflops']:.0f}")
        rows.append([row["layer"], row["tokens"], *figures])
    return markdown_table(["layer", "tokens", "16-bit, us", "fp8, us", "ratio", "fp8, TFLOP/s"], rows)


def fp8_errors(data: dict[str, Any]) -> str:
    """The largest error of each layer with activations in fp8, from 512 tokens on."""
    heads = ["layer", "16-bit", "fp8", "fp8, outliers", "fp8, same codes", "fp8, same codes, outliers"]
    columns = [
        ("error_normal", "16-bit"),
        ("error_normal", "fp8"),
        ("error_outliers", "fp8"),
        ("error_normal", "fp8 against the same codes"),
        ("error_outliers", "fp8 against the same codes"),
    ]
    rows, lines = fp8_rows(), []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        mine = [row for row in rows if row["layer"] == layer and row["tokens"] >= 512]
        errors = (max(row[kind][name] for row in mine) for kind, name in columns)
        lines.append([layer, *(f"{error:.4f}" for error in errors)])
    return markdown_table(heads, lines)


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "against stock": against_stock, "cells": cells, "aims": aims, "many": many, "fp8 times": fp8_times,
    "fp8 errors": fp8_errors,
}  # fmt: skip


def part(name: str) -> str:
    """One of `PARTS` of the committed numbers."""
    return PARTS[name](json.loads(GOLDEN.read_text()))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="+", type=Path)
    data = golden(path.read_text().splitlines() for path in parser.parse_args().bench)
    rows = ",\n  ".join(json.dumps(row) for row in data.pop("rows"))
    GOLDEN.write_text(json.dumps(data, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')


if __name__ == "__main__":
    main()
