"""Stacks and joins tensors of any dtype, as bytes: torch has no kernels for it for every 8-bit dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack` along a new first dimension, for any dtype: `[len(tensors), ...]`.

    Args:
        tensors: of one shape and dtype, with one dimension at least. Not modified.
    """
    return _numbers(torch.stack([_bytes(each) for each in tensors]), tensors[0].dtype)


def cat_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along the first dimension, for any dtype.

    Args:
        tensors: of one dtype, which differ in their first dimension only. Not modified.
    """
    return _numbers(torch.cat([_bytes(each) for each in tensors]), tensors[0].dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """The same values as uint8; a copy if they are not contiguous, which torch cannot view with another item size."""
    return tensor.contiguous().view(torch.uint8)


def _numbers(joined: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of a dtype; torch refuses to view no bytes as wider numbers."""
    return joined.view(dtype) if joined.shape[-1] else joined.new_empty(joined.shape, dtype=dtype)
