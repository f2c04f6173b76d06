"""What the Marlin backends share.

vLLM's classes run the operator ``moe_wna16_marlin_gemm``. Its tiles are 64 rows x 128 columns or 128 rows x 64 columns:
the hidden size must be a multiple of 128 and the intermediate size a multiple of 64. Weights are integers, e2m1 or
e4m3; activations stay in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..core.capabilities import Capabilities
from ..core.decision import ShardPlan
from ..core.problem import Problem
from ._contract import Builder, Tensors
from ._padding import order_rows_for_stock, pad_expert
from ._stock import SM75_DIFFERENCE, StockBackend, StockDifference
from ._stock_rules import FROM_SM80, STOCK_GATED, STOCK_UNGATED

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_MULTIPLE = 128
INTERMEDIATE_MULTIPLE = 64

MX_CAPABILITIES = Capabilities(
    compute_capabilities=FROM_SM80,
    # The operator has no instance with e8m0 scales for float16.
    dtypes=("bfloat16",),
    gated=STOCK_GATED,
    ungated=STOCK_UNGATED,
    activation_params=True,
    bias=True,
    hidden_multiple=HIDDEN_MULTIPLE,
    intermediate_multiple=INTERMEDIATE_MULTIPLE,
    apply_router_weight_on_input=True,
    lora=True,
    eplb=True,
)
"""MXFP8 and MXFP4 layers that the operator supports."""


class MarlinBackend(StockBackend):
    """A backend over one of vLLM's classes over Marlin."""

    vllm_names = ("marlin",)
    stock_kernel = "MARLIN"
    activation_precision = "16bit"
    precompiled = True

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """The same for tokens as they are and for tokens that are sorted by expert."""
        return f"marlin_{problem.scheme.name} {plan.hidden_size}x{plan.intermediate_size}"

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """An instance of the stock class that leaves activations alone."""
        experts = super().build_experts(tensors, problem, plan, builder)
        # The class sets it from VLLM_MARLIN_INPUT_DTYPE, which would quantize activations that the checkpoint does not.
        experts.input_dtype = None
        return experts


class MarlinMxBackend(MarlinBackend):
    """Marlin on e4m3 or e2m1 weights with e8m0 scales per 32."""

    stock_differences: ClassVar[tuple[StockDifference, ...]] = (SM75_DIFFERENCE,)
    capabilities = MX_CAPABILITIES

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, then repacks codes, scales and biases.

        Returns:
            ``w13`` int32 `[H/16, R * bits / 2]`, ``w2`` int32 `[I/16, H * bits / 2]`, their scales float8_e8m0fnu
            `[H/32, R]` and `[I/32, H]`, biases in the model's dtype `[R]` and `[H]`, with the plan's padded sizes.
        """
        import torch

        from ..layouts.mma_tiles import pack_nibbles, pack_tiles
        from ..layouts.scales import permute_bias, permute_marlin_mx_scales

        pack = pack_nibbles if problem.scheme.bits == 4 else pack_tiles
        padded = order_rows_for_stock(pad_expert(expert, problem, plan), problem)
        converted = {}
        for name in ("w13", "w2"):
            converted[name] = pack(padded[name])
            converted[f"{name}_scale"] = permute_marlin_mx_scales(padded[f"{name}_scale"]).view(torch.float8_e8m0fnu)
            if f"{name}_bias" in padded:
                converted[f"{name}_bias"] = permute_bias(padded[f"{name}_bias"].to(getattr(torch, problem.dtype)))
        return converted
