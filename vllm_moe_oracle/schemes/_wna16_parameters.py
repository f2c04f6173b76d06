"""The parameters of a layer of integer experts: names, shapes and dtypes of each packing, read and checked as they are.

Nothing is converted here; `wna16.canonical_expert` does that, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.planner import group_reasons, has_order, packing_reasons, scale_columns
from ..oracle.problem import Problem
from ._finite import refuse_not_finite
from ._packings import PACKINGS, Layout, Packing, raw_shapes

Matrix = Literal["w13", "w2"]
MATRICES: tuple[Matrix, Matrix] = ("w13", "w2")

REAL = (torch.bfloat16, torch.float16, torch.float32)


def _suffixes(packing: Packing) -> dict[str, str]:
    """Canonical suffix by parameter suffix."""
    return {
        packing.weight: "",
        packing.scale: "_scale",
        packing.zero_point: "_zero_point",
        packing.group_index: "_order",
        "bias": "_bias",
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


def suffixes_of(problem: Problem) -> list[str]:
    """Suffixes of the canonical tensors that the layer's parameters hold."""
    optional = {
        "_zero_point": problem.scheme.zero_points, "_order": has_order(problem), "_bias": problem.has_bias
    }  # fmt: skip
    return ["", "_scale", *(suffix for suffix, there in optional.items() if there)]


def parameters(problem: Problem) -> dict[str, str]:
    """Canonical name by parameter name, of exactly the parameters that the layer is read from.

    A symmetric GPTQ layer's ``qzeros`` and the ``g_idx`` of a layer without act order are not among them: files carry
    both, and they say nothing.
    """
    kept = suffixes_of(problem)
    return {
        f"{matrix}_{suffix}": f"{matrix}{canonical}"
        for matrix in MATRICES
        for suffix, canonical in _suffixes(packing_of(problem)).items()
        if canonical in kept
    }


