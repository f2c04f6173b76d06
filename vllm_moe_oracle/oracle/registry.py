"""The registry of backends: every public module of `vllm_moe_oracle.backends`, and third parties' entry points.

A third party's backend that cannot be loaded is recorded in `Registry.load_errors`, and the others stay usable. The
reason is shown by `status` and raised by an explicit choice of that backend. An import that ends the process or that
does not end cannot be stopped from here: the log names the entry point before and while it is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, entry_points, version
from types import MappingProxyType
from typing import get_args

from .. import backends as builtin_package
from .. import settings
from ..backends import Backend
from ..core.problem import SchemeName
from ..errors import (
    RegistryError,
    SettingError,
    UnknownBackendError,
    describe_error,
    did_you_mean,
    is_interruption,
    sanitize,
)
from ..releases.vllm_names import MOE_BACKENDS
from ..settings import AUTO
from . import watchdog
from .checked_backend import CheckedBackend, is_own
from .watchdog import third_party_code

logger = logging.getLogger("vllm.moe_oracle")

ENTRY_POINT_GROUP = "vllm_moe_oracle.backends"

REFERENCE_BACKEND = "emulation"
"""The backend that computes what the format defines, expert by expert, on any device. On a CPU it runs when no kernel
can; on a GPU, where that would be far slower than stock vLLM, only when it is asked for by name."""


class Registry:
    """Backends by name, in the order of their registration.

    Attributes:
        load_errors: why a third party's backend could not be loaded, by the name of its entry point.
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._origin: dict[str, str] = {}
        self._packages: dict[str, dict[str, str]] = {}
        self.load_errors: dict[str, str] = {}

    def add(self, backend: object, origin: str, packages: Mapping[str, str] = MappingProxyType({})) -> None:
        """Registers one backend.

        Args:
            backend: an instance of `Backend`, or a subclass whose constructor needs no arguments.
            origin: where it comes from, for messages.
            packages: see `packages`.

        Raises:
            RegistryError: it is not a complete backend, or its name is taken.
        """
        try:
            checked = _checked(backend, origin)
        except RegistryError:
            raise
        except BaseException as error:  # constructors and properties of a third party
            if is_interruption(error):
                raise
            raise RegistryError(f"the backend cannot be read: {describe_error(error)}", where=origin) from error
        if checked.name in self._backends:
            rule = f"the name {checked.name!r} is taken by {self._origin[checked.name]}"
            raise RegistryError(rule, "Choose another name", origin)
        self._backends[checked.name] = checked
        self._origin[checked.name] = origin
        self._packages[checked.name] = dict(packages)

    def add_entry_points(self, points: Iterable[EntryPoint], skipped: Mapping[str, str] = MappingProxyType({})) -> None:
        """Registers third parties' backends; a failure is recorded in `load_errors`.

        Args:
            points: the entry points.
            skipped: why an entry point is not imported, by name.
        """
        for point in points:
            if point.name in skipped:
                self.load_errors[point.name] = skipped[point.name]
                continue
            origin = sanitize(f"entry point {point.name!r} = {point.value}")
            try:
                packages = _packages(point)
                with _announced(point, origin):  # its class is instantiated, and its attributes are read, by `add`
                    self.add(point.load(), origin, packages)
            # A third party's import can raise anything. It is recorded, shown, and raised when the backend is chosen.
            except BaseException as error:
                if is_interruption(error):
                    raise
                self.load_errors[point.name] = describe_error(error)

    def __getitem__(self, name: str) -> Backend:
        """The backend of a name.

        Raises:
            UnknownBackendError: there is none; the message has the valid names. It is a KeyError.
        """
        try:
            return self._backends[name]
        except KeyError:
            names = sorted(self._backends)
            suggestion = did_you_mean(name, names) if isinstance(name, str) else ""
            remedy = f"{suggestion}Valid are {', '.join(names)}"
            raise UnknownBackendError(f"{name!r} is not a backend", remedy) from None

    def __contains__(self, name: str) -> bool:
        return name in self._backends

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def origin(self, name: str) -> str:
        """The module or entry point of a backend."""
        return self._origin[name]

    def packages(self, name: str) -> dict[str, str]:
        """Versions of the package of a third party's backend and of what that package requires, by distribution name:
        what it computes with. Empty for this project's own, whose versions are this package's and those of
        `devices.detect`."""
        return self._packages[name]

    def for_scheme(self, scheme: SchemeName) -> list[Backend]:
        """The backends for a scheme, in the order of registration."""
        return [backend for backend in self if scheme in backend.schemes]

    def families(self) -> dict[str, list[str]]:
        """Names of the backends by the name that vLLM has for them, whatever their scheme; both sorted."""
        words = sorted({word for backend in self for word in backend.vllm_names})
        return {word: sorted(backend.name for backend in self if word in backend.vllm_names) for word in words}

    def selected(self, name: str) -> list[str]:
        """Names of the backends that a name in a setting means, whatever their scheme: the backend's own name, or
        vLLM's, which a family of backends has. Empty for an unknown name."""
        return [name] if name in self else self.families().get(name, [])

    def names(self, scheme: SchemeName) -> list[str]:
        """Every name that selects a backend for the scheme: its own and vLLM's, sorted."""
        return sorted({name for backend in self.for_scheme(scheme) for name in (backend.name, *backend.vllm_names)})


