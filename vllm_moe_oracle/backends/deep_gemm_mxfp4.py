"""DeepGEMM's FP8 x FP4 kernels for MXFP4 on sm_100 and sm_120: vLLM's class `DeepGemmFP4Experts`.

Activations are e4m3 with one scale per 128. Codes stay as they are; scales are packed four to a word, rows next to each
other in memory. Both sizes are zero-padded to multiples of 128, as in stock vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import mxfp4_place
from ..errors import OracleError
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLE = 128
ONE = 127


class DeepGemmMxfp4(Backend):
    """vLLM's DeepGEMM experts on MXFP4 weights and 8-bit activations."""

    name = "deep_gemm_mxfp4"
    schemes = ("mxfp4",)
    vllm_names = ("deep_gemm",)
    stock_class = "DeepGemmFP4Experts"
    limits = Limits(
        capabilities=((100, 110), (120, 130)),
        packages={"vllm": since.DEEP_GEMM_MXFP4_PACKED},
        dtypes=("bfloat16",),
        gated=("silu",),
        # Only the limit reaches the kernel; the rule below refuses alpha and beta.
        parameters=True,
        # The class adds no biases.
        bias=False,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
    )
    rules = (
        Rule(
            "activation.parameters",
            lambda problem, device: (
                problem.activation.alpha not in (None, 1.0) or problem.activation.beta not in (None, 0.0)
            ),
            lambda problem, device: f"uses alpha 1 and beta 0 for silu, the layer has {problem.activation}",
        ),
    )

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded to multiples of 128."""
        return padded(problem, MULTIPLE, MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's second for models other than gpt-oss, behind TRTLLM-gen."""
        return mxfp4_place("deep_gemm", problem, device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """e4m3 with one scale per 128, in both products."""
        return "fp8"

    def numerics(self, problem: Problem) -> Numerics:
        """Block-scaled tensor cores."""
        return Numerics(
            "MXFP4, in block-scaled tensor cores", "quantised to e4m3 with one scale per 128, in both products"
        )

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, and packs scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales int32 `[H/128, 2 I]` and `[I/128, H]`, with the
            plan's padded sizes.
        """
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import pack_scales

        hidden, inner = plan.hidden_size, plan.intermediate_size
        return {
            "w13": pad_rows(pad_columns(expert["w13"], hidden // 2), inner, 2),
            "w13_scale": pack_scales(
                pad_rows(pad_columns(expert["w13_scale"], hidden // MX_BLOCK, ONE), inner, 2, ONE)
            ),
            "w2": pad_rows(pad_columns(expert["w2"], inner // 2), hidden),
            "w2_scale": pack_scales(
                pad_rows(pad_columns(expert["w2_scale"], inner // MX_BLOCK, ONE), hidden, value=ONE)
            ),
        }

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class. It takes scales with rows first: the transposes of what is stored.

        Raises:
            OracleError: vLLM was told to give DeepGEMM float32 scales, which its FP4 kernels do not take.
        """
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        if not is_deep_gemm_e8m0_used():
            raise OracleError("DeepGEMM's e8m0 scales are switched off", "Unset VLLM_USE_DEEP_GEMM_E8M0", problem.layer)
        scales = tuple(tensors[name].transpose(-1, -2) for name in ("w13_scale", "w2_scale"))
        return builder.stock(self.stock_class, inputs="fp8_block128", plan=plan, scales=scales)


BACKEND = DeepGemmMxfp4()
