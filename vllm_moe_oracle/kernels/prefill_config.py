"""From how many tokens the persistent kernels of `prefill.py` run a layer: a shipped table, else a heuristic."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .weights import PackedWeights, code_bits

MAX_BLOCK_TOKENS = 128  # most tokens of a block
# Bytes of shared memory for stages and results. The epilogue uses the rest.
_SHARED_MEMORY_BUDGET = 222 * 1024
_PERSISTENT_FROM = ((58, 0, 10e9), (34, 0, 20e9), (28, 0, 60e9), (15, 5000, 0))
"""The heuristic: from these rows per active expert, slots and multiplications of a call, these kernels are faster.

Their tiles need several waves to make up for what starting them costs: many multiplications, or many slots. From 854
calls with both kernels (`tests/golden/h200/hand-over.json`)."""
LONG_K = 4096
"""Columns from which the heuristics take deeper pipelines or wider steps, or share a tile's columns among programs."""


@dataclass(frozen=True)
class PrefillConfig:
    """How the persistent kernels run: steps of 64 columns held in shared memory, 0 for as many as fit."""

    num_stages: int = 0

    def __post_init__(self) -> None:
        if self.num_stages < 0 or self.num_stages == 1:
            raise ValueError(f"{self}: needs at least two stages, or 0")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def prefill_errors(weights: PackedWeights) -> list[str]:
    """Every reason why the persistent kernels cannot run this layer; an empty list when they can."""
    reasons = []
    if weights.hidden % 64:
        reasons.append(f"hidden size {weights.hidden} is not a multiple of 64, the columns of a step")
    # h may end with half a step: the copy fills the other half with zeros, and codes and MX scales are stored in whole
    # words.
    whole = 64 if weights.group == 32 and not weights.format.startswith("mx") else 32
    if weights.intermediate % whole:
        words = "64, the columns of a step: scales in groups of 32 end with the last column"
        reasons.append(f"intermediate size {weights.intermediate} is not a multiple of {words}")
    if not weights.group and weights.w13.zeros is not None:
        reasons.append("zero points of one scale per row are not copied ahead")
    return reasons


def stage_bytes(weights: PackedWeights) -> int:
    """Shared memory of one stage: 128 rows of x, 256 rows of codes, scales and zero points, 64 columns each."""
    codes = 256 * 64 * code_bits(weights.format) // 8
    words = 0
    if weights.format.startswith("mx"):
        words = 256
    elif weights.group:
        words = 128 * max(1, 64 // weights.group)
    zeros = weights.w13.zeros is not None
    return MAX_BLOCK_TOKENS * 64 * 2 + codes + words * 4 * (1 + zeros) + 16


def result_bytes(gated: bool) -> int:
    """Shared memory of a tile's 16-bit results: 256 rows, or 128 after a gated activation, of 128 tokens."""
    return MAX_BLOCK_TOKENS * (128 if gated else 256) * 2


def resolve_stages(weights: PackedWeights, config: PrefillConfig, gated: bool) -> int:
    """Stages that a product of this layer uses; gated: the first of a gated layer."""
    return config.num_stages or min(8, (_SHARED_MEMORY_BUDGET - result_bytes(gated)) // stage_bytes(weights))


@functools.cache
def measured_prefill_table() -> dict[str, Any]:
    """The shipped table: format and group -> shape -> rows of {"tokens": largest, "config": fields or null}."""
    path = Path(__file__).with_name("prefill.json")
    return json.loads(path.read_text()) if path.exists() else {}


def choose_prefill_config(
    weights: PackedWeights, name: str, shape: str, tokens: int, *, rows: float, slots: float, small_tiles: bool
) -> PrefillConfig | None:
    """The persistent kernels' configuration, or None where the small tiles are faster or the only ones.

    The shipped table's layers change over at 13 to 50 rows.

    Args:
        weights: the layer; tensors on the meta device will do.
        name, shape: keys of `measured_prefill_table`.
        tokens: rows of x.
        rows: expected slots per active expert.
        slots: expected slots of this rank's experts.
        small_tiles: the heuristic prefers the small tiles.
    """
    if prefill_errors(weights):
        return None
    for row in measured_prefill_table().get(name, {}).get(shape, ()):
        if tokens <= row["tokens"]:
            return None if row["config"] is None else PrefillConfig(**row["config"])
    products = slots * weights.hidden * (weights.w13.rows + weights.intermediate)
    pays = any(rows >= least[0] and slots >= least[1] and products >= least[2] for least in _PERSISTENT_FROM)
    return PrefillConfig() if pays and not small_tiles else None
