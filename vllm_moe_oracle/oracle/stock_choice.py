"""What stock vLLM does with a layer, without vLLM: it runs a class of experts, ends with an error, or is not known.

Whatever says something of stock asks `choose_stock`, so that no two answers differ. The wrappers of stock's classes say
what those can do, and their order is stock's (`stock_wrappers`). What stock asks besides, by the layer's packing, is
here, and what its methods refuse after they have chosen is in `stock_refusals`. A test compares the rules with the code
of vLLM's releases. Where they do not reach, the answer says so: other releases, AutoRound's integers, kernels that
`--moe-backend` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..backends import Backend
from ..backends._stock import StockBackend
from ..backends._stock_priority import (
    EMULATED_MXFP4,
    GPT_OSS_PACKINGS,
    class_without_wrapper,
    is_constructed,
)
from ..backends._stock_rules import STOCK_GATED, STOCK_UNGATED
from ..core.decision import Candidate, Decision, Reason
from ..core.lora import MISAPPLIED_BY_VLLM
from ..core.problem import Device, Problem, features_for_stock
from ..releases import min_versions
from ..releases.min_versions import vllm_at_least_on
from ..releases.supported import NEWEST
from ..settings import AUTO, Settings
from .checked_backend import is_own, unchecked
from .registry import Registry
from .selection import evaluate_candidates
from .stock_refusals import KNOWN_SINCE, evenly_sharded, is_known, load_refusal

_NOT_ASKED = frozenset(
    {
        "activation.parameters",
        "activation.parameters.vllm_version",
        "activation_quantization",
        "dtype",
        "expert_parallel.placement",
        "expert_parallel.uneven",
        "intermediate.padded",
        "lora.batch_invariant",
        "lora.padding",
    }
)
"""Codes of reasons for which a wrapper refuses a layer that the class behind it takes. Most such layers get wrong
numbers there: the class ignores what the reason names. Padded experts do not, and a dtype ends the first call
(`load_refusal`)."""

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

_MAY_RUN_MXFP4 = {
    "b12x": min_versions.MOE_BACKENDS_FOR_MXFP4,
    "deep_gemm_mega_moe": min_versions.OLDEST_RELEASE,
    "flashinfer_moe_ep_cutedsl": min_versions.MOE_EP_CUTEDSL,
    "flashinfer_moe_ep_mega_cutedsl": min_versions.MOE_BACKENDS_FOR_MXFP4,
    "flashinfer_moe_ep_mega_deep_gemm": min_versions.MOE_BACKENDS_FOR_MXFP4,
}
"""Values of ``--moe-backend`` with which stock may run MXFP4 experts by a class that no backend here wraps, or in the
model's own code, and the first release that has each. Its lists refuse all other values that no backend here has: they
do not know them, or their kernels are for other makers' GPUs."""

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


_NOT_KNOWN = StockChoice(unknown="nothing here has its rules for such layers on this machine")


def choose_stock(
    problem: Problem,
    device: Device,
    registry: Registry,
    moe_backend: str = AUTO,
    method: str = "",
    carried_size: int = 0,
) -> StockChoice:
    """What stock vLLM does with a layer.

    Args:
        problem: the layer, with the activations that its checkpoint declares.
        device: the machine.
        registry: the backends.
        moe_backend: vLLM's ``--moe-backend``.
        method: vLLM's name of the checkpoint's quantization, which reads AutoRound's integers by other rules.
        carried_size: the hidden size to which vLLM rounds the layer's up for an all-to-all, after it has chosen a
            class and before it makes weights.
    """
    problem, scheme = evenly_sharded(problem), problem.scheme
    made = replace(problem, hidden_size=max(problem.hidden_size, carried_size))
    if is_constructed(problem, device):  # the method asks no class
        problem = made
    candidates = stock_candidates(problem, device, registry)
    lost = (reason.detail for each in candidates for reason in each.reasons if reason.code in _NOT_LOADED)
    if refusal := next(lost, "") or _without_kernels(device):
        return StockChoice(refusal=refusal)
    if method == "inc" and scheme.name == "wna16":
        return _NOT_KNOWN
    if (scheme.name, scheme.packing) == ("mxfp4", "online") and not is_known(device, min_versions.ONLINE_MXFP4):
        return _NOT_KNOWN
    if moe_backend != AUTO and _reads_name(moe_backend, problem, device):
        refusal = load_refusal(replace(made, eplb=False), device, registry)  # its class may move experts
        if refusal := refusal or _name_refusal(moe_backend, problem, device, registry):
            return StockChoice(refusal=refusal)
        return StockChoice(unknown=f"--moe-backend {moe_backend} chooses its kernel")
    found = _class_for(problem, device, registry, candidates) or _NOT_KNOWN
    if found.refusal or _is_known_cpu(device):
        return found
    refusal = load_refusal(made, device, registry, found.stock_class)
    return StockChoice(refusal=refusal) if refusal else found


def _is_known_cpu(device: Device) -> bool:
    return device.kind == "cpu" and is_known(device, min_versions.STOCK_RULES_ON_CPU)


def _class_for(
    problem: Problem, device: Device, registry: Registry, candidates: Iterable[Candidate]
) -> StockChoice | None:
    """The class that stock chooses by itself, or why it has none for the layer; None where that is not known."""
    if _is_known_cpu(device):
        return _on_cpu(problem, device)
    if device.kind != "cuda" or not is_known(device, KNOWN_SINCE[problem.scheme.name]):
        return None
    wrappers = stock_wrappers(candidates, registry)
    return _apart_from_lists(problem, device) or _listed(wrappers, problem, device, registry)


