"""Reads and checks a WNA16 layer's parameters: names, shapes and dtypes in each packing.

Nothing is converted here; `wna16.canonical_expert` converts, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.sharding import has_act_order, scale_columns, split_reasons
from ..errors import CheckpointError
from ._checks import FLOAT_DTYPES, dtype_name, require_finite
from ._packings import PACKINGS, Layout, Packing, packed_shapes

Matrix = Literal["w13", "w2"]
MATRICES: tuple[Matrix, Matrix] = ("w13", "w2")


def _suffix_map(packing: Packing) -> dict[str, str]:
    """Canonical suffix by parameter suffix."""
    return {
        packing.weight: "",
        packing.scale: "_scale",
        packing.zero_point: "_zero_point",
        packing.group_index: "_order",
        "bias": "_bias",
    }


def packing_of(problem: Problem) -> Packing:
    """The packing of the layer's parameters.

    Raises:
        CheckpointError: the packing is unknown, or codes have neither 4 nor 8 bits.
    """
    scheme = problem.scheme
    if scheme.packing not in PACKINGS:
        raise CheckpointError(f"unknown packing {scheme.packing!r}", f"Known are {', '.join(PACKINGS)}", problem.layer)
    if scheme.bits not in (4, 8):
        raise CheckpointError(f"codes of {scheme.bits} bits cannot be read, only of 4 and 8", where=problem.layer)
    return PACKINGS[scheme.packing]


def matrix_sizes(problem: Problem) -> dict[Matrix, tuple[int, int, int]]:
    """Rows, input features and scales per row of each matrix on this rank."""
    first, second = scale_columns(problem)
    return {
        "w13": (problem.w13_rows, problem.hidden_size, first),
        "w2": (problem.hidden_size, problem.intermediate_size, second),
    }


def canonical_suffixes(problem: Problem) -> list[str]:
    """Suffixes of the canonical tensors that the layer's parameters hold."""
    optional = {
        "_zero_point": problem.scheme.zero_points, "_order": has_act_order(problem), "_bias": problem.has_bias
    }  # fmt: skip
    return ["", "_scale", *(suffix for suffix, present in optional.items() if present)]


def canonical_names(problem: Problem) -> dict[str, str]:
    """Canonical name by parameter name, for the parameters that the layer is read from.

    The ``qzeros`` of a symmetric GPTQ layer and the ``g_idx`` of a layer without act order are left out: files have
    them, but they carry no information.
    """
    kept = canonical_suffixes(problem)
    return {
        f"{matrix}_{suffix}": f"{matrix}{canonical}"
        for matrix in MATRICES
        for suffix, canonical in _suffix_map(packing_of(problem)).items()
        if canonical in kept
    }


def optional_endings(packing: str) -> tuple[str, ...]:
    """Last parts of the names of tensors that a checkpoint of a packing may have beside codes and scales. Where
    `canonical_names` has none of that name, it is only validated (`_wna16_checkpoint.check_unread_tensor`)."""
    form = PACKINGS[packing]
    shape = ("weight_shape",) if form.weight.startswith("weight") else ()
    return ("bias", form.group_index, form.zero_point, *shape)


