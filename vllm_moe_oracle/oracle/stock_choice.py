"""What stock vLLM does with a layer, without vLLM: it runs a class of experts, ends with an error, or is not known.

Whatever says something of stock asks `choose_stock`, so that no two answers differ. The wrappers of stock's classes say
what those can do, and their order is stock's (`stock_wrappers`). What stock asks besides, by the layer's packing, is
here, and what its methods refuse after they have chosen (`load_refusal`), which a server asks, too. A test compares the
rules with the code of vLLM's releases. Where they do not reach, the answer says so: other releases, AutoRound's
integers, `--moe-backend`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..backends import Backend
from ..backends._marlin import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE
from ..backends._stock import StockBackend
from ..backends._stock_priority import (
    CUTLASS_MULTIPLE,
    CUTLASS_MXFP4,
    EMULATED_MXFP4,
    GPT_OSS_PACKINGS,
    class_without_wrapper,
    is_constructed,
)
from ..backends._stock_rules import STOCK_GATED, STOCK_UNGATED
from ..core.decision import Candidate, Decision, Reason
from ..core.lora import MISAPPLIED_BY_VLLM
from ..core.problem import MX_BLOCK, Device, Problem, features_for_stock
from ..core.sharding import has_act_order, scale_group_size
from ..releases import min_versions
from ..releases.min_versions import vllm_at_least_on
from ..releases.supported import NEWEST
from ..settings import AUTO, Settings
from .checked_backend import is_own, unchecked
from .registry import Registry
from .selection import evaluate_candidates

_KNOWN_SINCE = {
    "mxfp8": min_versions.STOCK_RULES_MXFP8,
    "mxfp4": min_versions.STOCK_RULES_MXFP4,
    "wna16": min_versions.STOCK_RULES_WNA16,
}
"""The first release whose choice on a GPU the rules give, by scheme."""

_NOT_ASKED = frozenset(
    {
        "activation.parameters",
        "activation.parameters.vllm_version",
        "activation_quantization",
        "expert_parallel.placement",
        "expert_parallel.uneven",
        "intermediate.padded",
        "lora.batch_invariant",
        "lora.padding",
    }
)
"""Codes of reasons for which a wrapper refuses a layer that the class behind it takes. Most such layers get wrong
numbers there: the class ignores what the reason names. Padded experts do not."""

_PADDED = frozenset({"group.intermediate", "alignment.intermediate"})
"""Codes that stock's lists do not ask in MXFP4, and its methods for ModelOpt and MoeWNA16 ask later."""

_NOT_LOADED = frozenset({"expert_parallel.loader", *MISAPPLIED_BY_VLLM})
"""Codes of reasons that hold for stock vLLM, too: its code of the model cannot fill the layer's weights, or its LoRA
layer applies wrong adapters, whatever runs them."""

_BATCH_INVARIANT = {
    "TritonWNA16Experts": min_versions.OLDEST_RELEASE,
    "HummingIndexedExperts": min_versions.HUMMING_BATCH_INVARIANT,
    "HummingGroupedExperts": min_versions.HUMMING_BATCH_INVARIANT,
}
"""Classes behind wrappers that claim batch invariance, which nothing here proves, and the first release that does."""

_NO_WHOLE_GROUPS = "ValueError: CompressedTensors WNA16 MoE with static group scales requires whole groups"
"""What stock says where it makes the weights of such shards; its oldest releases have other words."""

_WITH_EPLB = ("mxfp4", "quark", "online")
"""Packings whose stock methods move experts between ranks, whatever class they run."""

_LISTED_FOR_HALVES = frozenset(
    {"FLASHINFER_TRTLLM_MXFP4_MXFP8", "DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING"}
)
"""Kernels for MXFP4 experts of other models than gpt-oss (``_get_priority_backends``)."""


