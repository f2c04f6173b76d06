"""The order in which the newest tested vLLM tries its kernels: our backends over them have the same places.

Of two kernels the one with the lower place comes first.
"""

from __future__ import annotations

from ..oracle.problem import Device, Problem

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


def _humming_moved(order: dict[str, float], name: str, device: Device) -> float:
    """Place of a stock kernel in an order, with Humming's where the device prefers them."""
    place = order[name]
    if name.startswith("humming") and device.kind == "cuda" and device.capability in _HUMMING_PREFERRED:
        return _HUMMING_FIRST + (place - order["humming_batched"])
    return place


def mxfp8_place(name: str, device: Device) -> float:
    """Place of a stock kernel among those of MXFP8, as vLLM 0.33.0 orders them on the device.

    Args:
        name: a key of `MXFP8_ORDER`.
        device: the machine.
    """
    return _humming_moved(MXFP8_ORDER, name, device)


# vllm/model_executor/layers/fused_moe/oracle/mxfp4.py of 0.33.0: `_get_priority_backends_for_gpt_oss` and
# `_get_priority_backends`, spaced out; within a backend the order of `backend_to_kernel_cls`. What both lists have,
# both have in the same order.
MXFP4_ORDER = {
    "trtllm_bf16_monolithic": 10.0,
    "trtllm_bf16": 11.0,
    "trtllm_mxfp8_monolithic": 20.0,
    "trtllm_mxfp8": 21.0,
    "deep_gemm": 25.0,
    "triton_monolithic": 30.0,
    "triton": 31.0,
    "cutlass_bf16": 40.0,
    "cutlass_mxfp8": 41.0,
    "marlin": 60.0,
    "marlin_batched": 61.0,
    "humming_batched": 70.0,
    "humming_grouped": 71.0,
    "humming": 72.0,
    "cpu": 80.0,
    "triton_unfused": 90.0,
}
"""Places of the stock kernels for MXFP4 in the order of vLLM 0.33.0, lower first. The unfused Triton kernels are in
neither list: stock runs them only where they are asked for."""

_NOT_FOR_OTHERS = (
    "trtllm_bf16_monolithic",
    "trtllm_bf16",
    "triton_monolithic",
    "triton",
    "cutlass_bf16",
    "cutlass_mxfp8",
)
"""What stock offers of itself only to the packings in `_GPT_OSS_LIST`; others get it after everything else."""
_GPT_OSS_LIST = ("gpt_oss", "quark", "online")
_MARLIN_FIRST = ("compressed-tensors", "auto-round")
"""Packings whose stock classes construct Marlin without asking a list; on sm_100 to below sm_120 a kernel of vLLM's own
for both sides in MXFP4, which no backend here runs."""
_AFTER_EVERYTHING = 200.0
_WITH_MXFP8 = ("trtllm_mxfp8_monolithic", "trtllm_mxfp8", "cutlass_mxfp8")
"""What stock takes before everything else from gpt-oss's list where MXFP8 activations are declared."""


def mxfp4_place(name: str, problem: Problem, device: Device) -> float:
    """Place of a stock kernel among those of MXFP4, as vLLM 0.33.0 orders them for the layer on the device.

    Args:
        name: a key of `MXFP4_ORDER`.
        problem: the layer: stock has one list for gpt-oss's checkpoints and a few more, and one for all others.
        device: the machine.
    """
    place = MXFP4_ORDER[name]
    packing = problem.scheme.packing
    if packing not in _GPT_OSS_LIST and name in _NOT_FOR_OTHERS:
        return _AFTER_EVERYTHING + place
    if device.kind != "cuda":
        return place
    if packing in _GPT_OSS_LIST and problem.scheme.activations == "mxfp8" and name in _WITH_MXFP8:
        return place - _AFTER_EVERYTHING
    if packing in _MARLIN_FIRST and name.startswith("marlin"):
        return place - MXFP4_ORDER["marlin"]
    if name.startswith("humming") and device.capability in _HUMMING_PREFERRED:
        # `prioritize_humming`: directly before Marlin.
        return MXFP4_ORDER["marlin"] - 10.0 + (place - MXFP4_ORDER["humming_batched"])
    if name in ("triton_monolithic", "triton") and device.capability // 10 == 12:
        # Little shared memory: behind Marlin there.
        return MXFP4_ORDER["marlin_batched"] + (place - MXFP4_ORDER["triton_monolithic"] + 1.0)
    return place


# vllm/model_executor/layers/fused_moe/oracle/int_wna16.py of 0.33.0: `_get_priority_backends`, spaced out; within a
# backend the order of `backend_to_kernel_cls`.
WNA16_ORDER = {
    "marlin": 30.0,
    "marlin_batched": 35.0,
    "triton": 40.0,
    "humming_batched": 60.0,
    "humming_grouped": 61.0,
    "humming": 62.0,
    "trtllm_monolithic": 70.0,
    "cpu": 80.0,
}
"""Places of the stock kernels for integer weights in the order of vLLM 0.33.0, lower first; FlashInfer's, which is
first there and off unless the environment asks for it, behind what stock takes by itself."""


def wna16_place(name: str, device: Device) -> float:
    """Place of a stock kernel among those of integer weights, as vLLM 0.33.0 orders them on the device.

    Args:
        name: a key of `WNA16_ORDER`.
        device: the machine.
    """
    return _humming_moved(WNA16_ORDER, name, device)
