"""Imports a package as a private copy under another name, so that a process can hold two releases of it.

vLLM puts the triton_kernels that it brings into ``sys.modules`` under that name, and prefers an installed one. A copy
under a name of its own changes neither: its modules import each other by that name. No byte code is written or read,
because that of the original would import the original.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

_PREFIX = "_moe_oracle_peer_"


@dataclass(frozen=True)
class PackageFolder:
    """A package on disk.

    Attributes:
        name: its name.
        path: its folder.
    """

    name: str
    path: Path

    def has(self, module: str) -> bool:
        """Whether it has a module, named like ``tensor_details.layout``."""
        return _file_of(self.path, module) is not None

    @cached_property
    def version(self) -> str:
        """Distribution and its version, where metadata lie beside the package, and a digest of the Python sources."""
        digest = hashlib.sha256()
        for file in sorted(self.path.rglob("*.py")):
            digest.update(f"{file.relative_to(self.path).as_posix()}\n".encode() + file.read_bytes())
        return f"{_distribution(self)}, sources {digest.hexdigest()[:12]}"


def find_package(name: str, folder: Path | None) -> PackageFolder | None:
    """A package in a folder, or where Python looks for packages; what is imported already does not count.

    Args:
        name: the package's name.
        folder: the folder that holds it; None for ``sys.path``.
    """
    spec = importlib.machinery.PathFinder.find_spec(name, None if folder is None else [str(folder)])
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return _package_folder(name, Path(places[0])) if places else None


@cache
def _package_folder(name: str, path: Path) -> PackageFolder:
    """One object for each package, which reads the sources for its version once."""
    return PackageFolder(name, path)


def module(package: PackageFolder, name: str, *, run_parents: bool = True) -> types.ModuleType:
    """Imports a module of the private copy.

    Args:
        package: the package.
        name: the module's name inside the package.
        run_parents: whether the ``__init__`` of its packages runs; otherwise packages are empty.

    Raises:
        ImportError: the package has no such module, or an import inside it fails.
    """
    finder = _finder(package, run_parents)
    if finder not in sys.meta_path:
        # First, because Python's own finder knows the files in a package's folder, too.
        sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    return importlib.import_module(f"{finder.alias}.{name}")


@cache
def _finder(package: PackageFolder, run_parents: bool) -> _Finder:
    return _Finder(package, run_parents)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of a private copy.

    Attributes:
        alias: name of the copy. Copies of two folders have two names.
    """

    def __init__(self, package: PackageFolder, run_parents: bool) -> None:
        place = hashlib.sha256(os.fsencode(package.path)).hexdigest()[:8]
        self.alias = f"{_PREFIX}{package.name}_{place}" + ("" if run_parents else "_bare")
        self._package, self._run_parents = package, run_parents

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname != self.alias and not fullname.startswith(f"{self.alias}."):
            return None
        file = _file_of(self._package.path, fullname[len(self.alias) + 1 :])
        if file is None:
            return None
        is_package = file.name == "__init__.py"
        if (is_package and not self._run_parents) or not file.exists():
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(file.parent)]
            return spec
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_Loader(fullname, str(file), self._package.name, self.alias),
            submodule_search_locations=[str(file.parent)] if is_package else None,
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a source whose imports of its own package are imports of the copy."""

    def __init__(self, fullname: str, path: str, package: str, alias: str) -> None:
        super().__init__(fullname, path)
        self._package, self._alias = package, alias

    def get_code(self, fullname: str) -> types.CodeType:
        """The compiled source; byte code on disk is left alone."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(  # type: ignore[override]  # typeshed has a static method of the base's base
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> types.CodeType:
        """Compiles a source after its imports were renamed. Line numbers stay: Triton reads kernels from the file."""
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                node.names = [new for each in node.names for new in self._rename(each)]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                node.module = self._renamed(node.module)
        code: types.CodeType = compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize
        )
        return code

    def _renamed(self, name: str) -> str:
        inside = name == self._package or name.startswith(f"{self._package}.")
        return self._alias + name[len(self._package) :] if inside else name

    def _rename(self, name: ast.alias) -> list[ast.alias]:
        """What to import instead: ``import package.module`` imports the module, and binds the package's name."""
        new = self._renamed(name.name)
        if new == name.name or name.asname is not None:
            return [ast.alias(new, name.asname)]
        return [ast.alias(new)] * ("." in name.name) + [ast.alias(self._alias, self._package)]


def _file_of(folder: Path, module_name: str) -> Path | None:
    """The file of a module, which does not exist for a folder without ``__init__``; None without the module."""
    place = folder.joinpath(*module_name.split(".")) if module_name else folder
    if place.is_dir():
        return place / "__init__.py"
    file = place.with_suffix(".py")
    return file if file.is_file() else None


def _distribution(package: PackageFolder) -> str:
    """Name and version of the distribution whose files hold the package; the package's name where none says so."""
    for found in metadata.distributions(path=[str(package.path.parent)]):
        with contextlib.suppress(Exception):  # damaged metadata of one of many packages
            if any(file.parts[0] == package.name for file in found.files or ()):
                return f"{found.name} {found.version}"
    return package.name
