"""Shards a checkpoint's tensor of one projection of one expert for one tensor-parallel rank's parameter.

A rank gets whole packed words and whole groups. Where vLLM's MoeWNA16 makes groups smaller (see
`core.sharding.loaded_group_size`), scales and zero points are repeated. Nothing is transposed: parameters keep the
file's order of dimensions.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.sharding import has_group_index, loaded_group_size, shard_size
from ..errors import CheckpointError
from ._checks import FLOAT_DTYPES, SHAPE_REMEDY, dtype_name, refuse_bias, rounding_loss
from ._packings import (
    PACKINGS,
    Layout,
    codes_to_canonical,
    filled_word,
    packed_shapes,
    zero_points_from_canonical,
    zero_points_to_canonical,
)
from ._wna16_parameters import packing_of

Shard = Literal["w1", "w2", "w3"]
"""vLLM's name of a projection: gate (or the only one before the activation), down, up."""

PROJECTION_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}


def projection_name(shard: Shard, problem: Problem) -> str:
    """The projection's name for messages."""
    return "up" if shard == "w1" and not problem.activation.gated else PROJECTION_NAMES[shard]


def checkpoint_sizes(shard: Shard, problem: Problem) -> tuple[int, int]:
    """Rows and input features of a projection, over all tensor-parallel ranks."""
    inner = problem.unsharded_intermediate_size
    return (problem.hidden_size, inner) if shard == "w2" else (inner, problem.hidden_size)


def checkpoint_layout(packing: str) -> Layout:
    """The order of dimensions in a checkpoint of this packing."""
    return PACKINGS[packing].layouts[-1]


def checkpoint_shape(suffix: str, shard: Shard, problem: Problem, packing: str) -> tuple[int, ...]:
    """Shape of a checkpoint's tensor.

    Args:
        suffix: the canonical one: ``""``, ``_scale``, ``_zero_point``, ``_order`` or ``_bias``.
        shard: the projection.
        problem: the layer.
        packing: the file's packing, which can differ from that of the layer's parameters.
    """
    rows, columns = checkpoint_sizes(shard, problem)
    group = problem.scheme.group_size
    groups = 1 if group == -1 else math.ceil(columns / group)
    found = packed_shapes(PACKINGS[packing], checkpoint_layout(packing), problem.scheme.bits, rows, columns, groups)
    return (found | {"_bias": (rows,)})[suffix]


def check_checkpoint_tensor(
    tensor: Tensor, suffix: str, shard: Shard, problem: Problem, packing: str, where: str
) -> None:
    """Checks dtype and shape of a checkpoint's tensor.

    Args:
        tensor: of one projection of one expert.
        suffix: see `checkpoint_shape`.
        shard: the projection.
        problem: the layer.
        packing: the file's packing.
        where: layer, parameter and expert, for the message.

    Raises:
        CheckpointError: the dtype or the shape is not that of the packing.
    """
    if suffix in ("_scale", "_bias"):
        dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    elif suffix == "_order":
        dtypes = (torch.int32, torch.int64)
    else:
        dtypes = (PACKINGS[packing].word_dtype,)
    if tensor.dtype not in dtypes:
        *others, last = map(dtype_name, dtypes)
        expected = f"{', '.join(others)} or {last}" if others else last
        rule = f"the checkpoint stores it as {dtype_name(tensor.dtype)}, the packing {packing} as {expected}"
        remedy = "The checkpoint is not in the format that its config names"
        if tensor.is_floating_point() and last == "float32":
            remedy = "Convert it to one of these"
        raise CheckpointError(rule, remedy, where)
    shape = checkpoint_shape(suffix, shard, problem, packing)
    if tuple(tensor.shape) != shape:
        rule = f"an expert's tensor has shape {list(tensor.shape)}, expected {list(shape)}"
        raise CheckpointError(rule, SHAPE_REMEDY, where)


_REMEDY = "Check the model's files, or serve another export of it"


