"""What stock vLLM would run where no backend here may: the rules that its own expert classes do not ask, as data.

A server asks stock vLLM itself (`methods.stock_fallback`). Without vLLM, for another machine, the wrappers of stock
classes say what those can do: a wrapper with no reason against it but these wraps a class that would take the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..backends._stock_priority import CUTLASS_MXFP4, RUNS_CUTLASS_MXFP4, runs_declared_mxfp4
from ..core.decision import Candidate
from ..core.lora import MISAPPLIED_BY_VLLM
from ..core.problem import Device, Problem
from .registry import Registry

NOT_ASKED_BY_STOCK = frozenset(
    {
        "activation.parameters",
        "activation.parameters.vllm_version",
        "activation_quantization",
        "expert_parallel.placement",
        "expert_parallel.uneven",
        "intermediate.padded",
        "lora.padding",
    }
)
"""Codes of reasons for which a wrapper refuses a layer that the class behind it takes. Most such layers get wrong
numbers there: the class ignores what the reason names. Padded experts do not."""

PADDED_BY_STOCK = frozenset({"group.intermediate", "alignment.intermediate"})
"""Codes that do not hold for stock in MXFP4: its methods round the intermediate size up for every class. In MXFP8 and
in integers they refuse such sizes."""

NOT_LOADED_BY_VLLM = frozenset({"expert_parallel.loader", *MISAPPLIED_BY_VLLM})
"""Codes of reasons that hold for stock vLLM, too: its code of the model cannot fill the layer's weights, or its LoRA
layer applies wrong adapters, whatever runs them."""


def is_loadable(candidates: Iterable[Candidate]) -> bool:
    """Whether vLLM's own code of the model loads a layer and its adapters, as far as its candidates know.

    Args:
        candidates: of the layer.
    """
    return not any(reason.code in NOT_LOADED_BY_VLLM for each in candidates for reason in each.reasons)


def stock_wrappers(candidates: Iterable[Candidate], registry: Registry) -> list[Candidate]:
    """The candidates over vLLM's own classes, in the order of the machine's release, rejected ones among the others.

    Args:
        candidates: of a layer.
        registry: the backends.
    """
    found = [each for each in candidates if each.backend in registry and registry[each.backend].stock_class]
    return sorted(found, key=lambda candidate: candidate.priority)


@dataclass(frozen=True, slots=True)
class StockKernel:
    """vLLM's class for a layer that no backend can run.

    Attributes:
        name: of the class.
        why: why the layer is left to it.
    """

    name: str
    why: str


def kernel_of_stock(
    candidates: Iterable[Candidate], problem: Problem, device: Device, registry: Registry
) -> StockKernel | None:
    """What stock vLLM would take on a GPU; None where it has nothing, and on other devices.

    Args:
        candidates: of a layer that no backend can run.
        problem: the layer.
        device: the machine.
        registry: the backends.
    """
    if device.kind != "cuda":
        return None
    if runs_declared_mxfp4(problem, device):
        return StockKernel(CUTLASS_MXFP4, f"it {RUNS_CUTLASS_MXFP4}")
    ignored = NOT_ASKED_BY_STOCK | PADDED_BY_STOCK if problem.scheme.name == "mxfp4" else NOT_ASKED_BY_STOCK
    for each in stock_wrappers(candidates, registry):
        if {one.code for one in each.reasons} <= ignored:
            name, reasons = registry[each.backend].stock_class_name, "; ".join(map(str, each.reasons))
            return StockKernel(name, f"its {name} does not have these rules of {each.backend}: {reasons}")
    return None
