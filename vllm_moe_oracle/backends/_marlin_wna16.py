"""What the two Marlin backends for integer weights share: limits, padding, layout.

vLLM's classes over the operator ``moe_wna16_marlin_gemm``. Its tiles are 64 rows x 128 columns or 128 rows x 64
columns: the hidden size must be a multiple of 128; the intermediate size is zero-padded to a multiple of 64, as stock
does since 0.25.1. How the checkpoint packs its codes is nothing to the operator: MoeWNA16 layers run too, which stock
forbids.

Until vLLM 0.29 the operator reorders input features itself (act order ``group``); later ones cannot.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..compat import since
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import has_group_index, has_order, loaded_group, padded, scale_columns
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._stock import FROM_SM75, GATED, activation_rule, lora_rule

if TYPE_CHECKING:
    from torch import Tensor

    from ..oracle.problem import ActivationFormat

INTERMEDIATE_MULTIPLE = 64


def limits(formats: tuple[ActivationFormat, ...], ungated: tuple[str, ...]) -> Limits:
    """The limits of both, with what is different between them.

    Args:
        formats: how activations are laid out.
        ungated: activations of non-gated experts.
    """
    return Limits(
        capabilities=FROM_SM75,
        dtypes=("bfloat16", "float16"),
        gated=GATED,
        ungated=ungated,
        parameters=True,
        bias=True,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "group", "static"),
        hidden_multiple=128,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        formats=formats,
        lora=formats == ("standard",),
        eplb=True,
    )


def _padded(problem: Problem, device: Device) -> Plan:
    return padded(problem, intermediate_multiple=INTERMEDIATE_MULTIPLE)


RULES = (
    activation_rule(swigluoai_since=since.MARLIN_HALVES),
    lora_rule(_padded),
    Rule(
        "bits.since",
        lambda problem, device: problem.scheme.bits == 8 and not since.reached(since.MARLIN_8_BIT, device),
        lambda problem, device: f"vLLM's class takes 8-bit codes since {since.MARLIN_8_BIT}",
    ),
    Rule(
        "zero_points.bits",
        lambda problem, device: problem.scheme.zero_points and problem.scheme.bits != 4,
        lambda problem, device: (
            f"the operator has zero points for 4-bit codes only, the checkpoint has {problem.scheme.bits}-bit ones"
        ),
    ),
    Rule(
        "act_order.until",
        lambda problem, device: has_order(problem) and since.reached(since.MARLIN_UNORDERED, device),
        lambda problem, device: (
            f"the operator has no act order since vLLM {since.MARLIN_UNORDERED}; codes are stored by group of features"
        ),
        f"vLLM {since.before(since.MARLIN_UNORDERED)}, or a checkpoint that was quantised with static groups",
    ),
    Rule(
        "act_order.zero_points",
        lambda problem, device: has_order(problem) and problem.scheme.zero_points,
        lambda problem, device: "the operator has act order for symmetric codes only",
    ),
    Rule(
        "act_order.groups",
        lambda problem, device: has_order(problem) and not has_group_index(problem) and 1 in scale_columns(problem),
        lambda problem, device: (
            f"the operator has act order for several groups only; {problem.hidden_size} or "
            f"{problem.intermediate_size} features are one group of {problem.scheme.group_size}"
        ),
    ),
)
"""Rules of both."""


class MarlinWna16(Backend):
    """Integer weights through one of vLLM's classes over Marlin."""

    schemes = ("wna16",)
    dense = True
    vllm_names = ("marlin",)
    rules = RULES

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The intermediate size, zero-padded to whole tiles: groups of 128 are whole tiles already, or refused."""
        return _padded(problem, device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """One rounding of a weight: its group scale multiplies in 16 bit."""
        scaled = "scaled there" if problem.scheme.group_size != -1 else "the sums scaled"
        return Numerics(f"codes converted exactly to {problem.dtype}, {scaled}", f"left in {problem.dtype}")

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """Nothing: the operator comes compiled."""
        return frozenset()

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, then repacks codes, scales, zero points and biases.

        Padding is made of scales that are zero: whatever its codes are, the rows give zeros, and the columns, which
        meet only those, add nothing.

        Returns:
            ``w13`` int32 `[H/16, R * bits / 2]`, ``w2`` `[I/16, H * bits / 2]`; their scales in the model's dtype
            `[H/g, R]` and `[I/g, H]`; zero points int32 `[H/g, R/8]` and `[I/g, H/8]`; biases in the model's dtype;
            with act order the input features' order and group, int32 `[H]` and `[I]` each. Sizes are the plan's.
        """
        import torch

        from ..layouts.pack import pack_nibbles, pack_tiles
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import order_bias, order_scales, order_zero_points

        bits, group, dtype = problem.scheme.bits, loaded_group(problem), getattr(torch, problem.dtype)
        inner, halves = plan.intermediate_size, 2 if problem.activation.gated else 1
        groups = expert["w2_scale"].shape[1] if group == -1 or has_group_index(problem) else inner // group
        pack = pack_nibbles if bits == 4 else pack_tiles
        converted = {}
        for name in ("w13", "w2"):
            first = name == "w13"

            def fitted(tensor: Tensor, columns: int, first: bool = first) -> Tensor:
                return pad_rows(tensor, inner, halves) if first else pad_columns(tensor, columns)

            converted[name] = pack(fitted(expert[name], inner * bits // 8))
            scales = fitted(expert[f"{name}_scale"].to(dtype), groups)
            # The operator counts groups: where there is one, it scales sums, whatever the checkpoint calls it.
            converted[f"{name}_scale"] = order_scales(scales, on_sums=scales.shape[1] == 1)
            if problem.scheme.zero_points:
                zeros = fitted(expert[f"{name}_zero_point"], groups)
                converted[f"{name}_zero_point"] = order_zero_points(zeros, bits, marlin=True)
            if problem.has_bias:
                bias = expert[f"{name}_bias"].to(dtype)
                converted[f"{name}_bias"] = order_bias(pad_rows(bias, inner, halves) if first else bias)
            if has_order(problem):
                order = expert[f"{name}_order"]
                index = expert.get(f"{name}_group_index")
                if index is None:
                    index = torch.arange(order.shape[0], dtype=torch.int32, device=order.device) // group
                if not first:
                    # Padded columns come last: their own input features, in groups of their own or in the last one.
                    more = torch.arange(order.shape[0], inner, dtype=torch.int32, device=order.device)
                    places = torch.clamp(more // group, max=groups - 1)
                    order, index = torch.cat((order, more)), torch.cat((index, places))
                converted[f"{name}_order"], converted[f"{name}_group_index"] = order, index
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class. It knows padded sizes by its tensors."""
        experts = builder.stock(self.stock_class, weights=f"int{problem.scheme.bits}", problem=problem, tensors=tensors)
        # Set from VLLM_MARLIN_INPUT_DTYPE, which would quantise activations that the checkpoint leaves alone.
        experts.input_dtype = None
        return experts