def parameter_shapes(problem: Problem, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's parameters in a layout, by canonical name."""
    packing, kept = packing_of(problem), canonical_suffixes(problem)
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix, (rows, columns, groups) in matrix_sizes(problem).items():
        each = packed_shapes(packing, layout, problem.scheme.bits, rows, columns, groups) | {"_bias": (rows,)}
        shapes |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    return shapes


def read(parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters by canonical name, checked and not copied; `canonical_expert` converts them.

    Until then, tensors named ``_order`` hold the group of each input feature (GPTQ's ``g_idx``).

    Args:
        parameters: parameters by the names in `canonical_names`; others are ignored.
        problem: the layer, whose shapes the tensors must have.
        is_transposed: the layout, if the caller knows it; see `detect_layout`.

    Raises:
        CheckpointError: tensor parallelism would split groups or packed words; a tensor is missing, or has the wrong
            dtype, shape or values; the layout is ambiguous; or the rows of w13 alternate gate and up.
    """
    layout = detect_layout(parameters, problem, is_transposed)
    packing, shapes = packing_of(problem), parameter_shapes(problem, layout)
    found = {}
    for name, canonical in canonical_names(problem).items():
        tensor, dtypes = parameters[name], _allowed_dtypes(canonical, packing)
        if tensor.dtype not in dtypes:
            words = " or ".join(dtype_name(dtype) for dtype in dtypes)
            rule = f"{name} is {dtype_name(tensor.dtype)}, the packing {problem.scheme.packing} stores it as {words}"
            raise CheckpointError(rule, where=problem.layer)
        if tuple(tensor.shape) != shapes[canonical]:
            rule = f"{name} has shape {list(tensor.shape)}, expected {list(shapes[canonical])}"
            raise CheckpointError(rule, where=problem.layer)
        found[canonical] = tensor.data
    for name, canonical in canonical_names(problem).items():
        if canonical.endswith(("_scale", "_bias")):
            what = "scales" if canonical.endswith("_scale") else "biases"
            require_finite(found[canonical], what, name, problem)
        elif canonical.endswith("_order"):
            _check_group_index(found[canonical], name, problem)
        elif packing.signed and problem.scheme.bits == 4 and not canonical.endswith("_bias"):
            _check_range(found[canonical], name, problem)
    return found


def detect_layout(parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> Layout:
    """Whether a layer's parameters are `[E, N, K]` or transposed.

    vLLM loads compressed-tensors parameters transposed up to 0.26 and in the file's order from 0.31, and sets an
    attribute ``is_transposed`` on them. Without this attribute and without `is_transposed`, shapes decide, provided
    that each matrix of codes fits one layout only.

    Args:
        parameters: parameters by the names in `canonical_names`; only shapes and the attribute are read.
        problem: the layer.
        is_transposed: the layout, if the caller knows it.

    Raises:
        CheckpointError: a parameter is missing; attributes, packing and caller contradict each other; or the codes fit
            no layout, or fit both and nothing else tells them apart.
    """
    _check_problem(problem)
    packing, names = packing_of(problem), canonical_names(problem)
    for name in names:
        if name not in parameters:
            remedy = f"The layer's parameters are {', '.join(sorted(parameters))}"
            raise CheckpointError(f"{name} is missing", remedy, problem.layer)
    known = {} if is_transposed is None else {"is_transposed": is_transposed}
    for name, canonical in names.items():
        mark = getattr(parameters[name], "is_transposed", None)
        if mark is not None and not canonical.endswith(("_order", "_bias")):
            known[f"{name}.is_transposed"] = bool(mark)
    if len(packing.layouts) == 1:
        known[f"the packing {problem.scheme.packing} says it"] = packing.layouts == ("k_first",)
    if len(set(known.values())) > 1:
        words = ", ".join(f"{name}: {value}" for name, value in known.items())
        rule = f"it is contradictory whether parameters have their input features first ({words})"
        raise CheckpointError(rule, where=problem.layer)
    fitting: dict[str, list[Layout]] = {}
    for matrix in MATRICES:
        name = next(name for name, canonical in names.items() if canonical == matrix)
        shape = tuple(parameters[name].shape)
        shapes = {layout: parameter_shapes(problem, layout)[matrix] for layout in packing.layouts}
        fitting[name] = [layout for layout in packing.layouts if shapes[layout] == shape]
        if not fitting[name]:
            words = " or ".join(str(list(each)) for each in shapes.values())
            raise CheckpointError(f"{name} has shape {list(shape)}, expected {words}", where=problem.layer)
    if known:
        return "k_first" if next(iter(known.values())) else "n_first"
    for name, layouts in fitting.items():
        if len(layouts) > 1:
            rule = f"{name} {list(parameters[name].shape)} could have its rows or its input features first"
            remedy = (
                "Report it with the checkpoint's name: its files do not say whether rows or input features are first"
            )
            raise CheckpointError(rule, remedy, problem.layer)
    first, second = (layouts[0] for layouts in fitting.values())
    if first != second:
        rule = f"{' and '.join(fitting)} do not have their dimensions in the same order"
        raise CheckpointError(rule, where=problem.layer)
    return first


def detect_expert_layout(expert: Mapping[str, Tensor], problem: Problem) -> Layout:
    """The layout of one expert's tensors that `read` returned. Codes and scales together determine it: if the codes
    are square, the scales would be square too only if a group had as many features as a word has codes.

    Raises:
        CheckpointError: the shapes fit no layout, or more than one.
    """
    fitting = []
    for layout in packing_of(problem).layouts:
        shapes = parameter_shapes(problem, layout)
        if all(tuple(tensor.shape) == shapes[name][1:] for name, tensor in expert.items() if name in shapes):
            fitting.append(layout)
    if len(fitting) != 1:
        words = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in expert.items())
        rule = f"the tensors of one expert fit {len(fitting)} layouts of {problem.scheme.packing}: {words}"
        raise CheckpointError(rule, where=problem.layer)
    return fitting[0]


def _check_problem(problem: Problem) -> None:
    if problem.activation.interleaved:
        rule = "the rows of w13 alternate gate and up; WNA16 is read as gate rows, then up rows"
        raise CheckpointError(rule, where=problem.layer)
    reasons = split_reasons(problem)
    if reasons:
        remedy = next((reason.remedy for reason in reasons if reason.remedy), "")
        raise CheckpointError("; ".join(reason.detail for reason in reasons), remedy, problem.layer)


def _allowed_dtypes(canonical: str, packing: Packing) -> tuple[torch.dtype, ...]:
    if canonical.endswith(("_scale", "_bias")):
        return FLOAT_DTYPES
    return (torch.int32,) if canonical.endswith("_order") else (packing.word_dtype,)


def _check_range(values: Tensor, name: str, problem: Problem) -> None:
    low, high = (int(end) for end in torch.aminmax(values))
    if low < -8 or high > 7:
        raise CheckpointError(f"{name} has values from {low} to {high}; int4 is -8 to 7", where=problem.layer)


def _check_group_index(groups: Tensor, name: str, problem: Problem) -> None:
    """Refuses groups that do not exist or have more input features than the group size. A tensor-parallel rank may have
    fewer features of a group."""
    size = problem.scheme.group_size
    count = matrix_sizes(problem)["w2" if name.startswith("w2") else "w13"][2]
    low, high = (int(end) for end in torch.aminmax(groups))
    remedy = "The checkpoint is damaged"
    if low < 0 or high >= count:
        rule = f"{name} has groups from {low} to {high}; there are {count} of {size} input features"
        raise CheckpointError(rule, remedy, problem.layer)
    members = torch.zeros(groups.shape[0], count, dtype=torch.int32, device=groups.device)
    members.scatter_add_(1, groups.long(), torch.ones_like(groups))
    wrong = members > size
    if wrong.any():
        expert, group = (int(place) for place in wrong.nonzero()[0])
        rule = f"{name} gives group {group} of expert {expert} {int(members[expert, group])} input features, not {size}"
        raise CheckpointError(rule, remedy, problem.layer)


def check_shared_order(gate: Tensor, up: Tensor, where: str) -> None:
    """Refuses gate and up that do not have one group index: the first product multiplies both by the same inputs.

    Args:
        gate: the group of each input feature, integers `[H]`.
        up: the same of up, in any integer dtype.
        where: layer, tensor and expert, for messages.

    Raises:
        CheckpointError: they differ.
    """
    gate, up = gate.cpu(), up.to(gate.dtype).cpu()
    if not torch.equal(gate, up):
        at = int((gate != up).nonzero()[0])
        rule = f"gate and up have different group indices, from input {at} on: {int(gate[at])} and {int(up[at])}"
        raise CheckpointError(rule, "One product reads both: quantize the model with one order for them", where)
