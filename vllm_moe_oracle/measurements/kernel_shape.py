"""The key of a measurement (`KernelShape`), and the measurement of one backend at one number of tokens (`Sample`).

A `KernelShape` holds everything that a kernel's time depends on and nothing else. Layers of different models,
checkpoints with different packings, and ranks of different tensor-parallel sizes share it if their shards are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from ..core.objectives import MAX_TOKENS
from ..core.problem import Problem
from ..core.sharding import has_act_order, has_group_index, loaded_group_size

RoutingKind = Literal["uniform", "skewed"]
"""How random tokens are routed: every expert is equally likely, or a few experts get most of the tokens."""

MIN_MICROSECONDS, MAX_MICROSECONDS = 1e-3, 1e8
"""Bounds of a valid time of one layer; see `is_possible_time`."""
MAX_ERROR = 1.0
"""Largest valid relative error: that of an output of zeros. Checks refuse kernels long before."""
MAX_TILE_CHARS = 2000
"""Longest valid tile configuration."""
MAX_FAILURE_CHARS = 2000
"""Longest valid reason of a failure."""
MAX_NAME_CHARS = 200
"""Longest valid name of a backend, a format or a layer."""


def is_displayable(*texts: str) -> bool:
    """Whether texts from a file are short and printable enough to be shown as names."""
    return all(len(each) <= MAX_NAME_CHARS and each.isprintable() for each in texts)


MAX_COUNT = (1 << 31) - 1
"""Largest valid size of a layer, and number of replays."""

MAX_SAMPLES = 4096
"""Most samples of a kernel shape that are read of an environment: a hundred backends, twenty numbers of tokens, two
routings."""


class KernelShape(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    order=True,
    rename={
        "group_size": "group",
        "num_experts": "experts",
        "local_experts": "local",
        "hidden_size": "hidden",
        "intermediate_size": "inner",
        "has_limit": "limited",
        "has_bias": "bias",
        "act_order": "order",
        "expert_parallel": "spread",
        "batch_invariant": "invariant",
    },
):
    """A layer as its kernels see it. Profiles and the store keep it as JSON, with the shorter names given above.

    Attributes:
        scheme: name of the weight format.
        bits: bits of a weight's code.
        group_size: input features that share a scale, as loaded; -1 for one scale per output row.
        num_experts: experts of the layer over all ranks.
        local_experts: experts on this rank.
        top_k: experts per token.
        hidden_size: features of the hidden state.
        intermediate_size: features between the two products on this rank.
        activation: name of the activation function.
        gated: whether the activation has a gate.
        dtype: dtype of the activations.
        has_limit: whether values are clamped before the activation.
        has_bias: whether both products add a bias.
        zero_points: whether weights have explicit zero points.
        act_order: "" if input features are not reordered, ``group`` if they are, ``shard`` if the rank also holds
            scales of other ranks' groups.
        expert_parallel: whether experts are spread over ranks.
        batch_invariant: whether a token's output must not depend on its batch.
    """

    scheme: str
    bits: int
    group_size: int
    num_experts: int
    local_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool
    dtype: str
    has_limit: bool = False
    has_bias: bool = False
    zero_points: bool = False
    act_order: str = ""
    expert_parallel: bool = False
    batch_invariant: bool = False

    @property
    def is_valid(self) -> bool:
        """Whether the names are short and printable, and the numbers possible. A shape read from a file may be anything
        and is shown to users."""
        counts = (self.bits, self.num_experts, self.local_experts, self.top_k, self.hidden_size, self.intermediate_size)
        possible = all(0 < each <= MAX_COUNT for each in counts) and -1 <= self.group_size <= MAX_COUNT
        return possible and is_displayable(self.scheme, self.activation, self.dtype, self.act_order)

    @property
    def key(self) -> str:
        """The shape as JSON; equal shapes have equal keys."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        format = f"int{self.bits}" if self.scheme == "wna16" else self.scheme
        if self.scheme == "wna16":
            format += " per channel" if self.group_size == -1 else f" g{self.group_size}"
        local, total = self.local_experts, self.num_experts
        experts = f"{total}" if local == total else f"{local}/{total}"
        sizes = f"E{experts} k{self.top_k} H{self.hidden_size} I{self.intermediate_size}"
        flags = {
            "biases": self.has_bias,
            "zero points": self.zero_points,
            "act order": bool(self.act_order),
            "expert parallel": self.expert_parallel,
            "batch invariant": self.batch_invariant,
            self.dtype: self.dtype != "bfloat16",
        }
        return ", ".join([f"{format} {sizes} {self.activation}", *(name for name, on in flags.items() if on)])


def kernel_shape_of(problem: Problem) -> KernelShape:
    """The kernel shape of a layer."""
    return KernelShape(
        scheme=problem.scheme.name,
        bits=problem.scheme.bits,
        group_size=loaded_group_size(problem),
        num_experts=problem.num_experts,
        local_experts=problem.local_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        activation=problem.activation.name,
        gated=problem.activation.gated,
        dtype=problem.dtype,
        has_limit=problem.activation.limit is not None,
        has_bias=problem.has_bias,
        zero_points=problem.scheme.zero_points,
        act_order="shard" if has_group_index(problem) else "group" if has_act_order(problem) else "",
        expert_parallel=problem.parallel.ep > 1,
        batch_invariant=problem.batch_invariant,
    )


def is_possible_time(us: float) -> bool:
    """Whether microseconds can be a layer's time. A number read from a file may be anything."""
    return MIN_MICROSECONDS < us < MAX_MICROSECONDS


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one function, in microseconds.

    Attributes:
        us: the median.
        low: the first quartile.
        high: the third quartile.
        replays: number of timed replays; 0 where it does not matter.
    """

    us: float
    low: float
    high: float
    replays: int = 0


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One backend's time, or failure, at one number of tokens. Times are microseconds of a replayed CUDA graph.

    Attributes:
        backend: name of the backend.
        activations: precision to which the backend quantizes activations.
        tokens: rows of the input.
        routing: how tokens are routed to experts.
        us: median time.
        low: first quartile.
        high: third quartile.
        replays: number of timed replays.
        error: largest relative L2 error of the checked tokens against the reference.
        router: whether the time includes top-k over the router's logits.
        failure: why there is no time; "" otherwise. The numbers of a failure are 0, except `tokens`.
        tile: the fastest tile configuration, as JSON; "" for the backend's own choice.
        silent_seconds: of a failure, how long the backend was waited for, which did not return; 0 for any other.
    """

    backend: str
    activations: str
    tokens: int
    routing: RoutingKind
    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    replays: int = 0
    error: float = 0.0
    router: bool = False
    failure: str = ""
    tile: str = ""
    silent_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, RoutingKind, int]:
        """What a newer sample of the same shape and environment replaces: backend, routing, number of tokens."""
        return self.backend, self.routing, self.tokens

    @property
    def is_valid(self) -> bool:
        """Whether names and numbers are possible. A sample read from a file may be anything."""
        if not (self.backend and is_displayable(self.backend, self.activations) and 1 <= self.tokens <= MAX_TOKENS):
            return False
        if self.failure:
            return len(self.failure) <= MAX_FAILURE_CHARS and 0 <= self.silent_seconds < math.inf
        if len(self.tile) > MAX_TILE_CHARS or not self.tile.isprintable():
            return False
        times = (self.low, self.us, self.high)
        possible = all(map(is_possible_time, times)) and self.low <= self.us <= self.high
        return possible and 0 <= self.error <= MAX_ERROR and 0 < self.replays <= MAX_COUNT
