"""Values that shells complete for options and arguments; imports happen when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..measurements import model_shapes
from ..oracle.registry import default_registry
from ..quantization import ONLINE_SCHEMES, UNSUPPORTED_ONLINE
from ..settings import AUTO, FIELDS


def backends() -> list[str]:
    """Names of backends."""
    return [each.name for each in default_registry()]


def vllm_backends() -> list[str]:
    """Values of vLLM's ``--moe-backend``."""
    return [AUTO, *sorted({name for each in default_registry() for name in each.vllm_names})]


def any_backends() -> list[str]:
    """Values of the setting `backend`."""
    return list(dict.fromkeys((*vllm_backends(), *backends())))


def disabled_backends() -> list[str]:
    """Values of the setting `disable`."""
    return [each for each in any_backends() if each != AUTO]


def quantizations() -> list[str]:
    """Values of vLLM's ``--quantization`` that mean experts."""
    return [*ONLINE_SCHEMES, *UNSUPPORTED_ONLINE, "moe_wna16"]


def several(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes the last name of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before = incomplete.split(",")[:-1]
        return [",".join((*before, name)) for name in names() if name not in before]

    return complete


def models(incomplete: str) -> list[str]:
    """Names of layers. Without a beginning there are none: shells then complete files."""
    if not incomplete:
        return []
    schemes = [f"{scheme}:{shape}" for scheme in model_shapes.SCHEME_NAMES for shape in model_shapes.names()]
    return (
        schemes if ":" in incomplete else [*model_shapes.names(), *(f"{each}:" for each in model_shapes.SCHEME_NAMES)]
    )


def assignments(incomplete: str) -> list[str]:
    """Settings, with the values of those that take few."""
    name, assigned, value = incomplete.partition("=")
    if not assigned:
        return [f"{each}=" for each in FIELDS]
    if name not in FIELDS:
        return []
    if name == "backend":
        values = any_backends()
    elif name == "disable":
        values = several(disabled_backends)(value)
    else:
        values = [each for each in FIELDS[name].metadata["metavar"].split("|") if each == each.lower()]
    return [f"{name}={each}" for each in values]
