"""What vLLM calls in every process: `register`.

It never raises and never imports what vLLM would not import anyway: an error here would take the server down, and an
error at import would make the plugin disappear without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .errors import OracleError, StandDown

if TYPE_CHECKING:
    from .compat.patches import PatchManager

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
    not a tested one, or when anything goes wrong; the `strict` setting turns the last two into errors.
    """
    if _process.patches is not None:
        return
    strict = False
    try:
        from . import settings

        chosen = settings.load()
        strict = chosen.strict
        _register(chosen)
    except Exception as error:  # an error here would end the server; it is recorded, reported, and raised when strict
        _stand_down(error)
        if strict:
            raise


def _register(chosen: object) -> None:
    from . import compat, methods
    from .compat.patches import PatchManager
    from .settings import Settings

    assert isinstance(chosen, Settings)
    version = _vllm_version()
    if not chosen.enabled:
        _process.state = PluginState(False, f"switched off by {chosen.source('enabled')}", version)
        logger.info("moe_oracle: %s; stock vLLM serves", _process.state.reason)
        return
    if version is None:
        raise StandDown("vLLM is not installed")
    compat.check(version, chosen.force)
    patches = PatchManager()
    from .compat.registration import patches_for

    try:
        for patch in patches_for(version, methods.CONFIGS, methods.METHODS):
            patches.apply(patch)
    except Exception:
        patches.undo()
        raise
    _process.patches = patches
    _process.state = PluginState(True, "registered", version, tuple(sorted(methods.CONFIGS)))
    logger.info("moe_oracle: active on vLLM %s", version)


def unregister() -> None:
    """Gives vLLM its own objects back; layers that were built keep running. For tests and notebooks."""
    if _process.patches is not None:
        _process.patches.undo()
    _process.patches = None
    _process.state = PluginState(False, "unregistered", _process.state.vllm)


def _vllm_version() -> str | None:
    from .device import installed_packages

    return installed_packages().get("vllm")


def _stand_down(error: Exception) -> None:
    reason = str(error) if isinstance(error, OracleError) else f"{type(error).__name__}: {error}"
    _process.state = PluginState(False, reason, _vllm_version())
    logger.warning("moe_oracle stands down, stock vLLM serves: %s", reason)
