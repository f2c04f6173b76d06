"""WNA16: integer weight codes of 4 or 8 bits, real scales per group of input features, activations left as they are.

Canonical tensors of a layer: ``w13`` `[E, R, H * bits / 8]` and ``w2`` `[E, H, I * bits / 8]` uint8, unsigned codes,
for 4 bit two a byte with the low nibble first; ``w13_scale`` `[E, R, H / g]` and ``w2_scale`` `[E, H, I / g]`, a real
dtype, one column when the group g is -1 (per channel). R is 2 I (gate rows, then up rows) or I when the experts are not
gated. Where the scheme has them: ``w13_zero_point`` and ``w2_zero_point``, uint8 of the scales' shapes (without, the
zero point is 2**(bits-1)); with act order ``group``, ``w13_order`` `[E, H]` and ``w2_order`` `[E, I]` int32;
``w13_bias`` `[E, R]` and ``w2_bias`` `[E, H]`.

    weight[n, k] = (code[n, k] - zero_point[n, k // g]) * scale[n, k // g]

With an order, column k of the codes is the weight of input feature ``order[k]``: features are sorted by their group,
and ascend within it. A rank that holds a part of such a w2 (tensor parallelism) holds some features of every group: its
scales and zero points are those of all ranks, `[E, H, full I / g]`, and ``w2_group_index`` `[E, I]` int32, which never
descends, is the column of the scales that each column of the codes uses.

How checkpoints and vLLM's parameters pack the same is in `_packings`; `Scheme.packing` names one of ``gptq``,
``gptq_v2``, ``awq``, ``moe_wna16``, ``compressed-tensors`` (pack-quantized) and ``compressed-tensors-int``
(int-quantized).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.planner import has_group_index, has_order
from ..oracle.problem import Problem
from ._packings import (
    Layout,
    codes_from_canonical,
    codes_to_canonical,
    dense,
    join_bytes,
    split_bytes,
    zeros_from_canonical,
    zeros_to_canonical,
)
from ._wna16_parameters import MATRICES, Matrix, layout_of_expert, packing_of, parameters, read, sizes, suffixes_of

__all__ = [
    "canonical",
    "canonical_expert",
    "dequantise",
    "dequantise_expert",
    "parameters",
    "parameters_of",
    "quantise",
    "read",
    "round_trip",
    "shapes",
    "write",
]


UNLOADED = {f"{matrix}{suffix}": 0xFF for matrix in MATRICES for suffix in ("_scale", "_order")}
"""Bytes that no checkpoint holds, NaN or the group -1, for what was not loaded yet; every word of codes is valid."""


def parameters_of(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, of the parameters that the layer is read from."""
    return {own: name for name, own in parameters(problem).items()}


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name."""
    found: dict[str, tuple[int, ...]] = {}
    for matrix, (rows, columns, groups) in sizes(problem).items():
        each: dict[str, tuple[int, ...]] = {
            "": (rows, columns * problem.scheme.bits // 8),
            "_scale": (rows, groups),
            "_zero_point": (rows, groups),
            "_order": (columns,),
            "_bias": (rows,),
        }
        kept = suffixes_of(problem)
        found |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    if has_group_index(problem):
        found["w2_group_index"] = (problem.local_experts, problem.intermediate_size)
    return found


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` found. No shape depends on values: meta tensors work.

    Args:
        expert: packed tensors by canonical name, without the leading expert dimension. Not modified.
        problem: the layer.

    Returns:
        Tensors by canonical name, all dense. What was canonical before may be the very memory that came in.

    Raises:
        CheckpointError: the shapes are not those of the packing.
    """
    layout = layout_of_expert(expert, problem)
    packing, bits = packing_of(problem), problem.scheme.bits
    found: dict[str, Tensor] = {}
    for matrix in MATRICES:
        codes = codes_to_canonical(expert[matrix], packing, layout, bits)
        scale = expert[f"{matrix}_scale"]
        if has_order(problem):
            groups = expert[f"{matrix}_order"]
            order = groups.argsort(stable=True)
            codes = dense(join_bytes(split_bytes(codes, bits).index_select(1, order), bits))
            found[f"{matrix}_order"] = order.to(torch.int32)
            if matrix == "w2" and has_group_index(problem):
                found["w2_group_index"] = groups.index_select(0, order)
        found[matrix] = codes
        found[f"{matrix}_scale"] = dense(scale if layout == "n_first" else scale.T)
        if problem.scheme.zero_points:
            zeros = expert[f"{matrix}_zero_point"]
            found[f"{matrix}_zero_point"] = zeros_to_canonical(zeros, packing, layout, bits)
        if problem.has_bias:
            found[f"{matrix}_bias"] = expert[f"{matrix}_bias"]
    return found


