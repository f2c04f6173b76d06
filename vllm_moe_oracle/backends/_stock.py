"""What backends over vLLM's own kernels share: usual ranges of devices, and rules that depend on the release."""

from __future__ import annotations

from collections.abc import Callable

from ..compat import since
from ..oracle.decision import Plan
from ..oracle.problem import Activation, Device, Problem
from ._limits import Rule

FROM_SM75 = ((75, 200),)
"""Every CUDA device from Turing on."""

FROM_SM80 = ((80, 200),)
"""Every CUDA device from Ampere on: kernels that carry PTX for compute capability 8.0."""


GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "situ", "swiglustep")
"""Gated activations of the classes that leave them to vLLM's own functions."""

_STEP_LIMIT = 7.0
"""What vLLM's ``swiglustep`` has built in."""


def lora_rule(padding: Callable[[Problem, Device], Plan]) -> Rule:
    """vLLM makes a LoRA adapter's tensors for the layer's own sizes, and adds them to what the kernel computes.

    Args:
        padding: the backend's plan for a problem.
    """

    def sizes(problem: Problem, device: Device) -> str:
        plan = padding(problem, device)
        return f"hidden size {plan.hidden_size} and intermediate size {plan.intermediate_size}"

    return Rule(
        "lora.padding",
        lambda problem, device: problem.lora and padding(problem, device).pads(problem),
        lambda problem, device: (
            f"pads to {sizes(problem, device)}; adapters have {problem.hidden_size} and {problem.intermediate_size}"
        ),
        "serve without --enable-lora",
    )


def _neutral(activation: Activation) -> bool:
    return activation.alpha in (None, 1.0) and activation.beta in (None, 0.0)


def _reaches(problem: Problem, device: Device, swigluoai_since: str) -> str:
    """Why the activation's parameters do not reach a stock kernel; empty when they do."""
    activation = problem.activation
    if activation.name == "swigluoai":
        if not since.reached(swigluoai_since, device):
            return f"takes gate rows, then up rows, for swigluoai only since vLLM {swigluoai_since}"
        return "" if activation.limit is not None else "asks a limit of swigluoai, the layer has none"
    if activation.name == "situ":
        if not since.reached(since.SITU, device):
            return f"vLLM has situ since {since.SITU}"
        known = (activation.alpha or 0.0) > 0 and activation.limit is None
        return "" if known else f"asks an alpha above 0 of situ, and no limit; the layer has {activation}"
    if activation.name == "swiglustep":
        known = _neutral(activation) and activation.limit == _STEP_LIMIT
        return "" if known else f"has the limit {_STEP_LIMIT:g} built in for swiglustep, the layer has {activation}"
    if activation.name == "silu" and activation.gated:
        return "" if _neutral(activation) else f"uses alpha 1 and beta 0 for silu, the layer has {activation}"
    if _neutral(activation) and activation.limit is None:
        return ""
    return f"passes no alpha, beta or limit to its {activation.name}, the layer has {activation}"


def activation_rule(swigluoai_since: str = since.OLDEST) -> Rule:
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
