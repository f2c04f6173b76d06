"""Architectures with experts that vLLM had and has no more (``_PREVIOUSLY_SUPPORTED_MODELS`` of its registry)."""

from __future__ import annotations

from collections.abc import Iterable

from .min_versions import vllm_at_least

LAST_RELEASES = {
    "Dots1ForCausalLM": "0.23.0",
    "MiniMaxForCausalLM": "0.23.0",
    "MiniMaxM1ForCausalLM": "0.23.0",
    "MiniMaxText01ForCausalLM": "0.23.0",
    "MiniMaxVL01ForConditionalGeneration": "0.23.0",
    "Grok1ForCausalLM": "0.24.0",
    "Grok1ModelForCausalLM": "0.24.0",
    "ArcticForCausalLM": "0.28.0",
}
"""The last release that has each."""


def last_release_with(architectures: Iterable[object], vllm: str | None) -> tuple[str, str] | None:
    """The first of a model's architectures that a release of vLLM has no more, and the last release that has it.

    Args:
        architectures: ``architectures`` of its config.
        vllm: the release, as `vllm_at_least` takes it.
    """
    for name in filter(LAST_RELEASES.get, (each for each in architectures if isinstance(each, str))):
        last = LAST_RELEASES[name]
        if vllm_at_least(vllm, minimum=last) and not (vllm or "").startswith(last):
            return name, last
    return None
