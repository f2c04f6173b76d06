"""Which layer is being built: vLLM's constructors of methods do not say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_layer: ContextVar[tuple[Any, str] | None] = ContextVar("moe_oracle_layer_under_construction", default=None)


@contextmanager
def under_construction(layer: Any, name: str = "") -> Iterator[None]:
    """Lets the method that is made inside know which layer it is for."""
    token = _layer.set((layer, name))
    try:
        yield
    finally:
        _layer.reset(token)


def current_layer() -> tuple[Any, str]:
    """The layer that is being built and its name; None and an empty name outside `under_construction`."""
    layer, name = _layer.get() or (None, "")
    return layer, name or str(getattr(layer, "layer_name", ""))
