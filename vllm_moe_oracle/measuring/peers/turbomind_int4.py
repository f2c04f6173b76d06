"""TurboMind's kernels for Hopper with 4-bit integer weights (``lmdeploy`` 0.18.0); `_turbomind` says how it is called.

Groups of 64 and 128 become groups of 32, for which its kernels are made, when weights are packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...backends import Tensors
from ...core.capabilities import Capabilities
from ...core.decision import Numerics, ShardPlan
from ...core.problem import Problem
from ._turbomind import SUMS, TOP_K_RULE, TurboMindBackend, minimum_rule

if TYPE_CHECKING:
    from torch import Tensor


class TurboMindInt4(TurboMindBackend):
    """Weight-only, with or without zero points."""

    name = "peer:turbomind_int4"
    schemes = ("wna16",)
    static_priority = 9003.0
    activation_precision = "16bit"
    arithmetic = Numerics("integer codes scaled in {dtype}, with scales in {dtype}", "left in {dtype}", SUMS)
    capabilities = Capabilities(
        compute_capabilities=((90, 100),),
        dtypes=("bfloat16", "float16"),
        bits=(4,),
        groups=(32, 64, 128),
        zero_points=True,
        hidden_multiple=64,
        intermediate_multiple=64,
    )
    rules = (minimum_rule(128), TOP_K_RULE)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The canonical tensors, with scales in the model's dtype.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w13_scale`` `[2 I, H/g]`, maybe ``w13_zero_point`` uint8 of the same shape;
            ``w2`` `[H, I/2]` and so on.
        """
        import torch

        dtype = getattr(torch, problem.dtype)
        return {name: each.to(dtype) if name.endswith("_scale") else each.clone() for name, each in expert.items()}

    def weight_format(self, problem: Problem) -> Any:
        """The packing of compressed-tensors, which has words of eight input features like the canonical codes."""
        formats: Any = self.module("turbomind.weight_format")
        return formats.CompressedTensorFormat(block_in=problem.scheme.group_size)

    def sources(self, tensors: Tensors, name: str, problem: Problem) -> dict[str, Tensor]:
        """Codes int32 `[E, rows, columns/8]`, scales and zero points `[E, rows, columns/g]`; 8 is the default."""
        import torch

        found = {"weight": tensors[name].view(torch.int32), "scales": tensors[f"{name}_scale"]}
        if (zeros := tensors.get(f"{name}_zero_point")) is not None:
            found["zeros"] = zeros
        return found


PEERS = (TurboMindInt4,)
