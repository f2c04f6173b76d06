"""FlashInfer's TRTLLM-gen kernels for int4 weights in groups of 32 on sm_100 and sm_103, routing included.

vLLM's class `TrtLlmMxint4ExpertsMonolithic`. Stock vLLM takes it first of all, but only where the environment asks for
it (``VLLM_USE_FLASHINFER_MOE_INT4=1``): here its place is behind the kernels that stock takes by itself. The class
claims SwiGLU with parameters and passes none; the kernel multiplies by SiLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import wna16_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._stock import activation_rule
from ._trtllm import EVEN_SPLIT, EXPERTS_MULTIPLE, IN_ORDER, MAX_TOP_K, MORE_EXPERTS_THAN_TOP_K

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLE = 256
"""Of both sizes: codes are stored in blocks of 128 bytes."""
_BLOCK_BYTES = 128

_SIGNS = 0x88
"""What makes two unsigned codes with zero at 8 two in two's complement."""


class TrtllmMxint4(Backend):
    """vLLM's `TrtLlmMxint4ExpertsMonolithic`."""

    name = "trtllm_mxint4"
    schemes = ("wna16",)
    dense = True
    vllm_names = ("flashinfer_trtllm",)
    stock_class = "TrtLlmMxint4ExpertsMonolithic"
    monolithic = True
    limits = Limits(
        capabilities=((100, 110),),
        packages={"flashinfer-python": "", "vllm": since.TRTLLM_MXINT4_SILU},
        dtypes=("bfloat16",),
        gated=("silu",),
        parameters=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        act_orders=("none", "static"),
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
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
        Rule(
            "routing.hashed",
            lambda problem, device: problem.routing.hashed,
            lambda problem, device: "has no routing by token ids, the layer routes by a table over them",
        ),
        EVEN_SPLIT,
        IN_ORDER,
        MORE_EXPERTS_THAN_TOP_K,
    )

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded to whole blocks."""
        return padded(problem, MULTIPLE, MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Behind what stock takes by itself."""
        return wna16_place("trtllm_monolithic", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """One rounding of a weight."""
        return Numerics("converted exactly to bfloat16, scaled there", "left in bfloat16")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads with codes of zero, makes codes signed, swaps and alternates gate and up, shuffles rows, tiles scales.

        Returns:
            ``w13`` uint8 `[H/256, R, 128]` and ``w2`` `[I/256, H, 128]`, two codes a byte in two's complement; their
            scales bfloat16 `[R * H/32]` and `[H * I/32]`, in tiles. Sizes are the plan's.
        """
        import torch

        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.rows import alternate_halves, block_columns, shuffle_rows, swap_halves
        from ..layouts.scales import tile_scales

        hidden, inner = plan.hidden_size, plan.intermediate_size
        full = {
            "w13": pad_rows(pad_columns(expert["w13"], hidden // 2, _SIGNS), inner, 2, _SIGNS) ^ _SIGNS,
            "w2": pad_rows(pad_columns(expert["w2"], inner // 2, _SIGNS), hidden, value=_SIGNS) ^ _SIGNS,
            "w13_scale": pad_rows(pad_columns(expert["w13_scale"], hidden // MX_BLOCK), inner, 2),
            "w2_scale": pad_rows(pad_columns(expert["w2_scale"], inner // MX_BLOCK), hidden),
        }
        converted = {}
        for name, tensor in full.items():
            # The kernel's first half is up, its second gate.
            ordered = shuffle_rows(alternate_halves(swap_halves(tensor)) if name.startswith("w13") else tensor)
            if name.endswith("_scale"):
                converted[name] = tile_scales(ordered.to(torch.bfloat16)).flatten()
            else:
                converted[name] = block_columns(ordered, _BLOCK_BYTES)
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class, which takes the sizes from vLLM's config."""
        return builder.stock(self.stock_class, plan=plan)


BACKEND = TrtllmMxint4()
