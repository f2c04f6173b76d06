"""What backends over vLLM's own expert classes share.

Such a backend is a description: the class, what it supports, its priority, and a `convert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.decision import ShardPlan
from ..core.problem import Device, Problem
from ._contract import Backend, Builder, Tensors
from ._stock_priority import RUNS_CUTLASS_MXFP4, runs_declared_mxfp4

EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
"""The package of vLLM's expert classes."""


def schema_arguments(operator: Any) -> frozenset[str]:
    """Names of the arguments that an overload of a torch operator takes in the installed release.

    Args:
        operator: for example ``torch.ops._C.fused_experts_cpu.default``.
    """
    return frozenset(argument.name for argument in operator._schema.arguments)


@dataclass(frozen=True, slots=True)
class StockDifference:
    """A difference between what vLLM claims for an expert class and what the backend over it takes.

    Attributes:
        what: what is claimed and refused: compute capabilities (``sm_75``), activations and routing methods by vLLM's
            names (``gelu_tanh``, ``llama4``), ``lora``, ``eplb``; empty for every layer. Two words are other
            differences: ``unlisted``, releases are taken whose oracle does not list the kernel (`before` says up to
            which); ``sizes``, layers are padded less than by vLLM.
        why: the reason, in words.
        before: the first release of vLLM without the difference; "" where every release has it.
    """

    what: tuple[str, ...]
    why: str
    before: str = ""


SM75_DIFFERENCE = StockDifference(("sm_75",), "bfloat16 needs sm_80, and the kernels have no float16 with e8m0 scales")
"""Why backends over classes that claim MX formats from Turing on begin with Ampere."""


UNPROVEN_EPLB = StockDifference(("eplb",), "not shown here: nobody has moved its experts while it serves")
UNPROVEN_LORA = StockDifference(("lora",), "not shown here: nobody has run it with adapters")


class StockBackend(Backend):
    """A backend over one of vLLM's expert classes.

    Attributes:
        stock_kernel: name of the kernel in vLLM's oracle for the scheme: a member of its enumeration.
        stock_differences: every difference between what vLLM claims for the class and what the backend takes.
        stock_weights: the weight type in the class's quant config, named as in `Builder.stock`; "" for the scheme's.
        quantize_inputs: the type to which vLLM's prepare step quantizes activations, in the words of `Builder.stock`;
            "" to leave them alone.
        swizzle_input_scales: the prepare step orders the scales of activations in tiles of 128 rows x 4.
        padded_layer: the class, and the layer that calls it, must be told the padded sizes. Other classes read them
            from their tensors.
    """

    stock_kernel: ClassVar[str]
    stock_differences: ClassVar[tuple[StockDifference, ...]] = ()
    stock_weights: ClassVar[str] = ""
    quantize_inputs: ClassVar[str] = ""
    swizzle_input_scales: ClassVar[bool] = False
    padded_layer: ClassVar[bool] = False

    def missing_attributes(self) -> list[str]:
        """As every backend's; the kernel's name is required, too."""
        return super().missing_attributes() + ["stock_kernel"] * (not hasattr(self, "stock_kernel"))

    def only_by_name(self, problem: Problem, device: Device) -> str:
        """Where the checkpoint declares 4 bits on both sides, and stock has a kernel for that, which has no wrapper:
        nothing shows that this one is as fast."""
        return f"stock vLLM {RUNS_CUTLASS_MXFP4}" if runs_declared_mxfp4(problem, device) else ""

    def stock_arguments(self, tensors: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Any]:
        """Arguments of `Builder.stock`; a subclass adds its own.

        Args:
            tensors: kernel tensors of the layer, `[local_experts, ...]` each.
            problem: the layer.
            plan: this backend's plan for it.
        """
        return {
            "weights": self.stock_weights,
            "inputs": self.quantize_inputs,
            "swizzled": self.swizzle_input_scales,
            "plan": plan if self.padded_layer else None,
        }

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """An instance of the stock class."""
        arguments = self.stock_arguments(tensors, problem, plan)
        return builder.stock(
            self.stock_class, apply_router_weight_on_input=problem.routing.apply_router_weight_on_input, **arguments
        )
