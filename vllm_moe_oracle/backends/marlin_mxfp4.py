"""Marlin for MXFP4: weight-only, on every CUDA device that knows bfloat16.

vLLM's class `MarlinExperts` over the operator ``moe_wna16_marlin_gemm``, whose weights are e2m1 with e8m0 scales per
32. Its tiles are 64 rows x 128 columns or 128 rows x 64 columns: the hidden size is zero-padded to a multiple of 128
and the intermediate size to one of 64, where stock pads to 256 and 128.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp4_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits
from ._mxfp4 import oai_rule, padded_expert
from ._stock import FROM_SM80, GATED, lora_rule

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_MULTIPLE = 128
INTERMEDIATE_MULTIPLE = 64


def _padded(problem: Problem, device: Device) -> Plan:
    return padded(problem, HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE)


class MarlinMxfp4(Backend):
    """vLLM's Marlin experts on MXFP4 weights."""

    name = "marlin_mxfp4"
    schemes = ("mxfp4",)
    vllm_names = ("marlin",)
    stock_class = "MarlinExperts"
    place = "marlin"
    limits = Limits(
        capabilities=FROM_SM80,
        # The operator has no instance with e8m0 scales for float16.
        dtypes=("bfloat16",),
        gated=GATED,
        ungated=("silu", "gelu", "gelu_tanh", "relu2"),
        parameters=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=HIDDEN_MULTIPLE,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        lora=True,
        eplb=True,
    )
    rules = (oai_rule(halves_since=since.MARLIN_HALVES), lora_rule(_padded))

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded to whole tiles."""
        return _padded(problem, device)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's place."""
        return mxfp4_place(self.place, problem, device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights; scales of 2**-127 count as zero."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """Nothing: the operator comes compiled."""
        return frozenset()

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, then repacks codes, scales and biases.

        Returns:
            ``w13`` int32 `[H/16, 2 R]`, ``w2`` int32 `[I/16, 2 H]`, their scales float8_e8m0fnu `[H/32, R]` and
            `[I/32, H]`, biases in the model's dtype `[R]` and `[H]`, with the plan's padded sizes.
        """
        import torch

        from ..layouts.pack import pack_nibbles
        from ..layouts.scales import order_bias, order_marlin_mx_scales

        full = padded_expert(expert, problem, plan)
        converted = {}
        for name in ("w13", "w2"):
            converted[name] = pack_nibbles(full[name])
            converted[f"{name}_scale"] = order_marlin_mx_scales(full[f"{name}_scale"]).view(torch.float8_e8m0fnu)
            if f"{name}_bias" in full:
                converted[f"{name}_bias"] = order_bias(full[f"{name}_bias"].to(getattr(torch, problem.dtype)))
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class."""
        experts = builder.stock(self.stock_class, plan=plan)
        # Set from VLLM_MARLIN_INPUT_DTYPE: activations are quantised where the layer's scheme says so, and by no
        # variable.
        experts.input_dtype = None
        return experts


BACKEND = MarlinMxfp4()
