"""vLLM's operator for int4 experts on x86 CPUs, which multiplies int8 activations by int4 weights.

The stock class demands AMX. The operator does not need it: vLLM's library for AVX-512 with bfloat16 has it, and the
self-check proves it on the machine. All packings are supported, also MoeWNA16's, which the stock class refuses. One
scale for a whole row of more than 128 columns is rejected: the operator then has an error of 50 %.

Activations are quantized to int8 with one scale a token. No such checkpoint declares that, so the backend runs only
where the user allows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.capabilities import Capabilities
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ..core.sharding import loaded_group_size
from ..releases import min_versions
from ._contract import Tensors
from ._stock import EXPERTS, UNPROVEN_EPLB, StockBackend, StockDifference

if TYPE_CHECKING:
    from torch import Tensor

_ZERO_CODE = 8
"""The code of zero in every symmetric int4 format."""


class CpuInt4(StockBackend):
    """vLLM's `CPUExpertsInt4`."""

    name = "cpu_int4"
    schemes = ("wna16",)
    stock_class = f"{EXPERTS}.cpu_moe:CPUExpertsInt4"
    stock_kernel = "CPU"
    stock_differences = (
        UNPROVEN_EPLB,
        StockDifference(("gelu_tanh",), "nobody measured it, and the operator is not told"),
        StockDifference((), "the class routes tokens itself", before=min_versions.CPU_INT4_ROUTED_IDS),
    )
    static_priority = 80.0
    activation_precision = "int8"
    arithmetic = Numerics("int4 in integer products", "quantized to int8 per token, in both products")
    check_stock_class = False
    capabilities = Capabilities(
        devices=("cpu",),
        # vLLM loads the library that has the operator on CPUs with both.
        features=("avx512f", "avx512_bf16"),
        packages={"vllm": min_versions.CPU_INT4_ROUTED_IDS},
        dtypes=("bfloat16", "float16"),
        gated=("silu",),
        bits=(4,),
        groups=(32, 64, 128),
        act_orders=("none", "static"),
        hidden_multiple=32,
        intermediate_multiple=32,
        apply_router_weight_on_input=True,
        expert_parallel=False,
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Orders codes and scales in blocks of 32 rows.

        Returns:
            ``w13`` uint8 `[R/32, H/g, 16 g + 128]`, its scales float32 `[R/32, H/g, 32]` and its zero points, which
            are all 8, int8 of the same shape; the same of ``w2``.
        """
        import torch

        from ..layouts.cpu_int4 import block_scales, pack_blocks

        converted = {}
        for name in ("w13", "w2"):
            scales = block_scales(expert[f"{name}_scale"].to(torch.float32))
            converted[name] = pack_blocks(expert[name], loaded_group_size(problem))
            converted[f"{name}_scale"] = scales
            converted[f"{name}_zero_point"] = torch.full_like(scales, _ZERO_CODE, dtype=torch.int8)
        return converted


BACKEND = CpuInt4()