def expected_shapes(problem: Problem, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's parameters in a layout, by canonical name."""
    packing, kept = packing_of(problem), suffixes_of(problem)
    found: dict[str, tuple[int, ...]] = {}
    for matrix, (rows, columns, groups) in sizes(problem).items():
        each = raw_shapes(packing, layout, problem.scheme.bits, rows, columns, groups) | {"_bias": (rows,)}
        found |= {f"{matrix}{suffix}": (problem.local_experts, *each[suffix]) for suffix in kept}
    return found


def read(given: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters by canonical name, checked and not copied; `canonical_expert` converts them.

    Args:
        given: parameters by the names in `parameters`; others are not looked at.
        problem: the layer, whose shapes the tensors must have.
        is_transposed: what the caller knows of the layout; see `layout_of`.

    Raises:
        CheckpointError: groups or packed words do not survive the cut; a tensor is missing, or has the wrong dtype or
            shape, or values that cannot be; the layout is not known; or rows alternate gate and up.
    """
    layout = layout_of(given, problem, is_transposed)
    packing, shapes = packing_of(problem), expected_shapes(problem, layout)
    found = {}
    for name, canonical in parameters(problem).items():
        tensor, dtypes = given[name], _dtypes(canonical, packing)
        if tensor.dtype not in dtypes:
            words = " or ".join(_word(dtype) for dtype in dtypes)
            rule = f"{name} is {_word(tensor.dtype)}, the packing {problem.scheme.packing} stores it as {words}"
            raise CheckpointError(rule, where=problem.layer)
        if tuple(tensor.shape) != shapes[canonical]:
            rule = f"{name} has shape {list(tensor.shape)}, expected {list(shapes[canonical])}"
            raise CheckpointError(rule, where=problem.layer)
        found[canonical] = tensor.data
    for name, canonical in parameters(problem).items():
        if canonical.endswith(("_scale", "_bias")):
            what = "scales" if canonical.endswith("_scale") else "biases"
            refuse_not_finite(found[canonical], what, name, problem)
        elif canonical.endswith("_order"):
            _check_group_index(found[canonical], name, problem)
        elif packing.signed and problem.scheme.bits == 4 and not canonical.endswith("_bias"):
            _check_range(found[canonical], name, problem)
    return found


def layout_of(given: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None) -> Layout:
    """Whether a layer's parameters are `[E, N, K]` or each transposed: known, and never guessed.

    vLLM loads compressed-tensors transposed up to 0.26 and as they are from 0.31, and marks its parameters with an
    attribute ``is_transposed``. Without such a mark, and without a word of the caller, shapes decide, but only where
    neither matrix of codes could be read both ways.

    Args:
        given: parameters by the names in `parameters`; only shapes and the attribute are looked at.
        problem: the layer.
        is_transposed: what the caller knows; None for nothing.

    Raises:
        CheckpointError: a parameter is missing, the marks contradict each other, the packing or the caller, the codes
            fit no layout, or they fit both and nothing is known.
    """
    _check_problem(problem)
    packing, names = packing_of(problem), parameters(problem)
    for name in names:
        if name not in given:
            remedy = f"The layer's parameters are {', '.join(sorted(given))}"
            raise CheckpointError(f"{name} is missing", remedy, problem.layer)
    known = {} if is_transposed is None else {"is_transposed": is_transposed}
    for name, canonical in names.items():
        mark = getattr(given[name], "is_transposed", None)
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
        shape = tuple(given[name].shape)
        shapes = {layout: expected_shapes(problem, layout)[matrix] for layout in packing.layouts}
        fitting[name] = [layout for layout in packing.layouts if shapes[layout] == shape]
        if not fitting[name]:
            words = " or ".join(str(list(each)) for each in shapes.values())
            raise CheckpointError(f"{name} has shape {list(shape)}, expected {words}", where=problem.layer)
    if known:
        return "k_first" if next(iter(known.values())) else "n_first"
    for name, layouts in fitting.items():
        if len(layouts) > 1:
            rule = f"{name} {list(given[name].shape)} could have its rows or its input features first"
            raise CheckpointError(rule, "Say which with is_transposed (True: input features first)", problem.layer)
    first, second = (layouts[0] for layouts in fitting.values())
    if first != second:
        rule = f"{' and '.join(fitting)} do not have their dimensions in the same order"
        raise CheckpointError(rule, where=problem.layer)
    return first


def layout_of_expert(expert: Mapping[str, Tensor], problem: Problem) -> Layout:
    """The layout of one expert's tensors that `read` found. Codes and scales together leave no choice: square codes
    have as many words a row as rows, and the scales are then square only if a group were a word.

    Raises:
        CheckpointError: the shapes fit no layout, or more than one.
    """
    fitting = []
    for layout in packing_of(problem).layouts:
        shapes = expected_shapes(problem, layout)
        if all(tuple(tensor.shape) == shapes[name][1:] for name, tensor in expert.items() if name in shapes):
            fitting.append(layout)
    if len(fitting) != 1:
        words = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in expert.items())
        rule = f"the tensors of one expert fit {len(fitting)} layouts of {problem.scheme.packing}: {words}"
        raise CheckpointError(rule, where=problem.layer)
    return fitting[0]


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
        return REAL
    return (torch.int32,) if canonical.endswith("_order") else (packing.word,)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_range(values: Tensor, name: str, problem: Problem) -> None:
    low, high = (int(end) for end in torch.aminmax(values))
    if low < -8 or high > 7:
        raise CheckpointError(f"{name} has values from {low} to {high}; int4 is -8 to 7", where=problem.layer)


def _check_group_index(groups: Tensor, name: str, problem: Problem) -> None:
    """Every group must exist, and none have more features than a group has. Where all features are here, that means
    exactly as many; a rank may have fewer."""
    size = problem.scheme.group_size
    count = sizes(problem)["w2" if name.startswith("w2") else "w13"][2]
    low, high = (int(end) for end in torch.aminmax(groups))
    remedy = "The checkpoint is damaged, or its group index was never loaded"
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
