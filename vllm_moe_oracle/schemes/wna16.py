"""WNA16: integer weight codes of 4 or 8 bits, floating-point scales per group of input features, 16-bit activations.

Canonical tensors of a layer: ``w13`` `[E, R, H * bits / 8]` and ``w2`` `[E, H, I * bits / 8]` uint8, unsigned codes,
two per byte for 4 bits, low nibble first; ``w13_scale`` `[E, R, H / g]` and ``w2_scale`` `[E, H, I / g]`, floating
point, one column if the group size g is -1 (per channel). R is 2 I (gate rows, then up rows), or I for non-gated
experts. Optional: ``w13_zero_point`` and ``w2_zero_point``, uint8 of the scales' shapes (without them the zero point is
2**(bits-1)); with act order ``group``, ``w13_order`` `[E, H]` and ``w2_order`` `[E, I]` int32;
``w13_bias`` `[E, R]` and ``w2_bias`` `[E, H]`.

    weight[n, k] = (code[n, k] - zero_point[n, k // g]) * scale[n, k // g]

With act order, column k of the codes is the weight of input feature ``order[k]``: features are sorted by group, and by
index within a group. A tensor-parallel rank's part of such a w2 has features of every group, so its scales and zero
points are those of all ranks, `[E, H, full I / g]`. ``w2_group_index`` `[E, I]` int32, in ascending order, then gives
the column of the scales for each column of the codes.

The packings of checkpoints and of vLLM's parameters are in `_packings`; `Scheme.packing` is one of ``gptq``,
``gptq_v2``, ``awq``, ``moe_wna16``, ``compressed-tensors`` (pack-quantized) and ``compressed-tensors-int``
(int-quantized).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.sharding import has_act_order, has_group_index
from ._checks import expert_chunks, largest_weight, require_biases_within, require_weights_within
from ._packings import (
    as_contiguous,
    codes_to_canonical,
    pack_codes,
    unpack_codes,
    zero_points_to_canonical,
)
from ._wna16_parameters import (
    MATRICES,
    Matrix,
    canonical_names,
    canonical_suffixes,
    detect_expert_layout,
    matrix_sizes,
    packing_of,
)
from ._wna16_parameters import read as read

logger = logging.getLogger("vllm.moe_oracle")

_TINY = float(torch.finfo(torch.float32).tiny)
"""The smallest normal number of float32 and bfloat16. float16's subnormal ones are normal in both."""

_OPTIONAL = ("zero_point", "order", "group_index")

UNLOADED = {f"{matrix}{suffix}": 0xFF for matrix in MATRICES for suffix in ("_scale", "_order")}
"""Bytes that no checkpoint holds (NaN, or group -1): they mark what was not loaded yet, by canonical name. Codes
are not marked: every word is valid."""

DUMMY_FILL: dict[str, int] = {}
"""vLLM's own dummy scales serve."""


