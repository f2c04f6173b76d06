"""The supported releases of vLLM: one list, from which the tests' matrix, the CI and the README's table are made.

An era is a run of releases that one adapter speaks to. A new release is a line here; if something that we use has
moved, the newest adapter learns it and a subclass in `older` keeps the old way for the eras before.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

_LAYER = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"


@dataclass(frozen=True, slots=True)
class Era:
    """Releases that one adapter serves, until the next era begins.

    Attributes:
        first: minor release that it begins with.
        adapter: ``module:Class`` of its adapter; imported inside vLLM only.
        layer: ``module:Class`` of vLLM's MoE layers.
        releases: those that were tested, oldest first.
        change: what is different from the era before, in words.
    """

    first: str
    adapter: str
    layer: str
    releases: tuple[str, ...]
    change: str


ERAS = (
    Era(
        "0.22",
        "vllm_moe_oracle.compat.older:BeforeRoutedExperts",
        "vllm.model_executor.layers.fused_moe.layer:FusedMoE",
        ("0.22.1", "0.23.0"),
        "the MoE layer holds router, weights and runner in one class",
    ),
    Era(
        "0.24",
        "vllm_moe_oracle.compat.older:BeforeExpertBiases",
        _LAYER,
        ("0.24.0", "0.25.1", "0.26.0"),
        "routed experts are a layer of their own",
    ),
    Era(
        "0.27",
        "vllm_moe_oracle.compat.older:BeforeFreeHumming",
        _LAYER,
        ("0.27.1",),
        "the layer's loader knows biases of single experts",
    ),
    Era(
        "0.28",
        "vllm_moe_oracle.compat.older:BeforeModularCpu",
        _LAYER,
        ("0.28.0", "0.29.0"),
        "Humming's experts no longer take the layer",
    ),
    Era(
        "0.30",
        "vllm_moe_oracle.compat.older:BeforeHashFlag",
        _LAYER,
        ("0.30.0",),
        "the modular kernel runs on a CPU",
    ),
    Era(
        "0.31",
        "vllm_moe_oracle.compat.adapter:Adapter",
        _LAYER,
        ("0.31.0", "0.32.0", "0.33.0"),
        "the layer's config says whether routing is by hash",
    ),
)
"""Oldest first."""

RELEASES = tuple(release for era in ERAS for release in era.releases)
"""Releases that the plugin is tested with, oldest first."""

CPU_RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Those with a CPU build for one and the same torch: on these a whole model is served in the tests."""


BRINGS = {
    "cuda": {
        "vllm": RELEASES[-1],
        "torch": "2.14.0",
        "humming-kernels": "0.1.19",
        "flashinfer-python": "0.7.2.post1",
    },
    "cpu": {"vllm": CPU_RELEASES[-1], "torch": "2.13.0"},
}
"""What an installation of the newest tested release brings, by kind of device: the requirements in its metadata."""


@dataclass(frozen=True, slots=True)
class Support:
    """What is known about one vLLM release.

    Attributes:
        release: the version asked for.
        era: first and last tested release of the era that serves it.
        tested: it is one of the tested releases itself.
        proven: what the tests prove for it: ``surface``, ``registration``, ``serving``; nothing for a release that is
            not tested itself.
    """

    release: str
    era: tuple[str, str]
    tested: bool
    proven: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.era
        era = first if first == last else f"{first} to {last}"
        if not self.tested:
            return f"vLLM {self.release}, not tested itself; served like {era}"
        return f"vLLM {self.release}, of the era {era}; proven: {', '.join(self.proven)}"


def era_of(version: str) -> Era:
    """The era that serves a version: the last one that has begun. What is older or newer than all, or cannot be read,
    gets the nearest, or the newest."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return ERAS[-1]
    begun = [era for era in ERAS if Version(era.first).release <= release]
    return begun[-1] if begun else ERAS[0]


def support(version: str) -> Support:
    """What the tests prove for a version."""
    era = era_of(version)
    try:
        name = ".".join(map(str, Version(version).release))
    except InvalidVersion:
        name = version
    tested = name in RELEASES
    proven = ("surface", "registration", *(("serving",) if name in CPU_RELEASES else ())) if tested else ()
    return Support(version, (era.releases[0], era.releases[-1]), tested, proven)


def table() -> str:
    """The support table of the README, in Markdown."""
    rows = ["| vLLM | sources | registration | serving on CPU | era |", "|---|---|---|---|---|"]
    for era in reversed(ERAS):
        for release in reversed(era.releases):
            proven = support(release).proven
            marks = ["yes" if proof in proven else "" for proof in ("surface", "registration", "serving")]
            rows.append(f"| {' | '.join([release, *marks])} | {era.first}: {era.change} |".replace("|  |", "| |"))
    return "\n".join(rows)
