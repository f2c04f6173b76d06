"""Rules as data: what a backend can take, and the one function that turns it into reasons.

A backend states its limits; nothing here knows a backend. What a limit cannot say is a `Rule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from ..oracle.decision import Plan, Reason
from ..oracle.planner import cut_in_words, group_reasons, loader_reasons, packing_reasons, survives, ways_out
from ..oracle.problem import ActivationFormat, ActOrder, Device, Problem

PlanOf = Callable[[Problem], Plan]
"""How a backend pads a shard."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that no field of `Limits` can say.

    Attributes:
        code: stable, machine-readable name.
        broken: True when the rule fails for this case.
        detail: the rule with the numbers of the case.
        remedy: what would help.
    """

    code: str
    broken: Callable[[Problem, Device], bool]
    detail: Callable[[Problem, Device], str]
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend can take. Every field is one rule; the defaults refuse what needs proof.

    Attributes:
        devices: kinds of device; see `Device.kind`.
        capabilities: half-open ranges of CUDA compute capability times ten, e.g. ``((80, 90), (90, 100))``; empty for
            any. Not asked of devices without one.
        packages: packages that must be installed, with their lowest version ("" for any).
        features: instruction sets that the device must have.
        dtypes: model dtypes.
        gated: names of gated activations.
        ungated: names of activations of non-gated experts.
        parameters: the activation's alpha, beta and limit reach the kernel. When False, an activation with parameters
            is refused, never run without them.
        bias: expert biases reach the kernel.
        bits: widths of weight codes; empty for any.
        groups: scale groups; empty for any.
        zero_points: explicit zero points are applied.
        act_orders: kinds of act order.
        hidden_multiple: the kernel's (padded) hidden size must be a multiple of this.
        intermediate_multiple: the same for the (padded) intermediate size on one rank.
        experts_multiple: the number of experts over all ranks must be a multiple of this.
        max_experts: most experts over all ranks; None for any.
        max_top_k: most experts per token; None for any.
        formats: activation formats.
        routing_methods: routing methods that the kernel implements itself; None when it is given routed ids.
        weight_on_input: the router's weight may multiply the input.
        expert_parallel: -1 in the expert map, or local ids, are understood.
        lora: LoRA adapters on experts.
        eplb: experts may move while serving.
        batch_invariant: proven, to the bit, in this project's tests.
    """

    devices: tuple[str, ...] = ("cuda",)
    capabilities: tuple[tuple[int, int], ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    gated: tuple[str, ...] = ("silu",)
    ungated: tuple[str, ...] = ()
    parameters: bool = False
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
    weight_on_input: bool = False
    expert_parallel: bool = True
    lora: bool = False
    eplb: bool = False
    batch_invariant: bool = False


def _joined(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _spans(ranges: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"sm_{low} to below sm_{high}" if high - low > 1 else f"sm_{low}" for low, high in ranges)


def _device_reasons(limits: Limits, device: Device) -> list[Reason]:
    reasons = []
    if device.kind not in limits.devices:
        reasons.append(Reason("device", f"runs on {_joined(limits.devices)}, this is {device}"))
    elif (
        device.kind == "cuda"
        and limits.capabilities
        and not any(low <= device.capability < high for low, high in limits.capabilities)
    ):
        detail = f"needs compute capability {_spans(limits.capabilities)}; {device.name} has sm_{device.capability}"
        reasons.append(Reason("capability", detail))
    for package, lowest in limits.packages.items():
        installed = device.packages.get(package)
        wanted = f"{package}>={lowest}" if lowest else package
        if installed is None:
            reasons.append(Reason("package", f"needs {wanted}, which is not installed", f"pip install '{wanted}'"))
        elif lowest and not at_least(installed, lowest):
            detail = f"needs {wanted}; {installed} is installed"
            reasons.append(Reason("package", detail, f"pip install '{wanted}'"))
    missing = tuple(feature for feature in limits.features if feature not in device.features)
    if missing:
        reasons.append(Reason("feature", f"needs {_joined(missing)}, which {device.name} does not have"))
    return reasons


def at_least(installed: str, lowest: str) -> bool:
    """Whether a version is not older than another; one that cannot be read is."""
    try:
        return Version(installed) >= Version(lowest)
    except InvalidVersion:
        return False


def _format_reasons(limits: Limits, problem: Problem) -> list[Reason]:
    reasons = []
    scheme = problem.scheme
    if problem.dtype not in limits.dtypes:
        detail = f"takes {_joined(limits.dtypes)} activations, the model has {problem.dtype}"
        reasons.append(Reason("dtype", detail, f"--dtype {limits.dtypes[0]}"))
    if limits.bits and scheme.bits not in limits.bits:
        reasons.append(Reason("bits", f"takes {_joined(limits.bits)}-bit codes, the checkpoint has {scheme.bits}"))
    if limits.groups and scheme.group_size not in limits.groups:
        detail = f"takes scale groups of {_joined(limits.groups)}, the checkpoint has {scheme.group_size}"
        reasons.append(Reason("group", detail))
    if scheme.name == "mxfp8" and problem.activation.interleaved:
        detail = f"MXFP8 is read as gate rows, then up rows; those of {problem.activation.name} alternate"
        reasons.append(Reason("rows", detail))
    if scheme.zero_points and not limits.zero_points:
        reasons.append(Reason("zero_points", "does not apply zero points, the checkpoint has them"))
    # With one scale per output row, no order of input features changes anything.
    if scheme.act_order not in limits.act_orders and scheme.group_size != -1:
        detail = f"act order {scheme.act_order} is not implemented (only {_joined(limits.act_orders)})"
        reasons.append(Reason("act_order", detail))
    return reasons


def _layer_reasons(limits: Limits, problem: Problem) -> list[Reason]:
    reasons = []
    activation = problem.activation
    names = limits.gated if activation.gated else limits.ungated
    if activation.name not in names:
        kind = "gated" if activation.gated else "non-gated"
        reasons.append(Reason("activation", f"takes {kind} {_joined(names)}, the layer has {activation.name}"))
    elif not limits.parameters and any(
        value is not None for value in (activation.alpha, activation.beta, activation.limit)
    ):
        detail = f"does not pass the activation's alpha, beta or limit to its kernel, the layer has {activation}"
        reasons.append(Reason("activation.parameters", detail))
    if problem.has_bias and not limits.bias:
        reasons.append(Reason("bias", "does not add expert biases, the layer has them"))
    if problem.num_experts % limits.experts_multiple:
        detail = f"{problem.num_experts} experts are no multiple of {limits.experts_multiple}"
        reasons.append(Reason("experts.multiple", detail))
    if limits.max_experts is not None and problem.num_experts > limits.max_experts:
        detail = f"takes at most {limits.max_experts} experts, the layer has {problem.num_experts}"
        reasons.append(Reason("experts.max", detail))
    if limits.max_top_k is not None and problem.top_k > limits.max_top_k:
        detail = f"takes at most {limits.max_top_k} experts per token, the layer has {problem.top_k}"
        reasons.append(Reason("top_k.max", detail))
    return reasons


def _deployment_reasons(limits: Limits, problem: Problem) -> list[Reason]:
    reasons = []
    parallel, routing = problem.parallel, problem.routing
    if parallel.format not in limits.formats:
        detail = f"takes {_joined(limits.formats)} activations, the all-to-all delivers {parallel.format} ones"
        reasons.append(Reason("format", detail, "another --all2all-backend"))
    if parallel.ep > 1 and not limits.expert_parallel:
        detail = f"does not know experts that live elsewhere (expert parallelism over {parallel.ep} ranks)"
        reasons.append(Reason("expert_parallel", detail, "tensor parallelism"))
    if limits.routing_methods is not None and routing.method not in limits.routing_methods:
        detail = f"routes inside its kernel by {_joined(limits.routing_methods)}; the layer routes by {routing.method}"
        reasons.append(Reason("routing", detail))
    if routing.weight_on_input and not limits.weight_on_input:
        reasons.append(
            Reason("weight_on_input", "multiplies the output by the router's weight; the layer asks the input")
        )
    elif routing.weight_on_input and problem.top_k > 1:
        detail = f"vLLM multiplies a token's input by one weight; the layer has {problem.top_k} for each token"
        reasons.append(Reason("weight_on_input.top_k", detail))
    for name, wanted, able, remedy in (
        ("lora", problem.lora, limits.lora, "serve without --enable-lora"),
        ("eplb", problem.eplb, limits.eplb, "serve without --enable-eplb"),
        ("batch_invariant", problem.batch_invariant, limits.batch_invariant, "unset VLLM_BATCH_INVARIANT"),
    ):
        if wanted and not able:
            words = {"lora": "LoRA on experts", "eplb": "EPLB", "batch_invariant": "batch invariance"}[name]
            reasons.append(Reason(name, f"{words} is asked for and not supported", remedy))
    return reasons


def _shape_reasons(limits: Limits, problem: Problem, plan: PlanOf) -> list[Reason]:
    def works(other: Problem) -> bool:
        spread = other.parallel.ep == 1 or limits.expert_parallel
        return spread and survives(other) and not _alignment_reasons(limits, other, plan(other))

    reasons = group_reasons(problem, works) + packing_reasons(problem, works) + loader_reasons(problem)
    for reason in _alignment_reasons(limits, problem, plan(problem)):
        cut = reason.code == "alignment.intermediate"
        reasons.append(dataclasses.replace(reason, remedy=ways_out(problem, works)) if cut else reason)
    return reasons


def _alignment_reasons(limits: Limits, problem: Problem, plan: Plan) -> list[Reason]:
    sizes = (
        ("hidden", plan.hidden_size, str(plan.hidden_size), limits.hidden_multiple),
        ("intermediate", plan.intermediate_size, cut_in_words(problem), limits.intermediate_multiple),
    )
    return [
        Reason(
            f"alignment.{name}",
            f"{name} size {words} is no multiple of {multiple} ({size} mod {multiple} = {size % multiple})",
        )
        for name, size, words, multiple in sizes
        if size % multiple
    ]


def violations(
    limits: Limits, rules: tuple[Rule, ...], problem: Problem, device: Device, plan: PlanOf
) -> tuple[Reason, ...]:
    """Every limit and rule that the case breaks, with its numbers; empty when it can run.

    Args:
        limits: what the backend can take.
        rules: what `limits` cannot say.
        problem: the layer on this rank.
        device: the machine.
        plan: the backend's padding of a shard, of this one and of those that a remedy speaks of; alignment is judged on
            padded sizes.
    """
    reasons = _device_reasons(limits, device)
    reasons += _format_reasons(limits, problem)
    reasons += _layer_reasons(limits, problem)
    reasons += _shape_reasons(limits, problem, plan)
    reasons += _deployment_reasons(limits, problem)
    for rule in rules:
        if rule.broken(problem, device):
            reasons.append(Reason(rule.code, rule.detail(problem, device), rule.remedy))
    return tuple(reasons)
