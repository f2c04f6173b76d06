"""This project's kernels for integer weights whose input features are out of order (act order ``group``), on Hopper.

The kernels want groups of neighbors. For the second product the order costs nothing: the rows of the first are stored
in it. In the first, each expert has an order of its own: a token's features are gathered once for each of its choices,
every choice is a token of its own with one expert, and what comes of a token's choices is added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..core.capabilities import Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Problem
from ..core.sharding import has_group_index
from ._contract import Tensors, WorkspaceForward
from .hopper_wna16 import HopperWna16

if TYPE_CHECKING:
    from torch import Tensor

    from ._contract import Builder

MAX_GATHERED_FEATURES = 1 << 24
"""Features that are gathered at a time: 32 MiB of them, and twice that for their places."""

W13_ORDER = "w13_order"


class HopperWna16ActOrder(HopperWna16):
    """As `hopper_wna16`, after a gather of the inputs."""

    name = "hopper_wna16_act_order"
    capabilities = dataclasses.replace(
        HopperWna16.capabilities, act_orders=("group",), lora=False, batch_invariant=False
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "act_order.none",
            lambda problem, device: problem.scheme.group_size == -1,
            lambda problem, device: "needs act order in groups; with one scale per output row the order is irrelevant",
        ),
        Rule(
            "act_order.sharded",
            lambda problem, device: has_group_index(problem),
            lambda problem, device: (
                f"needs whole groups: act order spreads every group of {problem.scheme.group_size} features over all "
                f"{problem.parallel.tp} ranks, and this rank has {problem.intermediate_size} of "
                f"{problem.unsharded_intermediate_size} features"
            ),
            "expert parallelism, or a checkpoint that was quantized with static groups",
        ),
    )

    def numerics(self, problem: Problem) -> Numerics:
        """As `hopper_wna16`, with one rounding more."""
        sums = f"float32; a token's choices rounded to {problem.dtype} before they are added"
        return dataclasses.replace(super().numerics(problem), accumulate=sums)

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """None: the kernels' own choice for as many tokens as there are choices."""
        return ()

    def compile_keys(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """As `hopper_wna16`, for as many tokens as there are choices."""
        return super().compile_keys(_per_slot_problem(problem), tokens * problem.top_k, tile)

    def hand_overs(self, problem: Problem, most: int) -> tuple[int, ...]:
        """As `hopper_wna16`, for as many tokens as there are choices."""
        slots = min(most, _tokens_per_call(problem)) * problem.top_k
        found = super().hand_overs(_per_slot_problem(problem), slots)
        return tuple(each // problem.top_k for each in found if each >= problem.top_k)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """As `hopper_wna16`, with the rows of ``w13`` in the order of ``w2``'s columns; ``w13_order`` stays: the input
        feature of each column, int32 `[H]`."""
        import torch

        rows = expert["w2_order"].long()
        if problem.activation.gated:
            rows = torch.cat((rows, rows + problem.intermediate_size))
        names = ("w13", "w13_scale", "w13_zero_point", "w13_bias")
        moved = {name: expert[name].index_select(0, rows) for name in names if name in expert}
        return super().convert({**expert, **moved}, _per_slot_problem(problem), plan) | {W13_ORDER: expert[W13_ORDER]}

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts over the kernels, which see one expert a token."""
        slots = _SlotBuilder(builder, tensors, problem.as_called())
        if builder.max_tokens > slots.tokens_per_call:
            problem = problem.as_called()  # an all-to-all's calls are of one size, their parts are not
        return super().build_experts(tensors, _per_slot_problem(problem), plan, cast("Builder", slots))


def _per_slot_problem(problem: Problem) -> Problem:
    """The layer as the kernels see it."""
    return dataclasses.replace(problem, top_k=1, scheme=dataclasses.replace(problem.scheme, act_order="none"))


def _tokens_per_call(problem: Problem) -> int:
    """Tokens whose slots go to the kernels in one call."""
    return max(1, MAX_GATHERED_FEATURES // (problem.top_k * problem.hidden_size))


class _SlotBuilder:
    """A builder that passes one slot, a (token, choice) pair, per row to the kernels; the rest is another builder's."""

    def __init__(self, builder: Builder, tensors: Tensors, problem: Problem) -> None:
        self._builder, self._tensors, self._top_k = builder, tensors, problem.top_k
        self.tokens_per_call = _tokens_per_call(problem)

    @property
    def max_tokens(self) -> int:
        """Largest number of slots in a call of the kernels."""
        return min(self._builder.max_tokens, self.tokens_per_call) * self._top_k

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def from_workspace_function(self, forward: WorkspaceForward, nbytes: Callable[[int, int], int]) -> Any:
        """See `Builder`; the function is called with the slots of `tokens_per_call` tokens at a time."""
        import torch

        order, limit = self._tensors[W13_ORDER], self.tokens_per_call

        def run(
            out: Tensor,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            workspace: Tensor,
        ) -> None:
            for first in range(0, x.shape[0], limit):
                part = slice(first, first + limit)
                ids = topk_ids[part].reshape(-1, 1)
                choices = gather_inputs(x[part], ids.flatten(), expert_map, order)
                found = choices.new_empty(choices.shape)
                forward(found, choices, topk_weights[part].reshape(-1, 1), ids, expert_map, workspace)
                out[part].copy_(found.view(-1, topk_ids.shape[1], x.shape[1]).sum(1, dtype=torch.float32))

        return self._builder.from_workspace_function(run, lambda tokens, top_k: nbytes(min(tokens, limit) * top_k, 1))


def gather_inputs(x: Tensor, ids: Tensor, expert_map: Tensor | None, order: Tensor) -> Tensor:
    """A token's features for each of its choices, in the order of the chosen expert's columns.

    Args:
        x: `[M, H]`.
        ids: `[M * top_k]`: experts of a token one after the other; -1 for none.
        expert_map: local index of each expert, -1 for one on another rank; None when ids are local indices.
        order: int32 `[E, H]`: the feature of each column.

    Returns:
        `[M * top_k, H]`; a row's content is undefined if its expert is not on this rank.
    """
    import torch

    count, hidden = x.shape
    local_ids = ids if expert_map is None else expert_map.index_select(0, ids.clamp(min=0))
    places = order.index_select(0, local_ids.clamp(min=0)).view(count, -1, hidden)
    rows = torch.arange(count, dtype=torch.int32, device=x.device) * hidden
    places = places + rows[:, None, None]
    return x.flatten().index_select(0, places.flatten()).view(-1, hidden)


BACKEND = HopperWna16ActOrder()
