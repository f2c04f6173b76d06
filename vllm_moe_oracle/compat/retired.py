"""Environment variables that older vLLM releases chose MoE kernels by, and that newer ones ignore without a word."""

from __future__ import annotations

import logging

from packaging.version import InvalidVersion, Version

from ..settings import environment

logger = logging.getLogger("vllm.moe_oracle")

# Last minor release that read it, and what does its work now; read off the releases' vllm/envs.py.
RETIRED = {
    "VLLM_MXFP4_USE_MARLIN": ("0.23", "--moe-backend marlin"),
    "VLLM_FLASHINFER_MOE_BACKEND": ("0.23", "--moe-backend flashinfer_trtllm or flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_FP16": ("0.23", "--moe-backend flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_FP8": ("0.23", "--moe-backend flashinfer_trtllm or flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_FP4": ("0.23", "--moe-backend flashinfer_trtllm or flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": ("0.23", "--moe-backend flashinfer_trtllm"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": ("0.23", "--moe-backend flashinfer_cutlass"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": ("0.23", "--moe-backend flashinfer_trtllm or flashinfer_cutlass"),
    "VLLM_TEST_FORCE_FP8_MARLIN": ("0.28", "--moe-backend marlin"),
}


def warn(version: str) -> list[str]:
    """Warns once of each such variable that is set and that this release does not read.

    Args:
        version: vLLM's version.

    Returns:
        The variables' names.
    """
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        return []
    found = []
    for name, (last, instead) in RETIRED.items():
        if environment(name) is not None and release > Version(last).release[:2]:
            logger.warning(
                "moe_oracle: %s=%s has no effect on vLLM %s, which stopped reading it after %s; use %s",
                name, environment(name), version, last, instead,
            )  # fmt: skip
            found.append(name)
    return found
