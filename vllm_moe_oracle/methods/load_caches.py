"""What holds for one load of a model only: caches that are forgotten together when it ends.

Each cache joins where it is made, so that none can be left out. An answer of the previous model would be wrong for the
next one.
"""

from __future__ import annotations

from typing import Protocol, TypeVar


class _Clearable(Protocol):
    def clear(self) -> None: ...


Cache = TypeVar("Cache", bound=_Clearable)

_caches: list[_Clearable] = []
_kept_for_reload: list[_Clearable] = []


def per_load(cache: Cache, kept_for_reload: bool = False) -> Cache:
    """The cache itself, which `end_load` clears from now on.

    Args:
        cache: what a module keeps for all layers of a load.
        kept_for_reload: it stays where a reload of all layers ends: something is still to come that needs it.
    """
    (_kept_for_reload if kept_for_reload else _caches).append(cache)
    return cache


def end_load(reloading: bool = False) -> None:
    """Ends a load: its caches do not hold for other weights, whether another model's or reloaded ones.

    Args:
        reloading: all layers were reloaded, and the check of a reload is still to come.
    """
    for each in _caches if reloading else (*_caches, *_kept_for_reload):
        each.clear()