@dataclass(frozen=True, slots=True)
class StockChoice:
    """What stock vLLM does with a layer.

    Attributes:
        stock_class: the name of vLLM's expert class; "" where it takes none, or that is not known.
        backend: the backend here that wraps the class; "" where none does.
        refusal: the error with which stock vLLM ends, or why it would compute with wrong weights; "" where neither is
            known.
        unknown: why it is not known what stock vLLM does; "" where it is.
    """

    stock_class: str = ""
    backend: str = ""
    refusal: str = ""
    unknown: str = ""

    @property
    def runs(self) -> bool:
        """Whether stock vLLM is known to run the layer with a kernel, not with an emulation."""
        return bool(self.stock_class) and "Emulation" not in self.stock_class

    @property
    def may_run(self) -> bool:
        """The same, or it is not known."""
        return self.runs or bool(self.unknown)

    def to_json(self) -> dict[str, str]:
        """What is known, as JSON values."""
        return {"stock_class": self.stock_class, "backend": self.backend, "refusal": self.refusal}

    def __str__(self) -> str:
        if self.unknown:
            return f"not known: {self.unknown}"
        if self.refusal:
            return f"cannot run it: {self.refusal}"
        return f"{self.backend} ({self.stock_class})" if self.backend else self.stock_class


def choose_stock(
    problem: Problem, device: Device, registry: Registry, moe_backend: str = AUTO, method: str = ""
) -> StockChoice:
    """What stock vLLM does with a layer.

    Args:
        problem: the layer, with the activations that its checkpoint declares.
        device: the machine.
        registry: the backends.
        moe_backend: vLLM's ``--moe-backend``.
        method: vLLM's name of the checkpoint's quantization, which reads AutoRound's integers by other rules.
    """
    problem, scheme = _evenly_sharded(problem), problem.scheme
    none = StockChoice(unknown="nothing here has its rules for such layers on this machine")
    others = tuple(each.name for each in registry if not is_own(each))
    asked = Settings(allow_activation_quantization=True, disable=others)
    candidates = evaluate_candidates(problem, device, asked, registry)
    lost = (reason.detail for each in candidates for reason in each.reasons if reason.code in _NOT_LOADED)
    if refusal := next(lost, "") or _unsupported_gpu(problem, device):
        return StockChoice(refusal=refusal)
    if method == "inc" and scheme.name == "wna16":
        return none
    if (scheme.name, scheme.packing) == ("mxfp4", "online") and not _is_known(device, min_versions.ONLINE_MXFP4):
        return none
    if moe_backend != AUTO:
        # Which experts move depends on the class; what the layer's weights need does not.
        refusal = load_refusal(replace(problem, eplb=False), device, "")
        chosen = StockChoice(unknown=f"--moe-backend {moe_backend} chooses its kernel")
        return StockChoice(refusal=refusal) if refusal else chosen
    if device.kind == "cpu" and _is_known(device, min_versions.STOCK_RULES_ON_CPU):
        return _on_cpu(problem, device) or none
    found = None
    if device.kind == "cuda" and _is_known(device, _KNOWN_SINCE[scheme.name]):
        found = _apart_from_lists(problem, device) or _listed(
            stock_wrappers(candidates, registry), problem, device, registry
        )
    stock_class = found.stock_class if found else ""
    refusal = (found.refusal if found else "") or load_refusal(problem, device, stock_class)
    return StockChoice(refusal=refusal) if refusal else found or none


def left_to_stock(problem: Problem, device: Device, stock: StockChoice) -> str:
    """That a server leaves a layer that no backend runs to stock vLLM, in words; "" where it does not. On a CPU it asks
    stock vLLM only where a feature needs it.

    Args:
        problem: the layer.
        device: the machine.
        stock: what stock vLLM does with it.
    """
    needs = features_for_stock(problem.lora, problem.parallel.is_batched, problem.unpadded_intermediate_size > 0)
    if not stock.may_run or not (needs or device.kind == "cuda"):
        return ""
    does = (
        f"which runs {stock.stock_class} here" if stock.runs else f"if stock vLLM can run {' and '.join(needs) or 'it'}"
    )
    return f"left to stock vLLM, {does}"


