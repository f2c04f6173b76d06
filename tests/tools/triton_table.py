"""The tables of another Triton in vllm_moe_oracle/measuring/README.md: how far times move, and the gain over stock.

From the profile of torch 2.14 and Triton 3.8, the benchmark that made it, and the profiles of torch 2.11 and Triton
3.6 on the same kind of GPU. `python -m tests.tools.generate --write` puts them into the page.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from tests.lib import golden_files
from tests.tools import merge_times
from vllm_moe_oracle.measurements.bench_records import STOCK_DEFAULT, BenchRecord

GPU = "NVIDIA H200"
OLD, NEW = "3.6.0", "3.8.0"
RECORDS = golden_files.newest("listed-triton-3.8")
GROUPS = {
    "this project's": ("hopper_",),
    "Marlin, Humming (not Triton)": ("marlin_", "humming_"),
    "OpenAI's, MXFP4": ("triton_mxfp4",),
    "vLLM's, integers": ("triton_wna16",),
}
"""Kernels, and how their backends' names start."""

Key = tuple[str, str, int]


def times(triton: str) -> dict[Key, float]:
    """Microseconds by layer, backend and number of tokens of the shipped profiles, with the kernels' own tiles."""
    found = merge_times.shipped_for(GPU, {"triton": triton}).values()
    return {
        (str(entry.kernel_shape), each.backend, each.tokens): each.us
        for profile in found
        for entry in profile.entries
        for each in profile.samples(entry.kernel_shape)
        if each.routing == "uniform" and not each.failure and not each.tile
    }


def logarithms(starts: tuple[str, ...]) -> list[float]:
    """Of the ratios of times under the new Triton to those under the old."""
    old, new = times(OLD), times(NEW)
    return [math.log(new[key] / old[key]) for key in new.keys() & old.keys() if key[1].startswith(starts)]


def error(found: list[float]) -> float:
    """The root of the mean square: what a time under the old Triton is wrong by under the new."""
    return math.sqrt(statistics.fmean(each * each for each in found))


def moved() -> str:
    """How far times move from one Triton to the other, by whose kernels they are."""
    lines = ["| kernels | times | geometric mean | error of a time (RMS of the logarithm) |", "|---|---|---|---|"]
    for name, starts in GROUPS.items():
        found = logarithms(starts)
        mean = math.exp(statistics.fmean(found))
        lines.append(f"| {name} | {len(found)} | {mean:.2f} | {error(found):.2g} |")
    return "\n".join(lines)


def gains() -> dict[int, list[float]]:
    """Stock's default time over that of this project's 16-bit kernel, each layer's, by number of tokens. Where the
    kernel chooses another tile by now, the profile has no time, and there is no gain."""
    found: dict[int, list[float]] = {}
    kept = times(NEW)
    for line in RECORDS.read_bytes().splitlines()[1:]:
        record = msgspec.json.decode(line, type=BenchRecord)
        (own,) = [name for name in record.us if name.startswith("hopper_") and not name.endswith("_w8a8")]
        if (str(record.kernel_shape), own, record.tokens) in kept:
            found.setdefault(record.tokens, []).append(record.us[STOCK_DEFAULT] / record.us[own])
    return dict(sorted(found.items()))


def gain() -> str:
    """The gain over stock under the new Triton, by number of tokens."""
    found = gains()
    whole = [each for ratios in found.values() for each in ratios]
    rows = {str(tokens): ratios for tokens, ratios in found.items()} | {"all": whole}
    means = [f"{statistics.geometric_mean(each):.2f}" for each in rows.values()]
    spans = [f"{min(each):.2f} to {max(each):.2f}" for each in rows.values()]
    return "\n".join(
        [
            f"| tokens | {' | '.join(rows)} |",
            "|---" * (1 + len(rows)) + "|",
            f"| geometric mean of {min(map(len, found.values()))} to {len(found[1])} layers | {' | '.join(means)} |",
            f"| slowest to fastest layer | {' | '.join(spans)} |",
        ]
    )