def check_unread_tensor(tensor: Tensor, ending: str, shard: str, problem: Problem, packing: str, where: str) -> str:
    """Checks a tensor that a checkpoint may have and nothing reads: it must have no effect. Zero points of symmetric
    weights are not applied, as in vLLM; unusual ones are a warning, because the config may be wrong.

    Args:
        tensor: of one projection of one expert, of any dtype and shape.
        ending: the last part of its name, one of `_wna16_parameters.optional_endings`.
        shard: the projection.
        problem: the layer.
        packing: the file's packing.
        where: layer, parameter and expert, for the message.

    Returns:
        What to warn of; "" for nothing.

    Raises:
        CheckpointError: the tensor would have an effect.
    """
    names, group = PACKINGS[packing], problem.scheme.group_size
    if ending == "bias":
        refuse_bias(tensor, where)
    if ending == names.zero_point:
        return _zero_point_warning(tensor, problem.scheme.bits, packing)
    if ending == "weight_shape" and shard in PROJECTION_NAMES:
        shape = tuple(int(size) for size in tensor.flatten())
        expected = checkpoint_sizes(cast("Shard", shard), problem)
        if shape != expected:
            raise CheckpointError(f"weight_shape is {shape}, expected {expected}", _REMEDY, where)
    if ending == names.group_index and group != -1:
        found, in_order = tensor.to(torch.int64), torch.arange(tensor.numel(), device=tensor.device) // group
        if tensor.numel() and not (torch.equal(found, in_order) or bool((found == 0).all())):
            low, high, last = (int(each) for each in (found.min(), found.max(), in_order[-1]))
            if low < 0 or high > last:
                rule = (
                    f"the group index has groups from {low} to {high}; there are {last + 1} of {group} input features"
                )
                raise CheckpointError(rule, _REMEDY, where)
            rule = "the group index orders the input features, but the config declares no act order"
            raise CheckpointError(rule, "Set desc_act (GPTQ) or actorder (compressed-tensors) in the config", where)
    return ""


def _zero_point_warning(tensor: Tensor, bits: int, packing: str) -> str:
    form = PACKINGS[packing]
    if tensor.dtype != form.word_dtype or not tensor.numel():
        return ""
    middle = 1 << bits - 1
    # Of both storage formats, and zeros of tools that never fill them.
    usual = [0] if form.signed else [0, middle, middle - 1]
    if any(bool((tensor == filled_word(code, bits, form)).all()) for code in usual):
        return ""
    rule = "the config declares symmetric weights, but the zero points are not those of symmetric weights"
    remedy = "if they are needed, correct sym (GPTQ), zero_point (AWQ) or symmetric in the config"
    return f"{rule}; they are not applied: {remedy}"


def rounding_warning(scales: Tensor, dtype: torch.dtype) -> str:
    """What to warn of where the model's dtype changes scales by more than the rounding of bfloat16: float16 has 3.3
    digits from 6e-5 on, and fewer below. "" where it does not.

    Args:
        scales: as the file stores them.
        dtype: the model's.
    """
    most = torch.finfo(torch.bfloat16).eps
    if rounding_loss(scales, dtype) <= most:
        return ""
    rule = f"{dtype_name(dtype)}, the model's dtype, changes scales of the checkpoint by more than {most:.1%}"
    return f"{rule}, as in stock vLLM: it has fewer digits for numbers of their size. Serve with --dtype bfloat16"


