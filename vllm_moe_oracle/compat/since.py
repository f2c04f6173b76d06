"""With which vLLM release its kernels and expert classes got what backends ask of them, or lost it.

Backends name no release: they ask here whether one has been reached, and say in their reasons which one it is.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from ..oracle.problem import Device
from .eras import RELEASES

OLDEST = RELEASES[0]
"""Nothing older is served, and what is asked for was there."""

CPU_INT4_ROUTED = "0.30.0"
"""The class for int4 experts on CPUs is given routed ids; before, it routes tokens itself."""

CPU_MXFP4 = "0.27.1"
"""The library for CPUs has an operator for MXFP4 experts."""

CUTLASS_PARAMETERS = "0.28.0"
"""The class over FlashInfer's CUTLASS kernels passes the activation's parameters for MXFP4, and takes ``swigluoai``
with gate rows, then up rows; before, it has gpt-oss's constants built in."""

DEEP_GEMM_MXFP4_PACKED = "0.24.0"
"""DeepGEMM's kernels for MXFP4 get packed scales; before, float32 ones, which the library packed at every call."""

DEEP_GEMM_MXFP8 = "0.24.0"
"""DeepGEMM's class takes MXFP8, and ``swigluoai`` with gate rows, then up rows."""

HUMMING = "0.25.1"
"""Humming's classes speak the library's language of 0.1.10, which ours speaks too."""

HUMMING_GROUPED = "0.30.0"
"""Experts of other ranks are run by Humming's grouped kernels and no longer by the indexed ones."""

HUMMING_HALVES = "0.28.0"
"""Humming's classes take ``swigluoai`` with gate rows, then up rows."""

HUMMING_UNGATED = "0.27.1"
"""Humming's conversion knows experts without a gate; before, it asks them for twice their rows."""

MARLIN_8_BIT = "0.23.0"
"""Marlin's classes take 8-bit integers."""

MARLIN_HALVES = "0.24.0"
"""Marlin's classes take ``swigluoai`` with gate rows, then up rows."""

MARLIN_UNORDERED = "0.30.0"
"""Marlin's operator no longer reorders input features."""

SITU = "0.27.1"
"""The activation ``situ``, of which expert classes that run vLLM's own functions for activations know the numbers."""

TRITON_KERNELS_CONSUMER = "0.32.0"
"""The package triton_kernels is run on sm_120."""

TRITON_KERNELS_HALVES = "0.24.0"
"""The unfused class over triton_kernels takes ``swigluoai`` with gate rows, then up rows."""

TRITON_KERNELS_LOCAL_IDS = "0.25.1"
"""The classes over triton_kernels keep empty slots (-1) apart from the last expert, add up only slots that were
written, and take a number of experts per token that is no power of two."""

TRITON_WNA16_HALVES = "0.29.0"
"""The Triton class for integers takes ``swigluoai`` with gate rows, then up rows."""

TRITON_WNA16_LIMIT = "0.28.0"
"""The same class passes a limit to its activation."""

TRTLLM_MXFP4_GROUPS = "0.27.1"
"""The class over TRTLLM-gen's kernels for MXFP4 that route passes groups, scaling factor and correction bias."""

TRTLLM_MXFP4_MULTIPLES = "0.27.1"
"""Those kernels are trusted with intermediate sizes that are odd multiples of 128."""

TRTLLM_MXFP8 = "0.23.0"
"""The classes over TRTLLM-gen's kernels for MXFP8 pass no groups where there are none, and the activation; before, the
kernel refuses the groups of 0 that it is given."""

TRTLLM_MXFP8_PARAMETERS = "0.25.1"
"""The same classes pass a limit, and take ``swigluoai`` with gate rows, then up rows."""

TRTLLM_MXINT4_SILU = "0.25.1"
"""The class for TRTLLM-gen's int4 kernels takes SiLU for an activation of its kernel's."""


LINEAR_UNORDERED = "0.30.0"
"""vLLM's linear layers take no act order in groups any more: a server whose checkpoint has it there does not start."""


def reached(release: str, device: Device) -> bool:
    """Whether vLLM on a machine is a release or a newer one; what is unknown counts as the newest.

    Args:
        release: one of the above.
        device: the machine.
    """
    return reached_by(release, device.packages.get("vllm"))


def reached_by(release: str, vllm: str | None) -> bool:
    """The same of a release of vLLM; None, or what cannot be read, counts as the newest."""
    try:
        return vllm is None or Version(Version(vllm).base_version) >= Version(release)
    except InvalidVersion:
        return True


def before(release: str) -> str:
    """The newest tested release before one."""
    return RELEASES[RELEASES.index(release) - 1]
