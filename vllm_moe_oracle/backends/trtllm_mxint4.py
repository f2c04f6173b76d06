"""FlashInfer's TRTLLM-gen kernels for int4 weights in groups of 32 on sm_100 and sm_103, routing included.

vLLM's class `TrtLlmMxint4ExpertsMonolithic`. It comes first in vLLM's list, but only with
``VLLM_USE_FLASHINFER_MOE_INT4=1``: here it comes behind the kernels that vLLM takes by default. The class claims SwiGLU
with parameters but passes none; the kernel multiplies by SiLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import MX_BLOCK, Problem
from ..releases import min_versions
from ._contract import Tensors
from ._flashinfer_trtllm import (
    EVEN_SPLIT_RULE,
    EXPERTS_MULTIPLE,
    LINEAR_PLACEMENT_RULE,
    MAX_TOP_K,
    TOP_K_BELOW_EXPERTS_RULE,
)
from ._padding import pad_expert
from ._stock import EXPERTS, StockBackend, StockDifference
from ._stock_rules import HASHED_ROUTING_RULE, activation_rule

if TYPE_CHECKING:
    from torch import Tensor

SIZE_MULTIPLE = 256
"""Hidden and intermediate size must be multiples of it: codes are stored in blocks of 128 bytes."""
_BLOCK_BYTES = 128

_SIGN_BITS = 0x88
"""XOR of a byte of two unsigned codes (zero at 8) with this gives two codes in two's complement."""


class TrtllmMxint4(StockBackend):
    """vLLM's `TrtLlmMxint4ExpertsMonolithic`."""

    name = "trtllm_mxint4"
    schemes = ("wna16",)
    vllm_names = ("flashinfer_trtllm",)
    stock_class = f"{EXPERTS}.trtllm_mxint4_moe:TrtLlmMxint4ExpertsMonolithic"
    stock_weight_key = "kInt4Static32"
    stock_kernel = "FLASHINFER_TRTLLM"
    stock_differences = (
        StockDifference(("llama4",), "its routing multiplies the input, which the class passes nobody"),
        StockDifference((), "the class claims no activation", before=min_versions.TRTLLM_MXINT4_SILU),
    )
    static_priority = 70.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in bfloat16")
    padding = (SIZE_MULTIPLE, SIZE_MULTIPLE)
    padded_layer = True
    monolithic = True
    capabilities = Capabilities(
        compute_capabilities=((100, 110),),
        packages={"flashinfer-python": "", "vllm": min_versions.TRTLLM_MXINT4_SILU},
        dtypes=("bfloat16",),
        gated=("silu",),
        activation_params=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        act_orders=("none", "static"),
        hidden_multiple=SIZE_MULTIPLE,
        intermediate_multiple=SIZE_MULTIPLE,
        experts_multiple=EXPERTS_MULTIPLE,
        max_top_k=MAX_TOP_K,
        routing_methods=("renormalize", "renormalizenaive", "deepseekv3"),
    )
    rules = (
        activation_rule(),
        Rule(
            "activation.limit",
            lambda problem, device: problem.activation.limit is not None,
            lambda problem, device: f"passes no limit to its kernel, the layer has {problem.activation}",
        ),
        HASHED_ROUTING_RULE,
        EVEN_SPLIT_RULE,
        LINEAR_PLACEMENT_RULE,
        TOP_K_BELOW_EXPERTS_RULE,
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads with codes of zero, makes codes signed, swaps and alternates gate and up, shuffles rows, tiles scales.

        Returns:
            ``w13`` uint8 `[H/256, R, 128]` and ``w2`` `[I/256, H, 128]`, two codes a byte in two's complement; their
            scales bfloat16 `[R * H/32]` and `[H * I/32]`, in tiles. Sizes are the plan's.
        """
        import torch

        from ..layouts.gate_up import interleave_gate_up, swap_gate_up
        from ..layouts.scales import swizzle_scales
        from ..layouts.trtllm import shuffle_rows, to_block_layout

        converted = {}
        for name, tensor in pad_expert(expert, problem, plan, code=_SIGN_BITS).items():
            # The kernel's first half is up and its second half gate.
            rows = shuffle_rows(interleave_gate_up(swap_gate_up(tensor)) if name.startswith("w13") else tensor)
            if name.endswith("_scale"):
                converted[name] = swizzle_scales(rows.to(torch.bfloat16)).flatten()
            else:
                converted[name] = to_block_layout(rows ^ _SIGN_BITS, _BLOCK_BYTES)
        return converted


BACKEND = TrtllmMxint4()
