"""vLLM's Triton kernel for integer weights: stock's choice where Marlin cannot, such as zero points of 8-bit codes.

Its class `TritonWNA16Experts` reads codes, scales and zero points nearly as they are. One scale a row is one group that
is larger than any row. The kernel reads 64 columns at a time without asking where a row ends: both sizes must be
multiples of that, and the intermediate size is zero-padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import since
from ..compat.order import wna16_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import loaded_group, padded
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._stock import FROM_SM75, GATED, activation_rule

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 64
"""The most columns of a step of the kernel's loop, in the configurations that vLLM falls back to."""


class TritonWna16(Backend):
    """vLLM's `TritonWNA16Experts` on integer weights."""

    name = "triton_wna16"
    schemes = ("wna16",)
    dense = True
    vllm_names = ("triton",)
    stock_class = "TritonWNA16Experts"
    limits = Limits(
        capabilities=FROM_SM75,
        dtypes=("bfloat16", "float16"),
        gated=tuple(name for name in GATED if name != "situ"),
        ungated=("silu", "gelu", "gelu_tanh", "relu2"),
        parameters=True,
        bias=False,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "static"),
        hidden_multiple=COLUMNS,
        intermediate_multiple=COLUMNS,
        eplb=True,
    )
    rules = (
        activation_rule(swigluoai_since=since.TRITON_WNA16_HALVES),
        Rule(
            "activation.parameters.since",
            lambda problem, device: (
                problem.activation.limit is not None
                and problem.activation.name != "swiglustep"  # has its limit built in
                and not since.reached(since.TRITON_WNA16_LIMIT, device)
            ),
            lambda problem, device: (
                f"passes the limit {problem.activation.limit:g} to its activation since vLLM {since.TRITON_WNA16_LIMIT}"
            ),
        ),
    )

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The intermediate size, zero-padded to whole steps."""
        return padded(problem, intermediate_multiple=COLUMNS)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's, behind Marlin."""
        return wna16_place("triton", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """One rounding of a weight."""
        return Numerics(f"dequantised exactly to float32, rounded to {problem.dtype}", f"left in {problem.dtype}")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, and packs 4-bit zero points of neighbouring rows into bytes.

        Padding is made of scales that are zero: whatever its codes are, the rows give zeros, and the columns, which
        meet only those, add nothing.

        Returns:
            ``w13`` uint8 `[R, H * bits / 8]`, ``w2`` `[H, I * bits / 8]`; their scales in the model's dtype `[R, H/g]`
            and `[H, I/g]`; zero points uint8 `[R * bits / 8, H/g]` and `[H * bits / 8, I/g]`. Sizes are the plan's.
        """
        import torch

        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import pair_rows

        bits, group, dtype = problem.scheme.bits, loaded_group(problem), getattr(torch, problem.dtype)
        inner, halves = plan.intermediate_size, 2 if problem.activation.gated else 1
        groups = 1 if group == -1 else inner // group
        converted = {
            "w13": pad_rows(expert["w13"], inner, halves),
            "w2": pad_columns(expert["w2"], inner * bits // 8),
            "w13_scale": pad_rows(expert["w13_scale"].to(dtype), inner, halves),
            "w2_scale": pad_columns(expert["w2_scale"].to(dtype), groups),
        }
        if problem.scheme.zero_points:
            first = pad_rows(expert["w13_zero_point"], inner, halves)
            second = pad_columns(expert["w2_zero_point"], groups)
            converted["w13_zero_point"] = pair_rows(first) if bits == 4 else first
            converted["w2_zero_point"] = pair_rows(second) if bits == 4 else second
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class. It knows padded sizes by its tensors, and the group from its config."""
        group = loaded_group(problem)
        whole = max(plan.hidden_size, plan.intermediate_size)
        return builder.stock(
            self.stock_class, weights=f"int{problem.scheme.bits}", group=whole if group == -1 else group
        )


BACKEND = TritonWna16()
