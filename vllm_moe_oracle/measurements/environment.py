"""The environment of a measurement, and whether the measurement is valid in another environment.

Measurements of another GPU are ignored. Another release of the package that holds a backend's kernels, or other sources
of this project's, makes its times predictions with an error (`kernel_changes`): what ran was other code. All other
differences are only reported: torch, the driver, another commit of the same release. A property that is unknown on
either side is not compared.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from ..core.problem import Device
from ..devices.catalog import is_same_gpu

KERNEL_PACKAGES = ("vllm", "humming-kernels", "flashinfer-python", "deep-gemm")
"""Packages that contain the kernels that vLLM runs. Another release of a backend's package may be faster or slower."""

COMPILER_PACKAGES = ("torch", "triton")
"""Packages that compile or launch kernels."""

MAX_STRINGS = 99
MAX_STRING_CHARS = 200
MAX_NUMBER = (1 << 16) - 1
"""Limits of a valid environment: number of strings, characters of each, and a capability or number of
multiprocessors."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hardware and software that a measurement depends on.

    Attributes:
        gpu: product name of the GPU.
        capability: compute capability, 90 for sm_90; 0 if unknown.
        sm_count: streaming multiprocessors; 0 if unknown. A MIG slice has fewer than the whole GPU.
        packages: installed versions of `KERNEL_PACKAGES` and `COMPILER_PACKAGES`.
        driver: version of the GPU driver; "" if unknown.
        kernels: hash of the sources of this project's kernels; "" if unknown.
    """

    gpu: str
    capability: int = 0
    sm_count: int = 0
    packages: dict[str, str] = {}
    driver: str = ""
    kernels: str = ""

    @classmethod
    def of(cls, device: Device) -> Environment:
        """The environment of a device: this machine, or a described one.

        Without a driver it is described: what its vLLM requires says which kernels it has, but not which torch runs
        them.
        """
        names = [name for name in (*KERNEL_PACKAGES, *COMPILER_PACKAGES) if device.driver or name != "torch"]
        return cls(
            gpu=device.name,
            capability=device.capability,
            sm_count=device.sm_count,
            packages={name: device.packages[name] for name in names if name in device.packages},
            driver=device.driver,
            kernels=kernel_sources_hash(),
        )

    @property
    def is_valid(self) -> bool:
        """Whether the strings are short and printable, and the numbers possible. An environment read from a file may be
        anything."""
        if not 0 <= self.capability <= MAX_NUMBER or not 0 <= self.sm_count <= MAX_NUMBER:
            return False
        texts = [self.gpu, self.driver, self.kernels, *itertools.chain(*self.packages.items())]
        return len(texts) <= MAX_STRINGS and all(len(each) <= MAX_STRING_CHARS and each.isprintable() for each in texts)

    @property
    def key(self) -> str:
        """The environment as JSON; equal environments have equal keys."""
        return msgspec.json.encode(self, order="deterministic").decode()

    def __str__(self) -> str:
        vllm, triton = self.packages.get("vllm"), _triton(self)
        words = [self.gpu, vllm and f"vLLM {vllm}", triton and "Triton {}.{}".format(*triton)]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between two environments, in words. Both are empty if everything known is equal.

    Attributes:
        hard: differences for which measurements are ignored: the GPU's.
        soft: differences of software.
        gpu: the other GPU, where that is the hard difference; else "".
    """

    hard: tuple[str, ...]
    soft: tuple[str, ...]
    gpu: str = ""


def differences(there: Environment, here: Environment) -> Differences:
    """The differences between two environments.

    Args:
        there: where the measurement was taken.
        here: where it is to be used.
    """
    if not is_same_gpu(there.gpu, here.gpu):
        return Differences((f"measured on {there.gpu}, not {here.gpu}",), (), there.gpu)
    hard = [
        f"{what} {old}, not {new}"
        for what, old, new in (
            ("compute capability", there.capability, here.capability),
            ("multiprocessors", there.sm_count, here.sm_count),
        )
        if old and new and old != new
    ]
    soft = [
        f"{name} {old}, not {new}"
        for name, old, new in _version_changes(there.packages, here.packages, KERNEL_PACKAGES + COMPILER_PACKAGES)
    ]
    if there.driver and here.driver and there.driver != here.driver:
        soft.append(f"driver {there.driver}, not {here.driver}")
    if there.kernels and here.kernels and there.kernels != here.kernels:
        soft.append("kernel sources of this project differ")
    return Differences(tuple(hard), tuple(soft))


def distance(there: Environment, here: Environment) -> tuple[tuple[int, int], bool, int]:
    """How far measurements are from another environment, less being closer. Compare the values of one `here` only.

    Args:
        there: where the measurement was taken.
        here: where it is to be used.

    Returns:
        Major and minor releases of Triton between the two, whether this project's kernels have other sources, and the
        number of soft differences. What is unknown on either side is no distance.
    """
    old, new = _triton(there), _triton(here)
    between = (abs(old[0] - new[0]), abs(old[1] - new[1])) if old and new else (0, 0)
    others = bool(there.kernels and here.kernels and there.kernels != here.kernels)
    return between, others, len(differences(there, here).soft)


def is_same_triton(there: Environment, here: Environment) -> bool:
    """Whether two environments have one minor release of Triton, as far as known."""
    return distance(there, here)[0] == (0, 0)


def _triton(environment: Environment) -> tuple[int, int] | None:
    """Major and minor number; None if unknown."""
    try:
        major, minor, *_ = (*Version(environment.packages["triton"]).release, 0)
    except (KeyError, InvalidVersion):
        return None
    return major, minor


VLLM_RELEASE_ERROR = 0.03
HUMMING_RELEASE_ERROR = 0.023
UNKNOWN_RELEASE_ERROR = 0.21
"""Standard deviations of the logarithm of a time under other code over the measured time.

