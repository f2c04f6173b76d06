"""The supported releases of vLLM. Everything else that names a release is generated from this list.

To support a new release, add its line to `TESTED_RELEASES` and run ``python -m tests.tools.generate --write``. If vLLM
changed an interface that this project uses, `compat.adapter.Adapter` follows it, a subclass in
`compat.legacy_adapters` keeps the old way, and `RELEASE_GROUPS` gets a line that says which releases use that subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from ..errors import StandDown


@dataclass(frozen=True, slots=True)
class Release:
    """One tested release.

    Attributes:
        version: vLLM's version.
        requires: what a CUDA installation of it requires, version by distribution, by the metadata of its wheel.
        cpu_torch: version of torch that its CPU build requires; "" where there is none.
    """

    version: str
    requires: Mapping[str, str] = field(default_factory=dict)
    cpu_torch: str = ""


def _requires(torch: str, humming: str, flashinfer: str) -> Mapping[str, str]:
    return {"torch": torch, "humming-kernels": humming, "flashinfer-python": flashinfer}


TESTED_RELEASES = (
    Release("0.22.1", _requires("2.11.0", "0.1.2", "0.6.11.post2")),
    Release("0.23.0", _requires("2.11.0", "0.1.4", "0.6.12")),
    Release("0.24.0", _requires("2.11.0", "0.1.6", "0.6.12")),
    Release("0.25.1", _requires("2.11.0", "0.1.10", "0.6.13")),
    Release("0.26.0", _requires("2.11.0", "0.1.10", "0.6.14")),
    Release("0.27.1", _requires("2.13.0", "0.1.10", "0.6.16.post3"), cpu_torch="2.13.0"),
    Release("0.28.0", _requires("2.13.0", "0.1.12", "0.6.16.post3"), cpu_torch="2.13.0"),
    Release("0.29.0", _requires("2.13.0", "0.1.12", "0.6.18"), cpu_torch="2.13.0"),
    Release("0.30.0", _requires("2.13.0", "0.1.12", "0.6.18.post1"), cpu_torch="2.13.0"),
    Release("0.31.0", _requires("2.13.0", "0.1.16", "0.7.0.post1"), cpu_torch="2.13.0"),
    Release("0.32.0", _requires("2.13.0", "0.1.17", "0.7.0.post1"), cpu_torch="2.13.0"),
    Release("0.33.0", _requires("2.14.0", "0.1.19", "0.7.2.post1")),
)
"""Oldest first."""

RELEASES = tuple(each.version for each in TESTED_RELEASES)
"""Versions that the plugin is tested with, oldest first."""

NEWEST = RELEASES[-1]
"""The newest of them."""

_CPU_TORCH = next(each.cpu_torch for each in reversed(TESTED_RELEASES) if each.cpu_torch)

CPU_RELEASES = tuple(each.version for each in TESTED_RELEASES if each.cpu_torch == _CPU_TORCH)
"""Versions whose CPU build requires the same torch as the newest CPU build. The tests serve a whole model with each."""


def packages_of(kind: str, version: str) -> dict[str, str]:
    """Packages of an installation of a vLLM release, by distribution.

    Args:
        kind: of the device.
        version: of vLLM, as it names itself or shorter (``v0.33``). A release that is not tested is taken to require
            what the newest tested one before it does.
    """
    wanted = Version(version)
    known = next((each for each in reversed(TESTED_RELEASES) if Version(each.version) <= wanted), TESTED_RELEASES[0])
    name = known.version if Version(known.version) == wanted else str(wanted)
    brings = (
        known.requires if kind == "cuda" else {"torch": known.cpu_torch} if kind == "cpu" and known.cpu_torch else {}
    )
    return {"vllm": name, **brings}


DEFAULT_PACKAGES = {"cuda": packages_of("cuda", NEWEST), "cpu": packages_of("cpu", CPU_RELEASES[-1])}
"""Packages of an installation of the newest tested release, by kind of device."""

_COMPAT = "vllm_moe_oracle.compat"
_LEGACY = f"{_COMPAT}.legacy_adapters"


@dataclass(frozen=True, slots=True)
class ReleaseGroup:
    """Releases that share an adapter. A group ends where the next one begins.

    Attributes:
        first: minor release that it begins with.
        adapter: ``module:Class`` of the adapter; imported inside vLLM only.
        change: what vLLM changed with `first`.
        layer: ``module:Class`` of vLLM's MoE layers.
    """

    first: str
    adapter: str
    change: str
    layer: str = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"

    @property
    def releases(self) -> tuple[str, ...]:
        """The tested releases of the group, oldest first."""
        return tuple(each for each in RELEASES if release_group(each) is self)


RELEASE_GROUPS = (
    ReleaseGroup(
        "0.22",
        f"{_LEGACY}:Vllm022Adapter",
        "the MoE layer holds router, weights and runner in one class",
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE",
    ),
    ReleaseGroup("0.24", f"{_LEGACY}:Vllm024Adapter", "routed experts are a layer of their own"),
    ReleaseGroup("0.27", f"{_LEGACY}:Vllm027Adapter", "the layer loads biases of single experts"),
    ReleaseGroup("0.28", f"{_LEGACY}:Vllm028Adapter", "Humming's experts no longer take the layer"),
    ReleaseGroup("0.30", f"{_LEGACY}:Vllm030Adapter", "the modular kernel runs on a CPU"),
    ReleaseGroup("0.31", f"{_COMPAT}.adapter:Adapter", "the layer's config says whether routing is by hash"),
)
"""Oldest first."""


@dataclass(frozen=True, slots=True)
class ReleaseSupport:
    """What is known about one vLLM release.

    Attributes:
        release: the version asked for.
        group: first and last tested release that share its adapter.
        tested: whether it is one of the tested releases itself.
        nearest: the nearest tested release: itself, or the last one that is not of a later minor version.
        verified: what the tests verify for it: ``sources``, ``registration``, ``serving``. Empty for a release that is
            not tested itself.
    """

    release: str
    group: tuple[str, str]
    tested: bool
    nearest: str
    verified: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.group
        group = first if first == last else f"{first} to {last}"
        if not self.tested:
            untested = f"vLLM {self.release}: not tested itself; same adapter as {group}"
            return f"{untested}; the nearest tested release is {self.nearest}"
        return f"vLLM {self.release}: supported; tested {', '.join(self.verified)}; same adapter as {group}"


def release_group(version: str) -> ReleaseGroup:
    """The group whose adapter serves a version: the last one that has begun. A version older than all gets the oldest
    group. One that cannot be parsed gets the newest."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return RELEASE_GROUPS[-1]
    begun = [group for group in RELEASE_GROUPS if Version(group.first).release <= release]
    return begun[-1] if begun else RELEASE_GROUPS[0]


def release_support(version: str) -> ReleaseSupport:
    """What the tests verify for a version."""
    group = release_group(version).releases
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return ReleaseSupport(version, (group[0], group[-1]), False, NEWEST, ())
    begun = [each for each in RELEASES if Version(each).release[:2] <= release.release[:2]]
    nearest = begun[-1] if begun else RELEASES[0]
    tested = Version(nearest) == release
    verified = ("sources", "registration", *(("serving",) if nearest in CPU_RELEASES else ())) if tested else ()
    return ReleaseSupport(version, (group[0], group[-1]), tested, nearest, verified)


def check_platform(kind: str, name: str = "") -> None:
    """Checks that backends exist for a platform.

    Args:
        kind: as `Device.kind`.
        name: the device's, for the message.

    Raises:
        StandDown: stock vLLM has kernels for these formats there that no backend knows.
    """
    if kind in ("rocm", "xpu"):
        rule = f"no backend knows {name or 'this platform'}'s own kernels for these formats"
        raise StandDown(rule, "Stock vLLM serves them there")