def names_backend(settings: Settings, registry: Registry, moe_backend: str = AUTO) -> bool:
    """Whether the user names backends here to run or not to run: a layer that they cannot run is an error, not left to
    stock vLLM, which knows none that must not be chosen.

    Args:
        settings: the user's.
        registry: the backends.
        moe_backend: vLLM's ``--moe-backend``, which stock vLLM follows where no backend here has the name.
    """
    if settings.on_unavailable == "fallback":
        return False
    return settings.names_backends or any(moe_backend in each.vllm_names for each in registry)


def asks_stock(
    problem: Problem, device: Device, settings: Settings, registry: Registry, moe_backend: str = AUTO
) -> bool:
    """Whether a server asks stock vLLM for a layer that no backend runs: on a GPU whatever the reason, on a CPU where a
    feature of the layer needs it. Neither in place of a backend that the user names, but `--moe-backend` means stock's
    own kernel for a layer with such a feature.

    Args:
        problem: the layer.
        device: the machine.
        settings: the user's.
        registry: the backends.
        moe_backend: vLLM's ``--moe-backend``.
    """
    needs = _needs(problem)
    return bool(needs or device.kind == "cuda") and not names_backend(
        settings, registry, AUTO if needs else moe_backend
    )


def left_to_stock(problem: Problem, stock: StockChoice) -> str:
    """That a server leaves a layer to stock vLLM, for which it asks (`asks_stock`), in words; "" where stock vLLM is
    known not to run it.

    Args:
        problem: the layer.
        stock: what stock vLLM does with it.
    """
    if not stock.may_run:
        return ""
    does = f"which runs {stock.stock_class} here"
    if stock.unknown:
        does = f"if stock vLLM can run {' and '.join(_needs(problem)) or 'it'}"
    return f"left to stock vLLM, {does}"


def stock_candidates(problem: Problem, device: Device, registry: Registry) -> tuple[Candidate, ...]:
    """The verdicts of this project's backends on a layer whatever a user sets; third parties' are not asked.

    Args:
        problem: the layer, with the activations that its checkpoint declares.
        device: the machine.
        registry: the backends.
    """
    others = tuple(each.name for each in registry if not is_own(each))
    settings = Settings(allow_activation_quantization=True, disable=others)
    return evaluate_candidates(problem, device, settings, registry)


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


def _needs(problem: Problem) -> list[str]:
    """What the layer needs that no or few backends here support, in words."""
    return features_for_stock(problem.lora, problem.parallel.is_batched, problem.unpadded_intermediate_size > 0)


def _reads_name(moe_backend: str, problem: Problem, device: Device) -> bool:
    """Whether stock's method of a layer reads a value of ``--moe-backend``."""
    if problem.scheme.name == "wna16":
        return vllm_at_least_on(device, min_versions.TRITON_WNA16_LISTED)
    return not is_constructed(problem, device) or _may_run_by_name(moe_backend, problem, device)


def _name_refusal(moe_backend: str, problem: Problem, device: Device, registry: Registry) -> str:
    """Why stock's list of kernels refuses a value of ``--moe-backend``; "" where it is not known to."""
    if _may_run_by_name(moe_backend, problem, device) or any(moe_backend in each.vllm_names for each in registry):
        return ""
    scheme = problem.scheme.name
    return f"--moe-backend {moe_backend} names none of its kernels for {scheme} experts on such a machine (ValueError)"


def _may_run_by_name(moe_backend: str, problem: Problem, device: Device) -> bool:
    """Whether stock may run a layer with a value of ``--moe-backend`` that no backend here has."""
    since = _MAY_RUN_MXFP4.get(moe_backend, "") if problem.scheme.name == "mxfp4" else ""
    return bool(since) and vllm_at_least_on(device, since)


def _without_kernels(device: Device) -> str:
    """Why stock's wheels run no layer on an old GPU, whose classes ask less; "" on others."""
    if device.kind != "cuda" or device.capability >= 75:
        return ""
    return f"the wheels of vLLM and PyTorch have kernels from sm_75 on, none for sm_{device.capability}"


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
        return StockChoice(refusal="ValueError: GPTQ group activation ordering (desc_act=True) is no longer supported")
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
            if is_constructed(problem, device):
                words = "; ".join(reason.detail for reason in asked)
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


def _no_kernel(scheme: str) -> str:
    if scheme == "mxfp8":
        return "ValueError: No MXFP8 MoE backends available"
    return f"NotImplementedError: No {scheme.upper()} MoE backend supports the deployment configuration"


def _has_known_list(problem: Problem, device: Device) -> bool:
    """Whether the rules know the list of kernels that a layer gets."""
    scheme = problem.scheme
    if scheme.name == "mxfp4":
        if scheme.packing in GPT_OSS_PACKINGS:
            return scheme.activations == "16bit" or (problem.parallel.is_batched and scheme.activations == "mxfp4")
        return not (is_constructed(problem, device) and problem.parallel.is_batched)
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
        if is_constructed(problem, device):
            return kernel == "MARLIN"
        if scheme.packing not in GPT_OSS_PACKINGS:
            return kernel in _LISTED_FOR_HALVES
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
