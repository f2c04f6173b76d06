"""vLLM's Triton kernel for integer weights: stock's choice where Marlin cannot, such as zero points of 8-bit codes.

Its class `TritonWNA16Experts` reads codes, scales and zero points nearly as they are. One scale a row is one group that
is larger than any row. The kernel reads 64 columns at a time without asking where a row ends: both sizes must be
multiples of that, and the intermediate size is zero-padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.capabilities import Capabilities
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ..core.sharding import loaded_group_size
from ..releases import min_versions
from ._contract import Tensors
from ._padding import pad_expert
from ._stock import EXPERTS, UNPROVEN_LORA, StockBackend, StockDifference
from ._stock_rules import FROM_SM75, STOCK_GATED, STOCK_UNGATED, activation_rule, limit_rule

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_K = 64
"""The most columns of a step of the kernel's loop, in the configurations that vLLM falls back to."""


class TritonWna16(StockBackend):
    """vLLM's `TritonWNA16Experts` on integer weights."""

    name = "triton_wna16"
    schemes = ("wna16",)
    vllm_names = ("triton",)
    stock_class = f"{EXPERTS}.triton_moe:TritonWNA16Experts"
    stock_kernel = "TRITON"
    stock_differences = (
        UNPROVEN_LORA,
        StockDifference(("sm_70",), "vLLM has no kernels of its own for it"),
        StockDifference(
            ("unlisted",), "vLLM runs the same kernel by a function", before=min_versions.TRITON_WNA16_LISTED
        ),
    )
    static_priority = 40.0
    activation_precision = "16bit"
    arithmetic = Numerics("dequantized exactly to float32, rounded to {dtype}", "left in {dtype}")
    padding = (1, BLOCK_K)
    capabilities = Capabilities(
        compute_capabilities=FROM_SM75,
        dtypes=("bfloat16", "float16"),
        gated=tuple(name for name in STOCK_GATED if name != "situ"),
        ungated=STOCK_UNGATED,
        activation_params=True,
        bias=False,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "static"),
        hidden_multiple=BLOCK_K,
        intermediate_multiple=BLOCK_K,
        apply_router_weight_on_input=True,
        eplb=True,
    )
    rules = (
        activation_rule(swigluoai_since=min_versions.TRITON_WNA16_UNINTERLEAVED),
        limit_rule("activation", min_versions.TRITON_WNA16_LIMIT, built_in=("swiglustep",)),
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads with scales of zero, and packs 4-bit zero points of adjacent rows into bytes.

        Returns:
            ``w13`` uint8 `[R, H * bits / 8]`, ``w2`` `[H, I * bits / 8]`; their scales in the model's dtype `[R, H/g]`
            and `[H, I/g]`; zero points uint8 `[R * bits / 8, H/g]` and `[H * bits / 8, I/g]`. Sizes are the plan's.
        """
        import torch

        from ..layouts.scales import pack_adjacent_rows

        dtype = getattr(torch, problem.dtype)
        converted = {}
        for name, tensor in pad_expert(expert, problem, plan).items():
            if name.endswith("_scale"):
                converted[name] = tensor.to(dtype)
            elif name.endswith("_zero_point") and problem.scheme.bits == 4:
                converted[name] = pack_adjacent_rows(tensor)
            else:
                converted[name] = tensor
        return converted

    def stock_arguments(self, tensors: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Any]:
        """The class reads padded sizes from its tensors and the group size from its config.

        One scale per output row is one group that is larger than any row.
        """
        group = loaded_group_size(problem)
        largest = max(plan.hidden_size, plan.intermediate_size)
        own = {"weights": f"int{problem.scheme.bits}", "group": largest if group == -1 else group}
        return super().stock_arguments(tensors, problem, plan) | own


BACKEND = TritonWna16()
