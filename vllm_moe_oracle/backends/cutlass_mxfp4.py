"""FlashInfer's CUTLASS kernels for MXFP4 with 16-bit activations on sm_90: weights become bfloat16 in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Builder, Tensors
from ._cutlass import MULTIPLE, RULES, CutlassMxfp4, limits, ordered
from ._limits import at_least

if TYPE_CHECKING:
    from torch import Tensor

    from ..layouts.mixed import Generation

_SCATTERED_SINCE = "0.6.18"
"""First FlashInfer whose kernel reads the bits of eight codes scattered, and folded scales."""


class CutlassMxfp4Bf16(CutlassMxfp4):
    """vLLM's `FlashInferExperts` on 16-bit activations."""

    name = "cutlass_mxfp4"
    place = "cutlass_bf16"
    limits = limits(((90, 91),))
    rules = RULES

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded to multiples of 128, and the order that the installed FlashInfer reads."""
        sizes = padded(problem, MULTIPLE, MULTIPLE)
        new = at_least(device.packages.get("flashinfer-python", _SCATTERED_SINCE), _SCATTERED_SINCE)
        return Plan(sizes.hidden_size, sizes.intermediate_size, sizes.notes, "scattered" if new else "woven")

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, puts up before gate, weaves codes and scales.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w2`` `[H, I/2]`, their scales uint8 `[2 I/64, H/128, 16, 16]` and
            `[H/64, I/128, 16, 16]` (before FlashInfer 0.6.18 `[H/128, 8 I]` and `[I/128, 4 H]`), biases bfloat16
            `[2 I]` and `[H]`, with the plan's padded sizes.
        """
        from ..layouts.mixed import weave_codes, weave_scales

        converted = ordered(expert, problem, plan)
        order: Generation = "woven" if plan.layout == "woven" else "scattered"
        for name in ("w13", "w2"):
            converted[name] = weave_codes(converted[name], order)
            converted[f"{name}_scale"] = weave_scales(converted[f"{name}_scale"], order)
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class."""
        return builder.stock(self.stock_class, plan=plan)


BACKEND = CutlassMxfp4Bf16()
