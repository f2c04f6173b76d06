"""vLLM's operator for int4 experts on x86 CPUs, which multiplies int8 activations by int4 weights.

Stock's class asks for AMX; the operator does not need it, and is in vLLM's library for AVX-512 with bfloat16. That
this is so on the machine at hand is proven by the self-check. Stock feeds it all packings but MoeWNA16's; here every
one is converted. Where the operator is wrong it is refused: one scale for a whole row of more than one block of 128
columns gave an error of 50 %.

It quantises activations to int8, one scale a token: another precision than any such checkpoint declares, so it runs
only where the user allows that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import wna16_place
from ..oracle.decision import Numerics
from ..oracle.planner import loaded_group
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits

if TYPE_CHECKING:
    from torch import Tensor

_MIDDLE = 8
"""The code of zero in every symmetric int4 format."""


class CpuInt4(Backend):
    """vLLM's `CPUExpertsInt4`."""

    name = "cpu_int4"
    schemes = ("wna16",)
    dense = True
    stock_class = "CPUExpertsInt4"
    asks_stock = False
    limits = Limits(
        devices=("cpu",),
        # vLLM loads the library that has the operator where both are there.
        features=("avx512f", "avx512_bf16"),
        packages={"vllm": since.CPU_INT4_ROUTED},
        dtypes=("bfloat16", "float16"),
        gated=("silu",),
        bits=(4,),
        groups=(32, 64, 128),
        act_orders=("none", "static"),
        hidden_multiple=32,
        intermediate_multiple=32,
        expert_parallel=False,
    )

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's first on a CPU with AMX."""
        return wna16_place("cpu", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """One scale a token."""
        return "int8"

    def numerics(self, problem: Problem) -> Numerics:
        """Integer products, scaled per group."""
        return Numerics("int4 in integer products", "quantised to int8 per token, in both products")

    def convert(self, expert: Tensors, problem: Problem, plan: Any) -> dict[str, Tensor]:
        """Orders codes and scales in blocks of 32 rows.

        Returns:
            ``w13`` uint8 `[R/32, H/g, 16 g + 128]`, its scales float32 `[R/32, H/g, 32]` and its zero points, which
            are all 8, int8 of the same shape; the same of ``w2``.
        """
        import torch

        from ..layouts.blocks import block_scales, pack_blocks

        converted = {}
        for name in ("w13", "w2"):
            scales = block_scales(expert[f"{name}_scale"].to(torch.float32))
            converted[name] = pack_blocks(expert[name], loaded_group(problem))
            converted[f"{name}_scale"] = scales
            converted[f"{name}_zero_point"] = torch.full_like(scales, _MIDDLE, dtype=torch.int8)
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Any, builder: Builder) -> Any:
        """The stock class."""
        return builder.stock(self.stock_class)


BACKEND = CpuInt4()
