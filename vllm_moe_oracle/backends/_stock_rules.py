"""What backends over vLLM's own kernels share: rules, usual ranges of devices, and how weights are dequantized."""

from __future__ import annotations

from ..core.activations import ACTIVATIONS, changed_parameters, with_defaults
from ..core.capabilities import Rule
from ..core.problem import Activation, Device, Problem
from ..core.sharding import padded_plan
from ..releases import min_versions

FROM_SM75 = ((75, 200),)
"""Every CUDA device from Turing on."""

FROM_SM80 = ((80, 200),)
"""Every CUDA device from Ampere on: kernels that carry PTX for compute capability 8.0."""

STOCK_GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "situ", "swiglustep")
"""Gated activations of the classes that apply vLLM's own activation functions."""

STOCK_UNGATED = ("silu", "gelu", "gelu_tanh", "relu2")
"""Activations without a gate of the same classes."""

GPT_OSS_ACTIVATION = with_defaults(Activation("swigluoai", interleaved=True))
"""gpt-oss's activation: vLLM's kernels for alternating rows have its constants built in."""


def integer_weights(problem: Problem) -> str:
    """How kernels dequantize integers that apply group scales in the model's dtype, for `Numerics.weights`. With one
    scale per output row they scale the sums."""
    scaled = f"scaled in {problem.dtype}" if problem.scheme.group_size != -1 else "the sums scaled by channel"
    return f"integer codes converted exactly to {problem.dtype}, {scaled}"


def lora_rule(padding: tuple[int, int]) -> Rule:
    """vLLM makes a LoRA adapter's tensors for the layer's own sizes and adds them to the kernel's output.

    Args:
        padding: the backend's `padding`.
    """

    def sizes(problem: Problem) -> str:
        plan = padded_plan(problem, *padding)
        return f"hidden size {plan.hidden_size} and intermediate size {plan.intermediate_size}"

    return Rule(
        "lora.padding",
        lambda problem, device: problem.lora and padded_plan(problem, *padding).pads(problem),
        lambda problem, device: (
            f"pads to {sizes(problem)}; adapters have {problem.hidden_size} and {problem.intermediate_size}"
        ),
        "leave experts out of --lora-target-modules, or serve without --enable-lora",
    )


def _alpha_or_beta_of_silu(problem: Problem) -> str:
    """Why a kernel that takes a limit of silu, and no more, computes another activation; "" where it does not."""
    changed = changed_parameters(problem.activation, "silu")
    if "alpha" not in changed and "beta" not in changed:
        return ""
    return f"uses alpha 1 and beta 0 for silu, the layer has {problem.activation}"


SILU_RULE = Rule(
    "activation.parameters",
    lambda problem, device: bool(_alpha_or_beta_of_silu(problem)),
    lambda problem, device: _alpha_or_beta_of_silu(problem),
)
"""A rule of kernels that take a limit of silu, and neither alpha nor beta."""


def lacks_parameters_of_swigluoai(activation: Activation) -> bool:
    """Whether a kernel that takes alpha and a limit of ``swigluoai`` and has its beta built in lacks one of them."""
    return activation.alpha is None or activation.limit is None or activation.beta != GPT_OSS_ACTIVATION.beta


def _activation_mismatch(problem: Problem, device: Device, swigluoai_since: str) -> str:
    """Why the activation's parameters do not reach a stock kernel; empty when they do."""
    activation = problem.activation
    if activation.name == "swigluoai":
        if not min_versions.vllm_at_least_on(device, swigluoai_since):
            return f"takes gate rows, then up rows, for swigluoai only since vLLM {swigluoai_since}"
        return "" if activation.limit is not None else "asks a limit of swigluoai, the layer has none"
    if activation.name == "situ":
        if not min_versions.vllm_at_least_on(device, min_versions.SITU):
            return f"vLLM has situ since {min_versions.SITU}"
        known = (activation.alpha or 0.0) > 0 and activation.limit is None
        return "" if known else f"asks an alpha above 0 of situ, and no limit; the layer has {activation}"
    if activation.name == "silu" and activation.gated:
        return _alpha_or_beta_of_silu(problem)
    if not changed_parameters(activation):
        return ""
    if activation.name == "swiglustep":
        limit = ACTIVATIONS["swiglustep"].limit
        return f"has the limit {limit:g} built in for swiglustep, the layer has {activation}"
    return f"passes no alpha, beta or limit to its {activation.name}, the layer has {activation}"


def activation_rule(swigluoai_since: str = min_versions.OLDEST_RELEASE) -> Rule:
    """Alpha, beta and limit of the layer's activation reach the kernel.

    vLLM applies a limit to silu, and alpha, beta and limit to ``swigluoai_uninterleave``. It silently ignores all
    others.

    Args:
        swigluoai_since: first vLLM release whose class takes ``swigluoai_uninterleave``.
    """
    return Rule(
        "activation.parameters",
        lambda problem, device: bool(_activation_mismatch(problem, device, swigluoai_since)),
        lambda problem, device: _activation_mismatch(problem, device, swigluoai_since),
    )


def limit_rule(target: str, since: str, built_in: tuple[str, ...] = ()) -> Rule:
    """The layer's limit reaches what applies it.

    Args:
        target: what that is.
        since: first vLLM release whose class passes the limit on.
        built_in: activations that have their limit built in.
    """
    return Rule(
        "activation.parameters.vllm_version",
        lambda problem, device: (
            problem.activation.limit is not None
            and problem.activation.name not in built_in
            and not min_versions.vllm_at_least_on(device, since)
        ),
        lambda problem, device: f"passes the limit {problem.activation.limit:g} to its {target} since vLLM {since}",
    )


def swigluoai_rule(halves_since: str) -> Rule:
    """As `activation_rule`, for classes that also take gpt-oss's alternating rows, with its constants built in.

    Args:
        halves_since: first vLLM release whose class takes ``swigluoai`` with gate rows, then up rows.
    """
    halves = activation_rule(halves_since)

    def violated(problem: Problem, device: Device) -> bool:
        activation = problem.activation
        return activation != GPT_OSS_ACTIVATION if activation.interleaved else halves.violated(problem, device)

    def detail(problem: Problem, device: Device) -> str:
        if not problem.activation.interleaved:
            return halves.detail(problem, device)
        built_in = f"has {GPT_OSS_ACTIVATION} built in for rows that alternate gate and up"
        return f"{built_in}, the layer has {problem.activation}"

    return Rule("activation.parameters", violated, detail)


def gpt_oss_activation_rule(kernel: str) -> Rule:
    """The class takes gpt-oss's rows and activation only, with the constants that vLLM passes.

    Args:
        kernel: name of the class.
    """
    return Rule(
        "activation.parameters",
        lambda problem, device: problem.activation != GPT_OSS_ACTIVATION,
        lambda problem, device: (
            f"vLLM gives {kernel} the constants of {GPT_OSS_ACTIVATION} and rows that alternate gate and up; the layer "
            f"has {problem.activation}" + ("" if problem.activation.interleaved else " and gate rows, then up rows")
        ),
    )


HASHED_ROUTING_RULE = Rule(
    "routing.hashed",
    lambda problem, device: problem.routing.hash_routing,
    lambda problem, device: "has no routing by token ids, the layer routes by a table over them",
)
"""A rule of kernels that route tokens themselves."""
