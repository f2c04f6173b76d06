"""Packs and unpacks 4-bit codes, two per byte with the low nibble first: the canonical order of this package."""

from __future__ import annotations

import torch
from torch import Tensor


def split_nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., K/2]`, low nibble first, to one code per byte: uint8 `[..., K]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def join_nibbles(codes: Tensor) -> Tensor:
    """Inverse of `split_nibbles`; K is even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def transpose_nibbles(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two codes each, transposed in pairs: the low nibbles of both, then the high nibbles of both; its own
    inverse.

    Args:
        first: uint8 of any shape, whose codes go to the low nibbles of the results.
        second: uint8 of the same shape, whose codes go to the high nibbles.
    """
    return (first & 15) | (second << 4), (first >> 4) | (second & 240)
