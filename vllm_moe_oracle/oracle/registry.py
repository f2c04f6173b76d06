"""The registry of backends: every public module of `vllm_moe_oracle.backends`, and third parties' entry points.

A third party's backend that cannot be loaded is recorded in `Registry.load_errors`, and the others stay usable. The
reason is shown by `status` and raised by an explicit choice of that backend.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from .. import backends as builtin_package
from ..backends import Backend, Capabilities
from ..core.problem import SchemeName
from ..errors import RegistryError, did_you_mean
from ..settings import AUTO

logger = logging.getLogger("vllm.moe_oracle")

ENTRY_POINT_GROUP = "vllm_moe_oracle.backends"


class Registry:
    """Backends by name, in the order of their registration.

    Attributes:
        load_errors: why a third party's backend could not be loaded, by the name of its entry point.
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._origin: dict[str, str] = {}
        self.load_errors: dict[str, str] = {}

    def add(self, backend: object, origin: str) -> None:
        """Registers one backend.

        Args:
            backend: an instance of `Backend`, or a subclass whose constructor needs no arguments.
            origin: where it comes from, for messages.

        Raises:
            RegistryError: it is not a complete backend, or its name is taken.
        """
        if inspect.isclass(backend):
            try:
                backend = backend()
            except TypeError as error:
                raise RegistryError(f"the backend cannot be instantiated: {error}", where=origin) from error
        if not isinstance(backend, Backend):
            rule = f"expected an instance of vllm_moe_oracle.backends.Backend, got {type(backend).__name__}"
            raise RegistryError(rule, "Export an instance, or a class without constructor arguments", origin)
        missing = backend.missing_attributes()
        if missing:
            raise RegistryError(f"the backend does not set {', '.join(missing)}", where=origin)
        _validate(backend, origin)
        if backend.name in self._backends:
            rule = f"the name {backend.name!r} is taken by {self._origin[backend.name]}"
            raise RegistryError(rule, "Choose another name", origin)
        self._backends[backend.name] = backend
        self._origin[backend.name] = origin

    def add_entry_points(self, points: Iterable[EntryPoint]) -> None:
        """Registers third parties' backends; a failure is recorded in `load_errors`."""
        for point in points:
            origin = f"entry point {point.name!r} = {point.value}"
            try:
                self.add(point.load(), origin)
            # A third party's import can raise anything. It is recorded, shown, and raised when the backend is chosen.
            except (Exception, SystemExit) as error:
                self.load_errors[point.name] = f"{type(error).__name__}: {error}"

    def __getitem__(self, name: str) -> Backend:
        """The backend of a name.

        Raises:
            KeyError: there is none; the message has the valid names.
        """
        try:
            return self._backends[name]
        except KeyError:
            names = sorted(self._backends)
            words = f"{name!r} is not a backend. {did_you_mean(name, names)}Valid are {', '.join(names)}"
            raise KeyError(words) from None

    def __contains__(self, name: str) -> bool:
        return name in self._backends

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def origin(self, name: str) -> str:
        """The module or entry point of a backend."""
        return self._origin[name]

    def for_scheme(self, scheme: SchemeName) -> list[Backend]:
        """The backends for a scheme, in the order of registration."""
        return [backend for backend in self if scheme in backend.schemes]

    def names(self, scheme: SchemeName) -> list[str]:
        """Every name that selects a backend for the scheme: its own and vLLM's, sorted."""
        return sorted({name for backend in self.for_scheme(scheme) for name in (backend.name, *backend.vllm_names)})


def _validate(backend: Backend, origin: str) -> None:
    """Refuses names that cannot be selected, and strings where tuples of strings are expected."""
    if not isinstance(backend.name, str) or not backend.name.strip() or backend.name == AUTO:
        raise RegistryError(f"{backend.name!r} cannot be a backend's name", where=origin)
    known = get_args(SchemeName)
    lists: dict[str, object] = {"schemes": backend.schemes, "vllm_names": backend.vllm_names}
    for field, words in lists.items():
        if not isinstance(words, tuple) or not all(isinstance(word, str) for word in words):
            raise RegistryError(f"{field} is {words!r}", f"Write a tuple of names: {field} = (...,)", origin)
    unknown = [scheme for scheme in backend.schemes if scheme not in known]
    if unknown or not backend.schemes:
        rule = f"schemes holds {', '.join(unknown) or 'nothing'}; valid are {', '.join(known)}"
        raise RegistryError(rule, where=origin)
    if not isinstance(backend.capabilities, Capabilities):
        raise RegistryError(
            f"capabilities is {type(backend.capabilities).__name__}, expected Capabilities", where=origin
        )


def discover(points: Iterable[EntryPoint] = ()) -> Registry:
    """A new registry of this project's backends and those of entry points.

    Raises:
        RegistryError: a module of this project does not define a backend.
    """
    registry = Registry()
    for module_info in pkgutil.iter_modules(builtin_package.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{builtin_package.__name__}.{module_info.name}")
        if not hasattr(module, "BACKEND"):
            raise RegistryError("the module exports no BACKEND", where=module.__name__)
        registry.add(module.BACKEND, module.__name__)
    registry.add_entry_points(points)
    return registry


@cache
def default_registry() -> Registry:
    """The registry of this process, with third parties' entry points; it is discovered once and warns of failures."""
    found = discover(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name))
    for name, reason in found.load_errors.items():
        logger.warning("moe_oracle: the backend of the entry point %s could not be loaded: %s", name, reason)
    return found
