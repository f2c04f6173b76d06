"""First vLLM releases whose kernels and expert classes do what a backend needs.

Backends compare with no release of their own. They ask `vllm_at_least_on` whether a machine's vLLM is new enough, and
quote the release in reasons.

Of ``swigluoai``, "in two halves" means gate rows, then up rows; vLLM calls it ``swigluoai_uninterleave``. In
the other form rows of gate and up alternate.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from ..core.problem import Device
from .supported import RELEASES

OLDEST_RELEASE = RELEASES[0]
"""The oldest tested release. A feature with this minimum version is in every tested release."""

AUTO_AWQ = "0.24.0"
"""vLLM has ``auto_awq`` as a name of a quantization."""

AUTO_ROUND_LOW_BITS = "0.30.0"
"""vLLM's INC config gives experts in integers of 2, 3, 5, 6 and 7 bits to Humming on NVIDIA GPUs. Before, it takes 2
and 3 bits for linear layers alone."""

AUTO_ROUND_MXFP4 = "0.27.1"
"""vLLM's INC config reads experts in MXFP4."""

AUTO_ROUND_MXFP8 = "0.29.0"
"""vLLM's INC config reads experts in MXFP8. From 0.27.1 on it has MXFP8 for linear layers alone."""

COMPRESSED_LOW_BITS = "0.29.0"
"""vLLM's class for integers of compressed-tensors has experts of 2 to 8 bits, with Humming on NVIDIA GPUs. Before, it
takes 4 and 8."""

COMPRESSED_LOW_BITS_ZERO_POINTS = "0.31.0"
"""The same with zero points."""

CPU_INT4_ROUTED_IDS = "0.30.0"
"""The class for int4 experts on CPUs takes routed ids. Before, it routes tokens itself."""

CPU_MXFP4 = "0.27.1"
"""vLLM's CPU extension has an operator for MXFP4 experts."""

CUTLASS_ACTIVATION_PARAMS = "0.28.0"
"""The class over FlashInfer's CUTLASS kernels passes the activation's parameters for MXFP4, and takes ``swigluoai``
in two halves. Before, it has gpt-oss's constants built in."""

DEEP_GEMM_MXFP4_PACKED = "0.24.0"
"""DeepGEMM's kernels for MXFP4 take packed scales. Before, they take float32 scales, which the library packs at every
call."""

DEEP_GEMM_MXFP8 = "0.24.0"
"""DeepGEMM's class takes MXFP8, and ``swigluoai`` in two halves."""

EMULATED_MXFP8 = "0.27.1"
"""vLLM's list of kernels for MXFP8 ends with its emulation on GPUs, too."""

HUMMING = "0.25.1"
"""Humming's classes use the interface of humming-kernels 0.1.10, as `compat.humming` does."""

HUMMING_BATCH_INVARIANT = "0.28.0"
"""Humming's classes claim batch invariance."""

HUMMING_FIRST = "0.32.0"
"""On sm_90 vLLM moves Humming directly before Marlin. Before, Humming is the last of its kernels but the emulation."""

HUMMING_GROUPED = "0.30.0"
"""Under expert parallelism vLLM runs Humming's grouped kernels, no longer the indexed ones."""

HUMMING_UNINTERLEAVED = "0.28.0"
"""Humming's classes take ``swigluoai`` in two halves."""

HUMMING_NON_GATED = "0.27.1"
"""Humming's conversion supports non-gated experts. Before, it expects twice their rows."""

LORA_ALTERNATING_ROWS = "0.32.0"
"""vLLM's mixin for LoRA on experts adds gate's and up's adapters to rows that alternate where the activation is
``swigluoai``. Before, it adds them to two halves."""

MARLIN_INT8 = "0.23.0"
"""Marlin's classes take 8-bit integers."""

MARLIN_UNINTERLEAVED = "0.24.0"
"""Marlin's classes take ``swigluoai`` in two halves."""

MARLIN_WITHOUT_ACT_ORDER = "0.30.0"
"""Marlin's operator no longer reorders input features."""

MODELOPT_EXCLUDE_MODULES = "0.33.0"
"""ModelOpt's configs read ``exclude_modules`` beside ``quant_algo``, where there is no ``ignore``."""

MODELOPT_MIXED_MXFP8 = "0.25.1"
"""ModelOpt's config of mixed precision has MXFP8. Before, it takes such layers for unquantized ones."""

MOE_BACKENDS_FOR_MXFP4 = "0.29.0"
"""``--moe-backend`` has ``b12x``, and kernels of FlashInfer that exchange tokens themselves, for MXFP4."""

MOE_EP_CUTEDSL = "0.32.0"
"""The same option has ``flashinfer_moe_ep_cutedsl``."""

