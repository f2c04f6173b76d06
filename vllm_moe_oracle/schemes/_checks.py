"""Checks of loaded parameters that every scheme shares."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import CheckpointError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of biases, and of the scales of integer codes."""

_CHUNK_ELEMENTS = 2**21
"""Values tested per pass. `isfinite` allocates temporaries, and the scales of one layer can take 100 MB."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype for messages: ``bfloat16`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def require_finite(values: Tensor, kind: str, name: str, problem: Problem) -> None:
    """Refuses a parameter with NaN or infinite values.

    Args:
        values: `[experts, ...]`, floating point.
        kind: what the values are, in the plural: ``scales`` or ``biases``.
        name: the parameter's name.
        problem: the layer.

    Raises:
        CheckpointError: a value is NaN or infinite; the message says how many are.
    """
    experts = max(1, _CHUNK_ELEMENTS // max(values[0].numel(), 1))
    chunks = (values[start : start + experts] for start in range(0, len(values), experts))
    bad = sum(int((~torch.isfinite(chunk)).sum()) for chunk in chunks)
    if bad:
        rule = f"{bad} of {values.numel()} {kind} in {name} are NaN or infinite"
        remedy = "The checkpoint is damaged, one was never loaded, or the model's dtype cannot represent the values"
        raise CheckpointError(rule, remedy, problem.layer)
