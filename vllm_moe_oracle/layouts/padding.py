"""Pads one expert's tensors to the sizes that a kernel takes.

Zero codes of float formats (e4m3, e2m1) are zero weights whatever the scale: padded rows produce zeros, and padded
columns contribute nothing. A zero code of an integer format is not a zero weight (it is minus the zero point), so there
the padded scales must be zero. In a gated w13 each half is padded, so gate and up remain halves of equal size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pad_columns(tensor: Tensor, columns: int, value: int = 0) -> Tensor:
    """Pads the last dimension with `value` to `columns`; returns the tensor itself if it has that size.

    Raises:
        ValueError: the tensor has more columns.
    """
    return _pad(tensor, tensor.dim() - 1, columns, value)


def pad_rows(tensor: Tensor, rows: int, halves: int = 1, value: int = 0) -> Tensor:
    """Pads the first dimension, or each half of it, with `value`.

    Args:
        tensor: `[halves * r, ...]`.
        rows: resulting rows of each half.
        halves: 2 for a gated w13, else 1.
        value: the padding; for one-byte dtypes, the byte.

    Returns:
        `[halves * rows, ...]`; the tensor itself if it has that size.

    Raises:
        ValueError: a half has more rows.
    """
    if tensor.shape[0] == halves * rows:
        return tensor
    return _pad(_halves(tensor, halves), 1, rows, value).flatten(0, 1)


def _halves(tensor: Tensor, halves: int) -> Tensor:
    return tensor.reshape(halves, tensor.shape[0] // halves, *tensor.shape[1:])


def _pad(tensor: Tensor, dimension: int, size: int, value: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    if missing < 0:
        raise ValueError(f"{tensor.shape[dimension]} do not fit into {size}")
    if missing == 0:
        return tensor
    # Not every device pads 8-bit floats: pad their bytes.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    padding = [0, 0] * (tensor.dim() - 1 - dimension) + [0, missing]
    return torch.nn.functional.pad(raw, padding, value=value).view(tensor.dtype)
