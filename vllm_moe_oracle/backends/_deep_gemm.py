"""What the two DeepGEMM backends share.

Codes stay as they are. Scales are packed four to a word, rows next to each other in memory. The intermediate size is
zero-padded so that every word is whole; the kernel needs the hidden size in multiples of 128 for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..core.decision import ShardPlan
from ..core.problem import E8M0_BIAS, Problem
from ..errors import OracleError
from ._contract import Builder, Tensors
from ._padding import pad_expert
from ._stock import StockBackend, StockDifference

if TYPE_CHECKING:
    from torch import Tensor

SIZE_MULTIPLE = 128

ACTIVATED_APART = "activated apart and rounded once more, which nobody has run"
"""Why activations are refused that the classes claim."""


class DeepGemmBackend(StockBackend):
    """A backend over one of vLLM's DeepGEMM classes."""

    vllm_names = ("deep_gemm",)
    stock_differences: ClassVar[tuple[StockDifference, ...]] = (StockDifference(("swiglustep",), ACTIVATED_APART),)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, and packs scales.

        Returns:
            ``w13`` `[R, H * bits / 8]` and ``w2`` `[H, I * bits / 8]` in their own dtype, their scales int32 `[H/128,
            R]` and `[I/128, H]`, with the plan's padded sizes.
        """
        from ..layouts.scales import pack_ue8m0_scales

        padded = pad_expert(expert, problem, plan, scale=E8M0_BIAS)
        return {name: pack_ue8m0_scales(each) if name.endswith("_scale") else each for name, each in padded.items()}

    def stock_arguments(self, tensors: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Any]:
        """The class takes scales with rows first: transposes of the stored ones."""
        scales = tuple(tensors[name].transpose(-1, -2) for name in ("w13_scale", "w2_scale"))
        return super().stock_arguments(tensors, problem, plan) | {"scales": scales}

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """An instance of the stock class.

        Raises:
            OracleError: vLLM was told to give DeepGEMM float32 scales, which its kernels for MX formats do not take.
        """
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        if not is_deep_gemm_e8m0_used():
            raise OracleError("DeepGEMM's e8m0 scales are switched off", "Unset VLLM_USE_DEEP_GEMM_E8M0", problem.layer)
        return super().build_experts(tensors, problem, plan, builder)
