"""Objectives of measured choices: the token counts that matter, with a weight for each."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from .decimals import parse_count, parse_decimal

MAX_TOKENS = 1 << 20
"""The largest token count of an objective; no call of a layer has more tokens."""

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""Limits of a weight: beyond them one token count is lost in the rounding of another."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Token counts with their weights.

    Attributes:
        name: as the user wrote it.
        weights: pairs of a token count and its weight, in ascending order; the weights are positive and sum to one.
    """

    name: str
    weights: tuple[tuple[int, float], ...]

    @property
    def largest(self) -> int:
        """The largest token count."""
        return self.weights[-1][0]

    def __str__(self) -> str:
        return self.name


_DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""vLLM's default CUDA graph sizes, in steps: a decode step has one token per running request."""
_PREFILL_TOKENS = (512, 1024, 2048, 4096)
"""Chunked prefill: vLLM's defaults for the largest number of scheduled tokens are 2048 to 8192."""


def _equal_weights(counts: tuple[int, ...], share: float = 1.0) -> dict[int, float]:
    return {count: share / len(counts) for count in counts}


_PRESETS = {
    "decode": _equal_weights(_DECODE_TOKENS),
    "prefill": _equal_weights(_PREFILL_TOKENS),
    "balanced": _equal_weights(_DECODE_TOKENS, 0.5) | _equal_weights(_PREFILL_TOKENS, 0.5),
}

PRESET_NAMES = tuple(_PRESETS)
"""Names of the predefined objectives."""


def parse_objective(text: str, where: str = "objective") -> Objective:
    """An objective from its name, or from weights by token count: ``1:3,64:2,4096:1``.

    Args:
        text: the setting's value.
        where: the setting's source, for messages.

    Raises:
        SettingError: it is neither.
    """
    word = text.strip().lower()
    if word in _PRESETS:
        return Objective(word, _normalized(_PRESETS[word]))
    remedy = f"Write one of {', '.join(PRESET_NAMES)}, or weights by number of tokens such as 1:3,64:2,4096:1"
    weights: dict[int, float] = {}
    for part in word.split(","):
        before, colon, after = part.partition(":")
        tokens, weight = parse_count(before), parse_decimal(after)
        if not 1 <= tokens <= MAX_TOKENS or not MIN_WEIGHT <= weight <= MAX_WEIGHT or tokens in weights:
            rule = f"{tokens} tokens are given twice" if tokens in weights else f"{part.strip()!r} is not TOKENS:WEIGHT"
            if weight > 0 and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                rule = f"the weight {after.strip()} is not in {MIN_WEIGHT:f} to {MAX_WEIGHT:.0f}"
            rule = f"{text!r} is not an objective: {rule}" if colon or "," in word else f"{text!r} is not an objective"
            raise SettingError(rule, remedy, where)
        weights[tokens] = weight
    return Objective(word, _normalized(weights))


def _normalized(weights: dict[int, float]) -> tuple[tuple[int, float], ...]:
    total = sum(weights.values())
    return tuple((tokens, weight / total) for tokens, weight in sorted(weights.items()))
