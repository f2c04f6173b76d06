"""Which kernel stock vLLM takes for a layer, or why it takes none, without vLLM: its lists of kernels as rules.

The wrappers of stock's classes say what those can do, and their order is stock's (`stock_kernels.stock_wrappers`). What
stock asks besides, by the layer's packing, is here. A test compares the rules with the code of vLLM's releases. Where
they do not reach, nothing is said: other releases, classes that no backend here wraps, AutoRound's integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..backends import Backend
from ..backends._stock import StockBackend
from ..backends._stock_priority import class_without_wrapper
from ..core.decision import Candidate, Decision
from ..core.problem import Device, Problem
from ..releases import min_versions
from ..releases.min_versions import vllm_at_least_on
from ..releases.supported import NEWEST
from ..settings import AUTO, Settings
from .checked_backend import is_own, unchecked
from .registry import Registry
from .selection import evaluate_candidates
from .stock_kernels import NOT_ASKED_BY_STOCK, NOT_LOADED_BY_VLLM, PADDED_BY_STOCK, stock_wrappers

_KNOWN_SINCE = {
    "mxfp8": min_versions.STOCK_RULES_MXFP8,
    "mxfp4": min_versions.STOCK_RULES_MXFP4,
    "wna16": min_versions.STOCK_RULES_WNA16,
}
"""The first release whose choice on a GPU the rules give, by scheme."""

_LISTED_FOR_HALVES = frozenset(
    {"FLASHINFER_TRTLLM_MXFP4_MXFP8", "DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING"}
)
"""Kernels for MXFP4 experts of other models than gpt-oss (``_get_priority_backends``)."""


@dataclass(frozen=True, slots=True)
class StockChoice:
    """What stock vLLM does with a layer.

    Attributes:
        stock_class: the name of vLLM's expert class; "" where it takes none.
        backend: the backend here that wraps the class; "" where none does.
        refusal: the error with which stock vLLM ends; "" where it takes a class.
    """

    stock_class: str = ""
    backend: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"cannot run it: {self.refusal}"
        return f"{self.backend} ({self.stock_class})" if self.backend else self.stock_class


def choose_stock(
    problem: Problem, device: Device, registry: Registry, moe_backend: str = AUTO, method: str = ""
) -> StockChoice | None:
    """What stock vLLM does with a layer; None where that is not known.

    Args:
        problem: the layer, with the activations that its checkpoint declares.
        device: the machine.
        registry: the backends.
        moe_backend: vLLM's ``--moe-backend``.
        method: vLLM's name of the checkpoint's quantization, which reads AutoRound's integers by other rules.
    """
    if problem.ragged_intermediate_size:
        even = _evenly_sharded(problem)
        found = choose_stock(even, device, registry, moe_backend, method)
        is_refused = found is None and problem.scheme.name == "wna16"  # formats in blocks of 32 are padded
        refusal = f"it has no ragged shards, and {even.intermediate_size} columns a rank are not whole scale groups"
        return StockChoice(refusal=refusal) if is_refused else found
    scheme = problem.scheme
    if moe_backend != AUTO or (method == "inc" and scheme.name == "wna16"):
        return None
    if (scheme.name, scheme.packing) == ("mxfp4", "online") and not _is_known(device, min_versions.ONLINE_MXFP4):
        return None
    others = tuple(each.name for each in registry if not is_own(each))
    asked = Settings(allow_activation_quantization=True, disable=others)
    candidates = evaluate_candidates(problem, device, asked, registry)
    for reason in (reason for each in candidates for reason in each.reasons):
        if reason.code in NOT_LOADED_BY_VLLM:
            return StockChoice(refusal=str(reason))
    if device.kind == "cpu" and _is_known(device, min_versions.STOCK_RULES_ON_CPU):
        return _on_cpu(problem, device)
    if device.kind != "cuda" or not _is_known(device, _KNOWN_SINCE[scheme.name]):
        return None
    found = _apart_from_lists(problem, device)
    if found is not None:
        return found
    return _listed(stock_wrappers(candidates, registry), problem, device, registry)


def assume_stock(decision: Decision, device: Device, registry: Registry) -> StockChoice:
    """What stock vLLM takes where `choose_stock` does not know it, as far as the wrappers of its classes tell: the
    first of its order that accepts the layer. Empty if none does, and of ragged shards, which stock does not have.

    Args:
        decision: the layer's.
        device: the machine.
        registry: the backends.
    """
    wrappers = stock_wrappers(decision.candidates, registry)
    name = next((each.backend for each in wrappers if each.accepted), "")
    if not name or decision.problem.ragged_intermediate_size:
        return StockChoice()
    return StockChoice(registry[name].stock_class.rpartition(":")[2], name)


def _evenly_sharded(problem: Problem) -> Problem:
    """A layer with ragged shards as stock vLLM shards it, rounded down."""
    even = problem.ragged_intermediate_size // problem.parallel.tp
    return replace(problem, intermediate_size=even, ragged_intermediate_size=0)


def _is_known(device: Device, since: str) -> bool:
    """Whether a machine's release is one of those that the rules are of. One without a known vLLM has the newest."""
    return vllm_at_least_on(device, since) and not min_versions.is_unreleased_on(device)