def parameter_names(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, for the parameters that the layer is read from."""
    return {canonical: name for name, canonical in canonical_names(problem).items()}


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name."""
    found: dict[str, tuple[int, ...]] = {}
    for matrix, (rows, columns, groups) in matrix_sizes(problem).items():
        each: dict[str, tuple[int, ...]] = {
            "": (rows, columns * problem.scheme.bits // 8),
            "_scale": (rows, groups),
            "_zero_point": (rows, groups),
            "_order": (columns,),
            "_bias": (rows,),
        }
        kept = canonical_suffixes(problem)
        found |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    if has_group_index(problem):
        found["w2_group_index"] = (problem.local_experts, problem.intermediate_size)
    return found


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` returned. No shape depends on values: meta tensors work.

    Args:
        expert: packed tensors by canonical name, without the leading expert dimension. Not modified.
        problem: the layer.

    Returns:
        Contiguous tensors by canonical name; they share memory with `expert` where nothing had to change.

    Raises:
        CheckpointError: the shapes are not those of the packing.
    """
    layout = detect_expert_layout(expert, problem)
    packing, bits = packing_of(problem), problem.scheme.bits
    found: dict[str, Tensor] = {}
    for matrix in MATRICES:
        codes = codes_to_canonical(expert[matrix], packing, layout, bits)
        scale = expert[f"{matrix}_scale"]
        if has_act_order(problem):
            groups = expert[f"{matrix}_order"]
            order = groups.argsort(stable=True)
            codes = as_contiguous(pack_codes(unpack_codes(codes, bits).index_select(1, order), bits))
            found[f"{matrix}_order"] = order.to(torch.int32)
            if matrix == "w2" and has_group_index(problem):
                found["w2_group_index"] = groups.index_select(0, order)
        found[matrix] = codes
        found[f"{matrix}_scale"] = as_contiguous(scale if layout == "n_first" else scale.T)
        if problem.scheme.zero_points:
            zeros = expert[f"{matrix}_zero_point"]
            found[f"{matrix}_zero_point"] = zero_points_to_canonical(zeros, packing, layout, bits)
        if problem.has_bias:
            found[f"{matrix}_bias"] = expert[f"{matrix}_bias"]
    return found


# --- Damage -----------------------------------------------------------------------------------------------------------


def check_values(tensors: Mapping[str, Tensor], problem: Problem) -> None:
    """Refuses damage in what `read` returned: weights, codes times scales, that are too large; see
    `_checks.largest_weight`.

    A scale of zero is legal, for it makes a group of zeros in the reference and in every kernel; so is a subnormal one,
    which some kernels take for zero: float32 and bfloat16 then lose weights below 2**-118. Pruned experts, rows and
    padding have such scales. What was lost is logged where the codes of such a group differ, in an expert with other
    scales: the group had weights once.

    Args:
        tensors: packed tensors by canonical name, `[local_experts, ...]` each.
        problem: the layer.

    Raises:
        CheckpointError: a weight is too large; the message names layer, parameter, expert, place and value.
    """
    names, largest = parameter_names(problem), (1 << problem.scheme.bits) - 1
    limit, lost = largest_weight(problem.dtype) / largest, ""
    for matrix in MATRICES:
        for expert in _suspects(tensors[f"{matrix}_scale"], limit):
            canonical = canonical_expert({name: each[expert] for name, each in tensors.items()}, problem)
            weights = functools.partial(dequantize_part, canonical, matrix, problem)
            columns = canonical[matrix].shape[1] * 8 // problem.scheme.bits
            large = (canonical[f"{matrix}_scale"].abs() > limit).any(-1)
            require_weights_within(large, weights, names[f"{matrix}_scale"], expert, columns, problem)
            lost = lost or _lost_group(canonical, matrix, names[f"{matrix}_scale"], expert, problem)
    require_biases_within(tensors, names, problem)
    if lost:
        logger.warning("moe_oracle: %s: %s", problem.layer, lost)


def _suspects(scales: Tensor, limit: float) -> list[int]:
    """Experts with a scale beyond a limit, or with a zero or subnormal one beside others."""
    found = []
    for start, part in expert_chunks(scales.flatten(1)):
        low, high = (each.to(torch.float32) for each in torch.aminmax(part.abs(), dim=1))
        suspect = (high > limit) | ((low < _TINY) & (high >= _TINY))
        found += [start + index for index in suspect.nonzero().flatten().tolist()]
    return found


def _lost_group(canonical: Mapping[str, Tensor], matrix: Matrix, name: str, expert: int, problem: Problem) -> str:
    """The first group of an expert whose codes differ though its scale is zero or subnormal, in words; "" for none."""
    scales = canonical[f"{matrix}_scale"]
    tiny = scales.to(torch.float32).abs() < _TINY
    rows = tiny.any(-1).nonzero().flatten()
    if not len(rows) or f"{matrix}_group_index" in canonical:
        return ""
    codes = unpack_codes(canonical[matrix][rows], problem.scheme.bits)
    low, high = torch.aminmax(torch.unflatten(codes, 1, (scales.shape[1], -1)), dim=-1)
    places = (tiny[rows] & (low != high)).nonzero()
    if not len(places):
        return ""
    row, group = int(rows[places[0, 0]]), int(places[0, 1])
    return (
        f"{len(places)} scales in {name} of local expert {expert} are zero or subnormal, over codes that differ; their "
        f"weights are zero; the first is {float(scales[row, group]):g} in row {row}, group {group}"
    )


# --- Quantize and dequantize ------------------------------------------------------------------------------------------


def dequantize(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    order: Tensor | None = None,
    group_index: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantizes one canonical matrix; the module describes the tensors.

    Exact in float32 for 16-bit scales: a code minus a zero point has 9 bits, a scale at most 11.

    Args:
        codes: uint8 `[N, K * bits / 8]`.
        scales: `[N, G]`, floating point.
        bits: 4 or 8.
        zero_points: uint8 `[N, G]`; None for 2**(bits-1).
        order: int32 `[K]`, the act order; None if columns are in the order of input features.
        group_index: int32 `[K]`; None if each group is K / G neighboring columns.
        dtype: of the result.

    Returns:
        `[N, K]`, columns in the order of input features.

    Raises:
        ValueError: K is not a multiple of G and there is no group index.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    columns, groups = codes.shape[1] * 8 // bits, scales.shape[1]
    if group_index is None and columns % groups:
        raise ValueError(f"{columns} input features are not a multiple of {groups} scales")
    values = unpack_codes(codes, bits).to(work)
    if group_index is None:
        blocks = values.view(len(values), groups, columns // groups)
        blocks -= 1 << bits - 1 if zero_points is None else zero_points.to(work).unsqueeze(-1)
        blocks *= scales.to(work).unsqueeze(-1)
    else:
        columns_of = group_index.long()
        values -= 1 << bits - 1 if zero_points is None else zero_points.to(work).index_select(1, columns_of)
        values *= scales.to(work).index_select(1, columns_of)
    if order is not None:
        values = values.index_select(1, order.long().argsort())
    return values.to(dtype)


def dequantize_expert(expert: Mapping[str, Tensor], which: Matrix) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from all canonical tensors of that expert.

    The code width follows from both matrices: w13 has one column, and w2 one row, per hidden feature.
    """
    bits = expert["w13"].shape[1] * 8 // expert["w2"].shape[0]
    zeros, order, index = (expert.get(f"{which}_{each}") for each in _OPTIONAL)
    return dequantize(expert[which], expert[f"{which}_scale"], bits, zeros, order, index)


def dequantize_part(
    expert: Mapping[str, Tensor],
    which: Matrix,
    problem: Problem,
    rows: slice | Tensor = slice(None),
    features: slice = slice(None),
) -> Tensor:
    """Some rows, or some input features, of one matrix of an expert, float32.

    Args:
        expert: canonical tensors of one expert.
        which: the matrix; only w13, whose groups are all there, can be asked for features.
        problem: the layer.
        rows: the rows.
        features: the input features.
    """
    bits = problem.scheme.bits
    codes, scales = expert[which][rows], expert[f"{which}_scale"][rows]
    zeros, order, index = (expert.get(f"{which}_{each}") for each in _OPTIONAL)
    zeros = None if zeros is None else zeros[rows]
    if features.start is None:
        return dequantize(codes, scales, bits, zeros, order, index)
    columns = codes.shape[1] * 8 // bits
    places = torch.arange(columns, device=codes.device)
    places = (places if order is None else order.long().argsort())[features]
    groups = places // (columns // scales.shape[1])
    values = unpack_codes(codes, bits).index_select(1, places).to(torch.float32)
    values -= 1 << bits - 1 if zeros is None else zeros.to(torch.float32).index_select(1, groups)
    return values * scales.to(torch.float32).index_select(1, groups)


def quantize(
    values: Tensor,
    bits: int,
    group_size: int,
    zero_points: bool = False,
    order: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantizes to canonical codes by rounding to nearest, with the ranges that GPTQ and AWQ use.

    Symmetric: the largest magnitude is half a step beyond the largest code. Asymmetric: codes span the group's smallest
    and largest value, and zero. Codes are computed with the stored (rounded) scale, so the error is at most half a
    step, except at the ends of the range, which the scale's rounding can cut.

    Args:
        values: `[N, K]`, finite.
        bits: 4 or 8.
        group_size: input features per scale, a divisor of K; -1 for one scale per row.
        zero_points: quantize asymmetrically.
        order: `[K]`: column k of the codes is input feature ``order[k]``; None for no act order.
        scale_dtype: of the scales.

    Returns:
        uint8 codes `[N, K * bits / 8]`, scales `[N, G]`, uint8 zero points `[N, G]` or None.

    Raises:
        ValueError: K is not a multiple of the group.
    """
    rows, columns = values.shape
    group = columns if group_size == -1 else group_size
    if columns % group:
        raise ValueError(f"{columns} input features are not a multiple of the group {group}")
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
    packed = as_contiguous(pack_codes(codes.view(rows, columns), bits))
    return packed, scales, zeros.to(torch.uint8) if zero_points else None


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized to int8 with one scale per token and dequantized, as W4A8 integer kernels use them.

    Args:
        values: float32 `[..., K]`, finite.

    Returns:
        float32 `[..., K]`: nearest multiples of the token's largest magnitude / 127.
    """
    steps = values.abs().amax(-1, keepdim=True) / 127
    return (values / steps.clamp(min=torch.finfo(torch.float32).tiny)).round() * steps
