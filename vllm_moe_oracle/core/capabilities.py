"""What a backend supports, as data, and `violations`, which turns it into reasons for a rejection.

A backend declares its `Capabilities`, and adds a `Rule` for each condition that they cannot express.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from .activations import undefined_parameters
from .decision import Reason, ShardPlan
from .problem import ActivationFormat, ActOrder, Device, Problem
from .sharding import (
    describe_shard,
    is_shardable,
    loader_reasons,
    padding_reasons,
    scale_group_size,
    size_reasons,
    split_reasons,
    suggest_parallelism,
)

PlanFunction = Callable[[Problem], ShardPlan]
"""A backend's shard plan for a problem, which says how it pads the shard."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that no field of `Capabilities` can express.

    Attributes:
        code: stable, machine-readable name.
        violated: whether a case violates the rule.
        detail: the rule with the numbers of the case.
        remedy: what the user can do; empty if nothing helps.
        has_sibling: another backend runs the same kernels where this rule is violated: such a layer is no refusal.
    """

    code: str
    violated: Callable[[Problem, Device], bool]
    detail: Callable[[Problem, Device], str]
    remedy: str = ""
    has_sibling: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports. Every field is one rule; the defaults refuse everything that needs proof.

    Attributes:
        devices: kinds of device; see `Device.kind`.
        compute_capabilities: half-open ranges of CUDA compute capability (90 for sm_90), e.g.
            ``((80, 90), (100, 110))``; empty for any. Checked for CUDA devices only.
        packages: packages that must be installed, with their minimum version ("" for any).
        features: instruction sets that the device must have.
        dtypes: model dtypes.
        gated: names of gated activations.
        ungated: names of activations of non-gated experts.
        activation_params: the activation's alpha, beta and limit reach the kernel. If False, an activation with
            parameters is refused.
        bias: expert biases reach the kernel.
        bits: bits per weight; empty for any, as in MX formats, which have one width.
        groups: sizes of scale groups; likewise.
        zero_points: explicit zero points are applied.
        act_orders: kinds of act order; see `Scheme.act_order`.
        hidden_multiple: the kernel's (padded) hidden size must be a multiple of this.
        intermediate_multiple: the kernel's (padded) intermediate size on one rank must be a multiple of this.
        experts_multiple: the number of experts on all ranks must be a multiple of this.
        max_experts: largest number of experts on all ranks; None for any.
        max_top_k: largest top-k; None for any.
        formats: activation formats; see `Parallel.format`.
        routing_methods: routing methods that a monolithic kernel implements; None for kernels that get routed ids.
        apply_router_weight_on_input: the router's weight may multiply the input instead of the output.
        expert_parallel: the kernel handles experts of other ranks (-1 in the expert map).
        lora: LoRA adapters on experts.
        eplb: experts may move between ranks while serving.
        batch_invariant: batch invariance is proven bit for bit in this project's tests.
    """

    devices: tuple[str, ...] = ("cuda",)
    compute_capabilities: tuple[tuple[int, int], ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    gated: tuple[str, ...] = ("silu",)
    ungated: tuple[str, ...] = ()
    activation_params: bool = False
    bias: bool = False
    bits: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    zero_points: bool = False
    act_orders: tuple[ActOrder, ...] = ("none",)
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    experts_multiple: int = 1
    max_experts: int | None = None
    max_top_k: int | None = None
    formats: tuple[ActivationFormat, ...] = ("standard",)
    routing_methods: tuple[str, ...] | None = None
    apply_router_weight_on_input: bool = False
    expert_parallel: bool = True
    lora: bool = False
    eplb: bool = False
    batch_invariant: bool = False


def _join(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _format_ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"sm_{low} to below sm_{high}" if high - low > 1 else f"sm_{low}" for low, high in ranges)


def device_reasons(capabilities: Capabilities, device: Device) -> list[Reason]:
    """Why a machine runs no layer at all: its kind, compute capability, packages and features."""
    reasons = []
    if device.kind not in capabilities.devices:
        reasons.append(Reason("device", f"runs on {_join(capabilities.devices)}, this is {device}"))
    elif (
        device.kind == "cuda"
        and capabilities.compute_capabilities
        and not any(low <= device.capability < high for low, high in capabilities.compute_capabilities)
    ):
        ranges = _format_ranges(capabilities.compute_capabilities)
        detail = f"needs compute capability {ranges}; {device.name} has sm_{device.capability}"
        reasons.append(Reason("capability", detail))
    for package, minimum in capabilities.packages.items():
        installed = device.packages.get(package)
        requirement = f"{package}>={minimum}" if minimum else package
        remedy = f"pip install '{requirement}'"
        if installed is None:
            reasons.append(Reason("package", f"needs {requirement}, which is not installed", remedy))
        elif minimum and not package_at_least(installed, minimum):
            reasons.append(Reason("package", f"needs {requirement}; {installed} is installed", remedy))
    missing = tuple(feature for feature in capabilities.features if feature not in device.features)
    if missing:
        reasons.append(Reason("feature", f"needs {_join(missing)}, which {device.name} does not have"))
    return reasons


@functools.lru_cache(maxsize=1024)  # parsing takes longer than the rest of a rule, and every decision asks again
def package_at_least(installed: str, minimum: str) -> bool:
    """Whether an installed package's version is at least `minimum`; False for a version that cannot be parsed.

    For vLLM, whose development versions count as the release, see `releases.min_versions.vllm_at_least`.
    """
    try:
        return Version(installed) >= Version(minimum)
    except InvalidVersion:
        return False


def _format_reasons(capabilities: Capabilities, problem: Problem) -> Iterator[Reason]:
    scheme = problem.scheme
    if problem.dtype not in capabilities.dtypes:
        detail = f"takes {_join(capabilities.dtypes)} activations, the model has {problem.dtype}"
        yield Reason("dtype", detail, f"--dtype {capabilities.dtypes[0]}")
    if capabilities.bits and scheme.bits not in capabilities.bits:
        yield Reason("bits", f"takes {_join(capabilities.bits)}-bit codes, the checkpoint has {scheme.bits}")
    if capabilities.groups and scheme.group_size not in capabilities.groups:
        detail = f"takes scale groups of {_join(capabilities.groups)}, the checkpoint has {scheme.group_size}"
        yield Reason("group", detail)
    if scheme.name in ("mxfp8", "wna16") and problem.activation.interleaved:
        read = "MXFP8 is" if scheme.name == "mxfp8" else f"{scheme.packing} integers are"
        yield Reason("rows", f"{read} read as gate rows, then up rows; those of {problem.activation.name} alternate")
    if scheme.zero_points and not capabilities.zero_points:
        yield Reason("zero_points", "does not apply zero points, the checkpoint has them")
    # With one scale per output row, the order of input features is irrelevant.
    if scheme.act_order not in capabilities.act_orders and scheme.group_size != -1:
        detail = f"act order {scheme.act_order} is not implemented (only {_join(capabilities.act_orders)})"
        if scheme.act_order == "none":
            detail = "this layer has no act order, which the kernel needs"
        yield Reason("act_order", detail)


def _layer_reasons(capabilities: Capabilities, problem: Problem) -> Iterator[Reason]:
    activation = problem.activation
    names = capabilities.gated if activation.gated else capabilities.ungated
    if activation.name not in names:
        kind, other = ("gated", "non-gated") if activation.gated else ("non-gated", "gated")
        detail = f"takes {other} activations only, the layer's {activation.name} is {kind}"
        if names:
            detail = f"takes {kind} {_join(names)}, the layer has {activation.name}"
        yield Reason("activation", detail)
    elif not capabilities.activation_params and any(
        value is not None for value in (activation.alpha, activation.beta, activation.limit)
    ):
        detail = f"does not pass the activation's alpha, beta or limit to its kernel, the layer has {activation}"
        yield Reason("activation.parameters", detail)
    elif undefined := undefined_parameters(activation):
        detail = (
            f"the formula of {activation} is not defined for its {_join(undefined)}: a layer states what the formula "
            "has, in numbers that are finite in float32, and a limit above 0"
        )
        yield Reason("activation.parameters.undefined", detail)
    if problem.has_bias and not capabilities.bias:
        yield Reason("bias", "does not add expert biases, the layer has them")
    if problem.num_experts % capabilities.experts_multiple:
        detail = f"{problem.num_experts} experts are not a multiple of {capabilities.experts_multiple}"
        yield Reason("experts.multiple", detail)
    if capabilities.max_experts is not None and problem.num_experts > capabilities.max_experts:
        detail = f"takes at most {capabilities.max_experts} experts, the layer has {problem.num_experts}"
        yield Reason("experts.max", detail)
    if capabilities.max_top_k is not None and problem.top_k > capabilities.max_top_k:
        detail = f"takes at most {capabilities.max_top_k} experts per token, the layer has {problem.top_k}"
        yield Reason("top_k.max", detail)


WITHOUT_LORA = "name the modules of the adapters in --lora-target-modules, without experts, or leave out --enable-lora"
"""What the user can do where experts cannot have LoRA adapters."""


def _deployment_reasons(capabilities: Capabilities, problem: Problem) -> Iterator[Reason]:
    parallel, routing = problem.parallel, problem.routing
    if parallel.format not in capabilities.formats:
        detail = f"needs activations in the {_join(capabilities.formats)} format, the layer's are {parallel.format}"
        yield Reason("format", detail, "another --all2all-backend")
    if parallel.ep > 1 and not capabilities.expert_parallel:
        detail = f"does not handle experts of other ranks (expert parallelism over {parallel.ep} ranks)"
        yield Reason("expert_parallel", detail, "tensor parallelism")
    if capabilities.routing_methods is not None and routing.method not in capabilities.routing_methods:
        methods = _join(capabilities.routing_methods)
        yield Reason("routing", f"routes inside its kernel by {methods}; the layer routes by {routing.method}")
    if routing.apply_router_weight_on_input and not capabilities.apply_router_weight_on_input:
        detail = "multiplies the output by the router's weight; the layer multiplies the input"
        yield Reason("apply_router_weight_on_input", detail)
    elif routing.apply_router_weight_on_input and problem.top_k > 1:
        detail = f"vLLM multiplies a token's input by one weight; the layer has {problem.top_k} for each token"
        yield Reason("apply_router_weight_on_input.top_k", detail)
    for name, words, remedy in (
        ("lora", "LoRA on experts", WITHOUT_LORA),
        ("eplb", "EPLB", "serve without --enable-eplb"),
        ("batch_invariant", "batch invariance", "unset VLLM_BATCH_INVARIANT"),
    ):
        if getattr(problem, name) and not getattr(capabilities, name):
            yield Reason(name, f"{words} is requested and not supported", remedy)


def _shape_reasons(
    capabilities: Capabilities, problem: Problem, plan: PlanFunction, others: Callable[[Problem], Sequence[Reason]]
) -> list[Reason]:
    """Reasons of the shard's sizes; `others` gives all other reasons of a layer, for those that a remedy proposes."""

    def works(other: Problem) -> bool:
        if not is_shardable(other) or _alignment_reasons(capabilities, other, plan(other)):
            return False
        return {reason.code for reason in others(other)} <= {reason.code for reason in others(problem)}

    reasons = padding_reasons(problem, works) + split_reasons(problem, works) + loader_reasons(problem)
    told = {reason.code: reason for reason in reasons}
    for reason in _alignment_reasons(capabilities, problem, plan(problem)):
        name = reason.code.removeprefix("alignment.")
        group = told.get(f"group.{name}")
        if group is not None and getattr(capabilities, f"{name}_multiple") == scale_group_size(problem):
            reason = dataclasses.replace(group, code=reason.code)  # the same multiple: one sentence for both rules
        elif name == "intermediate":
            reason = dataclasses.replace(reason, remedy=suggest_parallelism(problem, works))
        reasons.append(reason)
    return reasons


def _alignment_reasons(capabilities: Capabilities, problem: Problem, plan: ShardPlan) -> list[Reason]:
    hidden = size_reasons("alignment.hidden", plan.hidden_size, capabilities.hidden_multiple)
    size, multiple = plan.intermediate_size, capabilities.intermediate_multiple
    return hidden + size_reasons("alignment.intermediate", size, multiple, describe_shard(problem))


def violations(
    capabilities: Capabilities, rules: tuple[Rule, ...], problem: Problem, device: Device, plan: PlanFunction
) -> tuple[Reason, ...]:
    """Every capability and rule that the case violates, with its numbers; empty if the backend can run it.

    Args:
        capabilities: what the backend supports.
        rules: conditions that `capabilities` cannot express.
        problem: the layer on this rank.
        device: the machine.
        plan: the backend's shard plan, for this shard and for those that a remedy proposes; alignment is checked on
            padded sizes.
    """

    def of_deployment(problem: Problem, siblings: bool = True) -> list[Reason]:
        broken = (rule for rule in rules if (siblings or not rule.has_sibling) and rule.violated(problem, device))
        own = [Reason(rule.code, rule.detail(problem, device), rule.remedy) for rule in broken]
        return [*_deployment_reasons(capabilities, problem), *own]

    reasons = device_reasons(capabilities, device)
    reasons += _format_reasons(capabilities, problem)
    reasons += _layer_reasons(capabilities, problem)
    # A remedy changes the ranks: formats and layers stay.
    reasons += _shape_reasons(capabilities, problem, plan, functools.partial(of_deployment, siblings=False))
    reasons += of_deployment(problem)
    return tuple(reasons)
