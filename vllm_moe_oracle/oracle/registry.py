"""Which backends there are: every module of `vllm_moe_oracle.backends`, and third parties' entry points.

A third party's backend that cannot be loaded never takes the plugin, or another backend, down: it is kept in
`Registry.broken` with its reason, which `status` shows and which an explicit choice of it raises.
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
from ..backends import Backend, Limits
from ..errors import RegistryError
from ..settings import AUTO
from .problem import SchemeName

logger = logging.getLogger("vllm.moe_oracle")

ENTRY_POINT_GROUP = "vllm_moe_oracle.backends"


class Registry:
    """Backends by name, in the order of their registration.

    Attributes:
        broken: why a third party's backend is not here, by the name of its entry point.
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._origin: dict[str, str] = {}
        self.broken: dict[str, str] = {}

    def add(self, backend: object, origin: str) -> None:
        """Registers one backend.

        Args:
            backend: an instance of `Backend`, or a class that makes one without arguments.
            origin: where it comes from, for messages.

        Raises:
            RegistryError: not a backend, an incomplete one, or a name that is taken.
        """
        if inspect.isclass(backend):
            try:
                backend = backend()
            except TypeError as error:
                raise RegistryError(f"the backend cannot be made: {error}", where=origin) from error
        if not isinstance(backend, Backend):
            rule = f"expected an instance of vllm_moe_oracle.backends.Backend, got {type(backend).__name__}"
            raise RegistryError(rule, "Export an instance, or a class without constructor arguments", origin)
        missing = [name for name in ("name", "schemes", "limits") if not hasattr(backend, name)]
        if missing:
            raise RegistryError(f"the backend does not set {', '.join(missing)}", where=origin)
        _require_usable(backend, origin)
        if backend.name in self._backends:
            rule = f"the name {backend.name!r} is taken by {self._origin[backend.name]}"
            raise RegistryError(rule, "Choose another name", origin)
        self._backends[backend.name] = backend
        self._origin[backend.name] = origin

    def add_entry_points(self, points: Iterable[EntryPoint]) -> None:
        """Registers third parties' backends; one that fails is recorded in `broken`, with the others unharmed."""
        for point in points:
            origin = f"entry point {point.name!r} = {point.value}"
            try:
                self.add(point.load(), origin)
            # A stranger's import can raise anything; it is recorded, shown, and raised when chosen.
            except (Exception, SystemExit) as error:
                self.broken[point.name] = f"{type(error).__name__}: {error}"

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __contains__(self, name: str) -> bool:
        return name in self._backends

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def origin(self, name: str) -> str:
        """Where the backend of that name comes from."""
        return self._origin[name]

    def for_scheme(self, scheme: SchemeName) -> list[Backend]:
        """Backends that know the scheme, in the order of registration."""
        return [backend for backend in self if scheme in backend.schemes]

    def names(self, scheme: SchemeName) -> list[str]:
        """Every name that selects a backend of the scheme: its own and vLLM's, sorted."""
        return sorted({name for backend in self.for_scheme(scheme) for name in (backend.name, *backend.vllm_names)})


def _require_usable(backend: Backend, origin: str) -> None:
    """Refuses what would be found by accident or never: a lone string's letters, the name that means no choice."""
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
    if not isinstance(backend.limits, Limits):
        raise RegistryError(f"limits is {type(backend.limits).__name__}, expected Limits", where=origin)


def discover(points: Iterable[EntryPoint] = ()) -> Registry:
    """A new registry of this project's backends and of those behind `points`.

    Raises:
        RegistryError: one of this project's own files is not a backend; that is a defect, not a circumstance.
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
    """The registry of this process: discovered once, third parties' entry points included; warns of broken ones."""
    found = discover(sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name))
    for name, reason in found.broken.items():
        logger.warning("moe_oracle: the backend of the entry point %s could not be loaded: %s", name, reason)
    return found