def _on_cpu(problem: Problem, device: Device) -> StockChoice | None:
    """Stock's choice on a CPU. Its class for MXFP4 asks for AMX; which one takes integers, other packages decide.
    Its method for compressed-tensors takes Marlin's class for MXFP4, which cannot run."""
    if problem.scheme.name == "mxfp8":
        plain = problem.activation.name == "silu" and problem.activation.gated and not problem.parallel.is_batched
        emulation = "Mxfp8EmulationTritonExperts, which needs Triton: AttributeError at the first request"
        return StockChoice(refusal=emulation) if plain else None
    listed = problem.scheme.name == "mxfp4" and problem.scheme.packing != "compressed-tensors"
    if listed and "amx_tile" not in device.features:
        return StockChoice(refusal=f"{_no_kernel('MXFP4')} (its class for CPUs needs AMX)")
    return None


def _apart_from_lists(problem: Problem, device: Device) -> StockChoice | None:
    """What stock decides without its list of kernels, or with a class that no backend here wraps."""
    scheme = problem.scheme
    if scheme.name == "wna16" and scheme.packing == "gptq" and scheme.act_order == "group":
        return StockChoice(refusal="ValueError: desc_act=True is no longer supported")
    if scheme.packing == "compressed-tensors-int":
        return StockChoice(refusal="ValueError: For Fused MoE layers, only format: pack-quantized is supported")
    name = class_without_wrapper(problem, device)
    return StockChoice(name) if name else None


def _listed(wrappers: list[Candidate], problem: Problem, device: Device, registry: Registry) -> StockChoice | None:
    """The first class of stock's list that takes the layer.

    Args:
        wrappers: the candidates over stock's classes, in stock's order.
        problem: the layer.
        device: the machine.
        registry: the backends.
    """
    if not _has_known_list(problem):
        return None
    scheme, ignored = problem.scheme, NOT_ASKED_BY_STOCK
    if scheme.name == "mxfp4" or scheme.packing == "modelopt":  # padded, or a cut group is refused later
        ignored |= PADDED_BY_STOCK
    fallen_back = _falls_back(problem)
    # Neither the list for MXFP8 nor the method for MoeWNA16 asks for biases, which their classes then drop.
    if scheme.name == "mxfp8" or scheme.packing == "moe_wna16" or fallen_back:
        ignored |= {"bias"}
    if (
        scheme.packing in ("quark", "online")
        and scheme.activations == "mxfp4"
        and not vllm_at_least_on(device, min_versions.CUTLASS_MXFP4_LISTED)
    ):
        wrappers = []  # kernels that leave activations in 16 bits do not stand in for others there
    for each in wrappers:
        backend = unchecked(registry[each.backend])
        if not isinstance(backend, StockBackend) or not _is_listed(backend, problem, fallen_back):
            continue
        codes = {reason.code for reason in each.reasons} - _claimed(backend, problem, device)
        if "activation.parameters" in codes and _came_later(backend, problem, device):
            continue
        # Marlin's class for MXFP8 takes every size.
        if codes <= ignored | ({"alignment.hidden"} if backend.name == "marlin_mxfp8" else set()):
            refusal = _refused_later(backend, problem)
            return StockChoice(refusal=refusal) if refusal else StockChoice(backend.stock_class_name, backend.name)
    if not problem.parallel.is_batched:
        return None  # an emulation of stock's, or an error
    kernel = {"mxfp8": "ValueError: No MXFP8 MoE backends available", "mxfp4": _no_kernel("MXFP4")}
    return StockChoice(refusal=kernel.get(scheme.name, _no_kernel("WNA16")))


