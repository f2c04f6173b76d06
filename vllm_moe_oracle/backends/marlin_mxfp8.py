"""Marlin for MXFP8: weight-only, on every CUDA device that knows bfloat16.

vLLM's class `MarlinExperts` over the operator ``moe_wna16_marlin_gemm``, whose weights are e4m3 with e8m0 scales per 32
when the scales come as float8_e8m0fnu. Its tiles are 64 rows x 128 columns or 128 rows x 64 columns: the hidden size
must be a multiple of 128; the intermediate size is zero-padded to a multiple of 64, as stock does since 0.25.1.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp8_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits
from ._stock import FROM_SM80, GATED, activation_rule, lora_rule

if TYPE_CHECKING:
    from torch import Tensor

INTERMEDIATE_MULTIPLE = 64


def _padded(problem: Problem, device: Device) -> Plan:
    return padded(problem, intermediate_multiple=INTERMEDIATE_MULTIPLE)


class MarlinMxfp8(Backend):
    """vLLM's Marlin experts on MXFP8 weights."""

    name = "marlin_mxfp8"
    schemes = ("mxfp8",)
    vllm_names = ("marlin",)
    stock_class = "MarlinExperts"
    limits = Limits(
        capabilities=FROM_SM80,
        # The operator has no instance with e8m0 scales for float16.
        dtypes=("bfloat16",),
        gated=GATED,
        ungated=("silu", "gelu", "gelu_tanh", "relu2"),
        parameters=True,
        bias=True,
        bits=(8,),
        groups=(MX_BLOCK,),
        hidden_multiple=128,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        lora=True,
        eplb=True,
    )
    rules = (activation_rule(swigluoai_since=since.MARLIN_HALVES), lora_rule(_padded))

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The intermediate size, zero-padded to whole tiles."""
        return _padded(problem, device)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's third; fourth on sm_90."""
        return mxfp8_place("marlin", device)

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
            ``w13`` int32 `[H/16, 4 R]`, ``w2`` int32 `[I/16, 4 H]`, their scales float8_e8m0fnu `[H/32, R]` and
            `[I/32, H]`, biases in the model's dtype `[R]` and `[H]`, with the plan's padded sizes.
        """
        import torch

        from ..layouts.pack import pack_tiles
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import order_bias, order_marlin_mx_scales

        halves = 2 if problem.activation.gated else 1
        inner = plan.intermediate_size
        full = {
            "w13": pad_rows(expert["w13"], inner, halves),
            "w2": pad_columns(expert["w2"], inner),
            "w13_scale": pad_rows(expert["w13_scale"], inner, halves),
            "w2_scale": pad_columns(expert["w2_scale"], inner // MX_BLOCK),
        }
        converted = {}
        for name in ("w13", "w2"):
            converted[name] = pack_tiles(full[name])
            converted[f"{name}_scale"] = order_marlin_mx_scales(full[f"{name}_scale"]).view(torch.float8_e8m0fnu)
        if "w13_bias" in expert:
            dtype = getattr(torch, problem.dtype)
            converted["w13_bias"] = order_bias(pad_rows(expert["w13_bias"].to(dtype), inner, halves))
            converted["w2_bias"] = order_bias(expert["w2_bias"].to(dtype))
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class, told that weights are 8-bit floats: that is how it knows the operator's weight type."""
        experts = builder.stock(self.stock_class, weights="fp8")
        # Set from VLLM_MARLIN_INPUT_DTYPE, which is for integer weights: the operator has no such instance here.
        experts.input_dtype = None
        return experts


BACKEND = MarlinMxfp8()
