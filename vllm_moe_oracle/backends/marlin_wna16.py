"""Marlin for integer weights: vLLM's first choice on CUDA devices, second after Humming on sm_90.

The operator also runs MoeWNA16 checkpoints, which the stock class refuses: their packing of codes does not matter after
conversion. Older releases of the operator reorder input features (act order ``group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ..core.sharding import has_act_order, has_group_index, loaded_group_size, scale_columns
from ..releases import min_versions
from ._contract import Tensors
from ._marlin import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE, MarlinBackend
from ._padding import pad_expert
from ._stock import EXPERTS
from ._stock_rules import FROM_SM75, STOCK_GATED, STOCK_UNGATED, activation_rule, integer_weights, lora_rule

if TYPE_CHECKING:
    from torch import Tensor

RULES = (
    activation_rule(swigluoai_since=min_versions.MARLIN_UNINTERLEAVED),
    lora_rule((1, INTERMEDIATE_MULTIPLE)),
    Rule(
        "bits.vllm_version",
        lambda problem, device: (
            problem.scheme.bits == 8 and not min_versions.vllm_at_least_on(device, min_versions.MARLIN_INT8)
        ),
        lambda problem, device: f"vLLM's class takes 8-bit codes since {min_versions.MARLIN_INT8}",
    ),
    Rule(
        "zero_points.bits",
        lambda problem, device: problem.scheme.zero_points and problem.scheme.bits != 4,
        lambda problem, device: (
            f"the operator has zero points for 4-bit codes only, the checkpoint has {problem.scheme.bits}-bit ones"
        ),
    ),
    Rule(
        "act_order.vllm_version",
        lambda problem, device: (
            has_act_order(problem) and min_versions.vllm_at_least_on(device, min_versions.MARLIN_WITHOUT_ACT_ORDER)
        ),
        lambda problem, device: (
            f"the operator has no act order since vLLM {min_versions.MARLIN_WITHOUT_ACT_ORDER}; codes are stored by "
            "group of features"
        ),
        f"vLLM {min_versions.release_before(min_versions.MARLIN_WITHOUT_ACT_ORDER)}, "
        "or a checkpoint that was quantized with static groups",
    ),
    Rule(
        "act_order.zero_points",
        lambda problem, device: has_act_order(problem) and problem.scheme.zero_points,
        lambda problem, device: "the operator has act order for symmetric codes only",
    ),
    Rule(
        "act_order.groups",
        lambda problem, device: has_act_order(problem) and not has_group_index(problem) and 1 in scale_columns(problem),
        lambda problem, device: (
            f"the operator has act order for several groups only; {problem.hidden_size} or "
            f"{problem.intermediate_size} features are one group of {problem.scheme.group_size}"
        ),
    ),
)


class MarlinWna16(MarlinBackend):
    """vLLM's `MarlinExperts` on integer weights. Group scales multiply in 16 bits: weights are rounded once."""

    name = "marlin_wna16"
    schemes = ("wna16",)
    stock_class = f"{EXPERTS}.marlin_moe:MarlinExperts"
    static_priority = 30.0
    padding = (1, INTERMEDIATE_MULTIPLE)
    capabilities = Capabilities(
        compute_capabilities=FROM_SM75,
        dtypes=("bfloat16", "float16"),
        gated=STOCK_GATED,
        ungated=STOCK_UNGATED,
        activation_params=True,
        bias=True,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "group", "static"),
        hidden_multiple=HIDDEN_MULTIPLE,
        intermediate_multiple=INTERMEDIATE_MULTIPLE,
        apply_router_weight_on_input=True,
        lora=True,
        eplb=True,
    )
    rules = RULES

    def numerics(self, problem: Problem) -> Numerics:
        """With one scale per output row the sums are scaled, not the weights."""
        return Numerics(integer_weights(problem), f"left in {problem.dtype}")

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads with scales of zero, then repacks codes, scales, zero points and biases.

        Returns:
            ``w13`` int32 `[H/16, R * bits / 2]`, ``w2`` `[I/16, H * bits / 2]`; their scales in the model's dtype
            `[H/g, R]` and `[I/g, H]`; zero points int32 `[H/g, R/8]` and `[I/g, H/8]`; biases in the model's dtype;
            with act order the input features' order and group, int32 `[H]` and `[I]` each. Sizes are the plan's.
        """
        import torch

        from ..layouts.mma_tiles import pack_nibbles, pack_tiles
        from ..layouts.scales import pack_zero_points, permute_bias, permute_scales

        bits, dtype = problem.scheme.bits, getattr(torch, problem.dtype)
        pack = pack_nibbles if bits == 4 else pack_tiles
        padded = pad_expert(expert, problem, plan)
        converted = {}
        for name in ("w13", "w2"):
            converted[name] = pack(padded[name])
            scales = padded[f"{name}_scale"].to(dtype)
            # The operator counts groups: a single group scales the sums, whatever the checkpoint's group size.
            converted[f"{name}_scale"] = permute_scales(scales, on_accumulators=scales.shape[1] == 1)
            if problem.scheme.zero_points:
                converted[f"{name}_zero_point"] = pack_zero_points(padded[f"{name}_zero_point"], bits, marlin=True)
            if problem.has_bias:
                converted[f"{name}_bias"] = permute_bias(padded[f"{name}_bias"].to(dtype))
            if has_act_order(problem):
                groups = scales.shape[1]
                index = expert.get(f"{name}_group_index")
                order, index = _act_order(expert[f"{name}_order"], index, problem, plan, name, groups)
                converted[f"{name}_order"], converted[f"{name}_group_index"] = order, index
        return converted

    def stock_arguments(self, tensors: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Any]:
        """The width of the codes, and what older releases need for act order."""
        own = {"weights": f"int{problem.scheme.bits}", "problem": problem, "tensors": tensors}
        return super().stock_arguments(tensors, problem, plan) | own


def _act_order(
    order: Tensor, index: Tensor | None, problem: Problem, plan: ShardPlan, name: str, groups: int
) -> tuple[Tensor, Tensor]:
    """The order of a matrix's input features and the group of each, int32 `[K]`, with K of the plan.

    Padded columns come last: their own input features, in groups of their own or in the last group.
    """
    import torch

    group = loaded_group_size(problem)
    if index is None:
        index = torch.arange(order.shape[0], dtype=torch.int32, device=order.device) // group
    if name == "w2":
        more = torch.arange(order.shape[0], plan.intermediate_size, dtype=torch.int32, device=order.device)
        order, index = torch.cat((order, more)), torch.cat((index, torch.clamp(more // group, max=groups - 1)))
    return order, index


BACKEND = MarlinWna16()
