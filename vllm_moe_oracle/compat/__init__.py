"""The only files that know a vLLM version.

`check` says whether an installed release can be served. `current_adapter` gives the functions that speak that release's
language; it imports vLLM, so only code that runs inside vLLM calls it. The releases and their eras are in `eras`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..errors import StandDown
from .eras import CPU_RELEASES, ERAS, RELEASES, Era, Support, era_of, support, table

if TYPE_CHECKING:
    from .adapter import Adapter

__all__ = [
    "CPU_RELEASES",
    "ERAS",
    "RELEASES",
    "Era",
    "Support",
    "check",
    "current_adapter",
    "era_of",
    "support",
    "table",
]


def check(version: str, force: bool = False) -> None:
    """Whether a vLLM release can be served.

    Args:
        version: as vLLM reports it; local parts (``+cpu``) and development suffixes do not matter.
        force: serve it even if it lies outside the tested range.

    Raises:
        StandDown: it cannot, with the reason and what to do.
    """
    oldest, newest = RELEASES[0], RELEASES[-1]
    remedy = "MOE_ORACLE_FORCE=1 serves it all the same"
    try:
        release = Version(version).release
    except InvalidVersion:
        if force:
            return
        raise StandDown(f"vLLM's version {version!r} cannot be read; {oldest} to {newest} are tested", remedy) from None
    if not force and not Version(oldest).release <= release <= Version(newest).release:
        age = "older than the oldest" if release < Version(oldest).release else "newer than the newest"
        raise StandDown(f"vLLM {version} is {age} tested release; {oldest} to {newest} are tested", remedy)


@cache
def current_adapter() -> Adapter:
    """The adapter of the vLLM release in this process. Imports vLLM."""
    import vllm

    module, _, name = era_of(str(vllm.__version__)).adapter.partition(":")
    found: Adapter = getattr(importlib.import_module(module), name)()
    return found
