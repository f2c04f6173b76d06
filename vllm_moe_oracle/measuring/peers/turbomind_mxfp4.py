"""TurboMind's kernels for Hopper with MXFP4 weights (``lmdeploy`` 0.18.0); `_turbomind` says how it is called.

One leaves activations in bfloat16. The other, which the engine takes with ``gemm_input_dtype="float8_e4m3"``, quantizes
a layer's input to fp8 with a scale for each 128 columns, and the activation's results in the first product's epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...backends import Tensors
from ...core.capabilities import Capabilities
from ...core.decision import Numerics, ShardPlan
from ...core.problem import MX_BLOCK, Problem
from ._turbomind import SUMS, TOP_K_RULE, TurboMindBackend, minimum_rule

if TYPE_CHECKING:
    from torch import Tensor


def _capabilities(multiple: int) -> Capabilities:
    return Capabilities(
        compute_capabilities=((90, 100),),
        dtypes=("bfloat16",),
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=multiple,
        intermediate_multiple=multiple,
    )


class _TurboMindMxfp4(TurboMindBackend):
    """What both have in common."""

    schemes = ("mxfp4",)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The canonical tensors.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w13_scale`` uint8 `[2 I, H/32]`, ``w2`` `[H, I/2]`, ``w2_scale`` `[H, I/32]`.
        """
        return {name: each.clone() for name, each in expert.items()}

    def weight_format(self, problem: Problem) -> Any:
        """The package's only format of MXFP4, gpt-oss's."""
        formats: Any = self.module("turbomind.weight_format")
        return formats.MXFP4Format()

    def sources(self, tensors: Tensors, name: str, problem: Problem) -> dict[str, Tensor]:
        """Codes uint8 `[E, rows, columns/32, 16]` and scales uint8 `[E, rows, columns/32]`."""
        codes, scales = tensors[name], tensors[f"{name}_scale"]
        return {"weight": codes.view(*scales.shape, MX_BLOCK // 2), "scales": scales}


class TurboMindMxfp4(_TurboMindMxfp4):
    """Activations in bfloat16."""

    name = "peer:turbomind"
    static_priority = 9004.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}", SUMS)
    capabilities = _capabilities(64)
    rules = (minimum_rule(128), TOP_K_RULE)


class TurboMindMxfp4Fp8(_TurboMindMxfp4):
    """Activations in fp8."""

    name = "peer:turbomind_a8"
    static_priority = 9005.0
    activation_precision = "fp8"
    arithmetic = Numerics(
        "converted to fp8 with a part of their scales", "quantized to fp8 (E4M3), one scale per 128", SUMS
    )
    capabilities = _capabilities(128)
    rules = (minimum_rule(256), TOP_K_RULE)
    input_dtype = "float8_e4m3fn"


PEERS = (TurboMindMxfp4, TurboMindMxfp4Fp8)
