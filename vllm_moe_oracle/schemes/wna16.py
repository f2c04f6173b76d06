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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.planner import group_reasons, has_group_index, has_order, loaded_group, packing_reasons, scale_columns
from ..oracle.problem import Problem
from ._packings import (
    PACKINGS,
    Layout,
    Packing,
    codes_from_canonical,
    codes_to_canonical,
    join_bytes,
    raw_shapes,
    split_bytes,
    zeros_from_canonical,
    zeros_to_canonical,
)

Matrix = Literal["w13", "w2"]
MATRICES: tuple[Matrix, Matrix] = ("w13", "w2")

_REAL = (torch.bfloat16, torch.float16, torch.float32)


def _suffixes(packing: Packing) -> dict[str, str]:
    """Canonical suffix by parameter suffix."""
    return {
        packing.weight: "",
        packing.scale: "_scale",
        packing.zero_point: "_zero_point",
        packing.group_index: "_order",
        "bias": "_bias",
    }


# Names of the parameters that vLLM's loaders fill in any packing, and their canonical names.
PARAMETERS = {
    f"{matrix}_{suffix}": f"{matrix}{canonical}"
    for packing in PACKINGS.values()
    for suffix, canonical in _suffixes(packing).items()
    for matrix in MATRICES
}


def packing_of(problem: Problem) -> Packing:
    """How the layer's parameters are packed.

    Raises:
        CheckpointError: the packing has no reader, or the width of codes has none.
    """
    scheme = problem.scheme
    if scheme.packing not in PACKINGS:
        raise CheckpointError(f"unknown packing {scheme.packing!r}", f"Known are {', '.join(PACKINGS)}", problem.layer)
    if scheme.bits not in (4, 8):
        raise CheckpointError(f"codes of {scheme.bits} bits cannot be read, only of 4 and 8", where=problem.layer)
    return PACKINGS[scheme.packing]


def sizes(problem: Problem) -> dict[Matrix, tuple[int, int, int]]:
    """Rows, input features and scales per row of each matrix on this rank."""
    first, second = scale_columns(problem)
    return {
        "w13": (problem.w13_rows, problem.hidden_size, first),
        "w2": (problem.hidden_size, problem.intermediate_size, second),
    }


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
        kept = _suffixes_of(problem)
        found |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    if has_group_index(problem):
        found["w2_group_index"] = (problem.local_experts, problem.intermediate_size)
    return found


def _suffixes_of(problem: Problem) -> list[str]:
    """Suffixes of the canonical tensors that the layer's parameters hold."""
    optional = {
        "_zero_point": problem.scheme.zero_points, "_order": has_order(problem), "_bias": problem.has_bias
    }  # fmt: skip
    return ["", "_scale", *(suffix for suffix, there in optional.items() if there)]