def is_loadable(candidates: Iterable[Candidate]) -> bool:
    """Whether vLLM's own code of the model loads a layer and its adapters, as far as its candidates know.

    Args:
        candidates: of the layer.
    """
    return not any(reason.code in _NOT_LOADED for each in candidates for reason in each.reasons)


def stock_wrappers(candidates: Iterable[Candidate], registry: Registry) -> list[Candidate]:
    """The candidates over vLLM's own classes, in the order of the machine's release, rejected ones among the others.

    Args:
        candidates: of a layer.
        registry: the backends.
    """
    found = [each for each in candidates if each.backend in registry and registry[each.backend].stock_class]
    return sorted(found, key=lambda candidate: candidate.priority)


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
    """The layer as stock vLLM shards it: ragged shards are even ones, rounded down."""
    if not problem.ragged_intermediate_size:
        return problem
    even = problem.ragged_intermediate_size // problem.parallel.tp
    return replace(problem, intermediate_size=even, ragged_intermediate_size=0)


def _is_known(device: Device, since: str) -> bool:
    """Whether a machine's release is one of those that the rules are of. One without a known vLLM has the newest."""
    return vllm_at_least_on(device, since) and not min_versions.is_unreleased_on(device)


def _unsupported_gpu(problem: Problem, device: Device) -> str:
    """Why stock runs no such layer on an old GPU, whose classes ask less; "" on others."""
    if device.kind != "cuda" or device.capability >= 80:
        return ""
    if device.capability < 75:
        return f"the wheels of vLLM and PyTorch have kernels from sm_75 on, none for sm_{device.capability}"
    if problem.scheme.name == "wna16":
        return ""
    return f"its kernels for {problem.scheme.name} are in bfloat16, which needs sm_80; this is sm_{device.capability}"


def _on_cpu(problem: Problem, device: Device) -> StockChoice | None:
    """Stock's choice on a CPU. Its class for MXFP4 asks for AMX; which one takes integers, other packages decide. None
    of its classes there has LoRA, or takes tokens by expert."""
    scheme, unable = problem.scheme.name, problem.lora or problem.parallel.is_batched
    if scheme == "mxfp8":
        if problem.parallel.is_batched:
            return StockChoice(refusal=_no_kernel("mxfp8"))
        plain = problem.activation.name == "silu" and problem.activation.gated
        emulation = "Mxfp8EmulationTritonExperts, which needs Triton: AttributeError at the first request"
        return StockChoice(refusal=emulation) if plain or unable else None
    if scheme == "mxfp4" and is_constructed(problem, device):
        return StockChoice(refusal="MarlinExperts, which its method takes without asking, needs a GPU")
    if unable:
        return StockChoice(refusal=_no_kernel(scheme))
    if scheme == "mxfp4" and "amx_tile" not in device.features:
        return StockChoice(refusal=f"{_no_kernel(scheme)} (its class for CPUs needs AMX)")
    return None


def _apart_from_lists(problem: Problem, device: Device) -> StockChoice | None:
    """What stock decides without its list of kernels, or with a class that no backend here wraps."""
    scheme = problem.scheme
    if scheme.packing == "gptq" and scheme.act_order == "group":
        return StockChoice(refusal="ValueError: desc_act=True is no longer supported")
    name = class_without_wrapper(problem, device)
    return StockChoice(name) if name else None


