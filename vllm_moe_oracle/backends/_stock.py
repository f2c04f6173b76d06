"""What backends over vLLM's own kernels share: their place in stock's order, and rules that depend on the release."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from ..oracle.problem import Activation, Device, Problem
from ._limits import Rule

FROM_SM80 = ((80, 200),)
"""Every CUDA device from Ampere on: kernels that carry PTX for compute capability 8.0."""

# vllm/model_executor/layers/fused_moe/oracle/mxfp8.py of 0.33.0, `_SUPPORTED_BACKENDS`, spaced out; within a backend
# the order of `_mxfp8_backend_to_kernel_cls`.
MXFP8_ORDER = {
    "trtllm_monolithic": 10.0,
    "trtllm": 11.0,
    "deep_gemm": 20.0,
    "marlin": 30.0,
    "humming_batched": 60.0,
    "humming_grouped": 61.0,
    "humming": 62.0,
}
"""Places of the stock kernels in the order of vLLM 0.33.0, lower first."""

_HUMMING_FIRST = 25.0
_HUMMING_PREFERRED = (90,)
"""Compute capabilities on which 0.33.0 moves Humming directly before Marlin (`prioritize_humming`)."""


def mxfp8_place(name: str, device: Device) -> float:
    """Place of a stock kernel among those of MXFP8, as vLLM 0.33.0 orders them on the device.

    Args:
        name: a key of `MXFP8_ORDER`.
        device: the machine.
    """
    place = MXFP8_ORDER[name]
    if name.startswith("humming") and device.kind == "cuda" and device.capability in _HUMMING_PREFERRED:
        return _HUMMING_FIRST + (place - MXFP8_ORDER["humming_batched"])
    return place


def release(device: Device) -> tuple[int, ...]:
    """vLLM's version on the machine as numbers; one that is unknown counts as the newest."""
    try:
        return Version(device.packages["vllm"]).release
    except (KeyError, InvalidVersion):
        return (1 << 16,)


def _neutral(activation: Activation) -> bool:
    return activation.alpha in (None, 1.0) and activation.beta in (None, 0.0)


def _reaches(problem: Problem, device: Device, swigluoai_since: tuple[int, ...]) -> str:
    """Why the activation's parameters do not reach a stock kernel; empty when they do."""
    activation = problem.activation
    if activation.name == "swigluoai":
        if release(device) < swigluoai_since:
            since = ".".join(map(str, swigluoai_since))
            return f"takes gate rows, then up rows, for swigluoai only since vLLM {since}"
        return "" if activation.limit is not None else "asks a limit of swigluoai, the layer has none"
    if activation.name == "silu" and activation.gated:
        return "" if _neutral(activation) else f"uses alpha 1 and beta 0 for silu, the layer has {activation}"
    if _neutral(activation) and activation.limit is None:
        return ""
    return f"passes no alpha, beta or limit to its {activation.name}, the layer has {activation}"


def activation_rule(swigluoai_since: tuple[int, ...]) -> Rule:
    """Alpha, beta and limit reach the kernel, or the layer is refused.

    vLLM applies a limit to silu, and alpha, beta and limit to ``swigluoai_uninterleave``; everything else is ignored in
    silence.

    Args:
        swigluoai_since: first vLLM release whose class takes ``swigluoai_uninterleave``.
    """
    return Rule(
        "activation.parameters",
        lambda problem, device: bool(_reaches(problem, device, swigluoai_since)),
        lambda problem, device: _reaches(problem, device, swigluoai_since),
    )
