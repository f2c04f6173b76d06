"""Runs pieces of released vLLM versions from their sources, without their imports.

A module is compiled without its import statements, its classes without bases from elsewhere and its functions without
annotations and without decorators from elsewhere. A name that is then unknown is a `MagicMock`, unless the test gives
it: the platform, a kernel's operator.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import math
from collections.abc import Iterable
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.lib.releases import sources

KEPT_DECORATORS = {"staticmethod", "classmethod", "property", "dataclass"}
FUSED_MOE = "vllm/model_executor/layers/fused_moe"
QUANTIZATION = "vllm/model_executor/layers/quantization"


class _Names(dict[str, Any]):
    """Globals in which every name is defined."""

    def __missing__(self, name: str) -> Any:
        # Builtins are looked up here first, as in any globals.
        builtins = self["__builtins__"]
        if name in builtins:
            return builtins[name]
        self[name] = MagicMock(name=name)
        return self[name]


class _Stripper(ast.NodeTransformer):
    def __init__(self, classes: Iterable[str]) -> None:
        self.classes = {*classes, "Enum", "IntEnum"}

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return node if node.module == "__future__" else None

    def visit_If(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    visit_Try = visit_With = visit_For = visit_ExceptHandler = visit_If

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.bases = [base for base in node.bases if isinstance(base, ast.Name) and base.id in self.classes]
        node.keywords = []
        node.decorator_list = [each for each in node.decorator_list if _name(each) in KEPT_DECORATORS]
        node.body = node.body or [ast.Pass()]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        node.decorator_list = [each for each in node.decorator_list if _name(each) in KEPT_DECORATORS]
        node.returns = None
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in [*every, *filter(None, (node.args.vararg, node.args.kwarg))]:
            argument.annotation = None
        return node


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@functools.cache
def tree(release: str, path: str) -> ast.Module:
    """The syntax tree of a file of a release."""
    return ast.parse((sources(release) / path).read_text(encoding="utf-8"))


def exists(release: str, path: str) -> bool:
    """Whether the release has the file."""
    return (sources(release) / path).is_file()


def bases_elsewhere(release: str, path: str) -> dict[str, str]:
    """Classes of other files of experts that classes of a file of a release are derived from, and their files."""
    module = tree(release, path)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    bases = {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}
    return {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module and ".fused_moe.experts." in node.module
        for alias in node.names
        if alias.name in bases and alias.asname is None
    }


@functools.cache
def _code(release: str, path: str) -> tuple[Any, frozenset[str]]:
    """A file's code without its imports, and the names that they would have bound."""
    module = ast.parse((sources(release) / path).read_text(encoding="utf-8"))
    bound = frozenset(
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )
    classes = {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    stripped = ast.fix_missing_locations(_Stripper(classes | bases_elsewhere(release, path).keys()).visit(module))
    return compile(stripped, f"{release}/{path}", "exec"), bound


def load(release: str, path: str, **given: Any) -> dict[str, Any]:
    """The globals of a file of a release after it has run. Classes of other files of experts that its own are derived
    from are there, too.

    Args:
        release: vLLM's version.
        path: below the release's folder.
        given: names that the file, and those of such classes, would have imported.
    """
    import builtins

    real = {
        "torch": torch, "math": math, "Enum": enum.Enum, "IntEnum": enum.IntEnum, "dataclass": dataclasses.dataclass,
        "replace": dataclasses.replace,
    }  # fmt: skip
    code, bound = _code(release, path)
    # The body of a class asks its globals in a way that does not ask `__missing__`.
    imported = {name: MagicMock(name=name) for name in bound}
    imported |= {name: load(release, file, **given)[name] for name, file in bases_elsewhere(release, path).items()}
    names = _Names({"__builtins__": vars(builtins), "__name__": __name__, **imported, **real, **given})
    exec(code, names)
    return names


class UncachedFunctools:
    """Stands for the module `functools` where stock's answers must not outlive a platform."""

    cache = staticmethod(lambda function: function)


class Platform:
    """vLLM's `current_platform` on a CUDA device of a compute capability (90 for sm_90); 0 for a CPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.device_name = f"sm_{capability}"

    def is_cuda(self) -> bool:
        """A CUDA device."""
        return self.capability > 0

    is_cuda_alike = is_cuda

    def is_rocm(self) -> bool:
        """Never."""
        return False

    is_xpu = supports_mx = is_rocm

    def is_cpu(self) -> bool:
        """A CPU."""
        return self.capability == 0

    def get_cpu_architecture(self) -> str:
        """The name of x86 in `CpuArchEnum`."""
        return "X86"

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        """At least this one."""
        wanted = capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability
        return self.capability >= wanted

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        """Exactly this one."""
        wanted = capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability
        return bool(self.capability == wanted)

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        """The same major number."""
        return self.capability // 10 == capability // 10

    def get_device_capability(self, device_id: int = 0) -> Any:
        """As vLLM's own type."""
        return MagicMock(to_int=lambda: self.capability, major=self.capability // 10, minor=self.capability % 10)

    def fp8_dtype(self) -> torch.dtype:
        """Of all but old AMD cards."""
        return torch.float8_e4m3fn

    def support_deep_gemm(self) -> bool:
        """Hopper and Blackwell, as in vLLM's CUDA platform."""
        return self.capability == 90 or self.capability // 10 == 10
