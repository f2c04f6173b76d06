"""The only files that know a vLLM version.

`supported` says whether an installed release can be served. `adapter` gives the functions that speak that release's
language; it imports vLLM, so only code that runs inside vLLM calls it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..errors import StandDown

if TYPE_CHECKING:
    from .adapter import Adapter

RELEASES = (
    "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1",
    "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""Releases that the plugin is tested with, oldest first."""


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
def adapter() -> Adapter:
    """The adapter of the vLLM release in this process. Imports vLLM."""
    from .adapter import Adapter

    return Adapter()
