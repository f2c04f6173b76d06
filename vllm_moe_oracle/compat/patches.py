"""One place for every change to stock objects: named, idempotent, undoable, listed by ``status``."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import OracleError

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute or mapping entry.

    Attributes:
        name: what ``status`` shows.
        owner: the module, class or mapping that holds it.
        key: attribute name, or key when `owner` is a mapping.
        replacement: what takes its place.
    """

    name: str
    owner: Any
    key: Any
    replacement: Any

    def get(self) -> Any:
        """What is in place now. A class is asked for its own attributes only, so that undoing adds none."""
        if isinstance(self.owner, MutableMapping):
            return self.owner.get(self.key, _ABSENT)
        if isinstance(self.owner, type):
            return self.owner.__dict__.get(self.key, _ABSENT)
        return getattr(self.owner, self.key, _ABSENT)

    def put(self, value: Any) -> None:
        """Puts `value` in place, or takes the entry away when it was absent."""
        if isinstance(self.owner, MutableMapping):
            if value is _ABSENT:
                self.owner.pop(self.key, None)
            else:
                self.owner[self.key] = value
        elif value is _ABSENT:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


class PatchManager:
    """Applies patches once and gives the very objects back."""

    def __init__(self) -> None:
        self._applied: dict[str, tuple[Patch, Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the patches in force, in the order in which they were applied."""
        return tuple(self._applied)

    def apply(self, patch: Patch) -> None:
        """Applies a patch; one of the same name that is in force already stays as it is."""
        if patch.name in self._applied:
            return
        original = patch.get()
        patch.put(patch.replacement)
        self._applied[patch.name] = (patch, original)

    def undo(self) -> None:
        """Takes every patch back, last one first.

        Raises:
            OracleError: somebody replaced our replacement in the meantime. It is left as it is, the others are undone.
        """
        foreign = []
        for name, (patch, original) in reversed(self._applied.items()):
            if patch.get() is patch.replacement:
                patch.put(original)
            else:
                foreign.append(name)
        self._applied.clear()
        if foreign:
            raise OracleError(f"not undone, because another package patched over them: {', '.join(foreign)}")