def _listed(wrappers: list[Candidate], problem: Problem, device: Device, registry: Registry) -> StockChoice | None:
    """The first class of stock's list that takes the layer; None where the list is not known.

    Args:
        wrappers: the candidates over stock's classes, in stock's order.
        problem: the layer.
        device: the machine.
        registry: the backends.
    """
    if not _has_known_list(problem, device):
        return None
    scheme, fallen_back = problem.scheme, _falls_back(problem)
    if (
        scheme.packing in ("quark", "online")
        and scheme.activations == "mxfp4"
        and not vllm_at_least_on(device, min_versions.CUTLASS_MXFP4_LISTED)
    ):
        wrappers = []  # kernels that leave activations in 16 bits do not stand in for others there
    for each in wrappers:
        backend = unchecked(registry[each.backend])
        if isinstance(backend, StockBackend) and _is_listed(backend, problem, device, fallen_back):
            asked = _asked_reasons(each, backend, problem, device, fallen_back)
            if asked is None:
                continue
            if not asked:
                return StockChoice(backend.stock_class_name, backend.name)
            words = "; ".join(reason.detail for reason in asked)
            if {reason.code for reason in asked} == {"dtype"}:
                return StockChoice(refusal=f"{backend.stock_class_name} {words}, and vLLM does not ask")
            if is_constructed(problem, device):
                rule = f"{backend.stock_class_name} does not take it, and its method does not ask"
                return StockChoice(refusal=f"{rule} ({words})")
    if scheme.name == "wna16" and scheme.bits not in (4, 8):
        return None
    return _emulated(problem, device, fallen_back)


def _asked_reasons(
    candidate: Candidate, backend: StockBackend, problem: Problem, device: Device, fallen_back: bool
) -> list[Reason] | None:
    """A wrapper's reasons that stock's list has, too, against the class behind it; None where the class of a newer
    release alone takes the layer's activation.

    Args:
        candidate: the wrapper's verdict.
        backend: the wrapper.
        problem: the layer.
        device: the machine.
        fallen_back: stock reads the layer as MoeWNA16.
    """
    scheme, ignored = problem.scheme, _NOT_ASKED
    is_moe_wna16 = scheme.packing == "moe_wna16" or fallen_back
    if scheme.name == "mxfp4" or scheme.packing == "modelopt" or is_moe_wna16:
        ignored |= _PADDED
    # Neither the list for MXFP8 nor the method for MoeWNA16 asks for biases, which their classes then drop.
    if scheme.name == "mxfp8" or is_moe_wna16:
        ignored |= {"bias"}
    if is_constructed(problem, device):
        ignored |= {"batch_invariant"}
    claimed = _claimed(backend, problem, device)
    codes = {reason.code for reason in candidate.reasons} - claimed
    if "activation.parameters" in codes and _came_later(backend, problem, device):
        return None
    if backend.name == "marlin_mxfp8":  # its class takes every size
        ignored |= {"alignment.hidden"}
    return [reason for reason in candidate.reasons if reason.code not in claimed | ignored]


def _emulated(problem: Problem, device: Device, fallen_back: bool) -> StockChoice:
    """Stock's emulation, which is the last of most of its lists, or that it has none for the layer."""
    scheme, activation = problem.scheme, problem.activation
    has_one = {
        "mxfp8": vllm_at_least_on(device, min_versions.EMULATED_MXFP8),
        "mxfp4": scheme.packing in GPT_OSS_PACKINGS,
        "wna16": scheme.bits == 4 and scheme.packing != "moe_wna16" and not fallen_back,
    }
    names = {"mxfp8": "Mxfp8EmulationTritonExperts", "mxfp4": EMULATED_MXFP4, "wna16": "Int4EmulationTritonExperts"}
    takes = activation.name in (STOCK_GATED if activation.gated else STOCK_UNGATED)
    if has_one[scheme.name] and takes and not problem.parallel.is_batched:
        return StockChoice(names[scheme.name])
    return StockChoice(refusal=_no_kernel(scheme.name))


def _came_later(backend: StockBackend, problem: Problem, device: Device) -> bool:
    """Whether the class of a newer release takes a layer's activation, which that of the machine's does not claim."""
    newest = replace(device, packages={**device.packages, "vllm": NEWEST})
    return "activation.parameters" not in {reason.code for reason in backend.check(problem, newest).reasons}


