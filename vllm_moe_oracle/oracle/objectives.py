"""What a measured choice is for: the numbers of tokens that count, and how much each does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SettingError

LARGEST = 1 << 20
"""More tokens than any call of a layer has."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Numbers of tokens with their weights.

    Attributes:
        name: what the user wrote.
        weights: pairs of a number of tokens and its weight, ascending; weights are positive and sum to one.
    """

    name: str
    weights: tuple[tuple[int, float], ...]

    @property
    def largest(self) -> int:
        """The largest number of tokens that counts."""
        return self.weights[-1][0]

    def __str__(self) -> str:
        return self.name


_DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Steps of vLLM's default CUDA-graph sizes: a decode step has one token a running request."""
_PREFILL = (512, 1024, 2048, 4096)
"""Chunks of prompts: vLLM's default limits on scheduled tokens are 2048 to 8192."""


def _even(counts: tuple[int, ...], share: float = 1.0) -> dict[int, float]:
    return {count: share / len(counts) for count in counts}


_NAMED = {
    "decode": _even(_DECODE),
    "prefill": _even(_PREFILL),
    "balanced": _even(_DECODE, 0.5) | _even(_PREFILL, 0.5),
}

NAMES = tuple(_NAMED)
"""Objectives that have a name."""


def parse(text: str, where: str = "objective") -> Objective:
    """An objective by its name, or from weights by number of tokens: ``1:3,64:2,4096:1``.

    Args:
        text: what the user wrote.
        where: the setting's source, for messages.

    Raises:
        SettingError: neither.
    """
    word = text.strip().lower()
    if word in _NAMED:
        return Objective(word, _normalised(_NAMED[word]))
    remedy = f"Write one of {', '.join(NAMES)}, or weights by number of tokens, like 1:3,64:2,4096:1"
    weights: dict[int, float] = {}
    for part in word.split(","):
        before, colon, after = part.partition(":")
        try:
            tokens, weight = int(before), float(after) if colon else math.nan
        except ValueError:
            tokens, weight = 0, math.nan
        if not 1 <= tokens <= LARGEST or not 0 < weight < math.inf or tokens in weights:
            raise SettingError(f"{text!r} is no objective: {part.strip()!r} is no new pair", remedy, where)
        weights[tokens] = weight
    if not math.isfinite(sum(weights.values())):
        raise SettingError(f"{text!r} is no objective: its weights have no sum", remedy, where)
    return Objective(word, _normalised(weights))


def _normalised(weights: dict[int, float]) -> tuple[tuple[int, float], ...]:
    total = sum(weights.values())
    return tuple((tokens, weight / total) for tokens, weight in sorted(weights.items()))
