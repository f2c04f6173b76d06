"""Pads and reorders one expert's canonical tensors for vLLM's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.decision import ShardPlan
from ..core.problem import Problem
from ..core.sharding import has_group_index, loaded_group_size
from ._contract import Tensors

if TYPE_CHECKING:
    from torch import Tensor


def pad_expert(
    expert: Tensors, problem: Problem, plan: ShardPlan, *, code: int = 0, scale: int = 0
) -> dict[str, Tensor]:
    """Canonical tensors of one expert, padded at their ends to the plan's sizes; gate and up are padded separately.

    Padding adds nothing to the layer's output. Codes of 0 are 0 in the formats of floats. For integers scales of 0 make
    the padded rows zeros, and the padded columns meet only those.

    Args:
        expert: canonical tensors of one expert. Not modified; input permutations and group indices are left out.
        problem: the layer.
        plan: the padded sizes.
        code: the byte that pads weights.
        scale: the value that pads scales; a byte for scales of one byte.

    Returns:
        ``w13`` `[R, H]` and ``w2`` `[H, I]` with scales, zero points `[R, H/g]`, `[H, I/g]` and biases `[R]`, `[H]`,
        where H and I are the plan's sizes and R is 2 I (I for experts without a gate). Dtypes do not change. A tensor
        that needs no padding is returned itself.
    """
    from ..layouts.padding import pad_columns, pad_rows

    hidden, inner = plan.hidden_size, plan.intermediate_size
    halves = 2 if problem.activation.gated else 1
    group = loaded_group_size(problem)
    padded = {}
    for name, tensor in expert.items():
        matrix, _, part = name.partition("_")
        if part in ("order", "group_index"):
            continue
        value = {"": code, "scale": scale}.get(part, 0)
        columns = hidden if matrix == "w13" else inner
        if part == "":
            tensor = pad_columns(tensor, columns * problem.scheme.bits // 8, value)
        elif part != "bias" and group != -1 and not (matrix == "w2" and has_group_index(problem)):
            tensor = pad_columns(tensor, columns // group, value)
        padded[name] = pad_rows(tensor, inner, halves, value) if matrix == "w13" else pad_rows(tensor, hidden, 1, value)
    return padded


def order_rows_for_stock(expert: Tensors, problem: Problem) -> dict[str, Tensor]:
    """The rows of ``w13``, its scales and biases as vLLM's kernels expect them for the layer's activation.

    With gpt-oss's ``swigluoai`` the rows alternate gate and up; with all others gate rows come first, as in canonical
    tensors.

    Args:
        expert: canonical tensors of one expert, padded or not. Not modified.
        problem: the layer.

    Returns:
        The same tensors, those of ``w13`` in that order.
    """
    from ..layouts.gate_up import interleave_gate_up

    if not problem.activation.interleaved:
        return dict(expert)
    return {name: interleave_gate_up(each) if name.startswith("w13") else each for name, each in expert.items()}