Measured on an H200 under vLLM 0.26.0 and 0.33.0, two layers at six numbers of tokens
(tests/golden/h200/release-vllm-0.26.0.jsonl): this project's kernels differ by at most 3 % at one number of tokens and
1 % in a layer's mean, Marlin by at most 5 % and 1 %. Humming 0.1.10 and 0.1.19 differ by 21 % in the mean, 2.3 % for
each of the nine releases between them. Where nothing was measured, the largest of these counts. What another minor
release of Triton changes stands in each backend (`Backend.triton_release_error`).
"""


def kernel_changes(
    there: Environment, here: Environment, packages: Iterable[str], triton_error: float
) -> dict[str, float]:
    """What changed in the code that a backend runs: the error of its times by change, in words. Empty if its times are
    measurements here, too.

    Args:
        there: where the measurement was taken.
        here: where it is to be used.
        packages: the packages that hold the backend's kernels; empty for this project's own.
        triton_error: the error under another minor release of Triton; 0 where Triton does not compile them.
    """
    packages = tuple(packages)
    changes = {
        f"{name} {old}, not {new}": _release_error(name, old, new)
        for name, old, new in _version_changes(there.packages, here.packages, packages)
        if _release_key(old) != _release_key(new)
    }
    if not packages and there.kernels and here.kernels and there.kernels != here.kernels:
        changes["other kernel sources of this project"] = UNKNOWN_RELEASE_ERROR
    if triton_error:
        for name, old, new in _version_changes(there.packages, here.packages, ("triton",)):
            if _minor_release(old) != _minor_release(new):
                changes[f"{name} {old}, not {new}"] = triton_error
    return changes


def _release_error(package: str, old: str, new: str) -> float:
    if package == "vllm":
        return VLLM_RELEASE_ERROR
    if package == "humming-kernels" and _minor_release(old) == _minor_release(new):
        patches = [(*Version(each).release, 0, 0, 0)[2] for each in (old, new)]
        return min(HUMMING_RELEASE_ERROR * max(1, abs(patches[0] - patches[1])), UNKNOWN_RELEASE_ERROR)
    return UNKNOWN_RELEASE_ERROR


def same_kernel_code(there: Environment, here: Environment) -> bool:
    """Whether this project's kernels and the minor release of Triton are the same in both environments, as far as
    known. Only then are a tile configuration and its time those of the kernel that was measured."""
    known = there.kernels and here.kernels
    return not (known and there.kernels != here.kernels) and is_same_triton(there, here)


def is_same_release(package: str, there: Environment, here: Environment) -> bool:
    """Whether two environments have one release of a package, whose build may differ, as far as known."""
    changed = _version_changes(there.packages, here.packages, (package,))
    return all(_release_key(old) == _release_key(new) for _, old, new in changed)


def _version_changes(
    there: Mapping[str, str], here: Mapping[str, str], names: tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Packages that both have, in different versions. No backend that needs a missing package is on both sides."""
    return [(n, there[n], here[n]) for n in names if n in there and n in here and there[n] != here[n]]


def _release_key(version: str) -> object:
    """The release of a version, without the local and development parts, which name a commit."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return version
    return parsed.release, parsed.pre, parsed.post


def _minor_release(version: str) -> object:
    """Major and minor number: patch releases of a compiler repair, they do not retune."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return version


_UNHASHED_MODULES = ("activations.py", "config.py", "heuristic.py", "launch_config.py", "prefill_config.py")
"""Modules that are not part of the hash: formulas in torch, which no kernel runs, and those that choose kernels and
tiles from tables. A new entry for one layer does not change the choice for a measured layer; a golden test checks this.
"""


@cache
def kernel_sources_hash() -> str:
    """Hash of the sources of this project's kernels and launchers, without docstrings and comments."""
    return hash_sources(Path(__file__).parents[1] / "kernels")


def hash_sources(directory: Path) -> str:
    """Hash of the Python files of a directory, computed as in `kernel_sources_hash`."""
    digest = hashlib.sha256()
    for path in sorted(
        path for path in directory.iterdir() if path.suffix == ".py" and path.name not in _UNHASHED_MODULES
    ):
        content = _strip_comments(path.read_text(encoding="utf-8"))
        digest.update(f"{path.name} {len(content)}\n{content}".encode())
    return digest.hexdigest()[:16]


def _strip_comments(source: str) -> str:
    """Python code without docstrings, blank lines and comment lines."""
    lines = source.splitlines()
    bodies = [ast.parse(source).body]
    while bodies:
        for statement in bodies.pop():
            # A string as a statement: the docstring of a function or of a constant.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                rows = slice(statement.lineno - 1, statement.end_lineno)
                lines[rows] = [""] * len(lines[rows])
            elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
                bodies.append(statement.body)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