def canonical(given: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors: a second copy of the layer, for tests and tools.

    Args:
        given: parameters by the names in `parameters`.
        problem: the layer.
        is_transposed: see `read`.

    Raises:
        CheckpointError: see `read`.
    """
    raw = read(given, problem, is_transposed)
    experts = [
        canonical_expert({name: tensor[index] for name, tensor in raw.items()}, problem)
        for index in range(problem.local_experts)
    ]
    return {name: torch.stack([expert[name] for expert in experts]) for name in shapes(problem)}


def write(tensors: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """Inverse of `canonical`: parameters by vLLM's names. For tests and tools.

    Args:
        tensors: canonical tensors of the layer, in the shapes of `shapes`.
        problem: the layer; its scheme says which packing is written.
        is_transposed: the layout, where the packing has two: None for that of files, `[E, N, K]`.

    Raises:
        CheckpointError: the packing is unknown, or has no such layout.
    """
    packing, bits = packing_of(problem), problem.scheme.bits
    names = {own: name for name, own in parameters(problem).items()}
    layout: Layout = packing.layouts[-1] if is_transposed is None else "k_first" if is_transposed else "n_first"
    if layout not in packing.layouts:
        raise CheckpointError(f"the packing {problem.scheme.packing} is never {layout}", where=problem.layer)
    written: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for index in range(problem.local_experts):
        expert = {name: tensor[index] for name, tensor in tensors.items()}
        for matrix in MATRICES:
            codes, scale = expert[matrix], expert[f"{matrix}_scale"]
            parts = {matrix: codes, f"{matrix}_scale": scale if layout == "n_first" else scale.T}
            if has_order(problem):
                order = expert[f"{matrix}_order"].long()
                groups = torch.arange(len(order), dtype=torch.int32) // problem.scheme.group_size
                if matrix == "w2" and has_group_index(problem):
                    groups = expert["w2_group_index"]
                back = order.argsort()
                parts[f"{matrix}_order"] = groups[back]
                parts[matrix] = join_bytes(split_bytes(codes, bits)[:, back], bits)
            parts[matrix] = codes_from_canonical(parts[matrix], packing, layout, bits)
            if problem.scheme.zero_points:
                zeros = expert[f"{matrix}_zero_point"]
                parts[f"{matrix}_zero_point"] = zeros_from_canonical(zeros, packing, layout, bits)
            if problem.has_bias:
                parts[f"{matrix}_bias"] = expert[f"{matrix}_bias"]
            for own, part in parts.items():
                written[names[own]].append(part)
    return {name: torch.stack(experts) for name, experts in written.items()}


# --- Codes and numbers ------------------------------------------------------------------------------------------------


def dequantise(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    order: Tensor | None = None,
    group_index: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One canonical matrix to real values; see the module for the meaning of each tensor.

    Exact in float32 for 16-bit scales: a difference of codes has 9 bits, a scale at most 11.

    Args:
        codes: uint8 `[N, K * bits / 8]`.
        scales: `[N, G]`, a real dtype.
        bits: 4 or 8.
        zero_points: uint8 `[N, G]`; None for 2**(bits-1).
        order: int32 `[K]`; None when columns are in the order of input features.
        group_index: int32 `[K]`; None when all G groups have K / G neighbouring columns.
        dtype: of the result.

    Returns:
        `[N, K]`, columns in the order of input features.

    Raises:
        ValueError: K is no multiple of G and there is no group index.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    columns, groups = codes.shape[1] * 8 // bits, scales.shape[1]
    if group_index is None and columns % groups:
        raise ValueError(f"{columns} input features are no multiple of {groups} scales")
    values = split_bytes(codes, bits).to(work)
    if group_index is None:
        blocks = values.view(len(values), groups, columns // groups)
        blocks -= 1 << bits - 1 if zero_points is None else zero_points.to(work).unsqueeze(-1)
        blocks *= scales.to(work).unsqueeze(-1)
    else:
        chosen = group_index.long()
        values -= 1 << bits - 1 if zero_points is None else zero_points.to(work).index_select(1, chosen)
        values *= scales.to(work).index_select(1, chosen)
    if order is not None:
        values = values.index_select(1, order.long().argsort())
    return values.to(dtype)


def dequantise_expert(expert: Mapping[str, Tensor], which: Matrix) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from all canonical tensors of that expert.

    The width of a code follows from both matrices: w13 has a column, and w2 a row, for each of the hidden features.
    """
    bits = expert["w13"].shape[1] * 8 // expert["w2"].shape[0]
    return dequantise(
        expert[which],
        expert[f"{which}_scale"],
        bits,
        expert.get(f"{which}_zero_point"),
        expert.get(f"{which}_order"),
        expert.get(f"{which}_group_index"),
    )


def quantise(
    values: Tensor,
    bits: int,
    group_size: int,
    zero_points: bool = False,
    order: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Real values to canonical codes by rounding to nearest, with the ranges that GPTQ's and AWQ's tools take.

    Symmetric: the largest magnitude is half a step beyond the largest code. Asymmetric: codes span the group's smallest
    and largest value, and zero. Codes are rounded with the scale as it is stored: an error is at most half a step, plus
    what the scale's own rounding takes off the ends.

    Args:
        values: `[N, K]`, finite.
        bits: 4 or 8.
        group_size: input features a scale, which divides K; -1 for all.
        zero_points: asymmetric.
        order: `[K]`: column k of the codes is input feature ``order[k]``; None for no act order.
        scale_dtype: of the scales.

    Returns:
        uint8 codes `[N, K * bits / 8]`, scales `[N, G]`, uint8 zero points `[N, G]` or None.

    Raises:
        ValueError: K is no multiple of the group.
    """
    rows, columns = values.shape
    group = columns if group_size == -1 else group_size
    if columns % group:
        raise ValueError(f"{columns} input features are no multiple of the group {group}")
    values = values.to(torch.float32)
    if order is not None:
        values = values.index_select(1, order.long())
    blocks, largest = values.reshape(rows, columns // group, group), (1 << bits) - 1
    if zero_points:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    else:
        high = blocks.abs().amax(-1)
        low = -high
    scales = ((high - low) / largest).clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)
    steps = scales.to(torch.float32)
    zeros = (-low / steps).round().clamp(0, largest) if zero_points else torch.full_like(steps, 1 << bits - 1)
    codes = ((blocks / steps.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, largest).to(torch.uint8)
    packed = dense(join_bytes(codes.view(rows, columns), bits))
    return packed, scales, zeros.to(torch.uint8) if zero_points else None


def round_trip(values: Tensor) -> Tensor:
    """Activations through int8 with one scale a token, as kernels for integer activations take them.

    Args:
        values: float32 `[M, K]`, finite.

    Returns:
        float32 `[M, K]`: the nearest multiples of a token's largest magnitude over 127.
    """
    steps = values.abs().amax(-1, keepdim=True) / 127
    return (values / steps.clamp(min=torch.finfo(torch.float32).tiny)).round() * steps
