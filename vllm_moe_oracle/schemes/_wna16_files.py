"""From a checkpoint's tensor of one projection of one expert to what one rank's parameter holds of it.

A rank gets whole packed words and whole groups; where vLLM's MoeWNA16 makes groups smaller (see `planner.loaded_group`)
scales and zero points are repeated. Nothing is transposed: a parameter has its dimensions in the order of the file.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.planner import has_group_index, loaded_group, share_of
from ..oracle.problem import Problem
from ._packings import (
    PACKINGS,
    Layout,
    codes_to_canonical,
    raw_shapes,
    zeros_from_canonical,
    zeros_to_canonical,
)
from ._wna16_parameters import REAL, packing_of

Shard = Literal["w1", "w2", "w3"]
"""A projection in vLLM's words: gate (or the only one before the activation), down, up."""

PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up"}


def projection(shard: Shard, problem: Problem) -> str:
    """What a projection is called in messages."""
    return "up" if shard == "w1" and not problem.activation.gated else PROJECTIONS[shard]


def sizes_in_file(shard: Shard, problem: Problem) -> tuple[int, int]:
    """Rows and input features of a projection over all tensor-parallel ranks."""
    inner = problem.full_intermediate_size
    return (problem.hidden_size, inner) if shard == "w2" else (inner, problem.hidden_size)


def layout_in_file(packing: str) -> Layout:
    """The order of dimensions in which tools write a packing."""
    return PACKINGS[packing].layouts[-1]


def shape_in_file(suffix: str, shard: Shard, problem: Problem, packing: str) -> tuple[int, ...]:
    """Shape of a checkpoint's tensor.

    Args:
        suffix: the canonical one: ``""``, ``_scale``, ``_zero_point``, ``_order`` or ``_bias``.
        shard: the projection.
        problem: the layer.
        packing: how the file packs, which need not be how the layer's parameters do.
    """
    rows, columns = sizes_in_file(shard, problem)
    group = problem.scheme.group_size
    groups = 1 if group == -1 else math.ceil(columns / group)
    found = raw_shapes(PACKINGS[packing], layout_in_file(packing), problem.scheme.bits, rows, columns, groups)
    return (found | {"_bias": (rows,)})[suffix]


def check(tensor: Tensor, suffix: str, shard: Shard, problem: Problem, packing: str, where: str) -> None:
    """Whether a checkpoint's tensor is what the packing stores.

    Raises:
        CheckpointError: another dtype or shape.
    """
    if suffix in ("_scale", "_bias"):
        dtypes: tuple[torch.dtype, ...] = REAL
    elif suffix == "_order":
        dtypes = (torch.int32, torch.int64)
    else:
        dtypes = (PACKINGS[packing].word,)
    if tensor.dtype not in dtypes:
        rule = f"the checkpoint stores it as {_word(tensor.dtype)}, the packing {packing} as {_word(dtypes[0])}"
        raise CheckpointError(rule, "The checkpoint is not in the format that its config names", where)
    expected = shape_in_file(suffix, shard, problem, packing)
    if tuple(tensor.shape) != expected:
        rule = f"an expert's tensor has shape {list(tensor.shape)}, expected {list(expected)}"
        raise CheckpointError(rule, "", where)


