"""What the two microscaling formats share when a layer's loaded parameters are looked at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.problem import Problem
from ._finite import refuse_not_finite

E8M0_NAN = 255
"""The one e8m0 code that is no scale."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def checked(
    parameters: Mapping[str, Tensor],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    codes: torch.dtype,
    problem: Problem,
) -> dict[str, Tensor]:
    """A layer's parameters by canonical name, each of its dtype and shape.

    Args:
        parameters: by the names in `names`; others are not looked at.
        names: parameter name by canonical name.
        shapes: by canonical name: what must be there.
        codes: dtype of the weights; scales are bytes, biases any floats.
        problem: the layer.

    Returns:
        The parameters' own tensors; nothing is copied.

    Raises:
        CheckpointError: a tensor is missing, or has the wrong dtype or shape.
    """
    found = {}
    for canonical, shape in shapes.items():
        name = names[canonical]
        tensor = parameters.get(name)
        if tensor is None:
            remedy = f"The layer's parameters are {', '.join(sorted(parameters))}"
            raise CheckpointError(f"{name} is missing", remedy, problem.layer)
        expected = _FLOATS if canonical.endswith("_bias") else (torch.uint8 if "_scale" in canonical else codes,)
        if tensor.dtype not in expected:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
            rule = f"{name} is {tensor.dtype}, {problem.scheme.name.upper()} stores it as {words}"
            raise CheckpointError(rule, where=problem.layer)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}", where=problem.layer)
        found[canonical] = tensor.data
    return found


def refuse_unloaded(
    found: Mapping[str, Tensor], names: Mapping[str, str], codes: Mapping[str, int], problem: Problem
) -> None:
    """Raises where a matrix of an expert is as it was before anything was loaded.

    Args:
        found: from `checked`.
        names: parameter name by canonical name.
        codes: the byte that fills a matrix which was not loaded, by canonical name.
        problem: the layer, which says how gate and up share the rows of the first product.

    Raises:
        CheckpointError: it names the first such matrix, and says how many there are.
    """
    for canonical in ("w13", "w2"):
        data = found[canonical].view(torch.uint8)
        matrices = {"down" if canonical == "w2" else "up": data}
        if canonical == "w13" and problem.activation.gated:
            matrices = {"gate": data[:, ::2], "up": data[:, 1::2]}
            if not problem.activation.interleaved:
                matrices = dict(zip(matrices, data.chunk(2, dim=1), strict=True))
        # One row of each matrix first: it is as large as a layer.
        missing = [
            (expert, matrix)
            for matrix, rows in matrices.items()
            for expert in (rows[:, 0] == codes[canonical]).all(-1).nonzero().flatten().tolist()
            if bool((rows[expert] == codes[canonical]).all())
        ]
        if missing:
            expert, matrix = min(missing)
            rule = f"the {matrix} projection of local expert {expert} was never loaded"
            remedy = f"The checkpoint lacks it, or names it differently ({len(missing)} such in {names[canonical]})"
            raise CheckpointError(rule, remedy, problem.layer)


def refuse_no_numbers(found: Mapping[str, Tensor], names: Mapping[str, str], problem: Problem) -> None:
    """Raises where a scale or a bias is no number.

    Args:
        found: from `checked`.
        names: parameter name by canonical name.
        problem: the layer.

    Raises:
        CheckpointError: a scale is the NaN code 255, or a bias is NaN or infinite.
    """
    for canonical in ("w13_scale", "w2_scale"):
        scales = found[canonical]
        # The largest code first: counting needs a temporary of eight bytes a scale.
        bad = int((scales == E8M0_NAN).sum()) if int(scales.amax()) == E8M0_NAN else 0
        if bad:
            rule = f"{bad} of {scales.numel()} scales in {names[canonical]} are NaN (e8m0 code 255)"
            raise CheckpointError(rule, "The checkpoint is damaged, or a scale was never loaded", problem.layer)
    # The self-check would not tell: it puts biases of its own in the place of the checkpoint's.
    for canonical in ("w13_bias", "w2_bias"):
        if canonical in found:
            refuse_not_finite(found[canonical], "biases", names[canonical], problem)
