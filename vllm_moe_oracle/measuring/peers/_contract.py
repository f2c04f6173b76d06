"""What a peer declares besides what a `Backend` does: the package that holds its kernel."""

from __future__ import annotations

import types
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from ...backends import Backend
from ...core.capabilities import device_reasons
from ...core.problem import Device
from . import _private_import
from ._private_import import PackageFolder


class PeerBackend(Backend):
    """A kernel of another project, with a conversion and a function of routed tokens as third parties' backends have.

    Attributes:
        package: name of the package to import.
        generation: a module that only usable releases of the package have.
        runs_parents: whether importing a module runs the ``__init__`` of its packages.
    """

    static_priority = 9000.0  # never chosen
    package: ClassVar[str]
    generation: ClassVar[str]
    runs_parents: ClassVar[bool] = True

    def __init__(self, folder: Path | None = None) -> None:
        """A peer whose package lies in a folder; None for the environment's."""
        self._folder = folder

    def why_not(self, device: Device) -> str:
        """Why it cannot run here: machine, missing package, or another release of it; "" if it can.

        Raises:
            Exception: anything that the import of the package raises.
        """
        if reasons := device_reasons(self.capabilities, device):
            return "; ".join(reason.detail for reason in reasons)
        found = self._found()
        if found is None:
            where = "is not installed" if self._folder is None else f"is not in {self._folder}"
            return f"the package {self.package} {where}"
        if not found.has(self.generation):
            return f"{found.version} in {found.path} has no module {self.generation}: it is another release"
        self.load()
        return ""

    def version(self) -> str:
        """The distribution that the package came with, and a digest of its sources; "" without the package."""
        found = self._found()
        return "" if found is None else found.version

    @abstractmethod
    def load(self) -> None:
        """Imports all that the kernel needs, so that what is missing shows before a layer is built.

        Raises:
            Exception: anything that the import raises.
        """

    def module(self, name: str) -> types.ModuleType:
        """A module of the package, from a private copy: no module of another name is replaced.

        Args:
            name: the module's name inside the package, like ``tensor_details.layout``.

        Raises:
            ImportError: the package or the module is missing, or cannot be imported.
        """
        found = self._found()
        if found is None:
            raise ImportError(f"the package {self.package} is missing")
        return _private_import.module(found, name, run_parents=self.runs_parents)

    def _found(self) -> PackageFolder | None:
        return _private_import.find_package(self.package, self._folder)