def part(tensor: Tensor, suffix: str, shard: Shard, problem: Problem, packing: str, rank: int) -> Tensor:
    """What a rank's parameter holds of a checkpoint's tensor that `check` has passed; a view where that is possible.

    Args:
        tensor: of one projection of one expert.
        suffix: see `shape_in_file`.
        shard: the projection.
        problem: the layer on a rank; its packing is that of the parameters.
        packing: that of the file.
        rank: the tensor-parallel rank.
    """
    layout = layout_in_file(packing)
    if packing != problem.scheme.packing:
        tensor = _repacked(tensor, suffix, problem, packing, layout)
        layout = layout_in_file(problem.scheme.packing)
    rows, columns = (0, 1) if layout == "n_first" else (1, 0)
    group, loaded = problem.scheme.group_size, loaded_group(problem)
    grouped = suffix in ("_scale", "_zero_point") and group != -1
    if grouped and loaded != group:
        _, features = sizes_in_file(shard, problem)
        # The last group of the file may be shorter than the others.
        tensor = tensor.repeat_interleave(group // loaded, columns).narrow(columns, 0, features // loaded)
    if shard != "w2":
        return tensor if suffix == "_order" else _slice(tensor, 0 if suffix == "_bias" else rows, problem, rank)
    if suffix == "_order":
        return _slice(tensor, 0, problem, rank)
    whole = suffix == "_bias" or (suffix != "" and (not grouped or has_group_index(problem)))
    return tensor if whole else _slice(tensor, columns, problem, rank)


def target(data: Tensor, part: Tensor, suffix: str, shard: Shard, problem: Problem) -> Tensor:
    """The place of a rank's part of a projection in an expert's parameter; a part may be shorter than its place."""
    if suffix == "_order":
        return data
    n_first = layout_in_file(problem.scheme.packing) == "n_first"
    if shard == "w2":
        return data if suffix == "_bias" else _first(data, part, 1 if n_first else 0)
    rows = 0 if suffix == "_bias" or n_first else 1
    half = data.shape[rows] // (2 if problem.activation.gated else 1)
    return _first(data.narrow(rows, half if shard == "w3" else 0, half), part, rows)


def _first(data: Tensor, part: Tensor, dim: int) -> Tensor:
    return data.narrow(dim, 0, part.shape[dim])


def beyond_share(data: Tensor, canonical: str, problem: Problem, rank: int) -> list[Tensor]:
    """The places in a layer's parameter where a rank with a shorter share than the first has nothing.

    Args:
        data: `[local_experts, ...]`.
        canonical: the parameter's canonical name.
        problem: the layer.
        rank: the tensor-parallel rank.
    """
    share, place = share_of(problem, rank), problem.intermediate_size
    suffix = canonical.removeprefix("w13").removeprefix("w2")
    if share >= place or (canonical.startswith("w2") and suffix == "_bias"):
        return []
    n_first = layout_in_file(problem.scheme.packing) == "n_first"
    dim = 1 if suffix == "_bias" or n_first == canonical.startswith("w13") else 2
    count = 2 if canonical.startswith("w13") and problem.activation.gated else 1
    whole = data.shape[dim] // count
    used = whole * share // place
    return [data.narrow(dim, index * whole + used, whole - used) for index in range(count)]


def halves(tensor: Tensor, suffix: str, problem: Problem, packing: str, where: str) -> dict[Shard, Tensor]:
    """Gate and up of one tensor whose rows alternate between them (gpt-oss).

    Raises:
        CheckpointError: rows of gate and up share packed words.
    """
    shared = suffix == "_zero_point" or (suffix == "" and PACKINGS[packing].along == "N")
    if shared and not PACKINGS[packing].signed:
        rule = f"rows of gate and up alternate inside packed words of {packing}, which cannot be told apart"
        raise CheckpointError(rule, where=where)
    rows = 0 if suffix == "_bias" or layout_in_file(packing) == "n_first" else 1
    every = torch.arange(tensor.shape[rows], device=tensor.device)
    return {"w1": tensor.index_select(rows, every[0::2]), "w3": tensor.index_select(rows, every[1::2])}


def _repacked(tensor: Tensor, suffix: str, problem: Problem, packing: str, layout: Layout) -> Tensor:
    """A tensor of the file in the packing of the parameters, MoeWNA16's: bytes, outputs first."""
    source, bits = PACKINGS[packing], problem.scheme.bits
    if suffix == "":
        return codes_to_canonical(tensor, source, layout, bits)
    if suffix == "_zero_point":
        zeros = zeros_to_canonical(tensor, source, layout, bits)
        return zeros_from_canonical(zeros, packing_of(problem), layout_in_file(problem.scheme.packing), bits)
    return tensor.T if suffix == "_scale" and layout == "k_first" else tensor


def _slice(tensor: Tensor, dim: int, problem: Problem, rank: int) -> Tensor:
    size, whole = tensor.shape[dim], problem.full_intermediate_size
    share = share_of(problem, rank)
    return tensor.narrow(dim, rank * problem.intermediate_size * size // whole, share * size // whole)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