def _packages(point: EntryPoint) -> dict[str, str]:
    """Versions of the distribution of an entry point and of the installed ones that it requires, by name."""
    if point.dist is None:
        return {}
    from packaging.requirements import InvalidRequirement, Requirement  # 20 ms, only where there is a third party

    found = {point.dist.name: point.dist.version}
    for line in point.dist.requires or ():
        # Not installed: of an extra, or of another platform. A line that cannot be read says nothing.
        with contextlib.suppress(PackageNotFoundError, InvalidRequirement):
            name = Requirement(line).name
            found[name] = version(name)
    return {sanitize(name): sanitize(each) for name, each in found.items()}


@contextlib.contextmanager
def _announced(point: EntryPoint, origin: str) -> Iterator[None]:
    """Names an entry point in the log before it is imported, and again while the import lasts."""
    what = sanitize(f"{origin} of {point.dist.name} {point.dist.version}" if point.dist is not None else origin)
    watchdog.logger.info("moe_oracle: importing the backend of %s", what)
    remedy = f"{settings.env_var('disable')}={sanitize(point.name)} leaves it out"
    with third_party_code(f"the import of {what}", remedy):
        yield


def _checked(backend: object, origin: str) -> Backend:
    """The backend behind its boundary.

    Raises:
        RegistryError: it is not a complete backend.
    """
    if inspect.isclass(backend):
        try:
            backend = backend()
        except TypeError as error:
            rule = f"the backend cannot be instantiated: {sanitize(str(error))}"
            raise RegistryError(rule, where=origin) from error
    if not isinstance(backend, Backend):
        rule = f"expected an instance of vllm_moe_oracle.backends.Backend, got {type(backend).__name__}"
        raise RegistryError(rule, "Export an instance, or a class without constructor arguments", origin)
    missing = backend.missing_attributes()
    if missing:
        raise RegistryError(f"the backend does not set {', '.join(missing)}", where=origin)
    checked = CheckedBackend(backend, origin)  # type: ignore[abstract]  # its methods are made from the contract
    vllms = () if is_own(checked) else MOE_BACKENDS - {REFERENCE_BACKEND}
    if not re.fullmatch("[A-Za-z0-9_.:-]+", checked.name) or checked.name.lower() in (AUTO, *vllms):
        rule = f"{checked.name!r} cannot be a backend's name"
        raise RegistryError(rule, "Settings need letters, digits, _, ., : and -, and no name of vLLM's", origin)
    if not checked.schemes:
        raise RegistryError(f"schemes holds nothing; valid are {', '.join(get_args(SchemeName))}", where=origin)
    return checked


def discover(points: Iterable[EntryPoint] = (), skipped: Mapping[str, str] = MappingProxyType({})) -> Registry:
    """A new registry of this project's backends and those of entry points.

    Args:
        points: third parties' entry points.
        skipped: why an entry point is not imported, by name.

    Raises:
        RegistryError: a module of this project does not define a backend.
    """
    registry = Registry()
    for module_info in pkgutil.iter_modules(builtin_package.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{builtin_package.__name__}.{module_info.name}")
        if not hasattr(module, "BACKEND"):
            remedy = "End it with `BACKEND = Class()`. The name of a file that holds none begins with _"
            raise RegistryError("the module exports no BACKEND", remedy, module.__name__)
        registry.add(module.BACKEND, module.__name__)
    registry.add_entry_points(points, skipped)
    return registry


def installed_entry_points() -> list[EntryPoint]:
    """Third parties' entry points, sorted by name. A package whose metadata cannot be read is left out, and named."""
    try:
        found = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:  # one damaged file among all installed packages
        found = list(_readable_entry_points())
    return sorted(found, key=lambda point: point.name)


def _readable_entry_points() -> Iterator[EntryPoint]:
    """The entry points of each package by itself; of two packages of one name, the first is installed."""
    seen = set()
    for package in distributions():
        try:
            name, points = package.name, package.entry_points.select(group=ENTRY_POINT_GROUP)
        except Exception as error:  # one damaged package must not hide the others
            folder = sanitize(str(package.locate_file("")))
            words = "moe_oracle: the metadata of a package in %s cannot be read, its entry points are left out: %s"
            logger.warning(words, folder, describe_error(error))
            continue
        if name not in seen:
            yield from points
        seen.add(name)


def disabled_entry_points() -> dict[str, str]:
    """Entry points that the environment disables: they are not even imported. The reason, by name."""
    try:
        chosen = settings.load()
    except SettingError:  # reported where the settings are used
        return {}
    return {name: f"{_SKIPPED}: disabled by {chosen.source('disable')}" for name in chosen.disable}


_SKIPPED = "not imported"


def describe_load_error(name: str, reason: str) -> str:
    """The entry of `Registry.load_errors` as a sentence. An entry point that was disabled did not fail."""
    how = "was" if reason.startswith(_SKIPPED) else "could not be loaded:"
    return f"the backend of the entry point {sanitize(name)} {how} {reason}"


@cache
def default_registry() -> Registry:
    """The registry of this process, with third parties' entry points; it is discovered once and warns of failures."""
    skipped = disabled_entry_points()
    found = discover(installed_entry_points(), skipped)
    for name, reason in found.load_errors.items():
        if name not in skipped:
            logger.warning("moe_oracle: %s", describe_load_error(name, reason))
    return found
