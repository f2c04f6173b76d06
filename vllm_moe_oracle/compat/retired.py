"""Environment variables of vLLM's that choose what MoE kernels do, and that nobody follows: newer releases stopped
reading some, and experts that this plugin serves do not hear of others. None is ignored without a word."""

from __future__ import annotations

import logging
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """A variable that vLLM reads, and that experts which this plugin serves do not follow.

    Attributes:
        because: what happens instead, and how to ask for it here.
        unless: values, lower case, that ask for nothing else than what happens anyway.
    """

    because: str
    unless: tuple[str, ...] = ("",)


_QUANTISED = (
    "the inputs of quantised experts are themselves quantised only where the checkpoint or the setting activations "
    "says so, never by a variable of one kernel"
)

UNFOLLOWED = {
    # Its constructor reads it before anybody could tell it otherwise.
    "VLLM_MARLIN_INPUT_DTYPE": Unfollowed(
        f"{_QUANTISED}; told fp8, vLLM's Marlin classes refuse GPUs other than sm_89 and sm_12x all the same"
    ),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": Unfollowed(_QUANTISED, ("", "{}")),
    "VLLM_HUMMING_MOE_GEMM_TYPE": Unfollowed(
        "Humming's indexed kernels run where all experts are on one rank, its grouped ones under expert parallelism; "
        "where vLLM's classes want the others, they refuse the layer and the next backend is taken",
        ("", "auto"),
    ),
    "VLLM_USE_FLASHINFER_MOE_INT4": Unfollowed(
        "FlashInfer's kernel for int4 is asked for by the setting backend=trtllm_mxint4", ("", "0", "false")
    ),
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": Unfollowed(
        "emulated experts stay in 8 bits and are dequantised one after the other in each step", ("", "0", "false")
    ),
    "VLLM_CPU_INT4_W4A8": Unfollowed(
        "int4 experts get activations in int8 on a CPU only with the setting allow_activation_quantization",
        ("", "1"),
    ),
}
"""Read in vLLM's MoE classes and oracles of every supported release that has them."""


def unfollowed() -> dict[str, str]:
    """What to say of each variable that is set and that experts served here do not follow."""
    found = {}
    for name, rule in UNFOLLOWED.items():
        value = environment(name)
        if value is not None and value.strip().lower() not in rule.unless:
            found[name] = f"{name}={value} has no effect on the experts that this plugin serves: {rule.because}"
    return found


def warn(version: str) -> list[str]:
    """Warns once of each such variable that is set.

    Args:
        version: vLLM's version.

    Returns:
        The variables' names.
    """
    found = []
    for name, words in unfollowed().items():
        logger.warning("moe_oracle: %s", words)
        found.append(name)
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        return found
    for name, (last, instead) in RETIRED.items():
        if environment(name) is not None and release > Version(last).release[:2]:
            logger.warning(
                "moe_oracle: %s=%s has no effect on vLLM %s, which stopped reading it after %s; use %s",
                name, environment(name), version, last, instead,
            )  # fmt: skip
            found.append(name)
    return found