def load_refusal(problem: Problem, device: Device, stock_class: str) -> str:
    """The error with which stock ends after it has chosen a class, when it makes or fills the layer's weights or first
    calls them, or why it would fill them with others; "" where neither is known.

    Args:
        problem: the layer.
        device: the machine.
        stock_class: the name of the class; "" where it is not known.
    """
    problem, scheme = _evenly_sharded(problem), problem.scheme
    size, is_marlin = problem.intermediate_size, "Marlin" in stock_class
    moves = scheme.packing in _WITH_EPLB or (scheme.name == "wna16" and stock_class == "TritonWNA16Experts")
    moves &= scheme.packing not in ("gptq", "awq", "moe_wna16")
    moves |= scheme.packing == "compressed-tensors" and scheme.name == "mxfp4" and not is_constructed(problem, device)
    if problem.eplb and not moves and _is_known(device, _KNOWN_SINCE[scheme.name]):
        return f"NotImplementedError: EPLB is not supported (by its method for {scheme.packing} experts)"
    if scheme.packing == "compressed-tensors-int":
        return "ValueError: For Fused MoE layers, only format: pack-quantized is supported"
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
            return _NO_WHOLE_GROUPS
    return _constructed_refusal(problem, stock_class) if is_constructed(problem, device) else ""


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
            return _NO_WHOLE_GROUPS
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


def _no_kernel(scheme: str) -> str:
    if scheme == "mxfp8":
        return "ValueError: No MXFP8 MoE backends available"
    return f"NotImplementedError: No {scheme.upper()} MoE backend supports the deployment configuration"


def _has_known_list(problem: Problem, device: Device) -> bool:
    """Whether the rules know the list of kernels that a layer gets."""
    scheme = problem.scheme
    if scheme.name == "mxfp4":
        if scheme.packing == "mxfp4":
            return True
        if scheme.packing in ("gpt_oss", "quark", "online"):
            return scheme.activations == "16bit" or (problem.parallel.is_batched and scheme.activations == "mxfp4")
        return is_constructed(problem, device) and not problem.parallel.is_batched
    if scheme.name == "wna16":
        return scheme.packing in ("gptq", "awq", "compressed-tensors", "moe_wna16")
    return True


def _fits_marlin(problem: Problem) -> bool:
    """Whether Marlin takes the sizes of a layer with integers (``check_moe_marlin_supports_config``)."""
    group, size = problem.scheme.group_size, problem.unpadded_intermediate_size or problem.intermediate_size
    whole = group <= 0 or size % group == 0
    return problem.hidden_size % 128 == 0 and whole and group in (-1, 32, 64, 128)


def _falls_back(problem: Problem) -> bool:
    """Whether stock reads GPTQ's and AWQ's experts as MoeWNA16, since Marlin does not take the sizes."""
    return problem.scheme.packing in ("gptq", "awq") and not _fits_marlin(problem)


def _is_listed(backend: Backend, problem: Problem, device: Device, fallen_back: bool) -> bool:
    """Whether stock's list for a layer has the kernel of a wrapper."""
    scheme = problem.scheme
    kernel = backend.stock_kernel if isinstance(backend, StockBackend) else ""
    if scheme.name == "mxfp4":
        if kernel == "HUMMING" and not vllm_at_least_on(device, min_versions.HUMMING_FIRST):
            return False  # its first lists that have it
        if scheme.packing == "mxfp4":
            return kernel in _LISTED_FOR_HALVES
        if is_constructed(problem, device):
            return kernel == "MARLIN"
        return kernel != "TRITON_UNFUSED" and backend.activations(problem) == "16bit"
    if scheme.name == "wna16":
        if kernel in ("MARLIN", "BATCHED_MARLIN"):
            return scheme.packing != "moe_wna16" and _fits_marlin(problem)
        if kernel == "TRITON":
            return scheme.packing not in ("gptq", "awq") or fallen_back  # their methods may have biases
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
    claimed = {code for code, word in asked.items() if word in claims}
    since = _BATCH_INVARIANT.get(backend.stock_class_name)
    if since and vllm_at_least_on(device, since):
        claimed.add("batch_invariant")
    return frozenset(claimed)
