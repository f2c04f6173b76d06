"""The patches that make vLLM use this project's methods: through its registry, and where it never asks the registry."""

from __future__ import annotations

from collections.abc import Iterator

from .patches import Patch
from .quantizations import LazyConfigs


def patches_for(version: str, configs: dict[str, str]) -> Iterator[Patch]:
    """Every patch for a vLLM release.

    Args:
        version: vLLM's version.
        configs: ``module:Class`` of our quantisation configs by name.
    """
    yield _registry(configs)
    yield from _cpu_linear()


def _registry(configs: dict[str, str]) -> Patch:
    from vllm.model_executor.layers import quantization

    key = "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"
    return Patch("quantization registry", quantization, key, LazyConfigs(getattr(quantization, key), configs))


def _cpu_linear() -> Iterator[Patch]:
    """vLLM's emulation of MXFP8 linear layers runs on a CPU, but its table for CPUs does not offer it."""
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear

    table = linear._POSSIBLE_MXFP8_KERNELS
    if PlatformEnum.CPU not in table:
        yield Patch("MXFP8 linear on CPU", table, PlatformEnum.CPU, [linear.EmulationMxfp8LinearKernel])
