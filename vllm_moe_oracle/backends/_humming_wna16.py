"""What the Humming backends for integer weights share: limits, layout, and how vLLM's classes are made.

Codes, scales and zero points are those of the package humming-kernels for unsigned integers and 16-bit activations. It
pads rows to a multiple of 256 and columns to one of 128, at the end of the matrix and not of its halves, with scales of
zero, and knows the unpadded sizes: nobody outside sees padded ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compat import since
from ..compat.order import wna16_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import loaded_group, round_up
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._humming import COLUMN_MULTIPLE, ROW_MULTIPLE, RULES, all_at_once, built, code_order, sums
from ._limits import Limits, Rule
from ._stock import FROM_SM75

if TYPE_CHECKING:
    from torch import Tensor


class HummingWna16(Backend):
    """Integer weights through one of vLLM's classes over Humming.

    Attributes:
        kind: ``indexed`` or ``grouped``: how the kernel finds a token's rows.
    """

    kind = "indexed"
    schemes = ("wna16",)
    dense = True
    vllm_names = ("humming",)
    limits = Limits(
        capabilities=FROM_SM75,
        packages={"humming-kernels": "0.1.10", "vllm": since.HUMMING},
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        ungated=("silu", "gelu", "gelu_tanh", "relu2"),
        parameters=True,
        bias=True,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "static"),
        eplb=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The problem's own sizes: the kernels know what their tensors are padded with."""
        return Plan(problem.hidden_size, problem.intermediate_size, layout=code_order(device))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Directly before Marlin on sm_90, behind vLLM's Triton kernel elsewhere, as in stock."""
        return wna16_place("humming" if self.kind == "indexed" else "humming_grouped", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """One rounding of a weight: its group scale multiplies in 16 bit."""
        scaled = "scaled there" if problem.scheme.group_size != -1 else "the sums scaled"
        weights = f"codes converted exactly to {problem.dtype}, {scaled}"
        return Numerics(weights, f"left in {problem.dtype}", sums(problem))

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """All that any number of tokens needs, with the first call."""
        return all_at_once(self.name, problem)

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads and orders codes, scales, zero points and biases.

        Returns:
            ``w13`` int32 `[K/16, N * bits / 2]`, ``w13_scale`` `[K/g, N]` and ``w13_bias`` `[N]` in the model's dtype,
            ``w13_zero_point`` int32 `[K/g, N * bits / 32]`, and the same of ``w2``, with N and K padded.
        """
        import torch

        from ..layouts.pack import distances, pack_nibbles, pack_tiles
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import order_bias, order_scales, order_zero_points

        bits, group, dtype = problem.scheme.bits, loaded_group(problem), getattr(torch, problem.dtype)
        order: Literal["interleaved", "transposed"] = "transposed" if plan.layout == "transposed" else "interleaved"
        converted = {}
        for name in ("w13", "w2"):
            rows = round_up(expert[name].shape[0], ROW_MULTIPLE)
            columns = round_up(expert[name].shape[1] * 8 // bits, COLUMN_MULTIPLE)
            groups = 1 if group == -1 else columns // group
            codes = pad_rows(pad_columns(expert[name], columns * bits // 8), rows)
            scales = pad_rows(pad_columns(expert[f"{name}_scale"].to(dtype), groups), rows)
            zeros = None
            if problem.scheme.zero_points:
                zeros = pad_rows(pad_columns(expert[f"{name}_zero_point"], groups), rows)
                converted[f"{name}_zero_point"] = order_zero_points(zeros, bits, marlin=False)
            if bits == 8 and problem.dtype == "bfloat16":
                # Bytes reach bfloat16 by way of numbers that have no room for a sign.
                codes = distances(codes, zeros)
            converted[name] = pack_nibbles(codes, order) if bits == 4 else pack_tiles(codes, order)
            # The library is told the group: where it is all of the columns, codes are scaled none the less.
            converted[f"{name}_scale"] = order_scales(scales, on_sums=group == -1)
            if problem.has_bias:
                converted[f"{name}_bias"] = order_bias(pad_rows(expert[f"{name}_bias"].to(dtype), rows))
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class, with the library's description of both matrices, and sums of few parts."""
        return built(self, tensors, problem, builder)
