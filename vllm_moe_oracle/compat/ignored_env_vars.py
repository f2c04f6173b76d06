"""vLLM's environment variables for MoE kernels that have no effect, and the warnings about them.

Newer releases no longer read some. Others do not reach the experts that this plugin serves."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from ..settings import env_var, get_env

logger = logging.getLogger("vllm.moe_oracle")

# Last minor release that reads it, and its replacement. Source: vllm/envs.py of the releases.
REMOVED_VARIABLES = {
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
class IgnoredVariable:
    """A variable that vLLM reads and that has no effect on the experts which this plugin serves.

    Attributes:
        explanation: what happens instead, and which setting to use.
        harmless_values: values (lower case) that request the default behavior.
    """

    explanation: str
    harmless_values: tuple[str, ...] = ("",)


_ACTIVATIONS_UNCHANGED = (
    f"inputs of quantized experts are quantized only where the checkpoint or {env_var('activations')} says so, never "
    "by a variable of one kernel"
)

IGNORED_VARIABLES = {
    # The classes' constructors read it; nothing can override it.
    "VLLM_MARLIN_INPUT_DTYPE": IgnoredVariable(
        f"{_ACTIVATIONS_UNCHANGED}; with fp8, vLLM's Marlin classes still reject GPUs other than sm_89 and sm_12x"
    ),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": IgnoredVariable(_ACTIVATIONS_UNCHANGED, ("", "{}")),
    "VLLM_HUMMING_MOE_GEMM_TYPE": IgnoredVariable(
        "Humming's indexed kernels run where all experts are on one rank, its grouped ones under expert parallelism; "
        "where vLLM's classes require the other kind, they reject the layer and the next backend is taken",
        ("", "auto"),
    ),
    "VLLM_USE_FLASHINFER_MOE_INT4": IgnoredVariable(
        f"{env_var('backend')}=trtllm_mxint4 selects FlashInfer's kernel for int4", ("", "0", "false")
    ),
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": IgnoredVariable(
        "emulated experts stay in 8 bits and are dequantized one by one in each step", ("", "0", "false")
    ),
    "VLLM_CPU_INT4_W4A8": IgnoredVariable(
        f"on a CPU, int4 experts get int8 activations only with {env_var('allow_activation_quantization')}=1",
        ("", "1"),
    ),
}
"""Source: vLLM's MoE classes and oracles in every supported release."""


def ignored_variables() -> dict[str, str]:
    """A message for each of `IGNORED_VARIABLES` that is set to more than a harmless value, by variable."""
    found = {}
    for name, rule in IGNORED_VARIABLES.items():
        value = get_env(name)
        if value is not None and value.strip().lower() not in rule.harmless_values:
            found[name] = f"{name}={value} has no effect on the experts that this plugin serves: {rule.explanation}"
    return found


def warn_ignored(version: str) -> list[str]:
    """Logs a warning for each variable that is set and has no effect.

    Returns:
        The variables' names.
    """
    found = []
    for name, words in ignored_variables().items():
        logger.warning("moe_oracle: %s", words)
        found.append(name)
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        return found
    for name, (last, instead) in REMOVED_VARIABLES.items():
        if get_env(name) is not None and release > Version(last).release[:2]:
            logger.warning(
                "moe_oracle: %s=%s has no effect on vLLM %s, which stopped reading it after %s; use %s",
                name, get_env(name), version, last, instead,
            )  # fmt: skip
            found.append(name)
    return found
