"""Real numbers of a layer that must be numbers: scales of integers, and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.problem import Problem

_CHECKED = 2**21
"""Numbers that are looked at together: the test makes copies, and a layer may have a hundred megabytes of scales."""


def refuse_not_finite(values: Tensor, what: str, name: str, problem: Problem) -> None:
    """Raises where a number of a parameter is none.

    Args:
        values: `[experts, ...]`, floating point.
        what: what the numbers are, in the plural.
        name: the parameter's.
        problem: the layer.

    Raises:
        CheckpointError: one is NaN or infinite; it says how many.
    """
    some = max(1, _CHECKED // max(values[0].numel(), 1))
    parts = (values[start : start + some] for start in range(0, len(values), some))
    bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
    if bad:
        rule = f"{bad} of {values.numel()} {what} in {name} are NaN or infinite"
        remedy = "The checkpoint is damaged, one was never loaded, or the model's dtype does not reach so far"
        raise CheckpointError(rule, remedy, problem.layer)
