"""With which error stock vLLM ends after it has chosen a kernel for a layer. Servers ask, and so does `stock_choice`.

A refusal that begins with the name of an exception of vLLM's code quotes its message in the machine's release, up to a
parenthesis. One that begins with RuntimeError tells an error of torch or of an operator in this package's words.
"""

from __future__ import annotations

from dataclasses import replace

from ..backends._marlin import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE
from ..backends._stock import StockBackend
from ..backends._stock_priority import CUTLASS_MULTIPLE, CUTLASS_MXFP4, is_constructed
from ..core.problem import MX_BLOCK, Device, Problem
from ..core.sharding import has_act_order, scale_group_size
from ..releases import min_versions
from ..releases.min_versions import vllm_at_least_on
from .checked_backend import unchecked
from .registry import Registry

KNOWN_SINCE = {
    "mxfp8": min_versions.STOCK_RULES_MXFP8,
    "mxfp4": min_versions.STOCK_RULES_MXFP4,
    "wna16": min_versions.STOCK_RULES_WNA16,
}
"""The first release whose choice on a GPU the rules give, by scheme."""

_WITH_EPLB = ("mxfp4", "quark", "online")
"""Packings whose stock methods move experts between ranks, whatever class they run."""


def load_refusal(problem: Problem, device: Device, registry: Registry, stock_class: str = "") -> str:
    """The error with which stock ends after it has chosen a class, when it makes or fills the layer's weights or first
    calls them, or why it would fill them with others; "" where neither is known.

    Args:
        problem: the layer, with the activations that its checkpoint declares.
        device: the machine.
        registry: the backends.
        stock_class: the name of the class; "" where it is not known.
    """
    problem, scheme = evenly_sharded(problem), problem.scheme
    size, is_marlin = problem.intermediate_size, "Marlin" in stock_class
    if device.kind == "cuda" and device.capability < 80 and scheme.name != "wna16":
        return f"its kernels for {scheme.name} are in bfloat16, which needs sm_80; this is sm_{device.capability}"
    if problem.eplb and not _moves_experts(problem, device, stock_class):
        return f"NotImplementedError: EPLB is not supported (by its method for {scheme.packing} experts)"
    if scheme.packing == "compressed-tensors-int":
        return "ValueError: For Fused MoE layers, only format: pack-quantized (its method takes no other)"
    loses_order = scheme.packing == "moe_wna16" or vllm_at_least_on(device, min_versions.LINEAR_WITHOUT_ACT_ORDER)
    if has_act_order(problem) and loses_order:
        return "its kernels do not reorder input features, as act order by group needs"
    if refusal := _cut_groups(problem):
        return refusal
    if is_marlin and scheme.name == "mxfp8" and not problem.activation.gated and size % 64:
        return f"RuntimeError: {size} rows of non-gated experts are padded as if they were twice as many"
    if scheme.packing == "compressed-tensors" and scheme.name == "wna16":
        if scheme.group_size == -1 and stock_class and not is_marlin:
            return f'AssertionError: weight_quant.strategy == "group" ({stock_class})'
        if size % max(scheme.group_size, 1):
            return _no_whole_groups(problem)
    refusal = _constructed_refusal(problem, stock_class) if is_constructed(problem, device) else ""
    return refusal or _unasked_dtype(problem, device, registry, stock_class)


def _moves_experts(problem: Problem, device: Device, stock_class: str) -> bool:
    """Whether stock's method of a layer moves experts between ranks, as far as that is known."""
    scheme = problem.scheme
    if not is_known(device, KNOWN_SINCE[scheme.name]) or scheme.packing in _WITH_EPLB:
        return True
    if scheme.name == "wna16":
        return stock_class == "TritonWNA16Experts" and scheme.packing not in ("gptq", "awq", "moe_wna16")
    return scheme.packing == "compressed-tensors" and scheme.name == "mxfp4" and not is_constructed(problem, device)


