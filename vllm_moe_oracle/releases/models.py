"""What releases of vLLM have of a model's architectures: the model at all, and the balancing of its experts."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from .vllm_names import READ_FROM, REMOVED_MODELS, UNBALANCED_MODELS


def last_release_with(architectures: Iterable[object], vllm: str | None) -> tuple[str, str] | None:
    """The first of a model's architectures that a release of vLLM has no more, and the last release that has it.

    Args:
        architectures: ``architectures`` of its config.
        vllm: the release, as `min_versions.vllm_at_least` takes it.
    """
    for name in filter(REMOVED_MODELS.get, (each for each in architectures if isinstance(each, str))):
        last = REMOVED_MODELS[name]
        if _is_later(vllm, last):
            return name, last
    return None


def unbalanced_model(architectures: Iterable[object], vllm: str | None) -> str:
    """The first of a model's architectures none of whose experts a release of vLLM moves between ranks (EPLB), since
    its class is no `MixtureOfExperts`; "" where there is none, or it is not known.

    Args:
        architectures: ``architectures`` of its config.
        vllm: the release, as `min_versions.vllm_at_least` takes it.
    """
    for name in filter(UNBALANCED_MODELS.get, (each for each in architectures if isinstance(each, str))):
        last = UNBALANCED_MODELS[name]
        if last == READ_FROM[-1] or not _is_later(vllm, last):
            return name
    return ""


def _is_later(vllm: str | None, last: str) -> bool:
    """Whether a version of vLLM comes after a release and its patch releases, which have the same models."""
    try:
        return vllm is None or Version(vllm).release[:2] > Version(last).release[:2]
    except InvalidVersion:
        return True
