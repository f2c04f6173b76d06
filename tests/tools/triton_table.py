"""The table in vllm_moe_oracle/measuring/README.md of how far times move with another Triton.

From the profile of torch 2.14 and Triton 3.8, and those of torch 2.11 and Triton 3.6 on the same kind of GPU.
`python -m tests.tools.generate --write` puts it into the page.
"""

from __future__ import annotations

import math
import statistics

from tests.lib.readme_sections import markdown_table
from tests.tools import merge_times
from tests.tools.kernel_choices import known_replaced

GPU = "NVIDIA H200"
OLD, NEW = "3.6.0", "3.8.0"
GROUPS = {
    "this project's": ("hopper_",),
    "Marlin, Humming (not Triton)": ("marlin_", "humming_"),
    "OpenAI's, MXFP4": ("triton_mxfp4",),
    "vLLM's, integers": ("triton_wna16",),
}
"""Kernels, and how their backends' names start."""

Key = tuple[str, str, int, bool]
"""Layer, backend, number of tokens, and whether the tile has been replaced since."""


def times(triton: str) -> dict[Key, float]:
    """Microseconds of the shipped profiles, with the kernels' own tiles of then."""
    found, replaced = merge_times.shipped_for(GPU, {"triton": triton}), known_replaced()
    return {
        (
            str(entry.kernel_shape), each.backend, each.tokens,
            str(each.tokens) in replaced.get(path.name, {}).get(f"{entry.kernel_shape}: {each.backend}", {}),
        ): each.us
        for path, profile in found.items()
        for entry in profile.entries
        for each in profile.samples(entry.kernel_shape)
        if each.routing == "uniform" and not each.failure and not each.tile
    }  # fmt: skip


def logarithms(starts: tuple[str, ...]) -> list[float]:
    """Of the ratios of times under the new Triton to those under the old."""
    old, new = times(OLD), times(NEW)
    return [math.log(new[key] / old[key]) for key in new.keys() & old.keys() if key[1].startswith(starts)]


def error(found: list[float]) -> float:
    """The root of the mean square: what a time under the old Triton is wrong by under the new."""
    return math.sqrt(statistics.fmean(each * each for each in found))


def moved() -> str:
    """How far times move from one Triton to the other, by whose kernels they are."""
    lines = []
    for name, starts in GROUPS.items():
        found = logarithms(starts)
        lines.append([name, len(found), f"{math.exp(statistics.fmean(found)):.2f}", f"{error(found):.2g}"])
    heads = ["kernels", "times", "geometric mean", "error of a time (RMS of the logarithm)"]
    return markdown_table(heads, lines)
