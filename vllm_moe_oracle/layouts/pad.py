"""Zero-padding of one expert's tensors to the sizes of a kernel, and the way back.

Zero codes of floats (e4m3, e2m1) are zero weights: padded rows produce zeros and padded columns read nothing, whatever
their scale. Those of integers are none, a zero point away from it: there scales of zero do the same. A gated w13 is
padded half by half: gate and up stay halves of equal size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pad_columns(tensor: Tensor, columns: int, value: int = 0) -> Tensor:
    """Appends `value` to the last dimension until it has `columns`; the very tensor where it has them already.

    Raises:
        ValueError: there are more than `columns`.
    """
    return _pad(tensor, tensor.dim() - 1, columns, value)


def crop_columns(tensor: Tensor, columns: int) -> Tensor:
    """Inverse of `pad_columns`: the first `columns` of the last dimension."""
    return tensor[..., :columns]


def pad_rows(tensor: Tensor, rows: int, halves: int = 1, value: int = 0) -> Tensor:
    """Appends `value` to the first dimension, or to each of its halves.

    Args:
        tensor: `[halves * r, ...]`.
        rows: rows of each half afterwards.
        halves: 2 for a gated w13, else 1.
        value: what is appended; the byte itself for types of one byte.

    Returns:
        `[halves * rows, ...]`; the very tensor where nothing is to be added.

    Raises:
        ValueError: a half has more than `rows`.
    """
    if tensor.shape[0] == halves * rows:
        return tensor
    return _pad(_halves(tensor, halves), 1, rows, value).flatten(0, 1)


def crop_rows(tensor: Tensor, rows: int, halves: int = 1) -> Tensor:
    """Inverse of `pad_rows`: the first `rows` rows of each half, `[halves * rows, ...]`."""
    return _halves(tensor, halves)[:, :rows].flatten(0, 1)


def _halves(tensor: Tensor, halves: int) -> Tensor:
    return tensor.reshape(halves, tensor.shape[0] // halves, *tensor.shape[1:])


def _pad(tensor: Tensor, dimension: int, size: int, value: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    if missing < 0:
        raise ValueError(f"{tensor.shape[dimension]} do not fit into {size}")
    if missing == 0:
        return tensor
    # 8-bit floats know neither padding nor concatenation on every device: pad their bytes.
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    padding = [0, 0] * (tensor.dim() - 1 - dimension) + [0, missing]
    return torch.nn.functional.pad(raw, padding, value=value).view(tensor.dtype)
