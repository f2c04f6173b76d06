"""Names of backends in settings and options: which are unknown, and which one was meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ..backends import Backend
from ..core.problem import SchemeName
from ..errors import SettingError, did_you_mean
from ..releases.vllm_names import MOE_BACKENDS
from ..settings import AUTO, Settings, env_var, without_effect
from .registry import Registry, default_registry


def check_backend_names(
    settings: Settings,
    moe_backend: str = AUTO,
    registry: Registry | None = None,
    option: str = "--moe-backend",
    schemes: Collection[SchemeName] = (),
) -> None:
    """Refuses names that select no backend for any scheme: they are misspelled.

    Args:
        settings: the user's settings.
        moe_backend: vLLM's ``--moe-backend``.
        registry: the backends; None for the default registry of this process.
        option: where the user gave `moe_backend`, for the error.
        schemes: those of the model's layers, whose backends are suggested first; empty where they are unknown.

    Raises:
        SettingError: `backend`, `overrides`, `disable` or `moe_backend` has an unknown name, or `disable` has all
            that another one names, and ``on_unavailable`` is not ``fallback``.
    """
    registry = registry if registry is not None else default_registry()
    if settings.on_unavailable == "error":
        for error in _disabled_choices(settings, moe_backend, registry, option):
            raise error
    named = known_names(registry)
    options = registry.families().keys() | MOE_BACKENDS | {AUTO}  # of layers that are left to stock vLLM, too
    suggested = [backend for backend in registry if set(backend.schemes) & set(schemes)]
    for names, valid, source in (
        ([settings.backend], named | {AUTO}, settings.source("backend")),
        ([each.backend for each in settings.overrides], named | {AUTO}, settings.source("overrides")),
        (settings.disable, named, settings.source("disable")),
        # A name of this project is known here, and refused by each layer with the setting that takes it.
        ([] if moe_backend in registry else [moe_backend], options, option),
    ):
        require_known(names, valid, source, registry, suggested)


def _disabled_choices(settings: Settings, moe_backend: str, registry: Registry, option: str) -> Iterator[SettingError]:
    """Errors for backends that are chosen by name and disabled."""
    disabled = {each for name in settings.disable for each in registry.selected(name)}
    chosen = [(settings.backend, settings.source("backend")), (moe_backend, option)]
    chosen += [(each.backend, settings.source("overrides")) for each in settings.overrides]
    for name, source in dict.fromkeys(chosen):
        selected = registry.selected(name)
        if selected and disabled.issuperset(selected):
            words = ",".join(settings.disable)
            rule = f"chooses {name}, which {settings.source('disable')} ({words}) disables"
            yield SettingError(rule, f"Choose another one, or take {name} out of {env_var('disable')}", source)


def list_without_effect(settings: Settings, moe_backend: str | None, registry: Registry) -> list[str]:
    """What the user has set in vain (`settings.without_effect`), also a choice that falls back because it is disabled.

    Args:
        settings: the user's settings.
        moe_backend: vLLM's ``--moe-backend``; None where it is unknown.
        registry: the backends.

    Raises:
        SettingError: there is such a setting, and the setting `strict` is on. Variables that may be another program's
            are never an error.
    """
    found = [*without_effect(settings, moe_backend)]
    if settings.enabled:
        found += _disabled_choices(settings, moe_backend or AUTO, registry, "--moe-backend")
    if settings.strict and (certain := [each for each in found if each not in settings.similar_variables]):
        raise certain[0]
    return [str(each) for each in found]


def known_names(registry: Registry) -> set[str]:
    """The names of single backends and those of families."""
    return {*(backend.name for backend in registry), *registry.families()}


def suggest(name: str, valid: Iterable[str], suggested: Iterable[Backend] = ()) -> str:
    """``Did you mean hopper_mxfp8? `` or "": a valid name of the suggested backends before any other, unless a slip of
    a letter in another one explains the unknown name."""
    valid = sorted(valid)
    first = sorted({word for each in suggested for word in (each.name, *each.vllm_names)} & {*valid})
    found = (did_you_mean(name, names, strict=strict) for strict in (True, False) for names in (first, valid))
    return next(filter(None, found), "")


def require_known(
    names: Iterable[str], valid: Collection[str], source: str, registry: Registry, suggested: Iterable[Backend]
) -> None:
    """Refuses names that are neither valid nor the name of an entry point that could not be loaded; the error suggests
    names as `suggest`."""
    unknown = [name for name in names if name not in valid and name not in registry.load_errors]
    if unknown:
        rule = f"{', '.join(map(repr, unknown))} {'is not a backend' if len(unknown) == 1 else 'are not backends'}"
        remedy = f"{suggest(unknown[0], valid, suggested)}Valid are {', '.join(sorted(valid))}"
        if registry.load_errors:  # the name of an entry point may differ from its backend's
            remedy += f"; entry points that could not be loaded: {', '.join(registry.load_errors)}"
        raise SettingError(rule, remedy, source)