def _came_later(backend: StockBackend, problem: Problem, device: Device) -> bool:
    """Whether the class of a newer release takes a layer's activation, which that of the machine's does not claim."""
    newest = replace(device, packages={**device.packages, "vllm": NEWEST})
    return "activation.parameters" not in {reason.code for reason in backend.check(problem, newest).reasons}


def _refused_later(backend: StockBackend, problem: Problem) -> str:
    """The error with which stock ends after it has chosen a class, when it makes or fills the layer's weights; "" where
    there is none."""
    scheme, size = problem.scheme, problem.intermediate_size
    if scheme.name == "mxfp8" and scheme.packing == "modelopt" and size % 32:
        return f"ValueError: MXFP8 MoE requires intermediate_size_per_partition divisible by 32, got {size}"
    if backend.name == "marlin_mxfp8" and not problem.activation.gated and size % 64:
        return f"RuntimeError: {size} rows of non-gated experts are padded as if they were twice as many"
    if scheme.name != "wna16" or scheme.packing != "compressed-tensors":
        return ""
    if scheme.group_size == -1 and "MARLIN" not in backend.stock_kernel:
        return f'AssertionError: weight_quant.strategy == "group" ({backend.name})'
    if size % max(scheme.group_size, 1):
        return "ValueError: CompressedTensors WNA16 MoE with static group scales requires whole groups"
    return ""


def _no_kernel(scheme: str) -> str:
    return f"NotImplementedError: No {scheme} MoE backend supports the deployment configuration"


def _has_known_list(problem: Problem) -> bool:
    """Whether the rules know the list of kernels that a layer gets."""
    scheme = problem.scheme
    if scheme.name == "mxfp4":
        if scheme.packing == "mxfp4":
            return True
        if scheme.packing in ("gpt_oss", "quark", "online"):
            return scheme.activations == "16bit" or (problem.parallel.is_batched and scheme.activations == "mxfp4")
        return scheme.packing == "compressed-tensors" and not problem.parallel.is_batched
    if scheme.name == "wna16":
        return scheme.packing in ("gptq", "awq", "compressed-tensors", "moe_wna16") and scheme.act_order != "group"
    return True


def _fits_marlin(problem: Problem) -> bool:
    """Whether Marlin takes the sizes of a layer with integers (``check_moe_marlin_supports_config``)."""
    group, size = problem.scheme.group_size, problem.unpadded_intermediate_size or problem.intermediate_size
    whole = group <= 0 or size % group == 0
    return problem.hidden_size % 128 == 0 and whole and group in (-1, 32, 64, 128)


def _falls_back(problem: Problem) -> bool:
    """Whether stock reads GPTQ's and AWQ's experts as MoeWNA16, since Marlin does not take the sizes."""
    return problem.scheme.packing in ("gptq", "awq") and not _fits_marlin(problem)


def _is_listed(backend: Backend, problem: Problem, fallen_back: bool) -> bool:
    """Whether stock's list for a layer has the kernel of a wrapper."""
    scheme = problem.scheme
    kernel = backend.stock_kernel if isinstance(backend, StockBackend) else ""
    if scheme.name == "mxfp4":
        if scheme.packing == "mxfp4":
            return kernel in _LISTED_FOR_HALVES
        if scheme.packing == "compressed-tensors":
            return kernel == "MARLIN"
        return kernel != "TRITON_UNFUSED" and backend.activations(problem) == "16bit"
    if scheme.name == "wna16":
        if kernel in ("MARLIN", "BATCHED_MARLIN"):
            return scheme.packing != "moe_wna16" and _fits_marlin(problem)
        if kernel == "TRITON":
            return scheme.packing != "awq" or fallen_back
        # vLLM's name of such weights is not among those that Humming's class knows.
        unknown = scheme.zero_points and scheme.bits == 4 and scheme.group_size != 32
        return not (kernel == "HUMMING" and scheme.packing == "compressed-tensors" and unknown)
    return True


def _claimed(backend: StockBackend, problem: Problem, device: Device) -> frozenset[str]:
    """Codes of reasons for which a wrapper refuses what vLLM claims for its class, as `stock_differences` say."""
    asked = {
        "activation": problem.activation.name, "routing": problem.routing.method, "lora": "lora", "eplb": "eplb",
        "capability": f"sm_{device.capability}",
    }  # fmt: skip
    claims = {
        what
        for each in backend.stock_differences
        if not each.before or not vllm_at_least_on(device, each.before)
        for what in each.what
    }
    return frozenset(code for code, word in asked.items() if word in claims)
