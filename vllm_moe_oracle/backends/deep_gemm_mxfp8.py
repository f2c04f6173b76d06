"""DeepGEMM for MXFP8 on sm_100 and sm_103: vLLM's class `DeepGemmExperts` with the recipe 1 x 32.

Codes stay as they are; scales are packed four to a word, rows next to each other in memory. The intermediate size is
zero-padded so that every word is whole; the hidden size must be a multiple of 128 for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp8_place
from ..errors import OracleError
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits
from ._stock import activation_rule

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLE = 128
ONE = 127


class DeepGemmMxfp8(Backend):
    """vLLM's DeepGEMM experts on MXFP8 weights and activations."""

    name = "deep_gemm_mxfp8"
    schemes = ("mxfp8",)
    vllm_names = ("deep_gemm",)
    stock_class = "DeepGemmExperts"
    limits = Limits(
        capabilities=((100, 110),),
        packages={"vllm": since.DEEP_GEMM_MXFP8},
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        parameters=True,
        bits=(8,),
        groups=(MX_BLOCK,),
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
        weight_on_input=True,
        eplb=True,
    )
    rules = (activation_rule(swigluoai_since=since.DEEP_GEMM_MXFP8),)

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The intermediate size, zero-padded to whole words of scales."""
        return padded(problem, intermediate_multiple=MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's second, behind TRTLLM-gen."""
        return mxfp8_place("deep_gemm", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """MXFP8 in both products."""
        return "mxfp8"

    def numerics(self, problem: Problem) -> Numerics:
        """Block-scaled tensor cores."""
        return Numerics("MXFP8, in block-scaled tensor cores", "quantised to MXFP8 per token, in both products")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, and packs scales.

        Returns:
            ``w13`` float8_e4m3fn `[R, H]`, ``w2`` `[H, I]`, their scales int32 `[H/128, R]` and `[I/128, H]`, with the
            plan's padded intermediate size.
        """
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import pack_scales

        inner, halves = plan.intermediate_size, 2 if problem.activation.gated else 1
        return {
            "w13": pad_rows(expert["w13"], inner, halves),
            "w13_scale": pack_scales(pad_rows(expert["w13_scale"], inner, halves, ONE)),
            "w2": pad_columns(expert["w2"], inner),
            "w2_scale": pack_scales(pad_columns(expert["w2_scale"], inner // MX_BLOCK, ONE)),
        }

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class. It takes scales with rows first: the transposes of what is stored.

        Raises:
            OracleError: vLLM was told to give DeepGEMM float32 scales, which its MXFP8 kernels do not take.
        """
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        if not is_deep_gemm_e8m0_used():
            raise OracleError("DeepGEMM's e8m0 scales are switched off", "Unset VLLM_USE_DEEP_GEMM_E8M0", problem.layer)
        scales = tuple(tensors[name].transpose(-1, -2) for name in ("w13_scale", "w2_scale"))
        return builder.stock(self.stock_class, inputs="mxfp8", scales=scales)


BACKEND = DeepGemmMxfp8()
