"""The patches of vLLM: each has a name, is applied once, can be undone, and is listed by ``status``.

A patch to a module that is not imported yet is applied after its import. Importing vLLM's quantization modules takes
seconds; a process that does not need them does not import them for the plugin.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from ..errors import OracleError

logger = logging.getLogger("vllm.moe_oracle")

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute or mapping entry.

    Attributes:
        name: as ``status`` shows it.
        owner: the module, class or mapping that holds it.
        key: attribute name, or key when `owner` is a mapping.
        replacement: the new value.
    """

    name: str
    owner: Any
    key: Any
    replacement: Any

    def get(self) -> Any:
        """The current value. Of a class only its own attributes count, so that undoing a patch adds none."""
        if isinstance(self.owner, MutableMapping):
            return self.owner.get(self.key, _ABSENT)
        if self.key == "__class__":
            return type(self.owner)
        if isinstance(self.owner, type):
            return self.owner.__dict__.get(self.key, _ABSENT)
        return getattr(self.owner, self.key, _ABSENT)

    def put(self, value: Any) -> None:
        """Sets `value`; deletes the entry where it was absent."""
        if isinstance(self.owner, MutableMapping):
            if value is _ABSENT:
                self.owner.pop(self.key, None)
            else:
                self.owner[self.key] = value
        elif value is _ABSENT:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


@dataclass(frozen=True, slots=True)
class DeferredPatch:
    """A patch to a module's contents, applied when the module is imported.

    Attributes:
        name: as for `Patch`.
        module: the module's name.
        make: makes the patch from the module; None where the module needs none.
    """

    name: str
    module: str
    make: Callable[[ModuleType], Patch | None]


class PatchManager:
    """Applies each patch once, and restores the original objects."""

    def __init__(self) -> None:
        self._applied: dict[str, tuple[Patch, Any]] = {}
        self._deferred: dict[str, DeferredPatch] = {}
        self._failed: dict[str, str] = {}
        self._finder = _ImportWatcher(self._imported)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the patches in force, in the order in which they were applied."""
        return tuple(self._applied)

    @property
    def deferred(self) -> tuple[str, ...]:
        """Names of the patches whose module is not imported yet."""
        return tuple(self._deferred)

    @property
    def failed(self) -> dict[str, str]:
        """Errors of deferred patches that could not be applied, by name."""
        return dict(self._failed)

    def apply(self, patch: Patch | DeferredPatch) -> None:
        """Applies a patch, now or when its module is imported. A patch with the name of another one is ignored.

        Raises:
            AttributeError: the module is imported and lacks the attribute to patch.
        """
        if patch.name in self._applied or patch.name in self._deferred:
            return
        if isinstance(patch, Patch):
            self._put(patch)
        elif patch.module in sys.modules:
            self._make(patch, sys.modules[patch.module])
        else:
            self._deferred[patch.name] = patch
            self._finder.modules.add(patch.module)
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Undoes every patch, last one first.

        Raises:
            OracleError: another package patched over one of ours. That one stays, the others are undone.
        """
        self._deferred.clear()
        self._failed.clear()
        self._stop_watching()
        foreign = []
        for name, (patch, original) in reversed(self._applied.items()):
            if patch.get() is patch.replacement:
                patch.put(original)
            else:
                foreign.append(name)
        self._applied.clear()
        if foreign:
            raise OracleError(f"not undone, because another package patched over them: {', '.join(foreign)}")

    def _put(self, patch: Patch) -> None:
        original = patch.get()
        patch.put(patch.replacement)
        self._applied[patch.name] = (patch, original)

    def _make(self, deferred: DeferredPatch, module: ModuleType) -> None:
        patch = deferred.make(module)
        if patch is not None:
            self._put(patch)

    def _imported(self, module: ModuleType) -> None:
        for name, deferred in list(self._deferred.items()):
            if deferred.module != module.__name__:
                continue
            del self._deferred[name]
            try:
                self._make(deferred, module)
            except Exception as error:  # runs inside vLLM's import of its own module, which must not fail
                self._failed[name] = f"{type(error).__name__}: {error}"
                logger.warning("moe_oracle: patch %r could not be applied: %s", name, self._failed[name])
        if not self._deferred:
            self._stop_watching()

    def _stop_watching(self) -> None:
        self._finder.modules.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


class _ImportWatcher(MetaPathFinder):
    """Calls back after a module's import. Specs and loaders remain those of the finder that found the module."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self.modules: set[str] = set()
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls back."""
        if fullname not in self.modules:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def run_and_notify(module: ModuleType) -> None:
            run(module)
            del loader.exec_module  # the instance's attribute; the class's method is visible again
            self._imported(module)

        loader.exec_module = run_and_notify


def _always() -> bool:
    return True


def redirect_class(name: str, stock: str, ours: str, when: Callable[[], bool] = _always) -> DeferredPatch:
    """A patch after which calling a stock class constructs an instance of our subclass, wherever the class is used.

    The class itself does not change, and `isinstance` works as before. Its metaclass is replaced, which defines what a
    call does. (``__new__`` would work too, but a class whose ``__new__`` is removed again accepts no arguments.)

    Args:
        name: the patch's name.
        stock: ``module:Class`` to replace.
        ours: ``module:Class`` of a subclass of it, imported at the first construction.
        when: whether a call constructs ours.
    """
    module_name, _, class_name = stock.partition(":")

    def make(module: ModuleType) -> Patch:
        stock_class = getattr(module, class_name)
        metaclass: Any = type(stock_class)

        class Redirecting(metaclass):
            def __init__(cls, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                cls.__class__ = metaclass  # a subclass defined while the patch is in force is an ordinary class

            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if cls is not stock_class or not when():
                    return super().__call__(*args, **kwargs)
                return resolve_name(ours)(*args, **kwargs)

        return Patch(name, stock_class, "__class__", Redirecting)

    return DeferredPatch(name, module_name, make)


def wrap_function(name: str, path: str, wrapper: Callable[..., Any]) -> DeferredPatch:
    """A patch that replaces a stock function or method by `wrapper`, called with the original before the arguments.

    Args:
        name: the patch's name.
        path: ``module:function`` or ``module:Class.method``.
        wrapper: called as ``wrapper(original, *args, **kwargs)``.
    """
    module_name, _, attribute = path.partition(":")
    *owners, key = attribute.split(".")

    def make(module: ModuleType) -> Patch:
        owner: Any = functools.reduce(getattr, owners, module)
        original = getattr(owner, key)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        is_static = isinstance(owner, type) and isinstance(owner.__dict__.get(key), staticmethod)
        return Patch(name, owner, key, staticmethod(wrapped) if is_static else wrapped)

    return DeferredPatch(name, module_name, make)


def wrap_function_lazily(name: str, stock: str, ours: str) -> DeferredPatch:
    """Like `wrap_function`, with a wrapper that is imported at the first call.

    Args:
        name: the patch's name.
        stock: ``module:function`` or ``module:Class.method``.
        ours: ``module:function`` of the wrapper.
    """

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve_name(ours)(original, *args, **kwargs)

    return wrap_function(name, stock, call)
