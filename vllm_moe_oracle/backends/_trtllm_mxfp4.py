"""What the four FlashInfer TRTLLM-gen backends for MXFP4 share: two kinds of activations, each with and without routing
inside the kernel.

All four have one layout. vLLM's classes are `TrtLlmMxfp4ExpertsModular` and `TrtLlmMxfp4ExpertsMonolithic`, which give
the kernel biases, alpha, beta and limit, and crop the output to the unpadded hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp4_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._trtllm import (
    EVEN_SPLIT,
    EXPERTS_MULTIPLE,
    HIDDEN_MULTIPLE,
    IN_ORDER,
    INTERMEDIATE_MULTIPLE,
    MAX_TOP_K,
    MORE_EXPERTS_THAN_TOP_K,
    arranged,
)

if TYPE_CHECKING:
    from torch import Tensor

ROUTING_METHODS = ("renormalize", "renormalizenaive", "deepseekv3")


def limits(routes: bool) -> Limits:
    """The limits of all four.

    Args:
        routes: the kernel routes itself.
    """
    return Limits(
        capabilities=((100, 110),),
        packages={"flashinfer-python": "", "vllm": since.OLDEST},
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        parameters=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=HIDDEN_MULTIPLE,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        experts_multiple=EXPERTS_MULTIPLE,
        max_top_k=MAX_TOP_K,
        routing_methods=ROUTING_METHODS if routes else None,
    )


RULES = (
    Rule(
        "activation.rows",
        lambda problem, device: problem.activation.name == "swigluoai" and not problem.activation.interleaved,
        lambda problem, device: (
            "vLLM's class takes swigluoai only from layers whose rows alternate gate and up; here they are two halves"
        ),
    ),
    MORE_EXPERTS_THAN_TOP_K,
    EVEN_SPLIT,
    IN_ORDER,
)
"""Rules of all four."""

ROUTING_RULES = (
    *RULES,
    Rule(
        "routing.since",
        lambda problem, device: (
            problem.routing.method == "deepseekv3" and not since.reached(since.TRTLLM_MXFP4_GROUPS, device)
        ),
        lambda problem, device: (
            f"passes groups and correction bias to its kernel since vLLM {since.TRTLLM_MXFP4_GROUPS}"
        ),
    ),
    Rule(
        "routing.hashed",
        lambda problem, device: problem.routing.hashed,
        lambda problem, device: "has no routing by token ids, the layer routes by a table over them",
    ),
    Rule(
        "data_parallel",
        lambda problem, device: problem.parallel.dp > 1,
        lambda problem, device: (
            f"routes tokens of its own rank only, the layer's come from {problem.parallel.dp} data-parallel ranks"
        ),
    ),
)
"""Rules of the two that route inside their kernel."""


class TrtllmMxfp4(Backend):
    """MXFP4 weights through one of vLLM's classes over FlashInfer's TRTLLM-gen kernels.

    Attributes:
        inputs: type to which vLLM's prepare step quantises activations; "" when they stay as they are.
        place: a key of `compat.order.MXFP4_ORDER`.
    """

    schemes = ("mxfp4",)
    vllm_names = ("flashinfer_trtllm",)
    inputs: str = ""
    place: str

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded: hidden to 256, intermediate to 128 (on older releases to 256), as stock does."""
        new = since.reached(since.TRTLLM_MXFP4_MULTIPLES, device)
        return padded(problem, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE if new else 2 * INTERMEDIATE_MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's place: first for gpt-oss with 16-bit activations, first for others with MXFP8."""
        return mxfp4_place(self.place, problem, device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype, or MXFP8."""
        return "mxfp8" if self.inputs else "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Block-scaled tensor cores, or weights made bfloat16 on the way."""
        if self.inputs:
            return Numerics("MXFP4, in block-scaled tensor cores", "quantised to MXFP8 per token, in both products")
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")

    def layout(self, problem: Problem, plan: Plan) -> str:
        """One for all four."""
        return f"trtllm_mxfp4 {plan.hidden_size}x{plan.intermediate_size}"

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, swaps and alternates gate and up, shuffles rows, tiles scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales, whose type FlashInfer takes for float8_e4m3fn,
            `[2 I, H/32]` and `[H, I/32]`, biases float32 `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        import torch

        converted = arranged(expert, problem, plan, per_byte=2)
        for name in ("w13_scale", "w2_scale"):
            converted[name] = converted[name].view(torch.float8_e4m3fn)
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class."""
        return builder.stock(self.stock_class, inputs=self.inputs, plan=plan)
