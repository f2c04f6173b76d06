"""The interface to vLLM: adapters by release, and the patches that register this project's methods.

`check_release` says whether the installed release is supported. `current_adapter` returns its adapter; it imports vLLM,
so only code that runs inside vLLM calls it. `releases.supported` lists the releases and their adapters.

Which mechanism for which difference between releases:

* A rule needs to know whether a release can do something: a constant in `releases.min_versions`. It works without vLLM.
* vLLM's engine, layer or kernel has another interface: a method of `Adapter`, overridden in `legacy_adapters` for the
  group of older releases. `Adapter` itself is written against the newest release.
* Only a keyword comes and goes: pass it if the signature has it (`adapter._supported_kwargs`), or for an operator if
  its schema has it (`backends._stock.schema_arguments`).
* A stock quantization class exists in some releases only: `required_modules` and the names in a method's ``SERVES``.
* An environment variable was removed: `ignored_env_vars`.
* A stock class lacks a method or an attribute in some releases: `getattr` with the fallback where it is read, and a
  comment that names the release (`methods.online`).
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..errors import StandDown
from ..releases.supported import RELEASES, release_group
from ..settings import env_var

if TYPE_CHECKING:
    from .adapter import Adapter


def check_release(version: str, force: bool = False) -> None:
    """Checks that a vLLM release is supported.

    Args:
        version: as vLLM reports it; local parts (``+cpu``) and development suffixes do not matter.
        force: accept any release.

    Raises:
        StandDown: the release is outside the tested range, or cannot be parsed.
    """
    oldest, newest = RELEASES[0], RELEASES[-1]
    remedy = f"{env_var('force')}=1 serves it all the same"
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

    found: Adapter = resolve_name(release_group(str(vllm.__version__)).adapter)()
    return found
