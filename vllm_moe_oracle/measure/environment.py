"""Where a measurement was taken, and whether it says anything about another place.

A hard difference (another GPU, another release of vLLM or of a kernel library) makes measurements void. A soft one
(torch, Triton, the driver, another commit of the same release, this project's kernels) leaves them in use, and is said.
What one of the two places does not know is not compared.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from ..oracle.problem import Device

LIBRARIES = ("vllm", "humming-kernels", "flashinfer-python", "deep-gemm")
"""Packages with the kernels that vLLM runs: another release may be faster or slower."""

COMPILERS = ("torch", "triton")
"""Packages that compile or launch kernels."""

MOST_TEXTS = 99
MOST_TEXT = 200
"""Texts of an environment, and characters of each: far more than any has."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One place.

    Attributes:
        gpu: the product's name.
        capability: compute capability times ten.
        sm_count: multiprocessors; a part of a card has fewer.
        packages: versions of `LIBRARIES` and `COMPILERS` that are installed.
        driver: version of the GPU's driver; "" when unknown.
        kernels: hash of the sources of this project's kernels; "" when unknown.
    """

    gpu: str
    capability: int = 0
    sm_count: int = 0
    packages: dict[str, str] = {}
    driver: str = ""
    kernels: str = ""

    @property
    def sound(self) -> bool:
        """Whether a place can be like that: what is read from a file need not be, and is shown to people."""
        texts = [self.gpu, self.driver, self.kernels, *itertools.chain(*self.packages.items())]
        return len(texts) <= MOST_TEXTS and all(len(each) <= MOST_TEXT and each.isprintable() for each in texts)

    @property
    def key(self) -> str:
        """The environment as JSON, always the same for the same environment."""
        return msgspec.json.encode(self, order="deterministic").decode()

    def __str__(self) -> str:
        vllm = self.packages.get("vllm")
        return f"{self.gpu}, vLLM {vllm}" if vllm else self.gpu


@dataclass(frozen=True, slots=True)
class Differences:
    """How a place of measurement differs from another; both empty when in nothing that is known.

    Attributes:
        hard: what makes the measurements void.
        soft: what does not.
    """

    hard: tuple[str, ...]
    soft: tuple[str, ...]


def of(device: Device) -> Environment:
    """The environment of a device: this machine's own, or one that somebody described."""
    names = (*LIBRARIES, *COMPILERS)
    return Environment(
        gpu=device.name,
        capability=device.capability,
        sm_count=device.sm_count,
        packages={name: device.packages[name] for name in names if name in device.packages},
        driver=device.driver,
        kernels=kernel_sources(),
    )


def differences(there: Environment, here: Environment) -> Differences:
    """How the place of a measurement differs.

    Args:
        there: where it was taken.
        here: where it is to be used.
    """
    hard = [
        f"{what} {old}, here {new}"
        for what, old, new in (
            ("measured on", there.gpu, here.gpu),
            ("compute capability", there.capability, here.capability),
            ("multiprocessors", there.sm_count, here.sm_count),
        )
        if old and new and old != new
    ]
    soft: list[str] = []
    for name, old, new in _both(there.packages, here.packages, LIBRARIES):
        (hard if _release(old) != _release(new) else soft).append(f"{name} {old}, here {new}")
    soft += [f"{name} {old}, here {new}" for name, old, new in _both(there.packages, here.packages, COMPILERS)]
    if there.driver and here.driver and there.driver != here.driver:
        soft.append(f"driver {there.driver}, here {here.driver}")
    if there.kernels and here.kernels and there.kernels != here.kernels:
        soft.append("other sources of this project's kernels")
    return Differences(tuple(hard), tuple(soft))


def same_code(there: Environment, here: Environment) -> bool:
    """Whether what compiles this project's kernels, and they themselves, are the same as far as both places know: only
    then does a tile configuration that ran there compile to what ran there."""
    known = there.kernels and here.kernels
    return not (known and there.kernels != here.kernels) and not _both(there.packages, here.packages, ("triton",))


def _both(there: Mapping[str, str], here: Mapping[str, str], names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Packages that both have, in different versions. Where one lacks it, no backend that needs it is in both."""
    return [(n, there[n], here[n]) for n in names if n in there and n in here and there[n] != here[n]]


def _release(version: str) -> object:
    """What a release is known by: without local parts and development suffixes, which name a commit."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return version
    return parsed.release, parsed.pre, parsed.post


_CHOOSING = ("config.py", "prefill_config.py")
"""Where kernels and tiles are chosen, by tables beside them. What is chosen for a layer that was measured changes only
with new measurements of it (a test keeps what was chosen then), so other layers' entries void nothing."""


@cache
def kernel_sources() -> str:
    """Hash of the sources of this project's kernels and of what launches them, without docstrings and comment lines."""
    return sources_of(Path(__file__).parents[1] / "kernels")


def sources_of(folder: Path) -> str:
    """Hash of the Python files of a folder, as `kernel_sources` has it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".py" and path.name not in _CHOOSING):
        content = _code(path.read_text(encoding="utf-8"))
        digest.update(f"{path.name} {len(content)}\n{content}".encode())
    return digest.hexdigest()[:16]


def _code(source: str) -> str:
    """Python code without docstrings, blank lines, and lines of comments."""
    lines = source.splitlines()
    bodies = [ast.parse(source).body]
    while bodies:
        for statement in bodies.pop():
            # Strings that stand alone: docstrings of functions, and of constants.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                rows = slice(statement.lineno - 1, statement.end_lineno)
                lines[rows] = [""] * len(lines[rows])
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
                bodies.append(statement.body)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
