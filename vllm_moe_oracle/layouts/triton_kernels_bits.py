"""Spreads the bits of e2m1 codes as triton_kernels does on Hopper.

A mask and at most three shifts then decode codes to bfloat16. A word holds four bytes of two codes each, the low
nibbles in its lower half and the high nibbles in its upper half. Within a half, the first three codes have their sign,
exponent and mantissa where bfloat16 has them after a shift by 0, 3 and 6; the fourth fills the gaps. Bit positions of
(sign, high exponent bit, low exponent bit, mantissa bit): ``(15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10,
13)``.

All operations are on bytes. Temporaries take twice the input's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spread_bits(four: Tensor) -> Tensor:
    """Four bytes of two e2m1 codes each to the four bytes of their word, lowest first: uint8 `[..., 4]` to the
    same shape."""
    if four.is_meta:
        # Only the shape is needed; on meta tensors the operations below would take 20 ms.
        return torch.empty(four.shape, dtype=torch.uint8, device="meta")
    low = [byte & 15 for byte in four.unbind(-1)]
    halves = [_low_byte(low), _high_byte(low)]
    del low
    high = [byte >> 4 for byte in four.unbind(-1)]
    return torch.stack([*halves, _low_byte(high), _high_byte(high)], dim=-1)


def _low_byte(codes: list[Tensor]) -> Tensor:
    return ((codes[0] & 3) << 6) | ((codes[1] & 7) << 3) | (codes[2] & 7)


def _high_byte(codes: list[Tensor]) -> Tensor:
    first, second, third, fourth = codes
    result = ((first & 8) << 4) | ((first & 4) >> 2)
    result |= ((second & 8) << 1) | ((third & 8) >> 2)
    result |= ((fourth & 8) << 3) | ((fourth & 6) << 1)
    return result | ((fourth & 1) << 5)
