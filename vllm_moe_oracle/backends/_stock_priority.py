"""Where the newest supported vLLM departs from its own list of kernels, by layer and device.

Each wrapper's `static_priority` is its position in vLLM's list, with gaps: ``fused_moe/oracle/mxfp8.py``
(``_SUPPORTED_BACKENDS``), ``mxfp4.py`` (``_get_priority_backends_for_gpt_oss`` and ``_get_priority_backends``) and
``int_wna16.py`` (``_get_priority_backends``). The class that vLLM lists first for a kernel comes first.
"""

from __future__ import annotations

from ..core.problem import Device, Problem

_LAST = 200.0
"""Distance that moves a kernel behind, or before, all others."""

_GPT_OSS_PACKINGS = ("gpt_oss", "quark", "online")
"""Packings whose layers get vLLM's list for gpt-oss; all others get the other list."""

_MARLIN_PACKINGS = ("compressed-tensors", "auto-round")
"""Packings whose stock classes construct Marlin without a list. On sm_100 to sm_119 they take vLLM's own kernel for
MXFP4 on both sides instead, which no backend here wraps."""

_HUMMING_CAPABILITIES = (90,)
"""Compute capabilities on which vLLM moves Humming directly before Marlin (``prioritize_humming``)."""


def prefers_humming(device: Device) -> bool:
    """Whether vLLM moves Humming directly before Marlin on the device."""
    return device.kind == "cuda" and device.capability in _HUMMING_CAPABILITIES


def gpt_oss_priority(position: float, problem: Problem, device: Device, *, only: bool, quantizes: bool) -> float:
    """Priority of an MXFP4 kernel in vLLM's list for gpt-oss.

    Args:
        position: its `static_priority`.
        problem: the layer.
        device: the machine.
        only: the other list does not have the kernel; layers that get that list take it after everything else.
        quantizes: the kernel takes MXFP8 activations: vLLM takes it before everything else where they are declared.
    """
    if problem.scheme.packing not in _GPT_OSS_PACKINGS:
        return position + _LAST if only else position
    if device.kind == "cuda" and quantizes and problem.scheme.activations == "mxfp8":
        return position - _LAST
    return position


def marlin_mxfp4_priority(position: float, problem: Problem, device: Device) -> float:
    """Priority of Marlin for MXFP4: first for the packings whose stock classes construct it without a list."""
    constructed = device.kind == "cuda" and problem.scheme.packing in _MARLIN_PACKINGS
    return position - 60.0 if constructed else position