def rank_shard(tensor: Tensor, suffix: str, shard: Shard, problem: Problem, packing: str, rank: int) -> Tensor:
    """One rank's part of a checkpoint's tensor, a view where possible.

    Args:
        tensor: of one projection of one expert, after `check_checkpoint_tensor`.
        suffix: see `checkpoint_shape`.
        shard: the projection.
        problem: the layer on a rank; its packing is that of the parameters.
        packing: the file's packing.
        rank: the tensor-parallel rank.
    """
    layout = checkpoint_layout(packing)
    if packing != problem.scheme.packing:
        tensor = _repack(tensor, suffix, problem, packing, layout)
        layout = checkpoint_layout(problem.scheme.packing)
    rows, columns = (0, 1) if layout == "n_first" else (1, 0)
    group, loaded = problem.scheme.group_size, loaded_group_size(problem)
    grouped = suffix in ("_scale", "_zero_point") and group != -1
    if grouped and loaded != group:
        _, features = checkpoint_sizes(shard, problem)
        # The last group of the file may be shorter than the others.
        tensor = tensor.repeat_interleave(group // loaded, columns).narrow(columns, 0, features // loaded)
    if shard != "w2":
        return tensor if suffix == "_order" else _slice_shard(tensor, 0 if suffix == "_bias" else rows, problem, rank)
    if suffix == "_order":
        return _slice_shard(tensor, 0, problem, rank)
    replicated = suffix == "_bias" or (suffix != "" and (not grouped or has_group_index(problem)))
    return tensor if replicated else _slice_shard(tensor, columns, problem, rank)


def destination(data: Tensor, part: Tensor, suffix: str, shard: Shard, problem: Problem) -> Tensor:
    """The slice of an expert's parameter that a rank's part of a projection goes to.

    Args:
        data: the expert's parameter.
        part: from `rank_shard`; it can be shorter than the room for it.
        suffix: see `checkpoint_shape`.
        shard: the projection.
        problem: the layer on this rank.
    """
    if suffix == "_order":
        return data
    n_first = checkpoint_layout(problem.scheme.packing) == "n_first"
    if shard == "w2":
        return data if suffix == "_bias" else _leading(data, part, 1 if n_first else 0)
    rows = 0 if suffix == "_bias" or n_first else 1
    half = data.shape[rows] // (2 if problem.activation.gated else 1)
    return _leading(data.narrow(rows, half if shard == "w3" else 0, half), part, rows)


def _leading(data: Tensor, part: Tensor, dim: int) -> Tensor:
    return data.narrow(dim, 0, part.shape[dim])


def unused_slices(data: Tensor, canonical: str, problem: Problem, rank: int) -> list[Tensor]:
    """The slices of a layer's parameter that a rank with a shorter share than the first rank's leaves unused.

    Args:
        data: `[local_experts, ...]`.
        canonical: the parameter's canonical name.
        problem: the layer.
        rank: the tensor-parallel rank.
    """
    share, capacity = shard_size(problem, rank), problem.intermediate_size
    suffix = canonical.removeprefix("w13").removeprefix("w2")
    if share >= capacity or (canonical.startswith("w2") and suffix == "_bias"):
        return []
    n_first = checkpoint_layout(problem.scheme.packing) == "n_first"
    dim = 1 if suffix == "_bias" or n_first == canonical.startswith("w13") else 2
    count = 2 if canonical.startswith("w13") and problem.activation.gated else 1
    size = data.shape[dim] // count
    used = size * share // capacity
    return [data.narrow(dim, index * size + used, size - used) for index in range(count)]


def split_gate_up(tensor: Tensor, suffix: str, problem: Problem, packing: str, where: str) -> dict[Shard, Tensor]:
    """Gate and up of a tensor whose rows alternate between them, as gpt-oss stores it.

    Raises:
        CheckpointError: rows of gate and up share packed words.
    """
    shared = suffix == "_zero_point" or (suffix == "" and PACKINGS[packing].packed_dim == "N")
    if shared and not PACKINGS[packing].signed:
        rule = f"rows of gate and up alternate within packed words of {packing}, which this reader cannot separate"
        raise CheckpointError(rule, where=where)
    rows = 0 if suffix == "_bias" or checkpoint_layout(packing) == "n_first" else 1
    indices = torch.arange(tensor.shape[rows], device=tensor.device)
    return {"w1": tensor.index_select(rows, indices[0::2]), "w3": tensor.index_select(rows, indices[1::2])}


def _repack(tensor: Tensor, suffix: str, problem: Problem, packing: str, layout: Layout) -> Tensor:
    """A tensor of the file in the packing of the parameters: MoeWNA16's, which is bytes `[N, ...]`."""
    source, bits = PACKINGS[packing], problem.scheme.bits
    if suffix == "":
        return codes_to_canonical(tensor, source, layout, bits)
    if suffix == "_zero_point":
        zeros = zero_points_to_canonical(tensor, source, layout, bits)
        return zero_points_from_canonical(zeros, packing_of(problem), checkpoint_layout(problem.scheme.packing), bits)
    return tensor.T if suffix == "_scale" and layout == "k_first" else tensor


def _slice_shard(tensor: Tensor, dim: int, problem: Problem, rank: int) -> Tensor:
    size, whole = tensor.shape[dim], problem.unsharded_intermediate_size
    first, share = rank * problem.intermediate_size, shard_size(problem, rank)
    if first * size % whole or share * size % whole:
        rule = f"rank {rank} has features {first} to {first + share} of {whole}, not a whole number of {size} slices"
        raise CheckpointError(rule, "Choose another number of ranks, or --enable-expert-parallel", problem.layer)
    return tensor.narrow(dim, first * size // whole, share * size // whole)
