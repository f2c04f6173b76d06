"""The layer under construction. vLLM does not pass it to the constructors of quantization methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_current_layer: ContextVar[tuple[Any, str] | None] = ContextVar("moe_oracle_layer_under_construction", default=None)


@contextmanager
def set_current_layer(layer: Any, name: str = "") -> Iterator[None]:
    """Makes a layer the current one, for the quantization methods constructed inside.

    Args:
        layer: vLLM's layer.
        name: its name in the model; "" takes ``layer.layer_name``.
    """
    token = _current_layer.set((layer, name))
    try:
        yield
    finally:
        _current_layer.reset(token)


def current_layer() -> tuple[Any, str]:
    """The layer under construction and its name; None and "" outside `set_current_layer`."""
    layer, name = _current_layer.get() or (None, "")
    return layer, name or str(getattr(layer, "layer_name", ""))