def parameters_of(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, of exactly the parameters that the layer is read from.

    A symmetric GPTQ layer's ``qzeros`` and the ``g_idx`` of a layer without act order are not among them: files carry
    both, and they say nothing.
    """
    kept = _suffixes_of(problem)
    return {
        f"{matrix}{canonical}": f"{matrix}_{suffix}"
        for matrix in MATRICES
        for suffix, canonical in _suffixes(packing_of(problem)).items()
        if canonical in kept
    }


# --- Reading ----------------------------------------------------------------------------------------------------------


class Raw(NamedTuple):
    """A layer's parameters as they are packed, checked.

    Attributes:
        tensors: by canonical name, `[E, ...]` each; the parameters' own memory.
        layout: order of the dimensions of codes, scales and zero points.
    """

    tensors: dict[str, Tensor]
    layout: Layout


def layout_of(parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> Layout:
    """Whether a layer's parameters are `[E, N, K]` or transposed, known and never guessed.

    vLLM loads compressed-tensors transposed up to 0.26 and as they are from 0.31, and marks its parameters with an
    attribute ``is_transposed``. Without any such word the shapes decide, but only where each matrix of codes can be
    read in one way.

    Args:
        parameters: by vLLM's names; only shapes and the attribute are looked at.
        problem: the layer.
        is_transposed: what the caller knows; None for nothing.

    Raises:
        CheckpointError: what is known contradicts itself or the shapes, the shapes fit no layout, or they fit both and
            nothing else is known. Also a parameter that is missing.
    """
    _check_problem(problem)
    packing, names = packing_of(problem), parameters_of(problem)
    known: dict[str, bool] = {} if is_transposed is None else {"is_transposed": is_transposed}
    for canonical, name in names.items():
        mark = getattr(_present(parameters, name, problem), "is_transposed", None)
        if mark is not None and not canonical.endswith(("_order", "_bias")):
            known[f"{name}.is_transposed"] = bool(mark)
    if len(set(known.values())) > 1:
        words = ", ".join(f"{name} is {value}" for name, value in known.items())
        raise CheckpointError(f"parameters contradict each other: {words}", where=problem.layer)
    fitting = {matrix: _fitting(parameters[names[matrix]], matrix, packing, problem) for matrix in MATRICES}
    if known:
        layout: Layout = "k_first" if next(iter(known.values())) else "n_first"
        if layout not in packing.layouts:
            rule = (
                f"{next(iter(known))} is {layout == 'k_first'}, the packing {problem.scheme.packing} is the other way"
            )
            raise CheckpointError(rule, where=problem.layer)
        return layout
    if len(packing.layouts) == 1:
        return packing.layouts[0]
    for matrix, layouts in fitting.items():
        if len(layouts) != 1:
            shape = list(parameters[names[matrix]].shape)
            wanted = " nor ".join(f"{list(_expected(problem, each)[matrix])}" for each in packing.layouts)
            rule = f"{names[matrix]} {shape} can be read with either dimension first"
            if not layouts:
                rule = f"{names[matrix]} has shape {shape}, expected neither {wanted}"
            remedy = "" if not layouts else "Say which with is_transposed (True: input features first)"
            raise CheckpointError(rule, remedy, problem.layer)
    if fitting["w13"] != fitting["w2"]:
        rule = f"{names['w13']} and {names['w2']} have their dimensions in different orders"
        raise CheckpointError(rule, where=problem.layer)
    return fitting["w13"][0]


def _fitting(tensor: Tensor, matrix: Matrix, packing: Packing, problem: Problem) -> list[Layout]:
    return [layout for layout in packing.layouts if tuple(tensor.shape) == _expected(problem, layout)[matrix]]


def _present(parameters: Mapping[str, Tensor], name: str, problem: Problem) -> Tensor:
    if name not in parameters:
        remedy = f"The layer's parameters are {', '.join(sorted(parameters))}"
        raise CheckpointError(f"{name} is missing", remedy, problem.layer)
    return parameters[name]


def _expected(problem: Problem, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the packed tensors of a layer by canonical name."""
    packing, kept = packing_of(problem), _suffixes_of(problem)
    found: dict[str, tuple[int, ...]] = {}
    for matrix, (rows, columns, groups) in sizes(problem).items():
        each = raw_shapes(packing, layout, problem.scheme.bits, rows, columns, groups) | {"_bias": (rows,)}
        found |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    return found


def raw(parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> Raw:
    """A layer's loaded parameters, checked and not converted: nothing is copied.

    Args:
        parameters: by vLLM's names; those that the scheme has no use for are not looked at.
        problem: the layer.
        is_transposed: see `layout_of`.

    Raises:
        CheckpointError: groups or packed words do not survive the cut; a tensor is missing, or has the wrong dtype or
            shape, or values that cannot be; the layout is not known; or rows alternate gate and up.
    """
    layout = layout_of(parameters, problem, is_transposed)
    found = check_shapes(parameters, problem, layout)
    for matrix in MATRICES:
        _check_scales(found[f"{matrix}_scale"], matrix, problem)
        if has_order(problem):
            _check_group_index(found[f"{matrix}_order"], matrix, problem)
        if packing_of(problem).signed and problem.scheme.bits == 4:
            names = [name for name in (matrix, f"{matrix}_zero_point") if name in found]
            for name in names:
                _check_range(found[name], name, problem)
    return Raw(found, layout)


def check_shapes(parameters: Mapping[str, Tensor], problem: Problem, layout: Layout) -> dict[str, Tensor]:
    """The parameters by canonical name, with their dtypes and shapes checked, and no value looked at.

    Raises:
        CheckpointError: as for `raw`.
    """
    _check_problem(problem)
    packing, expected = packing_of(problem), _expected(problem, layout)
    found = {}
    for canonical, name in parameters_of(problem).items():
        tensor = _present(parameters, name, problem)
        dtypes = _dtypes(canonical, packing)
        if tensor.dtype not in dtypes:
            words = " or ".join(_word(dtype) for dtype in dtypes)
            rule = f"{name} is {_word(tensor.dtype)}, the packing {problem.scheme.packing} stores it as {words}"
            raise CheckpointError(rule, where=problem.layer)
        if tuple(tensor.shape) != expected[canonical]:
            rule = f"{name} has shape {list(tensor.shape)}, expected {list(expected[canonical])}"
            raise CheckpointError(rule, where=problem.layer)
        found[canonical] = tensor.data
    return found


def _check_problem(problem: Problem) -> None:
    if problem.activation.interleaved:
        rule = "the rows of the first product alternate gate and up; WNA16 is read as gate rows, then up rows"
        raise CheckpointError(rule, where=problem.layer)
    reasons = group_reasons(problem) + packing_reasons(problem)
    if reasons:
        remedy = next((reason.remedy for reason in reasons if reason.remedy), "")
        raise CheckpointError("; ".join(reason.detail for reason in reasons), remedy, problem.layer)


def _dtypes(canonical: str, packing: Packing) -> tuple[torch.dtype, ...]:
    if canonical.endswith(("_scale", "_bias")):
        return _REAL
    return (torch.int32,) if canonical.endswith("_order") else (packing.word,)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_scales(scales: Tensor, matrix: str, problem: Problem) -> None:
    bad = int((~torch.isfinite(scales)).sum())
    if bad:
        rule = f"{bad} of {scales.numel()} scales of {matrix} are NaN or infinite"
        raise CheckpointError(rule, "The checkpoint is damaged, or a scale was never loaded", problem.layer)


def _check_range(values: Tensor, name: str, problem: Problem) -> None:
    low, high = (int(end) for end in torch.aminmax(values))
    if low < -8 or high > 7:
        raise CheckpointError(f"{name} has values from {low} to {high}; int4 is -8 to 7", where=problem.layer)


def _check_group_index(groups: Tensor, matrix: Matrix, problem: Problem) -> None:
    """Every group must exist and have no more features than a group has; exactly as many where all of them are here."""
    size, count = problem.scheme.group_size, sizes(problem)[matrix][2]
    low, high = (int(end) for end in torch.aminmax(groups))
    remedy = "The checkpoint is damaged, or its group index was never loaded"
    if low < 0 or high >= count:
        rule = f"the group index of {matrix} spans {low} to {high}; there are {count} groups of {size}"
        raise CheckpointError(rule, remedy, problem.layer)
    members = torch.zeros(groups.shape[0], count, dtype=torch.int32, device=groups.device)
    members.scatter_add_(1, groups.long(), torch.ones_like(groups))
    wrong = members > size if matrix == "w2" and has_group_index(problem) else members != size
    if wrong.any():
        expert, group = (int(place) for place in wrong.nonzero()[0])
        found = int(members[expert, group])
        rule = f"group {group} of expert {expert}'s {matrix} has {found} input features, a group has {size}"
        raise CheckpointError(rule, remedy, problem.layer)


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem, layout: Layout) -> dict[str, Tensor]:
    """Canonical tensors of one expert from its packed ones. Nothing depends on values but values: meta tensors work.

    Args:
        expert: packed tensors by canonical name, without the leading expert dimension, as in `Raw.tensors`. Not
            modified.
        problem: the layer.
        layout: of the packed tensors, from `layout_of`.

    Returns:
        Tensors by canonical name, all contiguous. What was canonical before may be the very memory that came in.
    """
    packing, bits = packing_of(problem), problem.scheme.bits
    found: dict[str, Tensor] = {}
    for matrix in MATRICES:
        codes = codes_to_canonical(expert[matrix], packing, layout, bits)
        scale = expert[f"{matrix}_scale"]
        if has_order(problem):
            groups = expert[f"{matrix}_order"]
            order = groups.argsort(stable=True)
            codes = join_bytes(split_bytes(codes, bits).index_select(1, order), bits).contiguous()
            found[f"{matrix}_order"] = order.to(torch.int32)
            if matrix == "w2" and has_group_index(problem):
                found["w2_group_index"] = groups.index_select(0, order)
        found[matrix] = codes
        found[f"{matrix}_scale"] = scale.contiguous() if layout == "n_first" else scale.T.contiguous()
        if problem.scheme.zero_points:
            zeros = expert[f"{matrix}_zero_point"]
            found[f"{matrix}_zero_point"] = zeros_to_canonical(zeros, packing, layout, bits)
        if problem.has_bias:
            found[f"{matrix}_bias"] = expert[f"{matrix}_bias"]
    return found


def read(parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors, a second copy of the layer: for a few experts, tests and tools.

    A server converts one expert at a time, with `raw` and `canonical_expert`.

    Args:
        parameters: by vLLM's names, see `parameters_of`; others are not looked at.
        problem: the layer, whose shapes the tensors must have.
        is_transposed: see `layout_of`.

    Raises:
        CheckpointError: see `raw`.
    """
    tensors, layout = raw(parameters, problem, is_transposed)
    experts = [
        canonical_expert({name: tensor[index] for name, tensor in tensors.items()}, problem, layout)
        for index in range(problem.local_experts)
    ]
    return {name: torch.stack([expert[name] for expert in experts]) for name in shapes(problem)}


def write(canonical: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """Inverse of `read`: parameters by vLLM's names. For tests and tools.

    Args:
        canonical: canonical tensors of the layer, in the shapes of `shapes`.
        problem: the layer; its scheme says which packing is written.
        is_transposed: the layout, where the packing has two: None for that of files, `[E, N, K]`.

    Raises:
        CheckpointError: the packing is unknown, or has no such layout.
    """
    packing, bits, names = packing_of(problem), problem.scheme.bits, parameters_of(problem)
    layout: Layout = packing.layouts[-1] if is_transposed is None else "k_first" if is_transposed else "n_first"
    if layout not in packing.layouts:
        raise CheckpointError(f"the packing {problem.scheme.packing} is never {layout}", where=problem.layer)
    written: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for index in range(problem.local_experts):
        expert = {name: tensor[index] for name, tensor in canonical.items()}
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
            for name, tensor in parts.items():
                written[names[name]].append(tensor)
    return {name: torch.stack(tensors) for name, tensors in written.items()}


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
    packed = join_bytes(codes.view(rows, columns), bits).contiguous()
    return packed, scales, zeros.to(torch.uint8) if zero_points else None


__all__ = [
    "MATRICES", "PACKINGS", "PARAMETERS", "Layout", "Matrix", "Packing", "Raw", "canonical_expert", "check_shapes",
    "dequantise", "dequantise_expert", "layout_of", "loaded_group", "packing_of", "parameters_of", "quantise", "raw",
    "read", "shapes", "sizes", "write",
]  # fmt: skip
