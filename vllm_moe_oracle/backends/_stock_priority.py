"""Where the newest supported vLLM departs from its own list of kernels, by layer and device.

Each wrapper's `static_priority` is its position in vLLM's list, with gaps: ``fused_moe/oracle/mxfp8.py``
(``_SUPPORTED_BACKENDS``), ``mxfp4.py`` (``_get_priority_backends_for_gpt_oss`` and ``_get_priority_backends``) and
``int_wna16.py`` (``_get_priority_backends``). The class that vLLM lists first for a kernel comes first.
"""

from __future__ import annotations

from ..core.problem import Device, Problem
from ..releases import min_versions

_LAST = 200.0
"""Distance that moves a kernel behind, or before, all others."""

GPT_OSS_PACKINGS = ("gpt_oss", "quark", "online")
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
    if problem.scheme.packing not in GPT_OSS_PACKINGS:
        return position + _LAST if only else position
    if device.kind == "cuda" and quantizes and problem.scheme.activations == "mxfp8":
        return position - _LAST
    return position


def marlin_mxfp4_priority(position: float, problem: Problem, device: Device) -> float:
    """Priority of Marlin for MXFP4: first where stock's method constructs it without a list."""
    constructed = device.kind == "cuda" and is_constructed(problem, device)
    return position - 60.0 if constructed else position


CUTLASS_MXFP4 = "CutlassExpertsMxfp4"
"""vLLM's class for MXFP4 on both sides, on compute capabilities from 10.0 to below 12.0. No backend here wraps it."""

RUNS_CUTLASS_MXFP4 = f"runs {CUTLASS_MXFP4} here, MXFP4 by MXFP4, and no backend wraps it"
"""What stock vLLM does with a layer of `runs_declared_mxfp4`."""

CUTLASS_MULTIPLE = 128
"""Of both sizes: vLLM's method pads no scales, and fails to load other shards."""

EMULATED_MXFP4 = "OCP_MXQuantizationEmulationTritonExperts"
"""vLLM's emulation of activations in MXFP4."""


def is_constructed(problem: Problem, device: Device) -> bool:
    """Whether stock's method constructs a class for MXFP4 without a list of kernels, whatever the layer needs of it."""
    scheme = problem.scheme
    if scheme.name != "mxfp4" or scheme.packing not in _MARLIN_PACKINGS:
        return False
    listed = min_versions.vllm_at_least_on(device, min_versions.W4A8_MXFP4_LISTED)
    return scheme.activations in ("16bit", "mxfp4") or not listed


def class_without_wrapper(problem: Problem, device: Device) -> str:
    """The name of vLLM's class where stock takes one that no backend here wraps, without its list of kernels; "" where
    it does not."""
    scheme = problem.scheme
    if scheme.name != "mxfp4" or problem.parallel.is_batched or device.kind != "cuda":
        return ""
    has_cutlass = 100 <= (device.capability or 0) < 120
    if is_constructed(problem, device) and has_cutlass:
        return CUTLASS_MXFP4
    if scheme.packing in ("quark", "online") and scheme.activations == "mxfp4" and _is_plain(problem):
        asked = problem.lora or problem.batch_invariant  # the list asks the class, which has neither
        listed = has_cutlass and min_versions.vllm_at_least_on(device, min_versions.CUTLASS_MXFP4_LISTED) and not asked
        return CUTLASS_MXFP4 if listed else EMULATED_MXFP4
    return ""


def runs_declared_mxfp4(problem: Problem, device: Device) -> bool:
    """Whether stock multiplies MXFP4 by MXFP4 where the checkpoint declares both, in a layer that its class can load.

    The class has neither LoRA nor EPLB, takes no exchanged tokens, and was not proven batch-invariant; other layers of
    the kind stay with kernels that leave activations in 16 bits.
    """
    whole = problem.hidden_size % CUTLASS_MULTIPLE == 0 == problem.intermediate_size % CUTLASS_MULTIPLE
    can_load = whole and not problem.ragged_intermediate_size and _is_plain(problem)
    is_alone = problem.parallel.dp == 1 and not (problem.batch_invariant or problem.lora or problem.eplb)
    declared = problem.scheme.activations == "mxfp4" and class_without_wrapper(problem, device) == CUTLASS_MXFP4
    return declared and can_load and is_alone and min_versions.vllm_at_least_on(device, min_versions.STOCK_RULES_MXFP4)


def _is_plain(problem: Problem) -> bool:
    """Whether a layer computes nothing that classes without a wrapper lack, or might lack."""
    activation = problem.activation
    return activation.name == "silu" and activation.gated and activation.limit is None and not problem.has_bias