ONLINE_MXFP4 = "0.28.0"
"""vLLM quantizes a checkpoint in 16 bits to MXFP4 while it loads: ``--quantization mxfp4``."""

STOCK_RULES_MXFP8 = "0.24.0"
"""`oracle.stock_choice` gives vLLM's choice of a kernel for MXFP8 on a GPU."""

STOCK_RULES_MXFP4 = "0.25.1"
"""The same for MXFP4."""

STOCK_RULES_WNA16 = "0.31.0"
"""The same for integers."""

STOCK_RULES_ON_CPU = "0.32.0"
"""The same for all on a CPU."""

W4A8_MXFP4_LISTED = "0.32.0"
"""llm-compressor's MXFP4 with activations declared in FP8 has a method of its own, with a list of kernels."""

CUTLASS_MXFP4_LISTED = "0.32.0"
"""vLLM's list of kernels for gpt-oss's format has the one over CUTLASS for MXFP4 on both sides. Where activations are
declared, kernels that leave them in 16 bits stand in."""

SITU = "0.27.1"
"""The activation ``situ``. Expert classes that call vLLM's activation functions pass its parameters."""

TRITON_KERNELS_SM120 = "0.32.0"
"""vLLM runs the package triton_kernels on sm_120."""

TRITON_KERNELS_UNINTERLEAVED = "0.24.0"
"""The unfused class over triton_kernels takes ``swigluoai`` in two halves."""

TRITON_KERNELS_LOCAL_IDS = "0.25.1"
"""The classes over triton_kernels do not mistake empty slots (-1) for the last expert, sum only slots that were
written, and take any number of experts per token. Before, it must be a power of two."""

TRITON_WNA16_LISTED = "0.27.1"
"""vLLM's oracle for integers lists the Triton class. Before, vLLM runs the same kernel by a function."""

TRITON_WNA16_UNINTERLEAVED = "0.29.0"
"""The same class takes ``swigluoai`` in two halves."""

TRITON_WNA16_LIMIT = "0.28.0"
"""The same class passes a limit to its activation."""

TRTLLM_MXFP4_GROUPED_TOPK = "0.27.1"
"""The monolithic class over TRTLLM-gen's MXFP4 kernels passes groups, scaling factor and correction bias."""

TRTLLM_MXFP4_ODD_MULTIPLES = "0.27.1"
"""vLLM runs those kernels with intermediate sizes that are odd multiples of 128."""

TRTLLM_MXFP8 = "0.23.0"
"""The classes over TRTLLM-gen's kernels for MXFP8 pass the activation, and no groups where there are none. Before, they
pass 0 groups, which the kernel refuses."""

TRTLLM_MXFP8_ACTIVATION_PARAMS = "0.25.1"
"""The same classes pass a limit, and take ``swigluoai`` in two halves."""

TRTLLM_MXINT4_SILU = "0.25.1"
"""The class over TRTLLM-gen's int4 kernels accepts SiLU."""

LINEAR_WITHOUT_ACT_ORDER = "0.30.0"
"""vLLM's linear layers no longer support act order with groups. A server with such a checkpoint does not start."""


def vllm_at_least_on(device: Device, minimum: str) -> bool:
    """Whether a machine's vLLM is a release or a newer one.

    Args:
        device: the machine. One without a known vLLM counts as having the newest.
        minimum: one of the constants above.
    """
    return vllm_at_least(device.packages.get("vllm"), minimum=minimum)


def vllm_at_least(vllm: str | None, *, minimum: str) -> bool:
    """Whether a version of vLLM is a release or a newer one.

    Args:
        vllm: the version. None, or one that cannot be parsed, counts as the newest. Development, pre- and local
            versions count as the release that they lead to.
        minimum: one of the constants above.
    """
    try:
        return vllm is None or Version(Version(vllm).base_version) >= Version(minimum)
    except InvalidVersion:
        return True


def is_unreleased_on(device: Device) -> bool:
    """Whether a machine's vLLM leads to a release after the newest tested one. One without a known vLLM has that."""
    vllm, newest = device.packages.get("vllm"), RELEASES[-1]
    try:
        return vllm is not None and Version(Version(vllm).base_version) > Version(newest)
    except InvalidVersion:
        return True


def refuses_act_order_in_linear(vllm: str | None) -> bool:
    """Whether vLLM's own methods refuse act order in groups; see `LINEAR_WITHOUT_ACT_ORDER` and `vllm_at_least`."""
    return vllm_at_least(vllm, minimum=LINEAR_WITHOUT_ACT_ORDER)


def release_before(release: str) -> str:
    """The newest tested release before one."""
    return RELEASES[RELEASES.index(release) - 1]