def _unasked_dtype(problem: Problem, device: Device, registry: Registry, stock_class: str) -> str:
    """Why no kernel behind a class computes in the model's dtype, for which vLLM does not ask it."""
    wrappers = registry.for_scheme(problem.scheme.name) if device.kind == "cuda" else ()
    asked = [
        reason.detail
        for backend in map(unchecked, wrappers)
        if isinstance(backend, StockBackend) and backend.stock_class_name == stock_class
        for reason in backend.check(problem, device).reasons
        if reason.code == "dtype"
    ]
    return f"{stock_class} {asked[0]}, and vLLM does not ask" if asked else ""


def _constructed_refusal(problem: Problem, stock_class: str) -> str:
    """The same of a class for MXFP4 that stock's method takes without asking it."""
    size, hidden = problem.intermediate_size, problem.hidden_size
    if stock_class == CUTLASS_MXFP4:
        if problem.lora:
            return f"AssertionError: {CUTLASS_MXFP4} does not support LoRA"
        if hidden % CUTLASS_MULTIPLE or size % CUTLASS_MULTIPLE:
            sizes = f"hidden size {hidden} and intermediate size {size}"
            return f"RuntimeError: scales are tiled by {CUTLASS_MULTIPLE} rows and features, and {sizes} are not padded"
    if stock_class == "MarlinExperts":
        if not problem.activation.gated:
            return "AssertionError: weight.shape == (e, size_n, size_k // 2): experts without a gate count twice"
        if hidden % HIDDEN_MULTIPLE or size % INTERMEDIATE_MULTIPLE:
            needs = f"hidden size a multiple of {HIDDEN_MULTIPLE}, intermediate size one of {INTERMEDIATE_MULTIPLE}"
            return f"RuntimeError: Marlin needs the {needs}; {hidden} and {size} are not padded"
    return ""


def _cut_groups(problem: Problem) -> str:
    """What comes of it that ranks cut scale groups; "" where they do not, or where stock loads such shards: gpt-oss's
    code shards by blocks, and weights in 16 bits are quantized to MXFP4 after they are padded."""
    scheme, size, ranks = problem.scheme, problem.intermediate_size, problem.parallel.tp
    group = scale_group_size(problem)
    if (problem.hidden_size % group == 0 == size % group) or has_act_order(problem):
        return ""
    if scheme.name == "wna16":
        if scheme.packing == "compressed-tensors":
            return _no_whole_groups(problem)
        return f"AssertionError: group_size >= 32 (ranks cut groups of {scheme.group_size}, which it halves to 32)"
    if scheme.name == "mxfp8" and scheme.packing == "modelopt":
        return f"ValueError: MXFP8 MoE requires intermediate_size_per_partition divisible by 32, got {size}"
    if scheme.packing == "online":
        rule = "ValueError: Online MXFP8 MoE requires hidden/intermediate sizes divisible by 32."
        return rule if scheme.name == "mxfp8" else ""
    if scheme.name == "mxfp4" and problem.activation.interleaved:
        return ""
    columns = problem.unsharded_intermediate_size // MX_BLOCK // ranks
    return (
        f"ranks cut scale groups of {MX_BLOCK}: its loader gives rank 1 the scales from feature {columns * MX_BLOCK} "
        f"on for weights from feature {size} on"
        if ranks > 1
        else f"sizes {problem.hidden_size} and {size} are no whole scale groups of {MX_BLOCK}"
    )


def _no_whole_groups(problem: Problem) -> str:
    """What comes of such integers of compressed-tensors; what stock says of them depends on the release."""
    sizes = f"{problem.hidden_size} and {problem.intermediate_size}"
    return f"its method needs whole groups of {problem.scheme.group_size} features, and not all of {sizes} are in such"


def evenly_sharded(problem: Problem) -> Problem:
    """The layer as stock vLLM shards it: ragged shards are even ones, rounded down."""
    if not problem.ragged_intermediate_size:
        return problem
    even = problem.ragged_intermediate_size // problem.parallel.tp
    return replace(problem, intermediate_size=even, ragged_intermediate_size=0)


def is_known(device: Device, since: str) -> bool:
    """Whether a machine's release is one of those that the rules are of. One without a known vLLM has the newest."""
    return vllm_at_least_on(device, since) and not min_versions.is_unreleased_on(device)
