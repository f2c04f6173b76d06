"""Architectures that a supported release of vLLM has and a later one has no more: ``_PREVIOUSLY_SUPPORTED_MODELS`` of
its registry of models."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

LAST_RELEASES = {
    "BaiChuanForCausalLM": "0.23.0",
    "BaichuanForCausalLM": "0.23.0",
    "BambaForCausalLM": "0.23.0",
    "Dots1ForCausalLM": "0.23.0",
    "ErnieForSequenceClassification": "0.23.0",
    "ErnieForTokenClassification": "0.23.0",
    "ErnieModel": "0.23.0",
    "InternLM2VEForCausalLM": "0.23.0",
    "InternLMForCausalLM": "0.23.0",
    "MiniMaxForCausalLM": "0.23.0",
    "MiniMaxM1ForCausalLM": "0.23.0",
    "MiniMaxText01ForCausalLM": "0.23.0",
    "MiniMaxVL01ForConditionalGeneration": "0.23.0",
    "QWenLMHeadModel": "0.23.0",
    "QwenVLForConditionalGeneration": "0.23.0",
    "Tarsier2ForConditionalGeneration": "0.23.0",
    "XverseForCausalLM": "0.23.0",
    "AquilaForCausalLM": "0.24.0",
    "AquilaModel": "0.24.0",
    "AyaVisionForConditionalGeneration": "0.24.0",
    "Grok1ForCausalLM": "0.24.0",
    "Grok1ModelForCausalLM": "0.24.0",
    "MantisForConditionalGeneration": "0.24.0",
    "MusicFlamingoForConditionalGeneration": "0.24.0",
    "TarsierForConditionalGeneration": "0.24.0",
    "FuyuForCausalLM": "0.25.0",
    "PersimmonForCausalLM": "0.25.0",
    "TeleChatForCausalLM": "0.25.0",
    "OuroForCausalLM": "0.26.0",
    "Plamo2ForCausalLM": "0.26.0",
    "ArcticForCausalLM": "0.28.0",
    "ChameleonForConditionalGeneration": "0.28.0",
    "Cheers": "0.28.0",
    "CheersForConditionalGeneration": "0.28.0",
    "Fairseq2LlamaForCausalLM": "0.28.0",
    "FireRedLIDForConditionalGeneration": "0.28.0",
    "GritLM": "0.28.0",
    "HCXVisionForCausalLM": "0.28.0",
    "MPTForCausalLM": "0.28.0",
    "MptForCausalLM": "0.28.0",
    "PrithviGeoSpatialMAE": "0.28.0",
    "RWForCausalLM": "0.28.0",
    "StableLMEpochForCausalLM": "0.28.0",
}
"""The last release that has each. A test holds the table to the newest list."""


def last_release_with(architectures: Iterable[object], vllm: str | None) -> tuple[str, str] | None:
    """The first of a model's architectures that a release of vLLM has no more, and the last release that has it.

    Args:
        architectures: ``architectures`` of its config.
        vllm: the release, as `min_versions.vllm_at_least` takes it.
    """
    for name in filter(LAST_RELEASES.get, (each for each in architectures if isinstance(each, str))):
        last = LAST_RELEASES[name]
        if _is_later(vllm, last):
            return name, last
    return None


def _is_later(vllm: str | None, last: str) -> bool:
    """Whether a version of vLLM comes after a release and its patch releases, which have the same models."""
    try:
        return vllm is None or Version(vllm).release[:2] > Version(last).release[:2]
    except InvalidVersion:
        return True
