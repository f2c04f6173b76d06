"""What makes two layers equally fast, and one timing of one backend at one number of tokens.

A `Cell` is what a kernel's time depends on: layers of other models, checkpoints of another packing, and ranks of
another tensor-parallel size that come to the same shard are one cell.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ..oracle.objectives import LARGEST
from ..oracle.planner import has_group_index, has_order, loaded_group
from ..oracle.problem import Problem

RoutingKind = Literal["uniform", "skewed"]
"""How random tokens choose experts: all alike, or a few of them most of the time."""

MOST_MICROSECONDS = 1e8
"""Longer is no time of one layer."""
MOST_TILE = 2000
"""Characters of a tile configuration."""


_MOST_WORD = 200
"""Characters of a name: far more than any has."""


def _shown(*words: str) -> bool:
    return all(len(each) <= _MOST_WORD and each.isprintable() for each in words)


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, order=True):
    """The layer as its kernels see it.

    Attributes:
        scheme: name of the weight format.
        bits: width of a weight's code.
        group: input features that share a scale, as they are loaded; -1 for one scale per row.
        experts: experts of the layer over all ranks.
        local: experts on this rank.
        top_k: experts per token.
        hidden: features of the hidden state.
        inner: features between the products, on this rank.
        activation: the function between the products.
        gated: whether that has a gate.
        dtype: of the activations.
        limited: values are clamped before the activation.
        bias: both products add a bias.
        zero_points: weights have explicit zero points.
        order: input features are reordered: not, ``group``, or ``shard`` where a rank also holds other ranks' scales.
        spread: experts are spread over ranks.
        invariant: a token's output may not depend on its batch.
    """

    scheme: str
    bits: int
    group: int
    experts: int
    local: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    gated: bool
    dtype: str
    limited: bool = False
    bias: bool = False
    zero_points: bool = False
    order: str = ""
    spread: bool = False
    invariant: bool = False

    @property
    def sound(self) -> bool:
        """Whether a layer's words can be like that: what is read from a file need not be, and is shown to people."""
        return _shown(self.scheme, self.activation, self.dtype, self.order)

    @property
    def key(self) -> str:
        """The cell as JSON, always the same for the same cell."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        kind = f"int{self.bits}" if self.scheme == "wna16" else self.scheme
        group = "" if self.scheme != "wna16" else " per channel" if self.group == -1 else f" g{self.group}"
        experts = f"{self.experts}" if self.experts == self.local else f"{self.local}/{self.experts}"
        flags = [("biases", self.bias), ("zero points", self.zero_points), ("act order", bool(self.order))]
        flags += [("spread", self.spread), ("invariant", self.invariant), (self.dtype, self.dtype != "bfloat16")]
        words = [f"{kind}{group} E{experts} k{self.top_k} H{self.hidden} I{self.inner} {self.activation}"]
        return ", ".join(words + [name for name, on in flags if on])


def cell_of(problem: Problem) -> Cell:
    """The cell of a layer."""
    return Cell(
        scheme=problem.scheme.name,
        bits=problem.scheme.bits,
        group=loaded_group(problem),
        experts=problem.num_experts,
        local=problem.local_experts,
        top_k=problem.top_k,
        hidden=problem.hidden_size,
        inner=problem.intermediate_size,
        activation=problem.activation.name,
        gated=problem.activation.gated,
        dtype=problem.dtype,
        limited=problem.activation.limit is not None,
        bias=problem.has_bias,
        zero_points=problem.scheme.zero_points,
        order="shard" if has_group_index(problem) else "group" if has_order(problem) else "",
        spread=problem.parallel.ep > 1,
        invariant=problem.batch_invariant,
    )


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One backend's time at one number of tokens. Times are microseconds of a replayed CUDA graph.

    Attributes:
        backend: its name.
        activations: the precision in which it takes the experts' inputs.
        tokens: rows of the input.
        routing: how tokens choose experts.
        us: the median.
        low: the first quartile.
        high: the third quartile.
        replays: how many were timed.
        error: largest relative L2 error of a few tokens against the reference, checked before.
        router: the time includes choosing experts from logits.
        failure: why there is no time; then every number but `tokens` is 0.
        tile: the tile configuration that was the fastest, as JSON; "" for the backend's own choice.
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

    @property
    def sound(self) -> bool:
        """Whether a measurement can be like that: what is read from a file need not be."""
        if not (self.backend and _shown(self.backend, self.activations) and 1 <= self.tokens <= LARGEST):
            return False
        if self.failure:
            return len(self.failure) <= 2000
        if len(self.tile) > MOST_TILE or not self.tile.isprintable():
            return False
        times = (self.low, self.us, self.high)
        return all(0 < each < MOST_MICROSECONDS for each in times) and math.isfinite(self.error) and self.replays > 0
