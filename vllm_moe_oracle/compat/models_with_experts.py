"""Which models this plugin serves: those with experts. A model without any is stock vLLM's in everything.

Our config classes accept what stock ones refuse (dtypes, zero points, lists in another form), because experts can be
served with it. A model without experts would get past stock's clear refusal and fail later. So vLLM reads its
quantization config by stock classes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none

from .engine_adapter import models_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_MAX_DEPTH = 8
"""Levels of a model's config that are searched: vLLM reads fields of the text model's config, two or three deep."""

_reading: ContextVar[bool | None] = ContextVar("moe_oracle_reading", default=None)
"""Whether the model whose quantization config vLLM is reading has experts; None at other times."""


def has_experts(model_config: ModelConfig) -> bool:
    """Whether a model has experts: vLLM says so, or a field of the model's config is about experts.

    Args:
        model_config: vLLM's `ModelConfig`.
    """
    if getattr(model_config, "is_moe", True):
        return True
    return _mentions_experts(model_config.hf_config.to_dict(), _MAX_DEPTH)


def _mentions_experts(config: Any, depth: int) -> bool:
    if not depth:
        return True  # unknown: as for a model with experts
    if isinstance(config, list | tuple):
        return any(_mentions_experts(each, depth - 1) for each in config if isinstance(each, Mapping | list | tuple))
    if not isinstance(config, Mapping):
        return False
    return any(
        bool(value and ("expert" in str(name).lower() or "moe" in str(name).lower()))
        or _mentions_experts(value, depth - 1)
        for name, value in config.items()
        if name != "quantization_config"
    )


def is_current_model_served() -> bool:
    """False while vLLM reads the quantization config of a model without experts, or builds such a model."""
    reading = _reading.get()
    if reading is not None:
        return reading
    engine = get_current_vllm_config_or_none()
    models = [] if engine is None else models_of(engine)
    return not models or any(map(has_experts, models))


def read_quantization_config(original: Any, model_config: ModelConfig, *args: Any, **kwargs: Any) -> Any:
    """vLLM's function that reads or checks the quantization config of a model; lookups depend on the model's experts.

    Args:
        original: the stock function, or the method of `model_config`.
        model_config: vLLM's `ModelConfig`.
        args: its other arguments.
        kwargs: likewise.
    """
    with _reading_config_of(model_config):
        return original(model_config, *args, **kwargs)


@contextmanager
def _reading_config_of(model_config: ModelConfig) -> Iterator[None]:
    token = _reading.set(has_experts(model_config))
    try:
        yield
    finally:
        _reading.reset(token)
