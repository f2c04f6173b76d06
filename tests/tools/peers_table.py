"""The table of other projects' kernels in vllm_moe_oracle/kernels/RESULTS.md, from ``bench --peers --jsonl``.

The files are tests/golden/h200/peers*-vllm-VERSION.jsonl of the newest release as `bench` wrote them, one for each set
of packages. Without them the page has only the list of kernels that are not timed. `python -m tests.tools.generate
--write` puts both into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib import golden_files
from tests.lib.readme_sections import markdown_table, paragraph
from tests.tools.kernel_tables import OURS
from vllm_moe_oracle.measurements.bench_records import PEER_PREFIX, STOCK_DEFAULT
from vllm_moe_oracle.measuring.peers import LISTED, peer_classes

NAMES = {STOCK_DEFAULT: "stock"}
"""What the table calls a layer that is no backend."""


def paths() -> list[Path]:
    """The benchmarks with peers of the newest measured release."""
    if not list((golden_files.FOLDER / "h200").glob("peers-vllm-*")):
        return []
    first = golden_files.newest("peers")
    return [first, *sorted(first.parent.glob(first.name.replace("peers-", "peers-*-", 1)))]


def compared(record: dict[str, Any]) -> tuple[float, str, float] | None:
    """Our time, the fastest other kernel and its time; None where one is missing.

    Ours is this project's kernel with activations in 16 bits.
    """
    others = others_of(record)
    ours = min((time for name, time in record["us"].items() if name in OURS), default=None)
    if ours is None or not others:
        return None
    best = min(others, key=lambda name: others[name])
    return ours, NAMES.get(best, best), others[best]


def others_of(record: dict[str, Any]) -> dict[str, float]:
    """Times of peers, backends and stock's layers that do not quantize activations, as far as a record says so."""
    precision = record.get("activations", {})
    return {
        name: time
        for name, time in record["us"].items()
        if not name.startswith("hopper_") and name != "emulation" and precision.get(name, "16bit") == "16bit"
    }


def times(records: Sequence[dict[str, Any]]) -> str:
    """By layer and number of tokens: our time, the best other and its time over ours; every loss by name, what ours was
    compared with, and how much longer each peer takes."""
    cells = {
        (record["layer"]["name"], record["tokens"]): found
        for record in records
        if (found := compared(record)) is not None
    }
    counts = sorted({tokens for _, tokens in cells})
    lines = []
    for layer in dict.fromkeys(name for name, _ in cells):
        parts = []
        for count in counts:
            found = cells.get((layer, count))
            parts.append("" if found is None else f"{found[0]:.1f}, {found[1]}, {found[2] / found[0]:.2f}")
        lines.append([layer, *parts])
    lost = [
        f"{layer} at {tokens}: {name} {time / ours:.2f}"
        for (layer, tokens), (ours, name, time) in cells.items()
        if time < ours
    ]
    others = ", ".join(dict.fromkeys(NAMES.get(name, name) for record in records for name in others_of(record)))
    said = f"Ours is first in {len(cells) - len(lost)} of {len(cells)} cells, beside {others}"
    said += f"; not first: {'; '.join(lost)}." if lost else "."
    ratios: dict[str, list[float]] = {}
    for record in records:
        if (found := compared(record)) is not None:
            for name, us in others_of(record).items():
                if name.startswith(PEER_PREFIX):
                    ratios.setdefault(name, []).append(us / found[0])
    for name, found_ratios in ratios.items():
        said += f" {name} takes {min(found_ratios):.2f} to {max(found_ratios):.2f} times as long as ours."
    return f"{markdown_table(['layer', *counts], lines)}\n\n{paragraph(said)}"


def failures(records: Sequence[dict[str, Any]]) -> list[str]:
    """Kernels of other projects that have no time for a layer, each with its first reason."""
    found: dict[tuple[str, str], str] = {}
    for record in records:
        for name, reason in record.get("failures", {}).items():
            if name.startswith(PEER_PREFIX):
                found.setdefault((record["layer"]["name"], name), reason)
    return [f"{layer}, {name}: {reason}" for (layer, name), reason in found.items()]


def peers(found: Sequence[dict[str, Any]]) -> str:
    """The kernels of other projects, with the release that was timed, or why it was not.

    Args:
        found: of each benchmark, what its conditions say of peers.
    """
    timed = {name: version for each in found for name, version in each["timed"].items()}
    rows = [(name, f"timed: {version}") for name, version in timed.items()]
    # Of the peers that the package has: a file may name others.
    untimed = {each.name for each in peer_classes()} - set(timed)
    skipped = {name: reason for each in found for name, reason in each["skipped"].items() if name in untimed}
    rows += [(name, f"skipped: {reason}") for name, reason in skipped.items()]
    rows += [(f"{each.name} ({each.package})", each.reason) for each in LISTED]
    return markdown_table(["kernel", "timed, or why not"], rows)


def part(lines: Sequence[str]) -> str:
    """What the page holds for a benchmark's lines, without its peers."""
    conditions, records = golden_files.records(lines)
    packages = conditions["packages"]
    where = f"{conditions['gpu']}, vLLM {packages['vllm']}, torch {packages['torch']}, Triton {packages['triton']}"
    said = [paragraph(f"Without a time: {'; '.join(found)}.")] if (found := failures(records)) else []
    return "\n\n".join([f"{where}:", times(records), *said, paragraph(f"Repeat with `{conditions['command']}`.")])


def table() -> str:
    """The part of the page."""
    files = [file.read_text(encoding="utf-8").splitlines() for file in paths()]
    return "\n\n".join([*map(part, files), peers([golden_files.records(lines)[0]["peers"] for lines in files])])
